"""gradscale_nccl over nccl4py on CUDA devices, with a thread for each: CuPy's arrays there, and others' on the CPU.

For those the devices have the number of the CPU, where the driver and NCCL on the host have all memory.
"""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from axes import require
from cupy_devices import device_fails, launch_counter, nccl_fails, require_cupy, require_device_count, stall
from optimizers import Tree
from recipe_blocks import run_on

import gradscale
from gradscale import BackendError, CallOrderError, CollectiveTimeoutError, ShardedGradScaler
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError
from gradscale.testing import check_collectives, run_ranks

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]

PAGE = Path(__file__).parents[2] / "backends" / "gradscale_nccl" / "README.md"
PATIENCE = 60.0


@pytest.fixture
def cupy():
    cupy = require_cupy()
    require("nccl4py")
    yield cupy
    cupy.cuda.Device().synchronize()


@pytest.fixture
def comm(cupy) -> Any:  # noqa: ARG001
    """Return a communicator of this process alone."""
    from nccl.core import Communicator, get_unique_id

    return Communicator.init(1, 0, get_unique_id())


@pytest.fixture
def backend(cupy):  # noqa: ARG001
    from gradscale_nccl import backend

    return backend


class HostDevice:
    """A device of cuda.core with the number of the CPU, whose arrays know no streams."""

    device_id = -1

    def __init__(self, device: Any):
        self.set_current, self.create_event, self._device = device.set_current, device.create_event, device

    def create_stream(self):
        stream = self._device.create_stream()
        return SimpleNamespace(handle=-1, record=stream.record, __cuda_stream__=stream.__cuda_stream__)


@pytest.fixture(params=["cupy", "numpy", "jax.numpy", "torch"])
def xp(request: pytest.FixtureRequest, cupy, monkeypatch: pytest.MonkeyPatch):  # noqa: ARG001
    """Return a library whose arrays NCCL takes."""
    found = pytest.importorskip(request.param)
    if request.param != "cupy":
        from cuda.core import Device
        from nccl.core import communicator

        # There is nothing on a device that it could reduce.
        launch_counter()
        monkeypatch.setattr(communicator, "Device", lambda number: HostDevice(Device(number)))
    return found


def on_ranks(cupy, size: int, act: Callable[[Any], Any]) -> list[Any]:
    """Call something on each of several devices, in a thread for each, with a communicator of all."""
    from nccl.core import Communicator, get_unique_id

    require_device_count(cupy, size)
    name = get_unique_id()

    def begin(group):
        with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True):
            comm = Communicator.init(size, group.rank, name)
            try:
                return act(comm)
            except BaseException:
                # Else its device waits for ever, and what waits for the device.
                comm.abort()
                raise

    return run_ranks(size, begin, timeout=120.0)


def vector(cupy, *values: int):
    return cupy.asarray(values, dtype=np.int32)


def step(scaler: ShardedGradScaler, xp, value: float) -> int:
    """Make an iteration with one gradient; return how many steps the optimizer has made in it."""
    optimizer = Tree([xp.asarray([1.0, value], dtype=xp.float32)])
    scaler.scale(xp.asarray(1.0, dtype=xp.float32))
    scaler.step(optimizer)
    scaler.update()
    return optimizer.steps


@pytest.mark.parametrize("size", [1, 2, 3])
def test_worlds_conform(cupy, backend, xp, size: int):
    def check(comm):
        check_collectives(backend.collectives(comm, timeout=PATIENCE), xp.zeros(1), repetitions=10)

    assert on_ranks(cupy, size, check) == [None] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_bad_value_on_each_rank_in_turn_skips_the_step_on_every_rank(cupy, xp, size: int):
    for bad_rank in (*range(size), None):

        def run(comm, bad_rank: int | None = bad_rank):
            scaler = ShardedGradScaler(group=comm, timeout=PATIENCE)
            return step(scaler, xp, math.inf if comm.rank == bad_rank else 1.0), scaler.get_scale()

        assert on_ranks(cupy, size, run) == [(1, 65536.0) if bad_rank is None else (0, 32768.0)] * size


@pytest.mark.parametrize("lost", range(3))
def test_the_ranks_that_are_left_shrink_the_communicator_and_go_on(cupy, lost: int):
    recipe = run_on(PAGE, "nccl4py_shrink", gradscale=gradscale)

    def run(comm):
        scaler = ShardedGradScaler(group=comm, timeout=3.0)
        steps = [step(scaler, cupy, 1.0)]
        if comm.rank == lost:
            return steps
        optimizer = Tree([vector(cupy, 1).astype(np.float32)])
        scaler.scale(cupy.ones((), dtype=np.float32))
        fewer = recipe["step_or_shrink"](scaler, optimizer, comm, lambda: [lost])
        assert optimizer.steps == 0
        steps += [step(scaler, cupy, math.inf if fewer.rank == 0 else 1.0), step(scaler, cupy, 1.0)]
        return (*steps, fewer.rank, fewer.nranks, scaler.get_scale())

    found = on_ranks(cupy, 3, run)
    assert found.pop(lost) == [1]
    assert found == [(1, 0, 1, rank, 2, 32768.0) for rank in range(2)]


def test_an_nccl_that_cannot_revoke_aborts(cupy, comm, backend, monkeypatch: pytest.MonkeyPatch):
    from nccl.bindings import nccl as bindings

    def missing(*_):
        msg = "function ncclCommRevoke is not found"
        raise RuntimeError(msg)

    monkeypatch.setattr(bindings, "comm_revoke", missing)
    backend.collectives(comm, timeout=PATIENCE).start_max(vector(cupy, 1))()
    stall(cupy, 1000)
    with pytest.raises(CollectiveTimeoutError) as raised:
        backend.collectives(comm, timeout=0.05).start_max(vector(cupy, 1))()
    assert (comm.is_valid, getattr(raised.value, "__notes__", [])) == (False, [])


@pytest.mark.parametrize(("status", "said"), [(6, r"RemoteError \(6\)"), (7, r"InProgress \(7\)")])
@pytest.mark.parametrize("begun", [False, True], ids=["before", "under-way"])
def test_an_error_of_nccls_is_raised_with_its_text(cupy, comm, backend, status: int, said: str, begun: bool):
    collectives, x = backend.collectives(comm, timeout=PATIENCE), vector(cupy, 1)
    # Later ones are started without a look at what NCCL has found.
    collectives.start_max(x)()
    fail: Callable[[], Any] = collectives.start_max(x) if begun else lambda: collectives.start_max(x)
    nccl_fails(comm.ptr, status)
    # A communicator that does not block is in progress, before an answer is believed.
    with pytest.raises(BackendError, match=f"NCCL failed on rank 0 of 1 .*: {said}"):
        fail()


def test_a_device_that_has_failed_is_its_error_and_no_timeout(cupy, comm, backend):
    collectives = backend.collectives(comm, timeout=PATIENCE)
    collectives.start_max(vector(cupy, 1))()
    stall(cupy, 100)
    pending = collectives.start_max(vector(cupy, 1))
    with device_fails(700), pytest.raises(BackendError, match="invalid memory address"):
        pending()


def test_what_the_device_still_writes_is_kept_until_it_has_and_no_longer(
    cupy, comm, backend, monkeypatch: pytest.MonkeyPatch
):
    module = importlib.import_module("gradscale_nccl")
    collectives = backend.collectives(comm, timeout=PATIENCE)
    view_of, copies = module.StridedMemoryView.from_dlpack, []

    def from_dlpack(copy, stream: int):
        copies.append(weakref.ref(copy))
        return view_of(copy, stream)

    monkeypatch.setattr(module, "StridedMemoryView", SimpleNamespace(from_dlpack=from_dlpack))
    x = vector(cupy, 3, -4)
    collectives.start_max(x)
    pending = collectives.start_max(x)
    x[:] = 7
    gc.collect()
    assert [copy() is None for copy in copies] == [False, False]
    assert pending().tolist() == [3, -4]
    del pending
    gc.collect()
    assert [copy() is None for copy in copies] == [False, True]


def test_an_array_of_the_cpu_is_an_error(comm, backend):
    with pytest.raises(BackendError, match=r"NCCL failed on rank 0 of 1 .*: NumPy only supports stream=None"):
        backend.collectives(comm, timeout=PATIENCE).start_max(np.ones(1, np.int32))


def test_a_rank_without_arrays_is_asked_for_its_library(comm, backend):
    with pytest.raises(CallOrderError, match="pass backend="):
        ShardedGradScaler(group=comm).step(Tree([None]))
    assert isinstance(backend, GroupBackend)


def test_what_is_no_communicator_is_an_error(comm, backend):
    from nccl.core import Communicator, get_unique_id

    comm.abort()
    for group in (None, get_unique_id(empty=True), Communicator(), comm):
        with pytest.raises(InvalidTypeError, match=r"must be an nccl\.core\.Communicator that was not destroyed"):
            backend.collectives(group, timeout=1.0)


def test_the_host_does_not_wait_until_the_result_is_asked_for(cupy, comm, backend):
    collectives, stream = backend.collectives(comm, timeout=PATIENCE), cupy.cuda.Stream(non_blocking=True)
    with stream:
        # What is compiled and loaded, is so before the stream is kept busy.
        for milliseconds in (0, 200):
            x = vector(cupy, 2, -5)
            stall(cupy, milliseconds)
            x += 1
            pending = collectives.start_max(x)
            is_busy = not stream.done
            # Behind the work of the array's library, which comes late.
            assert pending().tolist() == [3, -4]
    assert is_busy
