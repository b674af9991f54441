"""CuPy's NCCL communicators: what a world of one can show, and all devices of this process, with a thread for each."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cupy_devices import array_on, capture, device_fails, in_world, nccl_fails, require_cupy, stall
from optimizers import Tree

from gradscale import (
    BackendError,
    BackendNotAvailableError,
    CallOrderError,
    CollectiveTimeoutError,
    GradScaler,
    ShardedGradScaler,
)
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.testing import check_collectives

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]

PATIENCE = 60.0


@pytest.fixture
def cupy():
    """Return CuPy, on a machine with CUDA and NCCL."""
    cupy = require_cupy()
    from gradscale_cupy.availability import nccl_module, nccl_package

    if not nccl_module().available:
        pytest.skip(f"gpu: CuPy finds no NCCL: pip install {nccl_package(cupy.cuda.runtime.runtimeGetVersion())}")
    yield cupy
    cupy.cuda.Device().synchronize()


@pytest.fixture
def adapter(cupy):  # noqa: ARG001
    from gradscale_cupy import nccl

    return nccl


@pytest.fixture
def comm(cupy):  # noqa: ARG001
    """Return a communicator of this process alone."""
    from cupy.cuda import nccl

    return nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


def vector(cupy, *values: int):
    return cupy.asarray(values, dtype=np.int32)


def train(cupy, scaler: GradScaler, *bad: bool):
    """Make an iteration for each of these, with an overflow where it says so; return what came of it."""
    optimizer = Tree()
    for is_bad in bad:
        scale = scaler.scale(cupy.ones((), dtype=np.float32))
        optimizer.grads = [cupy.asarray([1.0, np.inf if is_bad else 1.0], dtype=np.float32) * scale]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [cupy.asnumpy(grads[0]).tolist() for grads in optimizer.seen]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("library", ["cupy", "numpy"])
def test_worlds_conform(cupy, adapter, library: str, size: int):
    def check(comm):
        like = (cupy if library == "cupy" else np).zeros((), dtype=np.float32)
        check_collectives(adapter.backend.collectives(comm, timeout=PATIENCE), like)

    assert in_world(cupy, size, check) == [None] * size


def test_a_scaler_over_a_world_of_one_trains_as_one_without_a_group(cupy, comm):
    sharded = ShardedGradScaler(group=comm, init_scale=8.0, timeout=PATIENCE)
    assert train(cupy, sharded, False, True, False) == train(cupy, GradScaler(init_scale=8.0), False, True, False)


@pytest.mark.parametrize("size", [2, 3])
def test_a_bad_value_on_any_device_skips_on_all(cupy, size: int):
    for bad in range(size):

        def run(comm, bad: int = bad):
            scaler = ShardedGradScaler(group=comm, init_scale=8.0, timeout=PATIENCE)
            return train(cupy, scaler, False, comm.rank_id() == bad, False)

        assert in_world(cupy, size, run) == [(4.0, [[1.0, 1.0]] * 2)] * size


def test_the_host_does_not_wait_until_the_result_is_asked_for(cupy, comm, adapter):
    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    stall(cupy, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray([3, -4], dtype=np.int32)
        # What is compiled and loaded, is so before the stream is kept busy.
        collectives.start_max(x)() + 1
        stream.synchronize()
        stall(cupy, 200)
        pending = collectives.start_max(x)
        assert not stream.done
        result = pending() + 1
    stream.synchronize()
    assert cupy.asnumpy(result).tolist() == [4, -3]


@pytest.mark.parametrize("kind", ["streams", "threads"])
def test_another_stream_has_the_result(cupy, comm, adapter, kind: str):
    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    # The default stream of a thread has the same handle in each.
    first, second = [cupy.cuda.Stream.ptds] * 2 if kind == "threads" else streams
    pending: list[Any] = []

    def begin(milliseconds: int, length: int):
        with cupy.cuda.Device(0), first:
            x = cupy.asarray([3, -4, 5][:length], dtype=np.int32)
            stall(cupy, milliseconds)
            pending.append(collectives.start_max(x))

    # The first of a length, which NCCL connects the ranks for, and the second.
    for milliseconds, length in ((0, 2), (200, 3), (200, 3)):
        thread = threading.Thread(target=begin, args=(milliseconds, length))
        thread.start()
        thread.join()
        with second:
            assert cupy.asnumpy(pending.pop()() + 1).tolist() == [4, -3, 6][:length]


def test_a_device_that_is_late_ends_in_the_timeout_and_aborts(cupy, comm, adapter):
    collectives = adapter.backend.collectives(comm, timeout=0.05)
    stall(cupy, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray([3, -4], dtype=np.int32)
        adapter.backend.collectives(comm, timeout=PATIENCE).start_max(x)()
        stall(cupy, 1000)
        with pytest.raises(CollectiveTimeoutError):
            collectives.start_max(x)()
    with pytest.raises(BackendError, match="was aborted"):
        collectives.start_max(x)
    stream.synchronize()


@pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
def test_a_rank_that_never_comes_is_a_timeout_that_aborts_the_communicator(cupy, adapter, connects: bool):
    def run(comm):
        if not connects:
            adapter.backend.collectives(comm, timeout=PATIENCE).start_max(vector(cupy, 1, 2))()
        if comm.rank_id() == 1:
            return comm
        with pytest.raises(CollectiveTimeoutError) as raised:
            adapter.backend.collectives(comm, timeout=0.05).start_max(vector(cupy, 1, 2))()
        assert (raised.value.rank, raised.value.size, getattr(raised.value, "__notes__", [])) == (0, 2, [])
        return comm

    lost, late = in_world(cupy, 2, run)
    found = [comm.comm == 0 for comm in (lost, late)]
    for comm in (lost, late):
        if comm.comm:
            # Else the device waits for ever, and what waits for the device.
            comm.abort()
    assert found == [True, False]
    with pytest.raises(BackendError, match=r"given up, and it was aborted: pass another one(.|\n)*CollectiveTime"):
        adapter.backend.collectives(lost, timeout=PATIENCE)


def test_a_backend_of_cupyx_sends_over_its_communicator(cupy, comm, adapter):
    collectives = adapter.backend.collectives(SimpleNamespace(_comm=comm), timeout=PATIENCE)
    assert collectives.start_max(vector(cupy, 3, -4))().get().tolist() == [3, -4]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (4, "NCCL_ERROR_INVALID_ARGUMENT"),
        (6, "NCCL_ERROR_REMOTE_ERROR"),
        (7, "NCCL's status 7 .* the communicator does not block"),
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["before", "under-way"])
def test_an_error_of_nccls_is_raised_with_its_text_and_aborts(cupy, comm, adapter, status: int, said: str, begun: bool):
    collectives, x = adapter.backend.collectives(comm, timeout=PATIENCE), vector(cupy, 1)
    pending = collectives.start_max(x) if begun else None
    nccl_fails(comm.comm, status)
    with pytest.raises(BackendError, match=f"NCCL failed on rank 0 of 1 .*: {said}"):
        (pending or collectives.start_max(x))()
    assert comm.comm == 0


def test_a_device_that_has_failed_is_its_error_and_no_timeout(cupy, comm, adapter):
    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    collectives.start_max(vector(cupy, 1))()
    stall(cupy, 100)
    pending = collectives.start_max(vector(cupy, 1))
    with device_fails(700), pytest.raises(BackendError, match="cudaErrorIllegalAddress"):
        pending()
    assert comm.comm == 0


def test_errors_of_cuda_are_said_where_a_collective_is_begun_and_read(
    cupy, comm, adapter, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_, **_options):
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    pending = collectives.start_max(np.ones(1, dtype=np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "asnumpy", fail)
        with pytest.raises(BackendError, match="while an agreement over NCCL was read: cudaErrorIllegalAddress"):
            pending()
    x = vector(cupy, 1)
    monkeypatch.setattr(cupy, "array", fail)
    with pytest.raises(BackendError, match="while an agreement over NCCL was begun: cudaErrorIllegalAddress"):
        collectives.start_max(x)


def test_a_step_over_two_groups_waits_for_each_once(cupy, comm, adapter, monkeypatch: pytest.MonkeyPatch):
    other = type(comm)(1, adapter.nccl.get_unique_id(), 0)
    asked: list[int] = []

    def query(event: int) -> int:
        asked.append(event)
        return cupy.cuda.runtime.eventQuery(event)

    runtime = SimpleNamespace(eventQuery=query, CUDARuntimeError=cupy.cuda.runtime.CUDARuntimeError)
    monkeypatch.setattr(adapter, "runtime", runtime)
    groups = [adapter.backend.collectives(one, timeout=PATIENCE) for one in (comm, other)]
    scaler, optimizer = ShardedGradScaler(group=groups), Tree([cupy.ones(1, dtype=np.float32)])
    for _ in range(2):
        # The first step compares the ranks' versions, too.
        scaler.scale(cupy.ones((), dtype=np.float32))
        asked.clear()
        scaler.unscale_(optimizer)
        is_waiting = bool(asked)
        asked.clear()
        scaler.step(optimizer)
        scaler.update()
    assert (is_waiting, optimizer.steps, len(set(asked))) == (False, 2, 2)


def test_what_cannot_be_reduced_is_an_error_before_it_is_sent(cupy, comm, adapter):
    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = vector(cupy, 1)
        stream.synchronize()
    said = pytest.raises(CallOrderError, match="an agreement over NCCL cannot be part of a CUDA graph")
    with capture(stream), said:
        collectives.start_max(x)
    with pytest.raises(InvalidValueError, match="device, CUDA device 0, got an array on CUDA device 1"):
        collectives.start_max(array_on(cupy, 1, 1, dtype=np.int32))
    # It has given up nothing.
    assert collectives.start_max(x)().get().tolist() == [1]


@pytest.mark.parametrize("group", [None, "world", SimpleNamespace(_comm=None)], ids=["none", "text", "empty"])
def test_what_is_no_communicator_is_an_error(adapter, group):
    with pytest.raises(InvalidTypeError, match=r"NcclCommunicator or a cupyx\.distributed\.NCCLBackend that holds one"):
        adapter.backend.collectives(group, timeout=1.0)


def test_a_destroyed_communicator_is_an_error(cupy, comm, adapter):
    collectives = adapter.backend.collectives(comm, timeout=PATIENCE)
    comm.destroy()
    for call in (
        lambda: collectives.start_max(vector(cupy, 1)),
        lambda: adapter.backend.collectives(comm, timeout=1.0),
    ):
        with pytest.raises(BackendError, match="was destroyed or aborted: pass another one"):
            call()


@pytest.mark.parametrize(
    ("driver", "said"),
    [(13020, "python -m pip install nvidia-nccl-cu13$"), (0, "no CUDA driver here: install NVIDIA's driver")],
    ids=["library", "device"],
)
def test_what_is_missing_is_named(cupy, adapter, driver: int, said: str, monkeypatch: pytest.MonkeyPatch):
    from gradscale_cupy import availability

    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    runtime = SimpleNamespace(
        driverGetVersion=lambda: driver, runtimeGetVersion=lambda: 13020, getDeviceCount=lambda: int(driver > 0)
    )
    monkeypatch.setattr(availability, "runtime", runtime)
    with pytest.raises(BackendNotAvailableError, match=said):
        adapter.backend.collectives(None, timeout=1.0)


def test_a_rank_without_arrays_takes_part_with_cupys(cupy, adapter):
    def run(comm):
        with cupy.cuda.Device(0):
            example = adapter.backend.collectives(comm, timeout=1.0).example()
        return example.shape, example.dtype, example.device.id

    assert in_world(cupy, 2, run) == [((), np.float32, rank) for rank in range(2)]
    assert isinstance(adapter.backend, GroupBackend)
