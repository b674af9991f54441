"""Time on the stand-in for CuPy: a stream that is busy, events that know when, and who has waited for it.

The one stream is through with a kernel as long after what came before as the host has taken to run it.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import host_cupy
import pytest

__all__ = ["HostStream", "with_events"]

# What CuPy's pool rounds up to.
_UNIT = 512


class HostStream:
    """When the stream is through with what it has."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.hooks: list[Any] = []

    def occupy(self, seconds: float) -> None:
        """Put work on it."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds

    def run(self, call: Callable[..., Any], *args: Any) -> None:
        """Run a kernel, and be busy for as long as that has taken."""
        begin = time.perf_counter()
        call(*args)
        self.occupy(time.perf_counter() - begin)

    def synchronize(self) -> None:
        """Make the host wait."""
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


@contextlib.contextmanager
def with_events(module: Any) -> Iterator[HostStream]:
    """Give the stand-in time, a kernel that takes some, copies, and hooks of its pool."""
    queue = HostStream()

    class Event(host_cupy.Event):
        at = 0.0

        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.at = max(queue.free_at, time.perf_counter())

        @property
        def done(self) -> bool:
            return time.perf_counter() >= self.at

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.at - time.perf_counter()))

    class RawKernel(host_cupy.RawKernel):
        def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
            self._stalls = not options
            if self._stalls:
                assert f"void {name}(" in code
            else:
                super().__init__(code, name, options)

        def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
            if self._stalls:
                assert (grid, block) == ((1,), (1,))
                queue.occupy(int(args[0]) / 1e9)
            else:
                queue.run(super().__call__, grid, block, args)

    class MemoryHook:
        def __enter__(self) -> None:
            queue.hooks.append(self)

        def __exit__(self, *_: object) -> None:
            queue.hooks.remove(self)

    get, memory, empty = host_cupy.Ndarray.get, host_cupy.Ndarray.data.fget, module.empty

    def waiting_get(x: Any) -> Any:
        queue.synchronize()
        return get(x)

    def data(x: Any) -> Any:
        found = memory(x)

        def copy_from_device_async(source: Any, size: int, _stream: Any) -> None:
            assert size == x.nbytes
            queue.run(ctypes.memmove, found.ptr, source.ptr, size)

        return SimpleNamespace(**vars(found), copy_from_device_async=copy_from_device_async)

    def counted_empty(*args: Any, **options: Any) -> Any:
        made = empty(*args, **options)
        for hook in queue.hooks:
            size = -(-made.nbytes // _UNIT) * _UNIT
            hook.malloc_postprocess(device_id=0, size=made.nbytes, mem_size=size, mem_ptr=1, pmem_id=1)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cupy.Ndarray, "get", waiting_get)
        patch.setattr(host_cupy.Ndarray, "data", property(data))
        patch.setattr(host_cupy.Stream, "synchronize", lambda _stream: queue.synchronize(), raising=False)
        patch.setattr(module, "empty", counted_empty, raising=False)
        vars(module).update(RawKernel=RawKernel)
        vars(module.cuda).update(
            Event=Event, MemoryHook=MemoryHook, get_elapsed_time=lambda begin, end: (end.at - begin.at) * 1e3
        )
        vars(module.cuda.runtime).update(
            getDeviceProperties=lambda number: {"name": f"device {number}".encode()},
            driverGetVersion=lambda: 12020,
            runtimeGetVersion=lambda: 12090,
        )
        yield queue
