"""Every argument is shown by its constructor, and refused with its name and value out of range or of a wrong type."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizers import Tree
from scenarios import Alone

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler, SkipSpikes
from gradscale.core import validation

NAN, INF = math.nan, math.inf

NO_NUMBERS: tuple[Any, ...] = ("2", True, b"1", 1j, [1.0], object(), np.True_, np.complex64(1), np.array("1"))
NO_INTEGERS: tuple[Any, ...] = (2.5, 2000.0, True, "2000", None, NAN, np.float32(4), np.True_, [2])
# For each class, values out of range, and of a wrong type.
WRONG: dict[Any, tuple[dict[str, Sequence[Any]], dict[str, Sequence[Any]]]] = {
    DynamicScale: (
        {
            "init_scale": [0, 0.0, -1.0, INF, -INF, NAN, 1e39, 1e-39, 10**400, np.float64(NAN)],
            "growth_factor": [1, 1.0, 0.5, 0, -2.0, INF, NAN, 1e39, 1e300],
            "backoff_factor": [0, 1, -1, 2, 1.0, 0.0, NAN, INF],
            **dict.fromkeys(("growth_interval", "hysteresis"), (0, -1, 2**31)),
            "growth_after": ["", "Interval", "interval_plus_two", None, 3],
            "hysteresis_refill": [(), "never", 5, None],
            "tolerance": [-0.1, 1.5, NAN, INF],
            **dict.fromkeys(("min_scale", "max_scale"), (0, -1.0, INF, NAN, 1e39, 1e-45)),
            "at_min": ["", "stop", None, True],
        },
        {
            **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "min_scale"), (None, *NO_NUMBERS)),
            **dict.fromkeys(("tolerance", "max_scale"), NO_NUMBERS),
            **dict.fromkeys(("growth_interval", "hysteresis"), NO_INTEGERS),
        },
    ),
    gradscale.StaticScale: ({"init_scale": [0, INF, NAN, 1e39, 1e-39]}, {"init_scale": [None, *NO_NUMBERS]}),
    SkipSpikes: (
        {
            "window": [1, 2**16 + 1],
            "deviations": [0.0, -1.0, NAN, INF],
            "min_values": [1],
            "above": [NAN, 1e39],
            "sides": ["below", None],
            "of": ["weights", ()],
            "patience": [-1, 2**31],
        },
        {"window": [8.0, True], "deviations": NO_NUMBERS, "learns_from_skipped": [1], "act": [0]},
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
    gradscale.StepGuard: ({}, {"group": [3]}),
    gradscale.GroupAgreement: ({"timeout": [0.0, NAN]}, {"group": [[], 3]}),
}
CASES = [
    pytest.param(kind, name, values, error, id=f"{kind.__name__} {name} {error.__name__}")
    for kind, tables in WRONG.items()
    for table, error in zip(tables, (InvalidValueError, InvalidTypeError), strict=True)
    for name, values in table.items()
]


@pytest.mark.parametrize(("kind", "name", "values", "error"), CASES)
def test_a_wrong_value_is_refused_with_its_name_and_value(kind, name: str, values, error: type[Exception]):
    others = {"group": Alone(), "policy": DynamicScale()} if kind is gradscale.GroupAgreement else {}
    for value in values:
        with pytest.raises(error) as caught:
            kind(**{**others, name: value})
        assert str(caught.value).startswith(f"{name} must ")
        assert f"got {value!r}" in str(caught.value)


def test_every_field_is_in_the_tables():
    for kind in (DynamicScale, gradscale.StaticScale, SkipSpikes):
        assert {name for table in WRONG[kind] for name in table} == {field.name for field in dataclasses.fields(kind)}


def test_settings_that_exclude_each_other_and_bad_items_among_good_ones_are_refused():
    bounds = "init_scale must lie within min_scale and max_scale, got "
    for make, settings, message in (
        *((DynamicScale, {"hysteresis_refill": ("clean_step", bad)}, "one of") for bad in ("never", ["growth"], 3)),
        (DynamicScale, {"init_scale": 1.0, "min_scale": 2.0}, rf"{bounds}.*=1\.0.*=2\.0"),
        (DynamicScale, {"init_scale": 4.0, "max_scale": 2.0}, rf"{bounds}.*=4\.0.*=2\.0"),
        (DynamicScale, {"min_scale": 4.0, "max_scale": 1.0}, rf"{bounds}.*=4\.0.*=1\.0"),
        (DynamicScale, {"hysteresis": 2, "tolerance": 0.5}, r"hysteresis= or tolerance=, not both, got 2 and 0\.5"),
        (DynamicScale, {"growth_interval": 2**31 - 1, "growth_after": "interval_plus_one"}, "growth_interval"),
        (SkipSpikes, {"window": 8, "min_values": 9}, "min_values must be an integer from 2 to 8"),
        (SkipSpikes, {"of": ("loss", 3)}, "of must be one of"),
        (SkipSpikes, {"above": 3.0, "sides": "both"}, "above= is a bound on one side"),
        (GradScaler, {"policy": DynamicScale(), "init_scale": 2.0}, "policy= or init_scale=, not both"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            make(**settings)  # type: ignore[operator]


def test_numbers_of_libraries_become_plain_ones():
    given = [np.float32(8), Fraction(3, 2), np.int64(7), np.array(2), np.array(64.0)]
    names = ("init_scale", "growth_factor", "growth_interval", "hysteresis", "max_scale")
    refill: Any = ["growth", "clean_step", "growth"]
    policy = DynamicScale(**dict(zip(names, given, strict=True)), hysteresis_refill=refill)  # type: ignore[arg-type]
    plain = [getattr(policy, name) for name in names]
    assert plain == [8.0, 1.5, 7, 2, 64.0]
    assert [type(number) for number in plain] == [float, float, int, int, float]
    assert policy.hysteresis_refill == ("clean_step", "growth")
    assert hash(policy) == hash(dataclasses.replace(policy))
    assert DynamicScale(init_scale=4.0, min_scale=4.0, max_scale=4.0).init_scale == 4.0


def test_a_backend_is_named_with_the_nearest():
    # With MPI mpi4py's is no adapter for arrays; without, it cannot be imported.
    for backend, said in (("nunpy", "'nunpy'.*did you mean 'numpy'"), ("mpi4py", "mpi4py")):
        with pytest.raises((gradscale.BackendError, gradscale.BackendNotAvailableError), match=said):
            GradScaler(backend=backend)
    assert GradScaler(enabled=np.False_).is_enabled() is False  # type: ignore[arg-type]


@given(st.floats(1.0, validation.LARGEST_FLOAT32, exclude_min=True))
def test_the_largest_with_finite_product_is_the_largest(factor: float):
    largest = np.float32(validation.largest_with_finite_product(factor))
    with np.errstate(over="ignore"):
        # A library without float64 multiplies by the factor as a float32.
        factor = max(factor, float(np.float32(factor)))
        assert np.isfinite(np.float32(np.float64(largest) * factor))
        above = np.nextafter(largest, np.float32(np.inf))
        assert not np.isfinite(above) or not np.isfinite(np.float32(np.float64(above) * factor))


class Half:
    """A policy of a user's, with some of its members."""

    init_scale, clamp = 4.0, 1.0
    init = update = at_min_scale = len


def test_a_name_that_is_no_option_and_a_class_or_a_name_in_place_of_a_policy_are_errors():
    sharded = functools.partial(ShardedGradScaler, group=None)
    settings = r"write policy=gradscale\.DynamicScale\(init_scale=4\.0, min_scale=2\)$"
    nothing = r"keyword arguments \['{}'\].*a StepGuard multiplies nothing: .* taken by GradScaler$"
    alone = r"missing a required .*: 'group', which must be a communicator.*alone wants gradscale\.GradScaler\)$"
    for make, args, options, said in (
        *((make, (), {"growth": 2.0}, r"unexpected keyword arguments \['growth'\]") for make in (GradScaler, sharded)),
        *((make, (), {"grow_factor": 2.0}, "did you mean 'growth_factor'") for make in (GradScaler, sharded)),
        *((make, (), {"init_scale": 4.0, "min_scale": 2}, settings) for make in (GradScaler, sharded)),
        *((gradscale.StepGuard, (), {key: 2.0}, nothing.format(key)) for key in ("init_scale", "policy", "device")),
        (gradscale.StepGuard, (), {"give_up": 3}, "did you mean 'give_up_after'"),
        (gradscale.StepGuard, (2.0,), {}, r"takes its options by name, such as group=, got \(2\.0,\)"),
        (GradScaler, (), {"group": None}, r"group= is taken by gradscale\.ShardedGradScaler$"),
        (GradScaler, (65536.0,), {}, r"by name, such as init_scale=, got \(65536\.0,\)"),
        (ShardedGradScaler, (), {}, alone),
        (GradScaler, (), {"policy": DynamicScale}, r"policy must be an instance of .*: call it, DynamicScale\(\)$"),
        (GradScaler, (), {"policy": gradscale.presets.fairseq}, r"policy must .*: call it, fairseq\(\)$"),
        (GradScaler, (), {"policy": "megatron"}, r"got 'megatron': write gradscale\.presets\.named\('megatron'\)$"),
        (GradScaler, (), {"policy": Half()}, r"policy must .*, which has no backoff, clamp$"),
        (GradScaler().unscale_, (Tree([]), 1.0), {}, r"unscale_\(\) takes .* by name, such as max_norm=, got \(1\.0,"),
    ):
        with pytest.raises(InvalidTypeError, match=said):
            make(*args, **options)  # type: ignore[operator]
