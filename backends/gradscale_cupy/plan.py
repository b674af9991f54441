"""Plans: which kernel of unscale.cu takes which arrays, and the tables that it reads. No device is needed.

An array is known by its address, shape, strides and dtype, so that whatever has these can be planned for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from gradscale.core import aliasing
from gradscale.errors import InvalidValueError

__all__ = ["CHUNK", "KERNELS", "MOST_DIMENSIONS", "ROW", "Launch", "Layout", "layout_of", "plan", "require_disjoint"]

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


class Layout(NamedTuple):
    """What is to be known of an array: where and how its elements lie.

    Attributes
    ----------
    address : int
        Of the first element.
    shape, strides : tuple of int
        Strides in elements.
    dtype : str
        Such as ``"float32"``.
    itemsize : int
        Bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int


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


def layout_of(array: Any) -> Layout:
    """Return the layout of a CuPy array, or of anything with the same attributes.

    Raises
    ------
    InvalidValueError
        For elements that do not lie at multiples of their size, which no kernel can read.
    """
    itemsize = array.dtype.itemsize
    part = itemsize // 2 if array.dtype.kind == "c" else itemsize
    if array.data.ptr % part or any(stride % itemsize for stride in array.strides):
        msg = (
            f"the elements of a gradient must lie at multiples of their size, got {array.dtype} at address "
            f"{array.data.ptr:#x} with strides {array.strides} in bytes: pass a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
    strides = tuple(stride // itemsize for stride in array.strides)
    return Layout(array.data.ptr, array.shape, strides, array.dtype.name, itemsize)


def plan(sources: Sequence[Layout], targets: Sequence[Layout], chunk: int = CHUNK) -> tuple[list[Launch], list[int]]:
    """Return the launches that unscale arrays of one device, one for each pair of dtypes.

    Parameters
    ----------
    sources, targets : sequence of Layout
        Of equal shapes, pair by pair; the same for work in place.
    chunk : int
        Elements of a chunk.

    Returns
    -------
    launches : list of Launch
    others : list of int
        Which arrays no kernel takes: of other dtypes, or with more gaps than it walks.
    """
    rows: dict[str, list[tuple[Any, ...]]] = {}
    others = []
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        pair = _pair_of(source.dtype, target.dtype)
        row = None if pair is None else _row(source, target)
        if pair is None or row is None:
            others.append(index)
        elif row[2]:
            rows.setdefault(pair, []).append(row)
    return [_launch(pair, made, chunk) for pair, made in rows.items()], others


def _pair_of(source: str, target: str) -> str | None:
    if source in _PARTS or target in _PARTS:
        if source != target:
            return None
        source = target = _PARTS[source]
    return f"{source}_{target}" if target in KERNELS.get(source, ()) else None


def _launch(pair: str, rows: list[tuple[Any, ...]], chunk: int) -> Launch:
    table = np.array(rows, dtype=ROW)
    counts = -(-table["size"] // chunk)
    chunks = np.empty((counts.sum(), 2), np.int32)
    chunks[:, 0] = np.repeat(np.arange(len(rows)), counts)
    chunks[:, 1] = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Launch(pair, table, chunks)


def _row(source: Layout, target: Layout) -> tuple[Any, ...] | None:
    """Return a row of the table; None for an array with too many gaps."""
    none = (0,) * MOST_DIMENSIONS
    size = math.prod(source.shape)
    axes = list(zip(source.shape, source.strides, target.strides, strict=True))
    if source.dtype in _PARTS:
        size *= 2
        axes = [(length, 2 * a, 2 * b) for length, a, b in axes] + [(2, 1, 1)]
    axes = _joined(axes)
    if not size or not axes or (len(axes) == 1 and axes[0][1:] == (1, 1)):
        return source.address, target.address, size, 0, none, none, none
    if len(axes) > MOST_DIMENSIONS:
        return None
    padded = [*axes, *[(0, 0, 0)] * (MOST_DIMENSIONS - len(axes))]
    return (source.address, target.address, size, len(axes), *zip(*padded, strict=True))


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


def require_disjoint(sources: Sequence[Layout], targets: Sequence[Layout]) -> None:
    """Refuse arrays to be written that share memory with themselves, each other or another gradient.

    Parameters
    ----------
    sources, targets : sequence of Layout
        As for ``plan``.

    Raises
    ------
    InvalidValueError
        With the first two of them; part would be divided twice.
    """
    for index, layout in enumerate(targets):
        if aliasing.overlaps_itself(layout.shape, layout.strides):
            msg = (
                f"gradient {index}, shape {layout.shape}, strides {layout.strides} in elements, overlaps itself and "
                f"cannot be unscaled in place: assign a copy (grad.copy())"
            )
            raise InvalidValueError(msg)
    read = [None if source == target else source for source, target in zip(sources, targets, strict=True)]
    layouts = [*targets, *read]
    spans = [(_span(one), number) for number, one in enumerate(layouts) if one is not None and _has_elements(one)]
    aliasing.require_disjoint(spans, lambda one, other: _share_memory(layouts[one], layouts[other]), len(targets))


def _has_elements(layout: Layout) -> bool:
    return math.prod(layout.shape) > 0


def _span(layout: Layout) -> aliasing.Span:
    strides = tuple(stride * layout.itemsize for stride in layout.strides)
    return aliasing.span(layout.address, layout.shape, strides, layout.itemsize)


def _share_memory(a: Layout | None, b: Layout | None) -> bool:
    """Tell whether two arrays share an element; where that is too hard to tell, that they do."""
    try:
        return np.shares_memory(_at_address(a), _at_address(b), max_work=_EXACT_SEARCH)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _at_address(layout: Layout) -> NDArray[Any]:
    """Return an array of these addresses, which NumPy only compares: nothing is read from there."""
    interface = {
        "version": 3,
        "typestr": f"|V{layout.itemsize}",
        "shape": layout.shape,
        "strides": tuple(stride * layout.itemsize for stride in layout.strides),
        "data": (layout.address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
