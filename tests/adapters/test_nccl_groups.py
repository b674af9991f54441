"""What agreement over NCCL is by CuPy's and by NCCL's own bindings: a stand-in for NCCL, with threads as ranks.

Nothing here runs on a device. What each of them does besides is in test_cupy_nccl.py and test_nccl4py.py.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import host_cupy
import host_nccl
import numpy as np
import pytest
from axes import require
from host_nccl import NcclCommunicator, NcclError, World
from optimizers import Tree

from gradscale import BackendError, CollectiveTimeoutError, ShardedGradScaler
from gradscale.core.protocols import GroupBackend
from gradscale.testing import check_collectives, run_ranks

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

SIZES = pytest.mark.parametrize("size", [2, 3], ids=["ranks-2", "ranks-3"])
CONNECTS = pytest.mark.parametrize("connects", [False, True], ids=["waiting", "connecting"])
PATIENCE = 20.0
SHORT = 0.05


class Bindings(NamedTuple):
    """The adapter, what makes a group of a communicator of the stand-in, and in how many aborts it ends."""

    backend: GroupBackend
    bind: Callable[[NcclCommunicator], Any]
    aborts: int

    def alone(self, world: World, timeout: float = SHORT):
        """Return rank 0 of a world to which no other rank ever comes, its communicator, and the group of it."""
        comm = NcclCommunicator(world.size, world, 0)
        group = self.bind(comm)
        return self.backend.collectives(group, timeout=timeout), comm, group

    def assert_ended(self, comm: NcclCommunicator):
        assert (comm.aborts, comm.is_revoked) == (self.aborts, not self.aborts)


@contextmanager
def opened(name: str):
    """Install the stand-in under bindings, and yield these."""
    if name == "cupy":
        with host_nccl.installed(devices=3):
            yield Bindings(importlib.import_module("gradscale_cupy.nccl").backend, lambda comm: comm, 1)
        return
    require("nccl4py")
    with host_nccl.bindings_installed() as bind:
        yield Bindings(importlib.import_module("gradscale_nccl").backend, bind, 0)


@pytest.fixture(params=["cupy", "nccl4py"])
def bindings(request: pytest.FixtureRequest):
    with opened(request.param) as found:
        yield found


# NCCL's own take arrays of any library, here on the CPU.
OWN = {"numpy": (), "torch": pytest.mark.torch, "jax.numpy": pytest.mark.jax}
LIBRARIES = pytest.mark.parametrize(
    ("name", "library"),
    [
        *(("cupy", name) for name in ("cupy", "numpy")),
        *(pytest.param("nccl4py", name, marks=OWN[name]) for name in OWN),
    ],
)


def on_ranks(world: World, act: Callable[[NcclCommunicator], Any]):
    """Call something with the communicator of each rank, on its device; results, or exceptions."""

    def run(group):
        host_cupy.Device(group.rank).use()
        return act(NcclCommunicator(world.size, world, group.rank))

    return run_ranks(world.size, run, return_exceptions=True)


def vector(*values: int):
    return np.array(values, dtype=np.int32)


@SIZES
@LIBRARIES
@pytest.mark.parametrize(("delay", "connects"), [(0.0, False), (0.002, True)], ids=["at-once", "later"])
def test_the_collectives_pass_the_conformance_suite(name: str, library: str, size: int, delay: float, connects: bool):
    with opened(name) as bindings:
        xp = pytest.importorskip(library)

        def act(comm):
            collectives = bindings.backend.collectives(bindings.bind(comm), timeout=PATIENCE)
            check_collectives(collectives, xp.zeros(1), repetitions=10)

        assert on_ranks(World(size, delay, connects), act) == [None] * size


@SIZES
@LIBRARIES
def test_a_bad_value_on_each_rank_in_turn_skips_the_step_on_every_rank(name: str, library: str, size: int):
    def run(comm, bad_rank: int | None):
        scaler = ShardedGradScaler(group=bindings.bind(comm), timeout=PATIENCE)
        bad = math.inf if comm.rank_id() == bad_rank else 1.0
        optimizer = Tree([xp.asarray([1.0, bad], dtype=xp.float32)])
        scaler.scale(xp.asarray(1.0, dtype=xp.float32))
        scaler.step(optimizer)
        scaler.update()
        return optimizer.steps, scaler.get_scale()

    with opened(name) as bindings:
        xp = pytest.importorskip(library)
        for bad_rank in (*range(size), None):
            found = on_ranks(World(size, 0.001), functools.partial(run, bad_rank=bad_rank))
            assert found == [(1, 65536.0) if bad_rank is None else (0, 32768.0)] * size


@SIZES
@CONNECTS
def test_a_rank_that_never_comes_is_a_timeout_that_ends_the_group_once(bindings: Bindings, size: int, connects: bool):
    collectives, comm, group = bindings.alone(World(size, connects=connects))
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"waited 0\.05 s for the agreement on a step") as raised:
        collectives.start_max(vector(1, 2))()
    assert SHORT <= time.monotonic() - begin < PATIENCE
    assert (raised.value.rank, raised.value.size, raised.value.seconds) == (0, size, SHORT)
    with pytest.raises(BackendError, match=r"given up, and it was aborted: pass another one(.|\n)*CollectiveTime"):
        collectives.start_max(vector(1, 2))
    with pytest.raises(BackendError, match="given up"):
        bindings.backend.collectives(group, timeout=PATIENCE)
    bindings.assert_ended(comm)


@CONNECTS
@pytest.mark.parametrize("status", [6, 7], ids=["remote-error", "not-blocking"])
def test_an_asynchronous_error_is_raised_with_nccls_text_and_ends_the_group_once(
    bindings: Bindings, status: int, connects: bool
):
    world = World(2, connects=connects)
    collectives, comm, _ = bindings.alone(world, PATIENCE)
    threading.Timer(0.05, lambda: setattr(world, "async_status", status)).start()
    begin = time.monotonic()
    texts = {
        6: "NCCL_ERROR_REMOTE_ERROR: remote process exited",
        7: "NCCL's status 7 .* the communicator does not block",
    }
    text = texts[status] if bindings.aborts else rf"(RemoteError|InProgress) \({status}\): NCCL's text"
    with pytest.raises(BackendError, match=f"NCCL failed on rank 0 of 2 .*: {text}"):
        collectives.start_max(vector(1))()
    assert time.monotonic() - begin < PATIENCE / 2
    bindings.assert_ended(comm)


def test_a_device_that_has_failed_is_its_error_and_no_timeout(bindings: Bindings):
    collectives, comm, _ = bindings.alone(World(2), PATIENCE)
    pending = collectives.start_max(vector(1))
    host_cupy.Event.broken = 700
    with pytest.raises(BackendError, match="cudaErrorIllegalAddress"):
        pending()
    bindings.assert_ended(comm)


def test_what_was_under_way_at_a_timeout_is_no_answer_though_the_kernel_has_ended(bindings: Bindings):
    collectives, _, _ = bindings.alone(World(2))
    first, second = (collectives.start_max(vector(k)) for k in range(2))
    with pytest.raises(CollectiveTimeoutError):
        first()
    for pending in (first, second):
        with pytest.raises(BackendError, match="given up"):
            pending()


def test_an_answer_that_comes_with_an_error_is_not_believed(bindings: Bindings):
    collectives, comm, _ = bindings.alone(World(1), PATIENCE)
    pending = collectives.start_max(vector(1))
    comm.world.async_status = 3
    with pytest.raises(BackendError, match=r"NCCL_ERROR_INTERNAL_ERROR|InternalError \(3\)"):
        pending()
    bindings.assert_ended(comm)


@CONNECTS
def test_ctrl_c_ends_the_wait_and_the_group(bindings: Bindings, connects: bool):
    collectives, comm, _ = bindings.alone(World(2, connects=connects), math.inf)

    def interrupt():
        while not comm.issued_by:
            time.sleep(1e-3)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        collectives.start_max(vector(1))()
    bindings.assert_ended(comm)
    with pytest.raises(BackendError, match="KeyboardInterrupt"):
        collectives.start_max(vector(1))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.5, r"the communicator was not aborted within 0\.01 s: end this process"),
        (None, "the communicator could not be aborted: .*(internal error|InternalError).*: end this process"),
    ],
    ids=["hangs", "fails"],
)
def test_an_end_that_does_not_work_hides_no_error(
    bindings: Bindings, seconds: float | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    def end():
        if seconds is None:
            raise NcclError(3)
        time.sleep(seconds)

    monkeypatch.setattr("gradscale.waiting._ABORTING", 0.01 if seconds else 10.0)
    collectives, comm, _ = bindings.alone(World(2))
    for name in ("abort", "revoke"):
        monkeypatch.setattr(comm, name, end)
    with pytest.raises(CollectiveTimeoutError, match="agreement on a step") as raised:
        collectives.start_max(vector(1))()
    (note,) = raised.value.__notes__
    assert re.fullmatch(said, note), note
