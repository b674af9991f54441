"""Unscaling CuPy gradients on a CUDA device: against a copy of the same bytes, and against torch's kernel.

Times of the device are those between two events that are recorded while a kernel keeps the device busy: what is
measured is on the stream before it begins, and the time that the host takes is not in it. That is in rows of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gradscale
from benchmarks.measure import Row, compared
from gradscale.errors import BackendNotAvailableError

Array = Any


# Arrays, and the elements of each. The large ones are 4 GiB of float32 in all, each a multiple of 64 bytes.
_LARGE, _LARGE_QUICK, _SMALL = (1000, 1_073_744), (1000, 1 << 16), (3000, 1000)

_STALL = """
extern "C" __global__ void stall(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""
# Seconds.
_SHORTEST_STALL, _LONGEST_STALL = 0.01, 2.0


def _cupy():
    """Return CuPy on a machine with a device that it can use."""
    import cupy

    from gradscale_cupy.availability import require_device

    require_device()
    return cupy


def _torch(cupy):
    """Return torch with CUDA, whose work goes to the stream that CuPy's goes to."""
    import torch

    if not torch.cuda.is_available():
        msg = "torch finds no CUDA device, and its kernel is the peer: install torch built for CUDA (pytorch.org)"
        raise BackendNotAvailableError(msg)
    ours, theirs = cupy.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream
    if ours != theirs:
        advice = "unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
        raise RuntimeError(f"CuPy and torch must work on one stream, got {ours} and {theirs}: {advice}")
    return torch


def _stall(cupy, seconds: float):
    """Keep the device busy, and return an event that is recorded behind that on the stream."""
    cupy.RawKernel(_STALL, "stall")((1,), (1,), (cupy.int64(seconds * 1e9),))
    event = cupy.cuda.Event()
    event.record()
    return event


def _on_device(cupy, case: str, calls: Mapping[str, Callable[[], object]], rounds: int, target: float) -> list[Row]:
    """Return rows of the median seconds that each call takes the device; each may be called several times."""
    stalled = _SHORTEST_STALL

    def timed(run: Callable[[], object]) -> float:
        nonlocal stalled
        while stalled < _LONGEST_STALL:
            begin, end = _stall(cupy, stalled), cupy.cuda.Event()
            run()
            end.record()
            is_all_there = not begin.done
            end.synchronize()
            if is_all_there:
                return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3
            stalled *= 2
        raise RuntimeError(f"the host waits for the device, or takes more than {_LONGEST_STALL:g} s for one call")

    for run in calls.values():
        # The first time, its kernels are loaded, which may wait for the device.
        run()
    return compared(case, calls, rounds, {"device": target}, timed=timed)


def _unscale(cupy, sources: Sequence[Array], targets: Sequence[Array]) -> Callable[[], object]:
    """Return an unscale by 1, so that gradients are the same in each round."""
    from gradscale_cupy.arrays import CupyBackend

    state = gradscale.DynamicScale(init_scale=1.0).init(like=cupy.zeros((), dtype="float32"))
    return partial(CupyBackend().unscale, sources, state, out=targets)


def _copy(cupy, size: int) -> Callable[[], object]:
    """Return a copy of so many bytes from one place on the device to another: as many read as written."""
    source, target = cupy.ones(size, dtype="uint8"), cupy.zeros(size, dtype="uint8")
    copy = target.data.copy_from_device_async
    return lambda: copy(source.data, source.nbytes, cupy.cuda.get_current_stream())


def _unscale_torch(torch, arrays: Sequence[Array]) -> Callable[[], object]:
    """Return torch's unscale by 1 of the same memory."""
    tensors = [torch.from_dlpack(x) for x in arrays]
    found, inverse = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    return partial(torch._amp_foreach_non_finite_check_and_unscale_, tensors, found, inverse)


def _described(cupy, count: int, size: int, dtype: str = "float32") -> str:
    """Return what is unscaled, and by which device."""
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return f"{count} {dtype} arrays of {size} on {properties['name'].decode()}"


def copies(quick: bool) -> list[Row]:
    """Unscale in place, and float16 into float32 masters, against a copy that reads and writes as many bytes."""
    cupy = _cupy()
    large, rounds, rows = _LARGE_QUICK if quick else _LARGE, 11 if quick else 51, []
    # At least 90 or 85 % of the bandwidth is at most 1 / 0.9 or 1 / 0.85 of the time.
    for dtype, into, share in (("float32", "", 0.9), ("float16", " into float32", 0.85)):
        count, size = large
        grads = [cupy.ones(size, dtype=dtype) for _ in range(count)]
        outputs = [cupy.ones(size, dtype="float32") for _ in range(count)] if into else grads
        moved = sum(x.nbytes for x in (*grads, *outputs))
        calls = {"device": _unscale(cupy, grads, outputs), "peer": _copy(cupy, moved // 2)}
        case = f"CuPy unscale, {_described(cupy, *large, dtype)}{into}, {{}} / a copy of as many bytes"
        rows += _on_device(cupy, case, calls, rounds, 1 / share)
    return rows


def against_torch(quick: bool) -> list[Row]:
    """Unscale many large and many small gradients in place, against torch's kernel on the same memory."""
    cupy = _cupy()
    torch = _torch(cupy)
    large, rounds, rows = _LARGE_QUICK if quick else _LARGE, 11 if quick else 51, []
    # The device is through with it before the next one is timed.
    wait = cupy.cuda.get_current_stream().synchronize
    for shape, target in ((large, 1.0), (_SMALL, 0.7)):
        grads = [cupy.ones(shape[1], dtype="float32") for _ in range(shape[0])]
        ours, theirs = _unscale(cupy, grads, grads), _unscale_torch(torch, grads)
        case = f"CuPy unscale, {_described(cupy, *shape)}, {{}} / torch's"
        rows += _on_device(cupy, case, {"device": ours, "peer": theirs}, rounds, target)
        rows += compared(case, {"host": (ours, wait), "peer": (theirs, wait)}, rounds, None)
    return rows
