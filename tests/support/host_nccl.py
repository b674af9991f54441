"""An NCCL for the ``cupy`` of host_cupy.py: its ranks are threads that share a world, or processes of MPI.

Between threads the kernel of a rank that came waits on its stream until all have come, and some time after that, as
NCCL's do. Between processes MPI carries what a whole program sends, while the host waits. It proves what is asked of
NCCL, in which order and with which buffers. What becomes of destroyed communicators and unknown statuses is as found in
CuPy 14.2 with NCCL 2.32.

With ``bindings_installed`` the real nccl4py calls it in the place of libnccl, and takes real arrays of the CPU: all its
devices have the number -1, which is the CPU's for cuda.core.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import host_cupy
import numpy as np
import pytest

from gradscale import registry

__all__ = ["CoreDevice", "NcclCommunicator", "NcclError", "World", "bindings_installed", "installed"]

_INT32, _FLOAT16, _FLOAT32, _SUM, _MAX = 2, 6, 7, 0, 2
_DTYPES = {_INT32: np.dtype(np.int32), _FLOAT16: np.dtype(np.float16), _FLOAT32: np.dtype(np.float32)}
_OPERATIONS: dict[int, Any] = {_SUM: np.add, _MAX: np.maximum}
_PROCESSES = tuple(range(-64, 64))
_TEXTS = {
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """NCCL's error; a status without a name is a KeyError, as in CuPy."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, status: int):
        super().__init__(_TEXTS[status])


@dataclasses.dataclass
class World:
    """What ranks that are threads share, and what goes wrong; the unique id of their communicators."""

    size: int
    # Seconds from the last rank's coming to the end of the kernels.
    delay: float = 0.0
    # Whether the first collective of each length holds the host until all ranks have come.
    connects: bool = False
    # What NCCL reports of its own, 0 for nothing.
    async_status: int = 0
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    # By the ranks that are left out, the worlds of the others.
    shrunk: dict[tuple[int, ...], World] = dataclasses.field(default_factory=dict)
    # By position and rank what is sent, what is done with all that is, and the kernel.
    collectives: Any = dataclasses.field(default_factory=lambda: defaultdict(dict))

    def come(self, comm: NcclCommunicator, sent, end: Callable[[Any], None], work: host_cupy.Work):
        """Let a rank come to its next collective; the last one lets the kernels end."""
        with self.changed:
            parts = self.collectives[len(comm.issued_by)]
            comm.issued_by.append(threading.current_thread().name)
            parts[comm.rank_id()] = sent, end, work
            if len(parts) == self.size:
                everything = [parts[rank][0].copy() for rank in range(self.size)]
                for _, last, kernel in parts.values():
                    kernel.write, kernel.ready = functools.partial(last, everything), time.monotonic() + self.delay
            self.changed.notify_all()
            if self.connects and len(sent) not in comm.lengths:
                self.changed.wait_for(lambda: len(parts) == self.size or not comm.comm or comm.is_revoked)
                comm.require_usable()
            comm.lengths.add(len(sent))


class NcclCommunicator:
    """One rank's."""

    # Where the registry looks for who serves it.
    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, size: int, unique_id: World | tuple[int, ...], rank: int):
        self.comm = 1
        self.world = unique_id if isinstance(unique_id, World) else None
        self._rank, self._size, self._device = rank, size, host_cupy.Device().id
        self._work: list[host_cupy.Work] = []
        self.lengths: set[int] = set()
        self.issued_by: list[str] = []
        self.aborts = 0
        self.is_revoked = False

    def _known(self, value: int) -> int:
        if not self.comm:
            raise NcclError(4)
        return value

    def rank_id(self) -> int:
        """Return the rank."""
        return self._known(self._rank)

    def size(self) -> int:
        """Return the number of ranks."""
        return self._known(self._size)

    def device_id(self) -> int:
        """Return the device."""
        return self._known(self._device)

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int):  # noqa: N802
        """Combine the buffers of all ranks."""
        self._start(_memory(send, count, dtype), _memory(receive, count, dtype), _combining(op), stream)

    def reduceScatter(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int):  # noqa: N802
        """Combine the buffers of all ranks, and keep this rank's part."""
        combined, begin = _combining(op), self._rank * count
        sent, received = _memory(send, count * self._size, dtype), _memory(receive, count, dtype)
        self._start(sent, received, lambda everything: combined(everything)[begin : begin + count], stream)

    def allGather(self, send: int, receive: int, count: int, dtype: int, stream: int):  # noqa: N802
        """Put the buffers of all ranks one after another."""
        sent, received = _memory(send, count, dtype), _memory(receive, count * self._size, dtype)
        self._start(sent, received, np.concatenate, stream)

    def require_usable(self):
        """Raise NCCL's error of a communicator that was destroyed or revoked."""
        self.rank_id()
        if self.is_revoked:
            raise NcclError(5)

    def _start(self, sent, received, combined: Callable[[Any], Any], stream: int):
        assert (host_cupy.Device().id, stream) == (self.device_id(), host_cupy.Stream.ptr)
        self.require_usable()
        host_cupy.log.append(("nccl", self._device, len(sent), sent.dtype.name))
        if sent.ctypes.data == received.ctypes.data:
            sent = sent.copy()
        received.view(np.uint8)[:] = 0x80  # garbage, until it has come

        def end(everything):
            received[:] = combined(everything)

        if self.world is None:
            from mpi4py import MPI

            assert (self._size, self._rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
            end(MPI.COMM_WORLD.allgather(sent))
            return
        self._work.append(host_cupy.Work(ready=None))
        host_cupy.add_work(self._device, self._work[-1])
        self.world.come(self, sent, end, self._work[-1])

    def check_async_error(self):
        """Raise what NCCL has found on its own; the errors of MPI end its processes."""
        self.device_id()
        if self.world is not None and self.world.async_status:
            raise NcclError(self.world.async_status)

    def abort(self):
        """End the kernels, which leave what they find."""
        self.aborts += 1
        self._end(self.destroy)

    def revoke(self):
        """End the kernels, and take no more; it may be shrunk."""
        self._end(lambda: setattr(self, "is_revoked", True))

    def _end(self, change: Callable[[], None]):
        assert self.world is not None
        with self.world.changed:
            change()
            for work in self._work:
                work.ready = work.ready or 0.0
            self.world.changed.notify_all()

    def shrink(self, excluded: tuple[int, ...]) -> NcclCommunicator:
        """Return that of the ranks that are left; an error with kernels under way."""
        assert self.world is not None
        if any(work.ready is None for work in self._work):
            raise NcclError(5)
        with self.world.changed:
            world = self.world.shrunk.setdefault(excluded, World(self._size - len(excluded)))
        return NcclCommunicator(world.size, world, self._rank - sum(rank < self._rank for rank in excluded))

    def destroy(self):
        """Make it unusable."""
        self.comm = self._known(0)


def _combining(op: int):
    """Return what combines rows one after another, each time rounding to their dtype."""

    def combined(everything):
        with np.errstate(over="ignore", invalid="ignore"):
            return functools.reduce(_OPERATIONS[op], everything)

    return combined


def _memory(address: int, count: int, dtype: int):
    size = count * _DTYPES[dtype].itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), _DTYPES[dtype])


@contextmanager
def installed(*, devices: int = 2, has_nccl: bool = True) -> Iterator[host_cupy.HostCupy]:
    """Put the module in the place of CuPy, on a machine with so many devices."""
    with host_cupy.installed(devices=devices) as module:
        # Without the library CuPy's module has nothing but this.
        module.cuda.nccl = SimpleNamespace(available=has_nccl)
        if has_nccl:
            vars(module.cuda.nccl).update(
                NcclCommunicator=NcclCommunicator,
                NcclError=NcclError,
                get_unique_id=lambda: _PROCESSES,
                get_version=lambda: 22703,
                NCCL_INT32=_INT32,
                NCCL_FLOAT16=_FLOAT16,
                NCCL_FLOAT32=_FLOAT32,
                NCCL_SUM=_SUM,
                NCCL_MAX=_MAX,
            )
        yield module


class CoreDevice:
    """A device of cuda.core, with its streams and events."""

    device_id = -1

    def __init__(self, number: int):
        self._number = number

    def set_current(self):
        host_cupy.Device(self._number).use()

    def create_stream(self) -> _CoreStream:
        return _CoreStream()

    def create_event(self) -> _CoreEvent:
        return _CoreEvent()


class _CoreStream:
    handle = -1  # no order for arrays of the CPU

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, host_cupy.Stream.ptr

    def record(self, event: _CoreEvent):
        event.point.record()


class _CoreEvent:
    def __init__(self):
        self.point = host_cupy.Event()

    @property
    def is_done(self) -> bool:
        status = host_cupy.Event.query(self.point.ptr)
        if status not in (0, 600):
            raise host_cupy.CUDARuntimeError(status)
        return status == 0


@contextmanager
def bindings_installed():
    """Put this NCCL under nccl4py; what is yielded makes an nccl.core.Communicator of one of these."""
    from nccl.bindings import nccl as bindings
    from nccl.core import Communicator, communicator

    # As the first collective does, while the others wait for it.
    importlib.import_module("nccl.core.interop.torch")
    known: dict[int, NcclCommunicator] = {}

    def register(comm: NcclCommunicator):
        known[id(comm)] = comm
        return bindings.Comm(id(comm))

    def of(comm) -> NcclCommunicator:
        return known[comm.handle]

    def all_reduce(send: int, receive: int, count: int, dtype: int, op: int, comm, stream: int):
        of(comm).allReduce(send, receive, count, dtype, op, stream)

    functions = {
        # Its own asks libnccl for the text.
        "NCCLError": lambda status: RuntimeError(f"{status.name} ({status.value}): NCCL's text"),
        "all_reduce": all_reduce,
        "comm_abort": lambda comm: of(comm).abort(),
        "comm_count": lambda comm: of(comm).size(),
        "comm_cu_device": lambda comm: of(comm).device_id(),
        "comm_get_async_error": lambda comm: bindings.Result(of(comm).world.async_status),  # type: ignore[union-attr]
        "comm_destroy": lambda comm: of(comm).destroy(),
        "comm_init_rank_scalable": lambda size, rank, *_: register(NcclCommunicator(size, World(size), rank)),
        "comm_revoke": lambda comm, _flags: of(comm).revoke(),
        "comm_shrink": lambda comm, excluded, *_: register(of(comm).shrink(tuple(excluded))),
        "comm_user_rank": lambda comm: of(comm).rank_id(),
        "get_library_path": lambda: None,
        "get_unique_id": bindings.UniqueId,
        "get_version": lambda: 23203,
    }
    host_cupy.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cupy.Device, "count", 3)
        patch.setattr(communicator, "Device", CoreDevice)
        for name, function in functions.items():
            # All of these names are nccl4py's.
            patch.setattr(bindings, name, function)
        patch.delitem(sys.modules, "gradscale_nccl", raising=False)
        registry.refresh()
        try:
            yield lambda comm: Communicator(register(comm).handle)
        finally:
            sys.modules.pop("gradscale_nccl", None)
            registry.refresh()
