"""What the ranks do in the tests of groups themselves: MPI's communicators, torch's groups and meshes."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from events import tell, wait_for
from scenarios import SGD, begun, gradients, iterate, raised, rank_and_size
from worlds import alone

import gradscale
from gradscale import registry
from gradscale.testing import check_collectives

Refused = gradscale.GradscaleError


def is_mpi(group) -> bool:
    """Tell whether a group is MPI's, and not torch's."""
    return hasattr(group, "Get_name")


def fresh(group):
    """Return another group of the same ranks."""
    if is_mpi(group):
        return group.Dup()
    import torch.distributed as dist

    return dist.new_group()


def start_largest(group) -> Callable[[], list[int]]:
    """Start the user's own message; what waits for it returns the largest rank, 16 times."""
    mine = np.full(16, rank_and_size(group)[0], np.int32)
    if is_mpi(group):
        from mpi4py import MPI

        theirs = np.zeros_like(mine)
        request = group.Iallreduce(mine, theirs, op=MPI.MAX)
        return lambda: (request.Wait(), theirs.tolist())[1]
    import torch
    import torch.distributed as dist

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
    """Agree over both dimensions of a grid of 2 x 2 ranks in turn, or over its rows alone, which reaches one row."""
    rank, _ = rank_and_size(group)
    if is_mpi(group):
        rows = group.Split(color=rank // 2, key=rank)
        columns = group.Split(color=rank % 2, key=rank)
        groups = {"both": [rows, columns], "rows": rows}
    else:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        groups = {"both": mesh.get_all_groups(), "rows": rows, "mixed": [rows, mesh["row"]]}
    skips(groups[kind], rank == bad_rank, kind != "rows" or rank // 2 == bad_rank // 2)
    if is_mpi(group):
        rows.Free()
        columns.Free()


@alone
def after_a_timeout(group, late_rank: int, folder: str):
    """Time out, wait for the late rank by other means, and go on over a new group."""
    rank, size = rank_and_size(group)
    others_way = fresh(group)
    skips(group, True)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=0.5)
    earlier = registry.collectives_for(group, 0.5)
    if rank == late_rank:
        # It meets the messages of the others, and knows nothing of their timeout.
        wait_for(folder, "gave up", size - 1)
        iterate(scaler, SGD(None), gradients("numpy"))
    else:
        raised(gradscale.CollectiveTimeoutError, lambda: iterate(scaler, SGD(None), gradients("numpy")))
        tell(folder, "gave up", rank)
        said = "an agreement over this ", "comm.Dup()" if is_mpi(group) else "new_group()"
        offered = [group]
        if not is_mpi(group):
            from torch.distributed.device_mesh import DeviceMesh

            offered += [DeviceMesh.from_group(group, "cpu")]
            raised(gradscale.BackendError, lambda: torch_collectives(None), *said)
        for one in offered:
            refused(one, gradscale.BackendError, *said)
        raised(gradscale.BackendError, lambda: earlier.start_max(np.zeros(1, np.int32)), *said)
    start_largest(others_way)()
    skips(fresh(others_way), rank == late_rank)


def arrays(group) -> list[list[int]]:
    """Reduce arrays of any layout, and nothing but 1-d int32."""
    rank, _ = rank_and_size(group)
    collectives = registry.collectives_for(group, 20.0)
    array = np.arange(10, dtype=np.int32) + np.int32(rank)
    array.flags.writeable = False
    offered: list[Any] = [array, array[::3], array[::-3]]
    wrong: list[Any] = [np.zeros(3, np.float32), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)]
    if not is_mpi(group):
        import array_api_strict as strict
        import torch

        wrong += map(torch.from_numpy, wrong[:])
        offered += [torch.from_numpy(array.copy())[::3]]
        offered += [strict.arange(10, dtype=strict.int32, device=strict.Device("device1")) + rank]
    for one in wrong:
        raised(Refused, lambda one=one: collectives.start_max(one), f"got {one.ndim}-d {one.dtype}")
    results = [collectives.start_max(one)() for one in offered]
    assert [type(result) for result in results] == [type(one) for one in offered]
    assert is_mpi(group) or results[-1].device == offered[-1].device
    assert array.tolist() == list(range(rank, rank + 10))
    return [[int(value) for value in result] for result in results]


# Over MPI.


@alone
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
        refused(one, Refused, said)
    between.Free()
    half.Free()


@alone
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


@alone
def dropped_by_mpi(comm):
    """Start a reduction and forget it before the other ranks have come; MPI still needs its memory."""
    collectives = registry.collectives_for(comm, 5.0)
    for rank in range(comm.size):
        if comm.rank == rank:
            sent = np.zeros(3, dtype=np.int32)
            watched = weakref.ref(sent)
            collectives.start_max(sent)
            del sent
            gc.collect()
            assert watched() is not None
        comm.Barrier()


# Over torch.


def vector(*values: int):
    """Return what is reduced."""
    import torch

    return torch.tensor(values, dtype=torch.int32)


def mesh_of_the_world(group, shape: tuple[int, ...], bad_rank: int):
    """Agree over a mesh that covers the world: over the world's own group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    collectives = registry.collectives_for(mesh, 20.0)
    assert (collectives.rank, collectives.size, collectives.identity) == (group.rank(), group.size(), group)
    skips(mesh, group.rank() == bad_rank)


def part_of_a_mesh(group, bad_rank: int):
    """Agree over two dimensions of three, the rows of a grid of 2 x 2 ranks: over a group that is made once."""
    from torch.distributed.device_mesh import init_device_mesh

    rank = group.rank()
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))["b", "c"]
    first, second = registry.collectives_for(mesh, 20.0), registry.collectives_for(mesh, 20.0)
    skips(mesh, rank == bad_rank, rank // 2 == bad_rank // 2)
    assert first.size == 2
    assert first.identity is second.identity is not group


def outside(group):
    """Offer groups and meshes that the last rank is not in, and use them on the others."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    rank, last = group.rank(), group.size() - 1
    part = dist.new_group(list(range(last)))
    mesh = DeviceMesh("cpu", [list(range(last))], mesh_dim_names=("a", "b"))
    if rank < last:
        skips(part, rank == 0)
        skips(mesh, rank == 0)
        return
    for kind, one in (("process group", part), ("mesh", mesh)):
        said = f"group must be a {kind} that this process belongs to, got ", f"rank {last} of the world"
        raised(gradscale.InvalidValueError, lambda one=one: torch_collectives(one), *said)


def torch_collectives(group):
    """Return torch's collectives, whatever they are given."""
    from gradscale_torch.groups import TorchCollectives

    return TorchCollectives(group, 5.0)


def what_is_no_group(group):
    """Offer what is not a group, and one whose only device this machine lacks."""
    import torch
    import torch.distributed as dist

    for one in ("world", 3, group._get_backend(torch.device("cpu")), [group]):
        said = "group must be a torch.distributed ProcessGroup, a DeviceMesh", f"of type {type(one).__name__}"
        raised(gradscale.InvalidTypeError, lambda one=one: torch_collectives(one), *said)
    if not torch.cuda.is_available():
        absent = dist.new_group(backend="cuda:gloo")
        said = "group must carry tensors of a device of this machine", "'cuda:gloo'"
        raised(gradscale.InvalidValueError, lambda: torch_collectives(absent), *said)


def worlds_end(group, folder: str):
    """Destroy the world, go on without one, and begin another."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import gradscale_torch

    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (size, 1))
    explicit, default = torch_collectives(group), torch_collectives(None)
    dist.destroy_process_group()
    late = torch_collectives(None)
    scaler = gradscale.ShardedGradScaler(group=late)
    assert (late.rank, late.size) == (-1, 0)

    def old_ones_are_refused():
        said = "the process group was destroyed"
        raised(gradscale.BackendError, lambda: explicit.start_max(vector(rank)), said)
        raised(gradscale.InvalidValueError, lambda: torch_collectives(group), "of a destroyed world")
        raised(gradscale.InvalidValueError, lambda: torch_collectives(mesh), "group must")

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


def two_under_way_time_out(group, folder: str):
    """Wait in vain for the first of two reductions, then ask for the second."""
    if group.rank() == 0:
        wait_for(folder, "gave up", group.size() - 1)
        return
    collectives = registry.collectives_for(group, 0.5)
    first, second = collectives.start_max(vector(1)), collectives.start_max(vector(2))
    raised(gradscale.CollectiveTimeoutError, first)
    for finish in (second, first, second):
        raised(gradscale.BackendError, finish)
    tell(folder, "gave up", group.rank())


def late_member_of_a_mesh(group, late_rank: int, folder: str):
    """Construct over part of a mesh, on one rank too late, and once more in time."""
    from torch.distributed.device_mesh import DeviceMesh

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


def dropped_by_torch(group):
    """Start reductions and forget them before the other ranks have come; torch still needs their memory."""
    import torch
    import torch.distributed as dist

    from gradscale_torch import groups as adapter

    collectives = registry.collectives_for(group, 20.0)
    for rank in range(group.size()):
        if group.rank() == rank:
            for value in range(20):
                collectives.start_max(vector(1000 * rank + value))
            gc.collect()
            [torch.zeros(1, dtype=torch.int32) for _ in range(1000)]
            time.sleep(0.2)
        else:
            time.sleep(0.1)
            for value in range(20):
                assert collectives.start_max(vector(-1))().item() == 1000 * rank + value
        dist.barrier()
    collectives.start_max(vector(0))()
    # And no longer.
    assert len(adapter._under_way) <= 9


def finished_in_another_order(group, bad: int):
    """Step two optimizers with bad gradients, on rank 0 the second first: only the order of starts matters."""
    import torch
    from fsdp_scenarios import started

    import gradscale_torch

    skips(group, True)
    parameters = [[torch.nn.Parameter(torch.zeros(2)) for _ in range(bad + 1)] for _ in range(2)]
    for scaler, optimizers, one in (
        (gradscale_torch.ShardedGradScaler("cpu"), [torch.optim.SGD(each, lr=1.0) for each in parameters], torch.ones),
        (gradscale.ShardedGradScaler(group=group), [SGD(None), SGD(None)], lambda shape: np.ones(shape, np.float32)),
    ):
        scaler.update(4.0)
        before = started()
        scaler.scale(one(()))
        for index, optimizer in enumerate(optimizers):
            # Each rank has its own count of bad ones.
            grads = [one((2,)) * (np.inf if k < bad - group.rank() - index else 1.0) for k in range(bad + 1)]
            if isinstance(optimizer, SGD):
                optimizer.grads = grads
            else:
                for parameter, grad in zip(parameters[index], grads, strict=True):
                    parameter.grad = grad
            scaler.unscale_(optimizer)
        for optimizer in reversed(optimizers) if group.rank() == 0 else optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [scaler.last_step(optimizer).nonfinite for optimizer in optimizers] == [bad, bad - 1]
        assert (scaler.get_scale(), started() - before) == (2.0, 2)


def polled(group, folder: str):
    """Wait as on accelerators, by asking again and again; first for ranks that come, then for one that does not."""
    import torch

    rank, size = group.rank(), group.size()
    collectives = registry.collectives_for(group, 1.0)
    collectives._carriers = {"cpu": "ucc"}
    check_collectives(collectives, torch.zeros(()), repetitions=20)
    pending = collectives.start_max(vector(rank))
    pending.wait()
    assert pending._work.is_completed()
    assert pending().tolist() == [size - 1]
    if rank == 0:
        wait_for(folder, "gave up", size - 1)
        return
    said = f"rank {rank} of {size} waited 1 s for the agreement on a step"
    raised(gradscale.CollectiveTimeoutError, lambda: collectives.start_max(vector(1)).wait(), said)
    tell(folder, "gave up", rank)
