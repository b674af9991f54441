"""The CuPy adapter on CUDA devices: the pure core's bits, every place, streams, devices, captures, errors, launches."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from axes import require
from cupy_devices import array_on, capture, device_fails, require_device_count, stall
from optimizers import Tree

import gradscale
from gradscale import (
    BackendError,
    BackendNotAvailableError,
    CallOrderError,
    DynamicScale,
    GradScaler,
    InvalidValueError,
    ScaleState,
    presets,
)
from gradscale.core import arithmetic
from gradscale.core.validation import LARGEST_INT32
from gradscale.testing import check_backend

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]


def state_of(cupy, scale: float = 4.0):
    return DynamicScale(init_scale=scale).init(cupy.zeros((), dtype=np.float32))


def ready(cupy, scale: float = 4.0) -> GradScaler:
    scaler = GradScaler(init_scale=scale)
    scaler.scale(cupy.ones((), dtype=np.float32))
    return scaler


def test_it_gives_the_pure_cores_bits(cupy, cupy_backend):
    dtypes = [np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")]
    if int(cupy.__version__.partition(".")[0]) >= 14:
        dtypes.append(np.dtype(require("ml_dtypes").bfloat16))
    check_backend(cupy_backend, cupy.zeros((), dtype=np.float32), dtypes=dtypes)


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


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_host_does_not_wait_until_the_step(cupy, max_norm: float | None):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        scaler, state = GradScaler(init_scale=4.0), state_of(cupy)
        one, optimizer = cupy.ones((), dtype=np.float32), Tree()
        # What is compiled, loaded and allocated, is so in the first iteration.
        for milliseconds in (0, 200):
            optimizer.grads = [cupy.ones(9, dtype=np.float32), cupy.ones(4, dtype=np.float16)]
            stream.synchronize()
            stall(cupy, milliseconds)
            scaler.scale(one)
            scaler.unscale_(optimizer, max_norm=max_norm)
            gradscale.unscale(optimizer.grads, state)
            is_busy = not stream.done
            scaler.step(optimizer)
            scaler.update()
    assert (is_busy, optimizer.steps) == (True, 2)


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("place", [*range(4), None])
def test_devices_have_one_verdict_one_norm_and_one_factor_and_the_host_waits_for_none(
    cupy, home: int, busy: int, place: int | None
):
    values = [[12.0, math.nan if index == place else 16.0] for index in range(4)]
    for milliseconds in (0, 100):
        grads = [
            array_on(cupy, number, *values[k], dtype=[np.float32, np.float16][k // 3])
            for k, number in enumerate((0, 1, 1, 0))
        ]
        optimizer = Tree(grads)
        with cupy.cuda.Device(home):
            scaler = ready(cupy)
            with cupy.cuda.Device(busy):
                stall(cupy, milliseconds)
                stalled = cupy.cuda.get_current_stream().record()
            norm = scaler.unscale_(optimizer, max_norm=1.0)
            is_busy = not stalled.done
            assert norm is not None
            scaler.step(optimizer)
            scaler.update()
            scale = scaler.get_scale()
        assert (norm.device.id, is_busy or not milliseconds) == (home, True)
        factor = 1.0 if place is not None else np.float32(1.0 / (10.0 + 1e-6))
        assert [x.get()[0] for x in grads] == [x.dtype.type(np.float32(3.0) * factor) for x in grads]
        assert math.isnan(norm.get()) if place is not None else norm.get() == 10.0
        assert (optimizer.steps, scale) == ((0, 2.0) if place is not None else (1, 4.0))


def test_what_is_scaled_stays_on_its_device(cupy):
    scaled = ready(cupy).scale([array_on(cupy, number, 2.0) for number in (0, 1)])
    assert [(x.device.id, x.get().tolist()) for x in scaled] == [(0, [8.0]), (1, [8.0])]


def test_what_no_kernel_takes_takes_the_pure_core(cupy, cupy_backend):
    whole = cupy.ones((4, 6), dtype=np.float32)
    grads = [array_on(cupy, 0, 12.0, dtype=np.float64), array_on(cupy, 0, 16.0), whole[:, ::2]]
    out = [cupy.zeros(1, dtype=np.float16), cupy.zeros(1, dtype=np.float32), grads[2]]
    made, nonfinite, squares = cupy_backend.unscale_with_squares(grads, state_of(cupy), out=out)
    assert (nonfinite.get(), squares.get(), squares.dtype) == (0, 25.0 + 12 / 16, np.float64)
    cupy_backend.multiply_in_place(made, cupy.array(0.5, dtype=np.float32))
    assert [x.get().tolist() for x in made] == [[1.5], [2.0], [[0.125] * 3] * 4]
    assert (whole.get()[:, 1::2] == 1.0).all()
    grads[0][0] = math.inf
    assert cupy_backend.unscale(grads, state_of(cupy), out=out)[1].get() == 1


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_is_forbidden_on_one_device_leaves_the_others_alone(cupy, cupy_backend, max_norm: float | None):
    first, second = array_on(cupy, 0, 8.0), array_on(cupy, 1, *[1.0] * 4)
    scaler, optimizer, state = ready(cupy), Tree([first, second]), state_of(cupy)
    for said, call in {
        "share memory": lambda: scaler.unscale_(Tree([first, second, second[2:]]), max_norm=max_norm),
        r"got one of shape \(1,\) on <CUDA Device 0> for an array on .* 1>": lambda: cupy_backend.unscale(
            [first], state, out=[second[:1]]
        ),
        "real floating dtype": lambda: cupy_backend.unscale([first], state, dtype=np.int32),
    }.items():
        with pytest.raises(InvalidValueError, match=said):
            call()
        assert (first.get().tolist(), second.get().tolist()) == ([8.0], [1.0] * 4)
    scaler.unscale_(optimizer)
    assert (first.get().tolist(), second.get().tolist()) == ([2.0], [0.25] * 4)


@pytest.mark.parametrize("others", [(), (1,)], ids=["one-device", "two-devices"])
def test_a_graph_captures_the_pure_core_which_reads_no_tables(cupy, cupy_backend, others: tuple[int, ...]):
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        masters = [array_on(cupy, 0, 0.0, 0.0)]
        grads = [array_on(cupy, 0, 8.0, math.inf), *(array_on(cupy, number, 16.0) for number in (0, *others))]
        state, half = state_of(cupy), cupy.array(0.5, dtype=np.float32)

        def call():
            _, nonfinite = cupy_backend.unscale(grads[:1], state, out=masters)
            _, _, squares = cupy_backend.unscale_with_squares(grads[1:], state, out=grads[1:])
            cupy_backend.multiply_in_place([*masters, *grads[1:]], half)
            return nonfinite, squares

        # What is compiled, loaded and allocated, is so before the capture.
        call()
        for x in grads[1:]:
            with x.device:
                x.set(np.float32([16.0]))
                x.device.synchronize()
        with capture(stream) as graphs:
            found = call()
            with pytest.raises(InvalidValueError, match="share memory"):
                cupy_backend.unscale([*grads, *grads], state, out=[*grads, *grads])
        # A table that was uploaded is overwritten.
        spoiled = [array_on(cupy, number, *[-1.0] * 64) for number in (0, *others) for _ in range(64)]
        graphs[0].launch(stream)
        stream.synchronize()
        del spoiled
    assert [x.get().tolist() for x in (*found, *masters, *grads)] == [
        *(1, 16.0 * (len(others) + 1), [1.0, math.inf]),
        *([8.0, math.inf], *[[2.0]] * (len(others) + 1)),
    ]


def test_a_capture_on_another_device_alone_is_an_error(cupy, cupy_backend):
    require_device_count(cupy, 2)
    grads, state = [array_on(cupy, number, 1.0) for number in (0, 1)], state_of(cupy)
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
    for call in (
        lambda: cupy_backend.unscale(grads, state, out=grads),
        lambda: cupy_backend.unscale_with_squares(grads, state, out=grads),
        lambda: cupy_backend.multiply_in_place(grads, state.scale),
    ):
        said = pytest.raises(BackendError, match="cudaErrorStreamCaptureIsolation")
        with cupy.cuda.Device(1), capture(stream), cupy.cuda.Device(0), said:
            call()


def test_what_a_replay_would_leave_out_is_forbidden_in_a_capture(cupy):
    scaler, optimizer = ready(cupy), Tree([array_on(cupy, 0, 1.0)])
    one, stream = cupy.ones((), dtype=np.float32), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with capture(stream):
        for name, call in {
            r"scale\(\)": lambda: scaler.scale(one),
            r"unscale_\(\)": lambda: scaler.unscale_(optimizer),
        }.items():
            said = rf"^{name} cannot be part of a CUDA graph.*gradscale\.unscale\(grads"
            with pytest.raises(CallOrderError, match=said):
                call()
    scaler.unscale_(optimizer)
    assert optimizer.grads[0].get() == 0.25


def test_errors_of_cuda_say_what_was_done_and_what_is_missing(cupy, cupy_backend, monkeypatch: pytest.MonkeyPatch):
    grads, state, away = [array_on(cupy, 0, 8.0)], state_of(cupy), array_on(cupy, 1, 0.0)
    for doing, call in (
        ("gradients were unscaled", lambda: cupy_backend.unscale(grads, state, out=grads)),
        ("gradients were unscaled", lambda: cupy_backend.unscale_with_squares(grads, state, out=grads)),
        ("gradients were clipped", lambda: cupy_backend.multiply_in_place(grads, state.scale)),
        ("the verdict was read", lambda: cupy_backend.read(grads[0])),
        ("a number was copied to another device", lambda: cupy_backend.move(state.scale, away)),
    ):
        call()
        with device_fails(700), pytest.raises(BackendError, match=f"CUDA failed while {doing}: (cuda|CUDA_)Error"):
            call()

    def find_none(*_, **_options):
        raise type("CUDADriverError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.driver", "status": 100})

    monkeypatch.setattr(cupy, "zeros", find_none)
    with pytest.raises(BackendNotAvailableError, match="nvidia-smi -L"):
        cupy_backend.example()


def test_the_adapter_can_be_copied_and_pickled(cupy, cupy_backend):
    grads = [cupy.ones(3, dtype=np.float32)]
    for made in (cupy_backend, copy.deepcopy(cupy_backend), pickle.loads(pickle.dumps(cupy_backend))):
        made.unscale(grads, state_of(cupy), out=grads)
    assert grads[0].get().tolist() == [0.25**3] * 3


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


def test_a_thread_waits_for_tables_that_another_one_sends(cupy, cupy_backend):
    grads, one = [cupy.ones(1000, dtype=np.float32)], cupy.ones((), dtype=np.float32)
    cupy.cuda.Device().synchronize()

    def send():
        # The default stream of a thread has the same handle in each.
        with cupy.cuda.Stream.ptds:
            stall(cupy, 200)
            cupy_backend.multiply_in_place(grads, one)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join()
    with cupy.cuda.Stream.ptds:
        _, nonfinite = cupy_backend.unscale(grads, state_of(cupy), out=grads)
        assert (int(nonfinite), float(grads[0][-1])) == (0, 0.25)


@pytest.mark.parametrize("busy", range(2))
def test_devices_wait_for_each_other(cupy, cupy_backend, busy: int):
    require_device_count(cupy, 2)
    x = cupy.zeros((), dtype=np.int32)
    with cupy.cuda.Device(1):
        there = cupy.zeros(1, dtype=np.int32)
    for milliseconds in (0, 200):
        with cupy.cuda.Device(busy):
            stall(cupy, milliseconds)
        # Written late, or read late and written once more before that.
        x += 5
        moved = cupy_backend.move(x, there)
        x += 90
        assert (moved.device.id, int(moved)) == (1, 5)
        x -= 95


# What the adapter computes by CuPy's own functions, held to the same arithmetic over NumPy.


def assert_as_over_numpy(cupy, compute, *numbers: Any):
    """Compare arrays that are computed from numbers, whose own kernels take subnormal float32 for 0."""
    with np.errstate(all="ignore"):
        expected = compute(*map(np.asarray, numbers))
    for got, want in zip(compute(*map(cupy.asarray, numbers)), expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        is_taken_for_0 = want.dtype == np.float32 and abs(want) < np.finfo(np.float32).smallest_normal
        # Of two zeros, libraries choose the greater as they like.
        np.testing.assert_array_equal(got.get(), np.zeros_like(want) if is_taken_for_0 else want, err_msg=f"{numbers}")


@pytest.mark.parametrize("name", presets.names())
def test_each_preset_has_the_bits_of_its_rule_over_numpy(cupy, name: str):
    policy, rng = presets.named(name), np.random.default_rng(0)
    interval = getattr(policy, "growth_interval", 1)
    edges = np.int32([0, 0, 1, 2, max(interval - 1, 0), interval, 2**30, LARGEST_INT32])
    for _ in range(60):
        scale = np.float32(2.0 ** rng.integers(-126, 128)) * np.float32(rng.choice([1.0, 1.0 + rng.random()]))
        assert_as_over_numpy(
            cupy,
            lambda *state: policy.update(ScaleState(*state[:4]), nonfinite=state[4]),
            *(scale, *rng.choice(edges, 3), np.int32(rng.choice([0, 0, 1, 7, LARGEST_INT32]))),
        )


@pytest.mark.parametrize("max_norm", [0.0, 1e-30, 5.0, 0.7, 1e300, math.inf])
def test_clipping_has_the_bits_of_the_pure_core_over_numpy(cupy, max_norm: float):
    drawn = (10.0 ** np.random.default_rng(0).uniform(-90, 90, 60)).tolist()
    for squares in (0.0, 25.0, 1e-300, 1e80, math.inf, math.nan, *drawn):
        assert_as_over_numpy(cupy, lambda x: arithmetic.clip_factor(x, max_norm), np.float64(squares))
