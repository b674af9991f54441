"""GradScaler's getters and setters, update(new_scale), the disabled scaler, and the error at the minimum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree, iterate

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidValueError, ScaleUnderflowError, StaticScale, StepReport


def test_other_settings_survive_a_setter_and_a_static_scale_has_no_factors():
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, hysteresis=2, min_scale=2.0))
    scaler.set_growth_factor(3.0)
    expected = DynamicScale(init_scale=8.0, hysteresis=2, min_scale=2.0, growth_factor=3.0)
    assert scaler.state_dict()["policy"] == GradScaler(policy=expected).state_dict()["policy"]
    static = GradScaler(policy=StaticScale(8.0))
    assert (static.get_growth_factor(), static.get_backoff_factor(), static.get_growth_interval()) == (1.0, 1.0, 1)
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        with pytest.raises(gradscale.InvalidTypeError, match=f"{name} can be set only of a DynamicScale"):
            getattr(static, f"set_{name}")(2)


# update(new_scale).


@pytest.mark.parametrize("seen", [False, True], ids=["before any array", "after one"])
def test_a_new_scale_may_be_a_number_or_an_array_of_one_element_of_any_library(arrays: Library, seen: bool):
    numbers = [96.0, 96, np.float32(96), np.int64(96), np.array([[96.0]]), np.float16(96)]
    own = [arrays.asarray(96, dtype) for dtype in (*arrays.reals, "int32")]
    for new_scale in (*numbers, *own, *(arrays.xp.reshape(one, (1, 1)) for one in own)):
        scaler = GradScaler()
        if seen:
            iterate(arrays, scaler, Tree())
        scaler.update(new_scale)
        assert scaler.get_scale() == 96.0
        assert type(scaler.get_scale()) is float
        arrays.assert_array(scaler.scale(arrays.asarray(2.0)), 192.0)


BAD_VALUES: list[Any] = [0, 0.0, -1.0, math.inf, math.nan, 1e39, 1e-40, np.float32("nan")]
BAD_TYPES = ["128", True, 1j, [128.0], object(), np.array([1.0, 2.0]), np.array([]), np.array(True), np.array("128")]


@pytest.mark.parametrize("seen", [False, True], ids=["before any array", "after one"])
def test_a_bad_new_scale_changes_nothing(arrays: Library, seen: bool):
    scaler, optimizer = GradScaler(), Tree()
    if seen:
        iterate(arrays, scaler, optimizer)
    before = scaler.state_dict()
    for wrong in BAD_VALUES:
        for given in (wrong, arrays.asarray(float(wrong), "float64"), arrays.asarray([float(wrong)], "float64")):
            with pytest.raises(InvalidValueError, match=r"new_scale must be .*got"):
                scaler.update(given)
    for wrong in [*BAD_TYPES, arrays.asarray([2.0, 2.0]), arrays.asarray(1.0, "complex64"), arrays.asarray([])]:
        with pytest.raises(gradscale.InvalidTypeError, match=r"new_scale must be .*got"):
            scaler.update(wrong)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("wrong", [1.0, 64.0])
def test_a_new_scale_must_lie_within_the_policys_bounds(arrays: Library, wrong: float):
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=2.0, max_scale=32.0))
    for new_scale in (wrong, arrays.asarray(wrong)):
        with pytest.raises(InvalidValueError, match="within the policy's bounds"):
            scaler.update(new_scale)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    static = GradScaler(policy=StaticScale(8.0))
    static.update(3.0)
    iterate(arrays, static, Tree(), [math.nan])
    assert static.get_scale() == 3.0


# Disabled.


def test_a_disabled_scaler_passes_everything_through(arrays: Library):
    def never(report):
        raise AssertionError(report)

    scaler = GradScaler(enabled=False, on_skip=never, on_update=never)
    loss = [arrays.asarray(2.0), "anything"]
    assert scaler.scale(loss) is loss
    optimizer = Tree([arrays.asarray([math.nan])])
    for _ in range(2):
        scaler.unscale_(optimizer)
    assert scaler.step(optimizer, 1, two=2) == "stepped"
    assert scaler.step(optimizer) == "stepped"
    assert optimizer.calls == [((1,), {"two": 2}), ((), {})]
    arrays.assert_array(optimizer.grads[0], [math.nan])
    scaler.update()
    scaler.update("anything")
    assert scaler.last_step(optimizer) == StepReport(False, 1.0, 0, "disabled", 1, 0)
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.history) == (1.0, False, [])
    scaler.load_state_dict({"anything": 1})
    assert scaler.state_dict() == {}
    with pytest.raises(InvalidValueError, match="growth_factor"):
        GradScaler(enabled=False, growth_factor=0.5)


# The minimum.


def test_an_overflow_at_the_minimum_raises_and_the_scaler_can_be_used_on(arrays: Library):
    policy = DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    scaler, optimizer = GradScaler(policy=policy), Tree()
    assert iterate(arrays, scaler, optimizer, [math.nan]).skipped
    with pytest.raises(ScaleUnderflowError, match=r"scale is at its minimum, 1\.0: .*at_min=.raise") as caught:
        iterate(arrays, scaler, optimizer, [math.nan])
    assert isinstance(caught.value, FloatingPointError)
    # The iteration has ended, its report is there, and a checkpoint can be made.
    assert scaler.last_step(optimizer) == StepReport(True, 1.0, 1, "overflow", 2, 0, 1, by=0)
    assert scaler.state_dict()["iteration"] == 3
    assert scaler.get_scale() == 1.0
    assert not iterate(arrays, scaler, optimizer, [1.0]).skipped
    with pytest.raises(ScaleUnderflowError):
        iterate(arrays, scaler, optimizer, [1.0, math.inf])


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "second", "third"])
def test_an_overflow_of_any_optimizer_at_the_minimum_raises_but_for_a_new_scale(arrays: Library, bad: int):
    scaler = GradScaler(policy=DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise"))
    for new_scale in ((), (16.0,), (1.0,), ()):
        scaler.scale(arrays.asarray(1.0))
        for index in range(3):
            scaler.step(Tree([arrays.asarray([math.inf if index == bad else 1.0])]))
        if new_scale:
            scaler.update(*new_scale)
            assert scaler.get_scale() == new_scale[0]
        else:
            with pytest.raises(ScaleUnderflowError):
                scaler.update()
