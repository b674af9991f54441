"""The ``cupy`` of host_cupy.py with an NCCL whose collectives MPI carries, for whole programs under mpiexec.

Each collective is made when it is asked for, on the host, by the processes of COMM_WORLD. It proves what a program asks
of NCCL, in which order and with which buffers; waits, streams and failures are those of fake_nccl.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import host_cupy
import numpy as np
import pytest

__all__ = ["Event", "NcclCommunicator", "installed"]

_INT32, _FLOAT16, _FLOAT32 = 2, 6, 7
_DTYPES = {_INT32: np.dtype(np.int32), _FLOAT16: np.dtype(np.float16), _FLOAT32: np.dtype(np.float32)}
_SUM, _MAX = 0, 2
_OPERATIONS = {_SUM: np.add, _MAX: np.maximum}
_UNIQUE_ID = tuple(range(-64, 64))
_addresses = itertools.count(1000)


class Event(host_cupy.Event):
    """A point in a stream, which is always over; with an address, as a C function takes it."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.ptr = next(_addresses)


class NcclCommunicator:
    """One rank's; of all processes of MPI, as many as it says there are."""

    # Where the registry looks for who serves it.
    __module__ = "cupy_backends.cuda.libs.nccl"

    def __init__(self, size: int, unique_id: tuple[int, ...], rank: int) -> None:
        from mpi4py import MPI

        assert unique_id == _UNIQUE_ID
        assert (size, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
        self.comm = 1
        self._mpi = MPI.COMM_WORLD.Dup()
        self._device = host_cupy.Device().id

    def rank_id(self) -> int:
        """Return the rank."""
        return int(self._mpi.rank)

    def size(self) -> int:
        """Return the number of ranks."""
        return int(self._mpi.size)

    def device_id(self) -> int:
        """Return the device."""
        return self._device

    def check_async_error(self) -> None:
        """Raise nothing: MPI's own errors end the processes."""

    def allReduce(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        """Combine the buffers of all ranks."""
        everything = self._gathered(send, count, dtype, stream)
        _memory(receive, count, dtype)[:] = _combined(everything, op)

    def reduceScatter(self, send: int, receive: int, count: int, dtype: int, op: int, stream: int) -> None:  # noqa: N802
        """Combine the buffers of all ranks, and keep this rank's part."""
        everything = self._gathered(send, count * self.size(), dtype, stream)
        _memory(receive, count, dtype)[:] = _combined(everything, op).reshape(self.size(), count)[self.rank_id()]

    def allGather(self, send: int, receive: int, count: int, dtype: int, stream: int) -> None:  # noqa: N802
        """Put the buffers of all ranks one after another."""
        _memory(receive, count * self.size(), dtype)[:] = self._gathered(send, count, dtype, stream).ravel()

    def destroy(self) -> None:
        """Free it."""
        assert self.comm
        self.comm = 0
        self._mpi.Free()

    def _gathered(self, send: int, count: int, dtype: int, stream: int) -> Any:
        assert self.comm
        assert host_cupy.Device().id == self._device
        assert stream == host_cupy.Stream.ptr
        host_cupy.log.append(("nccl", self._device, count, _DTYPES[dtype].name))
        everything = np.empty((self.size(), count), _DTYPES[dtype])
        self._mpi.Allgather(_memory(send, count, dtype).view(np.uint8), everything.view(np.uint8))
        return everything


def _combined(everything: Any, op: int) -> Any:
    """Combine rows one after another, each time rounding to their dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        return functools.reduce(_OPERATIONS[op], everything)


def _memory(address: int, count: int, dtype: int) -> Any:
    size = count * _DTYPES[dtype].itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), _DTYPES[dtype])


@contextmanager
def installed(*, devices: int = 2, has_nccl: bool = True) -> Iterator[host_cupy.HostCupy]:
    """Put the module in the place of CuPy, on a machine with so many devices."""
    with host_cupy.installed() as module, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_cupy.Device, "count", max(devices, 1))
        module.cuda.Event = Event
        vars(module.cuda.runtime).update(
            getDeviceCount=lambda: devices,
            getDeviceProperties=lambda device: {"name": f"host {device}".encode()},
            driverGetVersion=lambda: 13020 if devices else 0,
            runtimeGetVersion=lambda: 13020,
            eventQuery=lambda _: 0,
        )
        # Without the library CuPy's module has nothing but this.
        module.cuda.nccl = SimpleNamespace(available=has_nccl)
        if has_nccl:
            vars(module.cuda.nccl).update(
                NcclCommunicator=NcclCommunicator,
                get_unique_id=lambda: _UNIQUE_ID,
                NCCL_INT32=_INT32,
                NCCL_FLOAT16=_FLOAT16,
                NCCL_FLOAT32=_FLOAT32,
                NCCL_SUM=_SUM,
                NCCL_MAX=_MAX,
            )
        yield module
