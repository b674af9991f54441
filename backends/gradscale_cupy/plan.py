"""Plans: which kernel of unscale.cu takes which arrays, and the tables that it reads. No device is needed."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from gradscale.core import aliasing
from gradscale.core.protocols import Array
from gradscale.errors import SharedMemoryError

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

Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], "np.dtype[np.generic]"]
"""How the elements of an array lie, as CuPy has it: ``shape``, ``strides`` in bytes, and ``dtype``."""

Place: TypeAlias = tuple[int, Kind]
"""An array: the address of its first element, ``data.ptr``, and its kind."""


class Launch(NamedTuple):
    """One call of a kernel: the dtypes in its name, a row for each array, and for each block a row and its chunk."""

    pair: str
    # NumPy's arrays in a plan, a device's in a launch.
    table: Array
    chunks: Array


def plan(sources: Sequence[Place], targets: Sequence[Place], chunk: int = CHUNK) -> tuple[list[Launch], list[int]]:
    """Return a launch for each pair of dtypes, and which arrays no kernel takes: of other dtypes, or with gaps."""
    rows: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    others = []
    for index, ((source, kind), (target, target_kind)) in enumerate(zip(sources, targets, strict=True)):
        pair, size = _pair_and_size(kind, target_kind)
        if not pair:
            others.append(index)
        elif size:
            rows[pair].append((source, target, size))
    return [_launch(pair, np.array(table, ROW), chunk) for pair, table in rows.items()], others


# Thousands of arrays are of few kinds.
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


def _launch(pair: str, table: Array, chunk: int) -> Launch:
    counts = -(-table["size"] // chunk)
    rows = np.repeat(np.arange(len(table)), counts)
    numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Launch(pair, table, np.stack([rows, numbers], axis=1).astype(np.int32))


def require_disjoint(sources: Sequence[Place], targets: Sequence[Place]) -> None:
    """Raise SharedMemoryError if arrays to be written may share memory, from the first element to the last of each."""
    for index, (_, kind) in enumerate(targets):
        if _overlaps_itself(kind):
            raise aliasing.overlap(index, *kind[:2])
    # A gradient that is unscaled into itself is there once.
    pairs = enumerate(zip(sources, targets, strict=True), start=len(targets))
    places = [*enumerate(targets), *((number, source) for number, (source, target) in pairs if source != target)]
    spans = np.array([_span(kind) for _, (_, kind) in places], np.int64).reshape(-1, 2)
    spans += np.array([address for _, (address, _) in places], np.int64)[:, None]
    order = spans[:, 0].argsort()
    if (spans[order[:-1], 1] <= spans[order[1:], 0]).all():
        return
    numbered = zip(spans.tolist(), places, strict=True)
    memory_spans = [((start, stop), number) for (start, stop), (number, _) in numbered if start < stop]
    try:
        aliasing.require_disjoint(memory_spans, lambda *_: True, len(targets))
    except SharedMemoryError as error:
        error.add_note("A CuPy array counts as all memory from its first element to its last, with its gaps.")
        raise


@functools.lru_cache(maxsize=1 << 14)
def _overlaps_itself(kind: Kind) -> bool:
    shape, strides, dtype = kind
    return aliasing.overlaps_itself(shape, strides, dtype.itemsize)


@functools.lru_cache(maxsize=1 << 14)
def _span(kind: Kind) -> aliasing.Span:
    """Return the span of an array at address 0; empty if there are no elements."""
    shape, strides, dtype = kind
    return (0, 0) if 0 in shape else aliasing.span(0, shape, strides, dtype.itemsize)
