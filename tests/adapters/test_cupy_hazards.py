"""What could go wrong between the host, streams, devices and threads in the CuPy adapter, over the stand-in."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from host_cupy import HostCupy
from optimizers import Tree

from gradscale import BackendError, CallOrderError, DynamicScale, GradScaler, InvalidValueError

pytestmark = pytest.mark.numpy


def state_of(cupy: Any, scale: float = 4.0) -> Any:
    return DynamicScale(init_scale=scale).init(cupy.zeros((), dtype=np.float32))


def test_devices_have_no_hash_as_cupys_have_none(cupy: Any) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(cupy.cuda.Device(0))


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_is_refused_on_one_device_leaves_the_others_alone(cupy: Any, max_norm: float | None) -> None:
    first = cupy.array([8.0], dtype=np.float32)
    with cupy.cuda.Device(1):
        second = cupy.ones(4, dtype=np.float32)
    scaler, optimizer = GradScaler(init_scale=4.0), Tree([first, second, second[2:]])
    scaler.scale(cupy.ones((), dtype=np.float32))
    with pytest.raises(InvalidValueError, match="share memory"):
        scaler.unscale_(optimizer, max_norm=max_norm)
    assert (first.get().tolist(), second.get().tolist()) == ([8.0], [1.0] * 4)
    optimizer.grads = [first, second]
    scaler.unscale_(optimizer)
    assert (first.get().tolist(), second.get().tolist()) == ([2.0], [0.25] * 4)


def test_a_copy_that_nobody_asks_for_is_kept_until_it_is_made(
    cupy: Any, cupy_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscale_cupy import arrays

    over = [False]
    is_over = arrays.is_over
    monkeypatch.setattr(arrays, "is_over", lambda event: over[0] and is_over(event))
    for _ in range(3):
        cupy_backend.start_read(cupy.array([3], dtype=np.int32))
    assert len(arrays._under_way) == 3
    over[0] = True
    assert cupy_backend.start_read(cupy.array([3], dtype=np.int32))() == [3]
    assert len(arrays._under_way) == 1


def test_threads_begin_copies_at_once_and_each_gets_its_own(
    cupy: Any, cupy_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscale_cupy import arrays

    barrier = threading.Barrier(4)
    wrong: list[Any] = []
    is_over = arrays.is_over

    def query(event: Any) -> bool:
        found = is_over(event)
        # Another thread may look at the same copies before this one forgets them.
        time.sleep(0)
        return found

    monkeypatch.setattr(arrays, "is_over", query)

    def run(number: int) -> None:
        barrier.wait()
        try:
            for k in range(200):
                if cupy_backend.start_read(cupy.array([number, k], dtype=np.int32))() != [number, k]:
                    wrong.append((number, k))
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert wrong == []
    # What was begun last is kept; the copies before it are over and forgotten.
    assert cupy_backend.start_read(cupy.array([3], dtype=np.int32))() == [3]
    assert len(arrays._under_way) == 1


def test_threads_may_share_the_adapter(cupy: Any, cupy_backend: Any) -> None:
    state = state_of(cupy, 1.0)
    sets = [[cupy.ones(k + 1, dtype=np.float32) for k in range(n, n + 3)] for n in range(40)]
    failures: list[BaseException] = []

    def run(begin: int) -> None:
        try:
            for n in range(100):
                cupy_backend.unscale(sets[(begin + n) % len(sets)], state)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(5 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_adapter_can_be_copied_and_pickled(cupy: Any, cupy_backend: Any) -> None:
    grads = [cupy.ones(3, dtype=np.float32)]
    cupy_backend.unscale(grads, state_of(cupy), out=grads)
    for made in (copy.deepcopy(cupy_backend), pickle.loads(pickle.dumps(cupy_backend))):
        made.unscale(grads, state_of(cupy), out=grads)
    assert grads[0].get().tolist() == [0.25**3] * 3


@pytest.mark.parametrize("captured", [{0}, {1}, {0, 1}], ids=["state", "other", "both"])
def test_a_capture_on_one_device_uploads_nothing_on_any(cupy: Any, cupy_backend: Any, captured: set[int]) -> None:
    grads, state = [cupy.ones(3, dtype=np.float32)], state_of(cupy)
    with cupy.cuda.Device(1):
        grads.append(cupy.ones(3, dtype=np.float32))
    HostCupy.capturing = captured
    cupy.log.clear()
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
    assert [entry for entry in cupy.log if entry[0] == "launch" and entry[1] != "add_squares"] == []


def test_the_stand_in_refuses_what_cuda_refuses_in_a_capture(cupy: Any) -> None:
    x, before = cupy.zeros(3, dtype=np.float32), cupy.cuda.Event()
    before.record()
    HostCupy.capturing = {0}
    inside = cupy.cuda.Event()
    inside.record()
    cupy.cuda.get_current_stream().wait_event(inside)
    cupy.asarray(3.0, dtype=np.float32)
    for call in (
        x.get,
        before.synchronize,
        lambda: cupy.cuda.runtime.eventQuery(before.ptr),
        lambda: cupy.cuda.alloc_pinned_memory(4),
        lambda: cupy.array([1.0, 2.0]),
        lambda: cupy.cuda.get_current_stream().wait_event(before),
    ):
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorStreamCapture"):
            call()


def test_a_scaler_is_not_captured_and_says_what_can_be(cupy: Any) -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), Tree([cupy.ones(3, dtype=np.float32)])
    scaler.scale(cupy.ones((), dtype=np.float32))
    HostCupy.capturing = {0}
    with pytest.raises(CallOrderError, match=r"^scale\(\) cannot be part of a CUDA graph.*gradscale\.unscale\(grads"):
        scaler.scale(cupy.ones((), dtype=np.float32))
    with pytest.raises(CallOrderError, match=r"^unscale_\(\) cannot be part of a CUDA graph"):
        scaler.unscale_(optimizer)
    HostCupy.capturing = set()
    scaler.unscale_(optimizer)
    assert optimizer.grads[0].get().tolist() == [0.25] * 3


def test_the_scale_goes_to_other_devices_in_the_order_of_the_streams(cupy: Any) -> None:
    scaler = GradScaler(init_scale=4.0)
    outputs = [cupy.ones((), dtype=np.float32)]
    with cupy.cuda.Device(1):
        outputs.append(cupy.ones((), dtype=np.float32))
    cupy.log.clear()
    scaled = scaler.scale(outputs)
    assert [(x.device.id, float(x.get())) for x in scaled] == [(0, 4.0), (1, 4.0)]
    assert [entry for entry in cupy.log if entry[0] == "wait"] == [("wait", 1, 0), ("wait", 0, 1)]
