"""CupyBackend: CuPy arrays, in place and into master gradients, in one launch for each pair of dtypes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import cupy
import numpy as np
from numpy.typing import DTypeLike

from gradscale import Backend, ScaleState
from gradscale.core.arithmetic import check_real_dtype, multiply_arrays, sum_of_squares, unscale_arrays
from gradscale.core.protocols import Array
from gradscale.core.summaries import layout_of
from gradscale_cupy import launch
from gradscale_cupy.availability import explained, refuse_capture
from gradscale_cupy.events import forget_all_over, is_over, keep_until

__all__ = ["CupyBackend", "HostCopy", "backend"]

# ``device`` would make an object for each of thousands.
_device_id = operator.attrgetter("data.device_id")


class HostCopy:
    """A 1-d int32 array on its way to pinned memory of the host, copied by the current stream of its device."""

    is_replayed = False

    def __init__(self, x: Array) -> None:
        with explained("the verdict was sent to the host"), x.device:
            refuse_capture("a copy to the host")
            stream = cupy.cuda.get_current_stream()
            self._sent = cupy.ascontiguousarray(x)
            size = self._sent.size
            self._received = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * size), np.int32, size)
            self._sent.data.copy_to_host_async(self._received.ctypes.data, self._sent.nbytes, stream)
            self._copied = cupy.cuda.Event(disable_timing=True)
            self._copied.record(stream)
            forget_all_over()
        # Nobody may ask for it.
        keep_until(self._copied, (self._sent, self._received))

    def is_done(self) -> bool:
        """Tell whether the host has it; no wait."""
        with explained("the verdict was read"):
            return is_over(self._copied)

    def __call__(self) -> list[int]:
        """Return the values; waits for the device."""
        with explained("the verdict was read"):
            self._copied.synchronize()
        values: list[int] = self._received.tolist()
        return values


class CupyBackend(Backend):
    """Fused unscale for CuPy arrays: one launch for each device and pair of dtypes, and no wait for a device.

    The state's device is the current one, as CuPy wants it of whatever is computed with; gradients may be on others.
    """

    name = "cupy"

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: waits for the current stream."""
        with explained("the verdict was read"):
            values: list[int] = x.get().tolist()
        return values

    def start_read(self, x: Array, /) -> HostCopy:
        """Begin to copy a 1-d int32 array to the host; the call that is returned waits for it."""
        return HostCopy(x)

    def move(self, x: Array, like: Array, /) -> Array:
        """Return a 0-d array on the device of ``like``; the streams wait for each other, and not the host."""
        with explained("a number was copied to another device"):
            return _moved(x, like.device)

    def forbid_tracing(self, what: str, /) -> None:
        """Raise CallOrderError while the current stream is capturing a CUDA graph."""
        refuse_capture(what)

    def example(self) -> Array:
        """Return a 0-d float32 array on the current device."""
        with explained("an array was made on the current device"):
            return cupy.zeros((), dtype=cupy.float32)

    def bits(self, x: Array, /) -> Array | None:
        """Return the bits of real values as signed integers; None for float8."""
        return x.view(f"i{x.dtype.itemsize}") if layout_of(x.dtype) is not None else None

    def unscale(
        self,
        grads: Sequence[Array],
        state: ScaleState,
        /,
        *,
        dtype: DTypeLike | None = None,
        out: Sequence[Array] | None = None,
    ) -> tuple[Sequence[Array], Array]:
        """Divide arrays by the scale; the 0-d int32 is above 0 if any value is not finite afterwards. No host read.

        Arrays with gaps between their elements, and those that a CUDA graph captures, take launches of their own.
        InvalidValueError if arrays to be written share memory, or are on other devices than their gradients; nothing is
        modified then.
        """
        with explained("gradients were unscaled"):
            targets, nonfinite, _ = self._unscale(grads, state, dtype, out, squares=False)
        return targets, nonfinite

    def unscale_with_squares(
        self,
        grads: Sequence[Array],
        state: ScaleState,
        /,
        *,
        dtype: DTypeLike | None = None,
        out: Sequence[Array] | None = None,
    ) -> tuple[Sequence[Array], Array, Array]:
        """Like ``unscale``, and return the sum of the squares of all unscaled elements from the same pass.

        It is 0-d float64 on the state's device; in it the order of the elements depends on how the arrays are aligned,
        and on nothing else.
        """
        with explained("gradients were unscaled"):
            targets, nonfinite, squares = self._unscale(grads, state, dtype, out, squares=True)
        with state.scale.device:
            total = squares[0] if squares else cupy.zeros((), dtype=cupy.float64)
            for more in squares[1:]:
                total = total + more
        return targets, nonfinite, total

    def multiply_in_place(self, arrays: Sequence[Array], factor: Array, /) -> Sequence[Array]:
        """Multiply arrays that ``unscale`` has returned by a 0-d float32 of at most 1.

        One launch for each device and dtype, which writes nothing if the factor is 1. No host read.
        """
        with explained("gradients were clipped"):
            parts = _by_device(arrays)
            is_captured = _is_capturing([factor.device, *(device for device, _ in parts)])
            for device, indices in parts:
                there = factor if device == factor.device else _moved(factor, device)
                chosen = [arrays[index] for index in indices]
                with device:
                    prepared = launch.prepare(chosen, chosen, is_captured=is_captured)
                    launch.clip(prepared, there)
                    rest = [chosen[index] for index in prepared.others]
                    for target, values in zip(rest, multiply_arrays(rest, there), strict=True):
                        target[...] = values
        return arrays

    def _unscale(
        self,
        grads: Sequence[Array],
        state: ScaleState,
        dtype: DTypeLike | None,
        out: Sequence[Array] | None,
        *,
        squares: bool,
    ) -> tuple[Sequence[Array], Array, list[Array]]:
        """Return the arrays, the verdict and, if asked, a sum of squares for each device, on the state's device."""
        if out is None:
            check_real_dtype(state.scale, dtype)
        targets = [_empty_for(grad, dtype) for grad in grads] if out is None else out
        home = state.scale.device
        parts = _by_device(grads)
        is_captured = _is_capturing([home, *(device for device, _ in parts)])
        ready = []
        for device, indices in parts:
            sources = [grads[index] for index in indices]
            written = sources if targets is grads else [targets[index] for index in indices]
            with device:
                # What is refused is refused before anything is modified, on any device.
                ready.append((device, sources, written, launch.prepare(sources, written, is_captured=is_captured)))
        with home:
            nonfinite = cupy.zeros((), dtype=cupy.int32)
        sums: list[Array] = []
        for device, sources, written, prepared in ready:
            with device:
                total = cupy.empty((), dtype=cupy.float64) if squares else None
                if device == home:
                    _unscale_there(prepared, sources, written, state, nonfinite, total)
                    sums += [] if total is None else [total]
                    continue
                found = cupy.zeros((), dtype=cupy.int32)
                there = ScaleState(_moved(state.scale, device), *state[1:])
                _unscale_there(prepared, sources, written, there, found, total)
            with home:
                cupy.add(nonfinite, _moved(found, home), out=nonfinite)
            sums += [] if total is None else [_moved(total, home)]
        return targets, nonfinite, sums


def _unscale_there(
    prepared: launch.Prepared,
    sources: Sequence[Array],
    targets: Sequence[Array],
    state: ScaleState,
    nonfinite: Array,
    total: Array | None,
) -> None:
    """Unscale arrays of the current device into arrays there, and add to a verdict and a sum of squares there."""
    launch.unscale(prepared, state.scale, nonfinite, total)
    if prepared.others:
        rest = [targets[index] for index in prepared.others]
        made, bad = unscale_arrays([sources[index] for index in prepared.others], state, out=rest)
        for target, values in zip(rest, made, strict=True):
            target[...] = values
        cupy.add(nonfinite, bad, out=nonfinite)
        if total is not None:
            cupy.add(total, sum_of_squares(rest, total), out=total)


def _moved(x: Array, device: cupy.cuda.Device) -> Array:
    """Return a copy of a 0-d array on another device; the streams wait for each other, and not the host."""
    with x.device:
        source_stream = cupy.cuda.get_current_stream()
        written = cupy.cuda.Event(disable_timing=True)
        written.record(source_stream)
    with device:
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(written)
        made = cupy.array(x, copy=True)
        copied = cupy.cuda.Event(disable_timing=True)
        copied.record(stream)
    with x.device:
        # The memory of ``x`` goes back to its stream's pool, and must have been read by then.
        source_stream.wait_event(copied)
    return made


def _is_capturing(devices: Iterable[cupy.cuda.Device]) -> bool:
    """Tell whether the current stream of any device is capturing a CUDA graph, which those of the others join."""
    for device in devices:
        with device:
            if cupy.cuda.get_current_stream().is_capturing():
                return True
    return False


def _by_device(arrays: Sequence[Array]) -> list[tuple[cupy.cuda.Device, list[int]]]:
    """Return each device with the positions of its arrays."""
    numbers = list(map(_device_id, arrays))
    return [
        (cupy.cuda.Device(number), [index for index, other in enumerate(numbers) if other == number])
        for number in dict.fromkeys(numbers)
    ]


def _empty_for(grad: Array, dtype: DTypeLike | None) -> Array:
    wanted = grad.dtype if dtype is None or grad.dtype.kind == "c" else dtype
    with grad.device:
        return cupy.empty_like(grad, dtype=wanted)


backend = CupyBackend()
