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
from typing import Any, NamedTuple

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from gradscale.core import aliasing
from gradscale.errors import InvalidValueError

__all__ = [
    "CHUNK",
    "KERNELS",
    "MOST_DIMENSIONS",
    "ROW",
    "Arrays",
    "Kind",
    "Launch",
    "plan",
    "require_aligned",
    "require_disjoint",
]

CHUNK = 1 << 14
"""Elements of a chunk: 16 packs of 16 bytes for each of 256 threads, in float32."""

MOST_DIMENSIONS = 8
"""Axes of an array with gaps that the kernel walks; those that can be are joined first."""

ROW = np.dtype(
    [
        ("source", np.uint64),
        ("target", np.uint64),
        ("size", np.int64),
        ("dimensions", np.int64),
        ("shape", np.int64, MOST_DIMENSIONS),
        ("source_strides", np.int64, MOST_DIMENSIONS),
        ("target_strides", np.int64, MOST_DIMENSIONS),
    ]
)
"""The struct Row of unscale.cu."""

# Of a complex number the parts are computed with, so that it counts as two elements.
_PARTS = {"complex64": "float32", "complex128": "float64"}
KERNELS = {
    "float16": ("float16", "float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float16", "bfloat16", "float32", "float64"),
    "float64": ("float32", "float64"),
}
_EXACT_SEARCH = 100_000


Kind = tuple[tuple[int, ...], tuple[int, ...], Any]
"""How the elements of an array lie, as CuPy has it: ``shape``, ``strides`` in bytes, and ``dtype``."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Arrays:
    """Arrays of one device; thousands of them are of few kinds.

    Attributes
    ----------
    addresses : array
        1-d int64: of the first element of each.
    numbers : array
        1-d intp: which of the kinds each is of.
    kinds : list of Kind
        All different.
    """

    addresses: NDArray[np.int64]
    numbers: NDArray[np.intp]
    kinds: list[Kind]

    @classmethod
    def of(cls, addresses: Iterable[int], kinds: Iterable[Kind], count: int) -> Arrays:
        """Make them of the address (``data.ptr``) and the kind of each; ``count`` is how many there are."""
        distinct: defaultdict[Kind, int] = defaultdict(itertools.count().__next__)
        numbers = np.fromiter(map(distinct.__getitem__, kinds), np.intp, count)
        return cls(np.fromiter(addresses, np.int64, count), numbers, list(distinct))

    @property
    def key(self) -> tuple[Any, ...]:
        """What is equal for arrays that lie alike."""
        return self.addresses.tobytes(), self.numbers.tobytes(), *self.kinds

    def __getitem__(self, chosen: slice) -> Arrays:
        """Return some of them, with the same list of kinds."""
        return Arrays(self.addresses[chosen], self.numbers[chosen], self.kinds)


class Launch(NamedTuple):
    """One call of a kernel.

    Attributes
    ----------
    pair : str
        The dtypes that are read and written, as the names of the kernels in unscale.cu end: ``"float16_float32"``.
    table : array
        1-d of ROW, a row for each array that holds an element.
    chunks : array
        2-d int32, of two columns: the row that a block computes with, and which of its chunks.
    """

    pair: str
    table: NDArray[Any]
    chunks: NDArray[np.int32]


# Gradients whose memory is new in each iteration are of kinds that have been seen before.
_kept = functools.lru_cache(maxsize=1 << 14)


def require_aligned(arrays: Arrays) -> None:
    """Raise InvalidValueError for elements that do not lie at multiples of their size, which no kernel can read."""
    # Of complex numbers each part does.
    steps = [dtype.itemsize // (2 if dtype.kind == "c" else 1) for _, _, dtype in arrays.kinds]
    is_apart = [any(stride % dtype.itemsize for stride in strides) for _, strides, dtype in arrays.kinds]
    found = np.array(is_apart, bool)[arrays.numbers] | (
        arrays.addresses % np.array(steps, np.int64)[arrays.numbers] != 0
    )
    if found.any():
        index = int(found.argmax())
        _, strides, dtype = arrays.kinds[arrays.numbers[index]]
        msg = (
            f"the elements of a gradient must lie at multiples of their size, got {dtype} at address "
            f"{arrays.addresses[index]:#x} with strides {strides} in bytes: pass a copy (grad.copy())"
        )
        raise InvalidValueError(msg)


def plan(sources: Arrays, targets: Arrays, chunk: int = CHUNK) -> tuple[list[Launch], list[int]]:
    """Return the launches that unscale arrays of one device, one for each pair of dtypes.

    Parameters
    ----------
    sources, targets : Arrays
        Of equal shapes, pair by pair, and with the same list of kinds; the same for work in place.
    chunk : int
        Elements of a chunk.

    Returns
    -------
    launches : list of Launch
    others : list of int
        Which arrays no kernel takes: of other dtypes, or with more gaps than it walks.
    """
    kinds = sources.kinds
    both, numbers = np.unique(sources.numbers * len(kinds) + targets.numbers, return_inverse=True)
    made = [_row(kinds[number // len(kinds)], kinds[number % len(kinds)]) for number in both.tolist()]
    rows = np.frombuffer(b"".join(row for _, row in made), ROW)
    pairs = np.array([pair or "" for pair, _ in made], object)
    launches = []
    for pair in dict.fromkeys(filter(None, pairs)):
        # What has no elements has no row.
        chosen = np.flatnonzero(((pairs == pair) & (rows["size"] > 0))[numbers])
        if len(chosen):
            table = rows[numbers[chosen]]
            table["source"], table["target"] = sources.addresses[chosen], targets.addresses[chosen]
            launches.append(_launch(pair, table, chunk))
    return launches, np.flatnonzero((pairs == "")[numbers]).tolist()


def _pair_of(source: str, target: str) -> str | None:
    if source in _PARTS or target in _PARTS:
        if source != target:
            return None
        source = target = _PARTS[source]
    return f"{source}_{target}" if target in KERNELS.get(source, ()) else None


def _launch(pair: str, table: NDArray[Any], chunk: int) -> Launch:
    counts = -(-table["size"] // chunk)
    chunks = np.empty((counts.sum(), 2), np.int32)
    chunks[:, 0] = np.repeat(np.arange(len(table)), counts)
    chunks[:, 1] = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Launch(pair, table, chunks)


@_kept
def _row(source: Kind, target: Kind) -> tuple[str | None, bytes]:
    """Return the pair of dtypes, None where no kernel takes these arrays, and a row without addresses."""
    (shape, source_strides, source_dtype), (_, target_strides, target_dtype) = source, target
    pair = _pair_of(source_dtype.name, target_dtype.name)
    row = np.zeros((), ROW)
    row["size"] = math.prod(shape)
    axes = [
        (length, a // source_dtype.itemsize, b // target_dtype.itemsize)
        for length, a, b in zip(shape, source_strides, target_strides, strict=True)
    ]
    if source_dtype.name in _PARTS:
        row["size"] *= 2
        axes = [(length, 2 * a, 2 * b) for length, a, b in axes] + [(2, 1, 1)]
    axes = _joined(axes)
    is_dense = not row["size"] or not axes or (len(axes) == 1 and axes[0][1:] == (1, 1))
    if not is_dense and len(axes) <= MOST_DIMENSIONS:
        row["dimensions"] = len(axes)
        for name, values in zip(("shape", "source_strides", "target_strides"), zip(*axes, strict=True), strict=True):
            row[name][: len(axes)] = values
    return pair if is_dense or row["dimensions"] else None, row.tobytes()


def _joined(axes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return axes of (length, stride, stride), those of the longest strides first, joined where that leaves no gap.

    The order of the axes does not matter, as each element is computed by itself.
    """
    made: list[tuple[int, int, int]] = []
    for length, a, b in sorted(axes, key=lambda axis: -abs(axis[1])):
        if length == 1:
            continue
        if made and made[-1][1] == a * length and made[-1][2] == b * length:
            made[-1] = (made[-1][0] * length, a, b)
        else:
            made.append((length, a, b))
    return made


def require_disjoint(sources: Arrays, targets: Arrays) -> None:
    """Refuse arrays to be written that share memory with themselves, each other or another gradient.

    Parameters
    ----------
    sources, targets : Arrays
        As for ``plan``.

    Raises
    ------
    InvalidValueError
        With the first two of them; part would be divided twice.
    """
    kinds, count = targets.kinds, len(targets.addresses)
    overlapping = np.array([_overlaps_itself(kind) for kind in kinds], bool)[targets.numbers]
    if overlapping.any():
        index = int(overlapping.argmax())
        shape, strides, _ = kinds[targets.numbers[index]]
        msg = (
            f"gradient {index}, shape {shape}, strides {strides} in bytes, overlaps itself and cannot be unscaled in "
            f"place: assign a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
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


@_kept
def _overlaps_itself(kind: Kind) -> bool:
    shape, strides, dtype = kind
    return aliasing.overlaps_itself(shape, strides, dtype.itemsize)


@_kept
def _span(kind: Kind) -> aliasing.Span:
    """Return the span of a kind at address 0, which is empty where there are no elements."""
    shape, strides, dtype = kind
    return (0, 0) if 0 in shape else aliasing.span(0, shape, strides, dtype.itemsize)


def _share_memory(a: tuple[int, Kind], b: tuple[int, Kind]) -> bool:
    """Tell whether two arrays share an element; where that is too hard to tell, that they do."""
    try:
        return np.shares_memory(_at(*a), _at(*b), max_work=_EXACT_SEARCH)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _at(address: int, kind: Kind) -> NDArray[Any]:
    """Return an array of these addresses, which NumPy only compares: nothing is read from there."""
    shape, strides, dtype = kind
    interface = {
        "version": 3,
        "typestr": f"|V{dtype.itemsize}",
        "shape": shape,
        "strides": strides,
        "data": (address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
