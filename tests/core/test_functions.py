"""The pure functions: scale (and GradScaler's), unscale, with out= too, and select."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes import require
from hypothesis import example, given
from hypothesis import strategies as st
from libraries import Library
from runs import start

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale, presets
from gradscale.core import arithmetic

# See conftest.py.
PURE = TRACED = True

# scale.

Scale = Callable[..., Any]


@pytest.fixture(params=["function", "scaler"])
def scale(request: pytest.FixtureRequest, arrays: Library) -> Scale:
    """Return both ways to scale: a function of the outputs and the initial scale."""
    if request.param == "scaler":
        return lambda outputs, by=4.0: GradScaler(init_scale=by).scale(outputs)
    return lambda outputs, by=4.0: gradscale.scale(outputs, start(arrays, DynamicScale(init_scale=by)))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_the_dtype_is_kept_but_for_a_0d_loss_of_half_precision(arrays: Library, scale: Scale):
    for dtype in arrays.reals:
        for values in ([1.5, -2.0], [[0.5]], []):
            given = arrays.asarray(values, dtype)
            arrays.assert_array(scale(given), np.asarray(values) * 4.0, dtype)
            arrays.assert_array(given, values, dtype)
        wide = "float32" if dtype in arrays.halves else dtype
        arrays.assert_array(scale(arrays.asarray(3.0, dtype), 65536.0), 196608.0, wide)
    for dtype in ("complex64", "complex128"):
        arrays.assert_array(scale(arrays.asarray([1 + 2j, -3j], dtype)), [4 + 8j, -12j], dtype)
    if "float16" in arrays.halves:
        arrays.assert_array(scale(arrays.asarray([3.0, 0.0], "float16"), 65536.0), [math.inf, 0.0], "float16")
    arrays.assert_array(scale(arrays.asarray([math.inf, -math.inf, math.nan])), [math.inf, -math.inf, math.nan])


def test_trees_come_back_and_a_generator_is_walked_once(arrays: Library, scale: Scale):
    # One array in two places is scaled in both; test_tree.py has every container.
    shared = arrays.asarray([2.0])
    got = scale({"a": (shared, [None, ()]), "b": shared})
    assert (type(got["a"]), got["a"][1]) == (tuple, [None, ()])
    listed = scale(each for each in (shared, shared))
    assert type(listed) is list
    for leaf in (got["a"][0], got["b"], *listed):
        arrays.assert_array(leaf, [8.0])
    for empty in ([], (), {}, None, [None], [[], {}]):
        assert scale(empty) == empty


def test_integers_booleans_and_none_pass_through_untouched(arrays: Library, scale: Scale):
    through = [None, 3, True, arrays.asarray([1, 2], "int32"), arrays.asarray(7, "int64"), arrays.asarray(True, "bool")]
    got = scale([*through, arrays.asarray(1.0)])
    assert all(after is before for before, after in zip(through, got[:-1], strict=True))
    arrays.assert_array(got[-1], 4.0)
    assert all(after is before for before, after in zip(through, scale(through), strict=True))


WRONG: dict[str, tuple[Any, str]] = {
    "text": ("loss", "output must be an array"),
    "a float in a tree": ({"loss": [None, 1.5]}, r"output at \['loss'\]\[1\] must be an array"),
    "complex": (1j, "output must be an array"),
    "a set": ({1.5}, "output must be an array"),
    "an array of objects": (np.array([None], dtype=object), r"integer or bool dtype, got dtype\('O'\)"),
    "records": ({"r": np.zeros(1, dtype=[("x", "f4")])}, r"output at \['r'\] must have a floating"),
}


def test_what_is_no_array_of_one_library_is_refused_with_its_place(arrays: Library, strict: Library, scale: Scale):
    stranger = np.ones(1) if arrays.name.startswith("strict") else strict.asarray([1.0])
    other = r"output at \['x'\]\[1\] must be an array of the library .* use one"
    for wrong, message in (*WRONG.values(), ({"x": [arrays.asarray([1.0]), stranger]}, other)):
        with pytest.raises(InvalidTypeError, match=message):
            scale(wrong)


# unscale: exact reciprocals, dtypes, the verdict on what is stored, trees and devices.

SMALLEST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
overflows = pytest.mark.filterwarnings(
    "ignore:overflow encountered in (cast|multiply):RuntimeWarning",
    "ignore:invalid value encountered in (cast|multiply):RuntimeWarning",
)


def unscale(arrays: Library, grads, scale: float, **options):
    """Return the unscaled gradients and the count, after asserting what it is."""
    state = start(arrays, DynamicScale(init_scale=scale))
    unscaled, nonfinite = gradscale.unscale(grads, state, **options)
    arrays.assert_is_mine(nonfinite)
    assert nonfinite.dtype == arrays.dtype("int32")
    assert arrays.state(state)[0] == scale
    return unscaled, arrays.item(nonfinite)


def test_values_are_divided_into_new_arrays_of_their_dtypes(arrays: Library):
    for dtype in arrays.reals:
        for values in ([8.0, -4.0], [[1.0]], 2.0, np.zeros(0), np.zeros((2, 0, 3))):
            got, nonfinite = unscale(arrays, arrays.asarray(values, dtype), 8.0)
            arrays.assert_array(got, np.asarray(values) / 8.0, dtype)
            assert nonfinite == 0
    # float64 is divided in itself, and half precision in float32, where the reciprocal of 2**17 is not 0.
    value = 1.0 + 2.0**-50
    arrays.assert_array(unscale(arrays, arrays.asarray([value * 8.0], "float64"), 8.0)[0], [value], "float64")
    for half in arrays.halves:
        got, _ = unscale(arrays, arrays.asarray([2.0**-7, 1.0], half), 2.0**17)
        arrays.assert_array(got, [2.0**-24, 2.0**-17], half)
    given = arrays.asarray([8.0])
    got, _ = unscale(arrays, given, 1.0)
    assert got is not given
    arrays.assert_array(got, [8.0])


@pytest.mark.parametrize("part", [complex(1, math.inf), complex(math.nan, 1), complex(-math.inf, math.nan)])
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_both_parts_of_complex_gradients_are_divided_and_judged(arrays: Library, part: complex):
    for dtype in ("complex64", "complex128"):
        got, nonfinite = unscale(arrays, arrays.asarray([8 + 16j, -8j], dtype), 8.0)
        arrays.assert_array(got, [1 + 2j, -1j], dtype)
        assert nonfinite == 0
        assert unscale(arrays, [arrays.asarray([1j, part], dtype)], 8.0)[1] == 1


@overflows
def test_a_value_that_overflows_when_it_is_divided_or_cast_is_counted(arrays: Library):
    got, nonfinite = unscale(arrays, [arrays.asarray([1e38]), arrays.asarray([1.0])], 2.0**-10)
    arrays.assert_array(got[0], [math.inf])
    arrays.assert_array(got[1], [1024.0])
    assert nonfinite == 1
    big = arrays.asarray([1e300], "float64")
    assert unscale(arrays, big, 8.0)[1] == 0
    got, nonfinite = unscale(arrays, big, 8.0, dtype=arrays.dtype("float32"))
    arrays.assert_array(got, [math.inf])
    assert nonfinite == 1
    for half in arrays.halves:
        largest = {"float16": 65504.0, "bfloat16": 3.3e38}[half]
        assert unscale(arrays, arrays.asarray([largest], half), 2.0**-10)[1] == 1
        assert unscale(arrays, arrays.asarray([8e6]), 8.0, dtype=arrays.dtype(half))[1] == (half == "float16")


# The reciprocal.


@pytest.mark.parametrize("scale", [2.0**exponent for exponent in range(-126, 128, 11)])
def test_powers_of_two_divide_exactly(arrays: Library, scale: float):
    given = [1.0, -1.5, 1.0000001192092896]
    got, nonfinite = unscale(arrays, arrays.asarray([x * scale for x in given]), scale)
    # float32's subnormals end at 2**-149: beyond 2**125 the reciprocal itself is subnormal, and exact.
    # Yet no gradient is lost by that: they are normal numbers before and after.
    arrays.assert_array(got, [np.float32(np.float32(x * scale) * np.float32(1 / scale)) for x in given])
    if 2.0**-125 < scale < 2.0**126:
        arrays.assert_array(got, given)
    assert nonfinite == 0


@pytest.mark.parametrize("scale", [3.0, 0.1, 65535.0, 1e-37, 3e38, 1.0 + 2.0**-23, SMALLEST, LARGEST])
def test_the_reciprocal_of_another_scale_is_rounded_once(arrays: Library, scale: float):
    scale = float(np.float32(scale))
    expected = np.float32(1.0 / np.float64(scale))
    if arrays.flushes_subnormals and expected < SMALLEST:
        expected = np.float32(0.0)
    got, _ = unscale(arrays, arrays.asarray([1.0, 1.0]), scale)
    arrays.assert_array(got, [expected, expected])


@pytest.mark.numpy
@given(scale=st.floats(SMALLEST, LARGEST, width=32))
@example(scale=3.0)
def test_the_reciprocal_is_numpys_through_float64(scale: float):
    from libraries import opened

    expected = np.float32(1.0 / np.float64(scale))
    with opened("numpy") as library:
        state = start(library, DynamicScale(init_scale=scale))
        assert arithmetic.reciprocal(state.scale) == expected
        assert gradscale.unscale(np.ones(1, np.float32), state)[0][0] == expected


def test_without_float64_powers_of_two_are_exact_all_the_same(strict: Library):
    where = strict.xp.Device("no_float64")
    for exponent in range(-126, 127, 7):
        state = DynamicScale(init_scale=2.0**exponent).init(strict.asarray(0.0, device=where))
        got = arithmetic.reciprocal(state.scale)
        assert got.device == where
        assert float(got) == 2.0**-exponent


# Trees, masters, and inputs.


def test_none_integers_and_containers_are_kept(arrays: Library):
    count = arrays.asarray([3], "int32")
    given = {"a": [arrays.asarray([8.0]), None], "b": (count, 5), "c": [], "d": (arrays.asarray(x) for x in (8.0,))}
    got, nonfinite = unscale(arrays, given, 8.0)
    arrays.assert_array(got["a"][0], [1.0])
    arrays.assert_array(got["d"][0], 1.0)
    assert (got["a"][1], got["b"][1], got["c"], type(got["b"])) == (None, 5, [], tuple)
    assert got["b"][0] is count
    assert nonfinite == 0
    for empty in ([], (), {}, None, [None]):
        assert unscale(arrays, empty, 8.0) == (empty, 0)


def test_a_wanted_dtype_gives_masters_of_real_gradients_only(arrays: Library):
    given = [arrays.asarray([8.0], dtype) for dtype in (*arrays.reals, "complex64")]
    got, _ = unscale(arrays, [*given, arrays.asarray([8], "int32")], 8.0, dtype=arrays.dtype("float32"))
    for master in got[:-2]:
        arrays.assert_array(master, [1.0], "float32")
    arrays.assert_array(got[-2], [1.0], "complex64")
    arrays.assert_array(got[-1], [8], "int32")
    for half in arrays.halves:
        got, _ = unscale(arrays, arrays.asarray([2.0**-10], half), 2.0**30, dtype=arrays.dtype("float32"))
        arrays.assert_array(got, [2.0**-40], "float32")


def test_a_wanted_dtype_must_be_real_and_floating(arrays: Library):
    state = start(arrays, DynamicScale())
    for wrong in (arrays.dtype("int32"), arrays.dtype("complex64"), "no dtype", 3, [1]):
        with pytest.raises(InvalidValueError, match=r"dtype must be a real floating dtype .*got"):
            gradscale.unscale(arrays.asarray([1.0]), state, dtype=wrong)


def test_one_array_in_two_places_is_divided_and_counted_once(arrays: Library):
    shared, bad = arrays.asarray([8.0]), arrays.asarray([math.inf])
    got, nonfinite = unscale(arrays, [shared, [shared], bad, bad], 8.0)
    arrays.assert_array(got[0], [1.0])
    arrays.assert_array(got[1][0], [1.0])
    assert nonfinite == 1


def test_what_is_no_array_of_the_states_library_is_refused_with_its_place(arrays: Library, strict: Library):
    stranger = np.ones(1) if arrays.name.startswith("strict") else strict.asarray([1.0])
    for wrong, message in (
        (1.5, r"gradient must be an array .*got 1\.5"),
        ({"w": [None, "x"]}, r"gradient at \['w'\]\[1\] must be an array"),
        (np.array(["x"]), "gradient must have a floating"),
        ([arrays.asarray([1.0]), stranger], r"gradient at \[1\] must be an array of the library"),
    ):
        with pytest.raises(InvalidTypeError, match=message):
            unscale(arrays, wrong, 8.0)


# Written to arrays that are there already, where the library can.


def unscale_out(arrays: Library, grads, out, **options):
    return unscale(arrays, grads, 8.0, out=out, **options)


def test_values_come_in_the_dtypes_of_out_and_in_out_where_it_can_be_written(arrays: Library):
    for dtype in arrays.reals:
        for wanted in arrays.reals:
            grads = {"w": arrays.asarray([8.0, 16.0], dtype), "n": None, "b": [arrays.asarray(24.0, dtype), 3]}
            out = {"w": arrays.asarray([0.0, 0.0], wanted), "n": None, "b": [arrays.asarray(0.0, wanted), 3]}
            got, nonfinite = unscale_out(arrays, grads, out)
            arrays.assert_array(got["w"], [1.0, 2.0], wanted)
            arrays.assert_array(got["b"][0], 3.0, wanted)
            assert (got["n"], got["b"][1], nonfinite) == (None, 3, 0)
            # The gradients are left alone.
            arrays.assert_array(grads["w"], [8.0, 16.0], dtype)
            if arrays.writes:
                assert got["w"] is out["w"]
                assert got["b"][0] is out["b"][0]
            else:
                arrays.assert_array(out["w"], [0.0, 0.0], wanted)
    if "float16" in arrays.halves:
        # A quotient that float16 does not hold.
        got, _ = unscale_out(arrays, [arrays.asarray([2.0**-14 + 2.0**-24], "float16")], [arrays.asarray([0.0])])
        arrays.assert_array(got[0], [2.0**-17 + 2.0**-27])
    got, _ = unscale_out(arrays, [arrays.asarray([8.0], "complex64")], [arrays.asarray([0.0], "complex128")])
    arrays.assert_array(got[0], [1.0], "complex128")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_finiteness_is_judged_in_the_dtype_of_out_and_integers_pass_through(arrays: Library):
    grads = [arrays.asarray([1e300], "float64"), arrays.asarray([3], "int32"), None]
    got, nonfinite = unscale_out(arrays, grads, [arrays.asarray([0.0], "float32"), None, 7])
    arrays.assert_array(got[0], [math.inf])
    assert (nonfinite, got[2]) == (1, None)
    assert got[1] is grads[1]


def test_the_gradients_themselves_may_be_out(arrays: Library):
    grads = [arrays.asarray([8.0], dtype) for dtype in (*arrays.reals, "complex64")]
    got, _ = unscale_out(arrays, grads, grads)
    for grad, new, dtype in zip(grads, got, (*arrays.reals, "complex64"), strict=True):
        arrays.assert_array(new, [1.0], dtype)
        assert (new is grad) is arrays.writes


def test_what_goes_not_together_is_refused(arrays: Library):
    x, y, target = arrays.asarray([8.0]), arrays.asarray([16.0]), arrays.asarray([0.0])
    with pytest.raises(InvalidValueError, match=r"give dtype= or out=.*not both"):
        unscale_out(arrays, [x], [x], dtype=arrays.dtype("float32"))
    for out in ([x, x], {"w": x}, x, []):
        with pytest.raises(InvalidValueError, match="trees must have one structure"):
            unscale_out(arrays, [x], out)
    with pytest.raises(InvalidValueError, match="each once"):
        unscale_out(arrays, [x, y], [target, target])


def test_an_out_of_another_shape_or_kind_is_refused_and_nothing_is_written(arrays: Library, strict: Library):
    first, grad = arrays.asarray([8.0]), arrays.asarray([8.0, 8.0])
    target = arrays.asarray([0.0])
    stranger = np.zeros(2) if arrays.name.startswith("strict") else strict.asarray([0.0, 0.0])
    wrong: list[tuple[Any, type[Exception], str]] = [
        (arrays.asarray([0.0]), InvalidValueError, r"out must hold an array of shape \(2,\)|size"),
        (None, InvalidValueError, "out must hold an array of shape"),
        (3, InvalidValueError, "out must hold an array of shape"),
        (1.5, InvalidTypeError, "out 1 must be an array"),
        (arrays.asarray([0, 0], "int32"), InvalidValueError, "out must hold a floating array for each gradient"),
        (arrays.asarray([0, 0], "complex64"), InvalidValueError, "out must be complex for a complex gradient"),
        (stranger, InvalidTypeError, "out 1 must be an array of the library"),
    ]
    for bad, error, message in wrong:
        with pytest.raises(error, match=message):
            unscale_out(arrays, [first, grad], [target, bad])
    arrays.assert_array(target, [0.0])
    with pytest.raises(InvalidValueError, match="out must be complex"):
        unscale_out(arrays, [arrays.asarray([8j], "complex64")], [target])


def test_a_gradient_in_two_places_is_written_once(arrays: Library):
    shared = arrays.asarray([8.0])
    out = [arrays.asarray([0.0]), arrays.asarray([0.0])]
    got, _ = unscale_out(arrays, [shared, shared], out)
    for new in got:
        arrays.assert_array(new, [1.0])


# select.


@pytest.mark.parametrize("pred", [True, False])
def test_every_leaf_is_taken_from_the_tree_that_the_bool_chooses(arrays: Library, pred: bool):
    dtypes = (*arrays.reals, "int32", "complex64", "bool")
    on_true = {dtype: [arrays.asarray([1, 0], dtype), None, 3] for dtype in dtypes}
    on_false = {dtype: [arrays.asarray([0, 1], dtype), None, 3] for dtype in reversed(dtypes)}
    got = gradscale.select(arrays.asarray(pred, "bool"), on_true, on_false)
    assert list(got) == list(dtypes)
    for dtype in dtypes:
        arrays.assert_array(got[dtype][0], [1, 0] if pred else [0, 1], dtype)
        assert got[dtype][1:] == [None, 3]
        arrays.assert_array(on_true[dtype][0], [1, 0], dtype)


def test_0d_and_empty_arrays_stay_arrays(arrays: Library):
    pred = arrays.asarray(True, "bool")
    for dtype in arrays.reals:
        arrays.assert_array(gradscale.select(pred, arrays.asarray(1.0, dtype), arrays.asarray(2.0, dtype)), 1.0, dtype)
        arrays.assert_array(gradscale.select(pred, arrays.asarray([], dtype), arrays.asarray([], dtype)), [], dtype)


def test_trees_of_two_structures_dtypes_or_shapes_and_unequal_leaves_are_refused(arrays: Library):
    pred, one = arrays.asarray(True, "bool"), arrays.asarray([1.0])
    unequal = "no arrays must be equal"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (one, arrays.asarray([1.0], "float64"), InvalidTypeError, r"one dtype leaf by leaf, got .*32 and .*64; cast"),
        (one, arrays.asarray([1.0, 2.0]), InvalidValueError, "one shape leaf by leaf"),
        (one, arrays.asarray(1.0), InvalidValueError, "one shape leaf by leaf"),
        ([1], [1, 2], InvalidValueError, "one structure"),
        ({"a": 1}, {"b": 1}, InvalidValueError, "one structure"),
        ([[1]], [1], InvalidValueError, "one structure"),
        *(([a], [b], InvalidValueError, unequal) for a, b in ((3, 4), ("adam", "sgd"), (None, 3), (1, True), (1, 1.0))),
        ([one], [3], InvalidValueError, unequal),
    ]
    for on_true, on_false, error, message in cases:
        with pytest.raises(error, match=message):
            gradscale.select(pred, on_true, on_false)
    for wrong in (arrays.asarray(1, "int32"), arrays.asarray([True], "bool"), True, 0, None):
        with pytest.raises(InvalidTypeError, match="pred must be a 0-d bool array, such as nonfinite == 0, got"):
            gradscale.select(wrong, [one], [one])


# Devices, with and without values, and torch's graphs.


def test_arrays_stay_on_their_devices_and_are_judged_on_the_states_own(strict: Library):
    devices = [strict.xp.Device(name) for name in ("CPU_DEVICE", "device1", "device2", "no_float64")]

    def arrays(*values: float):
        return [strict.asarray([value], device=device) for value, device in zip(values, devices, strict=True)]

    def assert_arrays(got, *values: float):
        assert [x.device for x in got] == devices
        assert str([float(x[0]) for x in got]) == str(list(values))

    assert_arrays(GradScaler(init_scale=4.0).scale(arrays(0.0, 1.0, 2.0, 3.0)), 0.0, 4.0, 8.0, 12.0)
    for home in devices:
        state = DynamicScale(init_scale=8.0).init(strict.asarray(0.0, device=home))
        for bad in range(4):
            values = [math.nan if index == bad else 8.0 for index in range(4)]
            got, nonfinite = gradscale.unscale(arrays(*values), state)
            assert_arrays(got, *(value / 8.0 for value in values))
            assert (nonfinite.device, int(nonfinite)) == (home, 1)
        *_, squares = gradscale.Backend().unscale_with_squares(arrays(8.0, 8.0, 16.0, 24.0), state)
        assert (squares.device, float(squares)) == (home, 15.0)
        pred = strict.asarray(False, "bool", device=home)
        assert_arrays(
            gradscale.select(pred, arrays(1.0, 1.0, 1.0, 1.0), arrays(2.0, 2.0, 2.0, 2.0)), 2.0, 2.0, 2.0, 2.0
        )


@pytest.mark.torch
def test_on_torch_everything_stays_in_its_graph():
    torch = require("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        parameter = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        GradScaler(init_scale=8.0).scale((parameter * parameter).sum()).backward()
        assert parameter.grad.tolist() == [16.0, 32.0]
    leaf = torch.tensor([2.0], requires_grad=True)
    [got], _ = gradscale.unscale([leaf * 24.0], DynamicScale(init_scale=8.0).init(leaf))
    gradscale.select(torch.tensor(True), got, torch.zeros(1)).sum().backward()
    assert leaf.grad.tolist() == [3.0]


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_on_torchs_meta_device_they_give_tensors_of_the_cpus_dtypes_and_shapes(dtype: str):
    torch = require("torch")

    def forms(device: str):
        given = {"w": torch.ones((2, 3), dtype=getattr(torch, dtype), device=device), "n": None}
        made = []
        for policy in (DynamicScale(), StaticScale(8.0), *map(presets.named, presets.names())):
            state = policy.init(like=given["w"])
            scaled = gradscale.scale(given, state)
            unscaled, nonfinite = gradscale.unscale(scaled, state)
            masters, _ = gradscale.unscale(scaled, state, dtype=torch.float32)
            chosen = gradscale.select(nonfinite == 0, unscaled, given)
            made += [nonfinite, *policy.update(state, nonfinite=nonfinite)]
            made += [each["w"] for each in (scaled, unscaled, masters, chosen)]
        rule, loss = SkipSpikes(), torch.ones((), device=device)
        window = rule.init(like=loss)
        is_spike = rule.judge(window, loss)
        made += [is_spike, *rule.learn(window, loss, skipped=is_spike)]
        assert {x.device.type for x in made} == {device}
        return [(x.dtype, x.shape) for x in made]

    assert forms("meta") == forms("cpu")
