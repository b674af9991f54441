"""A ``cupy`` with NCCL, in host memory: ranks are threads, and streams do their work later than the host.

A communicator computes MAX by pointer once all ranks have come, and some time after that; until then the kernel of a
rank that came waits, and its stream with it. It proves what the adapter asks for and in which order, and not that a GPU
does it. What CuPy and NCCL do with wrong arguments, destroyed communicators and unknown statuses is as found in CuPy
14.2 with NCCL 2.32.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import array_api_compat
import array_api_compat.numpy as xnp
import numpy as np
import pytest

__all__ = ["Event", "FakeCupy", "NcclCommunicator", "NcclError", "Stream", "World", "installed", "ndarray"]

_NOT_READY = 600
_GARBAGE = -(2**31)
_TEXTS = {
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}
_local = threading.local()
_addresses = itertools.count(1000)


class Device:
    """A device; current in a ``with`` block, or for a thread by ``use``."""

    def __init__(self, device: int) -> None:
        self.id = device

    def __enter__(self) -> Device:
        self.before = _current_device()
        return self.use()

    def __exit__(self, *_: object) -> None:
        _local.device = self.before

    def use(self) -> Device:
        """Make it the thread's device."""
        _local.device = self.id
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    # As CuPy's.
    __hash__ = None  # type: ignore[assignment]


def _current_device() -> int:
    return getattr(_local, "device", 0)


@dataclasses.dataclass(eq=False)
class Work:
    """A kernel in a stream: done once ``ready`` is over, when it ``writes``; never without a time."""

    ready: float | None = None
    write: Callable[[], None] = lambda: None
    is_written: bool = False

    def is_done(self) -> bool:
        """Tell whether it is, and write what it has not written yet."""
        if self.ready is None or time.monotonic() < self.ready:
            return False
        if not self.is_written:
            self.is_written = True
            self.write()
        return True


class Stream:
    """A stream of work; a number of 1000 and more is its address, as a C function takes it."""

    by_address: ClassVar[dict[int, Stream]] = {}

    def __init__(self) -> None:
        self.ptr = next(_addresses)
        self.by_address[self.ptr] = self
        self.work: list[Work] = []
        self.is_captured = False

    def __enter__(self) -> Stream:
        self.before = _current_stream()
        _local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.stream = self.before

    def is_capturing(self) -> bool:
        """Tell whether a graph is captured."""
        return self.is_captured

    def synchronize(self) -> None:
        """Wait for all work; without end where a kernel waits, so that a limit is set here."""
        limit = time.monotonic() + 10
        while not all(work.is_done() for work in self.work):
            assert time.monotonic() < limit, "the host waits for a kernel that never ends"
            time.sleep(1e-4)


def _current_stream() -> Stream:
    if not hasattr(_local, "stream"):
        _local.stream = Stream()
    current: Stream = _local.stream
    return current


class Event:
    """A point in a stream."""

    by_address: ClassVar[dict[int, Event]] = {}
    queries: ClassVar[list[int]] = []
    # The status of all, after the device has failed.
    broken: ClassVar[int | None] = None

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing, "an event with timing costs more"
        self.ptr = next(_addresses)
        self.by_address[self.ptr] = self
        self.work: list[Work] | None = None

    def record(self, stream: Stream) -> None:
        """Keep what is in the stream."""
        self.work = list(stream.work)


def _event_query(address: int) -> int:
    Event.queries.append(address)
    event = Event.by_address[address]
    assert event.work is not None, "the event was not recorded"
    if Event.broken is not None:
        return Event.broken
    return 0 if all(work.is_done() for work in event.work) else _NOT_READY


class CUDARuntimeError(RuntimeError):
    """CUDA's error."""

    def __init__(self, status: int) -> None:
        super().__init__({700: "cudaErrorIllegalAddress: an illegal memory access was encountered"}[status])


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801
    """An array on a device."""

    def __init__(self, values: Any, device: int | None = None) -> None:
        self.values = np.asarray(values)
        self.device = Device(_current_device() if device is None else device)
        self.data = SimpleNamespace(ptr=self.values.ctypes.data)
        self.dtype, self.shape = self.values.dtype, self.values.shape
        self.ndim, self.size = self.values.ndim, self.values.size

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _call(getattr(ufunc, method), inputs, options)

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray(self.values[key], self.device.id)

    def tolist(self) -> Any:
        """Return the values, when the current stream is through."""
        _current_stream().synchronize()
        return self.values.tolist()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value))
    return value.values if isinstance(value, ndarray) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wrapped, value))
    return ndarray(value) if isinstance(value, (np.ndarray, np.generic)) else value


def _call(function: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
    options = {name: _plain(value) for name, value in options.items() if name != "device"}
    return _wrapped(function(*map(_plain, args), **options))


class NcclError(RuntimeError):
    """NCCL's error; a status without a name is a KeyError, as in CuPy."""

    def __init__(self, status: int) -> None:
        super().__init__(_TEXTS[status])


@dataclasses.dataclass
class World:
    """What the ranks share, and what goes wrong."""

    size: int
    # Seconds from the last rank's coming to the end of the kernels.
    delay: float = 0.0
    # Whether the first collective of each length holds the host until all ranks have come.
    connects: bool = False
    # What NCCL reports of its own, 0 for nothing.
    async_status: int = 0
    # How long an abort takes.
    abort_seconds: float = 0.0
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    collectives: dict[int, dict[int, tuple[int, int, int, Work]]] = dataclasses.field(default_factory=dict)

    def communicators(self, first_device: int = 0) -> list[NcclCommunicator]:
        """Return a communicator for each rank, on devices of ascending numbers."""
        return [NcclCommunicator(self, rank, first_device + rank) for rank in range(self.size)]

    def has_all(self, position: int) -> bool:
        """Tell whether all ranks have come to a collective."""
        return len(self.collectives.get(position, ())) == self.size

    def run(self, position: int) -> None:
        """Let the kernels of a collective end, each with MAX of what the ranks point to."""
        parts = self.collectives[position].values()
        answer = np.max([_memory(send, count) for send, _, count, _ in parts], axis=0)
        for _, receive, count, work in parts:
            work.write = functools.partial(np.copyto, _memory(receive, count), answer)
            work.ready = time.monotonic() + self.delay


def _memory(address: int, count: int) -> Any:
    return np.frombuffer((ctypes.c_int32 * count).from_address(address), np.int32)


class NcclCommunicator:
    """One rank's."""

    def __init__(self, world: World, rank: int, device: int = 0) -> None:
        self.comm = 1
        self.world, self._rank, self._device = world, rank, device
        self.work: list[Work] = []
        self.lengths: set[int] = set()
        self.aborts = self.checks = self.calls = 0
        self.issued_on: list[tuple[str, int]] = []

    def _require(self) -> None:
        if not self.comm:
            raise NcclError(4)

    def rank_id(self) -> int:
        """Return the rank."""
        self._require()
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        self._require()
        return self.world.size

    def device_id(self) -> int:
        """Return the device."""
        self._require()
        return self._device

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        """Put a collective on a stream."""
        self._require()
        assert (dtype, op) == (2, 2)
        assert _current_device() == self._device
        self.issued_on.append((threading.current_thread().name, stream))
        position, work, world = self.calls, Work(), self.world
        self.calls += 1
        queue = Stream.by_address[stream] if stream in Stream.by_address else Stream()
        with world.changed:
            world.collectives.setdefault(position, {})[self._rank] = send, receive, count, work
            if world.has_all(position):
                world.run(position)
            world.changed.notify_all()
            if world.connects and count not in self.lengths:
                world.changed.wait_for(lambda: world.has_all(position) or not self.comm)
                self._require()
            self.lengths.add(count)
        self.work.append(work)
        queue.work.append(work)

    def check_async_error(self) -> None:
        """Raise what NCCL has found on its own."""
        self._require()
        self.checks += 1
        if self.world.async_status:
            raise NcclError(self.world.async_status)

    def abort(self) -> None:
        """End the kernels, which leave what they find."""
        self.aborts += 1
        time.sleep(self.world.abort_seconds)
        with self.world.changed:
            self.comm = 0
            for work in self.work:
                work.ready = work.ready or 0.0
            self.world.changed.notify_all()


class NCCLBackend:
    """Stands for cupyx.distributed.NCCLBackend, which holds its communicator in ``_comm``."""

    def __init__(self, comm: NcclCommunicator) -> None:
        self._comm = comm


class FakeCupy(types.ModuleType):
    """The module; NumPy's functions, on arrays of the current device."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "14.2.0"
        self.ndarray = ndarray
        self.runtime = SimpleNamespace(
            eventQuery=_event_query,
            CUDARuntimeError=CUDARuntimeError,
            runtimeGetVersion=lambda: 13020,
        )
        self.nccl = SimpleNamespace(
            available=True, NcclCommunicator=NcclCommunicator, NcclError=NcclError, NCCL_INT32=2, NCCL_MAX=2
        )
        self.cuda = types.ModuleType("cupy.cuda")
        get = _current_stream
        members = {"Device": Device, "Event": Event, "Stream": Stream, "get_current_stream": get}
        vars(self.cuda).update(members, runtime=self.runtime, nccl=self.nccl)
        # array_api_compat 1.11 imports it.
        self.cuda.stream = types.ModuleType("cupy.cuda.stream")  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(xnp, name)
        if isinstance(found, (type, np.dtype)) or not callable(found) or name in ("finfo", "isdtype"):
            return found
        return lambda *args, **options: _call(found, args, options)

    def __array_namespace_info__(self) -> Any:
        return SimpleNamespace(dtypes=lambda **_: xnp.__array_namespace_info__().dtypes())

    def asarray(self, x: Any, **options: Any) -> Any:
        """Return an array of the current device: itself where it is one."""
        return x if isinstance(x, ndarray) and not options else _call(np.array, (x,), options)

    def ascontiguousarray(self, x: ndarray) -> ndarray:
        """Return the same array, or a copy without gaps."""
        return x if x.values.flags.c_contiguous else ndarray(x.values.copy(), x.device.id)

    def empty_like(self, x: ndarray) -> ndarray:
        """Return an array of garbage."""
        return ndarray(np.full(x.shape, _GARBAGE, x.dtype), x.device.id)

    def asnumpy(self, x: ndarray) -> Any:
        """Return a NumPy array, when the current stream is through."""
        return np.asarray(x.tolist(), x.dtype)


@contextmanager
def installed() -> Iterator[SimpleNamespace]:
    """Put the module in the place of CuPy, and give it with ``gradscale_cupy.nccl`` imported over it."""
    module = FakeCupy("cupy")
    Event.queries.clear()
    Event.broken = None
    # Of this thread; what waits on a stream of an earlier test would hold it for ever.
    vars(_local).clear()
    affected = [name for name in sys.modules if name.split(".")[0] in ("cupy", "gradscale_cupy")]
    with pytest.MonkeyPatch.context() as patch:
        for name in affected:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "cupy", module)
        patch.setitem(sys.modules, "cupy.cuda", module.cuda)
        # array_api_compat 1.11 imports the runtime from there.
        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api"):
            patch.setitem(sys.modules, name, module.cuda)
        patch.setattr(array_api_compat, "cupy", module, raising=False)
        try:
            yield SimpleNamespace(cupy=module, nccl=importlib.import_module("gradscale_cupy.nccl"))
        finally:
            for name in ("gradscale_cupy.nccl", "gradscale_cupy"):
                sys.modules.pop(name, None)
