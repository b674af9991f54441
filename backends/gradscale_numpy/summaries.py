"""Summarize NumPy arrays: inf, NaN, zeros, subnormals and the largest magnitude, from their bits, block by block.

By their bits without the sign, floating-point numbers are ordered as integers: zero, subnormals, normal numbers,
infinity, NaN. Integers of any width are compared as fast as memory is read, and no mode of the processor that takes
subnormals for 0 matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradscale.core.summaries import summarize_arrays, summary_of, words

__all__ = ["Count", "Layout", "count_words", "summarize_all"]

Array = NDArray[Any]

# Elements of one block: a few that stay in a cache, and enough to hide what a call costs.
_BLOCK = 1 << 16
_BYTE_PATTERNS = 1 << 8


class Layout(NamedTuple):
    """How the bits of a real type are arranged.

    Attributes
    ----------
    word : dtype
        The signed integer of its width.
    magnitude, infinity, smallest_normal : integer
        The bits that are not the sign; those of infinity, above which is NaN, and of the smallest normal number.
    """

    word: np.dtype[Any]
    magnitude: Any
    infinity: Any
    smallest_normal: Any


class Count(NamedTuple):
    """How many elements are so, and the bits of the largest finite magnitude."""

    inf: int
    nan: int
    zeros: int
    subnormals: int
    largest: int


CountWords: TypeAlias = Callable[[Array, Layout], Count]


def summarize_all(arrays: Sequence[Array], count: CountWords | None = None) -> list[int]:
    """Return the words of :func:`gradscale.core.summaries.summarize_arrays`.

    Parameters
    ----------
    arrays
        Real or complex floating-point arrays, of any memory layout and byte order.
    count
        Counts a contiguous array of words of any length. Default, and for half precision, of which NumPy itself counts
        more at once: `count_words`, block by block.
    """
    return [word for array in arrays for word in _summarize_one(np.asarray(array), count)]


def _summarize_one(array: Array, count: CountWords | None) -> list[int]:
    if array.dtype.itemsize == 1:
        return _summarize_bytes(array)
    layout = _layout_of(np.zeros((), array.dtype).real.dtype.newbyteorder("="))
    if layout is None:
        found: list[int] = summarize_arrays([array]).tolist()
        return found
    part = np.zeros((), array.dtype).real.dtype.newbyteorder("=")
    if array.dtype.kind == "c":
        counts = [_count_pairs(block.view(layout.word).reshape(-1, 2), layout) for block in _blocks(array)]
    elif (
        count is not None
        and array.itemsize > 2
        and array.flags.c_contiguous
        and array.flags.aligned
        and array.dtype.isnative
    ):
        counts = [count(array.reshape(-1).view(layout.word), layout)]
    else:
        counts = [count_words(block.view(layout.word), layout) for block in _blocks(array)]
    inf, nan, zeros, subnormals = (sum(each[k] for each in counts) for k in range(4))
    bits = np.array(max((each.largest for each in counts), default=0), layout.word)
    return words(inf, nan, zeros, subnormals, float(bits.view(part).astype(np.float64)))


@lru_cache(maxsize=64)
def _layout_of(part: np.dtype[Any]) -> Layout | None:
    """Return the layout of a native real type; None for one that has no integer of its width."""
    if part.name == "bfloat16":
        fraction_bits = 7
    elif part.kind == "f" and part.itemsize in (2, 4, 8):
        fraction_bits = np.finfo(part).nmant
    else:
        return None
    word = np.dtype(f"i{part.itemsize}")
    magnitude = np.iinfo(word).max
    fraction = (1 << fraction_bits) - 1
    values = (magnitude, magnitude - fraction, fraction + 1)
    return Layout(word, *(word.type(value) for value in values))


def _blocks(array: Array) -> Iterator[Array]:
    """Yield the elements in blocks that are contiguous and native, copied where they are not."""
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


def count_words(block: Array, layout: Layout) -> Count:
    """Count in one block of words."""
    magnitudes = np.bitwise_and(block, layout.magnitude)
    small = _number(magnitudes < layout.smallest_normal)
    zeros = _number(magnitudes == 0) if small else 0
    inf = nan = 0
    largest = int(magnitudes.max(initial=0))
    if largest >= layout.infinity:
        nan = _number(magnitudes > layout.infinity)
        inf = _number(magnitudes == layout.infinity)
        # What is finite lies below infinity, and without a sign, where it wraps, above all that is not.
        magnitudes -= layout.infinity
        largest = int(magnitudes.view(f"u{block.itemsize}").max(initial=0)) - (1 << 8 * block.itemsize)
        largest = max(0, largest + int(layout.infinity))
    return Count(inf, nan, zeros, small - zeros, largest)


def _count_pairs(block: Array, layout: Layout) -> Count:
    """Count in one block of complex numbers, given by the words of their parts."""
    parts = np.bitwise_and(block, layout.magnitude)
    worst = parts.max(axis=1)
    is_small = ((parts > 0) & (parts < layout.smallest_normal)).any(axis=1)
    return Count(
        inf=_number(worst == layout.infinity),
        nan=_number(worst > layout.infinity),
        zeros=_number(worst == 0),
        subnormals=_number(is_small & (worst < layout.infinity)),
        largest=int(parts.max(initial=0, where=parts < layout.infinity)),
    )


def _number(flags: Array) -> int:
    return int(np.count_nonzero(flags))


def _summarize_bytes(array: Array) -> list[int]:
    """Summarize a type of one byte: there are few values, and each is looked at once."""
    counts = sum(
        (np.bincount(block.view(np.uint8), minlength=_BYTE_PATTERNS) for block in _blocks(array)),
        np.zeros(_BYTE_PATTERNS, np.intp),
    )
    present = np.flatnonzero(counts)
    # The pure form says of each pattern what it is.
    patterns = [np.array(pattern, np.uint8).view(array.dtype) for pattern in present]
    found = [summary_of(1, summarize_arrays([pattern]).tolist()) for pattern in patterns]
    times = counts[present].tolist()
    inf, nan, zeros, subnormals = (sum(n * each[k] for n, each in zip(times, found, strict=True)) for k in range(1, 5))
    return words(int(inf), int(nan), int(zeros), int(subnormals), max((each.largest for each in found), default=0.0))
