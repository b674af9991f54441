"""Unscale, judge and summarize NumPy arrays in one pass, with loops that Numba compiles.

The answers are those of `kernels`, bit for bit. What has no loop here (float8, long double, strided or
byte-swapped arrays, a cast to a narrower type) is left to `kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscale.core.summaries import Layout, Summary, value_of
from gradscale_numpy import kernels
from gradscale_numpy.compiling import compiled
from gradscale_numpy.headers import (
    OWNERS,
    array_at,
    elements_of_singles,
    is_readable,
    objects_in,
    single_at,
    table_of_singles,
)

__all__ = ["count_words", "unscale_all", "unscale_owners"]

Array = NDArray[Any]

# Elements copied at a time when the result goes to another array of the source's type: half a MiB of float32.
_BLOCK = 1 << 17

# Elements that are scaled while other threads wait: it takes some 40 microseconds.
_AT_ONCE = 1 << 17

# Elements that are counted in 32 bits, in which more are counted at once than in 64.
_COUNTED = 1 << 16

# What was not scaled: anything else, and too much at once.
_OTHERS, _MANY = -1, -2

_SINGLE = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)
_BITS = np.dtype(np.uint16)

_f4 = np.float32
_i4 = np.int32
_u2 = np.uint16
_u4 = np.uint32


@compiled
def _half_to_single(half: Any) -> Any:
    """Return the float32 of a float16 given by its bits."""
    magnitude = _u4(half) & _u4(0x7FFF)
    subnormal = _f4(_f4(np.int32(magnitude)) * _f4(2.0**-24)).view(_u4)
    normal = _u4((magnitude << _u4(13)) + _u4(0x38000000))
    special = _u4((magnitude << _u4(13)) | _u4(0x7F800000))
    finite = subnormal if magnitude < _u4(0x0400) else normal
    bits = finite if magnitude < _u4(0x7C00) else special
    return _u4(bits | ((_u4(half) & _u4(0x8000)) << _u4(16))).view(_f4)


@compiled
def _single_to_half(single: Any) -> Any:
    """Return the bits of the float16 nearest to a float32, ties to even."""
    bits = _f4(single).view(_u4)
    magnitude = _u4(bits & _u4(0x7FFFFFFF))
    # Adding one half leaves a float32 whose last place is that of a float16 subnormal: the sum rounds it.
    subnormal = _u4(_f4(magnitude.view(_f4) + _f4(0.5)).view(_u4) - _u4(0x3F000000))
    rounded = _u4(magnitude + _u4(0x0FFF) + ((magnitude >> _u4(13)) & _u4(1)))
    normal = _u4((rounded - _u4(0x38000000)) >> _u4(13))
    special = _u4(0x7E00) if magnitude > _u4(0x7F800000) else _u4(0x7C00)
    finite = subnormal if magnitude < _u4(0x38800000) else normal
    half = finite if magnitude < _u4(0x47800000) else special
    return _u2(half | ((bits >> _u4(16)) & _u4(0x8000)))


@compiled
def _bfloat_to_single(bfloat: Any) -> Any:
    """Return the float32 of a bfloat16 given by its bits."""
    return _u4(_u4(bfloat) << _u4(16)).view(_f4)


@compiled
def _single_to_bfloat(single: Any) -> Any:
    """Return the bits of the bfloat16 nearest to a float32, ties to even."""
    bits = _f4(single).view(_u4)
    # A NaN stays one: it was a bfloat16, so that the lower half, which could carry over, is zero.
    return _u2((bits + _u4(0x7FFF) + ((bits >> _u4(16)) & _u4(1))) >> _u4(16))


@compiled
def _scale_doubles(array: Any, factor: Any) -> Any:
    nonfinite = False
    for i in range(array.size):
        value = array[i] * factor
        array[i] = value
        # Zero for a finite value and NaN for any other.
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@compiled
def _scale_singles(array: Any, factor: Any) -> Any:
    largest = _u4(0)
    for i in range(array.size):
        value = _f4(array[i] * factor)
        array[i] = value
        # By their bits, magnitudes are ordered as integers, infinity and NaN last: quicker here than a NaN test.
        largest = max(largest, value.view(_u4) & _u4(0x7FFFFFFF))
    return largest >= _u4(0x7F800000)


@compiled
def _scale_table(table: Any, factor: Any) -> Any:
    count = 0
    for i in range(table.shape[1]):
        count += _scale_singles(array_at(table[0, i], table[1, i], np.float32), factor)
    return count


def _scale_listed(listed: Any, wanted: Any, factor: Any) -> Any:
    """Scale the arrays of a list and return how many are not finite; negative, and nothing is modified, else."""
    objects = objects_in(listed)
    elements = elements_of_singles(objects, wanted)
    if elements < 0:
        return _OTHERS
    if elements > _AT_ONCE:
        return _MANY
    count = 0
    for address in objects:
        count += _scale_singles(single_at(address), factor)
    return count


# No other thread changes an array while it is read.
_scale_listed = compiled(_scale_listed, holds_lock=True)


@compiled
def _scale_halves(array: Any, factor: Any) -> Any:
    nonfinite = False
    for i in range(array.size):
        value = _single_to_half(_half_to_single(array[i]) * factor)
        array[i] = value
        nonfinite |= (value & _u2(0x7C00)) == _u2(0x7C00)
    return nonfinite


@compiled
def _scale_bfloats(array: Any, factor: Any) -> Any:
    nonfinite = False
    for i in range(array.size):
        value = _single_to_bfloat(_bfloat_to_single(array[i]) * factor)
        array[i] = value
        nonfinite |= (value & _u2(0x7F80)) == _u2(0x7F80)
    return nonfinite


@compiled
def _widen_halves(source: Any, out: Any, factor: Any) -> Any:
    nonfinite = False
    for i in range(source.size):
        value = _half_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@compiled
def _widen_bfloats(source: Any, out: Any, factor: Any) -> Any:
    nonfinite = False
    for i in range(source.size):
        value = _bfloat_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@compiled
def _count_magnitudes(words: Any, magnitude: Any, infinity: Any, smallest_normal: Any, counts: Any) -> Any:
    """Add how many magnitudes are infinite, NaN, zero and subnormal or zero to the counts; return the largest."""
    nothing = magnitude ^ magnitude
    largest = nothing
    for start in range(0, words.size, _COUNTED):
        inf, nan, zeros, small = _i4(0), _i4(0), _i4(0), _i4(0)
        for i in range(start, min(start + _COUNTED, words.size)):
            value = words[i] & magnitude
            largest = max(largest, value if value < infinity else nothing)
            inf = _i4(inf + _i4(value == infinity))
            nan = _i4(nan + _i4(value > infinity))
            zeros = _i4(zeros + _i4(value == nothing))
            small = _i4(small + _i4(value < smallest_normal))
        counts[0] += inf
        counts[1] += nan
        counts[2] += zeros
        counts[3] += small
    return largest


class _Loop(NamedTuple):
    """The loop for one pair of types, and the types that it sees the arrays and the factor as."""

    run: Callable[..., bool]
    source_type: np.dtype[Any]
    out_type: np.dtype[Any]
    factor_type: type[np.float32 | np.float64] = np.float32


@lru_cache(maxsize=64)
def _loop_for(source: np.dtype[Any], out: np.dtype[Any]) -> _Loop | None:
    """Return the loop for a pair of types: in place where they are the same, from source to out otherwise."""
    if source == out:
        if source in (np.dtype(np.float32), np.dtype(np.complex64)):
            return _Loop(_scale_singles, _SINGLE, _SINGLE)
        if source in (np.dtype(np.float64), np.dtype(np.complex128)):
            return _Loop(_scale_doubles, _DOUBLE, _DOUBLE, np.float64)
        if source == np.dtype(np.float16):
            return _Loop(_scale_halves, _BITS, _BITS)
        if _is_bfloat(source):
            return _Loop(_scale_bfloats, _BITS, _BITS)
    elif out == _SINGLE:
        if source == np.dtype(np.float16):
            return _Loop(_widen_halves, _BITS, _SINGLE)
        if _is_bfloat(source):
            return _Loop(_widen_bfloats, _BITS, _SINGLE)
    return None


def _is_bfloat(dtype: np.dtype[Any]) -> bool:
    """Return whether the type is bfloat16, which NumPy knows only by the library that registered it."""
    return dtype.name == "bfloat16" and dtype.itemsize == _BITS.itemsize and dtype.isnative


def unscale_all(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Do what `kernels.unscale_all` does, to the same bits.

    Parameters
    ----------
    sources, outs, inverse
        As for `kernels.unscale_all`. Where both sequences are one object, every array in it is C-contiguous, aligned
        and writable.

    Returns
    -------
    int
        How many outs hold an infinity or a NaN.
    """
    nonfinite = 0
    plain: list[Array] = []
    small_sources: list[Array] = []
    small_outs: list[Array] = []
    with np.errstate(all="ignore"):
        for source, out in zip(sources, outs, strict=True):
            if source is out and out.dtype is _SINGLE and out.flags.carray:
                plain.append(out)
            elif out.size > kernels.SMALL:
                nonfinite += _unscale_one(source, out, inverse)
            else:
                small_sources.append(source)
                small_outs.append(out)
    if small_outs:
        nonfinite += kernels.unscale_all(small_sources, small_outs, inverse)
    return nonfinite + _unscale_plain(plain, inverse)


def unscale_owners(leaves: Sequence[Any], inverse: np.float32) -> int | None:
    """Do what `kernels.unscale_owners` does, to the same bits."""
    listed = leaves if type(leaves) is list else list(leaves)
    count: int = _scale_listed(id(listed), OWNERS, inverse) if is_readable() else _OTHERS
    if count == _OTHERS:
        return None if kernels.dtypes_of_owners(listed) is None else unscale_all(listed, listed, inverse)
    return _unscale_plain(listed, inverse) if count == _MANY else count


def _unscale_plain(arrays: Sequence[Array], inverse: np.float32) -> int:
    table = table_of_singles(arrays)
    if table is None:
        return sum(_scale_singles(array.reshape(-1), inverse) for array in arrays)
    return int(_scale_table(table, inverse))


def _unscale_one(source: Array, out: Array, inverse: np.float32) -> bool:
    """Unscale one pair in a compiled loop where there is one, and say whether `out` is then not finite."""
    loop = _loop_for(source.dtype, out.dtype)
    if loop is None or not (source.flags.aligned and out.flags.aligned):
        return kernels.unscale_one(source, out, inverse)
    if source.flags.c_contiguous and out.flags.c_contiguous:
        values, results = source.reshape(-1), out.reshape(-1)
    elif source.flags.f_contiguous and out.flags.f_contiguous:
        values, results = source.T.reshape(-1), out.T.reshape(-1)
    else:
        return kernels.unscale_one(source, out, inverse)
    values, results = values.view(loop.source_type), results.view(loop.out_type)
    factor = loop.factor_type(inverse)
    if source.dtype != out.dtype:
        return loop.run(values, results, factor)
    if source is out:
        return loop.run(results, factor)
    nonfinite = False
    for start in range(0, results.size, _BLOCK):
        block = results[start : start + _BLOCK]
        block[...] = values[start : start + _BLOCK]
        nonfinite |= loop.run(block, factor)
    return nonfinite


def count_words(words: Array, layout: Layout) -> Summary:
    """Summarize a contiguous array of words."""
    counts = np.zeros(4, np.int64)
    mask, infinity, smallest_normal, _ = map(words.dtype.type, layout)
    largest = _count_magnitudes(words, mask, infinity, smallest_normal, counts)
    inf, nan, zeros, small = counts.tolist()
    return Summary(words.size, inf, nan, zeros, small - zeros, value_of(int(largest), layout))
