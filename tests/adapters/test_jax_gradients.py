"""value_and_grad: what it refuses, in words that say what to do, and what drawn programs do not show."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp

import gradscale
from gradscale import CallOrderError, DynamicScale, InvalidTypeError, InvalidValueError, ScaleState
from gradscale.testing import run_ranks

pytestmark = pytest.mark.jax

POLICY = DynamicScale()


def first(policy=POLICY):
    return policy.init(jnp.zeros(()))


def differentiated(fun, *given, **options):
    return gradscale_jax.value_and_grad(fun, POLICY, **options)(first(), *(given or [jnp.ones(2)]))


def by_leaf(leaf):
    return differentiated(lambda a, b: jnp.sum(b["w"][0]) + a, 0, {"w": [jnp.ones(2), leaf]}, argnums=-1)


def by_batch_norm(**options):
    nnx = importlib.import_module(require("flax").__name__ + ".nnx")
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    return differentiated(lambda norm: norm(jnp.ones((6, 8))).sum(), norm, **options)


def by_module(transform=lambda run: run):
    eqx = require("equinox")
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    return transform(gradscale_jax.value_and_grad(lambda norm: norm.weight.sum(), POLICY))(first(), norm)


GROUPED = "GroupAgreement was called in a function that jax traces"
NO_LEAF = r"argument 1.* got %s at \['w'\]\[1\].*eqx\.partition.*nnx\.split"
NO_MODULE = r"argument 0.* got 'batch' at \.axis_name: say filter=eqx\.is_inexact_array.*params, static = eqx.partition"
CHANGING = r"argument 0.*BatchStat.*graphdef, params, others = nnx\.split"
VALUE, TYPE = InvalidValueError, InvalidTypeError
REFUSED = {
    "vector": (lambda: differentiated(lambda w: w), VALUE, r"one of shape \(2,\): take its mean or sum"),
    "two": (lambda: differentiated(lambda w: (w.sum(), 1)), TYPE, "say has_aux=True"),
    "text": (lambda: differentiated(lambda _: "text"), TYPE, "scalar loss, got 'text'"),
    "bool": (lambda: differentiated(lambda w: w.sum() > 0), TYPE, "real floating loss, got bool"),
    "complex": (lambda: differentiated(lambda w: w.sum() + 1j), TYPE, "got complex64"),
    "integer": (lambda: jax.jit(differentiated, static_argnums=0)(lambda w: w.sum().astype(int)), TYPE, "got int32"),
    "filter": (lambda: differentiated(len, filter=True), TYPE, r"filter must be a function of a leaf.*got True"),
    "no pair": (lambda: differentiated(jnp.sum, has_aux=True), TYPE, r"a pair \(loss, aux\)"),
    "no state": (lambda: RUN(jnp.ones(2), first()), TYPE, "state must be a ScaleState"),
    "leaf text": (lambda: by_leaf("text"), TYPE, NO_LEAF % "'text'"),
    "leaf int": (lambda: by_leaf(3), TYPE, NO_LEAF % "3"),
    "leaf int32": (lambda: by_leaf(np.zeros(2, np.int32)), TYPE, NO_LEAF % "int32"),
    "equinox": (by_module, TYPE, NO_MODULE),
    "equinox, compiled": (lambda: by_module(require("equinox").filter_jit), TYPE, NO_MODULE),
    "nnx": (by_batch_norm, TYPE, CHANGING),
    "nnx, filtered": (lambda: by_batch_norm(filter=lambda x: jnp.issubdtype(x.dtype, jnp.inexact)), TYPE, CHANGING),
    "group": (lambda: run_ranks(1, lambda group: jax.jit(lambda n: in_group(group, n))(jnp.int32(0))), TYPE, GROUPED),
    "structures": (lambda: gradscale_jax.select(jnp.asarray(True), {"a": 1.0}, {"b": 1.0}), VALUE, "one structure"),
}
RUN = gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY)


def in_group(group, nonfinite):
    gradscale.GroupAgreement(group, POLICY)(nonfinite, first())


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_differentiated_or_agreed_on_is_refused_with_what_to_do(what: str):
    call, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("policy", [(0, 1), DynamicScale, None, 2.0**16], ids=["tuple", "class", "none", "number"])
def test_what_is_no_policy_is_refused_at_once(policy):
    optax = require("optax")
    state = first()
    calls = [
        lambda: gradscale_jax.value_and_grad(lambda w: w.sum(), policy),
        lambda: gradscale_jax.agree(jnp.zeros((), dtype="int32"), state, policy),
        lambda: gradscale_jax.scaled(optax.sgd(1.0), policy),
        lambda: run_ranks(1, lambda group: gradscale.GroupAgreement(group, policy)),
    ]
    for call in calls:
        with pytest.raises(InvalidTypeError, match="policy must be an instance of a policy"):
            call()


# Verdicts.


def test_a_verdict_is_no_python_bool_and_cannot_be_checked_while_it_is_traced():
    run = RUN
    state, w = first(), jnp.ones(2)

    def branch(w):
        return w if run(state, w).verdict else -w

    for function in (branch, jax.jit(branch)):
        with pytest.raises(InvalidTypeError, match=r"inside jit use gradscale_jax\.select\(verdict\.taken, new, old"):
            function(w)
    with pytest.raises(CallOrderError, match="outside of jit"):
        jax.jit(lambda w: run(state, w).verdict.check(POLICY))(w)
    assert bool(run(state, w).verdict.finite)


@pytest.mark.tier("ranks")
def test_nan_debugging_lets_a_compiled_skip_pass():
    @jax.jit
    def step(state: ScaleState, w, x):
        scaled = gradscale_jax.value_and_grad(lambda w: jnp.sum(w * x), POLICY)(state, w)
        return scaled.state, gradscale_jax.select(scaled.verdict.finite, w - scaled.grads, w)

    with jax.debug_nans(True):
        state, w = step(first(), jnp.ones(2), jnp.asarray([jnp.inf, 1.0]))
    assert (float(state.scale), w.tolist()) == (2.0**15, [1.0, 1.0])


@pytest.mark.tier("ranks")
def test_trees_from_a_checkpoint_are_taken():
    state = first(DynamicScale(init_scale=4.0))
    for function in (gradscale_jax.unscale, jax.jit(gradscale_jax.unscale)):
        unscaled, nonfinite = function({"a": np.ones(2, np.float32), "b": jnp.ones(1)}, state)
        assert (unscaled["a"].tolist(), unscaled["b"].tolist(), int(nonfinite)) == ([0.25, 0.25], [0.25], 0)
    assert gradscale_jax.scale(2.0, state).item() == 8.0
    chosen = gradscale_jax.select(jnp.asarray(False), {"a": jnp.ones(1)}, {"a": np.zeros(1, np.float32)})
    assert isinstance(chosen["a"], jax.Array)
    assert chosen["a"].tolist() == [0.0]
