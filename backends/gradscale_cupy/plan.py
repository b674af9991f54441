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
    "Form",
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


class Form(NamedTuple):
    """What is to be known of an array but its address: how its elements lie.

    Attributes
    ----------
    shape, strides : tuple of int
        Strides in elements.
    dtype : str
        Such as ``"float32"``.
    itemsize : int
        Bytes of an element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int


Kind = tuple[tuple[int, ...], tuple[int, ...], Any]
"""What CuPy's arrays have of a form: ``shape``, ``strides`` in bytes, and ``dtype``."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Arrays:
    """Arrays of one device; thousands of them have few forms.

    Attributes
    ----------
    addresses : array
        1-d int64: of the first element of each.
    numbers : array
        1-d intp: which of the kinds each has.
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

    @property
    def forms(self) -> list[Form]:
        """The forms of the kinds."""
        return [_form(*kind) for kind in self.kinds]

    def __getitem__(self, chosen: slice) -> Arrays:
        """Return some of them, with the same kinds."""
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


# Gradients whose memory is new in each iteration have forms that have been seen before.
_kept = functools.lru_cache(maxsize=1 << 14)


@_kept
def _form(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Form:
    return Form(shape, tuple(stride // dtype.itemsize for stride in strides), dtype.name, dtype.itemsize)


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
    forms = sources.forms
    both, numbers = np.unique(sources.numbers * len(forms) + targets.numbers, return_inverse=True)
    made = [_row(forms[number // len(forms)], forms[number % len(forms)]) for number in both.tolist()]
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
def _row(source: Form, target: Form) -> tuple[str | None, bytes]:
    """Return the pair of dtypes, None where no kernel takes these arrays, and a row without addresses."""
    pair = _pair_of(source.dtype, target.dtype)
    row = np.zeros((), ROW)
    row["size"] = math.prod(source.shape)
    axes = list(zip(source.shape, source.strides, target.strides, strict=True))
    if source.dtype in _PARTS:
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
    forms, count = targets.forms, len(targets.addresses)
    overlapping = np.array([_overlaps_itself(form) for form in forms], bool)[targets.numbers]
    if overlapping.any():
        index = int(overlapping.argmax())
        form = forms[targets.numbers[index]]
        msg = (
            f"gradient {index}, shape {form.shape}, strides {form.strides} in elements, overlaps itself and cannot be "
            f"unscaled in place: assign a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
    # A gradient that is unscaled into itself is there once.
    elsewhere = np.flatnonzero((sources.addresses != targets.addresses) | (sources.numbers != targets.numbers))
    addresses = np.append(targets.addresses, sources.addresses[elsewhere])
    numbers = np.append(targets.numbers, sources.numbers[elsewhere])
    places = addresses[:, None] + np.array([_span(form) for form in forms], np.int64).reshape(-1, 2)[numbers]
    suspected = _overlapping(places)
    if suspected:
        names = [*range(count), *(count + elsewhere).tolist()]
        known = {names[k]: (int(addresses[k]), forms[numbers[k]]) for k in suspected}
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
def _overlaps_itself(form: Form) -> bool:
    return aliasing.overlaps_itself(form.shape, form.strides)


@_kept
def _span(form: Form) -> aliasing.Span:
    """Return the span of a form at address 0, which is empty where there are no elements."""
    if 0 in form.shape:
        return 0, 0
    return aliasing.span(0, form.shape, _in_bytes(form), form.itemsize)


def _in_bytes(form: Form) -> tuple[int, ...]:
    return tuple(stride * form.itemsize for stride in form.strides)


def _share_memory(a: tuple[int, Form], b: tuple[int, Form]) -> bool:
    """Tell whether two arrays share an element; where that is too hard to tell, that they do."""
    try:
        return np.shares_memory(_at(*a), _at(*b), max_work=_EXACT_SEARCH)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _at(address: int, form: Form) -> NDArray[Any]:
    """Return an array of these addresses, which NumPy only compares: nothing is read from there."""
    interface = {
        "version": 3,
        "typestr": f"|V{form.itemsize}",
        "shape": form.shape,
        "strides": _in_bytes(form),
        "data": (address, True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
