"""Training runs with optax: scaled ones, and what the inner transformation does alone on the clean steps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from axes import require
from axes_jax import gradscale_jax, jax, jnp

__all__ = [
    *("HOWS", "Run", "assert_close", "assert_same_bits", "drive", "first_params", "gradients", "optax", "plain_step"),
    *("run_all_steps", "run_clean_steps", "scaled_step"),
]

optax = require("optax")
SHAPES = {"weight": (3, 4), "bias": (4,)}
HOWS = ("eager", "jit", "scan")


class Run(NamedTuple):
    """What each step left: trees of NumPy arrays, whose leaves have the steps as their first axis."""

    params: Any
    updates: Any
    states: Any


def first_params(dtype=np.float32):
    """Return parameters as JAX arrays; one of them is a negative zero."""
    generator = np.random.default_rng(1)
    params = {name: generator.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    params["bias"][0] = -0.0
    return {name: jnp.asarray(array) for name, array in params.items()}


def gradients(steps: int, bad: frozenset[int]) -> dict[str, np.ndarray]:
    """Return the gradients of each step, with one inf or NaN in the bad ones."""
    generator = np.random.default_rng(2)
    made = {name: generator.normal(size=(steps, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    for step in bad:
        made["weight"][step, 1, 2] = np.nan if step % 2 else np.inf
    return made


def _numpy(leaf) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@functools.cache
def _compiled(step):
    """Return what drive calls for a step: one iteration, the same jitted, and a jitted loop."""

    def carried(carry, grads):
        params, updates, state = step(*carry, grads)
        return (params, state), (params, updates, state)

    return carried, jax.jit(carried), jax.jit(lambda carry, grads: jax.lax.scan(carried, carry, grads))


def drive(step, params, state, grads, how: str) -> Run:
    """Run ``step(params, state, gradients) -> (params, updates, state)`` over stacked gradients, in one of HOWS."""
    stacked = jax.tree.map(jnp.asarray, grads)
    carried, jitted, scanned = _compiled(step)
    if how == "scan":
        _, left = scanned((params, state), stacked)
        return Run(*jax.tree.map(_numpy, left))
    called = jitted if how == "jit" else carried
    carry, lefts = (params, state), []
    for index in range(len(jax.tree.leaves(grads)[0])):
        carry, after = called(carry, jax.tree.map(lambda leaf, index=index: leaf[index], stacked))
        lefts.append(jax.tree.map(_numpy, after))
    return Run(*jax.tree.map(lambda *leaves: np.stack(leaves), *lefts))


def scaled_step(tx):
    """Return a step that differentiates a scaled loss, whose unscaled gradients are the ones given."""

    def step(params, state, grads):
        def loss(params):
            dots = jax.tree.map(lambda p, g: jnp.sum(p.astype(jnp.float32) * g.astype(jnp.float32)), params, grads)
            return gradscale_jax.scale(sum(jax.tree.leaves(dots)), gradscale_jax.scale_state(state))

        return plain_step(tx)(params, state, jax.grad(loss)(params))

    return step


def plain_step(tx):
    """Return a step of a transformation on the gradients as they are."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), updates, state

    return step


def run_all_steps(step, tx, how: str, steps: int, bad: frozenset[int]) -> Run:
    """Run a step over the gradients of all steps."""
    params = first_params()
    return drive(step, params, tx.init(params), gradients(steps, bad), how)


def run_clean_steps(step, tx, how: str, steps: int, bad: frozenset[int]) -> Run:
    """Run a step over the gradients of the clean steps alone; the bad ones then repeat what was before them."""
    params = first_params()
    state = tx.init(params)
    clean = [index for index in range(steps) if index not in bad]
    # As many as there are of all, so that one compiled loop serves both; the last ones are not looked at.
    chosen = (clean * steps)[:steps] if how == "scan" else clean
    grads = jax.tree.map(lambda leaf: leaf[chosen], gradients(steps, bad))
    run = drive(step, params, state, grads, how)
    taken = np.cumsum([index not in bad for index in range(steps)])

    def spread(first, leaves):
        return np.concatenate([_numpy(first)[None], leaves])[taken]

    updates = jax.tree.map(lambda leaves: leaves[taken - 1].copy(), run.updates)
    for leaves in jax.tree.leaves(updates):
        leaves[sorted(bad)] = -0.0
    return Run(jax.tree.map(spread, params, run.params), updates, jax.tree.map(spread, state, run.states))


def assert_same_bits(left, right):
    """Compare trees leaf by leaf: structure, dtype, shape, and every bit but the payload of a NaN."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        where = jax.tree_util.keystr(path)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        if a.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b), err_msg=where)
        np.testing.assert_array_equal(a, b, err_msg=where)


def assert_close(left, right):
    """Compare trees up to float32's rounding, which a compiler's fused multiply-adds change; integers exactly."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=2e-5 if a.dtype.kind == "f" else 0, atol=2e-7)
