"""value_and_grad: what it refuses, in words that say what to do, and what drawn programs do not show."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp

import gradscale
from gradscale import CallOrderError, DynamicScale, InvalidTypeError, InvalidValueError, ScaleState

pytestmark = pytest.mark.jax

POLICY = DynamicScale()


def first(policy=POLICY):
    return policy.init(jnp.zeros(()))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("parameters", [{}, None, {"a": None}], ids=repr)
def test_parameters_without_leaves_are_clean(parameters):
    policy = DynamicScale(growth_interval=1)
    scaled = jax.jit(gradscale_jax.value_and_grad(lambda _: jnp.float32(2.0), policy))(first(policy), parameters)
    assert scaled.grads == parameters
    assert (float(scaled.value), int(scaled.verdict.nonfinite), float(scaled.state.scale)) == (2.0, 0, 2.0**17)


LOSSES = {
    "vector": (lambda w: w, InvalidValueError, r"one of shape \(2,\): take its mean or sum"),
    "pair": (lambda w: (w.sum(), 1), InvalidTypeError, "say has_aux=True"),
    "text": (lambda _: "text", InvalidTypeError, "scalar loss, got 'text'"),
    "bool": (lambda w: w.sum() > 0, InvalidTypeError, "real floating loss, got bool"),
    "complex": (lambda w: w.sum() + 1j, InvalidTypeError, "got complex64"),
    "integer": (lambda w: w.sum().astype(int), InvalidTypeError, "got int32"),
}


@pytest.mark.parametrize(("fun", "error", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_none_is_refused(fun, error: type[Exception], message: str):
    run = gradscale_jax.value_and_grad(fun, POLICY)
    for step in (run, jax.jit(run)):
        with pytest.raises(error, match=message):
            step(first(), jnp.ones(2))


def test_a_pair_or_filter_that_is_none_and_a_state_in_the_wrong_place_are_refused():
    with pytest.raises(InvalidTypeError, match=r"filter must be a function of a leaf.*got True"):
        gradscale_jax.value_and_grad(lambda w: w, POLICY, filter=True)
    with pytest.raises(InvalidTypeError, match=r"a pair \(loss, aux\)"):
        gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY, has_aux=True)(first(), jnp.ones(2))
    with pytest.raises(InvalidTypeError, match="state must be a ScaleState"):
        gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY)(jnp.ones(2), first())


@pytest.mark.parametrize("policy", [(0, 1), DynamicScale, None, 2.0**16], ids=["tuple", "class", "none", "number"])
def test_what_is_no_policy_is_refused_at_once(policy):
    optax = require("optax")
    state = first()
    calls = [
        lambda: gradscale_jax.value_and_grad(lambda w: w.sum(), policy),
        lambda: gradscale_jax.agree(jnp.zeros((), dtype="int32"), state, policy),
        lambda: gradscale_jax.scaled(optax.sgd(1.0), policy),
        lambda: gradscale.testing.run_ranks(1, lambda group: gradscale.GroupAgreement(group, policy)),
    ]
    for call in calls:
        with pytest.raises(InvalidTypeError, match="policy must be an instance of a policy"):
            call()


@pytest.mark.parametrize(
    ("leaf", "got"), [("text", "'text'"), (3, "3"), (np.zeros(2, np.int32), "int32")], ids=["text", "int", "int32"]
)
def test_leaves_that_have_no_gradient_are_refused_by_name_and_place(leaf, got: str):
    run = gradscale_jax.value_and_grad(lambda a, b: jnp.sum(b["w"][0]) + a, POLICY, -1)
    with pytest.raises(InvalidTypeError, match=rf"argument 1.* got {got} at \['w'\]\[1\].*eqx\.partition.*nnx\.split"):
        run(first(), 0, {"w": [jnp.ones(2), leaf]})


@pytest.mark.tier("ranks")
def test_a_module_of_equinox_without_a_filter_is_told_what_to_do():
    eqx = require("equinox")
    norm, _ = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
    run = gradscale_jax.value_and_grad(lambda norm: norm.weight.sum(), POLICY)
    told = r"argument 0.* got 'batch' at \.axis_name: say filter=eqx\.is_inexact_array"
    for step in (run, eqx.filter_jit(run)):
        with pytest.raises(InvalidTypeError, match=f"{told}.*params, static = eqx.partition"):
            step(first(), norm)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("floating", [None, lambda leaf: jnp.issubdtype(leaf.dtype, jnp.inexact)], ids=["", "filtered"])
def test_a_module_of_nnx_that_changes_is_told_what_to_do(floating):
    nnx = importlib.import_module(require("flax").__name__ + ".nnx")
    run = gradscale_jax.value_and_grad(lambda norm: norm(jnp.ones((6, 8))).sum(), POLICY, filter=floating)
    for step in (run, jax.jit(run)):
        with pytest.raises(InvalidTypeError, match=r"argument 0.*BatchStat.*graphdef, params, others = nnx\.split"):
            step(first(), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))


def test_trees_of_two_structures_are_not_chosen_between():
    with pytest.raises(InvalidValueError, match="one structure"):
        gradscale_jax.select(jnp.asarray(True), {"a": jnp.ones(1)}, {"b": jnp.ones(1)})


# Verdicts.


def test_a_verdict_is_no_python_bool_and_cannot_be_checked_while_it_is_traced():
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), POLICY)
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


@pytest.mark.tier("ranks")
def test_a_group_agreement_in_a_function_that_is_traced_is_refused():
    def call(group, nonfinite):
        gradscale.GroupAgreement(group, POLICY)(nonfinite, first())

    with pytest.raises(InvalidTypeError, match="GroupAgreement was called in a function that jax traces"):
        gradscale.testing.run_ranks(1, lambda group: jax.jit(lambda n: call(group, n))(jnp.zeros((), "int32")))
