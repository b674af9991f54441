"""The rule of DynamicScale for numbers, held to the rule for arrays bit for bit; simulations."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from libraries import opened
from optimizers import Tree, iterate

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ScaleState, StaticScale
from gradscale.core.protocols import Numbers
from gradscale.policies.dynamic import next_numbers
from gradscale.tools.simulation import Gradients, recorded, simulate

pytestmark = pytest.mark.numpy


def ruled(update: Callable[[Any, Any, Any], Any]):
    """Return a frozen policy whose update is a function of the namespace, the state and the count."""

    def method(_, state: ScaleState, *, nonfinite):
        return update(array_namespace(state.scale), state, nonfinite)

    return dataclasses.dataclass(frozen=True)(type("Ruled", (StaticScale,), {"update": method}))(8.0)


def test_a_class_that_derives_from_dynamic_scale_keeps_its_own_rule():
    class Doubling(DynamicScale):
        def update(self, state: ScaleState, *, nonfinite) -> ScaleState:  # type: ignore[override]  # noqa: ARG002
            return state._replace(scale=np.asarray(state.scale * np.float32(2.0)))

    assert next_numbers(Doubling(), Numbers(8.0), 0) is None
    scaler, optimizer = GradScaler(policy=Doubling(init_scale=8.0)), Tree()
    with opened("numpy") as library:
        iterate(library, scaler, optimizer, [8.0])
    assert scaler.get_scale() == 16.0


# Looks at an array's value, as a rule for NumPy alone may.
ASKS_FOR_VALUES = ruled(lambda _, state, bad: state._replace(scale=state.scale / 2) if int(bad) else state)


def test_a_scaler_runs_a_policy_that_needs_arrays_on_arrays():
    scaler, optimizer = GradScaler(policy=ASKS_FOR_VALUES), Tree()
    with opened("numpy") as library:
        skipped = [iterate(library, scaler, optimizer, [value]).skipped for value in (8.0, np.inf, 8.0)]
    assert (scaler.get_scale(), skipped) == (4.0, [False, True, False])


# Simulations.


def test_letters_give_the_scale_that_each_step_used():
    result = simulate(DynamicScale(init_scale=8.0, growth_interval=2), "cc oC", name="x")
    assert result.scale == (8.0, 8.0, 16.0, 8.0)
    assert result.skipped == (False, False, True, False)
    assert (result.final_scale, result.skipped_steps) == (8.0, 1)


@pytest.mark.parametrize("magnitude", [65504.0 / 8.0, 8189.0], ids=["at-the-largest", "above-it"])
def test_a_magnitude_overflows_above_the_largest_float16(magnitude: float):
    assert simulate(StaticScale(8.0), Gradients([magnitude])).skipped == (magnitude > 8188.0,)


def test_magnitudes_of_half_precision_do_not_overflow_in_it():
    exact = [0.001, 70.0]
    half = np.asarray(exact, dtype=np.float16)
    assert simulate(StaticScale(2.0**20), Gradients(half)).skipped == (False, True)
    assert [type(value) for value in Gradients(half).largest] == [float, float]
    assert simulate(StaticScale(1.0), Gradients([10**400, math.nan, 3])).skipped == (True, True, False)


def test_a_policy_that_raises_ends_its_run_in_that_step():
    result = simulate(DynamicScale(init_scale=4.0, min_scale=1.0, at_min="raise"), "OOOOO")
    assert (result.raised_at, result.scale) == (3, (4.0, 2.0, 1.0))


class _Branching:
    init_scale = 1.0
    init = DynamicScale().init

    def update(self, state, *, nonfinite):
        return state if nonfinite else StaticScale().backoff(state)

    def at_min_scale(self, _):
        return None


def test_a_policy_that_asks_for_a_value_is_refused():
    policy = _Branching()
    with pytest.raises(InvalidTypeError, match=r"asks for the value of an array.*where\(\)"):
        simulate(policy, "C")


class _Forgetful(StaticScale):
    def update(self, state, *, nonfinite):  # noqa: ARG002
        return state[:-1]


def test_a_policy_whose_state_loses_a_field_is_refused():
    with pytest.raises(InvalidTypeError, match=r"got _Forgetful\(.*trying it failed with ValueError"):
        simulate(_Forgetful(8.0), "C")


def test_bad_gradients_are_refused_with_what_was_there():
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        (recorded, "CCX", InvalidValueError, "'X' at position 3"),
        (recorded, " ", InvalidValueError, "at least one step"),
        (Gradients, [1.0, -1.0], InvalidValueError, r"step 2 must be a number from 0 on, got -1\.0"),
        (Gradients, [], InvalidValueError, "at least one step"),
        *((make, x, InvalidTypeError, "must be") for make in (recorded, Gradients) for x in (3, None, [1j], [None])),
        *((make, [np.ones(2)], InvalidTypeError, "must be") for make in (recorded, Gradients)),
    ]
    for make, given_, error, said in bad:
        with pytest.raises(error, match=said):
            make(given_)
