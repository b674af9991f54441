"""The rule of DynamicScale for numbers, held to the rule for arrays bit for bit; simulations."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_api_compat import array_namespace
from optimizers import Tree, iterate_plainly

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ScaleState, StaticScale
from gradscale.tools.simulation import Gradients, recorded, simulate

pytestmark = pytest.mark.numpy


def ruled(update: Callable[[Any, Any, Any], Any]):
    """Return a frozen policy whose update is a function of the namespace, the state and the count."""

    def method(_, state: ScaleState, *, nonfinite):
        return update(array_namespace(state.scale), state, nonfinite)

    return dataclasses.dataclass(frozen=True)(type("Ruled", (StaticScale,), {"update": method}))(8.0)


class Doubling(DynamicScale):
    """Keeps its own rule, though it derives from one that is known for plain numbers."""

    def update(self, state: ScaleState, *, nonfinite) -> ScaleState:  # type: ignore[override]  # noqa: ARG002
        return state._replace(scale=np.asarray(state.scale * np.float32(2.0)))


# Looks at an array's value, as a rule for NumPy alone may.
ASKS_FOR_VALUES = ruled(lambda _, state, bad: state._replace(scale=state.scale / 2) if int(bad) else state)


@pytest.mark.parametrize(("policy", "scale"), [(Doubling(init_scale=8.0), 64.0), (ASKS_FOR_VALUES, 4.0)])
def test_a_scaler_runs_a_policy_of_the_users_on_arrays(policy, scale: float):
    scaler, optimizer = GradScaler(policy=policy), Tree()
    skipped = [iterate_plainly(scaler, optimizer, value).skipped for value in (8.0, np.inf, 8.0)]
    assert (scaler.get_scale(), skipped) == (scale, [False, True, False])


# Simulations.


def test_magnitudes_overflow_above_the_largest_float16_and_those_of_half_precision_do_not_overflow_in_it():
    assert simulate(StaticScale(8.0), Gradients([65504.0 / 8.0, 8189.0])).skipped == (False, True)
    exact = [0.001, 70.0]
    half = np.asarray(exact, dtype=np.float16)
    assert simulate(StaticScale(2.0**20), Gradients(half)).skipped == (False, True)
    assert [type(value) for value in Gradients(half).largest] == [float, float]
    assert simulate(StaticScale(1.0), Gradients([10**400, math.nan, 3])).skipped == (True, True, False)


def test_a_policy_that_asks_for_a_value_or_loses_a_field_of_its_state_is_refused():
    for wrong, said in (
        (ASKS_FOR_VALUES, r"asks for the value of an array.*where\(\)"),
        (ruled(lambda _, state, _bad: state[:-1]), r"got Ruled\(.*trying it failed with ValueError"),
    ):
        with pytest.raises(InvalidTypeError, match=said):
            simulate(wrong, "C")


def test_bad_gradients_are_refused_with_what_was_there():
    bad: list[tuple[Any, Any, type[Exception], str]] = [
        (recorded, "CCX", InvalidValueError, "'X' at position 3"),
        (Gradients, [1.0, -1.0], InvalidValueError, r"step 2 must be a number from 0 on, got -1\.0"),
        *((make, x, InvalidValueError, "at least one step") for make, x in ((recorded, " "), (Gradients, []))),
        *((make, x, InvalidTypeError, "must be") for make in (recorded, Gradients) for x in (3, [1j], [np.ones(2)])),
    ]
    for make, given, error, said in bad:
        with pytest.raises(error, match=said):
            make(given)
