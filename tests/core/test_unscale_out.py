"""unscale(out=): gradients written to arrays that are there already, where the library can."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from libraries import Library
from runs import start

import gradscale
from gradscale import DynamicScale, InvalidTypeError, InvalidValueError

# The pure functions; see conftest.py.
PURE = TRACED = True


def unscale(arrays: Library, grads: Any, out: Any, **options: Any) -> tuple[Any, int]:
    """Return the gradients divided by 8, and the count."""
    state = start(arrays, DynamicScale(init_scale=8.0))
    unscaled, nonfinite = gradscale.unscale(grads, state, out=out, **options)
    return unscaled, arrays.item(nonfinite)


def test_values_come_in_the_dtypes_of_out_and_in_out_where_it_can_be_written(arrays: Library) -> None:
    for dtype in arrays.reals:
        for wanted in arrays.reals:
            grads = {"w": arrays.asarray([8.0, 16.0], dtype), "n": None, "b": [arrays.asarray(24.0, dtype), 3]}
            out = {"w": arrays.asarray([0.0, 0.0], wanted), "n": None, "b": [arrays.asarray(0.0, wanted), 3]}
            got, nonfinite = unscale(arrays, grads, out)
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


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_finiteness_is_judged_in_the_dtype_of_out_and_integers_pass_through(arrays: Library) -> None:
    grads = [arrays.asarray([1e300], "float64"), arrays.asarray([3], "int32"), None]
    got, nonfinite = unscale(arrays, grads, [arrays.asarray([0.0], "float32"), None, 7])
    arrays.assert_array(got[0], [math.inf])
    assert (nonfinite, got[2]) == (1, None)
    assert got[1] is grads[1]


def test_the_gradients_themselves_may_be_out(arrays: Library) -> None:
    grads = [arrays.asarray([8.0], dtype) for dtype in (*arrays.reals, "complex64")]
    got, _ = unscale(arrays, grads, grads)
    for grad, new, dtype in zip(grads, got, (*arrays.reals, "complex64"), strict=True):
        arrays.assert_array(new, [1.0], dtype)
        assert (new is grad) is arrays.writes


def test_what_goes_not_together_is_refused(arrays: Library) -> None:
    x, y, target = arrays.asarray([8.0]), arrays.asarray([16.0]), arrays.asarray([0.0])
    with pytest.raises(InvalidValueError, match=r"give dtype= or out=.*not both"):
        unscale(arrays, [x], [x], dtype=arrays.dtype("float32"))
    for out in ([x, x], {"w": x}, x, []):
        with pytest.raises(InvalidValueError, match="trees must have one structure"):
            unscale(arrays, [x], out)
    with pytest.raises(InvalidValueError, match="each once"):
        unscale(arrays, [x, y], [target, target])


def test_an_out_of_another_shape_or_kind_is_refused_and_nothing_is_written(arrays: Library, strict: Library) -> None:
    first, grad = arrays.asarray([8.0]), arrays.asarray([8.0, 8.0])
    target = arrays.asarray([0.0])
    stranger: Any = np.zeros(2) if arrays.name == "strict" else strict.asarray([0.0, 0.0])
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
            unscale(arrays, [first, grad], [target, bad])
    arrays.assert_array(target, [0.0])
    with pytest.raises(InvalidValueError, match="out must be complex"):
        unscale(arrays, [arrays.asarray([8j], "complex64")], [target])


def test_a_gradient_in_two_places_is_written_once(arrays: Library) -> None:
    shared = arrays.asarray([8.0])
    out = [arrays.asarray([0.0]), arrays.asarray([0.0])]
    got, _ = unscale(arrays, [shared, shared], out)
    for new in got:
        arrays.assert_array(new, [1.0])
