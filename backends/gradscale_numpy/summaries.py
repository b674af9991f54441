"""Summarize NumPy arrays: inf, NaN, zeros, subnormals and the largest magnitude, from their bits, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradscale.core.summaries import (
    Layout,
    Summary,
    count_block,
    layout_of,
    summarize_arrays,
    summary_of,
    words,
)

__all__ = ["bits", "summarize_all"]

Array = NDArray[Any]
CountWords: TypeAlias = Callable[[Array, Layout], Summary]

# Elements of one block: a few that stay in a cache, and enough to hide what a call costs.
_BLOCK = 1 << 16


def bits(x: Array) -> Array | None:
    """Return the bits of real values, of any strides and byte order, as integers; None for float8 and long double."""
    if layout_of(x.dtype.newbyteorder("=")) is None:
        return None
    return x.view(np.dtype(f"i{x.itemsize}").newbyteorder(x.dtype.byteorder))


def summarize_all(arrays: Sequence[Array], count: CountWords | None = None) -> list[int]:
    """Return the words of :func:`gradscale.core.summaries.summarize_arrays`.

    ``count`` counts in contiguous words of any number; but NumPy is faster for half precision.
    """
    return [word for array in arrays for word in _summarize_one(np.asarray(array), count)]


def _summarize_one(array: Array, count: CountWords | None) -> list[int]:
    layout, flags = layout_of(array.dtype), array.flags
    if count is not None and layout is not None and array.itemsize > 2 and flags.c_contiguous and flags.aligned:
        return words([count(array.reshape(-1).view(f"i{array.itemsize}"), layout)])
    if array.dtype.type is np.longdouble:
        # Taking its largest magnitude apart takes longer than counting a block.
        found: list[int] = summarize_arrays([array]).tolist()
        return found
    return words(map(_summarize_block, _blocks(array)))


def _blocks(array: Array) -> Iterator[Array]:
    """Yield the elements in blocks that are contiguous and native."""
    if array.flags.forc and array.flags.aligned and array.dtype.isnative:
        flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            yield flat[start : start + _BLOCK]
        return
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    needs: Any = [["readonly", "nbo", "aligned", "contig"]]
    walk: Any = np.nditer(array, flags, needs, order="K", buffersize=_BLOCK)
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
