"""Tables on a device, and the launches of unscale.cu that read them: nothing here waits for a device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import cupy
import numpy as np

from gradscale.core.protocols import Array
from gradscale.errors import InvalidValueError
from gradscale_cupy.plan import CHUNK, Arrays, plan, require_disjoint

__all__ = ["Prepared", "clip", "prepare", "unscale"]

# Threads of a block, as the kernels are compiled for.
_THREADS = 256

# For thousands of arrays these attributes are most of what the host does.
_address = operator.attrgetter("data.ptr")
_kind = operator.attrgetter("shape", "strides", "dtype")


class _Table(NamedTuple):
    """One launch: its tables on the device, and a sum of squares for each chunk."""

    pair: str
    rows: Array
    chunks: Array
    squares: Array


class Prepared(NamedTuple):
    """The tables for arrays of one device, which arrays no kernel takes, and the sums of squares of all chunks.

    They belong to the current stream: CuPy gives their memory only to work behind them there.
    """

    tables: list[_Table]
    others: list[int]
    squares: Array


@functools.cache
def _kernel_source() -> str:
    """Return the text of unscale.cu."""
    return resources.files("gradscale_cupy").joinpath("unscale.cu").read_text(encoding="utf-8")


@functools.cache
def _kernel(name: str) -> cupy.RawKernel:
    """Return a kernel, compiled alone for each device when it is first called there, and cached on disk by CuPy."""
    kind, *types = name.split("_")
    macros = {"ONLY": f"GRADSCALE_{kind}"}
    if kind != "add":
        macros |= {"SOURCE": types[0], "TARGET": types[-1]}
    return cupy.RawKernel(
        _kernel_source(), name, ("-std=c++17", *(f"-DGRADSCALE_{key}={value}" for key, value in macros.items()))
    )


def prepare(sources: Sequence[Array], targets: Sequence[Array], *, is_captured: bool) -> Prepared:
    """Return the tables for unscaling arrays of the current device into others, or into themselves.

    Raises InvalidValueError if arrays to be written share memory, or are on other devices than their gradients.
    """
    both = sources if sources is targets else (*sources, *targets)
    arrays = Arrays.of(map(_address, both), map(_kind, both), len(both))
    # A kernel may not reach the memory of another device.
    for source, target in zip(sources, targets, strict=True):
        if source is not target and source.data.device_id != target.data.device_id:
            msg = (
                f"a gradient must be on the device of the array it is written to, got one of shape {source.shape} "
                f"on {source.device!r} for an array on {target.device!r}: copy it there, with cupy.asarray in the "
                f"context of that device"
            )
            raise InvalidValueError(msg)
    read, written = arrays[: len(sources)], arrays[-len(targets) :]
    require_disjoint(read, written)
    # A CUDA graph would read tables that are gone by then.
    launches, others = ([], list(range(len(sources)))) if is_captured else plan(read, written)
    squares = cupy.empty(sum(len(launch.chunks) for launch in launches), cupy.float64)
    tables: list[_Table] = []
    begin = 0
    for launch in launches:
        end = begin + len(launch.chunks)
        # CuPy copies it into pinned memory, which it keeps until the device has read it: the host does not wait.
        rows, chunks = cupy.array(launch.table.view(np.uint8)), cupy.array(launch.chunks)
        tables.append(_Table(launch.pair, rows, chunks, squares[begin:end]))
        begin = end
    return Prepared(tables, others, squares)


def unscale(prepared: Prepared, scale: Array, nonfinite: Array, total: Array | None = None) -> None:
    """Divide arrays by a 0-d float32; a 0-d int32 becomes 1 if a result is not finite.

    ``total``, a 0-d float64, becomes the sum of the squares of the results.
    """
    for table in prepared.tables:
        if total is None:
            _launch(f"unscale_{table.pair}", table, scale, nonfinite)
        else:
            _launch(f"square_{table.pair}", table, scale, nonfinite, table.squares)
    if total is not None:
        _kernel("add_squares")((1,), (_THREADS,), (prepared.squares, np.int64(prepared.squares.size), total))


def clip(prepared: Prepared, factor: Array) -> None:
    """Multiply arrays prepared for work in place by a 0-d float32; nothing is written unless it is below 1."""
    for table in prepared.tables:
        _launch(f"clip_{table.pair.partition('_')[0]}", table, factor)


def _launch(kernel: str, table: _Table, *arguments: Array) -> None:
    """Launch a kernel on the current device and stream, with a block for each chunk."""
    blocks, tables = len(table.chunks), (table.rows, table.chunks, np.int32(CHUNK))
    _kernel(kernel)((blocks,), (_THREADS,), (*tables, *arguments))
