"""What unscaled NumPy arrays must hold, said plainly, and arrays of every value and layout to try it on."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Array = NDArray[Any]

BFLOAT = np.dtype(ml_dtypes.bfloat16)
HALF, SINGLE, DOUBLE = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)


def isfinite(array: Array) -> Array:
    """Return where the array is finite, without the warning that ml_dtypes gives for signalling NaNs."""
    with np.errstate(invalid="ignore"):
        return np.isfinite(array)


def oracle(source: Array, out_type: np.dtype[Any], inverse: float | np.float32) -> tuple[Array, bool]:
    """Return the unscaled array and whether it is not finite, as plainly as it can be said."""
    inverse = float(np.float32(inverse))
    if source.dtype.kind == "c":
        part_type = np.zeros((), out_type).real.dtype
        parts = [oracle(part, part_type, inverse) for part in (source.real, source.imag)]
        result = np.empty(source.shape, out_type)
        result.real, result.imag = parts[0][0], parts[1][0]
        return result, parts[0][1] or parts[1][1]
    with np.errstate(all="ignore"):
        if source.dtype.itemsize > 4:
            product = source * source.dtype.type(inverse)
        else:
            # The product of two float32 is exact in float64, so that this rounds once.
            product = (source.astype(np.float64) * inverse).astype(np.float32)
        result = np.asarray(product, dtype=out_type)
        return result, bool(np.any(~isfinite(result)))


def assert_same(actual: Array, expected: Array):
    """Require the same shape, type, NaNs and bits."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    with np.errstate(invalid="ignore"):
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan)
    if actual.dtype.kind == "c":
        assert_same(actual.real, expected.real)
        assert_same(actual.imag, expected.imag)
        return
    if actual.dtype.itemsize > 8:  # holds padding
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))
        return
    words = np.dtype(f"u{actual.dtype.itemsize}")
    np.testing.assert_array_equal(actual[~nan].view(words), expected[~nan].view(words))


def strided(array: Array) -> Array:
    """Leave gaps in memory along both axes."""
    room = np.zeros((2 * array.shape[0], 3 * array.shape[1]), array.dtype)
    room[::2, 1::3] = array
    return room[::2, 1::3]


def reverse(array: Array) -> Array:
    """Store both axes backwards, and the first one fastest."""
    return np.asfortranarray(array[::-1, ::-1])[::-1, ::-1]


def unaligned(array: Array) -> Array:
    """Start at an odd address."""
    room = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = room.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


LAYOUTS: list[Callable[[Array], Array]] = [np.ascontiguousarray, np.asfortranarray, strided, reverse, unaligned]


def bit_patterns(dtype: np.dtype[Any], sizes: Sequence[int]) -> st.SearchStrategy[Array]:
    """Return a strategy for arrays of any bit patterns, with the special ones often among them."""
    part = np.zeros((), dtype).real.dtype
    words = np.dtype(f"u{part.itemsize}")
    info = ml_dtypes.finfo(part)
    special = [0, -0.0, 1, np.inf, -np.inf, np.nan, info.max, info.smallest_normal, info.smallest_subnormal]
    patterns = [int(each) for each in np.array(special).astype(part).view(words)]
    word = st.one_of(st.sampled_from(patterns), st.integers(0, int(np.iinfo(words).max)))

    # A short repeated pattern and one free element make long arrays cheaply.
    def build(size: int, cycle: list[int], position: int, value: int) -> Array:
        array = np.resize(np.array(cycle, words), size * (dtype.itemsize // part.itemsize))
        if array.size:
            array[position % array.size] = value
        return array.view(dtype)

    cycles, positions = st.lists(word, min_size=1, max_size=40), st.integers(0, max(sizes))
    return st.builds(build, st.sampled_from(sizes), cycles, positions, word)
