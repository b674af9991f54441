"""An NCCL for the ``cupy`` of host_cupy.py: its ranks are threads that share a world, or processes of MPI.

Between threads the kernel of a rank that came waits on its stream until all have come, and some time after that, as
NCCL's do. Between processes MPI carries what a whole program sends, while the host waits. It proves what is asked of
NCCL, in which order and with which buffers. What becomes of destroyed communicators and unknown statuses is as found in
CuPy 14.2 with NCCL 2.32.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import host_cupy
import numpy as np

__all__ = ["NcclCommunicator", "NcclError", "World", "installed"]

_INT32, _FLOAT16, _FLOAT32, _SUM, _MAX = 2, 6, 7, 0, 2
_DTYPES = {_INT32: np.dtype(np.int32), _FLOAT16: np.dtype(np.float16), _FLOAT32: np.dtype(np.float32)}
_OPERATIONS: dict[int, Any] = {_SUM: np.add, _MAX: np.maximum}
_PROCESSES = tuple(range(-64, 64))
_TEXTS = {
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error",
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class NcclError(RuntimeError):
    """NCCL's error; a status without a name is a KeyError, as in CuPy."""

    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, status: int) -> None:
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
    # By position and rank what is sent, what is done with all that is, and the kernel.
    collectives: Any = dataclasses.field(default_factory=lambda: defaultdict(dict))

    def come(self, comm: NcclCommunicator, sent: Any, end: Callable[[Any], None], work: host_cupy.Work) -> None:
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
                self.changed.wait_for(lambda: len(parts) == self.size or not comm.comm)
                comm.rank_id()
            comm.lengths.add(len(sent))


class NcclCommunicator:
    """One rank's."""

    # Where the registry looks for who serves it.
    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, size: int, unique_id: World | tuple[int, ...], rank: int) -> None:
        self.comm = 1
        self.world = unique_id if isinstance(unique_id, World) else None
        self._rank, self._size, self._device = rank, size, host_cupy.Device().id
        self._work: list[host_cupy.Work] = []
        self.lengths: set[int] = set()
        self.issued_by: list[str] = []
        self.aborts = 0

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

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        """Combine the buffers of all ranks."""
        self._start(_memory(send, count, dtype), _memory(receive, count, dtype), _combining(op), stream)

    def reduceScatter(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        """Combine the buffers of all ranks, and keep this rank's part."""
        combined, begin = _combining(op), self._rank * count
        sent, received = _memory(send, count * self._size, dtype), _memory(receive, count, dtype)
        self._start(sent, received, lambda everything: combined(everything)[begin : begin + count], stream)

    def allGather(self, send: int, receive: int, count: int, dtype: int, stream: int) -> None:  # noqa: N802
        """Put the buffers of all ranks one after another."""
        sent, received = _memory(send, count, dtype), _memory(receive, count * self._size, dtype)
        self._start(sent, received, np.concatenate, stream)

    def _start(self, sent: Any, received: Any, combined: Callable[[Any], Any], stream: int) -> None:
        assert (host_cupy.Device().id, stream) == (self.device_id(), host_cupy.Stream.ptr)
        host_cupy.log.append(("nccl", self._device, len(sent), sent.dtype.name))
        if sent.ctypes.data == received.ctypes.data:
            sent = sent.copy()
        received.view(np.uint8)[:] = 0x80  # garbage, until it has come

        def end(everything: Any) -> None:
            received[:] = combined(everything)

        if self.world is None:
            from mpi4py import MPI

            assert (self._size, self._rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
            end(MPI.COMM_WORLD.allgather(sent))
            return
        self._work.append(host_cupy.Work(ready=None))
        host_cupy.add_work(self._device, self._work[-1])
        self.world.come(self, sent, end, self._work[-1])

    def check_async_error(self) -> None:
        """Raise what NCCL has found on its own; the errors of MPI end its processes."""
        self.device_id()
        if self.world is not None and self.world.async_status:
            raise NcclError(self.world.async_status)

    def abort(self) -> None:
        """End the kernels, which leave what they find."""
        assert self.world is not None
        self.aborts += 1
        with self.world.changed:
            self.destroy()
            for work in self._work:
                work.ready = work.ready or 0.0
            self.world.changed.notify_all()

    def destroy(self) -> None:
        """Make it unusable."""
        self.comm = self._known(0)


def _combining(op: int) -> Callable[[Any], Any]:
    """Return what combines rows one after another, each time rounding to their dtype."""

    def combined(everything: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            return functools.reduce(_OPERATIONS[op], everything)

    return combined


def _memory(address: int, count: int, dtype: int) -> Any:
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
