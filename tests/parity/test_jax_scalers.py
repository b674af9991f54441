"""jmp's and flax's dynamic scales, followed to the bit."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from gradscale import DynamicScale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

# Each is made with a policy, and returns its first state and a step: from a state and the error put into the loss to
# the next state, the loss and its gradient, and whether that is finite.


def linear(error, weight):
    """Return a loss whose gradient is ``error``."""
    return error * weight


def ours(policy: DynamicScale):
    """Return gradscale_jax.value_and_grad as a step."""

    def step(state, error):
        scaled = gradscale_jax.value_and_grad(linear, policy, argnums=1)(state, error, jnp.ones(()))
        return scaled.state, (scaled.value, scaled.grads), scaled.verdict.finite

    return policy.init(jnp.zeros(())), step


def flax(policy: DynamicScale):
    """Return flax's own value_and_grad as a step."""
    require("flax")
    from flax.training.dynamic_scale import DynamicScale as FlaxScale

    def step(state, error):
        result = state.value_and_grad(partial(linear, error))(jnp.ones(()))
        return result.dynamic_scale, (result.aux, result.grad), result.finite

    factors = {name: getattr(policy, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
    return FlaxScale(**factors, scale=jnp.float32(policy.init_scale), minimum_scale=policy.min_scale), step


def jmp(policy: DynamicScale):
    """Return jmp's functions put together as its documentation has it."""
    module = require("jmp")

    def step(state, error):
        value, gradient = jax.value_and_grad(lambda weight: state.scale(linear(error, weight)))(jnp.ones(()))
        gradient = state.unscale(gradient)
        finite = module.all_finite(gradient)
        return state.adjust(finite), (state.unscale(value), gradient), finite

    scale, least = map(jnp.float32, (policy.init_scale, policy.min_scale))
    counter = jnp.zeros((), jnp.int32)
    return module.DynamicLossScale(scale, counter, policy.growth_interval, policy.growth_factor, least), step


POWERS = st.integers(-20, 40).map(lambda power: 2.0**power)


@pytest.mark.parametrize("peer", [jmp, flax])
@settings(max_examples=examples(30))
@given(
    errors=st.lists(st.sampled_from([1.0, 1.0, 1.0, math.inf, math.nan]), min_size=1, max_size=20),
    interval=st.integers(1, 5),
    growth=st.sampled_from([2.0, 4.0, 8.0]),
    backoff=st.sampled_from([0.5, 0.125]),
    scales=st.tuples(POWERS, POWERS),
)
def test_it_follows_the_peer_step_by_step(
    peer, errors: list[float], interval: int, growth: float, backoff: float, scales: tuple[float, float]
):
    smallest, scale = sorted(scales)
    given = {"init_scale": scale, "min_scale": smallest, "growth_interval": interval, "growth_factor": growth}
    # jmp has one factor for both directions.
    given["backoff_factor"] = 1 / growth if peer is jmp else backoff
    policy = DynamicScale(**given, growth_after="interval" if peer is jmp else "interval_plus_one")
    (state, step), (their_state, their_step) = ours(policy), peer(policy)
    for index, error in enumerate(map(np.float32, errors)):
        state, found, finite = step(state, error)
        their_state, theirs, their_finite = their_step(their_state, error)
        their_scale = their_state.loss_scale if peer is jmp else their_state.scale
        assert (float(state.scale), bool(finite)) == (float(their_scale), bool(their_finite)), f"step {index}"
        for a, b in zip(found, theirs, strict=True) if finite else ():
            # Ours never scales the loss that it returns, so a product that overflowed is not in it.
            if np.isfinite(b).all():
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"value or gradient of step {index}"
