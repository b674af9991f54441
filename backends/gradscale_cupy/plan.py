"""Plans: which kernel of unscale.cu takes which arrays, and the tables that it reads. No device is needed.

An array is known by its address, shape, strides and dtype, so that whatever has these can be planned for.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from gradscale.core import aliasing
from gradscale.errors import SharedMemoryError

__all__ = ["CHUNK", "KERNELS", "ROW", "Arrays", "Kind", "Launch", "plan", "require_disjoint"]

CHUNK = 1 << 14
"""Elements of a chunk: 16 packs of 16 bytes for each of 256 threads, in float32."""

ROW = np.dtype([("source", np.uint64), ("target", np.uint64), ("size", np.int64)])
"""The struct Row of unscale.cu."""

# A complex number counts as two elements, its parts.
_PARTS = {"complex64": "float32", "complex128": "float64"}
KERNELS = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float16", "bfloat16", "float32", "float64"),
    "float64": ("float32", "float64"),
}
_EXACT_SEARCH = 100_000


Kind = tuple[tuple[int, ...], tuple[int, ...], "np.dtype[np.generic]"]
"""How the elements of an array lie, as CuPy has it: ``shape``, ``strides`` in bytes, and ``dtype``."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Arrays:
    """Arrays of one device: an address and the number of a kind for each, since thousands are of few kinds."""

    addresses: NDArray[np.int64]
    numbers: NDArray[np.intp]
    kinds: list[Kind]

    @classmethod
    def of(cls, addresses: Iterable[int], kinds: Iterable[Kind], count: int) -> Arrays:
        """Make them of the address (``data.ptr``) and the kind of each; ``count`` is how many there are."""
        distinct: defaultdict[Kind, int] = defaultdict(itertools.count().__next__)
        numbers = np.fromiter(map(distinct.__getitem__, kinds), np.intp, count)
        return cls(np.fromiter(addresses, np.int64, count), numbers, list(distinct))

    def __getitem__(self, chosen: slice) -> Arrays:
        """Return some of them, with the same list of kinds."""
        return Arrays(self.addresses[chosen], self.numbers[chosen], self.kinds)


class Launch(NamedTuple):
    """One call of a kernel: the dtypes in its name, a row for each array, and for each block a row and its chunk."""

    pair: str
    table: NDArray[np.void]
    chunks: NDArray[np.int32]


def plan(sources: Arrays, targets: Arrays, chunk: int = CHUNK) -> tuple[list[Launch], list[int]]:
    """Return a launch for each pair of dtypes, and which arrays no kernel takes: of other dtypes, or with gaps.

    The arrays have equal shapes, pair by pair, and the same list of kinds. A chunk has so many elements at most.
    """
    kinds = sources.kinds
    both, numbers = np.unique(sources.numbers * len(kinds) + targets.numbers, return_inverse=True)
    made = [_pair_and_size(kinds[number // len(kinds)], kinds[number % len(kinds)]) for number in both.tolist()]
    pairs = np.array([pair for pair, _ in made], object)[numbers]
    sizes = np.array([size for _, size in made], np.int64)[numbers]
    launches = []
    for pair in dict.fromkeys(pair for pair, _ in made if pair):
        chosen = np.flatnonzero((pairs == pair) & (sizes > 0))
        if len(chosen):
            table = np.empty(len(chosen), ROW)
            table["source"], table["target"] = sources.addresses[chosen], targets.addresses[chosen]
            table["size"] = sizes[chosen]
            launches.append(_launch(pair, table, chunk))
    return launches, np.flatnonzero(pairs == "").tolist()


@functools.lru_cache(maxsize=1 << 14)
def _pair_and_size(source: Kind, target: Kind) -> tuple[str, int]:
    """Return the pair of dtypes, empty if no kernel takes these arrays, and the number of elements."""
    (shape, source_strides, source_dtype), (_, target_strides, target_dtype) = source, target
    first, second, size = source_dtype.name, target_dtype.name, math.prod(shape)
    # Both are read and written in the order of their memory.
    steps = zip(shape, source_strides, target_strides, strict=True)
    is_alike = all(a // source_dtype.itemsize == b // target_dtype.itemsize for n, a, b in steps if n > 1)
    if size and not (is_alike and _span(source) == (0, size * source_dtype.itemsize)):
        return "", size
    if first in _PARTS and first == second:
        first = second = _PARTS[first]
        size *= 2
    return f"{first}_{second}" if second in KERNELS.get(first, ()) else "", size


def _launch(pair: str, table: NDArray[np.void], chunk: int) -> Launch:
    counts = -(-table["size"] // chunk)
    chunks = np.empty((counts.sum(), 2), np.int32)
    chunks[:, 0] = np.repeat(np.arange(len(table)), counts)
    chunks[:, 1] = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Launch(pair, table, chunks)


def require_disjoint(sources: Arrays, targets: Arrays) -> None:
    """Raise SharedMemoryError if arrays to be written share memory with themselves, each other or another gradient."""
    kinds, count = targets.kinds, len(targets.addresses)
    overlapping = np.array([_overlaps_itself(kind) for kind in kinds], bool)[targets.numbers]
    if overlapping.any():
        index = int(overlapping.argmax())
        shape, strides, _ = kinds[targets.numbers[index]]
        msg = (
            f"gradient {index}, shape {shape}, strides {strides} in bytes, overlaps itself and cannot be unscaled in "
            f"place: assign a copy (grad.copy())"
        )
        raise SharedMemoryError(msg)
    # A gradient that is unscaled into itself is there once.
    elsewhere = np.flatnonzero((sources.addresses != targets.addresses) | (sources.numbers != targets.numbers))
    addresses = np.append(targets.addresses, sources.addresses[elsewhere])
    numbers = np.append(targets.numbers, sources.numbers[elsewhere])
    places = addresses[:, None] + np.array([_span(kind) for kind in kinds], np.int64).reshape(-1, 2)[numbers]
    suspected = _overlapping(places)
    if suspected:
        names = [*range(count), *(count + elsewhere).tolist()]
        known = {names[k]: (int(addresses[k]), kinds[numbers[k]]) for k in suspected}
        aliasing.require_disjoint(
            [((int(places[k, 0]), int(places[k, 1])), names[k]) for k in suspected],
            lambda one, other: _share_memory(known[one], known[other]),
            count,
        )


def _overlapping(places: NDArray[np.int64]) -> list[int]:
    """Return which spans overlap others."""
    chosen = np.flatnonzero(places[:, 0] < places[:, 1])
    if len(chosen) < 2:
        return []
    order = chosen[np.argsort(places[chosen, 0], kind="stable")]
    starts, ends = places[order].T
    # How far those reach that begin before the next one.
    meets = starts[1:] < np.maximum.accumulate(ends)[:-1]
    found: list[int] = order[np.append(meets, False) | np.insert(meets, 0, False)].tolist()
    return found


@functools.lru_cache(maxsize=1 << 14)
def _overlaps_itself(kind: Kind) -> bool:
    shape, strides, dtype = kind
    return aliasing.overlaps_itself(shape, strides, dtype.itemsize)


@functools.lru_cache(maxsize=1 << 14)
def _span(kind: Kind) -> aliasing.Span:
    """Return the span of a kind at address 0; empty if there are no elements."""
    shape, strides, dtype = kind
    return (0, 0) if 0 in shape else aliasing.span(0, shape, strides, dtype.itemsize)


def _share_memory(a: tuple[int, Kind], b: tuple[int, Kind]) -> bool:
    """Tell whether two arrays share an element; also if that is too hard to tell."""
    try:
        return np.shares_memory(_at(*a), _at(*b), max_work=_EXACT_SEARCH)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _at(address: int, kind: Kind) -> NDArray[np.void]:
    """Return an array at an address of a device, which NumPy only compares: nothing is read from there."""
    shape, strides, dtype = kind
    interface = {
        "version": 3,
        "typestr": f"|V{dtype.itemsize}",
        "shape": shape,
        "strides": strides,
        "data": (address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
