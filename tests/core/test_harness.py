"""The tests' own helpers: a wrong answer must fail them, and a missing library must not look like a pass."""

import axes
import numpy as np
import pytest
from libraries import Library
from worlds import ThreadWorld, agree, each


@pytest.mark.parametrize(
    ("got", "expected", "dtype"),
    [
        *(([1.0], wrong, "float32") for wrong in ([1.0000001], [[1.0]], [float("nan")], [1.0, 1.0], [])),
        *(([0.0], [-0.0], "float32"), ([float("inf")], [-float("inf")], "float32"), ([1.0], [1.0], "float64")),
    ],
)
def test_assert_array_fails_for_a_wrong_answer(arrays: Library, got: list[float], expected: object, dtype: str):
    arrays.assert_array(arrays.asarray(got), got)
    with pytest.raises(AssertionError):
        arrays.assert_array(arrays.asarray(got), expected, dtype)


def test_assert_array_fails_for_another_library(arrays: Library, strict: Library):
    stranger = np.float32(1.0) if arrays.name.startswith(("numpy", "strict")) else strict.asarray(1.0)
    with pytest.raises(AssertionError):
        arrays.assert_array(stranger, 1.0)
    if arrays.readonly:
        with pytest.raises(ValueError, match="read-only"):
            arrays.asarray([1.0])[0] = 2.0


def test_a_required_library_that_is_missing_fails_instead_of_skipping(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(axes.MODULES, "strict", ("no_such_module_at_all",))
    axes._missing.cache_clear()
    try:
        monkeypatch.setenv(axes.VARIABLE, "numpy, strict")
        with pytest.raises(pytest.fail.Exception, match="requires it"):
            axes.require("strict")
    finally:
        axes._missing.cache_clear()


@pytest.mark.parametrize("compare", [each, agree])
@pytest.mark.parametrize("cases", [[], iter(())], ids=["list", "iterator"])
def test_ranks_that_compare_nothing_are_an_error(compare, cases):
    with pytest.raises(ValueError, match="at least one case of rank, got none"):
        compare(ThreadWorld(2), rank, cases)


def rank(group) -> int:
    return int(group.rank)


def test_ranks_that_return_other_things_are_told():
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        agree(ThreadWorld(2), rank, [()])
