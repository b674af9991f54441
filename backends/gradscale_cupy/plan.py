"""Plans: which kernel of unscale.cu takes which arrays, and the tables that it reads. No device is needed.

An array is known by its address, shape, strides and dtype, so that whatever has these can be planned for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from gradscale.core import aliasing
from gradscale.core.named import constructor
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


_made_layout = constructor(Layout)


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


# Of gradients whose memory is new in each iteration all but the addresses has been seen before.
_kept = functools.lru_cache(maxsize=1 << 14)

_Form = tuple[tuple[int, ...], tuple[int, ...], str, int]
"""A layout without its address."""


def layout_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Layout:
    """Return the layout of an array, from what CuPy has of it: ``data.ptr``, ``shape``, ``strides`` and ``dtype``.

    Raises
    ------
    InvalidValueError
        For elements that do not lie at multiples of their size, which no kernel can read.
    """
    part, form = _form(shape, strides, dtype)
    if form is None or address % part:
        msg = (
            f"the elements of a gradient must lie at multiples of their size, got {dtype} at address {address:#x} with "
            f"strides {strides} in bytes: pass a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
    return _made_layout((address, *form))


@_kept
def _form(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> tuple[int, _Form | None]:
    """Return what an address must be a multiple of, and the form; None for strides that are none of elements."""
    itemsize = dtype.itemsize
    part = itemsize // 2 if dtype.kind == "c" else itemsize
    if any(stride % itemsize for stride in strides):
        return part, None
    return part, (shape, tuple(stride // itemsize for stride in strides), dtype.name, itemsize)


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
    # Thousands of arrays have few forms.
    kinds: dict[tuple[_Form, _Form], int] = {}
    numbers = np.array(
        [
            kinds.setdefault(((form := source[1:]), form if target is source else target[1:]), len(kinds))
            for source, target in zip(sources, targets, strict=True)
        ],
        np.intp,
    )
    rows = [_row(source, target) for source, target in kinds]
    names = list(dict.fromkeys(pair for pair, _ in rows if pair))
    which = np.array([names.index(pair) if pair else -1 for pair, _ in rows], np.intp)[numbers]
    forms = np.zeros(len(rows), ROW)
    forms["size"] = [row[2] if row else 0 for _, row in rows]
    for number, (_, row) in enumerate(rows):
        # Most are dense, and that is all.
        if row and row[3]:
            forms[number] = row
    table = forms[numbers]
    table["source"] = [source.address for source in sources]
    table["target"] = [target.address for target in targets]
    # What has no elements has no row.
    chosen = [np.flatnonzero((which == number) & (table["size"] > 0)) for number in range(len(names))]
    launches = [_launch(pair, table[rows], chunk) for pair, rows in zip(names, chosen, strict=True) if len(rows)]
    return launches, np.flatnonzero(which < 0).tolist()


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
def _row(source: _Form, target: _Form) -> tuple[str | None, tuple[Any, ...] | None]:
    """Return the pair of dtypes and a row without addresses; None where no kernel takes these arrays."""
    (shape, source_strides, source_dtype, _), (_, target_strides, target_dtype, _) = source, target
    pair = _pair_of(source_dtype, target_dtype)
    if pair is None:
        return None, None
    none = (0,) * MOST_DIMENSIONS
    size = math.prod(shape)
    axes = list(zip(shape, source_strides, target_strides, strict=True))
    if source_dtype in _PARTS:
        size *= 2
        axes = [(length, 2 * a, 2 * b) for length, a, b in axes] + [(2, 1, 1)]
    axes = _joined(axes)
    if not size or not axes or (len(axes) == 1 and axes[0][1:] == (1, 1)):
        return pair, (0, 0, size, 0, none, none, none)
    if len(axes) > MOST_DIMENSIONS:
        return None, None
    padded = [*axes, *[(0, 0, 0)] * (MOST_DIMENSIONS - len(axes))]
    return pair, (0, 0, size, len(axes), *zip(*padded, strict=True))


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
    extents = [_extent(layout[1:]) for layout in targets]
    for index, extent in enumerate(extents):
        if extent is None:
            layout = targets[index]
            msg = (
                f"gradient {index}, shape {layout.shape}, strides {layout.strides} in elements, overlaps itself and "
                f"cannot be unscaled in place: assign a copy (grad.copy())"
            )
            raise InvalidValueError(msg)
    layouts, spans, numbers = [*targets], [*extents], list(range(len(targets)))
    if sources is not targets:
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), len(targets)):
            if source != target:
                layouts.append(source)
                spans.append(_span(source[1:]))
                numbers.append(number)
    places = np.array([layout.address for layout in layouts], np.uint64).astype(np.int64)[:, None] + np.array(
        spans, np.int64
    ).reshape(-1, 2)
    suspected = _overlapping(places)
    if suspected:
        by_number = dict(zip(numbers, layouts, strict=True))
        aliasing.require_disjoint(
            [((int(places[k, 0]), int(places[k, 1])), numbers[k]) for k in suspected],
            lambda one, other: _share_memory(by_number[one], by_number[other]),
            len(targets),
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
def _extent(form: _Form) -> aliasing.Span | None:
    """Return the span of a form at address 0; None where it overlaps itself."""
    shape, strides, _, _ = form
    return None if aliasing.overlaps_itself(shape, strides) else _span(form)


@_kept
def _span(form: _Form) -> aliasing.Span:
    """Return the span of a form at address 0, which is empty where there are no elements."""
    shape, strides, _, itemsize = form
    if 0 in shape:
        return 0, 0
    return aliasing.span(0, shape, tuple(stride * itemsize for stride in strides), itemsize)


def _share_memory(a: Layout, b: Layout) -> bool:
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
