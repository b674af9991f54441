"""The CuPy adapter over a stand-in for CuPy: its answers and its launches, and that the host waits for nothing.

The kernels are those of unscale.cu, compiled for the host. Nothing here runs on a device.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from optimizers import Tree

from gradscale import (
    BackendError,
    BackendNotAvailableError,
    CallOrderError,
    DynamicScale,
    GradScaler,
    InvalidValueError,
)
from gradscale.testing import check_backend

pytestmark = pytest.mark.numpy


def logged(cupy, what: str):
    """Return what was launched or waited for, and forget it; the host must have read nothing."""
    assert [entry for entry in cupy.log if entry[0] == "read"] == []
    found = [entry[1:] for entry in cupy.log if entry[0] == what]
    cupy.log.clear()
    return found


def state_of(cupy, scale: float = 4.0):
    return DynamicScale(init_scale=scale).init(cupy.zeros((), dtype=np.float32))


def array_on(cupy, device: int, *values: float, dtype=np.float32):
    with cupy.cuda.Device(device):
        return cupy.array(values, dtype=dtype)


def ready(cupy, scale: float = 4.0) -> GradScaler:
    scaler = GradScaler(init_scale=scale)
    scaler.scale(cupy.ones((), dtype=np.float32))
    cupy.log.clear()
    return scaler


@pytest.mark.tier("ranks")
def test_it_gives_the_pure_cores_bits(cupy, cupy_backend):
    dtypes = [np.dtype(name) for name in (np.float16, ml_dtypes.bfloat16, np.float32)]
    check_backend(cupy_backend, cupy.zeros((), dtype=np.float32), dtypes=dtypes)


@pytest.mark.tier("ranks")
def test_the_suite_sees_wrong_subnormals_though_the_library_takes_them_for_0(cupy, cupy_backend):
    class Wrong(type(cupy_backend)):  # type: ignore[misc]
        def unscale(self, grads, state, /, **options):
            made, nonfinite = super().unscale(grads, state, **options)
            for x in made:
                bits = x.view(np.int32)
                magnitude = bits & 0x7FFFFFFF
                bits[...] = bits ^ ((magnitude > 0) & (magnitude < 1 << 23))
            return made, nonfinite

    with pytest.raises(AssertionError, match=r"must give .* or 0, since the library takes subnormals for 0, got"):
        check_backend(Wrong(), cupy.zeros((), dtype=np.float32), dtypes=[np.float32])


def test_the_norm_comes_from_the_launches_that_unscale_and_the_host_reads_once_in_the_step(cupy):
    grads = [cupy.ones(k, dtype=np.float32) for k in (9, 0, 7)] + [cupy.ones((4, 4), dtype=np.float16)]
    optimizer, scaler = Tree(grads), ready(cupy)
    norm = scaler.unscale_(optimizer, max_norm=0.5)
    assert [name for name, *_ in logged(cupy, "launch")] == [
        *("square_float32_float32", "square_float16_float16", "add_squares"),
        *("clip_float32", "clip_float16"),
    ]
    # 32 elements of a quarter.
    assert norm is not None
    assert norm.get() == np.float32(math.sqrt(2.0))
    factor = np.float32(0.5 / (math.sqrt(2.0) + 1e-6))
    assert grads[0].get().tolist() == [np.float32(0.25) * factor] * 9
    assert grads[3].get()[0, 0] == np.float16(np.float32(0.25) * factor)
    cupy.log.clear()
    scaler.step(optimizer)
    assert ([entry for entry in cupy.log if entry[0] == "read"], optimizer.steps) == ([("read", 0)], 1)


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("place", [*range(4), None])
def test_devices_have_one_verdict_one_norm_and_one_factor(cupy, home: int, place: int | None):
    values = [[12.0, math.nan if index == place else 16.0] for index in range(4)]
    grads = [
        array_on(cupy, number, *values[k], dtype=[np.float32, np.float16][k // 3])
        for k, number in enumerate((0, 1, 1, 0))
    ]
    optimizer = Tree(grads)
    with cupy.cuda.Device(home):
        scaler = ready(cupy)
        norm = scaler.unscale_(optimizer, max_norm=1.0)
        assert norm is not None
        scaler.step(optimizer)
        scaler.update()
    assert norm.device.id == home
    factor = 1.0 if place is not None else np.float32(1.0 / (10.0 + 1e-6))
    assert [x.get()[0] for x in grads] == [x.dtype.type(np.float32(3.0) * factor) for x in grads]
    assert math.isnan(norm.get()) if place is not None else norm.get() == 10.0
    assert (optimizer.steps, scaler.get_scale()) == ((0, 2.0) if place is not None else (1, 4.0))


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("place", range(3))
def test_a_verdict_comes_from_all_devices_by_waits_of_their_streams_and_none_of_the_host(
    cupy, cupy_backend, home: int, place: int
):
    with cupy.cuda.Device(home):
        state = state_of(cupy)
    away = 1 - home
    grads = [array_on(cupy, number, math.nan if k == place else 8.0) for k, number in enumerate((0, 1, 1))]
    _, nonfinite = cupy_backend.unscale(grads, state, out=grads)
    # The scale goes there and the verdict comes back, and neither's memory is reused before it was read.
    assert logged(cupy, "wait") == [(away, home), (home, away), (home, away), (away, home)]
    assert (nonfinite.device.id, nonfinite.get()) == (home, 1)
    with cupy.cuda.Device(home):
        scaled = ready(cupy).scale([array_on(cupy, number, 2.0) for number in (0, 1)])
    assert logged(cupy, "wait") == [(away, home), (home, away)]
    assert [(x.device.id, x.get().tolist()) for x in scaled] == [(0, [8.0]), (1, [8.0])]


def test_what_no_kernel_takes_takes_the_pure_core(cupy, cupy_backend):
    whole = cupy.ones((4, 6), dtype=np.float32)
    grads = [array_on(cupy, 0, 12.0, dtype=np.float64), array_on(cupy, 0, 16.0), whole[:, ::2]]
    out = [cupy.zeros(1, dtype=np.float16), cupy.zeros(1, dtype=np.float32), grads[2]]
    made, nonfinite, squares = cupy_backend.unscale_with_squares(grads, state_of(cupy), out=out)
    assert logged(cupy, "launch") == [("square_float32_float32", 0, 1), ("add_squares", 0, 1)]
    assert (nonfinite.get(), squares.get(), squares.dtype) == (0, 25.0 + 12 / 16, np.float64)
    cupy_backend.multiply_in_place(made, cupy.array(0.5, dtype=np.float32))
    assert [x.get().tolist() for x in made] == [[1.5], [2.0], [[0.125] * 3] * 4]
    assert (whole.get()[:, 1::2] == 1.0).all()
    grads[0][0] = math.inf
    assert cupy_backend.unscale(grads, state_of(cupy), out=out)[1].get() == 1


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_is_forbidden_on_one_device_leaves_the_others_alone(cupy, max_norm: float | None):
    first, second = array_on(cupy, 0, 8.0), array_on(cupy, 1, *[1.0] * 4)
    scaler, optimizer = ready(cupy), Tree([first, second, second[2:]])
    with pytest.raises(InvalidValueError, match="share memory"):
        scaler.unscale_(optimizer, max_norm=max_norm)
    assert (first.get().tolist(), second.get().tolist()) == ([8.0], [1.0] * 4)
    optimizer.grads = [first, second]
    scaler.unscale_(optimizer)
    assert (first.get().tolist(), second.get().tolist()) == ([2.0], [0.25] * 4)


def test_a_wrong_device_or_dtype_is_an_error(cupy, cupy_backend):
    grads, away = [array_on(cupy, 0, 8.0)], array_on(cupy, 1, 0.0)
    with pytest.raises(InvalidValueError, match=r"got one of shape \(1,\) on <CUDA Device 0> for an array on .* 1>"):
        cupy_backend.unscale(grads, state_of(cupy), out=[away])
    with pytest.raises(InvalidValueError, match="real floating dtype"):
        cupy_backend.unscale(grads, state_of(cupy), dtype=np.int32)
    assert (grads[0].get(), away.get()) == (8.0, 0.0)


def test_a_graph_captures_the_pure_core_which_reads_no_tables(cupy, cupy_backend):
    grads, masters = [array_on(cupy, 0, 8.0, math.inf), array_on(cupy, 0, 16.0)], [array_on(cupy, 0, 0.0, 0.0)]
    state, half = state_of(cupy), cupy.array(0.5, dtype=np.float32)
    cupy.capturing.add(0)
    # Nothing is copied to the device, which the stand-in would forbid.
    _, nonfinite = cupy_backend.unscale(grads[:1], state, out=masters)
    _, _, squares = cupy_backend.unscale_with_squares(grads[1:], state, out=grads[1:])
    cupy_backend.multiply_in_place([*masters, grads[1]], half)
    with pytest.raises(InvalidValueError, match="share memory"):
        cupy_backend.unscale([*grads, *grads], state, out=[*grads, *grads])
    cupy.capturing.clear()
    assert [x.get().tolist() for x in (nonfinite, squares, *masters, *grads)] == [
        *(1, 16.0, [1.0, math.inf]),
        *([8.0, math.inf], [2.0]),
    ]


@pytest.mark.parametrize("captured", [{0}, {1}, {0, 1}], ids=["state", "other", "both"])
def test_a_capture_on_one_device_uploads_nothing_on_any(cupy, cupy_backend, captured: set[int]):
    grads, state = [array_on(cupy, number, 1.0) for number in (0, 1)], state_of(cupy)
    cupy.capturing |= captured
    for call in (
        lambda: cupy_backend.unscale(grads, state, out=grads),
        lambda: cupy_backend.unscale_with_squares(grads, state, out=grads),
        lambda: cupy_backend.multiply_in_place(grads, state.scale),
    ):
        if captured == {0, 1}:
            call()
        else:
            # CUDA lets a stream join a capture; the stand-in knows no join.
            with pytest.raises(BackendError, match="cudaErrorStreamCaptureIsolation"):
                call()
    assert {name for name, *_ in logged(cupy, "launch")} <= {"add_squares"}


def test_what_a_replay_would_leave_out_is_forbidden_in_a_capture(cupy):
    scaler, optimizer = ready(cupy), Tree([array_on(cupy, 0, 1.0)])
    one = cupy.ones((), dtype=np.float32)
    cupy.capturing.add(0)
    for name, call in {
        r"scale\(\)": lambda: scaler.scale(one),
        r"unscale_\(\)": lambda: scaler.unscale_(optimizer),
    }.items():
        with pytest.raises(CallOrderError, match=rf"^{name} cannot be part of a CUDA graph.*gradscale\.unscale\(grads"):
            call()
    cupy.capturing.clear()
    scaler.unscale_(optimizer)
    assert optimizer.grads[0].get() == 0.25


class CUDADriverError(RuntimeError):
    """As CuPy's."""

    __module__ = "cupy_backends.cuda.api.driver"
    status = 100


def test_errors_of_cuda_say_what_was_done_and_what_is_missing(cupy, cupy_backend, monkeypatch: pytest.MonkeyPatch):
    grads, state = [cupy.ones(3, dtype=np.float32)], state_of(cupy)

    def fail(*_, **_options):
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    def find_none(*_, **_options):
        raise CUDADriverError("cudaErrorNoDevice: no CUDA-capable device is detected")

    launch, read, wait = (cupy.RawKernel, "__call__"), "the verdict was read", (cupy.cuda.Stream, "wait_event")
    for doing, failing, call in (
        ("gradients were unscaled", launch, lambda: cupy_backend.unscale(grads, state, out=grads)),
        ("gradients were clipped", launch, lambda: cupy_backend.multiply_in_place(grads, state.scale)),
        (read, (cupy.ndarray, "get"), lambda: cupy_backend.read(grads[0])),
        ("a number was copied to another device", wait, lambda: cupy_backend.move(state.scale, array_on(cupy, 1, 0.0))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*failing, fail)
            with pytest.raises(BackendError, match=f"CUDA failed while {doing}: cudaErrorIllegalAddress"):
                call()
    monkeypatch.setattr(cupy, "zeros", find_none, raising=False)
    with pytest.raises(BackendNotAvailableError, match=r"nvidia-smi -L.*\(cudaErrorNoDevice"):
        cupy_backend.example()


def test_threads_may_share_the_adapter(cupy, cupy_backend):
    def run(number: int):
        grads = [cupy.ones(k + 1, dtype=np.float32) for k in range(number, number + 3)]
        for k in range(50):
            assert cupy_backend.read(cupy.array([number, k], dtype=np.int32)) == [number, k]
            made, _ = cupy_backend.unscale(grads, state_of(cupy))
            assert [x.get()[-1] for x in made] == [0.25] * 3

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    sys.setswitchinterval(interval)


def test_the_adapter_can_be_copied_and_pickled(cupy, cupy_backend):
    grads = [cupy.ones(3, dtype=np.float32)]
    for made in (cupy_backend, copy.deepcopy(cupy_backend), pickle.loads(pickle.dumps(cupy_backend))):
        made.unscale(grads, state_of(cupy), out=grads)
    assert grads[0].get().tolist() == [0.25**3] * 3


def test_the_stand_in_forbids_host_reads_mixed_devices_and_what_cuda_forbids_in_a_capture(cupy):
    x, y, before = array_on(cupy, 0, 1.0, 1.0), array_on(cupy, 1, 1.0, 1.0), cupy.cuda.Event()
    for read in (bool, float, int, np.asarray):
        with pytest.raises((TypeError, AttributeError)):
            read(x[0])
    for mix in (lambda: x + y, lambda: x.__setitem__(slice(None), y)):
        with pytest.raises(AssertionError, match="of arrays on"):
            mix()
    before.record()
    cupy.capturing.add(0)
    inside = cupy.cuda.Event()
    inside.record()
    cupy.cuda.get_current_stream().wait_event(inside)
    for call in (
        x.get,
        before.synchronize,
        lambda: cupy.cuda.runtime.eventQuery(before.ptr),
        lambda: cupy.array([1.0, 2.0]),
        lambda: cupy.cuda.get_current_stream().wait_event(before),
    ):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorStreamCapture"):
            call()
