"""The CuPy adapter on a CUDA device: the pure core's bits, every place, streams, devices and captured graphs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from axes import require
from cupy_devices import launch_counter, require_device_count, stall
from optimizers import Tree
from tiers import later
from written_rules import assert_clipping_is_written, assert_rule_is_written

import gradscale
from gradscale import DynamicScale, GradScaler, presets
from gradscale.testing import check_backend

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]

SIZES = [1, 7, 1000, 1 << 20, *later("all", (16 << 20) + 3)]


@pytest.fixture
def state(cupy):
    return DynamicScale(init_scale=4.0).init(cupy.zeros((), dtype=np.float32))


def test_it_gives_the_pure_cores_bits(cupy, cupy_backend):
    dtypes = [np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")]
    if int(cupy.__version__.partition(".")[0]) >= 14:
        dtypes.append(np.dtype(require("ml_dtypes").bfloat16))
    check_backend(cupy_backend, cupy.zeros((), dtype=np.float32), dtypes=dtypes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize(("source", "target"), [("float32", "float32"), ("float16", "float32"), ("float16", "float16")])
def test_a_bad_value_is_found_wherever_it_is_and_all_others_are_divided(
    cupy, cupy_backend, state, size: int, offset: int, source: str, target: str
):
    for place in {0, size // 3, size // 2, size - 1}:
        x = cupy.ones(size + offset, dtype=source)[offset:]
        x[place] = np.nan
        out = x if source == target else cupy.zeros(size + 4 - offset, dtype=target)[4 - offset :]
        _, nonfinite = cupy_backend.unscale([x], state, out=[out])
        assert int(nonfinite) == 1
        assert int(cupy.count_nonzero(out == 0.25)) == size - 1
        assert bool(cupy.isnan(out[place]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_the_norm_of_many_arrays_is_numpys_and_always_the_same(cupy, cupy_backend, state, dtype: str):
    rng = np.random.default_rng(0)
    sizes = [0, 1, 3, *rng.integers(0, 50_000, 300).tolist()]
    whole = [cupy.asarray(rng.standard_normal(size), dtype=dtype) for size in sizes]
    grads = [x[::2] if k % 3 == 0 else x for k, x in enumerate(whole)]
    sums = set()
    for _ in range(3):
        made, nonfinite, squares = cupy_backend.unscale_with_squares(
            grads, state, dtype=None, out=[x.copy() for x in grads]
        )
        sums.add(float(squares))
        assert int(nonfinite) == 0
    host = [cupy.asnumpy(x).astype(np.complex128) for x in made]
    assert sums.pop() == pytest.approx(sum(float(np.sum(np.abs(x) ** 2)) for x in host), rel=1e-12)
    assert not sums
    factor = cupy.asarray(0.3, dtype=np.float32)
    expected = [(cupy.asnumpy(x).astype(np.result_type(x.dtype, np.float32)) * np.float32(0.3)) for x in made]
    cupy_backend.multiply_in_place(made, factor)
    for x, y in zip(made, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(x), y.astype(x.dtype))


def test_the_host_does_not_wait_between_scale_and_step(cupy, cupy_backend):
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        grads = [cupy.ones(1 << 20, dtype=np.float32) for _ in range(8)]
        state = DynamicScale(init_scale=4.0).init(cupy.zeros((), dtype=np.float32))

    def iterate():
        cupy_backend.unscale(grads, state, out=grads)
        cupy_backend.unscale([*grads, cupy.ones(3, dtype=np.float32)], state)
        _, nonfinite, squares = cupy_backend.unscale_with_squares(grads, state, out=grads)
        cupy_backend.multiply_in_place(grads, squares.astype(np.float32))
        return cupy.stack([nonfinite])

    with stream:
        # Kernels are compiled and loaded, and memory is allocated, before the stream is kept busy.
        stall(cupy, 0)
        iterate()
        stream.synchronize()
        stall(cupy, 200)
        verdict = iterate()
        # A host that had waited would find the stream done.
        assert not stream.done
        assert cupy_backend.read(verdict) == [0]


def test_the_host_waits_for_what_it_reads(cupy, cupy_backend):
    x = cupy.asarray([1, 2], dtype=np.int32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for milliseconds, expected in ((0, [2, 3]), (200, [3, 4])):
            stall(cupy, milliseconds)
            x += 1
            assert cupy_backend.read(x) == expected


def test_a_captured_graph_divides_judges_and_adapts_the_scale(cupy):
    policy = DynamicScale(init_scale=4.0, growth_interval=2)
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()

    def iterate():
        _, nonfinite = gradscale.unscale(grads, state, out=grads)
        for old, new in zip(state, policy.update(state, nonfinite=nonfinite), strict=True):
            old[...] = new
        return nonfinite

    with stream, cupy.cuda.using_allocator(pool.malloc):
        grads = [cupy.ones(1000, dtype=np.float32), cupy.ones(7, dtype=np.float16)]
        state = policy.init(grads[0])
        iterate()
        stream.synchronize()
        stream.begin_capture()
        nonfinite = iterate()
        graph = stream.end_capture()
        scales = []
        for value in (1.0, np.inf, 1.0, 1.0):
            before = float(state.scale)
            for grad in grads:
                grad[...] = value
            graph.launch(stream)
            stream.synchronize()
            assert [float(grad[-1]) for grad in grads] == [value / before] * 2
            assert (int(nonfinite) > 0) == np.isinf(value)
            scales.append(float(state.scale))
    # One clean step was made before.
    assert scales == [8.0, 4.0, 4.0, 8.0]


def test_a_thread_waits_for_tables_that_another_one_sends(cupy, cupy_backend, state):
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
        _, nonfinite = cupy_backend.unscale(grads, state, out=grads)
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


@pytest.mark.parametrize("name", presets.names())
def test_each_preset_has_the_bits_of_its_rule_over_numpy(cupy, cupy_backend, name: str):
    assert_rule_is_written(cupy, cupy_backend, presets.named(name))


def test_clipping_has_the_bits_of_the_pure_core_over_numpy(cupy, cupy_backend):
    assert_clipping_is_written(cupy, cupy_backend)


@pytest.mark.parametrize(("max_norm", "launches"), [(None, 50), (1.0, 75)])
def test_an_iteration_is_some_dozens_of_launches(cupy, max_norm: float | None, launches: int):
    scaler, optimizer, one = GradScaler(init_scale=8.0), Tree(), cupy.ones((), dtype=np.float32)
    count, counts = launch_counter(), []
    for value in (1.0, np.inf, 1.0):
        grad = cupy.asarray([8.0, value], dtype=np.float32)
        before = count()
        scaler.scale(one)
        optimizer.grads = [grad]
        if max_norm is not None:
            scaler.unscale_(optimizer, max_norm=max_norm)
        scaler.step(optimizer)
        scaler.update()
        counts.append(count() - before)
    # The first iteration makes the state.
    assert counts[0] - 1 == counts[1] == counts[2] <= launches


def test_a_scaler_trains_on_a_device(cupy):
    scaler, optimizer = GradScaler(init_scale=8.0), Tree()
    for value in (1.0, np.inf, 1.0):
        scale = scaler.scale(cupy.ones((), dtype=np.float32))
        optimizer.grads = [cupy.asarray([1.0, value], dtype=np.float32) * scale]
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert [cupy.asnumpy(grads[0]).tolist() for grads in optimizer.seen] == [[1.0, 1.0]] * 2
