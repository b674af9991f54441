"""Copies to the host that begin without a wait, and copies between devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gradscale.errors import CallOrderError
from gradscale_cupy.availability import explained

__all__ = ["HostCopy", "is_over", "moved", "refuse_capture", "require_one_capture"]

Array = Any

_NOT_READY = 600  # cudaErrorNotReady

# Copies under way, also those that nobody asks for: their memory must not be handed out again before. Threads share it,
# and each change of it is one step.
_under_way: dict[HostCopy, None] = {}


class HostCopy:
    """A 1-d int32 array on its way to pinned memory of the host.

    Parameters
    ----------
    x : array
        On any device, whose current stream copies it.

    Raises
    ------
    CallOrderError
        When that stream is capturing a CUDA graph, in which the host cannot wait.
    """

    def __init__(self, x: Array) -> None:
        with x.device:
            refuse_capture("a copy to the host")
            stream = cupy.cuda.get_current_stream()
            self._sent = cupy.ascontiguousarray(x)
            size = self._sent.size
            self._received = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * size), np.int32, size)
            self._sent.data.copy_to_host_async(self._received.ctypes.data, self._sent.nbytes, stream)
            self._copied = cupy.cuda.Event(disable_timing=True)
            self._copied.record(stream)
        for copy in list(_under_way):
            if is_over(copy._copied):
                # Another thread may have been first.
                _under_way.pop(copy, None)
        _under_way[self] = None

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


def is_over(event: Any) -> bool:
    """Tell whether a device has come to an event; no wait.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        When the device has failed, which ``Event.done`` takes for not being ready.
    """
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)


def moved(x: Array, device: Any) -> Array:
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


def refuse_capture(what: str) -> None:
    """Raise CallOrderError while the current stream is capturing a CUDA graph."""
    if cupy.cuda.get_current_stream().is_capturing():
        msg = (
            f"{what} cannot be part of a CUDA graph, since a replay runs no Python, got a stream that is capturing: "
            f"capture gradscale.unscale(grads, state, out=grads) and policy.update, and step outside of the graph"
        )
        raise CallOrderError(msg)


def require_one_capture(devices: Iterable[Any]) -> None:
    """Raise CallOrderError where the current streams of some devices are capturing a CUDA graph and others are not.

    These would join the capture in the midst of it, with tables that nobody keeps for the graph.
    """
    captured: dict[bool, set[int]] = {False: set(), True: set()}
    for device in devices:
        with device:
            captured[cupy.cuda.get_current_stream().is_capturing()].add(device.id)
    if all(captured.values()):
        msg = (
            f"arrays on several devices are captured into a CUDA graph together, got streams that are capturing on "
            f"devices {sorted(captured[True])} and others on {sorted(captured[False])}: let these wait for an event of "
            f"the former before"
        )
        raise CallOrderError(msg)
