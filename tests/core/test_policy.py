"""DynamicScale and StaticScale: when the scale grows, when it backs off, and what it can never become."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from libraries import Library
from runs import follow, scales, start

from gradscale import DynamicScale, InvalidValueError, StaticScale

# Pure functions, and many calls of them; see conftest.py.
PURE = TRACED = LONG = True

SMALLEST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
LARGEST_INT = 2**31 - 1


def test_the_defaults_are_those_of_torch() -> None:
    policy = DynamicScale()
    assert (policy.init_scale, policy.growth_factor, policy.backoff_factor) == (65536.0, 2.0, 0.5)
    assert (policy.growth_interval, policy.hysteresis, policy.tolerance) == (2000, 1, None)


def test_an_overflow_backs_off_at_once_and_restarts_the_run(arrays: Library) -> None:
    policy = DynamicScale(init_scale=4.0, growth_interval=3)
    states = [arrays.state(state)[:2] for state in follow(arrays, policy, "CCOCCC")]
    assert states == [(4.0, 1), (4.0, 2), (2.0, 0), (2.0, 1), (2.0, 2), (4.0, 0)]


def near(at_min: str, **settings: float) -> dict[str, Any]:
    return {"init_scale": 8.0, "at_min": at_min, **settings}


def patient(*refill: str) -> dict[str, Any]:
    return {"init_scale": 8.0, "growth_interval": 3, "hysteresis": 2, "hysteresis_refill": refill}


# Settings, clean steps and overflows, and the scale after each.
RUNS: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "third clean step": ({"init_scale": 4.0, "growth_interval": 3}, "CCCCCCC", [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]),
    "each clean step": ({"init_scale": 1.0, "growth_interval": 1}, "CCOC", [2.0, 4.0, 2.0, 4.0]),
    "never": ({"init_scale": 8.0, "growth_interval": LARGEST_INT}, "CCCCC", [8.0] * 5),
    "smallest": ({"init_scale": 2.0**-124}, "OOOO", [2.0**-125, SMALLEST, SMALLEST, SMALLEST]),
    "clamp": (near("clamp", min_scale=3.0), "OOO", [4.0, 3.0, 3.0]),
    "hold": (near("hold", min_scale=3.0), "OOO", [4.0, 4.0, 4.0]),
    "raise": (near("raise", min_scale=3.0), "OOO", [4.0, 3.0, 3.0]),
    "clamp on the minimum": (near("clamp", min_scale=4.0), "O", [4.0]),
    "hold on the minimum": (near("hold", min_scale=4.0), "O", [4.0]),
    "raise on the minimum": (near("raise", min_scale=4.0), "O", [4.0]),
    "maximum": (near("clamp", max_scale=24.0, growth_interval=1), "CCCCO", [16.0, 24.0, 24.0, 24.0, 12.0]),
    "product above float32": (
        {"init_scale": 2.0**127, "max_scale": 3e38, "growth_interval": 1},
        "CC",
        [float(np.float32(3e38))] * 2,
    ),
    # A clean step refills: only consecutive overflows count, and every further one backs off.
    "clean step, overflows": (patient("clean_step"), "OOOO", [8.0, 4.0, 2.0, 1.0]),
    "clean step, isolated": (patient("clean_step"), "OCOCO", [8.0] * 5),
    "clean step, pairs": (patient("clean_step"), "OOCOO", [8.0, 4.0, 4.0, 4.0, 2.0]),
    # Growth: isolated overflows add up, and once used up, every one backs off until the next growth.
    "growth, isolated": (patient("growth"), "OCOCO", [8.0, 8.0, 4.0, 4.0, 2.0]),
    "growth, grown": (patient("growth"), "OCCCOO", [8.0, 8.0, 8.0, 16.0, 16.0, 8.0]),
    # A backoff: as many more are needed for each.
    "backoff, overflows": (patient("backoff"), "OOOO", [8.0, 4.0, 4.0, 2.0]),
    "backoff, isolated": (patient("backoff"), "OCOCOCO", [8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 2.0]),
    "clean step and backoff": (patient("clean_step", "backoff"), "OOOCOO", [8.0, 4.0, 4.0, 4.0, 4.0, 2.0]),
}


@pytest.mark.parametrize(("settings", "steps", "expected"), RUNS.values(), ids=RUNS)
def test_the_scale_after_each_step(arrays: Library, settings: Any, steps: str, expected: list[float]) -> None:
    assert scales(arrays, DynamicScale(**settings), steps) == expected


@pytest.mark.parametrize(
    ("tracker", "step", "expected"), [("growth_tracker", "C", 16.0), ("overflow_tracker", "O", 4.0)]
)
def test_a_tracker_beyond_a_lowered_threshold_acts_at_once(
    arrays: Library, tracker: str, step: str, expected: float
) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=5, hysteresis=2)
    assert scales(arrays, policy, step, start(arrays, policy, **{tracker: 1500})) == [expected]


def test_an_interval_must_fit_its_tracker() -> None:
    with pytest.raises(InvalidValueError, match="growth_interval"):
        DynamicScale(growth_interval=LARGEST_INT, growth_after="interval_plus_one")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in ("bool", "int8", "int32", "int64", "float32") for value in (0, 1)),
        *(("int32", count) for count in (2, 7, LARGEST_INT, -1)),
    ],
)
def test_any_number_but_zero_is_an_overflow(arrays: Library, dtype: str, value: int) -> None:
    policy = DynamicScale(init_scale=4.0)
    state = policy.update(start(arrays, policy), nonfinite=arrays.asarray(value, dtype))
    assert arrays.state(state) == (2.0 if value else 4.0, 0 if value else 1, 0, 0)


def test_update_leaves_the_given_state_alone(arrays: Library) -> None:
    policy = DynamicScale(growth_interval=1, hysteresis=2, hysteresis_refill=("growth",))
    state = start(arrays, policy)
    for value in (0, 1):
        policy.update(state, nonfinite=arrays.asarray(value, "int32"))
        assert arrays.state(state) == (65536.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("growth_after", "grown_at"),
    [
        ("interval", [3, 6, 9, 14, 17]),
        ("first_interval_plus_one", [4, 7, 10, 15, 18]),
        ("interval_plus_one", [4, 8, 15]),
    ],
)
def test_growth_after_says_on_which_clean_step_growth_happens(
    arrays: Library, growth_after: Any, grown_at: list[int]
) -> None:
    policy = DynamicScale(init_scale=1.0, growth_interval=3, growth_after=growth_after)
    sequence = "C" * 10 + "O" + "C" * 7
    got = [1.0, *scales(arrays, policy, sequence)]
    assert [step for step in range(1, len(got)) if got[step] > got[step - 1]] == grown_at


# The top of float32.


@pytest.mark.parametrize("factor", [16.0, 2.0, 1.5, 1.1, 1.0000001, 2.0**127, 3e38, LARGEST])
def test_growth_at_the_top_of_float32_stays_finite_and_does_not_warn(arrays: Library, factor: float) -> None:
    policy = DynamicScale(init_scale=1e38, growth_factor=factor, growth_interval=1)
    got = scales(arrays, policy, "C" * 20)
    assert all(math.isfinite(scale) for scale in got)
    assert got == sorted(got)
    assert got[0] == (float(np.float32(np.float64(np.float32(1e38)) * factor)) if factor < 3 else policy.init_scale)


def test_growth_that_does_not_fit_leaves_the_scale_and_restarts_the_run(arrays: Library) -> None:
    policy = DynamicScale(init_scale=2.0**127, growth_interval=2)
    states = follow(arrays, policy, "CCC")
    assert [arrays.state(state)[:2] for state in states] == [(2.0**127, 1), (2.0**127, 0), (2.0**127, 1)]


@pytest.mark.numpy
@given(
    scale=st.floats(SMALLEST, LARGEST, width=32),
    factor=st.floats(1.0, 1e30, exclude_min=True),
)
@example(scale=LARGEST, factor=1.0 + 2.0**-52)
@example(scale=2.0**127, factor=2.0 - 2.0**-24)
@example(scale=2.0**127, factor=2.0 - 2.0**-25)
def test_growth_is_the_rounded_product_or_nothing(scale: float, factor: float) -> None:
    policy = DynamicScale(init_scale=scale, growth_factor=factor, growth_interval=1)
    with np.errstate(all="raise"):
        grown = float(policy.update(policy.init(np.zeros(())), nonfinite=np.asarray(0)).scale)
    with np.errstate(all="ignore"):
        product = float(np.float32(np.float64(scale) * factor))
    assert grown == (product if math.isfinite(product) else scale)


# The bottom of float32, and bounds of the user's.


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("factor", [1e-300, 1e-40, 0.3, 0.999])
@pytest.mark.parametrize("at_min", ["clamp", "hold", "raise"])
def test_a_scale_is_never_zero_nor_subnormal(arrays: Library, factor: float, at_min: Any) -> None:
    policy = DynamicScale(init_scale=1e-37, backoff_factor=factor, at_min=at_min)
    assert all(scale >= SMALLEST for scale in scales(arrays, policy, "O" * 50))


def test_bounds_are_rounded_to_float32_so_that_they_can_be_honoured_exactly(arrays: Library) -> None:
    policy = DynamicScale(init_scale=0.1, min_scale=0.1, max_scale=0.1)
    assert policy.min_scale == policy.max_scale == float(np.float32(0.1))
    assert set(scales(arrays, policy, "OOCC")) == {float(np.float32(0.1))}


def test_clamp_moves_a_number_into_the_bounds() -> None:
    policy = DynamicScale(min_scale=2.0, max_scale=2.0**20)
    assert [policy.clamp(scale) for scale in (1.0, 2.0, 3.0, 2.0**21)] == [2.0, 2.0, 3.0, 2.0**20]
    assert DynamicScale().clamp(LARGEST) == LARGEST


@pytest.mark.numpy
@given(
    growth=st.integers(1, 8),
    backoff=st.integers(1, 8),
    lowest=st.integers(-126, 0),
    highest=st.integers(1, 127),
    sequence=st.text("CO", max_size=60),
)
def test_the_scale_stays_a_power_of_two_within_the_bounds(
    growth: int, backoff: int, lowest: int, highest: int, sequence: str
) -> None:
    policy = DynamicScale(
        init_scale=1.0,
        growth_factor=2.0**growth,
        backoff_factor=2.0**-backoff,
        growth_interval=2,
        min_scale=2.0**lowest,
        max_scale=2.0**highest,
    )
    state = policy.init(np.zeros(()))
    for step in sequence:
        state = policy.update(state, nonfinite=np.asarray(step == "O"))
        scale = float(state.scale)
        assert math.frexp(scale)[0] == 0.5
        assert policy.min_scale <= scale <= policy.max_scale  # type: ignore[operator]


# Tolerance of overflows.


def test_a_tolerated_overflow_restarts_the_run(arrays: Library) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=2, hysteresis=2)
    assert [arrays.state(state)[:2] for state in follow(arrays, policy, "COCC")] == [(8, 1), (8, 0), (8, 1), (16, 0)]


def test_growth_restarts_the_steps_of_a_tolerance_but_not_its_overflows(arrays: Library) -> None:
    policy = DynamicScale(init_scale=8.0, tolerance=0.5, growth_interval=3)
    states = [arrays.state(state) for state in follow(arrays, policy, "CCOCCC")]
    assert states[2] == (8.0, 0, 1, 3)
    assert states[5] == (16.0, 0, 1, 0)


@pytest.mark.numpy
@given(tolerance=st.floats(0.0, 1.0, width=16), sequence=st.text("CO", max_size=40))
def test_a_tolerance_counts_as_exact_fractions_do(tolerance: float, sequence: str) -> None:
    policy = DynamicScale(init_scale=2.0**60, tolerance=tolerance, growth_interval=7)
    state = policy.init(np.zeros(()))
    overflows = steps = run = 0
    for step in sequence:
        steps += 1
        before = float(state.scale)
        state = policy.update(state, nonfinite=np.asarray(step == "O"))
        change = 1.0
        if step == "O":
            overflows, run = overflows + 1, 0
            if Fraction(overflows, steps) >= Fraction(tolerance):
                change, overflows, steps = 0.5, 0, 0
        else:
            run += 1
            if run == 7:
                change, run, steps = 2.0, 0, 0
        assert float(state.scale) == before * change


# Counters, backoff by hand, exhaustion.


def test_counters_stop_at_the_largest_int32(arrays: Library) -> None:
    tracked = {"overflow_tracker": LARGEST_INT, "rescale_tracker": LARGEST_INT}
    policy = DynamicScale(init_scale=8.0, tolerance=1.0)
    for step, expected in (("C", (8.0, LARGEST_INT, LARGEST_INT, LARGEST_INT)), ("O", (4.0, 0, 0, 0))):
        longest = DynamicScale(init_scale=8.0, tolerance=1.0, growth_interval=LARGEST_INT - 1)
        state = start(arrays, longest, growth_tracker=LARGEST_INT - 3, **tracked)
        got = arrays.state(follow(arrays, policy if step == "O" else longest, step, state)[0])
        assert got[0] == expected[0]
        assert got[2:] == expected[2:]
    hysteresis = DynamicScale(init_scale=8.0, hysteresis=LARGEST_INT, hysteresis_refill=("growth",))
    state = start(arrays, hysteresis, overflow_tracker=LARGEST_INT)
    assert arrays.state(follow(arrays, hysteresis, "O", state)[0]) == (4.0, 0, LARGEST_INT, 0)


@pytest.mark.parametrize("growth_after", ["interval", "first_interval_plus_one", "interval_plus_one"])
def test_the_longest_interval_and_tracker_do_not_wrap(arrays: Library, growth_after: Any) -> None:
    policy = DynamicScale(init_scale=4.0, growth_interval=LARGEST_INT - 1, growth_after=growth_after)
    state = follow(arrays, policy, "C", start(arrays, policy, growth_tracker=LARGEST_INT))[0]
    assert arrays.state(state)[0] == 8.0
    assert arrays.state(state)[1] >= 0


def test_backoff_lowers_once_whatever_is_tolerated(arrays: Library) -> None:
    policy = DynamicScale(init_scale=8.0, hysteresis=5, min_scale=3.0)
    state = policy.backoff(start(arrays, policy, growth_tracker=7, overflow_tracker=2))
    assert arrays.state(state) == (4.0, 0, 0, 0)
    assert arrays.state(policy.backoff(state)) == (3.0, 0, 0, 0)


def test_exhausted_says_that_one_more_overflow_would_back_off_from_the_minimum(arrays: Library) -> None:
    policy = DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    state = start(arrays, policy)
    assert arrays.item(policy.at_min_scale(state)) is False
    state = follow(arrays, policy, "O", state)[0]
    assert arrays.item(policy.at_min_scale(state)) is True
    state = start(arrays, policy, scale=1.5)
    assert arrays.item(policy.at_min_scale(state)) is False


def test_a_tolerated_overflow_at_the_minimum_does_not_exhaust(arrays: Library) -> None:
    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise", hysteresis=2)
    assert arrays.item(policy.at_min_scale(start(arrays, policy))) is False
    assert arrays.item(policy.at_min_scale(follow(arrays, policy, "O")[0])) is True
    assert arrays.item(policy.at_min_scale(follow(arrays, policy, "OC")[1])) is False


@pytest.mark.parametrize("at_min", ["clamp", "hold"])
def test_a_policy_that_never_raises_is_never_exhausted(arrays: Library, at_min: Any) -> None:
    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min=at_min)
    assert policy.at_min_scale(start(arrays, policy)) is None


def test_a_static_scale_never_changes(arrays: Library) -> None:
    policy = StaticScale(init_scale=128.0)
    assert scales(arrays, policy, "COCO") == [128.0] * 4
    state = start(arrays, policy)
    assert policy.backoff(state) is state
    assert policy.at_min_scale(state) is None
    assert policy.clamp(3.0) == 3.0


def test_the_state_stays_on_the_device_of_the_array_it_was_made_like(strict: Library) -> None:
    policy = DynamicScale(growth_interval=1, tolerance=0.5, max_scale=2.0**20, at_min="raise")
    for name in ("device1", "no_float64"):
        where = strict.xp.Device(name)
        state = policy.init(strict.asarray(0.0, device=where))
        for verdict in (0, 1):
            # The verdict may be on another device.
            state = policy.update(state, nonfinite=strict.asarray(verdict, "int32", device=strict.xp.Device("device2")))
            assert {field.device for field in state} == {where}
        at_min_scale: Any = policy.at_min_scale(state)
        assert at_min_scale.device == where
        assert {field.device for field in policy.backoff(state)} == {where}
