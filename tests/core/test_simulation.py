"""Simulations: the traced rule equals the policy's own arithmetic, bit for bit; traces and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, StaticScale, presets
from gradscale.policies.plain import first_state, traced_rule
from gradscale.policies.simulation import Gradients, measured, recorded, simulate

pytestmark = pytest.mark.numpy


def stepped(policy: Any, overflows: list[bool]) -> list[tuple[float, ...]]:
    """Return the states that the policy itself gives on NumPy's arrays, up to where it would raise."""
    state = policy.init(np.asarray(0.0, dtype=np.float32))
    states = []
    for overflow in overflows:
        at_min_scale = policy.at_min_scale(state)
        if overflow and at_min_scale is not None and bool(at_min_scale):
            break
        state = policy.update(state, nonfinite=np.asarray(int(overflow), dtype=np.int32))
        states.append(tuple(field.item() for field in state))
    return states


def traced(policy: Any, overflows: list[bool]) -> list[tuple[float, ...]]:
    """Return the same of the traced rule."""
    rule, state, states = traced_rule(policy), first_state(policy), []
    for overflow in overflows:
        if overflow and rule.at_min_scale is not None and rule.at_min_scale(state):
            break
        state = rule.update(state, overflow)
        states.append(tuple(state))
    return states


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_simulated_bit_for_bit_over_a_long_random_run(name: str) -> None:
    rng, steps = np.random.default_rng(3), examples(10_000)
    overflows = (rng.random(steps) < rng.choice([0.001, 0.3], steps)).tolist()
    assert traced(presets.named(name), overflows) == stepped(presets.named(name), overflows)


@settings(max_examples=examples(60))
@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=60),
    growth=st.sampled_from([2.0, 1.1, 3.7]),
    backoff=st.sampled_from([0.5, 0.3, 0.9]),
    interval=st.integers(1, 4),
    after=st.sampled_from(["interval", "first_interval_plus_one", "interval_plus_one"]),
    extra=st.sampled_from([{"hysteresis": 3, "hysteresis_refill": ("growth",)}, {"tolerance": 0.3}, {}]),
    limits=st.sampled_from([{}, {"min_scale": 100.0, "max_scale": 1000.0, "init_scale": 300.0}]),
    at_min=st.sampled_from(["clamp", "hold", "raise"]),
)
def test_any_setting_is_simulated_bit_for_bit(
    overflows: list[bool],
    growth: float,
    backoff: float,
    interval: int,
    after: Any,
    extra: Any,
    limits: Any,
    at_min: Any,
) -> None:
    policy = DynamicScale(
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        growth_after=after,
        at_min=at_min,
        **extra,
        **limits,
    )
    assert traced(policy, overflows) == stepped(policy, overflows)


def test_another_policy_is_told_apart() -> None:
    overflows = [True, False, True]
    assert traced(DynamicScale(), overflows) != stepped(DynamicScale(backoff_factor=0.25), overflows)


def test_letters_give_the_scale_that_each_step_used() -> None:
    result = simulate(DynamicScale(init_scale=8.0, growth_interval=2), "cc oC", name="x")
    assert result.scale == (8.0, 8.0, 16.0, 8.0)
    assert result.skipped == (False, False, True, False)
    assert (result.final_scale, result.skipped_steps) == (8.0, 1)


@pytest.mark.parametrize("magnitude", [65504.0 / 8.0, 8189.0], ids=["at-the-largest", "above-it"])
def test_a_magnitude_overflows_above_the_largest_float16(magnitude: float) -> None:
    assert simulate(StaticScale(8.0), measured([magnitude])).skipped == (magnitude > 8188.0,)


def test_magnitudes_of_half_precision_do_not_overflow_in_it() -> None:
    exact = [0.001, 70.0]
    half = np.asarray(exact, dtype=np.float16)
    assert simulate(StaticScale(2.0**20), measured(half)).skipped == (False, True)
    assert [type(value) for value in measured(half).largest] == [float, float]
    assert simulate(StaticScale(1.0), measured([10**400, 3])).skipped == (True, False)


def test_a_policy_that_raises_ends_its_run_in_that_step() -> None:
    result = simulate(DynamicScale(init_scale=4.0, min_scale=1.0, at_min="raise"), "OOOOO")
    assert (result.raised_at, result.scale) == (3, (4.0, 2.0, 1.0))


def test_a_long_run_is_made_to_its_end() -> None:
    result = simulate(DynamicScale(), "C" * 45_000)
    assert len(result.scale) == len(result.skipped) == 45_000
    assert result.raised_at is None
    assert simulate(DynamicScale(min_scale=1.0, at_min="raise"), "O" * 45_000).raised_at == 17


class _Branching:
    init_scale = 1.0
    init = DynamicScale().init

    def update(self, state: Any, *, nonfinite: Any) -> Any:
        return state if nonfinite else StaticScale().backoff(state)

    def at_min_scale(self, _: Any) -> None:
        return None


def test_a_policy_that_asks_for_a_value_is_refused() -> None:
    policy: Any = _Branching()
    with pytest.raises(InvalidTypeError, match=r"asks for the value of an array.*where\(\)"):
        simulate(policy, "C")


class _Forgetful(StaticScale):
    def update(self, state: Any, *, nonfinite: Any) -> Any:  # noqa: ARG002
        return state[:-1]


def test_a_policy_whose_state_loses_a_field_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"got _Forgetful\(.*tracing it failed with ValueError"):
        simulate(_Forgetful(8.0), "C")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: recorded("CCX"), "'X' at position 3"),
        (lambda: recorded(" "), "at least one step"),
        (lambda: measured([1.0, -1.0]), "step 2 must be a number from 0 on, got -1.0"),
        (lambda: Gradients([]), "at least one step"),
    ],
    ids=["letter", "empty", "negative", "no-steps"],
)
def test_bad_gradients_are_refused_with_what_was_there(make: Any, said: str) -> None:
    with pytest.raises(InvalidValueError, match=said):
        make()


@pytest.mark.parametrize("make", [recorded, measured])
@pytest.mark.parametrize(
    "bad", [3, None, [1j], [np.ones(2)], [None]], ids=["number", "none", "complex", "array", "nones"]
)
def test_what_is_no_trace_is_refused_by_its_type(make: Any, bad: Any) -> None:
    with pytest.raises(InvalidTypeError, match="must be"):
        make(bad)
