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
MOST = 2**31 - 1


def near(at_min: str, **settings: float):
    return {"init_scale": 8.0, "at_min": at_min, **settings}


def patient(*refill: str):
    return {"init_scale": 8.0, "growth_interval": 3, "hysteresis": 2, "hysteresis_refill": refill}


# Settings, clean steps and overflows, and the scale after each.
RUNS: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "overflow restarts the run": ({"init_scale": 4.0, "growth_interval": 3}, "CCOCCC", [4.0, 4.0, 2.0, 2.0, 2.0, 4.0]),
    "tolerated overflow, too": (patient("clean_step") | {"growth_interval": 2}, "COCC", [8.0, 8.0, 8.0, 16.0]),
    "third clean step": ({"init_scale": 4.0, "growth_interval": 3}, "CCCCCCC", [4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0]),
    "each clean step": ({"init_scale": 1.0, "growth_interval": 1}, "CCOC", [2.0, 4.0, 2.0, 4.0]),
    "never": ({"init_scale": 8.0, "growth_interval": MOST}, "CCCCC", [8.0] * 5),
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
def test_the_scale_after_each_step(arrays: Library, settings, steps: str, expected: list[float]):
    assert scales(arrays, DynamicScale(**settings), steps) == expected


def test_a_tracker_beyond_a_lowered_threshold_acts_at_once(arrays: Library):
    policy = DynamicScale(init_scale=8.0, growth_interval=5, hysteresis=2)
    assert scales(arrays, policy, "C", start(arrays, policy, growth_tracker=1500)) == [16.0]
    assert scales(arrays, policy, "O", start(arrays, policy, overflow_tracker=1500)) == [4.0]


def test_an_interval_must_fit_its_tracker():
    with pytest.raises(InvalidValueError, match="growth_interval"):
        DynamicScale(growth_interval=MOST, growth_after="interval_plus_one")


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in ("bool", "int8", "int32", "int64", "float32") for value in (0, 1)),
        *(("int32", count) for count in (2, 7, MOST, -1)),
    ],
)
def test_any_number_but_zero_is_an_overflow(arrays: Library, dtype: str, value: int):
    policy = DynamicScale(init_scale=4.0)
    state = policy.update(start(arrays, policy), nonfinite=arrays.asarray(value, dtype))
    assert arrays.state(state) == (2.0 if value else 4.0, 0 if value else 1, 0, 0)


@pytest.mark.numpy
@given(
    scale=st.floats(SMALLEST, LARGEST, width=32),
    factor=st.floats(1.0, 1e30, exclude_min=True),
)
@example(scale=LARGEST, factor=1.0 + 2.0**-52)
@example(scale=2.0**127, factor=2.0 - 2.0**-24)
@example(scale=2.0**127, factor=2.0 - 2.0**-25)
def test_growth_is_the_rounded_product_or_nothing(scale: float, factor: float):
    policy = DynamicScale(init_scale=scale, growth_factor=factor, growth_interval=1)
    # A backoff that is not taken may be subnormal near the smallest scale, of which NumPy does not warn by default.
    with np.errstate(all="raise", under="ignore"):
        grown = float(policy.update(policy.init(np.zeros(())), nonfinite=np.asarray(0)).scale)
    with np.errstate(all="ignore"):
        product = float(np.float32(np.float64(scale) * factor))
    assert grown == (product if math.isfinite(product) else scale)


def test_bounds_are_rounded_to_float32_so_that_they_can_be_honoured_exactly(arrays: Library):
    policy = DynamicScale(init_scale=0.1, min_scale=0.1, max_scale=0.1)
    assert policy.min_scale == policy.max_scale == float(np.float32(0.1))
    assert set(scales(arrays, policy, "OOCC")) == {float(np.float32(0.1))}


# Tolerance of overflows.


@pytest.mark.numpy
@given(tolerance=st.floats(0.0, 1.0, width=16), sequence=st.text("CO", max_size=40))
def test_a_tolerance_counts_as_exact_fractions_do(tolerance: float, sequence: str):
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


def test_backoff_lowers_once_whatever_is_tolerated(arrays: Library):
    policy = DynamicScale(init_scale=8.0, hysteresis=5, min_scale=3.0)
    state = policy.backoff(start(arrays, policy, growth_tracker=7, overflow_tracker=2))
    assert arrays.state(state) == (4.0, 0, 0, 0)
    assert arrays.state(policy.backoff(state)) == (3.0, 0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "step", "trackers", "expected"),
    [
        # Backed off by one more of the overflows, or not by the steps that wrapped.
        ({"tolerance": 1.0}, "O", (0, MOST, MOST), (4.0, 0, 0, 0)),
        ({"tolerance": 1.0, "growth_interval": MOST}, "C", (MOST - 3, MOST, MOST), (8.0, MOST - 2, MOST, MOST)),
        ({"hysteresis": MOST, "hysteresis_refill": ("growth",)}, "O", (0, MOST, 0), (4.0, 0, MOST, 0)),
        ({"growth_interval": MOST}, "C", (MOST, 0, 0), (16.0, 0, 0, 0)),
        ({"growth_interval": MOST - 1, "growth_after": "interval_plus_one"}, "C", (MOST, 0, 0), (16.0, 0, 0, 0)),
        ({"growth_interval": MOST - 1, "growth_after": "first_interval_plus_one"}, "C", (MOST, 0, 0), (16.0, 1, 0, 0)),
    ],
)
def test_counters_stop_at_the_largest_int32(
    arrays: Library, settings, step: str, trackers: tuple[int, ...], expected: tuple[float, ...]
):
    policy = DynamicScale(init_scale=8.0, **settings)
    growth, overflows, steps = trackers
    state = start(arrays, policy, growth_tracker=growth, overflow_tracker=overflows, rescale_tracker=steps)
    assert arrays.state(follow(arrays, policy, step, state)[0]) == expected


def test_at_the_minimum_an_overflow_that_would_back_off_is_told_where_it_must_be_raised(arrays: Library):
    settings: dict[str, Any] = {"init_scale": 2.0, "min_scale": 1.0}
    for hysteresis, steps, told in ((1, "CO", [False, True]), (2, "OOOC", [False, True, True, False])):
        policy = DynamicScale(**settings, at_min="raise", hysteresis=hysteresis)
        got = [arrays.item(policy.at_min_scale(state)) for state in follow(arrays, policy, steps)]
        assert got == told
        assert arrays.item(policy.at_min_scale(start(arrays, policy, scale=1.5, overflow_tracker=1))) is False
    for at_min in ("clamp", "hold"):
        policy = DynamicScale(**settings, at_min=at_min)
        assert policy.at_min_scale(start(arrays, policy, scale=1.0)) is None


def test_a_static_scale_never_changes(arrays: Library):
    policy = StaticScale(init_scale=128.0)
    assert scales(arrays, policy, "COCO") == [128.0] * 4
    state = start(arrays, policy)
    assert policy.backoff(state) is state
    assert policy.at_min_scale(state) is None
    assert policy.clamp(3.0) == 3.0


def test_the_state_stays_on_the_device_of_the_array_it_was_made_like(strict: Library):
    policy = DynamicScale(growth_interval=1, tolerance=0.5, max_scale=2.0**20, at_min="raise")
    for name in ("device1", "no_float64"):
        where = strict.xp.Device(name)
        state = policy.init(strict.asarray(0.0, device=where))
        for verdict in (0, 1):
            # The verdict may be on another device.
            state = policy.update(state, nonfinite=strict.asarray(verdict, "int32", device=strict.xp.Device("device2")))
            assert {field.device for field in state} == {where}
        at_min_scale = policy.at_min_scale(state)
        assert at_min_scale.device == where
        assert {field.device for field in policy.backoff(state)} == {where}
