"""States, policies and verdicts as users bring them: from checkpoints, as numbers, stacked, in other precisions."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from jax_devices import COUNT, require_mesh, x64_mode

import gradscale
from gradscale import CallOrderError, DynamicScale, InvalidTypeError, ScaleDesyncError, ScaleState

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]


FOREIGN = [
    pytest.param(ScaleState(1024.0, 0, 0, 0), id="numbers"),
    pytest.param(ScaleState(np.float32(1024.0), *[np.int32(0)] * 3), id="numpy-scalars"),
    pytest.param(ScaleState(np.float64(1024.0), *[np.int64(0)] * 3), id="wide-numpy-scalars"),
    pytest.param(ScaleState(np.asarray(1024.0, np.float32), *[np.asarray(0, np.int32)] * 3), id="numpy-arrays"),
    pytest.param("weak", id="weak"),
]


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("state", FOREIGN)
@pytest.mark.parametrize("how", ["eager", "jit", "closed-over"])
def test_a_state_of_other_numbers_becomes_arrays_of_its_dtypes(
    jax: Any, gradscale_jax: Any, state: Any, how: str, x64: bool
) -> None:
    jnp, policy = jax.numpy, DynamicScale(growth_interval=1)
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


def test_trees_from_a_checkpoint_are_taken(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    state = DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    for function in (gradscale_jax.unscale, jax.jit(gradscale_jax.unscale)):
        unscaled, nonfinite = function({"a": np.ones(2, np.float32), "b": jnp.ones(1)}, state)
        assert (unscaled["a"].tolist(), unscaled["b"].tolist(), int(nonfinite)) == ([0.25, 0.25], [0.25], 0)
    assert gradscale_jax.scale(2.0, state).item() == 8.0
    chosen = gradscale_jax.select(jnp.asarray(False), {"a": jnp.ones(1)}, {"a": np.zeros(1, np.float32)})
    assert isinstance(chosen["a"], jax.Array)
    assert chosen["a"].tolist() == [0.0]
    none = np.zeros(2, dtype=jax.dtypes.float0)
    assert gradscale_jax.select(jnp.asarray(True), [none], [none])[0] is none


@pytest.mark.parametrize("policy", [(0, 1), DynamicScale, None, 2.0**16], ids=["tuple", "class", "none", "number"])
def test_what_is_no_policy_is_refused_at_once(jax: Any, gradscale_jax: Any, policy: Any) -> None:
    state = DynamicScale().init(jax.numpy.zeros(()))
    calls = [
        lambda: gradscale_jax.value_and_grad(lambda w: w.sum(), policy),
        lambda: gradscale_jax.agree(jax.numpy.zeros((), dtype="int32"), state, policy),
        lambda: gradscale.testing.run_ranks(1, lambda group: gradscale.GroupAgreement(group, policy)),
    ]
    for call in calls:
        with pytest.raises(InvalidTypeError, match="policy must be an instance of a policy"):
            call()


@pytest.mark.parametrize("mapped", ["vmap", "pmap", "scan"])
def test_stacked_verdicts_are_checked(jax: Any, gradscale_jax: Any, mapped: str) -> None:
    jnp, policy = jax.numpy, DynamicScale()

    def verdict(tracker: Any) -> Any:
        state = policy.init(jnp.zeros(()))._replace(growth_tracker=tracker)
        return gradscale_jax.agree(jnp.zeros((), jnp.int32), state, policy, None if mapped == "scan" else "ranks")

    trackers = jnp.asarray([3, 5, 3, 4], dtype=jnp.int32)
    if mapped == "scan":
        _, verdicts = jax.lax.scan(lambda carry, tracker: (carry, verdict(tracker)), None, trackers)
        verdicts.check(policy)
        # As a scan over steps that agreed gives them.
        verdicts = verdicts._replace(
            desynced=jnp.asarray([False, True, False, False]), highest=verdicts.highest.at[1, 1].set(9)
        )
        expected = "growth_tracker from 5 to 9"
    else:
        verdicts = (jax.vmap if mapped == "vmap" else jax.pmap)(verdict, axis_name="ranks")(trackers)
        expected = "growth_tracker from 3 to 5"
    with pytest.raises(ScaleDesyncError, match=expected):
        verdicts.check(policy)


def test_a_verdict_cannot_be_checked_while_it_is_traced(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), policy)
    state = policy.init(jax.numpy.zeros(()))
    with pytest.raises(CallOrderError, match="outside of jit"):
        jax.jit(lambda w: run(state, w).verdict.check(policy))(jax.numpy.ones(2))


def test_a_group_agreement_refuses_what_it_cannot_send(jax: Any) -> None:
    state = DynamicScale().init(jax.numpy.zeros(()))

    def call(group: Any, nonfinite: Any) -> None:
        gradscale.GroupAgreement(group, DynamicScale())(nonfinite, state)

    for wrong in (0, 1.0, jax.numpy.zeros((1,), "int32"), jax.numpy.zeros(())):
        with pytest.raises(InvalidTypeError, match="nonfinite must be a 0-d int32 array"):
            gradscale.testing.run_ranks(1, lambda group, wrong=wrong: call(group, wrong))
    with pytest.raises(InvalidTypeError, match="GroupAgreement was called in a function that jax traces"):
        gradscale.testing.run_ranks(1, lambda group: jax.jit(lambda n: call(group, n))(jax.numpy.zeros((), "int32")))


@pytest.mark.parametrize("like", ["parameter", "scalar"])
def test_a_step_over_a_mesh_is_compiled_at_most_twice(jax: Any, gradscale_jax: Any, like: str) -> None:
    jnp, policy, spec = jax.numpy, DynamicScale(), jax.sharding.PartitionSpec
    w = jax.device_put(jnp.ones(COUNT), jax.sharding.NamedSharding(require_mesh("data"), spec("data")))
    step = jax.jit(gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy))
    state = policy.init(w if like == "parameter" else jnp.zeros(()))
    for _ in range(4):
        state = step(state, w).state
    assert step._cache_size() == (1 if like == "parameter" else 2)


def test_value_and_grad_in_float64(jax: Any, gradscale_jax: Any) -> None:
    with x64_mode(True):
        jnp, policy = jax.numpy, DynamicScale(growth_interval=1)
        w = jnp.asarray([1.0 / 3.0], dtype=jnp.float64)
        run = jax.jit(gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy))
        scaled = run(policy.init(w), w)
        assert (scaled.value.dtype, scaled.grads.dtype) == (jnp.float64, jnp.float64)
        assert scaled.grads.tolist() == [2.0 / 3.0]
        assert float(scaled.state.scale) == 2.0**17
        assert int(run(policy.init(w), w * math.inf).verdict.nonfinite) == 1


def test_nan_debugging_lets_a_compiled_skip_pass(jax: Any, gradscale_jax: Any) -> None:
    jnp, policy = jax.numpy, DynamicScale()

    @jax.jit
    def step(state: ScaleState, w: Any, x: Any) -> Any:
        scaled = gradscale_jax.value_and_grad(lambda w: jnp.sum(w * x), policy)(state, w)
        return scaled.state, gradscale_jax.select(scaled.verdict.finite, w - scaled.grads, w)

    with jax.debug_nans(True):
        state, w = step(policy.init(jnp.zeros(())), jnp.ones(2), jnp.asarray([jnp.inf, 1.0]))
    assert (float(state.scale), w.tolist()) == (2.0**15, [1.0, 1.0])


def test_a_float16_loss_outside_of_value_and_grad_needs_a_bound(jnp: Any, jax: Any, gradscale_jax: Any) -> None:
    """The first cotangent has the loss's dtype; the documented remedies are a float32 loss and a bound."""

    def gradient(policy: Any, dtype: Any) -> Any:
        state = policy.init(jnp.zeros(()))
        loss = lambda w: gradscale_jax.scale(jnp.sum(w).astype(dtype), state)  # noqa: E731
        return gradscale_jax.unscale(jax.grad(loss)(jnp.full(2, 1e-3, jnp.float16)), state)

    assert int(gradient(DynamicScale(), jnp.float16)[1]) == 1
    assert int(gradient(DynamicScale(init_scale=2.0**15, max_scale=2.0**15), jnp.float16)[1]) == 0


def test_what_a_step_returns_is_a_pytree_and_can_be_pickled(jax: Any, gradscale_jax: Any) -> None:
    policy = DynamicScale()
    run = gradscale_jax.value_and_grad(lambda w: w.sum(), policy)
    scaled = run(policy.init(jax.numpy.zeros(())), jax.numpy.ones(2))
    assert type(jax.tree.map(lambda x: x, scaled)) is gradscale_jax.Scaled
    again = pickle.loads(pickle.dumps(scaled))
    assert [x.tolist() for x in jax.tree.leaves(again)] == [x.tolist() for x in jax.tree.leaves(scaled)]
    assert isinstance(again.state, gradscale.ScaleState)


@pytest.mark.parametrize("parameters", [{}, [], (), None, {"a": None}], ids=repr)
def test_parameters_without_leaves_are_clean(jax: Any, gradscale_jax: Any, parameters: Any) -> None:
    policy = DynamicScale(growth_interval=1)
    run = jax.jit(gradscale_jax.value_and_grad(lambda _: jax.numpy.float32(2.0), policy))
    scaled = run(policy.init(jax.numpy.zeros(())), parameters)
    assert scaled.grads == parameters
    assert (float(scaled.value), int(scaled.verdict.nonfinite), float(scaled.state.scale)) == (2.0, 0, 2.0**17)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_step_runs_under_strict_promotion(jax: Any, gradscale_jax: Any, dtype: str) -> None:
    jnp, policy = jax.numpy, DynamicScale(init_scale=16.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        run = jax.jit(gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, dtype=jnp.float32))
        scaled = run(policy.init(jnp.zeros(())), jnp.asarray([1.5], dtype=dtype))
    assert (scaled.grads.dtype, scaled.grads.tolist()) == (jnp.float32, [3.0])
    assert str(scaled.value.dtype) == dtype
