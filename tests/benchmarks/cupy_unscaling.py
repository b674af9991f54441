"""Unscaling CuPy gradients on a CUDA device: against a copy of the same bytes, and against torch's kernel.

Times of the device are those between two events that are recorded while a kernel keeps the device busy: what is
measured is on the stream before it begins, and the time that the host takes is not in it. That is in rows of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gradscale
from benchmarks.measure import STEADY, Call, Idle, NotOnThisMachineError, Row, by_the_clock, interleaved
from gradscale.errors import BackendNotAvailableError

Array = Any


class _Sizes(NamedTuple):
    large: tuple[int, int]  # arrays, elements of each
    small: tuple[int, int]
    rounds: int


# The large ones are 4 GiB of float32 in all, each a multiple of 64 bytes.
_FULL = _Sizes((1000, 1_073_744), (3000, 1000), 51)
_QUICK = _Sizes((1000, 1 << 16), (3000, 1000), 11)

_STALL = """
extern "C" __global__ void stall(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""
# Seconds.
_SHORTEST_STALL, _LONGEST_STALL = 0.01, 2.0
_WATCHED_ITERATIONS, _WATCHED_STALL = 5, 0.2
_LONGEST_PLAN = 5e-3


def _cupy():
    """Return CuPy on a machine with a device that it can use."""
    import cupy

    from gradscale_cupy.availability import require_device

    try:
        require_device()
    except BackendNotAvailableError as error:
        raise NotOnThisMachineError(str(error)) from error
    return cupy


def _torch(cupy):
    """Return torch with CUDA, whose work goes to the stream that CuPy's goes to."""
    import torch

    if not torch.cuda.is_available():
        msg = "torch finds no CUDA device, and its kernel is the peer: install torch built for CUDA (pytorch.org)"
        raise NotOnThisMachineError(msg)
    ours, theirs = cupy.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream
    if ours != theirs:
        msg = (
            f"CuPy and torch must work on one stream, got {ours} and {theirs}: unset "
            f"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
        )
        raise RuntimeError(msg)
    return torch


class _Stall:
    """Keeps the device busy."""

    def __init__(self, cupy):
        self._cupy = cupy
        self._kernel = cupy.RawKernel(_STALL, "stall")

    def __call__(self, seconds: float):
        """Put it on the stream, and return an event that is recorded behind it."""
        self._kernel((1,), (1,), (self._cupy.int64(seconds * 1e9),))
        event = self._cupy.cuda.Event()
        event.record()
        return event


class _DeviceClock:
    """Returns the seconds that a call takes the device; what is called may be called several times."""

    def __init__(self, cupy):
        self._cuda = cupy.cuda
        self._stall = _Stall(cupy)
        self._seconds = _SHORTEST_STALL

    def __call__(self, run: Callable[[], object]) -> float:
        while self._seconds < _LONGEST_STALL:
            begin, end = self._stall(self._seconds), self._cuda.Event()
            run()
            end.record()
            is_all_there = not begin.done
            end.synchronize()
            if is_all_there:
                return float(self._cuda.get_elapsed_time(begin, end)) / 1e3
            self._seconds *= 2
        raise RuntimeError(f"the host waits for the device, or takes more than {_LONGEST_STALL:g} s for one call")


def _device_times(cupy, runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds that each call takes the device."""
    for run in runs.values():
        # The first time, its kernels are loaded, which may wait for the device.
        run()
    return interleaved({name: Call(run) for name, run in runs.items()}, rounds, _DeviceClock(cupy))


def _filled(cupy, count: int, size: int, dtype: str = "float32") -> list[Array]:
    return [cupy.ones(size, dtype=dtype) for _ in range(count)]


def _unscale(cupy, sources: Sequence[Array], targets: Sequence[Array]) -> Callable[[], object]:
    """Return an unscale by 1, so that gradients are the same in each round."""
    from gradscale_cupy.arrays import CupyBackend

    state = gradscale.DynamicScale(init_scale=1.0).init(like=cupy.zeros((), dtype="float32"))
    return partial(CupyBackend().unscale, sources, state, out=targets)


def _copy(cupy, size: int) -> Callable[[], object]:
    """Return a copy of so many bytes from one place on the device to another: as many read as written."""
    source, target = cupy.ones(size, dtype="uint8"), cupy.zeros(size, dtype="uint8")
    return partial(_copy_async, cupy, target, source)


def _copy_async(cupy, target: Array, source: Array):
    target.data.copy_from_device_async(source.data, source.nbytes, cupy.cuda.get_current_stream())


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
    sizes = _QUICK if quick else _FULL
    rows = []
    # At least 90 or 85 % of the bandwidth is at most 1 / 0.9 or 1 / 0.85 of the time.
    for dtype, into, share in (("float32", "", 0.9), ("float16", " into float32", 0.85)):
        grads = _filled(cupy, *sizes.large, dtype)
        outputs = _filled(cupy, *sizes.large) if into else grads
        moved = sum(x.nbytes for x in (*grads, *outputs))
        runs = {"ours": _unscale(cupy, grads, outputs), "copy": _copy(cupy, moved // 2)}
        times = _device_times(cupy, runs, sizes.rounds)
        case = f"CuPy unscale, {_described(cupy, *sizes.large, dtype)}{into}, device / a copy of as many bytes"
        rows.append(Row(case, times["ours"], times["copy"], "s", 1 / share))
    return rows


def against_torch(quick: bool) -> list[Row]:
    """Unscale many large and many small gradients in place, against torch's kernel on the same memory."""
    cupy = _cupy()
    torch = _torch(cupy)
    sizes = _QUICK if quick else _FULL
    rows = []
    for shape, target in ((sizes.large, 1.0), (sizes.small, 0.7)):
        grads = _filled(cupy, *shape)
        runs = {"ours": _unscale(cupy, grads, grads), "torch": _unscale_torch(torch, grads)}
        device = _device_times(cupy, runs, sizes.rounds)
        # The device is through with it before the next one is timed.
        wait = cupy.cuda.get_current_stream().synchronize
        host = interleaved({name: Call(run, wait) for name, run in runs.items()}, sizes.rounds)
        case = f"CuPy unscale, {_described(cupy, *shape)}, {{}} / torch's"
        rows += [
            Row(case.format("device"), device["ours"], device["torch"], "s", target),
            Row(case.format("host"), host["ours"], host["torch"], "s", None),
        ]
    return rows


def tables(quick: bool) -> list[Row]:
    """Time what the tables of many gradients take the host before the launch, against a limit."""
    from gradscale_cupy.arrays import prepare

    cupy = _cupy()
    sizes = _QUICK if quick else _FULL
    grads = _filled(cupy, *sizes.small)
    wait = cupy.cuda.get_current_stream().synchronize
    runs = {"ours": Call(lambda: prepare(grads, grads, is_captured=False), wait)}
    seconds = interleaved(runs, sizes.rounds)["ours"]
    case = f"CuPy tables, {_described(cupy, *sizes.small)}, host / 5 ms"
    return [Row(case, seconds, _LONGEST_PLAN, "s", 1.0)]


def host_waits(quick: bool) -> list[Row]:
    """Count the iterations in which the host waits for a busy device: between ``scale`` and ``step``, and within."""
    from gradscale_cupy.arrays import CupyBackend

    cupy = _cupy()
    sizes = _QUICK if quick else _FULL
    halves = (cupy.ones(7, dtype="float16") for _ in range(7))
    grads = [*_filled(cupy, *sizes.small), *halves]
    optimizer = Idle(grads)
    scaler = gradscale.GradScaler(**STEADY, backend=CupyBackend())
    loss = cupy.ones((), dtype="float32")

    def start():
        scaler.scale(loss)
        scaler.unscale_(optimizer)

    def finish():
        scaler.step(optimizer)
        scaler.update()

    seconds = 0.0
    for _ in range(3):
        seconds = by_the_clock(start)
        finish()
    stall = _Stall(cupy)
    between = within = 0
    for _ in range(_WATCHED_ITERATIONS):
        # Much longer than the host takes: if the device is through, the host has waited.
        stalled = stall(max(_WATCHED_STALL, 20 * seconds))
        start()
        between += bool(stalled.done)
        finish()
        within += bool(stalled.done)
    if within != _WATCHED_ITERATIONS:
        raise RuntimeError("step() reads the verdict, and yet the device was busy afterwards: waits are not seen")
    case = f"CuPy {_described(cupy, *sizes.small)}, host waits {{}} / iterations"
    return [
        Row(case.format("between scale and step"), between, _WATCHED_ITERATIONS, "", 0.0),
        Row(case.format("within step"), within, _WATCHED_ITERATIONS, "", None),
    ]


CASES = {"cupy-copy": copies, "cupy-torch": against_torch, "cupy-plan": tables, "cupy-waits": host_waits}
