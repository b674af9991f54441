"""Unscale, judge and summarize NumPy arrays in bounded memory, with NumPy alone.

A block is multiplied and judged while it is in the processor's cache, so that the verdict costs no second pass through
memory and no temporary of the array's size. Small arrays of one type are judged together.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradscale.core.summaries import Summary, count_block, layout_of, summarize_arrays, summary_of, words

__all__ = ["SMALL", "bits", "sum_of_squares", "summarize", "unscale_all", "unscale_one"]

Array = NDArray[Any]
Pair = tuple[Array, Array]
_T = TypeVar("_T")

SMALL = 1 << 10
"""The most elements of an array that is judged together with others."""

# Elements of one block: two MiB of float32, which stay in a cache between the product and the verdict.
_BLOCK = 1 << 19
# Elements of one block that is counted: a few that stay in a cache, and enough to hide what a call costs.
_COUNTED_BLOCK = 1 << 16
# Elements of one dot product: few enough for a BLAS library to stay in the calling thread.
_ROW = 1 << 13

_HALF = np.dtype(np.float16)
_SINGLE = np.dtype(np.float32)
_ONLY_SINGLES = frozenset([_SINGLE])
_DOUBLE = np.dtype(np.float64)

_dtype, _size = operator.attrgetter("dtype"), operator.attrgetter("size")

# The exponent and fraction of a float16, moved 13 bits up, are a float32 whose exponent is too small by 112.
_HALF_SHIFT = np.array(13, np.int32)
_HALF_EXPONENT_GAP = 112
_HALF_LARGEST_INVERSE = 2.0 ** (128 - _HALF_EXPONENT_GAP)
_HALF_MOVED_BITS = np.array(0x8FFFE000, np.uint32).view(np.int32)
_HALF_INFINITY = 0x7C00
_HALF_MINUS_INFINITY = 0xFC00


def unscale_all(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Multiply each source by `inverse` into its out and count the outs that are then not finite.

    The product is formed in float32, or in the source's own type if that is wider, rounded once, and cast to the type
    of the out. Each out has the shape of its source and is complex exactly if that is. It is the source itself, or
    shares no memory with any source; no two outs share memory.
    """
    nonfinite = 0
    small: defaultdict[tuple[np.dtype[Any], np.dtype[Any]], list[Pair]] = defaultdict(list)
    with np.errstate(all="ignore"):
        if (
            sources is outs
            and _ONLY_SINGLES.issuperset(map(_dtype, outs))
            and max(map(_size, outs), default=0) <= SMALL
        ):
            return sum(_scale_singles(part, np.asarray(inverse)) for part in _parts_of(outs))
        for source, out in zip(sources, outs, strict=True):
            if out.size > SMALL:
                nonfinite += unscale_one(source, out, inverse)
            else:
                small[source.dtype, out.dtype].append((source, out))
        for pairs in small.values():
            nonfinite += sum(_unscale_gathered(part, inverse) for part in _parts_of(pairs))
    return nonfinite


def unscale_one(source: Array, out: Array, inverse: np.float32) -> bool:
    """Unscale one pair, under the caller's `numpy.errstate`, and return whether `out` is then not finite."""
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
    """Return the sum of the squares of all elements, computed in float64; of complex ones, of both parts."""
    total = 0.0
    small: defaultdict[np.dtype[Any], list[Array]] = defaultdict(list)
    with np.errstate(all="ignore"):
        for array in arrays:
            if array.size <= SMALL:
                small[array.dtype].append(array)
                continue
            flat = _parts(array) if array.dtype.kind == "c" else array
            total += sum(_square(block) for block, _ in _blocks(flat, flat))
        for group in small.values():
            for part in _parts_of(group):
                gathered = np.concatenate(part, axis=None)
                total += _square(_parts(gathered) if gathered.dtype.kind == "c" else gathered)
    return total


def _square(block: Array) -> float:
    wide = block.astype(_DOUBLE)
    return float(np.multiply(wide, wide, wide).sum())


def _parts_of(small: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Cut a list of small arrays where they fill a block."""
    step = _BLOCK // SMALL
    return (small[start : start + step] for start in range(0, len(small), step))


def _scale_singles(arrays: Sequence[Array], factor: Array) -> int:
    """Multiply small arrays of float32 in place, and count those that are then not finite."""
    for _ in map(np.multiply, arrays, itertools.repeat(factor), arrays):
        pass
    return 0 if _is_finite(np.concatenate(arrays, axis=None)) else _nonfinite_among(arrays)


def _unscale_gathered(pairs: Sequence[Pair], inverse: np.float32) -> int:
    """Unscale small arrays of the same types as one."""
    gathered = np.concatenate([source for source, _ in pairs], axis=None)
    result = np.empty(gathered.size, pairs[0][1].dtype)
    is_finite = not unscale_one(gathered, result, inverse)
    start = 0
    for _, out in pairs:
        out.flat[:] = result[start : start + out.size]
        start += out.size
    return 0 if is_finite else _nonfinite_among([out for _, out in pairs])


def _nonfinite_among(arrays: Sequence[Array]) -> int:
    return sum(not np.isfinite(array).all() for array in arrays)


def _parts(array: Array) -> Array:
    """View a complex array as its real and imaginary parts, along a new last axis."""
    # An axis of one element can be split in two whatever the strides of the others are.
    return array[..., np.newaxis].view(np.empty(0, array.dtype).real.dtype)


def _blocks(source: Array, out: Array) -> Iterator[Pair]:
    """Cut a pair into blocks of at most `_BLOCK` elements, along the axis with the longest stride first."""
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

    NumPy converts float16 one element at a time. Moved into place as integers, the bits of a finite float16 are exactly
    the float32 of 2**-112 times its value. The missing power of two goes into the factor, which stays exact.
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


def bits(x: Array) -> Array | None:
    """Return the bits of real values, of any strides and byte order, as integers; None for float8 and long double."""
    if layout_of(x.dtype.newbyteorder("=")) is None:
        return None
    return x.view(np.dtype(f"i{x.itemsize}").newbyteorder(x.dtype.byteorder))


def summarize(array: Array) -> list[int]:
    """Return the words of ``gradscale.core.summaries.summarize_arrays`` for one array, counted block by block."""
    if array.dtype.type is np.longdouble:
        # Taking its largest magnitude apart takes longer than counting a block.
        found: list[int] = summarize_arrays([array]).tolist()
        return found
    return words(map(_summarize_block, _contiguous_blocks(array)))


def _contiguous_blocks(array: Array) -> Iterator[Array]:
    """Yield the elements in blocks that are contiguous and native."""
    if array.flags.forc and array.flags.aligned and array.dtype.isnative:
        flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
        for start in range(0, flat.size, _COUNTED_BLOCK):
            yield flat[start : start + _COUNTED_BLOCK]
        return
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    needs: Any = [["readonly", "nbo", "aligned", "contig"]]
    walk: Any = np.nditer(array, flags, needs, order="K", buffersize=_COUNTED_BLOCK)
    for block in walk:
        if block.size:
            yield np.ascontiguousarray(block)


def _summarize_block(block: Array) -> Summary:
    layout = layout_of(block.dtype)
    if layout is None:
        return summary_of(block.size, summarize_arrays([block], bits).tolist())
    return count_block(block.view(f"i{block.itemsize}"), layout, _Counting(layout.mask))


class _Counting:
    """Counts by comparisons and reductions, of which ``min`` takes twice as long as any other."""

    def __init__(self, mask: int) -> None:
        self._mask = mask

    def magnitudes(self, bits: Array) -> Array:
        return bits & self._mask

    def extent(self, x: Array, limit: int) -> tuple[int, int, int]:
        small = int(np.count_nonzero(x < limit))
        zeros = x.size - int(np.count_nonzero(x)) if small else 0
        return zeros, small, int(x.max())

    def around(self, x: Array, limit: int) -> tuple[int, int, int]:
        below, equal = int(np.count_nonzero(x < limit)), int(np.count_nonzero(x == limit))
        if not below:
            return 0, equal, 0
        # Without a sign, where they wrap, those below the limit are above all others.
        np.subtract(x, limit, out=x)
        greatest = int(x.view(f"u{x.itemsize}").max()) - (1 << 8 * x.itemsize) + limit
        return below, equal, greatest
