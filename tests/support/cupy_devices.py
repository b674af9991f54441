"""A real CuPy for the tests that need a GPU, and a kernel that keeps a stream busy while the host goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from axes import leave_out_gpu, require

__all__ = ["launch_counter", "require_cupy", "require_device_count", "stall"]

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


def launch_counter() -> Callable[[], int]:
    """Return what counts all launches of this process; skip the test over a real driver, which does not."""
    count: Callable[[], int] | None = getattr(ctypes.CDLL("libcuda.so.1"), "host_launches", None)
    if count is None:
        pytest.skip("gpu: the driver counts no launches; the one on the host does")
    return count


def stall(cupy, milliseconds: int):
    """Keep the current stream busy for about so long; the host goes on."""
    cupy.RawKernel(_STALL, "stall")((1,), (1,), (cupy.int32(milliseconds),))
