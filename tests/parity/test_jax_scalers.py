"""jmp's and flax's dynamic scales, followed to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from gradscale import DynamicScale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

Step = Callable[[Any, Any], tuple[Any, Any, Any, Any]]
"""From a state and the error put into the loss: the next state, the loss, its gradient, and whether that is finite."""

WEIGHTS = np.asarray([4.0, -8.0, 0.75], np.float32)
DATA = np.asarray([[1.0, 2.0, 3.0], [0.3, 0.2, 0.1]], np.float32)


def linear(error, weight):
    """Return a loss whose gradient is ``error``."""
    return error * weight


def squares(error, weights):
    """Return the mean of squares of a linear model, times ``error``."""
    return error * ((DATA @ weights) ** 2).mean()


def our_step(policy: DynamicScale, loss: Callable[..., Any], at) -> Step:
    """Return gradscale_jax.value_and_grad as a step."""

    def step(state, error):
        scaled = gradscale_jax.value_and_grad(loss, policy, argnums=1)(state, error, at)
        return scaled.state, scaled.value, scaled.grads, scaled.verdict.finite

    return step


def flax_step(loss: Callable[..., Any], at) -> Step:
    """Return flax's own value_and_grad as a step."""

    def step(state, error):
        result = state.value_and_grad(partial(loss, error))(at)
        return result.dynamic_scale, result.aux, result.grad, result.finite

    return step


def jmp_step(loss: Callable[..., Any], at) -> Step:
    """Return jmp's functions put together as its documentation has it."""
    jmp = require("jmp")

    def step(state, error):
        value, gradient = jax.value_and_grad(lambda weight: state.scale(loss(error, weight)))(at)
        gradient = state.unscale(gradient)
        finite = jmp.all_finite(gradient)
        return state.adjust(finite), state.unscale(value), gradient, finite

    return step


def scale_of(state) -> float:
    """Return any system's scale; every float32 is a float."""
    return float(state.loss_scale if hasattr(state, "loss_scale") else state.scale)


def assert_same_runs(mine: tuple[Step, Any], theirs: tuple[Step, Any], errors: list[float]):
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


def first(policy: DynamicScale):
    return policy.init(jnp.zeros(()))


def beside(peer: str, loss: Callable[..., Any], at, **settings):
    """Return our step and the peer's, each with its first state, of the same settings."""
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
    peer: str, errors: list[float], interval: int, growth: float, backoff: float, scales: tuple[float, float]
):
    smallest, scale = sorted(scales)
    given = {"init_scale": scale, "min_scale": smallest, "growth_interval": interval, "growth_factor": growth}
    # jmp has one factor for both directions.
    given["backoff_factor"] = 1 / growth if peer == "jmp" else backoff
    assert_same_runs(*beside(peer, linear, jnp.ones(()), **given), errors)


@peers
@pytest.mark.parametrize("power", [8, 110], ids=["injected", "scale-too-large"])
def test_a_compiled_run_has_the_peers_losses_and_gradients(peer: str, power: int):
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
def test_a_run_with_a_wrong_setting_is_found(wrong: dict[str, float]):
    right: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 3, "min_scale": 2.0**-126}
    _, theirs = beside("flax", linear, jnp.ones(()), **right)
    mine, _ = beside("flax", linear, jnp.ones(()), **(right | wrong))
    with pytest.raises(AssertionError, match="scale after step"):
        assert_same_runs(mine, theirs, [1.0] * 5 + [math.inf] * 3)
