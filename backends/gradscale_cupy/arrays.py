"""CupyBackend: CuPy arrays, in place and into master gradients, in one launch for each pair of dtypes."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple, TypeAlias

import cupy
import numpy as np
from numpy.typing import DTypeLike

from gradscale import Backend, ScaleState
from gradscale.core.arithmetic import check_real_dtype, multiply_arrays, sum_of_squares, unscale_arrays
from gradscale.core.protocols import Array
from gradscale.core.summaries import layout_of
from gradscale.errors import InvalidValueError
from gradscale_cupy.availability import explained, forbid_capture
from gradscale_cupy.plan import CHUNK, Launch, plan, require_disjoint

_Arrays: TypeAlias = Sequence[Array]

# Threads of a block, as the kernels are compiled for.
_THREADS = 256

# For thousands of arrays these attributes are most of what the host does.
_address = operator.attrgetter("data.ptr")
_kind = operator.attrgetter("shape", "strides", "dtype")


class CupyBackend(Backend):
    """Fused unscale for CuPy arrays: one launch for each device and pair of dtypes, and no wait for a device.

    The state's device is the current one, as CuPy wants it of whatever is computed with; gradients may be on others.
    """

    name = "cupy"

    read = explained("the verdict was read")(Backend.read)

    @explained("a number was copied to another device")
    def move(self, x: Array, like: Array, /) -> Array:
        """Return a 0-d array on the device of ``like``; the streams wait for each other, and not the host."""
        return _to_device(x, like.device)

    def forbid_tracing(self, what: str, /) -> None:
        """Raise CallOrderError while the current stream is capturing a CUDA graph."""
        forbid_capture(what)

    @explained("an array was made on the current device")
    def example(self) -> Array:
        """Return a 0-d float32 array on the current device."""
        return cupy.zeros((), dtype=cupy.float32)

    def bits(self, x: Array, /) -> Array | None:
        """Return the bits of real values as signed integers; None for float8."""
        return x.view(f"i{x.dtype.itemsize}") if layout_of(x.dtype) is not None else None

    @explained("outputs were scaled")
    def scale(self, outputs: _Arrays, state: ScaleState, /) -> list[Array]:
        """Multiply floating arrays by the scale, each on its device. No host read."""
        scaled: list[Array] = []
        for x in outputs:
            # CuPy computes on the current device, which need not reach the memory of another one.
            with x.device:
                scaled += super().scale([x], state)
        return scaled

    @explained("gradients were unscaled")
    def unscale(
        self, grads: _Arrays, state: ScaleState, /, *, dtype: DTypeLike | None = None, out: _Arrays | None = None
    ) -> tuple[_Arrays, Array]:
        """Divide arrays by the scale; the 0-d int32 is above 0 if any value is not finite afterwards. No host read.

        Arrays with gaps between their elements, and those that a CUDA graph captures, take launches of their own.
        InvalidValueError if an array to be written has elements between the first and the last one of another array, or
        is on another device than its gradient; nothing is modified then.
        """
        targets, (nonfinite,) = _unscale(grads, state, dtype, out, squares=False)
        return targets, nonfinite

    @explained("gradients were unscaled")
    def unscale_with_squares(
        self, grads: _Arrays, state: ScaleState, /, *, dtype: DTypeLike | None = None, out: _Arrays | None = None
    ) -> tuple[_Arrays, Array, Array]:
        """Unscale, and add up the squares in the same pass, in an order by the arrays' alignment and nothing else."""
        targets, (nonfinite, squares) = _unscale(grads, state, dtype, out, squares=True)
        return targets, nonfinite, squares

    @explained("gradients were clipped")
    def multiply_in_place(self, arrays: _Arrays, factor: Array, /) -> _Arrays:
        """Multiply arrays by a 0-d float32 of at most 1 in one launch for each device and dtype; 1 writes nothing."""
        for device, prepared in _by_device(arrays, arrays, factor.device):
            there = _to_device(factor, device)
            with device:
                _clip_prepared(prepared, there)
        return arrays


def _unscale(
    grads: _Arrays, state: ScaleState, dtype: DTypeLike | None, out: _Arrays | None, *, squares: bool
) -> tuple[_Arrays, list[Array]]:
    """Return the arrays, and on the state's device the verdict and, with ``squares``, their sum."""
    if out is None:
        check_real_dtype(state.scale, dtype)
    targets = [_empty_for(grad, dtype) for grad in grads] if out is None else out
    target = state.scale.device
    results = []
    for device, prepared in _by_device(grads, targets, target):
        there = state._replace(scale=_to_device(state.scale, device))
        with device:
            results.append(_unscale_prepared(prepared, there, squares=squares))
    here = [[_to_device(part, target) for part in parts] for parts in zip(*results, strict=True)]
    with target:
        return targets, [functools.reduce(operator.add, parts) for parts in here]


def _to_device(x: Array, device: cupy.cuda.Device) -> Array:
    if x.device == device:
        return x
    with x.device:
        source_stream = cupy.cuda.get_current_stream()
        written = source_stream.record()
    with device:
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(written)
        copy = cupy.array(x, copy=True)
        copied = stream.record()
    with x.device:
        # The memory of ``x`` goes back to its stream's pool, and must have been read by then.
        source_stream.wait_event(copied)
    return copy


def _by_device(sources: _Arrays, targets: _Arrays, target: cupy.cuda.Device) -> list[tuple[cupy.cuda.Device, Prepared]]:
    """Prepare the work of ``target`` and each other device, before anything is modified on any."""
    places: defaultdict[int, list[int]] = defaultdict(list, {target.id: []})
    for index, x in enumerate(sources):
        # ``device`` would make an object for each of thousands.
        places[x.data.device_id].append(index)
    devices = list(map(cupy.cuda.Device, places))
    # The streams of the other devices join a capture.
    is_captured = any(map(_is_capturing, devices))
    work = []
    for device, chosen in zip(devices, places.values(), strict=True):
        read = [sources[index] for index in chosen]
        written = read if targets is sources else [targets[index] for index in chosen]
        with device:
            work.append((device, prepare(read, written, is_captured=is_captured)))
    return work


def _is_capturing(device: cupy.cuda.Device) -> bool:
    with device:
        return bool(cupy.cuda.get_current_stream().is_capturing())


def _empty_for(grad: Array, dtype: DTypeLike | None) -> Array:
    wanted = grad.dtype if dtype is None or grad.dtype.kind == "c" else dtype
    with grad.device:
        return cupy.empty_like(grad, dtype=wanted)


class Prepared(NamedTuple):
    """Arrays of one device with the tables for their launches, and arrays that no kernel takes, with their targets."""

    # They belong to the current stream: CuPy gives their memory only to work behind them there.
    tables: list[Launch]
    sources: list[Array]
    targets: list[Array]


@functools.cache
def _kernel(name: str) -> cupy.RawKernel:
    """Return a kernel, compiled alone for each device when it is first called there, and cached on disk by CuPy."""
    code = resources.files("gradscale_cupy").joinpath("unscale.cu").read_text(encoding="utf-8")
    # The kernel that adds up squares has no types, and ignores these macros.
    kind, *types = name.split("_")
    macros = {"ONLY": f"GRADSCALE_{kind}", "SOURCE": types[0], "TARGET": types[-1]}
    return cupy.RawKernel(code, name, ("-std=c++17", *(f"-DGRADSCALE_{key}={value}" for key, value in macros.items())))


def prepare(sources: _Arrays, targets: _Arrays, *, is_captured: bool) -> Prepared:
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


def _unscale_prepared(prepared: Prepared, state: ScaleState, *, squares: bool) -> list[Array]:
    """Divide arrays; return a 0-d int32, above 0 if a result is not finite, and with ``squares`` their 0-d float64."""
    tables, sources, targets = prepared
    results = [cupy.zeros((), dtype=cupy.int32)]
    if squares:
        counts = [len(table.chunks) for table in tables]
        sums = cupy.empty(sum(counts), dtype=cupy.float64)
        for table, part in zip(tables, cupy.split(sums, np.cumsum(counts, dtype=int).tolist()), strict=False):
            _launch(f"square_{table.pair}", table, state.scale, results[0], part)
        results.append(cupy.empty((), dtype=cupy.float64))
        _kernel("add_squares")((1,), (_THREADS,), (sums, np.int64(sums.size), results[1]))
    else:
        for table in tables:
            _launch(f"unscale_{table.pair}", table, state.scale, results[0])
    if targets:
        values, bad = unscale_arrays(sources, state, out=targets)
        _assign(targets, values)
        more = [bad, sum_of_squares(targets, state.scale)] if squares else [bad]
        return [one + other for one, other in zip(results, more, strict=True)]
    return results


def _clip_prepared(prepared: Prepared, factor: Array) -> None:
    """Multiply arrays prepared for work in place by a 0-d float32; no kernel writes unless it is below 1."""
    for table in prepared.tables:
        _launch(f"clip_{table.pair.partition('_')[0]}", table, factor)
    _assign(prepared.targets, multiply_arrays(prepared.targets, factor))


def _assign(targets: _Arrays, values: _Arrays) -> None:
    for target, value in zip(targets, values, strict=True):
        target[...] = value


def _launch(kernel: str, table: Launch, *arguments: Array) -> None:
    _kernel(kernel)((len(table.chunks),), (_THREADS,), (table.table, table.chunks, np.int32(CHUNK), *arguments))


backend = CupyBackend()
