"""Simulations: what steps and magnitudes do to a policy's scale; traces and their errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, StaticScale
from gradscale.policies.simulation import Gradients, measured, recorded, simulate

pytestmark = pytest.mark.numpy


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
