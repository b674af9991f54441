"""gradscale_nccl over nccl4py itself and a stand-in for NCCL, with threads as ranks and real arrays of the CPU.

Nothing here runs on a device.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_cupy
import host_nccl
import numpy as np
import pytest
from axes import require
from commands import python
from host_nccl import NcclCommunicator, World
from optimizers import Tree
from recipe_blocks import run_on

import gradscale
from gradscale import BackendError, CallOrderError, CollectiveTimeoutError, ShardedGradScaler
from gradscale.core.protocols import GroupBackend
from gradscale.errors import InvalidTypeError
from gradscale.testing import run_ranks

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

PAGE = Path(__file__).parents[2] / "backends" / "gradscale_nccl" / "README.md"
PATIENCE = 20.0
SHORT = 0.05


@pytest.fixture
def bind():
    require("nccl4py")
    with host_nccl.bindings_installed() as found:
        yield found


def alone(bind: Callable[[NcclCommunicator], Any], world: World, timeout: float = SHORT):
    """Return rank 0 of a world to which no other rank ever comes, its communicator, and NCCL's."""
    from gradscale_nccl import backend

    comm = NcclCommunicator(world.size, world, 0)
    bound = bind(comm)
    return backend.collectives(bound, timeout=timeout), bound, comm


def vector(*values: int):
    return np.array(values, dtype=np.int32)


def step(scaler: ShardedGradScaler, xp, value: float) -> int:
    """Make an iteration with one gradient; return how many steps the optimizer has made in it."""
    optimizer = Tree([xp.asarray([1.0, value], dtype=xp.float32)])
    scaler.scale(xp.asarray(1.0, dtype=xp.float32))
    scaler.step(optimizer)
    scaler.update()
    return optimizer.steps


@pytest.mark.torch
def test_tensors_of_torch_need_no_cupy():
    require("nccl4py")
    require("torch")
    program = """
import sys
class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import host_nccl, test_nccl4py, torch
with host_nccl.bindings_installed() as bind:
    comm = bind(host_nccl.NcclCommunicator(1, host_nccl.World(1), 0))
    print(test_nccl4py.step(test_nccl4py.ShardedGradScaler(group=comm), torch, 1.0), "gradscale_cupy" in sys.modules)
"""
    completed = python("-c", program, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    assert (completed.stdout, completed.returncode) == ("1 False\n", 0), completed.stderr


@pytest.mark.parametrize("lost", range(3))
def test_the_ranks_that_are_left_shrink_the_communicator_and_go_on(bind, lost: int):
    recipe = run_on(PAGE, "nccl4py_shrink", gradscale=gradscale)

    world = World(3)

    def run(group):
        host_cupy.Device(group.rank).use()
        comm = bind(NcclCommunicator(3, world, group.rank))
        scaler = ShardedGradScaler(group=comm, timeout=1.0)
        steps = [step(scaler, np, 1.0)]
        if comm.rank == lost:
            return steps
        optimizer = Tree([np.float32([1.0])])
        scaler.scale(np.float32(1.0))
        fewer = recipe["step_or_shrink"](scaler, optimizer, comm, lambda: [lost])
        assert optimizer.steps == 0
        steps += [step(scaler, np, math.inf if fewer.rank == 0 else 1.0), step(scaler, np, 1.0)]
        return (*steps, fewer.rank, fewer.nranks, scaler.get_scale())

    found = run_ranks(3, run)
    assert found.pop(lost) == [1]
    assert found == [(1, 0, 1, rank, 2, 32768.0) for rank in range(2)]


def test_an_nccl_that_cannot_revoke_aborts(bind, monkeypatch: pytest.MonkeyPatch):
    from nccl.bindings import nccl as bindings

    def missing(*_):
        msg = "function ncclCommRevoke is not found"
        raise RuntimeError(msg)

    monkeypatch.setattr(bindings, "comm_revoke", missing)
    collectives, bound, comm = alone(bind, World(2))
    with pytest.raises(CollectiveTimeoutError) as raised:
        collectives.start_max(vector(1))()
    assert (comm.aborts, bound.is_valid, getattr(raised.value, "__notes__", [])) == (1, False, [])


def test_a_communicator_that_does_not_block_is_an_error_before_an_answer_is_believed(bind):
    world = World(1)
    collectives, _, _ = alone(bind, world, PATIENCE)
    world.async_status = 7
    with pytest.raises(BackendError, match=r"InProgress \(7\): NCCL's text"):
        collectives.start_max(vector(1))


def test_what_the_device_still_writes_is_kept_until_it_has_and_no_longer(bind, monkeypatch: pytest.MonkeyPatch):
    import gradscale_nccl

    collectives, _, _ = alone(bind, World(1, delay=0.01), PATIENCE)
    view_of, copies = gradscale_nccl.StridedMemoryView.from_dlpack, []

    def from_dlpack(copy, stream: int):
        copies.append(weakref.ref(copy))
        return view_of(copy, stream)

    monkeypatch.setattr(gradscale_nccl, "StridedMemoryView", SimpleNamespace(from_dlpack=from_dlpack))
    x = vector(3, -4)
    collectives.start_max(x)
    pending = collectives.start_max(x)
    x[:] = 7
    gc.collect()
    assert [copy() is None for copy in copies] == [False, False]
    assert pending().tolist() == [3, -4]
    del pending
    gc.collect()
    assert [copy() is None for copy in copies] == [False, True]


def test_an_array_elsewhere_is_an_error_of_nccl4pys(bind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_nccl.CoreDevice, "device_id", 0)
    collectives, _, comm = alone(bind, World(1), PATIENCE)
    with pytest.raises(BackendError, match="sendbuf is on device -1, but communicator is on device 0"):
        collectives.start_max(vector(1))
    assert comm.issued_by == []


def test_a_rank_without_arrays_is_asked_for_its_library(bind):
    from gradscale_nccl import backend

    _, bound, _ = alone(bind, World(1))
    with pytest.raises(CallOrderError, match="pass backend="):
        ShardedGradScaler(group=bound).step(Tree([None]))
    assert isinstance(backend, GroupBackend)


def test_what_is_no_communicator_is_an_error(bind):
    from nccl.core import Communicator, get_unique_id

    from gradscale_nccl import backend

    _, destroyed, _ = alone(bind, World(1))
    destroyed.abort()
    for group in (None, get_unique_id(empty=True), Communicator(), destroyed):
        with pytest.raises(InvalidTypeError, match=r"must be an nccl\.core\.Communicator that was not destroyed"):
            backend.collectives(group, timeout=1.0)
