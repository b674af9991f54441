"""NCCL on a CUDA device, with one process for each: what a world of one can show, and all devices of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cupy_devices import require_cupy, require_device_count, stall
from optimizers import Tree

from gradscale import BackendError, CollectiveTimeoutError, GradScaler, ShardedGradScaler
from gradscale.testing import check_collectives, run_ranks

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]


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
def comm(cupy):  # noqa: ARG001
    """Return a communicator of this process alone."""
    from cupy.cuda import nccl

    return nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)


def in_world(cupy, size: int, run: Callable[[Any], Any]):
    """Call a function on each of several devices, with a communicator of all, in a thread for each."""
    from cupy.cuda import nccl

    require_device_count(cupy, size)
    name = nccl.get_unique_id()

    def begin(group):
        with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True):
            return run(nccl.NcclCommunicator(size, name, group.rank))

    return run_ranks(size, begin, timeout=120.0)


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
def test_worlds_conform(cupy, size: int):
    from gradscale_cupy.nccl import backend

    def check(comm):
        check_collectives(backend.collectives(comm, timeout=60.0), cupy.zeros((), dtype=np.float32))

    assert in_world(cupy, size, check) == [None] * size


def test_a_scaler_over_a_world_of_one_trains_as_one_without_a_group(cupy, comm):
    sharded = ShardedGradScaler(group=comm, init_scale=8.0, timeout=60.0)
    assert train(cupy, sharded, False, True, False) == train(cupy, GradScaler(init_scale=8.0), False, True, False)


@pytest.mark.parametrize("size", [2, 3])
def test_a_bad_value_on_any_device_skips_on_all(cupy, size: int):
    for bad in range(size):

        def run(comm, bad: int = bad):
            scaler = ShardedGradScaler(group=comm, init_scale=8.0, timeout=60.0)
            return train(cupy, scaler, False, comm.rank_id() == bad, False)

        assert in_world(cupy, size, run) == [(4.0, [[1.0, 1.0]] * 2)] * size


def test_the_host_does_not_wait_until_the_result_is_asked_for(cupy, comm):
    from gradscale_cupy.nccl import backend

    collectives = backend.collectives(comm, timeout=60.0)
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
def test_another_stream_has_the_result(cupy, comm, kind: str):
    from gradscale_cupy.nccl import backend

    collectives = backend.collectives(comm, timeout=60.0)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    # The default stream of a thread has the same handle in each.
    first, second = [cupy.cuda.Stream.ptds] * 2 if kind == "threads" else streams
    pending: list[Any] = []

    def begin(milliseconds: int):
        with cupy.cuda.Device(0), first:
            x = cupy.asarray([3, -4], dtype=np.int32)
            stall(cupy, milliseconds)
            pending.append(collectives.start_max(x))

    for milliseconds in (0, 200):
        thread = threading.Thread(target=begin, args=(milliseconds,))
        thread.start()
        thread.join()
        with second:
            assert cupy.asnumpy(pending.pop()() + 1).tolist() == [4, -3]


def test_a_device_that_is_late_ends_in_the_timeout_and_aborts(cupy, comm):
    from gradscale_cupy.nccl import backend

    collectives = backend.collectives(comm, timeout=0.05)
    stall(cupy, 0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.asarray([3, -4], dtype=np.int32)
        backend.collectives(comm, timeout=60.0).start_max(x)()
        stall(cupy, 1000)
        with pytest.raises(CollectiveTimeoutError):
            collectives.start_max(x)()
    with pytest.raises(BackendError, match="was aborted"):
        collectives.start_max(x)
    stream.synchronize()
