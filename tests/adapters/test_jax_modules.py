"""value_and_grad by modules of equinox and flax nnx: what is trained is parted from the rest, or said to be needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp

from gradscale import DynamicScale, InvalidTypeError

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = DynamicScale(init_scale=2.0**10)
FIRST = POLICY.init(jnp.zeros(()))


@pytest.fixture
def eqx():
    """Return equinox."""
    return require("equinox")


@pytest.fixture
def nnx():
    """Return flax's nnx."""
    require("flax")
    from flax import nnx

    return nnx


def same(ones, others) -> bool:
    """Tell whether two trees have one structure and equal leaves."""
    pairs = zip(jax.tree.leaves(ones), jax.tree.leaves(others), strict=True)
    return jax.tree.structure(ones) == jax.tree.structure(others) and all(bool((a == b).all()) for a, b in pairs)


@pytest.fixture
def equinox_model(eqx):
    """Return a module of equinox with BatchNorm and Dropout, and its state."""

    class Network(eqx.Module):
        first: Any
        norm: Any
        dropout: Any
        activation: Any

        def __init__(self, key):
            self.first = eqx.nn.Linear(4, 8, key=key)
            self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
            self.dropout = eqx.nn.Dropout(0.5)
            self.activation = jax.nn.relu

        def __call__(self, x, state, key):
            x, state = self.norm(self.first(x), state)
            return self.dropout(self.activation(x), key=key), state

    return eqx.nn.make_with_state(Network)(jax.random.key(0))


def equinox_loss(model, state, x, key):
    """Return a loss, and the state of BatchNorm."""
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    out, state = run(x, state, jax.random.split(key, len(x)))
    return jnp.mean(jnp.square(out)), state


def test_a_module_of_equinox_goes_in_with_a_filter(eqx, equinox_model):
    given = (*equinox_model, jax.random.normal(jax.random.key(1), (6, 4)), jax.random.key(2))
    differentiate = gradscale_jax.value_and_grad(equinox_loss, POLICY, has_aux=True, filter=eqx.is_inexact_array)
    run = eqx.filter_jit(differentiate)
    scaled = run(FIRST, *given)
    wanted, new_state = eqx.filter_jit(eqx.filter_grad(equinox_loss, has_aux=True))(*given)
    # Scaled by a power of two and divided by it: the bits of no scale.
    assert same(scaled.grads, wanted)
    assert (scaled.grads.activation, scaled.grads.first.in_features) == (None, 4)
    assert same(eqx.filter(scaled.value[1], eqx.is_array), eqx.filter(new_state, eqx.is_array))
    assert bool(scaled.verdict.finite)
    bad = run(scaled.state, *given[:2], given[2] * math.inf, given[3])
    assert (bool(bad.verdict.finite), float(bad.state.scale)) == (False, 2.0**9)


def test_a_module_of_equinox_without_a_filter_is_told_what_to_do(eqx, equinox_model):
    model, *rest = (*equinox_model, jnp.ones((6, 4)), jax.random.key(2))
    run = gradscale_jax.value_and_grad(equinox_loss, POLICY, has_aux=True)
    told = r"argument 0.* got 'batch' at \.norm\.axis_name: say filter=eqx\.is_inexact_array"
    for step in (run, eqx.filter_jit(run)):
        with pytest.raises(InvalidTypeError, match=f"{told}.*params, static = eqx.partition"):
            step(FIRST, model, *rest)


def test_a_filter_parts_each_argument_and_leaves_none_for_what_is_not_trained():
    def loss(a, b, c):
        assert (a["name"], b[1], c) == ("a", 3, "untouched")
        return jnp.sum(a["w"] * b[0])

    def is_trained(leaf) -> bool:
        return isinstance(leaf, jax.Array)

    run = gradscale_jax.value_and_grad(loss, POLICY, argnums=(0, -2), filter=is_trained)
    arguments = {"w": jnp.asarray([2.0]), "name": "a", "absent": None}, [jnp.asarray([5.0]), 3], "untouched"
    grads = run(FIRST, *arguments).grads
    assert (grads[0]["w"].tolist(), grads[1][0].tolist()) == ([5.0], [2.0])
    assert (grads[0]["name"], grads[0]["absent"], grads[1][1]) == (None, None, None)


@pytest.fixture
def nnx_model(nnx):
    """Return a module of nnx with BatchNorm and Dropout."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.first(x)))

    return Network(nnx.Rngs(0))


def nnx_loss(model, x):
    return jnp.mean(jnp.square(model(x)))


@pytest.mark.parametrize(("compiled", "filtered"), [(False, False), (True, True)], ids=["eager", "jit and filter"])
def test_a_module_of_nnx_that_changes_is_told_what_to_do(nnx_model, compiled: bool, filtered: bool):
    def is_floating(leaf) -> bool:
        return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))

    run = gradscale_jax.value_and_grad(nnx_loss, POLICY, filter=is_floating if filtered else None)
    step = jax.jit(run) if compiled else run
    with pytest.raises(InvalidTypeError, match=r"argument 0.*BatchStat.*graphdef, params, others = nnx\.split\(model"):
        step(FIRST, nnx_model, jnp.ones((6, 4)))


def test_a_module_of_nnx_that_holds_parameters_alone_goes_in(nnx):
    run = gradscale_jax.value_and_grad(lambda model, x: jnp.sum(model(x)), POLICY)
    scaled = run(FIRST, nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 4)))
    assert scaled.grads.bias[...].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("leaf", "got"), [("text", "'text'"), (3, "3"), (np.zeros(2, np.int32), "int32")], ids=["text", "int", "int32"]
)
def test_other_leaves_are_refused_by_name_and_place(leaf, got: str):
    run = gradscale_jax.value_and_grad(lambda a, b: jnp.sum(a["w"][0]) + b, POLICY)
    with pytest.raises(InvalidTypeError, match=rf"got {got} at \['w'\]\[1\].*eqx\.partition.*nnx\.split"):
        run(FIRST, {"w": [jnp.ones(2), leaf]}, 0)


def test_a_filter_must_be_a_function():
    with pytest.raises(InvalidTypeError, match=r"filter must be a function of a leaf.*got True"):
        gradscale_jax.value_and_grad(lambda w: w, POLICY, filter=True)
