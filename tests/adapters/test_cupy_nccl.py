"""DeviceCollectives over a stand-in for CuPy and NCCL, with threads as ranks: answers, waits, and every way to end.

Nothing here runs on a device.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import host_cupy
import host_nccl
import numpy as np
import pytest
from host_nccl import NcclCommunicator, World
from optimizers import Tree

from gradscale import BackendError, BackendNotAvailableError, CallOrderError, ShardedGradScaler
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError, InvalidValueError

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

PATIENCE = 20.0
SHORT = 0.05


@pytest.fixture
def cupy():
    with host_nccl.installed(devices=3) as module:
        yield module


@pytest.fixture
def adapter(cupy):  # noqa: ARG001
    from gradscale_cupy import nccl

    return nccl


def vector(cupy, values: list[int]):
    return cupy.asarray(values, dtype=np.int32)


def alone(adapter, world: World, timeout: float = SHORT):
    """Return rank 0 of a world to which no other rank ever comes, and its communicator."""
    comm = NcclCommunicator(world.size, world, 0)
    return adapter.backend.collectives(comm, timeout=timeout), comm


def test_a_backend_of_cupyx_sends_over_its_communicator(cupy, adapter):
    comm = NcclCommunicator(1, World(1), 0)
    collectives = adapter.backend.collectives(SimpleNamespace(_comm=comm), timeout=PATIENCE)
    assert collectives.start_max(vector(cupy, [3, -4]))().get().tolist() == [3, -4]
    assert len(comm.issued_by) == 1


def test_an_error_of_nccls_is_raised_with_its_text(cupy, adapter, monkeypatch: pytest.MonkeyPatch):
    collectives, comm = alone(adapter, World(2))
    monkeypatch.setattr(comm, "allReduce", lambda *_: comm.check_async_error())
    comm.world.async_status = 4
    with pytest.raises(BackendError, match="NCCL_ERROR_INVALID_ARGUMENT"):
        collectives.start_max(vector(cupy, [1]))
    assert comm.aborts == 1


@pytest.mark.tier("quick")
def test_starting_waits_for_nothing_but_the_first_of_each_length(cupy, adapter):
    collectives, comm = alone(adapter, World(2))
    for length in (2, 2, 2, 3):
        collectives.start_max(vector(cupy, [1] * length))
    here = threading.current_thread().name
    assert comm.issued_by == ["gradscale", here, here, "gradscale"]
    assert cupy.cuda.Event.queries == []


@pytest.mark.tier("quick")
def test_a_stream_of_each_thread_is_used_in_this_one(cupy, adapter, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_cupy.Stream, "ptr", 2)
    collectives, comm = alone(adapter, World(1))
    collectives.start_max(vector(cupy, [1]))
    assert comm.issued_by == [threading.current_thread().name]


def test_what_nccl_reads_is_a_copy_of_its_own_whatever_becomes_of_the_array(cupy, adapter):
    collectives, _ = alone(adapter, World(1, delay=0.01), PATIENCE)
    # Such as torch's, which hands memory on as soon as nobody holds it.
    memory = np.array([3, -4], dtype=np.int32)
    pending = collectives.start_max(host_cupy.Ndarray(memory, cupy.cuda.Device()))
    memory[:] = 7
    assert pending().get().tolist() == [3, -4]


def test_errors_of_cuda_are_said_where_a_collective_is_begun_and_read(cupy, adapter, monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **_options):
        raise cupy.cuda.runtime.CUDARuntimeError(700)

    collectives, _ = alone(adapter, World(1), PATIENCE)
    pending = collectives.start_max(np.ones(1, dtype=np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "asnumpy", fail)
        with pytest.raises(BackendError, match="while an agreement over NCCL was read: cudaErrorIllegalAddress"):
            pending()
    x = vector(cupy, [1])
    monkeypatch.setattr(cupy, "array", fail)
    with pytest.raises(BackendError, match="while an agreement over NCCL was begun: cudaErrorIllegalAddress"):
        collectives.start_max(x)


def test_a_step_over_two_groups_waits_for_each_once(cupy, adapter):
    groups = [alone(adapter, World(1, delay=0.01), PATIENCE)[0] for _ in range(2)]
    scaler, optimizer = ShardedGradScaler(group=groups), Tree([cupy.ones(1, dtype=np.float32)])
    for _ in range(2):
        # The first step compares the ranks' versions, too.
        scaler.scale(cupy.ones((), dtype=np.float32))
        cupy.cuda.Event.queries.clear()
        scaler.unscale_(optimizer)
        is_waiting = bool(cupy.cuda.Event.queries)
        cupy.cuda.Event.queries.clear()
        scaler.step(optimizer)
        scaler.update()
    assert (is_waiting, optimizer.steps, len(set(cupy.cuda.Event.queries))) == (False, 2, 2)


@pytest.mark.parametrize("library", ["cupy", "numpy"])
def test_a_result_is_of_the_given_library_and_waited_for_once(cupy, adapter, library: str):
    collectives, _ = alone(adapter, World(1, delay=0.001), PATIENCE)
    xp = cupy if library == "cupy" else np
    x = xp.asarray([0, 1, 2, 3, 4], dtype=np.int32)[::2]
    pending = collectives.start_max(x)
    result = pending()
    assert (type(result), cupy.asarray(result).get().tolist()) == (type(x), [0, 2, 4])
    count = len(cupy.cuda.Event.queries)
    assert pending() is result
    assert len(cupy.cuda.Event.queries) == count


def test_what_cannot_be_reduced_is_an_error_before_it_is_sent(cupy, adapter):
    collectives, comm = alone(adapter, World(2))
    for values, dtype, text in (([1], np.int64, "1-d int64"), ([[1]], np.int32, "2-d int32"), (1, np.int32, "0-d")):
        for xp in (cupy, np):
            with pytest.raises(InvalidValueError, match=f"only 1-d int32 arrays are reduced, got {text}"):
                collectives.start_max(xp.asarray(values, dtype=dtype))
    with cupy.cuda.Device(1):
        away = vector(cupy, [1])
    with pytest.raises(InvalidValueError, match="device, CUDA device 0, got an array on CUDA device 1"):
        collectives.start_max(away)
    x = vector(cupy, [1])
    cupy.capturing.add(0)
    with pytest.raises(CallOrderError, match="an agreement over NCCL cannot be part of a CUDA graph"):
        collectives.start_max(x)
    assert (comm.issued_by, comm.aborts) == ([], 0)


@pytest.mark.parametrize("group", [None, "world", SimpleNamespace(_comm=None)], ids=["none", "text", "empty"])
def test_what_is_no_communicator_is_an_error(adapter, group):
    with pytest.raises(InvalidTypeError, match=r"NcclCommunicator or a cupyx\.distributed\.NCCLBackend that holds one"):
        adapter.backend.collectives(group, timeout=1.0)


def test_a_destroyed_communicator_is_an_error(cupy, adapter):
    collectives, comm = alone(adapter, World(1), PATIENCE)
    comm.destroy()
    for call in (
        lambda: collectives.start_max(vector(cupy, [1])),
        lambda: adapter.backend.collectives(comm, timeout=1.0),
    ):
        with pytest.raises(BackendError, match="was destroyed or aborted: pass another one"):
            call()


@pytest.mark.parametrize(
    ("driver", "said"),
    [(13020, "python -m pip install nvidia-nccl-cu13$"), (0, "no CUDA driver here: install NVIDIA's driver")],
    ids=["library", "device"],
)
def test_what_is_missing_is_named(cupy, adapter, driver: int, said: str):
    cupy.cuda.nccl.available = False
    cupy.cuda.runtime.driverGetVersion = lambda: driver
    cupy.cuda.runtime.getDeviceCount = lambda: 2 if driver else 0
    with pytest.raises(BackendNotAvailableError, match=said):
        adapter.backend.collectives(None, timeout=1.0)


def test_a_rank_without_arrays_takes_part_with_cupys(cupy, adapter):
    with cupy.cuda.Device(1):
        comm = NcclCommunicator(2, World(2), 1)
    collectives = adapter.backend.collectives(comm, timeout=1.0)
    example = collectives.example()
    assert (example.shape, example.dtype, example.device.id) == ((), np.float32, 1)
    assert repr(collectives) == f"DeviceCollectives({comm!r}, rank=1, size=2)"
    assert isinstance(adapter.backend, GroupBackend)
