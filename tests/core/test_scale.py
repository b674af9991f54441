"""scale: trees, dtypes, devices, and what is refused; through the function and through GradScaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes import require
from libraries import Library
from runs import start

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError

# The pure functions; see conftest.py.
PURE = TRACED = True


Scale = Callable[..., Any]


@pytest.fixture(params=["function", "scaler"])
def scale(request: pytest.FixtureRequest, arrays: Library) -> Scale:
    """Return both ways to scale: a function of the outputs and the initial scale."""
    if request.param == "scaler":
        return lambda outputs, by=4.0: GradScaler(init_scale=by).scale(outputs)
    return lambda outputs, by=4.0: gradscale.scale(outputs, start(arrays, DynamicScale(init_scale=by)))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_the_dtype_is_kept_but_for_a_0d_loss_of_half_precision(arrays: Library, scale: Scale) -> None:
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


def test_trees_come_back_and_a_generator_is_walked_once(arrays: Library, scale: Scale) -> None:
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


def test_integers_booleans_and_none_pass_through_untouched(arrays: Library, scale: Scale) -> None:
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
    "an array of objects": (
        np.array([None, 1.0], dtype=object),
        "output must have a floating, complex, integer or bool dtype, got dtype\\('O'\\)",
    ),
    "records": ({"r": np.zeros(1, dtype=[("x", "f4")])}, r"output at \['r'\] must have a floating"),
}


def test_what_is_no_array_of_one_library_is_refused_with_its_place(
    arrays: Library, strict: Library, scale: Scale
) -> None:
    stranger: Any = np.ones(1) if arrays.name == "strict" else strict.asarray([1.0])
    other = r"output at \['x'\]\[1\] must be an array of the library .* use one"
    for wrong, message in (*WRONG.values(), ({"x": [arrays.asarray([1.0]), stranger]}, other)):
        with pytest.raises(InvalidTypeError, match=message):
            scale(wrong)


def test_each_array_stays_on_its_device(strict: Library) -> None:
    devices = [strict.xp.Device(name) for name in ("CPU_DEVICE", "device1", "device2", "no_float64")]
    given = [strict.asarray([float(index)], device=device) for index, device in enumerate(devices)]
    got = GradScaler(init_scale=4.0).scale(given)
    for index, device in enumerate(devices):
        assert got[index].device == device
        assert np.asarray(got[index].to_device(devices[0])).tolist() == [4.0 * index]


@pytest.mark.numpy
def test_numpys_scalars_and_subclasses_are_arrays() -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    for value, dtype in ((np.float16(2), "float32"), (np.float32(2), "float32"), (np.float64(2), "float64")):
        got = GradScaler().scale(value)
        assert (float(got), got.dtype.name, got.shape) == (131072.0, dtype, ())
    got = GradScaler(init_scale=4.0).scale(np.ones(3, np.float16).view(Mine))
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.float16


@pytest.mark.torch
def test_a_scaled_loss_of_torch_can_be_differentiated() -> None:
    torch = require("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        parameter = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        loss = GradScaler(init_scale=8.0).scale((parameter * parameter).sum())
        loss.backward()
        assert parameter.grad.tolist() == [16.0, 32.0]
