"""Tables on a device, and the launches of unscale.cu that read them: nothing here waits for a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import NDArray

from gradscale_cupy.plan import CHUNK, Layout, plan

__all__ = ["Prepared", "prepare", "run"]

Array = Any

# Threads of a block, as the kernels are compiled for; and blocks for each multiprocessor, which fill it.
_THREADS = 256
_BLOCKS_EACH = 8


class _Table(NamedTuple):
    """One launch, with its table on the device, and the pinned memory that this is copied from."""

    kernel: str
    rows: Array
    first_chunks: Array
    arrays: int
    blocks: int
    pinned: tuple[NDArray[Any], ...]


class Prepared(NamedTuple):
    """What unscales the arrays of one device.

    Attributes
    ----------
    tables : list
        One for each launch.
    others : list of int
        Which arrays no kernel takes.
    uploaded : cupy.cuda.Event
        When the tables are there.
    """

    tables: list[_Table]
    others: list[int]
    uploaded: Any


@functools.cache
def _module() -> Any:
    """Return the kernels, compiled for each device when they are first called there, and cached on disk by CuPy."""
    source = resources.files("gradscale_cupy").joinpath("unscale.cu").read_text(encoding="utf-8")
    return cupy.RawModule(code=source, options=("-std=c++17",))


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def prepare(sources: Sequence[Layout], targets: Sequence[Layout]) -> Prepared:
    """Return what unscales arrays of the current device, with tables that are on their way to it.

    Parameters
    ----------
    sources, targets : sequence of Layout
        As for :func:`gradscale_cupy.plan.plan`.
    """
    launches, others = plan(sources, targets)
    most_blocks = _BLOCKS_EACH * _multiprocessors(cupy.cuda.Device().id)
    tables = []
    for launch in launches:
        host = (_pinned(launch.table.view(np.uint8)), _pinned(launch.first_chunks))
        rows, first_chunks = (_upload(x) for x in host)
        blocks = min(launch.chunks, most_blocks)
        tables.append(_Table(launch.kernel, rows, first_chunks, len(launch.table), blocks, host))
    uploaded = cupy.cuda.Event(disable_timing=True)
    uploaded.record()
    return Prepared(tables, others, uploaded)


def _pinned(x: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in memory that the device reads by itself, while the host goes on."""
    memory = cupy.cuda.alloc_pinned_memory(x.nbytes)
    made: NDArray[Any] = np.frombuffer(memory, x.dtype, x.size).reshape(x.shape)
    made[...] = x
    return made


def _upload(x: NDArray[Any]) -> Array:
    made = cupy.empty(x.shape, x.dtype)
    # Unlike ``set``, it never waits.
    made.data.copy_from_host_async(x.ctypes.data, x.nbytes, cupy.cuda.get_current_stream())
    return made


def run(prepared: Prepared, scale: Array, nonfinite: Array) -> None:
    """Launch on the current device and stream.

    Parameters
    ----------
    prepared : Prepared
        Of arrays of the current device.
    scale : array
        0-d float32 there.
    nonfinite : array
        0-d int32 there; becomes 1 where something stored is not finite.
    """
    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        # They may have been sent on another stream. A graph cannot hold on to what lies outside of it.
        stream.wait_event(prepared.uploaded)
    for table in prepared.tables:
        kernel = _module().get_function(table.kernel)
        sizes = (np.int32(table.arrays), np.int64(CHUNK))
        kernel((table.blocks,), (_THREADS,), (table.rows, table.first_chunks, *sizes, scale, nonfinite))
