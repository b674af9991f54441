"""select: one of two trees by a 0-d bool."""

from __future__ import annotations

from typing import Any

import pytest
from axes import require
from libraries import Library

import gradscale
from gradscale import InvalidTypeError, InvalidValueError

# The pure functions; see conftest.py.
PURE = TRACED = True


@pytest.mark.parametrize("pred", [True, False])
def test_every_leaf_is_taken_from_the_tree_that_the_bool_chooses(arrays: Library, pred: bool) -> None:
    dtypes = (*arrays.reals, "int32", "complex64", "bool")
    on_true = {dtype: [arrays.asarray([1, 0], dtype), None, 3] for dtype in dtypes}
    on_false = {dtype: [arrays.asarray([0, 1], dtype), None, 3] for dtype in reversed(dtypes)}
    got = gradscale.select(arrays.asarray(pred, "bool"), on_true, on_false)
    assert list(got) == list(dtypes)
    for dtype in dtypes:
        arrays.assert_array(got[dtype][0], [1, 0] if pred else [0, 1], dtype)
        assert got[dtype][1:] == [None, 3]
        arrays.assert_array(on_true[dtype][0], [1, 0], dtype)


def test_0d_and_empty_arrays_stay_arrays(arrays: Library) -> None:
    pred = arrays.asarray(True, "bool")
    for dtype in arrays.reals:
        arrays.assert_array(gradscale.select(pred, arrays.asarray(1.0, dtype), arrays.asarray(2.0, dtype)), 1.0, dtype)
        arrays.assert_array(gradscale.select(pred, arrays.asarray([], dtype), arrays.asarray([], dtype)), [], dtype)


def test_trees_of_two_structures_dtypes_or_shapes_and_unequal_leaves_are_refused(arrays: Library) -> None:
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


def test_leaves_on_several_devices_are_chosen_where_they_are(strict: Library) -> None:
    devices = [strict.xp.Device(name) for name in ("CPU_DEVICE", "device1", "device2")]
    trees = [[strict.asarray([value], device=device) for device in devices] for value in (1.0, 2.0)]
    for home in devices:
        got = gradscale.select(strict.asarray(False, "bool", device=home), *trees)
        assert [x.device for x in got] == devices
        assert [float(x[0]) for x in got] == [2.0] * 3


@pytest.mark.torch
def test_on_torch_chosen_parameters_stay_in_their_graph() -> None:
    torch = require("torch")
    parameter = torch.tensor([2.0], requires_grad=True)
    got = gradscale.select(torch.tensor(True), parameter * 3.0, torch.zeros(1))
    got.sum().backward()
    assert parameter.grad.tolist() == [3.0]
