"""jmp's and flax's dynamic scales: followed to the bit; their faults, each shown in the original and absent here."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from axes import require
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_devices import require_mesh
from tiers import examples

from gradscale import DynamicScale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

Step = Callable[[Any, Any], tuple[Any, Any, Any, Any]]
"""From a state and the error put into the loss: the next state, the loss, its gradient, and whether that is finite."""

WEIGHTS = np.asarray([4.0, -8.0, 0.75], np.float32)
DATA = np.asarray([[1.0, 2.0, 3.0], [0.3, 0.2, 0.1]], np.float32)


@pytest.fixture
def jax() -> Any:
    return require("jax")


@pytest.fixture
def jnp(jax: Any) -> Any:
    return jax.numpy


@pytest.fixture
def ours(jax: Any) -> Any:  # noqa: ARG001
    import gradscale_jax

    return gradscale_jax


@pytest.fixture
def jmp() -> Any:
    return require("jmp")


@pytest.fixture
def flax_scale() -> Any:
    require("flax")
    from flax.training.dynamic_scale import DynamicScale as FlaxScale

    return FlaxScale


def linear(error: Any, weight: Any) -> Any:
    """Return a loss whose gradient is ``error``."""
    return error * weight


def squares(error: Any, weights: Any) -> Any:
    """Return the mean of squares of a linear model, times ``error``."""
    return error * ((DATA @ weights) ** 2).mean()


def our_step(policy: DynamicScale, loss: Callable[..., Any], at: Any) -> Step:
    """Return gradscale_jax.value_and_grad as a step."""
    import gradscale_jax

    def step(state: Any, error: Any) -> tuple[Any, Any, Any, Any]:
        scaled = gradscale_jax.value_and_grad(loss, policy, argnums=1)(state, error, at)
        return scaled.state, scaled.value, scaled.grads, scaled.verdict.finite

    return step


def flax_step(loss: Callable[..., Any], at: Any) -> Step:
    """Return flax's own value_and_grad as a step."""

    def step(state: Any, error: Any) -> tuple[Any, Any, Any, Any]:
        result = state.value_and_grad(partial(loss, error))(at)
        return result.dynamic_scale, result.aux, result.grad, result.finite

    return step


def jmp_step(loss: Callable[..., Any], at: Any) -> Step:
    """Return jmp's functions put together as its documentation has it."""
    import jax
    import jmp

    def step(state: Any, error: Any) -> tuple[Any, Any, Any, Any]:
        value, gradient = jax.value_and_grad(lambda weight: state.scale(loss(error, weight)))(at)
        gradient = state.unscale(gradient)
        finite = jmp.all_finite(gradient)
        return state.adjust(finite), state.unscale(value), gradient, finite

    return step


def scale_of(state: Any) -> float:
    """Return any system's scale; every float32 is a float."""
    return float(state.loss_scale if hasattr(state, "loss_scale") else state.scale)


def assert_same_runs(mine: tuple[Step, Any], theirs: tuple[Step, Any], errors: list[float]) -> None:
    """Take a step for every error, and hold scale, loss, gradient and verdict against the peer's after each."""
    (our, state), (their, their_state) = mine, theirs
    for index, error in enumerate(errors):
        state, loss, gradient, finite = our(state, np.float32(error))
        their_state, their_loss, their_gradient, their_finite = their(their_state, np.float32(error))
        assert scale_of(state) == scale_of(their_state), f"scale after step {index}"
        assert bool(finite) == bool(their_finite), f"verdict of step {index}"
        if finite:
            for a, b in ((loss, their_loss), (gradient, their_gradient)):
                # Ours never scales the loss that it returns, so a product that overflowed is not in it.
                if np.isfinite(b).all():
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"value or gradient of step {index}"


def first(policy: DynamicScale) -> Any:
    return policy.init(require("jax").numpy.zeros(()))


def beside(peer: str, loss: Callable[..., Any], at: Any, **settings: Any) -> tuple[tuple[Step, Any], tuple[Step, Any]]:
    """Return our step and the peer's, each with its first state, of the same settings."""
    jnp = require("jax").numpy
    policy = DynamicScale(growth_after="interval" if peer == "jmp" else "interval_plus_one", **settings)
    scale, least = jnp.float32(policy.init_scale), policy.min_scale
    theirs: Any
    if peer == "jmp":
        theirs = require("jmp").DynamicLossScale(
            scale, jnp.zeros((), jnp.int32), policy.growth_interval, policy.growth_factor, jnp.float32(least)
        )
    else:
        require("flax")
        from flax.training.dynamic_scale import DynamicScale as FlaxScale

        factors = {name: getattr(policy, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        theirs = FlaxScale(**factors, scale=scale, minimum_scale=least)
    their_step = jmp_step(loss, at) if peer == "jmp" else flax_step(loss, at)
    return (our_step(policy, loss, at), first(policy)), (their_step, theirs)


POWERS = st.integers(-20, 40).map(lambda power: 2.0**power)
ERRORS = st.lists(st.sampled_from([1.0, 1.0, 1.0, math.inf, math.nan]), min_size=1, max_size=20)
peers = pytest.mark.parametrize("peer", ["jmp", "flax"])


@peers
@settings(max_examples=examples(30))
@given(
    errors=ERRORS,
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0, 8.0]),
    backoff=st.sampled_from([0.5, 0.125]),
    scales=st.tuples(POWERS, POWERS),
)
def test_it_follows_the_peer_step_by_step(
    jnp: Any, peer: str, errors: list[float], interval: int, growth: float, backoff: float, scales: tuple[float, float]
) -> None:
    smallest, scale = sorted(scales)
    given = {"init_scale": scale, "min_scale": smallest, "growth_interval": interval, "growth_factor": growth}
    # jmp has one factor for both directions.
    given["backoff_factor"] = 1 / growth if peer == "jmp" else backoff
    assert_same_runs(*beside(peer, linear, jnp.ones(()), **given), errors)


@peers
@pytest.mark.parametrize("power", [8, 110], ids=["injected", "scale-too-large"])
def test_a_compiled_run_has_the_peers_losses_and_gradients(jax: Any, jnp: Any, peer: str, power: int) -> None:
    errors = np.random.default_rng(0).choice([1.0, 1.0, 1.0, 1.0, math.inf, math.nan], 120)
    # Beyond 2**120 these gradients overflow of themselves, and the scale never comes to float32's end.
    given: dict[str, Any] = {"init_scale": 2.0**power, "growth_interval": 1 if power > 8 else 3, "min_scale": 1.0}
    (our, state), (their, their_state) = beside(peer, squares, jnp.asarray(WEIGHTS), **given)
    assert_same_runs((jax.jit(our), state), (jax.jit(their), their_state), errors.tolist())


@pytest.mark.parametrize(
    "wrong",
    [{"growth_interval": 4}, {"backoff_factor": 0.25}, {"growth_factor": 4.0}, {"min_scale": 128.0}],
    ids=lambda wrong: "-".join(wrong),
)
def test_a_run_with_a_wrong_setting_is_found(jnp: Any, wrong: dict[str, float]) -> None:
    right: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 3, "min_scale": 2.0**-126}
    _, theirs = beside("flax", linear, jnp.ones(()), **right)
    mine, _ = beside("flax", linear, jnp.ones(()), **(right | wrong))
    with pytest.raises(AssertionError, match="scale after step"):
        assert_same_runs(mine, theirs, [1.0] * 5 + [math.inf] * 3)


# Faults of the originals.


def test_jmp_loses_its_minimum_in_any_transformation_and_the_minimum_here_stays(jax: Any, jnp: Any, jmp: Any) -> None:
    policy = DynamicScale(init_scale=8.0, min_scale=4.0)
    theirs = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(4.0))
    assert float(jax.tree.map(lambda x: x, theirs).min_loss_scale) == 1.0
    state = first(policy)
    adjust = jax.jit(lambda scale, finite: scale.adjust(finite))
    update = jax.jit(policy.update)
    for _ in range(4):
        theirs = adjust(theirs, jnp.asarray(False))
        state = update(state, nonfinite=jnp.asarray(True))
    assert (scale_of(theirs), scale_of(state)) == (1.0, 4.0)


def test_jmp_cannot_adjust_a_float16_scale_and_a_state_made_beside_float16_is_float32(jnp: Any, jmp: Any) -> None:
    with pytest.raises(TypeError, match="same dtypes"):
        jmp.DynamicLossScale(jnp.float16(2.0**15)).adjust(jnp.asarray(True))
    policy = DynamicScale(init_scale=2.0**15, growth_interval=1)
    state = policy.update(policy.init(jnp.ones(3, jnp.float16)), nonfinite=jnp.asarray(0))
    assert (scale_of(state), state.scale.dtype) == (2.0**16, jnp.float32)


def test_jmp_promotes_half_precision_and_only_a_scalar_loss_is_widened_here(jnp: Any, jmp: Any, ours: Any) -> None:
    theirs = jmp.DynamicLossScale(jnp.float32(8.0))
    state = first(DynamicScale(init_scale=8.0))
    for shape in ((), (3,)):
        x = jnp.ones(shape, jnp.float16)
        assert theirs.scale(x).dtype == jnp.float32
        assert theirs.unscale(x).dtype == jnp.float32
        # On purpose: float16 cannot hold a loss times 65536, and a product of many elements keeps its memory.
        assert ours.scale(x, state).dtype == (jnp.float32 if shape == () else jnp.float16)
        assert ours.unscale(x, state)[0].dtype == jnp.float16


def test_the_loss_of_value_and_grad_has_its_own_dtype(jnp: Any, ours: Any) -> None:
    policy = DynamicScale(init_scale=8.0)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        scaled = ours.value_and_grad(lambda x: x * x, policy)(first(policy), jnp.asarray(3.0, dtype))
        assert (float(scaled.value), scaled.value.dtype) == (9.0, dtype)
        assert (float(scaled.grads), scaled.grads.dtype) == (6.0, dtype)


def test_flax_grows_one_step_late_and_here_only_when_asked_to(jnp: Any, flax_scale: Any) -> None:
    at = jnp.ones(())
    grown = {}
    for name, policy in {
        "flax": None,
        "default": DynamicScale(init_scale=1.0, growth_interval=3),
        "asked": DynamicScale(init_scale=1.0, growth_interval=3, growth_after="interval_plus_one"),
    }.items():
        state = first(policy) if policy else flax_scale(growth_interval=3, scale=jnp.ones(()))
        step = our_step(policy, linear, at) if policy else flax_step(linear, at)
        scales = []
        for _ in range(8):
            state = step(state, np.float32(1.0))[0]
            scales.append(scale_of(state))
        grown[name] = scales
    late = [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 4.0]
    assert grown == {"flax": late, "asked": late, "default": [1.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]}


def test_flaxs_scale_ends_at_no_power_of_two_and_ours_at_the_last_one(jnp: Any, flax_scale: Any) -> None:
    at = jnp.ones(())
    policy = DynamicScale(init_scale=2.0**126, growth_interval=1, growth_after="interval_plus_one")
    theirs, state = flax_scale(growth_interval=1, scale=jnp.float32(2.0**126)), first(policy)
    for _ in range(6):
        theirs = flax_step(linear, at)(theirs, np.float32(0.5))[0]
        state = our_step(policy, linear, at)(state, np.float32(0.5))[0]
    assert scale_of(theirs) == float(np.finfo(np.float32).max)
    assert scale_of(state) == 2.0**127


def test_flaxs_first_step_with_a_float16_loss_overflows_and_ours_does_not(jax: Any, jnp: Any, ours: Any) -> None:
    require("flax")
    from flax.training.dynamic_scale import DynamicScale as FlaxScale

    def loss(x: Any) -> Any:
        return x.astype(jnp.float16) ** 2

    x = jnp.asarray(2.0**-9)
    result = jax.jit(lambda state, x: state.value_and_grad(loss)(x))(FlaxScale(), x)
    assert not result.finite
    assert np.isnan(result.aux)
    scaled = jax.jit(ours.value_and_grad(loss, DynamicScale()))(first(DynamicScale()), x)
    assert scaled.verdict.finite
    assert (float(scaled.value), float(scaled.grads)) == (2.0**-18, 2.0**-8)
    assert scale_of(scaled.state) == 32768.0


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("bad", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("device", range(4))
def test_the_peers_devices_drift_apart_and_ours_agree(jax: Any, jnp: Any, device: int, bad: float) -> None:
    require("flax")
    require("jmp")
    import jmp
    from flax.training.dynamic_scale import DynamicScale as FlaxScale

    import gradscale_jax

    mesh = require_mesh("data")
    spec = jax.sharding.PartitionSpec("data")
    errors = np.ones(4, np.float32)
    errors[device] = bad
    policy = DynamicScale(init_scale=256.0)
    at = jnp.ones(())

    def agreeing(state: Any, error: Any) -> tuple[Any, Any, Any, Any]:
        function = gradscale_jax.value_and_grad(linear, policy, argnums=1, axis_name="data")
        scaled = function(state, error, at)
        return scaled.state, scaled.value, scaled.grads, scaled.verdict.finite

    def scales(step: Step, state: Any) -> list[tuple[float, bool]]:
        """Return every device's scale after one step, and whether it takes that step."""

        def on_device(state: Any, error: Any) -> tuple[Any, Any]:
            after, _, _, finite = step(state, error[0])
            scale = after.loss_scale if hasattr(after, "loss_scale") else after.scale
            return scale[None], finite[None]

        specs = (jax.sharding.PartitionSpec(), spec)
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
        found, finite = jax.jit(mapped)(state, errors)
        return list(zip(found.tolist(), finite.tolist(), strict=True))

    apart = [(128.0, False) if index == device else (256.0, True) for index in range(4)]
    assert scales(flax_step(linear, at), FlaxScale(scale=jnp.float32(256.0))) == apart
    assert scales(jmp_step(linear, at), jmp.DynamicLossScale(jnp.float32(256.0))) == apart
    assert scales(our_step(policy, linear, at), first(policy)) == apart
    assert scales(agreeing, first(policy)) == [(128.0, False)] * 4
