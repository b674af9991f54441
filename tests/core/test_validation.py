"""Every argument out of range or of a wrong type is refused with its name and value."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from axes import require
from hypothesis import given
from hypothesis import strategies as st

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, StaticScale
from gradscale.core import validation

NAN, INF = math.nan, math.inf

WRONG_VALUES: dict[str, list[Any]] = {
    "init_scale": [0, 0.0, -1.0, INF, -INF, NAN, 1e39, 1e-39, 10**400, np.float64(NAN)],
    "growth_factor": [1, 1.0, 0.5, 0, -2.0, INF, NAN, 1e39, 1e300],
    "backoff_factor": [0, 1, -1, 2, 1.0, 0.0, NAN, INF],
    "growth_interval": [0, -1, 2**31],
    "growth_after": ["", "Interval", "interval_plus_two", None, 3],
    "hysteresis": [0, -1, 2**31],
    "hysteresis_refill": [(), "never", 5, None],
    "tolerance": [-0.1, 1.5, NAN, INF],
    "min_scale": [0, -1.0, INF, NAN, 1e-45],
    "max_scale": [0, -1.0, INF, NAN, 1e39],
    "at_min": ["", "stop", None, True],
}
WRONG_TYPES: dict[str, list[Any]] = {
    "init_scale": ["65536", None, True, b"1", 1j, [1.0], object(), np.True_, np.complex64(1), np.array("1")],
    "growth_factor": ["2", None, False, [2.0], 2 + 0j],
    "backoff_factor": ["0.5", None, (0.5,)],
    "growth_interval": [2.5, 2000.0, True, "2000", None, NAN, np.float32(4), np.True_, [2]],
    "hysteresis": [1.0, True, "1", None],
    "tolerance": ["0.1", True, [0.1]],
    "min_scale": ["1", None, True],
    "max_scale": ["1", True, [1.0]],
}


def _cases(table: dict[str, list[Any]]) -> list[Any]:
    # Up to an address, which differs from process to process.
    return [
        pytest.param(name, value, id=f"{name}={repr(value).partition(' at 0x')[0]:.30}")
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "value"), _cases(WRONG_VALUES))
def test_a_value_out_of_range_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidValueError) as caught:
        DynamicScale(**{name: value})
    assert name in str(caught.value)
    assert f"got {value!r}" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), _cases(WRONG_TYPES))
def test_a_value_of_a_wrong_type_is_refused_with_its_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidTypeError) as caught:
        DynamicScale(**{name: value})
    assert name in str(caught.value)
    assert f"got {value!r}" in str(caught.value)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("bad", ["never", None, ["growth"], 3])
def test_a_bad_item_among_several_is_refused_with_its_value(bad: Any) -> None:
    with pytest.raises(InvalidValueError, match="hysteresis_refill must be one of") as caught:
        DynamicScale(hysteresis_refill=("clean_step", bad))
    assert f"got {bad!r}" in str(caught.value)


def test_every_field_is_in_the_tables() -> None:
    assert WRONG_VALUES.keys() == {field.name for field in dataclasses.fields(DynamicScale)}


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 1.0, "min_scale": 2.0},
        {"init_scale": 4.0, "max_scale": 2.0},
        {"init_scale": 2.0, "min_scale": 4.0, "max_scale": 1.0},
    ],
    ids=["below", "above", "crossed"],
)
def test_the_initial_scale_must_lie_within_the_bounds(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match="init_scale must lie within min_scale and max_scale") as caught:
        DynamicScale(**settings)  # type: ignore[arg-type]
    for name, value in settings.items():
        assert f"{name}={value!r}" in str(caught.value)


def test_bounds_may_meet_the_initial_scale() -> None:
    assert DynamicScale(init_scale=4.0, min_scale=4.0, max_scale=4.0).init_scale == 4.0


def test_hysteresis_and_tolerance_exclude_each_other() -> None:
    with pytest.raises(InvalidValueError, match=r"hysteresis= or tolerance=, not both, got 2 and 0\.5"):
        DynamicScale(hysteresis=2, tolerance=0.5)


def test_a_static_scale_is_checked_as_well() -> None:
    for wrong in WRONG_VALUES["init_scale"]:
        with pytest.raises(InvalidValueError, match="init_scale"):
            StaticScale(wrong)
    for wrong in WRONG_TYPES["init_scale"]:
        with pytest.raises(InvalidTypeError, match="init_scale"):
            StaticScale(wrong)


def test_numbers_of_libraries_become_plain_ones() -> None:
    policy = DynamicScale(
        init_scale=np.float32(8),  # type: ignore[arg-type]
        growth_factor=Fraction(3, 2),  # type: ignore[arg-type]
        growth_interval=np.int64(7),  # type: ignore[arg-type]
        hysteresis=np.array(2),  # type: ignore[arg-type]
        max_scale=np.array(64.0),  # type: ignore[arg-type]
        hysteresis_refill=["growth", "clean_step", "growth"],  # type: ignore[arg-type]
    )
    plain = (policy.init_scale, policy.growth_factor, policy.growth_interval, policy.hysteresis, policy.max_scale)
    assert plain == (8.0, 1.5, 7, 2, 64.0)
    assert [type(number) for number in plain] == [float, float, int, int, float]
    assert policy.hysteresis_refill == ("clean_step", "growth")
    assert hash(policy) == hash(dataclasses.replace(policy))


@pytest.mark.torch
def test_numbers_of_torch_become_plain_ones() -> None:
    torch = require("torch")
    policy = DynamicScale(init_scale=torch.tensor(8.0), growth_interval=torch.tensor(7))
    assert repr((policy.init_scale, policy.growth_interval)) == "(8.0, 7)"
    with pytest.raises(InvalidTypeError):
        DynamicScale(init_scale=torch.tensor(True))


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DynamicScale().growth_factor = 3.0  # type: ignore[misc]


# The scaler's own arguments.


def test_the_scaler_takes_a_policy_or_the_factors_but_not_both() -> None:
    with pytest.raises(InvalidValueError, match="policy= or init_scale=, growth_interval=, not both"):
        GradScaler(policy=DynamicScale(), init_scale=2.0, growth_interval=3)
    assert GradScaler(init_scale=2.0, growth_interval=3).get_growth_interval() == 3
    assert GradScaler(policy=DynamicScale(init_scale=4.0)).get_scale() == 4.0


@pytest.mark.parametrize("wrong", [DynamicScale, "dynamic", object(), 65536.0])
def test_a_policy_must_be_an_object_with_the_methods_of_one(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match="policy must be"):
        GradScaler(policy=wrong)


@pytest.mark.parametrize("wrong", [1, 0, None, "yes", 1.0])
def test_enabled_must_be_a_bool(wrong: Any) -> None:
    with pytest.raises(InvalidTypeError, match="enabled must be True or False"):
        GradScaler(enabled=wrong)


def test_enabled_may_be_a_numpy_bool() -> None:
    assert GradScaler(enabled=np.False_).is_enabled() is False  # type: ignore[arg-type]


def test_a_backend_that_is_not_registered_is_refused_at_once() -> None:
    with pytest.raises(gradscale.BackendNotAvailableError, match="'nunpy'"):
        GradScaler(backend="nunpy")


# Arithmetic on the host.


@given(st.floats(allow_nan=False))
def test_rounding_to_float32_is_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        assert validation.round_to_float32(value) == float(np.float32(value))


@given(st.floats(2.0**-126, validation.LARGEST_FLOAT32, width=32))
def test_a_float32_comes_back_from_its_bits(value: float) -> None:
    assert validation.float32_from_bits(int(np.float32(value).view(np.int32))) == value


@given(st.floats(1.0, validation.LARGEST_FLOAT32, exclude_min=True))
def test_the_largest_with_finite_product_is_the_largest(factor: float) -> None:
    largest = np.float32(validation.largest_with_finite_product(factor))
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float32(np.float64(largest) * factor))
        above = np.nextafter(largest, np.float32(np.inf))
        assert not np.isfinite(above) or not np.isfinite(np.float32(np.float64(above) * factor))


@pytest.mark.parametrize("factor", [1.0 + 2.0**-52, 2.0, 3.7, 2.0**100])
def test_the_largest_with_finite_product_is_found_in_few_steps(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    value_of = validation.float32_from_bits

    def counted(bits: int) -> float:
        tried.append(bits)
        assert len(tried) < 8, "it goes through the numbers one by one, of which there are two billion"
        return value_of(bits)

    monkeypatch.setattr(validation, "float32_from_bits", counted)
    assert validation.largest_with_finite_product(factor) > 0.0
    assert tried


@given(st.floats(1e-300, 1e300))
def test_powers_of_two_are_told_apart(value: float) -> None:
    assert validation.is_power_of_two(value) == (math.log2(value).is_integer() and 2.0 ** math.log2(value) == value)
