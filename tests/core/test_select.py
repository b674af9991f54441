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


def test_the_verdict_of_unscale_chooses(arrays: Library) -> None:
    state = gradscale.DynamicScale().init(arrays.asarray(0.0))
    for value, expected in ((1.0, [5.0]), (float("nan"), [7.0])):
        _, nonfinite = gradscale.unscale([arrays.asarray([value])], state)
        got = gradscale.select(nonfinite == 0, [arrays.asarray([5.0])], [arrays.asarray([7.0])])
        arrays.assert_array(got[0], expected)


def test_leaves_of_two_dtypes_are_refused(arrays: Library) -> None:
    pred = arrays.asarray(True, "bool")
    with pytest.raises(InvalidTypeError, match=r"one dtype leaf by leaf, got .*float32 and .*float64; cast one"):
        gradscale.select(pred, arrays.asarray([1.0], "float32"), arrays.asarray([1.0], "float64"))


@pytest.mark.parametrize(("one", "other"), [([1.0], [1.0, 2.0]), ([1.0], 1.0), ([[1.0]], [1.0])])
def test_leaves_of_two_shapes_are_refused(arrays: Library, one: Any, other: Any) -> None:
    with pytest.raises(InvalidValueError, match="one shape leaf by leaf"):
        gradscale.select(arrays.asarray(True, "bool"), arrays.asarray(one), arrays.asarray(other))


@pytest.mark.parametrize(("one", "other"), [([1], [1, 2]), ({"a": 1}, {"b": 1}), ([[1]], [1])])
def test_trees_of_two_structures_are_refused(arrays: Library, one: Any, other: Any) -> None:
    with pytest.raises(InvalidValueError, match="one structure"):
        gradscale.select(arrays.asarray(True, "bool"), one, other)


@pytest.mark.parametrize(("one", "other"), [(3, 4), ("adam", "sgd"), (None, 3), (1, True), (1, 1.0)])
def test_leaves_that_are_no_arrays_must_be_equal(arrays: Library, one: Any, other: Any) -> None:
    pred = arrays.asarray(True, "bool")
    assert gradscale.select(pred, [one], [one]) == [one]
    with pytest.raises(InvalidValueError, match="no arrays must be equal"):
        gradscale.select(pred, [one], [other])
    with pytest.raises(InvalidValueError, match="no arrays must be equal"):
        gradscale.select(pred, [arrays.asarray(1.0)], [one])


def test_a_count_in_place_of_a_bool_is_refused(arrays: Library) -> None:
    tree = [arrays.asarray([1.0])]
    for wrong in (arrays.asarray(1, "int32"), arrays.asarray([True], "bool"), True, 0, None):
        with pytest.raises(InvalidTypeError, match="pred must be a 0-d bool array, such as nonfinite == 0, got"):
            gradscale.select(wrong, tree, tree)


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
