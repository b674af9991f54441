"""Unscale and judge NumPy arrays in bounded memory, with NumPy alone.

Every array is multiplied by the reciprocal of the scale and judged on what is then stored. Both happen block
by block, while the block is still in the processor's cache, so that the verdict costs no second pass through
memory and no temporary of the array's size. Small arrays of one type are gathered into one block.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from gradscale.core.arithmetic import Kind, dtype_kind

__all__ = ["SMALL", "dtypes_of_owners", "sum_of_squares", "unscale_all", "unscale_one", "unscale_owners"]

Array = NDArray[Any]
Pair = tuple[Array, Array]

SMALL = 1 << 10
"""The most elements of an array that is gathered with others, as it costs less work than calls."""

# Elements of one block: two MiB of float32, which stay in a cache between the product and the verdict.
_BLOCK = 1 << 19
# Elements of one dot product: few enough for a BLAS library to stay in the calling thread.
_ROW = 1 << 13

_dtype, _size = operator.attrgetter("dtype"), operator.attrgetter("size")
_flags = operator.attrgetter("flags.num")

_NUMPY = array_namespace(np.zeros(()))
_ONLY_ARRAYS = frozenset([np.ndarray])
_ONLY_SINGLES = frozenset([np.dtype(np.float32)])
# C-contiguous, Fortran-contiguous or not, the owner of its memory, aligned and writable.
_OWN_AND_PLAIN = frozenset(0x0001 | fortran | 0x0004 | 0x0100 | 0x0400 for fortran in (0, 0x0002))

_HALF = np.dtype(np.float16)
_SINGLE = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)

# The exponent and fraction of a float16, moved 13 bits up, are a float32 whose exponent is too small by 112.
_HALF_SHIFT = np.array(13, np.int32)
_HALF_EXPONENT_GAP = 112
_HALF_LARGEST_INVERSE = 2.0 ** (128 - _HALF_EXPONENT_GAP)
_HALF_MOVED_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)
_HALF_INFINITY = 0x7C00
_HALF_MINUS_INFINITY = 0xFC00


def unscale_all(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Multiply each source by `inverse` into its out and count the outs that are then not finite.

    The product is formed in float32, or in the source's own type where that is wider, rounded once, and cast
    to the type of the out. A complex array is multiplied and judged by its real and imaginary parts.

    Parameters
    ----------
    sources
        Real or complex floating-point arrays, of any memory layout.
    outs
        One writable array for each source, of the same shape, and complex exactly where the source is: the
        source itself for work in place, else one that shares no memory with a source. No two share memory.
    inverse
        The factor: one over the scale.

    Returns
    -------
    int
        How many outs hold an infinity or a NaN.
    """
    nonfinite = 0
    # By type, the small arrays to gather and those to scatter to: one list of them for work in place.
    small: dict[Any, tuple[list[Array], list[Array]]] = {}
    with np.errstate(all="ignore"):
        for source, out in zip(sources, outs, strict=True):
            if out.size > SMALL:
                nonfinite += unscale_one(source, out, inverse)
                continue
            in_place = source is out
            types = out.dtype if in_place else (source.dtype, out.dtype)
            group = small.get(types)
            if group is None:
                gathered: list[Array] = []
                group = small[types] = gathered, gathered if in_place else []
            group[0].append(source)
            if not in_place:
                group[1].append(out)
        for small_sources, small_outs in small.values():
            for start in range(0, len(small_outs), _BLOCK // SMALL):
                part = slice(start, start + _BLOCK // SMALL)
                nonfinite += _unscale_gathered(small_sources[part], small_outs[part], inverse)
    return nonfinite


def unscale_owners(leaves: Sequence[Any], inverse: np.float32) -> int | None:
    """Do what `unscale_all` does in place, where a glance tells that this can be done.

    Parameters
    ----------
    leaves
        Anything.
    inverse
        The factor: one over the scale.

    Returns
    -------
    int or None
        How many arrays hold an infinity or a NaN. None, and nothing is modified, where `dtypes_of_owners` is.
    """
    dtypes = dtypes_of_owners(leaves)
    if dtypes is None:
        return None
    if not dtypes <= _ONLY_SINGLES or max(map(_size, leaves), default=0) > SMALL:
        return unscale_all(leaves, leaves, inverse)
    nonfinite, factor = 0, np.asarray(inverse)
    with np.errstate(all="ignore"):
        for start in range(0, len(leaves), _BLOCK // SMALL):
            part = leaves[start : start + _BLOCK // SMALL]
            # A loop that runs in C.
            collections.deque(map(np.multiply, part, itertools.repeat(factor), part), maxlen=0)
            if not _is_finite(part[0].reshape(-1) if len(part) == 1 else np.concatenate(part, axis=None)):
                nonfinite += sum(not np.isfinite(array).all() for array in part)
    return nonfinite


def dtypes_of_owners(leaves: Sequence[Any]) -> set[np.dtype[Any]] | None:
    """Return the dtypes of arrays of which a few looks tell that they can be unscaled in place.

    Parameters
    ----------
    leaves
        Anything.

    Returns
    -------
    set of dtypes or None
        None where a leaf is anything but a C-contiguous, aligned and writable floating-point array of NumPy's own
        class that owns its memory and is there once.
    """
    if not _ONLY_ARRAYS.issuperset(map(type, leaves)) or not _OWN_AND_PLAIN.issuperset(map(_flags, leaves)):
        return None
    if len(leaves) > 1 and len(set(map(id, leaves))) < len(leaves):
        return None
    dtypes = set(map(_dtype, leaves))
    return dtypes if dtypes <= _ONLY_SINGLES or all(map(_is_floating, dtypes)) else None


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype_kind(dtype, _NUMPY) in (Kind.HALF, Kind.WIDE, Kind.COMPLEX)


def unscale_one(source: Array, out: Array, inverse: np.float32) -> bool:
    """Do for one pair what `unscale_all` does, under the caller's `numpy.errstate`.

    Parameters
    ----------
    source, out, inverse
        As for `unscale_all`.

    Returns
    -------
    bool
        Whether `out` holds an infinity or a NaN.
    """
    if out.dtype.kind == "c":
        source, out = _parts(source), _parts(out)
    arithmetic = source.dtype.newbyteorder("=") if source.dtype.itemsize > _SINGLE.itemsize else _SINGLE
    factor = np.asarray(inverse, arithmetic)
    widening = source.dtype == _HALF and out.dtype == _SINGLE and 0 < inverse < _HALF_LARGEST_INVERSE
    finite = True
    for source_block, out_block in _blocks(source, out):
        if widening and _multiply_finite_half(source_block, out_block, inverse):
            continue
        np.multiply(source_block, factor, out_block, dtype=arithmetic, casting="unsafe")
        # One bad block decides, but every block is multiplied.
        finite = finite and _is_finite(out_block)
    return not finite


def sum_of_squares(arrays: Sequence[Array]) -> float:
    """Return the sum of the squares of all elements, computed in float64; of complex ones, of both parts.

    Parameters
    ----------
    arrays
        As the outs of `unscale_all`; left alone.
    """
    total = 0.0
    small: dict[Any, list[Array]] = {}
    with np.errstate(all="ignore"):
        for array in arrays:
            if array.size <= SMALL:
                small.setdefault(array.dtype, []).append(array)
                continue
            flat = _parts(array) if array.dtype.kind == "c" else array
            total += sum(_square(block) for block, _ in _blocks(flat, flat))
        for group in small.values():
            for start in range(0, len(group), _BLOCK // SMALL):
                gathered = np.concatenate(group[start : start + _BLOCK // SMALL], axis=None)
                total += _square(_parts(gathered) if gathered.dtype.kind == "c" else gathered)
    return total


def _square(block: Array) -> float:
    wide = block.astype(_DOUBLE)
    return float(np.multiply(wide, wide, wide).sum())


def _unscale_gathered(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Do what `unscale_all` does for small arrays of the same types, with one pass over all of them."""
    gathered = np.concatenate(sources, axis=None)
    result = np.empty(gathered.size, outs[0].dtype)
    nonfinite = unscale_one(gathered, result, inverse)
    start = 0
    for out in outs:
        stop = start + out.size
        if out.ndim == 1:
            out[...] = result[start:stop]
        else:
            out.flat[:] = result[start:stop]
        start = stop
    return sum(not np.isfinite(out).all() for out in outs) if nonfinite else 0


def _parts(array: Array) -> Array:
    """View a complex array as its real and imaginary parts, along a new last axis."""
    # An axis of one element can be split in two whatever the strides of the others are.
    return array[..., np.newaxis].view(np.empty(0, array.dtype).real.dtype)


def _blocks(source: Array, out: Array) -> Iterator[Pair]:
    """Cut the pair into blocks of at most `_BLOCK` elements, along the axis with the longest stride first."""
    if source.flags.c_contiguous and out.flags.c_contiguous:
        source, out = source.reshape(-1), out.reshape(-1)
    elif source.flags.f_contiguous and out.flags.f_contiguous:
        source, out = source.T.reshape(-1), out.T.reshape(-1)
    if out.size <= _BLOCK:
        yield source, out
        return
    longer = [axis for axis in range(out.ndim) if out.shape[axis] > 1]
    axis = max(longer, key=lambda axis: abs(out.strides[axis]))
    length = out.shape[axis]
    step = max(1, length * _BLOCK // out.size)
    for start in range(0, length, step):
        block = (slice(None),) * axis + (slice(start, start + step),)
        if out.ndim == 1:
            yield source[block], out[block]
        else:
            yield from _blocks(source[block], out[block])


def _multiply_finite_half(source: Array, out: Array, inverse: np.float32) -> bool:
    """Store float16 times `inverse` in a float32 array if all of the source is finite; return whether it is.

    NumPy converts float16 one element at a time. Moved into place as integers, the bits of a finite float16
    are the float32 of 2**-112 times its value, exactly, subnormals included. The missing power of two goes
    into the factor, which it leaves exact, so that the product is still rounded once.
    """
    bits = source.view(np.int16)
    # The initial value is there for an empty source.
    if bits.max(initial=0) >= _HALF_INFINITY or bits.view(np.uint16).max(initial=0) >= _HALF_MINUS_INFINITY:
        return False
    moved = out.view(np.int32)
    moved[...] = bits
    np.left_shift(moved, _HALF_SHIFT, moved)
    np.bitwise_and(moved, _HALF_MOVED_BITS, moved)
    np.multiply(out, np.ldexp(inverse, _HALF_EXPONENT_GAP), out)
    return True


def _is_finite(block: Array) -> bool:
    """Return whether every element of the block is finite."""
    if block.dtype in (_SINGLE, _DOUBLE) and block.ndim == 1 and block.flags.carray:
        # No square is negative, so no infinity cancels. Finite values may overflow: the exact test is below.
        if block.size <= _ROW:
            if math.isfinite(np.vdot(block, block)):
                return True
        elif block.size % _ROW == 0:
            sums_of_squares = np.matmul(block.reshape(-1, 1, _ROW), block.reshape(-1, _ROW, 1))
            if np.isfinite(sums_of_squares).all():
                return True
    return bool(np.isfinite(block).all())
