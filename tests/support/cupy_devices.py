"""A real CuPy for the tests that need a GPU, and what the driver and NCCL on the host (host_device) can do besides."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from axes import leave_out_gpu, require

_STALL = 'extern "C" __global__ void stall(int ms) { for (int k = 0; k < ms; ++k) __nanosleep(1000000); }'


def require_cupy():
    """Return CuPy on a machine with CUDA; elsewhere skip the test with the reason."""
    cupy = require("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        leave_out_gpu(f"CuPy finds no CUDA device: {error}")
    if not count:
        leave_out_gpu("CuPy finds no CUDA device")
    return cupy


def require_device_count(cupy, wanted: int):
    """Skip the test where there are fewer devices."""
    count = cupy.cuda.runtime.getDeviceCount()
    if count < wanted:
        pytest.skip(f"gpu: CuPy finds {count} CUDA devices, and {wanted} are needed")


def array_on(cupy, device: int, *values: float, dtype: Any = np.float32):
    """Return an array on a device; skip the test where that is not there."""
    require_device_count(cupy, device + 1)
    with cupy.cuda.Device(device):
        return cupy.array(values, dtype=dtype)


def stall(cupy, milliseconds: int):
    """Keep the current stream busy for about so long; the host goes on."""
    cupy.RawKernel(_STALL, "stall")((1,), (1,), (cupy.int32(milliseconds),))


@contextlib.contextmanager
def capture(stream) -> Iterator[list[Any]]:
    """Make a stream the current one and capture it; the list is given the graph, if nothing was refused."""
    graphs: list[Any] = []
    with stream:
        stream.begin_capture()
        try:
            yield graphs
        finally:
            with contextlib.suppress(Exception):
                graphs.append(stream.end_capture())


def launch_counter() -> Callable[[], int]:
    """Return what counts all launches of this process."""
    return _host_function("libcuda.so.1", "host_launches")


@contextlib.contextmanager
def device_fails(status: int) -> Iterator[None]:
    """Let every call of CUDA come to a status, as after a fault."""
    fail = _host_function("libcuda.so.1", "host_fail")
    fail(status)
    try:
        yield
    finally:
        fail(0)


def nccl_fails(communicator: int, status: int):
    """Let NCCL find an error on its own, for a communicator at an address."""
    _host_function("libnccl.so.2", "host_nccl_fail")(ctypes.c_void_p(communicator), status)


def _host_function(library: str, name: str) -> Callable[..., int]:
    found: Callable[..., int] | None = getattr(ctypes.CDLL(library), name, None)
    if found is None:
        pytest.skip(f"gpu: {library} has no {name}; the one on the host has")
    return found
