"""The CuPy adapter on CUDA devices: the pure core's bits, every place, streams, devices, captures, errors, launches."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from axes import require
from cupy_devices import array_on, capture, device_fails, stall
from optimizers import Tree
from tiers import later

import gradscale
from gradscale import BackendError, CallOrderError, DynamicScale, GradScaler, InvalidValueError
from gradscale.core.registry import collectives_for
from gradscale.testing import check_backend, check_library

pytestmark = [
    pytest.mark.cupy,
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in float16:UserWarning"),
]


def state_of(cupy, scale: float = 4.0):
    return DynamicScale(init_scale=scale).init(cupy.zeros((), dtype=np.float32))


def ready(cupy, scale: float = 4.0) -> GradScaler:
    scaler = GradScaler(init_scale=scale)
    scaler.scale(cupy.ones((), dtype=np.float32))
    return scaler


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "bfloat16", *later("all", "float64", "complex64", "complex128")]
)
def test_it_gives_the_pure_cores_bits_whose_clipping_is_pythons(cupy, cupy_backend, dtype: str):
    if dtype == "bfloat16" and int(cupy.__version__.partition(".")[0]) < 14:
        pytest.skip("CuPy 13 has no bfloat16")
    like = cupy.zeros((), dtype=np.float32)
    check_backend(cupy_backend, like, dtypes=[np.dtype(getattr(require("ml_dtypes"), dtype, dtype))])


def test_its_arrays_have_the_rules_of_pythons_numbers(cupy):
    check_library(cupy.zeros((), dtype=np.float32))


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
            scaled = scaler.scale([array_on(cupy, number, 2.0) for number in (0, 1)])
            assert [(x.device.id, x.get().tolist()) for x in scaled] == [(0, [8.0]), (1, [8.0])]
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
        for x in spoiled:
            x.device.synchronize()
        graphs[0].launch(stream)
        stream.synchronize()
        del spoiled
    assert [x.get().tolist() for x in (*found, *masters, *grads)] == [
        *(1, 16.0 * (len(others) + 1), [1.0, math.inf]),
        *([8.0, math.inf], *[[2.0]] * (len(others) + 1)),
    ]


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
    missing = type("CUDADriverError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.driver", "status": 100})
    monkeypatch.setattr(cupy, "zeros", mock.Mock(side_effect=missing))
    with pytest.raises(gradscale.BackendNotAvailableError, match="nvidia-smi -L"):
        cupy_backend.example()


@pytest.mark.parametrize("busy", range(2))
def test_devices_wait_for_each_other(cupy, cupy_backend, busy: int):
    x, there = cupy.zeros((), dtype=np.int32), array_on(cupy, 1, 0, dtype=np.int32)
    for milliseconds in (0, 200):
        with cupy.cuda.Device(busy):
            stall(cupy, milliseconds)
        # Written late, or read late and written once more before that.
        x += 5
        moved = cupy_backend.move(x, there)
        x += 90
        assert (moved.device.id, int(moved)) == (1, 5)
        x -= 95


# Over MPI the host reads a message where it starts, and sends it at once.


@pytest.mark.mpi
@pytest.mark.parametrize("device", [0, 1])
def test_over_mpi_arrays_come_back_on_their_device_and_a_device_that_fails_sends_nothing(cupy, device: int):
    require("mpi")
    from mpi4py import MPI

    collectives = collectives_for(MPI.COMM_SELF.Dup(), 5.0)
    sent = array_on(cupy, device, 3, -7, 2**31 - 1, dtype=np.int32)
    with cupy.cuda.Device(device):
        stall(cupy, 100)
        stalled = cupy.cuda.get_current_stream().record()
    finish = collectives.start_max(sent)
    assert stalled.done
    found = finish()
    assert (type(found), found.device, found.dtype) == (type(sent), sent.device, np.int32)
    assert found.get().tolist() == finish().get().tolist() == [3, -7, 2**31 - 1]
    with device_fails(700), pytest.raises(BackendError, match="while the verdict was read: cudaErrorIllegalAddress"):
        collectives.start_max(sent)
