"""GradScaler's getters and setters, update(new_scale), the disabled scaler, and the error at the minimum."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from axes import require
from libraries import Library
from optimizers import Tree, iterate, iterate_plainly

from gradscale import (
    DynamicScale,
    GradScaler,
    InvalidTypeError,
    InvalidValueError,
    ScaleUnderflowError,
    StaticScale,
    StepReport,
)


def test_getters_before_and_after_the_first_array(arrays: Library) -> None:
    scaler = GradScaler(init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    for _ in range(2):
        numbers = (
            scaler.get_scale(),
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )
        assert numbers == (8.0, 3.0, 0.25, 7)
        assert [type(number) for number in numbers] == [float, float, float, int]
        assert scaler.is_enabled() is True
        scaler.scale(arrays.asarray(1.0))


def test_setters_take_effect_at_the_next_update(arrays: Library) -> None:
    scaler = GradScaler(init_scale=8.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    optimizer = Tree()
    iterate(arrays, scaler, optimizer)
    assert scaler.get_scale() == 32.0
    iterate(arrays, scaler, optimizer, [math.nan])
    assert scaler.get_scale() == 8.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(DynamicScale):
    """Counts how often its rule is run over arrays, or traced."""

    runs: ClassVar[list[int]] = []

    def next_state(self, xp: ModuleType, state: Any, overflow: Any) -> Any:
        self.runs.append(1)
        return super().next_state(xp, state, overflow)


@pytest.mark.numpy
def test_a_setting_that_is_set_to_what_it_is_costs_nothing() -> None:
    scaler = GradScaler(policy=Counted())
    iterate_plainly(scaler, 2)
    before = len(Counted.runs)
    for setting, value in (("growth_interval", np.int64(2000)), ("growth_factor", 2), ("backoff_factor", 0.5)):
        getattr(scaler, f"set_{setting}")(value)
        iterate_plainly(scaler, 1)
    assert len(Counted.runs) == before > 0
    scaler.set_growth_interval(2001)
    assert len(Counted.runs) > before


def test_other_settings_survive_a_setter() -> None:
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, hysteresis=2, min_scale=2.0))
    scaler.set_growth_factor(3.0)
    expected = DynamicScale(init_scale=8.0, hysteresis=2, min_scale=2.0, growth_factor=3.0)
    assert scaler.state_dict()["policy"] == GradScaler(policy=expected).state_dict()["policy"]


def test_a_static_scale_has_no_factors() -> None:
    scaler = GradScaler(policy=StaticScale(8.0))
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.0, 1.0, 1)
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        with pytest.raises(InvalidTypeError, match=f"{name} can be set only of a DynamicScale"):
            getattr(scaler, f"set_{name}")(2)


# update(new_scale).


@pytest.mark.parametrize(
    "new_scale", [128.0, 128, np.float32(128), np.float64(128), np.int64(128), np.array([[128.0]]), np.float16(128)]
)
@pytest.mark.parametrize("seen", [False, True], ids=["before any array", "after one"])
def test_a_new_scale_may_be_a_number_of_any_library(arrays: Library, new_scale: Any, seen: bool) -> None:
    scaler = GradScaler()
    if seen:
        iterate(arrays, scaler, Tree())
    scaler.update(new_scale)
    assert scaler.get_scale() == 128.0
    assert type(scaler.get_scale()) is float
    arrays.assert_array(scaler.scale(arrays.asarray(2.0)), 256.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_new_scale_may_be_an_array_of_one_element(arrays: Library, shape: tuple[int, ...]) -> None:
    scaler = GradScaler()
    scaler.scale(arrays.asarray(1.0))
    for dtype in (*arrays.reals, "int32"):
        new_scale = arrays.xp.reshape(arrays.asarray(96.0 if "int" not in dtype else 96, dtype), shape)
        scaler.update(new_scale)
        assert scaler.get_scale() == 96.0
        arrays.assert_array(scaler.scale(arrays.asarray(1.0)), 96.0)


@pytest.mark.numpy
def test_a_new_scale_may_be_of_ml_dtypes() -> None:
    scaler = GradScaler()
    scaler.update(np.array(96.0, dtype=require("ml_dtypes").bfloat16))
    assert scaler.get_scale() == 96.0


def test_a_new_scale_keeps_the_trackers_and_ends_the_iteration(arrays: Library) -> None:
    scaler, optimizer = GradScaler(), Tree()
    iterate(arrays, scaler, optimizer)
    iterate(arrays, scaler, optimizer)
    optimizer.grads = [arrays.asarray([math.inf])]
    scaler.scale(arrays.asarray(1.0))
    scaler.step(optimizer)
    scaler.update(4.0)
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["iteration"]) == (4.0, 2, 4)


BAD_VALUES: list[Any] = [0, 0.0, -1.0, math.inf, math.nan, 1e39, 1e-40, np.float32("nan")]
BAD_TYPES = ["128", True, 1j, [128.0], object(), np.array([1.0, 2.0]), np.array([]), np.array(True), np.array("128")]


@pytest.mark.parametrize("seen", [False, True], ids=["before any array", "after one"])
def test_a_bad_new_scale_changes_nothing(arrays: Library, seen: bool) -> None:
    scaler, optimizer = GradScaler(), Tree()
    if seen:
        iterate(arrays, scaler, optimizer)
    before = scaler.state_dict()
    for wrong in BAD_VALUES:
        for given in (wrong, arrays.asarray(float(wrong), "float64"), arrays.asarray([float(wrong)], "float64")):
            with pytest.raises(InvalidValueError, match=r"new_scale must be .*got"):
                scaler.update(given)
    for wrong in [*BAD_TYPES, arrays.asarray([2.0, 2.0]), arrays.asarray(1.0, "complex64"), arrays.asarray([])]:
        with pytest.raises(InvalidTypeError, match=r"new_scale must be .*got"):
            scaler.update(wrong)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("wrong", [1.0, 64.0])
def test_a_new_scale_must_lie_within_the_policys_bounds(arrays: Library, wrong: float) -> None:
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=2.0, max_scale=32.0))
    for new_scale in (wrong, arrays.asarray(wrong)):
        with pytest.raises(InvalidValueError, match="within the policy's bounds"):
            scaler.update(new_scale)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0


def test_a_static_scale_can_be_replaced_by_hand(arrays: Library) -> None:
    scaler = GradScaler(policy=StaticScale(8.0))
    scaler.update(3.0)
    iterate(arrays, scaler, Tree(), [math.nan])
    assert scaler.get_scale() == 3.0


# Disabled.


def test_a_disabled_scaler_passes_everything_through(arrays: Library) -> None:
    scaler = GradScaler(enabled=False)
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
    assert scaler.get_scale() == 1.0
    assert scaler.is_enabled() is False
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})
    assert scaler.state_dict() == {}


def test_a_disabled_scaler_still_checks_its_arguments() -> None:
    with pytest.raises(InvalidValueError, match="growth_factor"):
        GradScaler(enabled=False, growth_factor=0.5)


# The minimum.


def test_an_overflow_at_the_minimum_raises_and_the_scaler_can_be_used_on(arrays: Library) -> None:
    policy = DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    scaler, optimizer = GradScaler(policy=policy), Tree()
    assert iterate(arrays, scaler, optimizer, [math.nan]).skipped
    with pytest.raises(ScaleUnderflowError, match=r"scale is at its minimum, 1\.0: .*at_min=.raise") as caught:
        iterate(arrays, scaler, optimizer, [math.nan])
    assert isinstance(caught.value, FloatingPointError)
    # The iteration has ended, its report is there, and a checkpoint can be made.
    assert scaler.last_step(optimizer) == StepReport(True, 1.0, 1, "overflow", 2, 0, 1)
    assert scaler.state_dict()["iteration"] == 3
    assert scaler.get_scale() == 1.0
    assert not iterate(arrays, scaler, optimizer, [1.0]).skipped
    with pytest.raises(ScaleUnderflowError):
        iterate(arrays, scaler, optimizer, [1.0, math.inf])


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "second", "third"])
def test_an_overflow_of_any_optimizer_at_the_minimum_raises(arrays: Library, bad: int) -> None:
    scaler = GradScaler(policy=DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise"))
    scaler.scale(arrays.asarray(1.0))
    for index in range(3):
        optimizer = Tree()
        optimizer.grads = [arrays.asarray([math.inf if index == bad else 1.0])]
        scaler.step(optimizer)
    with pytest.raises(ScaleUnderflowError):
        scaler.update()


def test_a_new_scale_instead_of_the_policys_does_not_raise(arrays: Library) -> None:
    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    scaler, optimizer = GradScaler(policy=policy), Tree([arrays.asarray([math.nan])])
    scaler.scale(arrays.asarray(1.0))
    scaler.step(optimizer)
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0


def test_a_policy_of_the_users_own(arrays: Library) -> None:
    class Halving(StaticScale):
        def update(self, state: Any, *, nonfinite: Any) -> Any:
            xp = arrays.xp
            half = xp.full_like(state.scale, 0.5)
            return state._replace(scale=xp.asarray(xp.where(nonfinite > 0, state.scale * half, state.scale)))

    scaler, optimizer = GradScaler(policy=Halving(8.0)), Tree()
    for value in (1.0, math.nan, 1.0):
        iterate(arrays, scaler, optimizer, [value])
    assert scaler.get_scale() == 4.0
