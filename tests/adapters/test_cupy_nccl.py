"""NCCLCollectives over a stand-in for CuPy and NCCL, with threads as ranks: answers, waits, and every way to end.

Nothing here runs on a device.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_nccl
import numpy as np
import pytest
from fake_nccl import Event, World

import gradscale
from gradscale import BackendError, BackendNotAvailableError, CallOrderError, CollectiveTimeoutError
from gradscale.core.backend import Backend
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.testing import check_collectives, run_ranks

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

SIZES = pytest.mark.parametrize("size", [2, 3], ids=["ranks-2", "ranks-3"])
PATIENCE = 20.0
SHORT = 0.05


@pytest.fixture
def fake() -> Iterator[SimpleNamespace]:
    with fake_nccl.installed() as modules:
        yield modules


def vector(fake: SimpleNamespace, values: list[int], device: int = 0) -> Any:
    with fake.cupy.cuda.Device(device):
        return fake.cupy.asarray(values, dtype=np.int32)


def on_ranks(fake: SimpleNamespace, world: World, act: Callable[[Any], Any], timeout: float = PATIENCE) -> list[Any]:
    """Call something with the collectives of each rank, on its device; results, or exceptions."""
    communicators = world.communicators()

    def run(group: Any) -> Any:
        fake.cupy.cuda.Device(group.rank).use()
        return act(fake.nccl.NCCLCollectives(communicators[group.rank], timeout))

    return run_ranks(world.size, run, return_exceptions=True)


def alone(fake: SimpleNamespace, world: World, timeout: float = SHORT) -> tuple[Any, Any]:
    """Return rank 0 of a world to which no other rank ever comes, and its communicator."""
    comm = world.communicators()[0]
    return fake.nccl.NCCLCollectives(comm, timeout), comm


@SIZES
@pytest.mark.parametrize("delay", [0.0, 0.002], ids=["at-once", "later"])
@pytest.mark.parametrize("connects", [False, True], ids=["connected", "connecting"])
def test_the_collectives_pass_the_conformance_suite(
    fake: SimpleNamespace, size: int, delay: float, connects: bool
) -> None:
    def act(collectives: Any) -> str:
        check_collectives(collectives, vector(fake, [0], collectives.rank), repetitions=10)
        return "passed"

    assert on_ranks(fake, World(size, delay, connects), act) == ["passed"] * size


@SIZES
def test_arrays_of_numpy_pass_the_conformance_suite(fake: SimpleNamespace, size: int) -> None:
    results = on_ranks(fake, World(size, 0.001), lambda one: check_collectives(one, np.zeros(1), repetitions=10))
    assert results == [None] * size


def test_a_wrong_maximum_fails_the_conformance_suite(fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_nccl.np, "max", np.min)
    results = on_ranks(fake, World(2), lambda one: check_collectives(one, vector(fake, [0], one.rank), repetitions=1))
    assert "MAX must give" in str(results[0])


class Optimizer:
    def __init__(self, grads: list[Any]) -> None:
        self.grads = grads
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


@SIZES
@pytest.mark.parametrize("wrap", [lambda comm: comm, fake_nccl.NCCLBackend], ids=["communicator", "cupyx"])
def test_a_bad_value_on_each_rank_in_turn_skips_the_step_on_every_rank(
    fake: SimpleNamespace, size: int, wrap: Callable[[Any], Any]
) -> None:
    for bad_rank in (*range(size), None):
        communicators = World(size, 0.001).communicators()

        def run(group: Any, bad_rank: int | None = bad_rank, communicators: list[Any] = communicators) -> Any:
            with fake.cupy.cuda.Device(group.rank):
                collectives = fake.nccl.backend.collectives(wrap(communicators[group.rank]), timeout=PATIENCE)
                scaler = gradscale.ShardedGradScaler(group=collectives, backend=Backend())
                optimizer = Optimizer([fake.cupy.asarray([1.0, 2.0], dtype=np.float32) for _ in range(3)])
                scaler.scale(fake.cupy.asarray(1.0, dtype=np.float32))
                if group.rank == bad_rank:
                    optimizer.grads[1] = optimizer.grads[1] * np.float32(math.inf)
                scaler.step(optimizer)
                scaler.update()
                return optimizer.steps, scaler.last_step(optimizer).skipped, scaler.state_dict()["scale"]

        expected = (1, False, 65536.0) if bad_rank is None else (0, True, 32768.0)
        assert run_ranks(size, run) == [expected] * size


@SIZES
def test_a_rank_that_never_comes_is_a_timeout_that_aborts_once(fake: SimpleNamespace, size: int) -> None:
    collectives, comm = alone(fake, World(size))
    pending = collectives.start_max(vector(fake, [1, 2]))
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.05 s for the agreement on a step") as raised:
        pending()
    assert SHORT <= time.monotonic() - begin < PATIENCE
    assert (raised.value.rank, raised.value.size, raised.value.seconds) == (0, size, SHORT)
    # What was under way is no answer, though the kernel has ended.
    for call in (pending, lambda: collectives.start_max(vector(fake, [1, 2]))):
        with pytest.raises(BackendError, match=r"given up, and it was aborted: pass another one(.|\n)*CollectiveTime"):
            call()
    with pytest.raises(BackendError, match="given up"):
        fake.nccl.NCCLCollectives(comm, PATIENCE)
    assert comm.aborts == 1


def test_the_scaler_names_the_iteration_of_a_timeout(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2))
    scaler = gradscale.ShardedGradScaler(group=collectives, backend=Backend())
    scaler.scale(fake.cupy.asarray(1.0, dtype=np.float32))
    optimizer = Optimizer([fake.cupy.asarray([1.0], dtype=np.float32)])
    with pytest.raises(CollectiveTimeoutError, match="in iteration 1"):
        scaler.step(optimizer)
    assert (comm.aborts, optimizer.steps) == (1, 0)


def test_a_rank_that_does_not_connect_is_a_timeout_as_well(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2, connects=True))
    with pytest.raises(CollectiveTimeoutError, match="some rank never came"):
        collectives.start_max(vector(fake, [1]))
    assert comm.aborts == 1


@pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
@pytest.mark.parametrize(
    ("status", "text"),
    [(6, "NCCL_ERROR_REMOTE_ERROR: remote process exited"), (7, "NCCL's status 7 .* the communicator does not block")],
    ids=["remote-error", "status-without-a-name"],
)
def test_an_asynchronous_error_is_raised_with_nccls_text_and_aborts_once(
    fake: SimpleNamespace, status: int, text: str, connects: bool
) -> None:
    world = World(2, connects=connects)
    collectives, comm = alone(fake, world, PATIENCE)
    threading.Timer(0.05, lambda: setattr(world, "async_status", status)).start()
    begin = time.monotonic()
    with pytest.raises(BackendError, match=f"NCCL failed on rank 0 of 2 .*: {text}") as raised:
        collectives.start_max(vector(fake, [1]))()
    assert time.monotonic() - begin < PATIENCE / 2
    assert isinstance(raised.value.__cause__, (fake_nccl.NcclError, KeyError))
    assert comm.aborts == 1


def test_an_answer_that_comes_with_an_error_is_not_believed(fake: SimpleNamespace) -> None:
    world = World(1)
    collectives, comm = alone(fake, world, PATIENCE)
    pending = collectives.start_max(vector(fake, [1]))
    world.async_status = 3
    with pytest.raises(BackendError, match="NCCL_ERROR_INTERNAL_ERROR"):
        pending()
    assert comm.aborts == 1


def test_a_device_that_has_failed_is_its_error_and_no_timeout(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2), PATIENCE)
    pending = collectives.start_max(vector(fake, [1]))
    Event.broken = 700
    with pytest.raises(BackendError, match="cudaErrorIllegalAddress"):
        pending()
    assert comm.aborts == 1


def test_a_refusal_of_nccls_is_raised_with_its_text(fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise fake_nccl.NcclError(4)

    collectives, comm = alone(fake, World(2))
    monkeypatch.setattr(comm, "allReduce", refuse)
    with pytest.raises(BackendError, match="NCCL_ERROR_INVALID_ARGUMENT"):
        collectives.start_max(vector(fake, [1]))
    assert comm.aborts == 1


@pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
def test_ctrl_c_ends_the_wait_and_aborts(fake: SimpleNamespace, connects: bool) -> None:
    collectives, comm = alone(fake, World(2, connects=connects), math.inf)

    def interrupt() -> None:
        while not comm.issued_on:
            time.sleep(1e-3)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        collectives.start_max(vector(fake, [1]))()
    assert comm.aborts == 1
    with pytest.raises(BackendError, match="KeyboardInterrupt"):
        collectives.start_max(vector(fake, [1]))


def test_ctrl_c_before_the_wait_aborts_as_well(fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    collectives, comm = alone(fake, World(2, connects=True), math.inf)
    monkeypatch.setattr(collectives, "_poll", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        collectives.start_max(vector(fake, [1]))
    assert comm.aborts == 1


def test_an_abort_that_hangs_does_not_hide_the_error(fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.nccl, "_ABORTING", 0.01)
    collectives, _ = alone(fake, World(2, abort_seconds=0.5))
    with pytest.raises(CollectiveTimeoutError) as raised:
        collectives.start_max(vector(fake, [1]))()
    assert raised.value.__notes__ == ["NCCL has not aborted the communicator within 0.01 s: end this process"]


def test_an_abort_that_fails_does_not_hide_the_error(fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fake_nccl.NcclError(3)

    collectives, comm = alone(fake, World(2))
    monkeypatch.setattr(comm, "abort", fail)
    with pytest.raises(CollectiveTimeoutError) as raised:
        collectives.start_max(vector(fake, [1]))()
    assert "could not be aborted: NCCL_ERROR_INTERNAL_ERROR" in raised.value.__notes__[0]


def test_starting_does_not_wait_once_the_ranks_are_connected(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2))
    with fake.cupy.cuda.Stream() as stream:
        for _ in range(3):
            collectives.start_max(vector(fake, [1, 2]))
        collectives.start_max(vector(fake, [1, 2, 3]))
    here = threading.current_thread().name
    # Each length's first may have to connect; all are on the current stream.
    assert comm.issued_on == [(name, stream.ptr) for name in ("gradscale NCCL", here, here, "gradscale NCCL")]
    assert Event.queries == []


def test_a_stream_of_each_thread_is_used_in_this_one(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(1))
    with fake.cupy.cuda.Stream() as stream:
        stream.ptr = 2
        collectives.start_max(vector(fake, [1]))
    assert comm.issued_on == [(threading.current_thread().name, 2)]


def test_a_step_over_two_groups_waits_for_each_once(fake: SimpleNamespace) -> None:
    groups = [alone(fake, World(1, delay=0.01), PATIENCE)[0] for _ in range(2)]
    scaler = gradscale.ShardedGradScaler(group=groups, backend=Backend())
    scaler.scale(fake.cupy.asarray(1.0, dtype=np.float32))
    optimizer = Optimizer([fake.cupy.asarray([1.0], dtype=np.float32)])
    scaler.unscale_(optimizer)
    assert Event.queries == []
    scaler.step(optimizer)
    assert (optimizer.steps, len(set(Event.queries))) == (1, 2)


def test_a_strided_vector_is_reduced(fake: SimpleNamespace) -> None:
    collectives, _ = alone(fake, World(1), PATIENCE)
    assert collectives.start_max(vector(fake, [0, 1, 2, 3, 4])[::2])().tolist() == [0, 2, 4]


def test_a_result_is_waited_for_once(fake: SimpleNamespace) -> None:
    collectives, _ = alone(fake, World(1), PATIENCE)
    for x in (vector(fake, [1, -2]), np.asarray([1, -2], np.int32)):
        Event.queries.clear()
        pending = collectives.start_max(x)
        result = pending()
        assert (type(result), result.tolist()) == (type(x), [1, -2])
        assert pending() is result
        assert len(Event.queries) == 1


def test_a_collective_is_not_captured(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2), PATIENCE)
    with fake.cupy.cuda.Stream() as stream:
        stream.is_captured = True
        with pytest.raises(CallOrderError, match="an agreement over NCCL cannot be part of a CUDA graph"):
            collectives.start_max(vector(fake, [1]))
    assert (comm.calls, comm.aborts) == (0, 0)


def test_an_array_on_another_device_is_refused_with_both(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2))
    x = vector(fake, [1], device=1)
    with pytest.raises(InvalidValueError, match="device, CUDA device 0, got an array on CUDA device 1"):
        collectives.start_max(x)
    assert (comm.calls, comm.aborts) == (0, 0)


def test_only_int32_vectors_travel(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(2))
    for values, dtype, text in (([1], np.int64, "1-d int64"), ([[1]], np.int32, "2-d int32"), (1, np.int32, "0-d")):
        for xp in (fake.cupy, np):
            with pytest.raises(InvalidValueError, match=f"only 1-d int32 arrays are reduced, got {text}"):
                collectives.start_max(xp.asarray(values, dtype=dtype))
    assert comm.calls == 0


@pytest.mark.parametrize("group", [None, "world", SimpleNamespace(_comm=None)], ids=["none", "text", "empty"])
def test_what_is_no_communicator_is_refused(fake: SimpleNamespace, group: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"NcclCommunicator or a cupyx\.distributed\.NCCLBackend that holds one"):
        fake.nccl.NCCLCollectives(group, 1.0)


def test_a_destroyed_communicator_is_refused(fake: SimpleNamespace) -> None:
    collectives, comm = alone(fake, World(1), PATIENCE)
    comm.comm = 0
    for call in (lambda: collectives.start_max(vector(fake, [1])), lambda: fake.nccl.NCCLCollectives(comm, 1.0)):
        with pytest.raises(BackendError, match="was destroyed or aborted: pass another one"):
            call()


@pytest.mark.parametrize(("version", "package"), [(12090, "nvidia-nccl-cu12"), (13020, "nvidia-nccl-cu13")])
def test_a_missing_library_is_named_with_its_package(fake: SimpleNamespace, version: int, package: str) -> None:
    comm = World(1).communicators()[0]
    fake.cupy.nccl.available = False
    vars(fake.cupy.runtime).update(runtimeGetVersion=lambda: version, getDeviceCount=lambda: 1)
    with pytest.raises(BackendNotAvailableError, match=f"python -m pip install {package}$"):
        fake.nccl.NCCLCollectives(comm, 1.0)


def test_a_rank_without_arrays_takes_part_with_cupys(fake: SimpleNamespace) -> None:
    collectives = fake.nccl.NCCLCollectives(World(2).communicators()[1], 1.0)
    example = collectives.example()
    assert (example.shape, example.dtype, example.device.id) == ((), np.float32, 1)
    assert repr(collectives) == "NCCLCollectives(rank=1, size=2, timeout=1.0)"
    assert isinstance(fake.nccl.backend, GroupBackend)
