"""NCCL's communicators, CuPy's and nccl4py's: a world of one, and all devices of this process with a thread for each.

nccl4py takes arrays of other libraries on the CPU here: the devices have the number of the CPU then, where the driver
and NCCL on the host have all memory.
"""

from __future__ import annotations

import functools
import gc
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from axes import require
from cupy_devices import array_on, capture, device_fails, launch_counter, nccl_fails, require_device_count, stall
from optimizers import Tree
from recipe_blocks import run_on

import gradscale
from gradscale import BackendError, CallOrderError, CollectiveTimeoutError, ShardedGradScaler
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.testing import check_collectives, run_ranks

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]

PAGE = Path(__file__).parents[2] / "backends" / "gradscale_nccl" / "README.md"
PATIENCE = 60.0
of_cupy = pytest.mark.parametrize("nccl", ["cupy"], indirect=True)
of_nccl4py = pytest.mark.parametrize("nccl", ["nccl4py"], indirect=True)
LIBRARIES = ["cupy", "numpy", "jax.numpy", "torch"]
ROWS = [*(("cupy", name) for name in LIBRARIES[:2]), *(("nccl4py", name) for name in LIBRARIES)]


@pytest.fixture(params=["cupy", "nccl4py"])
def nccl(request: pytest.FixtureRequest, cupy):  # noqa: ARG001
    """Return the adapter for one of both bindings, and how its communicators are made and looked at."""
    if request.param == "nccl4py":
        require("nccl4py")
        from nccl.core import Communicator, get_unique_id

        import gradscale_nccl as adapter

        return SimpleNamespace(
            adapter=adapter,
            is_cupys=False,
            collectives=adapter.backend.collectives,
            name=get_unique_id,
            make=lambda size, name, rank: Communicator.init(size, rank, name),
            pointer=lambda comm: comm.ptr,
            fault="invalid memory address",
            wrong=[Communicator(), get_unique_id(empty=True)],
            wanted=r"must be an nccl\.core\.Communicator that was not destroyed",
        )
    from cupy.cuda import nccl as original

    from gradscale_cupy import nccl as adapter

    if not original.available:
        pytest.skip("gpu: CuPy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13 for CUDA 13")
    return SimpleNamespace(
        adapter=adapter,
        is_cupys=True,
        collectives=adapter.backend.collectives,
        name=original.get_unique_id,
        make=original.NcclCommunicator,
        pointer=lambda comm: comm.comm,
        fault="cudaErrorIllegalAddress",
        wrong=["world", SimpleNamespace(_comm=None)],
        wanted=r"NcclCommunicator or a cupyx\.distributed\.NCCLBackend that holds one",
    )


@pytest.fixture
def comm(nccl):
    """Return a communicator of this process alone."""
    return nccl.make(1, nccl.name(), 0)


@pytest.fixture
def in_world(cupy, nccl):
    """Return what calls a function on each of several devices, with a communicator of all, in a thread for each."""

    def call(size: int, act: Callable[[Any], Any]) -> list[Any]:
        require_device_count(cupy, size)
        name = nccl.name()

        def begin(group):
            with cupy.cuda.Device(group.rank), cupy.cuda.Stream(non_blocking=True):
                comm = nccl.make(size, name, group.rank)
                try:
                    return act(comm)
                except BaseException:
                    # Else its device waits for ever, and what waits for the device.
                    comm.abort()
                    raise

        return run_ranks(size, begin, timeout=120.0)

    return call


class HostDevice:
    """A device of cuda.core with the number of the CPU, whose arrays know no streams."""

    device_id = -1

    def __init__(self, device: Any):
        self.set_current, self.create_event, self._device = device.set_current, device.create_event, device

    def create_stream(self):
        stream = self._device.create_stream()
        return SimpleNamespace(handle=-1, record=stream.record, __cuda_stream__=stream.__cuda_stream__)


@pytest.fixture
def xp(request: pytest.FixtureRequest, nccl, monkeypatch: pytest.MonkeyPatch):
    """Return a library whose arrays the adapter takes."""
    found = pytest.importorskip(request.param)
    if request.param == "torch" and found.cuda.is_available():
        made = {name: functools.partial(getattr(found, name), device="cuda") for name in ("asarray", "zeros")}
        return SimpleNamespace(float32=found.float32, **made)
    if request.param != "cupy" and not nccl.is_cupys:
        from cuda.core import Device
        from nccl.core import communicator

        # There is nothing on a device that it could reduce.
        launch_counter()
        monkeypatch.setattr(communicator, "Device", lambda number: HostDevice(Device(number)))
    return found


def vector(cupy, *values: int):
    return cupy.asarray(values, dtype=np.int32)


def train(scaler: ShardedGradScaler, xp, *values: float) -> tuple[list[int], float]:
    """Make an iteration with each of these in a gradient; return how many steps each has made, and the scale."""
    steps = []
    for value in values:
        optimizer = Tree([xp.asarray([1.0, value], dtype=xp.float32)])
        scaler.scale(xp.asarray(1.0, dtype=xp.float32))
        scaler.step(optimizer)
        scaler.update()
        steps.append(optimizer.steps)
    return steps, scaler.get_scale()


# Both.


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("nccl", "xp"), ROWS, indirect=True)
def test_worlds_conform_and_a_bad_value_on_each_rank_in_turn_skips_the_step_on_every_rank(
    nccl, xp, in_world, size: int
):
    def run(comm):
        collectives = nccl.collectives(comm, timeout=PATIENCE)
        check_collectives(collectives, xp.zeros((), dtype=xp.float32))
        # Of one scaler after the other.
        return [
            train(ShardedGradScaler(group=comm, timeout=PATIENCE), xp, 1.0, math.inf if bad else 1.0, 1.0)
            for bad in (collectives.rank == rank for rank in range(size))
        ]

    assert in_world(size, run) == [[([1, 0, 1], 32768.0)] * size] * size


def test_the_host_does_not_wait_until_the_result_is_asked_for(cupy, comm, nccl):
    collectives, stream = nccl.collectives(comm, timeout=PATIENCE), cupy.cuda.Stream(non_blocking=True)
    with stream:
        # What is compiled and loaded, is so before the stream is kept busy.
        for milliseconds in (0, 200):
            x = vector(cupy, 2, -5)
            stall(cupy, milliseconds)
            x += 1
            pending = collectives.start_max(x)
            is_busy = not stream.done
            # Behind the work of the array's library, which comes late.
            assert (pending() + 1).tolist() == [4, -3]
    assert is_busy


@pytest.mark.parametrize("kind", ["streams", "threads"])
def test_another_stream_has_the_result(cupy, comm, nccl, kind: str):
    collectives = nccl.collectives(comm, timeout=PATIENCE)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    # The default stream of a thread has the same handle in each.
    first, second = [cupy.cuda.Stream.ptds] * 2 if kind == "threads" else streams
    pending: list[Any] = []

    def begin(milliseconds: int, length: int):
        with cupy.cuda.Device(0), first:
            x = vector(cupy, *[3, -4, 5][:length])
            stall(cupy, milliseconds)
            pending.append(collectives.start_max(x))

    # The first of a length, which NCCL connects the ranks for, and the second.
    for milliseconds, length in ((0, 2), (200, 3), (200, 3)):
        thread = threading.Thread(target=begin, args=(milliseconds, length))
        thread.start()
        thread.join()
        with second:
            assert (pending.pop()() + 1).tolist() == [4, -3, 6][:length]


@pytest.mark.parametrize(
    ("nccl", "status", "said"),
    [
        ("cupy", 4, "NCCL_ERROR_INVALID_ARGUMENT"),
        ("cupy", 6, "NCCL_ERROR_REMOTE_ERROR"),
        ("cupy", 7, "NCCL's status 7 .* the communicator does not block"),
        ("nccl4py", 6, r"RemoteError \(6\)"),
        # A communicator that does not block is in progress, before an answer is believed.
        ("nccl4py", 7, r"InProgress \(7\)"),
    ],
    indirect=["nccl"],
)
@pytest.mark.parametrize("begun", [False, True], ids=["before", "under-way"])
def test_an_error_of_nccls_is_raised_with_its_text(cupy, comm, nccl, status: int, said: str, begun: bool):
    collectives, x = nccl.collectives(comm, timeout=PATIENCE), vector(cupy, 1)
    if not nccl.is_cupys:
        # Later ones are started without a look at what NCCL has found.
        collectives.start_max(x)()
    pending = collectives.start_max(x) if begun else None
    nccl_fails(nccl.pointer(comm), status)

    def fail():
        found = pending or collectives.start_max(x)
        # nccl4py's says it where it starts.
        assert begun or nccl.is_cupys
        found()

    with pytest.raises(BackendError, match=f"NCCL failed on rank 0 of 1 .*: {said}"):
        fail()
    # What is left of an aborted one.
    assert not nccl.is_cupys or comm.comm == 0


def test_a_device_that_has_failed_is_its_error_and_no_timeout(cupy, comm, nccl):
    collectives = nccl.collectives(comm, timeout=PATIENCE)
    collectives.start_max(vector(cupy, 1))()
    stall(cupy, 100)
    x = vector(cupy, 1)
    pending = collectives.start_max(x)
    with device_fails(700):
        with pytest.raises(BackendError, match=nccl.fault):
            pending()
        with pytest.raises(BackendError):
            collectives.start_max(x)
    assert not nccl.is_cupys or comm.comm == 0


def test_only_communicators_and_what_holds_one_are_taken_until_they_are_destroyed(cupy, comm, nccl):
    for group in (None, *nccl.wrong):
        with pytest.raises(InvalidTypeError, match=nccl.wanted):
            nccl.collectives(group, timeout=1.0)
    if nccl.is_cupys:
        of_cupyx = nccl.collectives(SimpleNamespace(_comm=comm), timeout=PATIENCE)
        assert of_cupyx.start_max(vector(cupy, 3, -4))().get().tolist() == [3, -4]
        comm.destroy()
        for call in (lambda: of_cupyx.start_max(vector(cupy, 1)), lambda: nccl.collectives(comm, timeout=1.0)):
            with pytest.raises(BackendError, match="was destroyed or aborted: pass another one"):
                call()


# CuPy's.


@of_cupy
@pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
def test_a_rank_that_never_comes_is_a_timeout_that_aborts_the_communicator(cupy, nccl, in_world, connects: bool):
    def run(comm):
        if not connects:
            nccl.collectives(comm, timeout=PATIENCE).start_max(vector(cupy, 1, 2))()
        if comm.rank_id() == 1:
            return comm
        with pytest.raises(CollectiveTimeoutError) as raised:
            nccl.collectives(comm, timeout=0.05).start_max(vector(cupy, 1, 2))()
        assert (raised.value.rank, raised.value.size, getattr(raised.value, "__notes__", [])) == (0, 2, [])
        return comm

    lost, late = in_world(2, run)
    found = [comm.comm == 0 for comm in (lost, late)]
    for comm in (lost, late):
        if comm.comm:
            # Else the device waits for ever, and what waits for the device.
            comm.abort()
    assert found == [True, False]
    with pytest.raises(BackendError, match=r"given up, and it was aborted: pass another one(.|\n)*CollectiveTime"):
        nccl.collectives(lost, timeout=PATIENCE)


@of_cupy
def test_an_error_of_cuda_says_what_a_collective_was_doing(cupy, comm, nccl, monkeypatch: pytest.MonkeyPatch):
    collectives, x = nccl.collectives(comm, timeout=PATIENCE), vector(cupy, 1)
    pending, failing = collectives.start_max(np.ones(1, dtype=np.int32)), cupy.cuda.runtime.CUDARuntimeError(700)
    for name, done, call in (("asnumpy", "read", pending), ("array", "begun", lambda: collectives.start_max(x))):
        monkeypatch.setattr(cupy, name, mock.Mock(side_effect=failing))
        with pytest.raises(BackendError, match=f"while an agreement over NCCL was {done}: cudaErrorIllegalAddress"):
            call()


@of_cupy
def test_what_cannot_be_reduced_is_an_error_before_it_is_sent(cupy, comm, nccl):
    collectives = nccl.collectives(comm, timeout=PATIENCE)
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


@of_cupy
def test_a_rank_without_arrays_takes_part_with_cupys(cupy, nccl, in_world):
    def run(comm):
        with cupy.cuda.Device(0):
            example = nccl.collectives(comm, timeout=1.0).example()
        return example.shape, example.dtype, example.device.id

    assert in_world(2, run) == [((), np.float32, rank) for rank in range(2)]
    assert isinstance(nccl.adapter.backend, GroupBackend)


# nccl4py's.


@of_nccl4py
@pytest.mark.parametrize("lost", range(3))
def test_the_ranks_that_are_left_shrink_the_communicator_and_go_on(cupy, in_world, lost: int):
    recipe = run_on(PAGE, "nccl4py_shrink", gradscale=gradscale)

    def run(comm):
        scaler = ShardedGradScaler(group=comm, timeout=3.0)
        before = train(scaler, cupy, 1.0)
        if comm.rank == lost:
            return before
        optimizer = Tree([vector(cupy, 1).astype(np.float32)])
        scaler.scale(cupy.ones((), dtype=np.float32))
        fewer = recipe["step_or_shrink"](scaler, optimizer, comm, lambda: [lost])
        assert optimizer.steps == 0
        after = train(scaler, cupy, math.inf if fewer.rank == 0 else 1.0, 1.0)
        return before, after, fewer.rank, fewer.nranks

    found = in_world(3, run)
    before = [1], 65536.0
    assert found.pop(lost) == before
    assert found == [(before, ([0, 1], 32768.0), rank, 2) for rank in range(2)]


@of_nccl4py
@pytest.mark.parametrize("revokes", [True, False], ids=["revoked", "aborted"])
def test_a_device_that_is_late_ends_in_the_timeout_and_a_communicator_that_is_not_aborted_can_be_split(
    cupy, comm, nccl, revokes: bool, monkeypatch: pytest.MonkeyPatch
):
    from nccl.bindings import nccl as bindings

    def missing(*_):
        msg = "function ncclCommRevoke is not found"
        raise RuntimeError(msg)

    if not revokes:
        monkeypatch.setattr(bindings, "comm_revoke", missing)
    nccl.collectives(comm, timeout=PATIENCE).start_max(vector(cupy, 1))()
    stall(cupy, 1000)
    with pytest.raises(CollectiveTimeoutError) as raised:
        nccl.collectives(comm, timeout=0.05).start_max(vector(cupy, 1))()
    assert (comm.is_valid, getattr(raised.value, "__notes__", [])) == (revokes, [])
    with pytest.raises(BackendError if revokes else InvalidTypeError, match="was aborted" if revokes else nccl.wanted):
        nccl.collectives(comm, timeout=1.0)
    if revokes:
        cupy.cuda.Device().synchronize()
        # To shrink, NCCL needs a rank to exclude.
        split = nccl.collectives(comm.split(0, 0), timeout=PATIENCE)
        assert split.start_max(vector(cupy, 3, -4))().tolist() == [3, -4]


@of_nccl4py
def test_what_the_device_still_writes_is_kept_until_it_has_and_no_longer(
    cupy, comm, nccl, monkeypatch: pytest.MonkeyPatch
):
    collectives = nccl.collectives(comm, timeout=PATIENCE)
    view_of, copies = nccl.adapter.StridedMemoryView.from_dlpack, []

    def from_dlpack(copy, stream: int):
        copies.append(weakref.ref(copy))
        return view_of(copy, stream)

    monkeypatch.setattr(nccl.adapter, "StridedMemoryView", SimpleNamespace(from_dlpack=from_dlpack))
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


@of_nccl4py
def test_a_rank_without_arrays_is_asked_for_its_library_and_one_of_the_cpu_is_an_error(comm, nccl):
    with pytest.raises(CallOrderError, match="pass backend="):
        ShardedGradScaler(group=comm).step(Tree([None]))
    assert isinstance(nccl.adapter.backend, GroupBackend)
    with pytest.raises(BackendError, match=r"NCCL failed on rank 0 of 1 .*: NumPy only supports stream=None"):
        nccl.collectives(comm, timeout=PATIENCE).start_max(np.ones(1, np.int32))
