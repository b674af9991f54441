"""value_and_grad: values, gradients and states in every transformation, states as users bring them, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes import require
from axes_jax import COUNT, P, gradscale_jax, jax, jnp, mesh, x64_mode

import gradscale
from gradscale import (
    CallOrderError,
    DynamicScale,
    InvalidTypeError,
    InvalidValueError,
    ScaleState,
    ScaleUnderflowError,
)

pytestmark = pytest.mark.jax

POLICY = DynamicScale()


def squares(parameters, x):
    """Return a loss whose gradient is 2 * w * x, and nan where x is inf."""
    return jnp.sum(jnp.square(parameters["w"]) * x)


def first(policy=POLICY):
    return policy.init(jnp.zeros(()))


def test_several_arguments_auxiliary_data_and_keywords():
    def loss(a, b, *, factor):
        return factor * jnp.sum(a * b), {"seen": b + 1}

    run = jax.jit(gradscale_jax.value_and_grad(loss, POLICY, argnums=(0, 1), has_aux=True))
    value, grads, verdict, _ = run(first(), jnp.asarray([2.0]), jnp.asarray([3.0]), factor=5.0)
    assert (float(value[0]), value[1]["seen"].tolist()) == (30.0, [4.0])
    assert [grad.tolist() for grad in grads] == [[15.0], [10.0]]
    assert int(verdict.nonfinite) == 0


@pytest.mark.parametrize(
    "argnums",
    [True, np.int64(1), {1}, (np.int64(1),), np.asarray([-1]), iter([1])],
    ids=lambda each: type(each).__name__,
)
def test_the_arguments_may_be_chosen_by_all_that_jax_takes(argnums):
    run = gradscale_jax.value_and_grad(lambda a, b: jnp.sum(a * b), POLICY, argnums)
    assert np.ravel(run(first(), jnp.asarray([2.0]), jnp.asarray([3.0])).grads).tolist() == [2.0]
    # Looked at as an argument that is differentiated by.
    with pytest.raises(InvalidTypeError, match="by argument 1, whose leaves must be floating"):
        run(first(), jnp.asarray([2.0]), jnp.asarray([3]))


# The scale grows to what the dtype of the loss can hold: in float16 to the largest power of two, at the first step.
@pytest.mark.parametrize(
    ("dtype", "scale", "after"),
    [("float16", 2.0**16, 2.0**15), ("bfloat16", 2.0**100, 2.0**101), ("float32", 2.0**100, 2.0**101)],
)
def test_the_scale_fits_into_the_dtype_of_the_loss(dtype: str, scale: float, after: float):
    policy = DynamicScale(init_scale=scale, growth_interval=1)
    run = jax.jit(gradscale_jax.value_and_grad(squares, policy))
    state, parameters = first(policy), {"w": jnp.asarray([0.5], dtype=dtype)}
    for growth in range(3):
        scaled = run(state, parameters, jnp.asarray([0.25], dtype=dtype))
        state = scaled.state
        assert bool(scaled.verdict.finite)
        assert (scaled.value.dtype, float(scaled.value)) == (dtype, 0.0625)
        assert scaled.grads["w"].tolist() == [0.25]
        assert float(state.scale) == after * (1 if dtype == "float16" else 2.0**growth)


def test_integer_parameters_are_refused_or_passed_by():
    parameters = {"w": jnp.asarray([2.0]), "n": jnp.asarray([3])}

    def loss(parameters):
        return jnp.sum(parameters["w"] * parameters["n"])

    with pytest.raises(TypeError, match="int32"):
        gradscale_jax.value_and_grad(loss, POLICY)(first(), parameters)
    scaled = gradscale_jax.value_and_grad(loss, POLICY, allow_int=True)(first(), parameters)
    assert scaled.grads["w"].tolist() == [3.0]
    assert scaled.grads["n"].dtype == jax.dtypes.float0
    assert bool(scaled.verdict.finite)


def test_any_pytree_that_jax_knows_can_be_differentiated():
    @jax.tree_util.register_pytree_node_class
    class Layer:
        def __init__(self, w, name: str):
            self.w, self.name = w, name

        def tree_flatten(self):
            return (self.w,), self.name

        @classmethod
        def tree_unflatten(cls, name: str, children):
            return cls(*children, name)

    layer = Layer(jnp.asarray([2.0]), "first")
    scaled = jax.jit(gradscale_jax.value_and_grad(lambda layer: jnp.sum(layer.w**2), POLICY))(first(), layer)
    assert (scaled.grads.name, scaled.grads.w.tolist()) == ("first", [4.0])
    chosen = gradscale_jax.select(scaled.verdict.finite, scaled.grads, layer)
    assert chosen.w.tolist() == [4.0]
    with pytest.raises(InvalidValueError, match="one structure"):
        gradscale_jax.select(scaled.verdict.finite, scaled.grads, Layer(jnp.zeros(1), "second"))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("parameters", [{}, None, {"a": None}], ids=repr)
def test_parameters_without_leaves_are_clean(parameters):
    policy = DynamicScale(growth_interval=1)
    scaled = jax.jit(gradscale_jax.value_and_grad(lambda _: jnp.float32(2.0), policy))(first(policy), parameters)
    assert scaled.grads == parameters
    assert (float(scaled.value), int(scaled.verdict.nonfinite), float(scaled.state.scale)) == (2.0, 0, 2.0**17)


@pytest.mark.parametrize(("check_vma", "value"), [(True, math.inf), (False, math.nan)], ids=["vma", "no-vma"])
def test_all_devices_of_an_axis_skip_together(check_vma: bool, value: float):
    def local_loss(parameters, x):
        return jax.lax.pmean(squares(parameters, x), "data")

    def mean(grads):
        # With varying manual axes shard_map itself sums the gradients of what is replicated; without, each device has
        # the gradient of its own batch.
        return grads if check_vma else jax.lax.pmean(grads, "data")

    def step(state, parameters, x):
        scaled = gradscale_jax.value_and_grad(local_loss, POLICY, axis_name="data", reduce=mean)(state, parameters, x)
        updated = jax.tree.map(lambda w, g: w - 0.5 * g, parameters, scaled.grads)
        return scaled, gradscale_jax.select(scaled.verdict.finite, updated, parameters)

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data"), check_vma=check_vma, **specs))
    for bad_device in (None, *range(COUNT)):
        batch = np.ones((COUNT, 1), dtype=np.float32)
        batch[[] if bad_device is None else bad_device] = value
        scaled, new = mapped(first(), {"w": jnp.asarray([1.0])}, batch)
        found = (0, 2.0**16, 0.0) if bad_device is None else (1, 2.0**15, 1.0)
        for array, expected in zip((scaled.verdict.nonfinite, scaled.state.scale, new["w"]), found, strict=True):
            assert [shard.data.item() for shard in array.addressable_shards] == [expected] * COUNT
        assert not bool(scaled.verdict.desynced)


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


def test_a_pair_that_is_none_and_a_state_in_the_wrong_place_are_refused():
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


def test_a_minimum_that_must_be_raised_is_raised_on_the_host():
    policy = DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    run = jax.jit(gradscale_jax.value_and_grad(squares, policy))
    state, found = first(policy), []
    for x in (math.nan, 1.0, math.nan, 1.0):
        scaled = run(state, {"w": jnp.ones(1)}, jnp.asarray([x]))
        state = scaled.state
        found.append(bool(scaled.verdict.at_min_scale))
        if found[-1]:
            with pytest.raises(ScaleUnderflowError, match=r"although the scale has fallen to the minimum of Dynamic"):
                scaled.verdict.check(policy)
        else:
            scaled.verdict.check(policy)
    assert found == [False, False, True, False]


@pytest.mark.tier("ranks")
def test_nan_debugging_lets_a_compiled_skip_pass():
    @jax.jit
    def step(state: ScaleState, w, x):
        scaled = gradscale_jax.value_and_grad(lambda w: jnp.sum(w * x), POLICY)(state, w)
        return scaled.state, gradscale_jax.select(scaled.verdict.finite, w - scaled.grads, w)

    with jax.debug_nans(True):
        state, w = step(first(), jnp.ones(2), jnp.asarray([jnp.inf, 1.0]))
    assert (float(state.scale), w.tolist()) == (2.0**15, [1.0, 1.0])


# States as users bring them: from checkpoints, as numbers, in other precisions.

FOREIGN = [
    pytest.param(ScaleState(1024.0, 0, 0, 0), id="numbers"),
    pytest.param(ScaleState(np.float64(1024.0), *[np.int64(0)] * 3), id="wide-numpy-scalars"),
    pytest.param(ScaleState(np.asarray(1024.0, np.float32), *[np.asarray(0, np.int32)] * 3), id="numpy-arrays"),
    pytest.param("weak", id="weak"),
]


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("state", FOREIGN)
@pytest.mark.parametrize("how", ["eager", "jit", "closed-over"])
def test_a_state_of_other_numbers_becomes_arrays_of_its_dtypes(state, how: str, x64: bool):
    policy = DynamicScale(growth_interval=1)
    with x64_mode(x64):
        if state == "weak":
            state = ScaleState(jnp.asarray(1024.0), *[jnp.asarray(0)] * 3)
        run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy)
        w = jnp.ones(2, dtype=jnp.float32)
        step = {"eager": run, "jit": jax.jit(run), "closed-over": jax.jit(lambda _, w, held=state: run(held, w))}[how]
        for scaled in (step(state, w), step(step(state, w).state, w)):
            assert [str(field.dtype) for field in scaled.state] == ["float32", "int32", "int32", "int32"]
            assert not any(field.weak_type for field in scaled.state)
            assert scaled.grads.tolist() == [2.0, 2.0]
        assert float(step(state, w).state.scale) == 2048.0


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
