"""Every argument is shown by its constructor, and refused with its name and value out of range or of a wrong type."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizers import Tree
from scenarios import Alone

import gradscale
from gradscale import (
    DynamicScale,
    GradScaler,
    GroupAgreement,
    InvalidTypeError,
    InvalidValueError,
    ShardedGradScaler,
    SkipSpikes,
    StaticScale,
    StepGuard,
)
from gradscale.core import validation

NAN, INF = math.nan, math.inf

Values = dict[str, list[Any]]
# For each class, values out of range, and of a wrong type.
WRONG: dict[Any, tuple[Values, Values]] = {
    DynamicScale: (
        {
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
        },
        {
            "init_scale": ["65536", None, True, b"1", 1j, [1.0], object(), np.True_, np.complex64(1), np.array("1")],
            "growth_factor": ["2", None, False, [2.0], 2 + 0j],
            "backoff_factor": ["0.5", None, (0.5,)],
            "growth_interval": [2.5, 2000.0, True, "2000", None, NAN, np.float32(4), np.True_, [2]],
            "hysteresis": [1.0, True, "1", None],
            "tolerance": ["0.1", True, [0.1]],
            "min_scale": ["1", None, True],
            "max_scale": ["1", True, [1.0]],
        },
    ),
    StaticScale: ({"init_scale": [0, INF, NAN, 1e39, 1e-39]}, {"init_scale": ["65536", None, True]}),
    SkipSpikes: (
        {
            "window": [1, 2**16 + 1],
            "deviations": [0.0, -1.0, NAN, INF],
            "min_values": [1],
            "sides": ["below", None],
            "of": ["weights", ()],
            "patience": [-1, 2**31],
            "above": [NAN, 1e39],
        },
        {"window": [8.0, True], "deviations": ["6"], "learns_from_skipped": [1]},
    ),
    GradScaler: (
        {"history_size": [-1], "diagnose": ["always", True], "warn_after": [0], "give_up_after": [-1]},
        {
            "skip": ["spikes"],
            "on_skip": ["print"],
            "on_update": [[print, None]],
            "give_up_after": [2.5],
            "enabled": [1, 0, None, "yes", 1.0],
            "policy": [object(), 65536.0],
        },
    ),
    StepGuard: ({}, {"group": [3]}),
    GroupAgreement: ({"timeout": [0.0, NAN]}, {"group": [[], 3]}),
}
CASES = [
    pytest.param(kind, name, values, error, id=f"{kind.__name__} {name} {error.__name__}")
    for kind, tables in WRONG.items()
    for table, error in zip(tables, (InvalidValueError, InvalidTypeError), strict=True)
    for name, values in table.items()
]


@pytest.mark.parametrize(("kind", "name", "values", "error"), CASES)
def test_a_wrong_value_is_refused_with_its_name_and_value(kind, name: str, values: list[Any], error: type[Exception]):
    others = {"group": Alone(), "policy": DynamicScale()} if kind is GroupAgreement else {}
    for value in values:
        with pytest.raises(error) as caught:
            kind(**{**others, name: value})
        assert str(caught.value).startswith(f"{name} must ")
        assert f"got {value!r}" in str(caught.value)


def test_every_field_is_in_the_tables():
    for kind in (DynamicScale, StaticScale, SkipSpikes):
        assert {name for table in WRONG[kind] for name in table} == {field.name for field in dataclasses.fields(kind)}


def test_the_initial_scale_must_lie_within_the_bounds():
    for settings in (
        {"init_scale": 1.0, "min_scale": 2.0},
        {"init_scale": 4.0, "max_scale": 2.0},
        {"init_scale": 2.0, "min_scale": 4.0, "max_scale": 1.0},
    ):
        with pytest.raises(InvalidValueError, match="init_scale must lie within min_scale and max_scale") as caught:
            DynamicScale(**settings)  # type: ignore[arg-type]
        assert all(f"{name}={value!r}" in str(caught.value) for name, value in settings.items())


def test_settings_that_exclude_each_other_and_bad_items_among_good_ones_are_refused():
    for bad in ("never", None, ["growth"], 3):
        with pytest.raises(InvalidValueError, match="hysteresis_refill must be one of") as caught:
            DynamicScale(hysteresis_refill=("clean_step", bad))  # type: ignore[arg-type]
        assert f"got {bad!r}" in str(caught.value)
    for settings, message in (
        ({"window": 8, "min_values": 9}, "min_values must be an integer from 2 to 8"),
        ({"of": ("loss", 3)}, "of must be one of"),
        ({"above": 3.0, "sides": "both"}, "above= is a bound on one side"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            SkipSpikes(**settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"hysteresis= or tolerance=, not both, got 2 and 0\.5"):
        DynamicScale(hysteresis=2, tolerance=0.5)
    with pytest.raises(InvalidValueError, match="policy= or init_scale=, growth_interval=, not both"):
        GradScaler(policy=DynamicScale(), init_scale=2.0, growth_interval=3)


def test_numbers_of_libraries_become_plain_ones():
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
    assert DynamicScale(init_scale=4.0, min_scale=4.0, max_scale=4.0).init_scale == 4.0


def test_the_scalers_own_arguments_are_refused():
    for policy, said in (
        (DynamicScale, r": call it, DynamicScale\(\)$"),
        (gradscale.presets.fairseq, r": call it, fairseq\(\)$"),
        ("megatron", r"got 'megatron': write gradscale\.presets\.named\('megatron'\)$"),
    ):
        with pytest.raises(InvalidTypeError, match=f"policy must be an instance of .*{said}"):
            GradScaler(policy=policy)  # type: ignore[arg-type]
    assert GradScaler(enabled=np.False_).is_enabled() is False  # type: ignore[arg-type]
    # With MPI mpi4py's is no adapter for arrays; without, it cannot be imported.
    for backend, said in (("nunpy", "'nunpy'.*did you mean 'numpy'"), ("mpi4py", "mpi4py")):
        with pytest.raises((gradscale.BackendError, gradscale.BackendNotAvailableError), match=said):
            GradScaler(backend=backend)


@given(st.floats(1.0, validation.LARGEST_FLOAT32, exclude_min=True))
def test_the_largest_with_finite_product_is_the_largest(factor: float):
    largest = np.float32(validation.largest_with_finite_product(factor))
    with np.errstate(over="ignore"):
        # A library without float64 multiplies by the factor as a float32.
        factor = max(factor, float(np.float32(factor)))
        assert np.isfinite(np.float32(np.float64(largest) * factor))
        above = np.nextafter(largest, np.float32(np.inf))
        assert not np.isfinite(above) or not np.isfinite(np.float32(np.float64(above) * factor))


def test_a_name_that_is_no_option_is_an_error():
    for make in (GradScaler, lambda **options: ShardedGradScaler(group=None, **options)):
        with pytest.raises(InvalidTypeError, match=r"unexpected keyword arguments \['growth'\]"):
            make(growth=2.0)
        with pytest.raises(InvalidTypeError, match="did you mean 'growth_factor'"):
            make(grow_factor=2.0)
        settings = r"write policy=gradscale\.DynamicScale\(init_scale=4\.0, min_scale=2\)$"
        with pytest.raises(InvalidTypeError, match=settings):
            make(init_scale=4.0, min_scale=2)
    for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "policy", "min_scale", "device"):
        told = rf"keyword arguments \['{name}'\].*a StepGuard multiplies nothing: .* taken by GradScaler$"
        with pytest.raises(InvalidTypeError, match=told):
            StepGuard(**{name: 2.0})
    with pytest.raises(InvalidTypeError, match="did you mean 'give_up_after'"):
        StepGuard(give_up=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidTypeError, match=r"takes its options by name, such as group=, got \(2\.0,\)"):
        StepGuard(2.0)  # type: ignore[misc]
    with pytest.raises(InvalidTypeError, match=r"group= is taken by gradscale\.ShardedGradScaler$"):
        GradScaler(group=None)  # type: ignore[call-arg]
    with pytest.raises(InvalidTypeError, match=r"by name, such as init_scale=, got \(65536\.0,\)"):
        GradScaler(65536.0)  # type: ignore[misc]
    told = r"missing a required .*: 'group', which must be a communicator.*alone wants gradscale\.GradScaler\)$"
    with pytest.raises(InvalidTypeError, match=told):
        ShardedGradScaler()  # type: ignore[call-arg]
    with pytest.raises(InvalidTypeError, match=r"unscale_\(\) takes .* by name, such as max_norm=, got \(1\.0,"):
        GradScaler().unscale_(Tree([]), 1.0)  # type: ignore[arg-type]
