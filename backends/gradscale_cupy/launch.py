"""Tables on a device, and the launches of unscale.cu that read them: nothing here waits for a device."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any, NamedTuple

import cupy
import numpy as np

from gradscale_cupy.plan import CHUNK, Arrays, plan

__all__ = ["Prepared", "clip", "prepare", "unscale", "unscale_with_squares"]

Array = Any

# Threads of a block, as the kernels are compiled for.
_THREADS = 256


class _Table(NamedTuple):
    """One launch: its tables on the device, and a sum of squares for each chunk."""

    pair: str
    rows: Array
    chunks: Array
    squares: Array


class Prepared(NamedTuple):
    """What unscales the arrays of one device.

    Attributes
    ----------
    tables : list
        One for each launch.
    others : list of int
        Which arrays no kernel takes.
    squares : array
        1-d float64: a sum of squares for each chunk of all tables.
    uploaded : cupy.cuda.Event
        When the tables are there.
    launched : set of str
        Which kernels have been launched with them, and so are on the device, too.
    """

    tables: list[_Table]
    others: list[int]
    squares: Array
    uploaded: Any
    launched: set[str]


@functools.cache
def _kernel(name: str) -> Any:
    """Return a kernel, compiled alone for each device when it is first called there, and cached on disk by CuPy."""
    source = resources.files("gradscale_cupy").joinpath("unscale.cu").read_text(encoding="utf-8")
    kind, *types = name.split("_")
    macros = {"ONLY": f"GRADSCALE_{kind}"}
    if kind != "add":
        macros |= {"SOURCE": types[0], "TARGET": types[-1]}
    return cupy.RawKernel(
        source, name, ("-std=c++17", *(f"-DGRADSCALE_{key}={value}" for key, value in macros.items()))
    )


def prepare(sources: Arrays, targets: Arrays) -> Prepared:
    """Return what unscales arrays of the current device, with tables that are on their way to it.

    Parameters
    ----------
    sources, targets : Arrays
        As for :func:`gradscale_cupy.plan.plan`.
    """
    launches, others = plan(sources, targets)
    squares = cupy.empty(sum(len(launch.chunks) for launch in launches), cupy.float64)
    tables: list[_Table] = []
    begin = 0
    for launch in launches:
        end = begin + len(launch.chunks)
        # CuPy copies it into pinned memory, which it keeps until the device has read it: the host does not wait.
        rows, chunks = cupy.array(launch.table.view(np.uint8)), cupy.array(launch.chunks)
        tables.append(_Table(launch.pair, rows, chunks, squares[begin:end]))
        begin = end
    uploaded = cupy.cuda.Event(disable_timing=True)
    uploaded.record()
    return Prepared(tables, others, squares, uploaded, set())


def unscale(prepared: Prepared, scale: Array, nonfinite: Array) -> None:
    """Divide arrays by the scale, and judge them.

    Parameters
    ----------
    prepared : Prepared
        Of arrays of the current device.
    scale : array
        0-d float32 there.
    nonfinite : array
        0-d int32 there; becomes 1 where something stored is not finite.
    """
    _wait_for_tables(prepared)
    for table in prepared.tables:
        _launch(f"unscale_{table.pair}", table, scale, nonfinite)


def unscale_with_squares(prepared: Prepared, scale: Array, nonfinite: Array, total: Array) -> None:
    """Do what ``unscale`` does, and store the sum of the squares of what is stored, in a 0-d float64."""
    _wait_for_tables(prepared)
    for table in prepared.tables:
        _launch(f"square_{table.pair}", table, scale, nonfinite, table.squares)
    _kernel("add_squares")((1,), (_THREADS,), (prepared.squares, np.int64(prepared.squares.size), total))


def clip(prepared: Prepared, factor: Array) -> None:
    """Multiply arrays prepared for work in place by a 0-d float32; nothing is written unless it is below 1."""
    _wait_for_tables(prepared)
    for table in prepared.tables:
        _launch(f"clip_{table.pair.partition('_')[0]}", table, factor)


def _wait_for_tables(prepared: Prepared) -> None:
    """Let the current stream wait for tables that may have been sent on another one."""
    stream = cupy.cuda.get_current_stream()
    # A graph cannot hold on to what lies outside of it.
    if not stream.is_capturing():
        stream.wait_event(prepared.uploaded)


def _launch(kernel: str, table: _Table, *arguments: Array) -> None:
    """Launch a kernel on the current device and stream, with a block for each chunk."""
    blocks, tables = len(table.chunks), (table.rows, table.chunks, np.int32(CHUNK))
    _kernel(kernel)((blocks,), (_THREADS,), (*tables, *arguments))
