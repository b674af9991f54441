"""Tables on a device, and the launches of unscale.cu that read them: nothing here waits for a device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import cupy
import numpy as np

from gradscale.core.arithmetic import multiply_arrays, sum_of_squares, unscale_arrays
from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import InvalidValueError
from gradscale_cupy.plan import CHUNK, Launch, plan, require_disjoint

# Threads of a block, as the kernels are compiled for.
_THREADS = 256

# For thousands of arrays these attributes are most of what the host does.
_address = operator.attrgetter("data.ptr")
_kind = operator.attrgetter("shape", "strides", "dtype")


class Prepared(NamedTuple):
    """Arrays of one device with the tables for their launches, and arrays that no kernel takes, with their targets.

    The tables belong to the current stream: CuPy gives their memory only to work behind them there.
    """

    tables: list[Launch]
    sources: list[Array]
    targets: list[Array]


@functools.cache
def _kernel(name: str) -> cupy.RawKernel:
    """Return a kernel, compiled alone for each device when it is first called there, and cached on disk by CuPy."""
    code = resources.files("gradscale_cupy").joinpath("unscale.cu").read_text(encoding="utf-8")
    # The one that adds up squares is of no types, and does not look at them.
    kind, *types = name.split("_")
    macros = {"ONLY": f"GRADSCALE_{kind}", "SOURCE": types[0], "TARGET": types[-1]}
    return cupy.RawKernel(code, name, ("-std=c++17", *(f"-DGRADSCALE_{key}={value}" for key, value in macros.items())))


def prepare(sources: Sequence[Array], targets: Sequence[Array], *, is_captured: bool) -> Prepared:
    """Return the tables for unscaling arrays of the current device into others, or into themselves."""
    # A kernel may not reach the memory of another device.
    for source, target in zip(sources, targets, strict=True):
        if source is not target and source.data.device_id != target.data.device_id:
            msg = (
                f"a gradient must be on the device of the array it is written to, got one of shape {source.shape} "
                f"on {source.device!r} for an array on {target.device!r}: copy it there, with cupy.asarray in the "
                f"context of that device"
            )
            raise InvalidValueError(msg)
    read = list(zip(map(_address, sources), map(_kind, sources), strict=True))
    written = read if targets is sources else list(zip(map(_address, targets), map(_kind, targets), strict=True))
    require_disjoint(read, written)
    # A CUDA graph would read tables that are gone by then.
    launches, others = ([], list(range(len(sources)))) if is_captured else plan(read, written)
    # CuPy copies them into pinned memory, which it keeps until the device has read it: the host does not wait.
    tables = [Launch(one.pair, cupy.array(one.table.view(np.uint8)), cupy.array(one.chunks)) for one in launches]
    return Prepared(tables, [sources[index] for index in others], [targets[index] for index in others])


def unscale(prepared: Prepared, state: ScaleState, *, squares: bool) -> list[Array]:
    """Divide arrays; return a 0-d int32, above 0 if a result is not finite, and, if asked, the squares' 0-d float64."""
    tables, sources, targets = prepared
    found = [cupy.zeros((), dtype=cupy.int32)]
    if squares:
        counts = [len(table.chunks) for table in tables]
        sums = cupy.empty(sum(counts), dtype=cupy.float64)
        for table, part in zip(tables, cupy.split(sums, np.cumsum(counts, dtype=int).tolist()), strict=False):
            _launch(f"square_{table.pair}", table, state.scale, found[0], part)
        found.append(cupy.empty((), dtype=cupy.float64))
        _kernel("add_squares")((1,), (_THREADS,), (sums, np.int64(sums.size), found[1]))
    else:
        for table in tables:
            _launch(f"unscale_{table.pair}", table, state.scale, found[0])
    if targets:
        made, bad = unscale_arrays(sources, state, out=targets)
        _assign(targets, made)
        more = [bad, sum_of_squares(targets, state.scale)] if squares else [bad]
        return [one + other for one, other in zip(found, more, strict=True)]
    return found


def clip(prepared: Prepared, factor: Array) -> None:
    """Multiply arrays prepared for work in place by a 0-d float32; no kernel writes unless it is below 1."""
    for table in prepared.tables:
        _launch(f"clip_{table.pair.partition('_')[0]}", table, factor)
    _assign(prepared.targets, multiply_arrays(prepared.targets, factor))


def _assign(targets: Sequence[Array], values: Sequence[Array]) -> None:
    for target, made in zip(targets, values, strict=True):
        target[...] = made


def _launch(kernel: str, table: Launch, *arguments: Array) -> None:
    """Launch a kernel on the current device and stream, with a block for each chunk."""
    _kernel(kernel)((len(table.chunks),), (_THREADS,), (table.table, table.chunks, np.int32(CHUNK), *arguments))
