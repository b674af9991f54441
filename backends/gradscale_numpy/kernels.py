"""Unscale and judge NumPy arrays in bounded memory, and summarize them, with NumPy alone.

A block is multiplied and judged while it is in the processor's cache, so that the verdict costs no second pass through
memory and no temporary of the array's size. Small arrays of one type are judged together.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradscale.core.summaries import Summary, join, layout_of, summaries_of, summarize_arrays

Array = NDArray[Any]
Pair = tuple[Array, Array]
UnscaleBlock: TypeAlias = "Callable[[Array, Array, np.float32], bool | None]"
"""A kernel for some blocks, which returns whether what it has written is finite; None for those that it leaves."""

_T = TypeVar("_T")

SMALL = 1 << 13
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

# The exponent and fraction of a float16, shifted 13 bits up, are a float32 whose exponent is too small by 112.
_HALF_SHIFT = np.array(13, np.int32)
_HALF_EXPONENT_GAP = 112
_HALF_LARGEST_INVERSE = 2.0 ** (128 - _HALF_EXPONENT_GAP)
_HALF_MASK = np.array(0x8FFFE000, np.uint32).view(np.int32)
_HALF_INFINITY = 0x7C00
_HALF_MINUS_INFINITY = 0xFC00
_SUBNORMAL = np.array(1, np.int32).view(_SINGLE)


def unscale_all(
    sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32, unscale_block: UnscaleBlock | None = None
) -> int:
    """Multiply each source by ``inverse`` into its out and count the outs that are then not finite.

    The product is rounded once, to float32 or a wider type of the source, and cast. An out has its source's shape, is
    complex exactly if that is, and is the source itself or shares no memory with any source or other out. An inverse of
    1 leaves sources that are outs as they are: they are only judged.
    """
    nonfinite = 0
    unscale_block = unscale_block or _widen_finite_half
    small: defaultdict[tuple[np.dtype[np.generic], np.dtype[np.generic]], list[Pair]] = defaultdict(list)
    with np.errstate(all="ignore"):
        if sources is outs and _ONLY_SINGLES.issuperset(map(_dtype, outs)):
            largest = max(map(_size, outs), default=0)
            if largest <= SMALL:
                return sum(map(_scale_singles, _parts_of(outs, largest), itertools.repeat(np.asarray(inverse))))
        for source, out in zip(sources, outs, strict=True):
            if out.size > SMALL:
                nonfinite += not _unscale_one(source, out, inverse, unscale_block)
            else:
                small[source.dtype, out.dtype].append((source, out))
        for pairs in small.values():
            nonfinite += sum(_unscale_gathered(part, inverse, unscale_block) for part in _parts_of(pairs, SMALL))
    return nonfinite


def _unscale_one(source: Array, out: Array, inverse: np.float32, unscale_block: UnscaleBlock) -> bool:
    """Unscale one pair, under the caller's `numpy.errstate`, and return whether `out` is then finite."""
    pair = [_parts(x) for x in ([out] if out is source else [source, out])]
    arithmetic = pair[0].dtype.newbyteorder("=") if pair[0].dtype.itemsize > _SINGLE.itemsize else _SINGLE
    factor = np.asarray(inverse, arithmetic)
    finite = True
    for blocks in _blocks(_BLOCK, *pair):
        source_block, out_block = blocks[0], blocks[-1]
        is_block_finite = unscale_block(source_block, out_block, inverse)
        if is_block_finite is None:
            if out is not source or inverse != 1:
                np.multiply(source_block, factor, out_block, dtype=arithmetic, casting="unsafe")
            # One bad block decides, but every block is multiplied.
            is_block_finite = finite and _is_finite(out_block)
        finite = finite and is_block_finite
    return finite


def squared_norm(arrays: Sequence[Array]) -> float:
    """Return the sum of the squares of all elements, computed in float64; of complex ones, of both parts."""
    total = 0.0
    small: defaultdict[np.dtype[np.generic], list[Array]] = defaultdict(list)
    large: list[Array] = []
    for array in arrays:
        (small[array.dtype] if array.size <= SMALL else large).append(array)
    with np.errstate(all="ignore"):
        gathered = (np.concatenate(part, axis=None) for group in small.values() for part in _parts_of(group, SMALL))
        for array in itertools.chain(large, gathered):
            for (block,) in _blocks(_BLOCK, _parts(array)):
                wide = block.astype(_DOUBLE)
                total += float(np.multiply(wide, wide, wide).sum())
    return total


def _parts_of(small: Sequence[_T], largest: int) -> Iterator[Sequence[_T]]:
    """Cut a list of small arrays where they may fill a block."""
    step = _BLOCK // max(1, largest)
    return (small[start : start + step] for start in range(0, len(small), step))


def _scale_singles(arrays: Sequence[Array], factor: Array) -> int:
    """Multiply small arrays of float32 in place, and count those that are then not finite."""
    if factor != 1:
        for _ in map(np.multiply, arrays, itertools.repeat(factor), arrays):
            pass
    return 0 if _is_finite(np.concatenate(arrays, axis=None)) else _nonfinite_among(arrays)


def _unscale_gathered(pairs: Sequence[Pair], inverse: np.float32, unscale_block: UnscaleBlock) -> int:
    """Unscale small arrays of the same types as one."""
    gathered = np.concatenate([source for source, _ in pairs], axis=None)
    source_type, out_type = (x.dtype for x in pairs[0])
    result = gathered if source_type == out_type else np.empty(gathered.size, out_type)
    is_finite = _unscale_one(gathered, result, inverse, unscale_block)
    start = 0
    for source, out in pairs:
        if out is not source or inverse != 1:
            out[...] = result[start : start + out.size].reshape(out.shape)
        start += out.size
    return 0 if is_finite else _nonfinite_among([out for _, out in pairs])


def _nonfinite_among(arrays: Sequence[Array]) -> int:
    return sum(not np.isfinite(array).all() for array in arrays)


def _parts(array: Array) -> Array:
    """View a complex array as its real and imaginary parts, along a new last axis, and return any other as it is."""
    # An axis of one element can be split in two whatever the strides of the others are.
    return array[..., np.newaxis].view(np.empty(0, array.dtype).real.dtype) if array.dtype.kind == "c" else array


def _blocks(size: int, *arrays: Array) -> Iterator[Sequence[Array]]:
    """Cut arrays of one shape into blocks of at most `size` elements, along the axis with the longest stride first."""
    if all(x.flags.c_contiguous for x in arrays):
        arrays = tuple(x.reshape(-1) for x in arrays)
    elif all(x.flags.f_contiguous for x in arrays):
        arrays = tuple(x.T.reshape(-1) for x in arrays)
    out = arrays[-1]
    if out.size <= size:
        yield arrays
        return
    longer = [axis for axis in range(out.ndim) if out.shape[axis] > 1]
    axis = max(longer, key=lambda axis: abs(out.strides[axis]))
    length = out.shape[axis]
    step = max(1, length * size // out.size)
    for start in range(0, length, step):
        block = (slice(None),) * axis + (slice(start, start + step),)
        blocks = tuple(x[block] for x in arrays)
        if out.ndim == 1:
            yield blocks
        else:
            yield from _blocks(size, *blocks)


def _widen_finite_half(source: Array, out: Array, inverse: np.float32) -> bool | None:
    """Store float16 times ``inverse`` in a float32 array and return True, if all of the source is finite; else None.

    NumPy converts float16 one element at a time. Shifted as integers, the bits of a finite float16 are exactly the
    float32 of 2**-112 times its value. The missing power of two goes into the factor, which stays exact.
    """
    # A processor that takes subnormals for 0, as after torch.set_flush_denormal(True), takes this one, too.
    if source.dtype != _HALF or out.dtype != _SINGLE or not 0 < inverse < _HALF_LARGEST_INVERSE or _SUBNORMAL == 0:
        return None
    bits = source.view(np.int16)
    # The initial value is there for an empty source.
    if bits.max(initial=0) >= _HALF_INFINITY or bits.view(np.uint16).max(initial=0) >= _HALF_MINUS_INFINITY:
        return None
    out_bits = out.view(np.int32)
    out_bits[...] = bits
    np.left_shift(out_bits, _HALF_SHIFT, out_bits)
    np.bitwise_and(out_bits, _HALF_MASK, out_bits)
    np.multiply(out, np.ldexp(inverse, _HALF_EXPONENT_GAP), out)
    return True


def _is_finite(block: Array) -> bool:
    if block.dtype in (_SINGLE, _DOUBLE) and block.ndim == 1 and block.flags.carray and block.size % _ROW == 0:
        # No square is negative, so no infinity cancels. Finite values may overflow: the exact test is below.
        sums_of_squares = np.matmul(block.reshape(-1, 1, _ROW), block.reshape(-1, _ROW, 1))
        if np.isfinite(sums_of_squares).all():
            return True
    return bool(np.isfinite(block).all())


def bits(x: Array) -> Array | None:
    """Return the bits of real values, of any strides and byte order, as integers; None for float8 and long double."""
    if layout_of(x.dtype.newbyteorder("=")) is None:
        return None
    return x.view(np.dtype(f"i{x.itemsize}").newbyteorder(x.dtype.byteorder))


def summary_of(array: Array) -> Summary:
    """Summarize an array, block by block."""
    if array.dtype.type is np.longdouble:
        # Taking its largest magnitude apart takes longer than counting a block.
        return _compared(array)
    # In the order of the memory, which needs no copy if that has no gaps.
    flat = array.ravel(order="K").astype(array.dtype.newbyteorder("="), copy=False)
    return join(_counted(flat[start : start + _COUNTED_BLOCK]) for start in range(0, flat.size, _COUNTED_BLOCK))


def _counted(block: Array) -> Summary:
    """Count in the bits by comparisons and reductions, of which ``min`` takes twice as long as any other."""
    layout = layout_of(block.dtype)
    if layout is None:
        return _compared(block)
    x = block.view(f"i{block.itemsize}") & layout.mask
    small = int(np.count_nonzero(x < layout.smallest_normal))
    zeros = x.size - int(np.count_nonzero(x)) if small else 0
    finite, inf, greatest = x.size, 0, int(x.max())
    if greatest >= layout.infinity:
        finite, inf = (int(np.count_nonzero(flags)) for flags in (x < layout.infinity, x == layout.infinity))
        # Without a sign, where they wrap, those below infinity are above all others.
        np.subtract(x, layout.infinity, out=x)
        greatest = int(x.view(f"u{x.itemsize}").max()) - (1 << 8 * x.itemsize) + layout.infinity if finite else 0
    return Summary(x.size, inf, x.size - finite - inf, zeros, small - zeros, layout.value(greatest))


def _compared(array: Array) -> Summary:
    return summaries_of([array], summarize_arrays([array], bits).tolist())[0]
