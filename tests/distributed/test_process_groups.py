"""Groups of processes, under MPI and over torch's gloo: what may be one, what passes, and programs that end badly."""

import contextlib
import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import ran
from scenarios import (
    SGD,
    WAYS_IN_A_GRID,
    alone_in_a_grid,
    begun,
    fresh,
    gradients,
    is_mpi,
    iterate,
    play,
    raised,
    rank_and_size,
    tell,
    wait_for,
)
from tiers import later
from worlds import GlooWorld, MPIWorld, ProcessWorld, agree, free_port, mpi_command, mpi_environment

import gradscale
from gradscale import registry

with contextlib.suppress(ImportError):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    import gradscale_torch
    from gradscale_torch import groups as adapter

pytestmark = pytest.mark.tier("ranks")

mpi_only = pytest.mark.mpi
torch_only = pytest.mark.torch

BackendError, InvalidValueError = gradscale.BackendError, gradscale.InvalidValueError


def start_largest(group) -> Callable[[], list[int]]:
    """Start the user's own message; what waits for it returns the largest rank, 16 times."""
    mine = np.full(16, rank_and_size(group)[0], np.int32)
    if is_mpi(group):
        from mpi4py import MPI

        theirs = np.zeros_like(mine)
        request = group.Iallreduce(mine, theirs, op=MPI.MAX)
        return lambda: (request.Wait(), theirs.tolist())[1]
    tensor = torch.from_numpy(mine)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return lambda: (work.wait(), tensor.tolist())[1]


def refused(group, kind: type[Exception], *said: str):
    """Assert that something cannot be the group of a scaler."""
    raised(kind, lambda: gradscale.ShardedGradScaler(group=group, timeout=0.5), *said)


def skips(group, bad: bool, reached: bool = True):
    """Make an iteration that overflows on some rank; assert that this rank skips, if it is one that is reached."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    report = iterate(scaler, SGD(None), gradients("numpy", np.nan if bad else 1.0))
    assert (report.skipped, scaler.get_scale()) == ((True, 2.0**15) if reached else (False, 2.0**16))


# Over MPI and gloo.


def overlapped(group):
    """Use the group between unscale_ and step, blocking and not, as gradient clipping does."""
    largest = [rank_and_size(group)[1] - 1] * 16
    _, scaler, optimizer = begun(group)
    for iteration in range(50):
        scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy")
        finish = start_largest(group)
        scaler.unscale_(optimizer)
        assert start_largest(group)() == largest
        if iteration % 2:
            assert finish() == largest
        scaler.step(optimizer)
        if not iteration % 2:
            assert finish() == largest
        scaler.update()


def grid(group, bad_rank: int, kind: str):
    """Agree over both dimensions of a grid of 2 x 2 ranks in turn, or over its rows alone, which reaches one row.

    Other kinds are those of ``alone_in_a_grid``.
    """
    rank, _ = rank_and_size(group)
    if is_mpi(group):
        rows, columns = group.Split(rank // 2, rank), group.Split(rank % 2, rank)
        groups = {"both": [rows, columns], "rows": rows}
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        groups = {"both": mesh.get_all_groups(), "rows": rows, "mixed": [rows, mesh["row"]]}
    if kind in WAYS_IN_A_GRID:
        alone_in_a_grid(groups["both"], rank, bad_rank, kind)
    else:
        skips(groups[kind], rank == bad_rank, kind != "rows" or rank // 2 == bad_rank // 2)
    if is_mpi(group):
        rows.Free()
        columns.Free()


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        pytest.param(MPIWorld(4), ["both", "rows", *WAYS_IN_A_GRID], id="mpi-4", marks=mpi_only),
        pytest.param(GlooWorld(4), ["both", "mixed", "rows", *WAYS_IN_A_GRID], id="gloo-4", marks=torch_only),
    ],
)
def test_a_list_of_groups_reaches_every_rank_of_a_grid(world: ProcessWorld, kinds: list[str]):
    agree(world, grid, [(bad_rank, kind) for bad_rank in range(4) for kind in kinds])


def after_a_timeout(group, late_rank: int, folder: str):
    """Time out with two messages under way, wait for the late rank by other means, and go on over a new group."""
    rank, size = rank_and_size(group)
    others_way = fresh(group)
    skips(group, True)
    collectives = registry.collectives_for(group, 0.5)
    if rank == late_rank:
        # It meets the messages of the others, and knows nothing of their timeout.
        wait_for(folder, "gave up", size - 1)
        assert [collectives.start_max(np.full(1, x, np.int32))().tolist() for x in (0, 9)] == [[1], [9]]
    else:
        first, second = (collectives.start_max(np.full(1, x, np.int32)) for x in (1, 2))
        raised(gradscale.CollectiveTimeoutError, first)
        tell(folder, "gave up", rank)
        said = "an agreement over this ", "comm.Dup()" if is_mpi(group) else "new_group()"
        offered = [group]
        if not is_mpi(group):
            offered += [DeviceMesh.from_group(group, "cpu")]
            raised(BackendError, lambda: torch_collectives(None), *said)
        for one in offered:
            refused(one, BackendError, *said)
        for call in (second, first, second, lambda: collectives.start_max(np.zeros(1, np.int32))):
            raised(BackendError, call, *said)
    start_largest(others_way)()
    skips(fresh(others_way), rank == late_rank)


def test_after_a_timeout_another_group_is_needed_and_meets_no_old_messages(processes: ProcessWorld, tmp_path: Path):
    agree(processes, after_a_timeout, [(0, str(tmp_path))])


def dropped(group):
    """Start reductions and forget them before the other ranks have come; their memory is still used, and no longer."""
    (rank, size), collectives = rank_and_size(group), registry.collectives_for(group, 20.0)
    for turn in range(size):
        if rank == turn:
            for value in range(20):
                sent = np.full(3, 1000 * rank + value, np.int32)
                watched = weakref.ref(sent)
                collectives.start_max(sent)
                del sent
            gc.collect()
            assert not is_mpi(group) or watched() is not None
            [np.zeros(3, np.int32) for _ in range(1000)]
            time.sleep(0.2)
        else:
            time.sleep(0.1)
            for value in range(20):
                assert collectives.start_max(np.full(3, -1, np.int32))().tolist() == [1000 * turn + value] * 3
        start_largest(group)()
    collectives.start_max(np.zeros(3, np.int32))()
    assert is_mpi(group) or len(adapter._under_way) <= 9


def arrays(group):
    """Reduce arrays of any layout, and nothing but 1-d int32."""
    rank, size = rank_and_size(group)
    collectives = registry.collectives_for(group, 20.0)
    array = np.arange(10, dtype=np.int32) + np.int32(rank)
    array.flags.writeable = False
    offered: list[Any] = [array, array[::3], array[::-3]]
    wrong: list[Any] = [np.zeros(3, np.float32), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)]
    if not is_mpi(group):
        import array_api_strict as strict

        wrong += map(torch.from_numpy, wrong[:])
        offered += [torch.from_numpy(array.copy())[::3]]
        offered += [strict.arange(10, dtype=strict.int32, device=strict.Device("device1")) + rank]
    for one in wrong:
        said = f"got {one.ndim}-d {one.dtype}"
        raised(gradscale.GradscaleError, lambda one=one: collectives.start_max(one), said)
    results = [collectives.start_max(one)() for one in offered]
    assert [type(result) for result in results] == [type(one) for one in offered]
    assert is_mpi(group) or results[-1].device == offered[-1].device
    assert array.tolist() == list(range(rank, rank + 10))
    every = list(range(size - 1, size + 9))
    expected = [every, every[::3], every[::-3], *([] if is_mpi(group) else [every[::3], every])]
    assert [[int(value) for value in result] for result in results] == expected


# Over MPI.


def many_scalers(comm):
    """Construct more scalers than there are communicators to be had, over one group and over short-lived ones."""
    for _ in range(2500):
        gradscale.ShardedGradScaler(group=comm, timeout=20.0)
    for _ in range(2500):
        short_lived = comm.Dup()
        skips(short_lived, True)
        short_lived.Free()


def what_is_no_communicator(comm):
    """Offer what cannot be a group."""
    from mpi4py import MPI

    half = comm.Split(color=min(comm.rank, 1))
    between = half.Create_intercomm(0, comm, 1 if comm.rank == 0 else 0)
    offered = {"intracommunicator": between, "COMM_NULL": MPI.COMM_NULL, "Group": comm.Get_group()}
    offered |= {"at least one group": [], "'world' of type str": "world", "None of type NoneType": None}
    for said, one in offered.items():
        refused(one, gradscale.GradscaleError, said)
    between.Free()
    half.Free()


def freed_before_its_end(comm):
    """Free communicators over which a message is under way, to which one rank comes late or never."""
    for late in range(comm.size):
        for comes in (True, False):
            short_lived = comm.Dup()
            collectives = registry.collectives_for(short_lived, 5.0)
            if comm.rank == late:
                time.sleep(0.05)
            if comes or comm.rank != late:
                collectives.start_max(np.zeros(21, np.int32))
            short_lived.Free()
            comm.Barrier()


WITHOUT_MPI = """
import sys
import mpi4py
how = sys.argv[1]
mpi4py.rc.initialize = how == "finalized"
from mpi4py import MPI
import numpy as np
import gradscale
from scenarios import SGD, gradients, raised

construct = lambda: gradscale.ShardedGradScaler(group=MPI.COMM_WORLD, timeout=20.0)
if how == "not initialised":
    raised(gradscale.CallOrderError, construct, "MPI is not initialised in this process", "MPI.Init()")
    MPI.Init()
scaler, optimizers = construct(), [SGD(gradients("numpy")) for _ in range(3)]
scaler.scale(np.float32(1.0))
scaler.step(optimizers[0])
scaler.unscale_(optimizers[1])
MPI.Finalize()
for call in (lambda: scaler.step(optimizers[1]), lambda: scaler.step(optimizers[2]), construct):
    raised(gradscale.CallOrderError, call, "MPI was finalised in this process", "before MPI.Finalize()")
assert [optimizer.steps for optimizer in optimizers] == [1, 0, 0]
sys.stdout.write("survived\\n")
"""
LOST = """
import numpy as np
from mpi4py import MPI
import gradscale
from scenarios import SGD, raised

class Counting(MPI.Intracomm):
    fails = freed = 0

    def Iallreduce(self, *args, **options):
        if Counting.fails:
            raise KeyboardInterrupt
        return super().Iallreduce(*args, **options)

    def Free(self):
        Counting.freed += 1
        super().Free()

# The user's own, and the duplicate of a scaler unless a rank may never come to free it.
for Counting.fails, freed in ((0, 2), (1, 1)):
    comm, Counting.freed = Counting(MPI.COMM_SELF.Dup()), 0
    guard, optimizer = gradscale.StepGuard(group=comm, timeout=20.0), SGD([np.ones(1, np.float32)])
    raised(KeyboardInterrupt, lambda: guard.step(optimizer)) if Counting.fails else guard.step(optimizer)
    comm.Free()
    assert (Counting.freed, optimizer.steps) == (freed, 1 - Counting.fails)
"""
ENVIRONMENT = mpi_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@mpi_only
@pytest.mark.parametrize("how", ["not initialised", "finalized"])
@pytest.mark.parametrize("size", [None, 2], ids=["without mpiexec", "2 ranks"])
def test_without_mpi_a_scaler_is_refused_and_the_process_lives(size: int | None, how: str):
    program = ["-c", WITHOUT_MPI, how]
    command = [sys.executable, *program] if size is None else mpi_command(size, *program)
    completed = ran(*command, **ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["survived"] * (size or 1)


@mpi_only
@pytest.mark.tier("quick")
def test_a_communicator_that_was_given_up_is_not_freed():
    completed = ran(sys.executable, "-c", LOST, **ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr


FREED = """
from mpi4py import MPI
import numpy as np
import gradscale
from scenarios import SGD, gradients, raised

comm, other, optimizer = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup(), SGD(gradients("numpy"))
scalers = [gradscale.ShardedGradScaler(group=comm, timeout=20.0) for _ in range(2)]
for scaler in scalers:
    scaler.scale(np.float32(1.0))
    scaler.step(optimizer)
    scaler.update()
comm.Free()
for scaler in scalers:
    scaler.scale(np.float32(1.0))
    said = "communicator was freed on rank", "keep it, or set_group() to another"
    raised(gradscale.BackendError, lambda: scaler.step(optimizer), *said)
    scaler.set_group(other)
    scaler.load_state_dict(scaler.state_dict())
    scaler.scale(np.float32(1.0))
    scaler.step(optimizer)
    scaler.update()
assert optimizer.steps == 4
"""


IN_THREADS = """
import concurrent.futures
import sys
import warnings
import mpi4py
mpi4py.rc.thread_level = level = sys.argv[1]
from mpi4py import MPI
import numpy as np
import gradscale
from scenarios import SGD, gradients

def step():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        scaler.scale(np.float32(1.0))
        scaler.step(SGD(gradients("numpy")))
        scaler.update()
    return any("'multiple'" in str(warning.message) for warning in told)

scaler = gradscale.ShardedGradScaler(group=MPI.COMM_WORLD, timeout=20.0)
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    # In one thread, which may be another than the main one, and then in two.
    said = [pool.submit(step).result(), pool.submit(step).result(), step(), pool.submit(step).result()]
assert said == {"funneled": [1, 0, 0, 0], "serialized": [0, 0, 1, 0], "multiple": [0] * 4}[level], said
sys.stdout.write("survived\\n")
"""


WITHOUT_GROUP = """
import warnings
from mpi4py import MPI
import numpy as np
import gradscale
from scenarios import SGD, gradients

def warnings_of(loss, **options):
    guard, optimizer = gradscale.StepGuard(**options), SGD(gradients("numpy"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            guard.step(optimizer, loss=loss)
    return [str(one.message) for one in caught]

(said,) = warnings_of(0.5)
assert "MPI runs 2" in said and "group=MPI.COMM_WORLD" in said and "group=MPI.COMM_SELF" in said, said
(said,) = warnings_of(np.float32(0.5), skip=gradscale.SkipSpikes())
assert "MPI runs 2" in said, said
for loss, group in ((None, None), (0.5, MPI.COMM_WORLD), (0.5, MPI.COMM_SELF)):
    assert warnings_of(loss, group=group) == []
"""


@mpi_only
@pytest.mark.tier("quick")
def test_a_rank_that_judges_its_loss_without_a_group_is_told_of_the_others():
    completed = ran(*mpi_command(2, "-c", WITHOUT_GROUP), **ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr


@mpi_only
@pytest.mark.parametrize(
    "size", [pytest.param(None, marks=pytest.mark.tier("quick")), 2], ids=["without mpiexec", "2 ranks"]
)
def test_a_communicator_that_was_freed_is_named_and_another_takes_its_place(size: int | None):
    command = [sys.executable, "-c", FREED] if size is None else mpi_command(size, "-c", FREED)
    completed = ran(*command, **ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr


@mpi_only
@pytest.mark.tier("quick")
@pytest.mark.parametrize("level", ["funneled", "serialized", *later("ranks", "multiple")])
def test_threads_that_mpi_is_not_initialised_for_are_told_of(level: str):
    completed = ran(*mpi_command(2, "-c", IN_THREADS, level), **ENVIRONMENT)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["survived"] * 2


# Over torch.


def vector(*values: int):
    """Return what is reduced."""
    return torch.tensor(values, dtype=torch.int32)


def torch_collectives(group):
    """Return torch's collectives, whatever they are given."""
    return adapter.TorchCollectives(group, 5.0)


def agree_over_a_mesh(group, shape: tuple[int, ...], part: int, bad_rank: int):
    """Agree over a mesh, or over its last dimensions: over the world's group, or over one that is made once."""
    names, rank = tuple("abc"[: len(shape)]), group.rank()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    mesh = mesh[names[part:]] if part else mesh
    first, second = registry.collectives_for(mesh, 20.0), registry.collectives_for(mesh, 20.0)
    size = math.prod(shape[part:])
    assert (first.rank, first.size, first.identity is group) == (rank % size, size, part == 0)
    assert first.identity is second.identity
    skips(mesh, rank == bad_rank, rank // size == bad_rank // size)


@torch_only
def test_a_mesh_or_some_of_its_dimensions_are_one_group_of_all_its_ranks():
    meshes = ((4,), 0), ((4, 1), 0), ((2, 2), 0), ((1, 2, 2), 0), ((2, 2, 1), 1)
    agree(GlooWorld(4), agree_over_a_mesh, [(*mesh, bad_rank) for mesh in meshes for bad_rank in range(4)])


def outside(group):
    """Offer groups and meshes that the last rank is not in, and use them on the others."""
    rank, last = group.rank(), group.size() - 1
    part = dist.new_group(list(range(last)))
    mesh = DeviceMesh("cpu", [list(range(last))], mesh_dim_names=("a", "b"))
    for kind, one in (("process group", part), ("mesh", mesh)):
        said = f"group must be a {kind} that this process belongs to, got ", f"rank {last} of the world"
        if rank < last:
            skips(one, rank == 0)
        else:
            raised(InvalidValueError, lambda one=one: torch_collectives(one), *said)


def what_is_no_group(group):
    """Offer what is not a group, and one whose only device this machine lacks."""
    for one in ("world", 3, group._get_backend(torch.device("cpu")), [group]):
        said = "group must be a torch.distributed ProcessGroup, a DeviceMesh", f"of type {type(one).__name__}"
        raised(gradscale.InvalidTypeError, lambda one=one: torch_collectives(one), *said)
    if not torch.cuda.is_available():
        absent = dist.new_group(backend="cuda:gloo")
        said = "group must carry tensors of a device of this machine", "'cuda:gloo'"
        raised(InvalidValueError, lambda: torch_collectives(absent), *said)


def test_groups_of_processes(processes: ProcessWorld):
    own = [what_is_no_communicator, many_scalers, freed_before_its_end]
    own = [outside, what_is_no_group] if isinstance(processes, GlooWorld) else own
    agree(processes, play, [(scenario,) for scenario in (overlapped, dropped, arrays, *own)])


def worlds_end(group, folder: str):
    """Destroy the world, go on without one, and begin another."""
    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (size, 1))
    explicit, default = torch_collectives(group), torch_collectives(None)
    dist.destroy_process_group()
    late = torch_collectives(None)
    scaler = gradscale.ShardedGradScaler(group=late)
    assert (late.rank, late.size) == (-1, 0)

    def old_ones_are_refused():
        raised(BackendError, lambda: explicit.start_max(vector(rank)), "the process group was destroyed")
        raised(InvalidValueError, lambda: torch_collectives(group), "of a destroyed world")
        raised(InvalidValueError, lambda: torch_collectives(mesh), "group must")

    said = "torch.distributed is not initialised", "init_process_group()", "torchrun"
    for call in (lambda: default.start_max(vector(rank)), default.example):
        raised(gradscale.CallOrderError, call, *said)
    old_ones_are_refused()
    weight = torch.ones(1, requires_grad=True)
    guard, optimizer = gradscale_torch.StepGuard(), torch.optim.SGD([weight])
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=size)
    # Made before there were other ranks, it skips with them.
    weight.grad = torch.full((1,), torch.nan if rank == 0 else 1.0)
    guard.step(optimizer)
    assert guard.last_step(optimizer).skipped
    assert default.start_max(vector(rank))().tolist() == [size - 1]
    old_ones_are_refused()
    assert iterate(scaler, SGD(None), gradients("numpy", np.inf if rank == 0 else 1.0)).skipped
    assert (late.rank, late.size) == (rank, size)


def test_a_world_that_ends_takes_its_groups_along_and_the_default_one_is_that_of_the_next(
    gloo: GlooWorld, tmp_path: Path
):
    agree(gloo, worlds_end, [(str(tmp_path),)])


@torch_only
@pytest.mark.tier("quick")
def test_torch_is_given_the_timeout_as_it_is_and_one_that_its_clock_holds_for_ever():
    assert adapter.seconds(1800.0) == 1800.0
    # Weeks of a run, and far from the end of 64-bit nanoseconds, whatever is added.
    assert 100 * 86400.0 < adapter.seconds(math.inf) == adapter.seconds(1e300) < 2**62 / 1e9


def late_member_of_a_mesh(group, late_rank: int, folder: str):
    """Construct over part of a mesh, on one rank too late, and once more in time."""
    rank, size = group.rank(), group.size() - 1
    mesh = DeviceMesh("cpu", [list(range(size))], mesh_dim_names=("a", "b"))
    if rank == size:
        return
    if rank == late_rank:
        wait_for(folder, "gave up", size - 1)
    else:
        said = f"rank {rank} of {size} waited 0.5 s for the construction of a ShardedGradScaler"
        refused(mesh, gradscale.CollectiveTimeoutError, said)
        tell(folder, "gave up", rank)
    skips(mesh, rank == late_rank)


@torch_only
def test_a_rank_of_a_mesh_that_constructs_too_late_is_a_timeout_after_which_all_may_try_again(tmp_path: Path):
    agree(GlooWorld(3), late_member_of_a_mesh, [(1, str(tmp_path))])


@torch_only
@pytest.mark.tier("quick")
@pytest.mark.parametrize("ends", ["timeout", "Ctrl-C"])
def test_a_construction_over_a_mesh_that_has_ended_alone_is_no_meeting(ends: str, monkeypatch: pytest.MonkeyPatch):
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    # The other ranks never come, and the groups of the mesh itself wait for none.
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=3)
    try:
        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b"))
        for is_last in (False, False, True):
            with monkeypatch.context() as patch:
                if ends == "Ctrl-C" and not is_last:
                    patch.setattr(time, "sleep", interrupt)
                kind = gradscale.CollectiveTimeoutError if is_last or ends == "timeout" else KeyboardInterrupt
                with pytest.raises(kind):
                    gradscale.ShardedGradScaler(group=mesh, timeout=0.1)
    finally:
        dist.destroy_process_group()


def interrupt(_: float):
    raise KeyboardInterrupt


@torch_only
@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo", "cpu", "cpu"),
        ("cpu:mpi,cuda:mpi", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "mps", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:3"),
        # A rank without arrays takes part on the group's accelerator.
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cpu:gloo,cuda:nccl", None, "cuda"),
        ("cuda:nccl", None, "cuda"),
    ],
)
def test_a_tensor_travels_on_its_own_device_or_on_one_that_the_group_carries(
    backends: str, device: str | None, expected: str
):
    group = SimpleNamespace(bound_device_id=torch.device("cuda:3"))
    found = dict(pair.split(":") for pair in backends.split(","))
    if device is None:
        assert adapter.example_device(found, group, None).type == expected
    else:
        assert adapter.travels_on(found, torch.device(device), group) == torch.device(expected)


# Whole programs.

PROGRAM = """
import os, signal, sys, time
import numpy as np
import gradscale
from scenarios import Trainer

kind, how, timeout, folder, rank = *sys.argv[1:3], float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
if kind == "mpi":
    from mpi4py import MPI
    group = MPI.COMM_WORLD
    rank = group.rank
elif kind == "mlx":
    import mlx.core as mx
    group = mx.distributed.init(strict=True, backend="ring")
else:
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
iterate = lambda: Trainer(group, "mlx" if kind == "mlx" else "numpy", 1, timeout=timeout).iterate((0,))
iterate()
if rank:
    time.sleep(0.5)
    if how == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
print("waiting", flush=True)
for _ in range(2):
    try:
        iterate()
    except gradscale.GradscaleError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""
AGREED = " on rank 0 of 2 while the ranks agreed on a step"
AGREEMENT = "an agreement over this group was given up on rank 0 of 2"
GIVEN_UP = "start all ranks again from a checkpoint. It was given up for: CollectiveTimeoutError"
# Over what, what the other rank does, the timeout, what is said after Ctrl-C or without it, and from which tier on.
PROGRAMS: list[tuple[str, str, float, list[str], str]] = [
    ("mpi", "hangs", 1000.0, [], "ranks"),
    ("gloo", "hangs", 1000.0, ["KeyboardInterrupt"], "ranks"),
    ("gloo", "hangs", math.inf, ["KeyboardInterrupt"], "all"),
    ("gloo", "ends", 1000.0, [f"BackendError: torch.distributed failed{AGREED}"], "ranks"),
    ("gloo", "ends", math.inf, [f"BackendError: torch.distributed failed{AGREED}"], "all"),
    ("mlx", "late", 2.0, ["CollectiveTimeoutError: rank 0 of 2", f"BackendError: {AGREEMENT}", GIVEN_UP], "ranks"),
    ("mlx", "ends", 30.0, [f"BackendError: MLX failed{AGREED}: [ring] connection to a peer"], "ranks"),
]
MARKS = {"mpi": mpi_only, "gloo": torch_only, "mlx": pytest.mark.mlx}


@pytest.mark.parametrize(
    ("kind", "how", "timeout", "said"),
    [pytest.param(kind, *row, marks=[pytest.mark.tier(tier), MARKS[kind]]) for kind, *row, tier in PROGRAMS],
)
def test_a_program_that_is_interrupted_or_left_alone_ends_with_what_went_wrong(
    tmp_path: Path, kind: str, how: str, timeout: float, said: list[str]
):
    (program := tmp_path / "program.py").write_text(PROGRAM)
    port, hosts = free_port(2), tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"], [f"127.0.0.1:{port + 1}"]]))
    arguments = [str(program), kind, how, str(timeout), str(tmp_path)]
    commands = [[sys.executable, *arguments, str(rank)] for rank in range(2)]
    if kind == "mpi":
        commands = [mpi_command(2, "-m", "mpi4py", *arguments, "0")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = []
    for rank, command in enumerate(commands):
        environment = ENVIRONMENT | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        started.append(subprocess.Popen(command, env=environment, text=True, **({} if rank else pipes)))
    first = started[0]
    try:
        assert first.stdout is not None
        assert "waiting" in first.stdout.readline()
        if how == "hangs":
            time.sleep(0.5)
            first.send_signal(signal.SIGINT)
        # The process ends, though a library may wait on.
        output, _ = first.communicate(timeout=50)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert (first.returncode == 0) == (how != "hangs"), output
    assert [text for text in said if text not in output] == [], output
