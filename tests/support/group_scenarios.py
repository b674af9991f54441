"""What the ranks do in the tests of groups themselves: MPI's communicators, torch's groups and meshes, GroupAgreement.

They use their group, whichever it is, through the few functions at the beginning.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from events import tell, wait_for
from scenarios import SGD, gradients, iterate, loss, rank_and_size
from worlds import Failure, alone

import gradscale
from gradscale import registry
from gradscale.core.arithmetic import fingerprint
from gradscale.testing import check_collectives


def is_mpi(group: Any) -> bool:
    """Tell whether a group is MPI's, and not torch's."""
    return hasattr(group, "Get_name")


def fresh(group: Any) -> Any:
    """Return another group of the same ranks."""
    if is_mpi(group):
        return group.Dup()
    import torch.distributed as dist

    return dist.new_group()


def add(group: Any, value: float) -> float:
    """Return the sum over the ranks, by the user's own message."""
    if is_mpi(group):
        total: float = group.allreduce(value)
        return total
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def start_largest(group: Any) -> Callable[[], list[int]]:
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


def said_by(call: Callable[[], Any]) -> str:
    """Return what a call raises of gradscale's errors, or that it came out."""
    try:
        call()
    except gradscale.GradscaleError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusal(group: Any) -> str:
    """Return what is said to something that cannot be the group of collectives."""
    from gradscale_torch.collectives import TorchCollectives

    return said_by(lambda: TorchCollectives(group, 5.0))


def skips(group: Any, bad: bool) -> tuple[bool, float]:
    """Make an iteration that overflows on some rank; whether this rank skipped, and its scale."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    report = iterate(scaler, SGD(None), gradients("numpy", np.nan if bad else 1.0))
    return report.skipped, scaler.get_scale()


# Over MPI and gloo.


def overlapped(group: Any, rounds: int) -> float:
    """Use the group between unscale_ and step, blocking and not, as gradient clipping does."""
    _, size = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    optimizer = SGD(None)
    total = 0.0
    for iteration in range(rounds):
        scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy")
        finish = start_largest(group)
        scaler.unscale_(optimizer)
        total += add(group, 1.0)
        if iteration % 2:
            assert finish() == [size - 1] * 16
        scaler.step(optimizer)
        if not iteration % 2:
            assert finish() == [size - 1] * 16
        scaler.update()
    return total


def grid(group: Any, bad_rank: int, kind: str) -> tuple[bool, float]:
    """Agree over both dimensions of a grid of 2 x 2 ranks in turn, or over its rows alone."""
    rank, _ = rank_and_size(group)
    if is_mpi(group):
        rows = group.Split(color=rank // 2, key=rank)
        columns = group.Split(color=rank % 2, key=rank)
        found = skips({"both": [rows, columns], "rows": rows}[kind], rank == bad_rank)
        rows.Free()
        columns.Free()
        return found
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    groups = {"both": mesh.get_all_groups(), "rows": rows, "mixed": [rows, mesh["row"]]}
    return skips(groups[kind], rank == bad_rank)


@alone
def after_a_timeout(group: Any, late_rank: int, folder: str) -> dict[str, Any]:
    """Time out, wait for the late rank by other means, and go on over a new group."""
    rank, size = rank_and_size(group)
    others_way = fresh(group)
    skips(group, False)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=0.5)
    earlier = registry.collectives_for(group, 0.5)
    refused = []
    if rank == late_rank:
        wait_for(folder, "gave up", size - 1)
    try:
        iterate(scaler, SGD(None), gradients("numpy"))
    except gradscale.CollectiveTimeoutError:
        tell(folder, "gave up", rank)
        offered = [group]
        if not is_mpi(group):
            from torch.distributed.device_mesh import DeviceMesh

            offered += [DeviceMesh.from_group(group, "cpu")]
            refused = [refusal(None)]
        refused += [said_by(lambda one=one: gradscale.ShardedGradScaler(group=one, timeout=0.5)) for one in offered]
        refused += [said_by(lambda: earlier.start_max(np.zeros(1, np.int32)))]
    # The late rank met the messages of the others, and knows nothing of their timeout; they tell it.
    failures = add(others_way, float(bool(refused)))
    return {"failures": failures, "refused": refused, "skips": skips(fresh(others_way), rank == late_rank)}


def wrong_arrays(group: Any) -> list[str]:
    """Try to reduce what is not a 1-d int32 array."""
    collectives = registry.collectives_for(group, 5.0)
    arrays: list[Any] = [np.zeros(3, np.float32), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)]
    if not is_mpi(group):
        import torch

        arrays = [*arrays, *map(torch.from_numpy, arrays)]
    return [said_by(lambda array=array: collectives.start_max(array)).rpartition("got ")[2] for array in arrays]


def odd_arrays(group: Any) -> list[list[int]]:
    """Reduce views that are not contiguous, memory that cannot be written, and an array on another device."""
    rank, _ = rank_and_size(group)
    collectives = registry.collectives_for(group, 20.0)
    array = np.arange(10, dtype=np.int32) + np.int32(rank)
    array.flags.writeable = False
    offered: list[Any] = [array, array[::3], array[::-3]]
    if not is_mpi(group):
        import array_api_strict as strict
        import torch

        offered += [torch.from_numpy(array.copy())[::3]]
        offered += [strict.arange(3, dtype=strict.int32, device=strict.Device("device1"))]
    results = [collectives.start_max(one)() for one in offered]
    assert [type(result) for result in results] == [type(one) for one in offered]
    assert is_mpi(group) or results[-1].device == offered[-1].device
    assert array.tolist() == list(range(rank, rank + 10))
    return [[int(value) for value in result] for result in results]


# Over MPI.


@alone
def many_scalers(comm: Any, count: int) -> str:
    """Construct more scalers than there are communicators to be had, over one group and over short-lived ones."""
    for _ in range(count):
        gradscale.ShardedGradScaler(group=comm, timeout=20.0)
    for _ in range(count):
        short_lived = comm.Dup()
        skips(short_lived, False)
        short_lived.Free()
    return "done"


def what_is_no_communicator(comm: Any) -> list[str]:
    """Offer what cannot be a group."""
    from mpi4py import MPI

    half = comm.Split(color=min(comm.rank, 1))
    between = half.Create_intercomm(0, comm, 1 if comm.rank == 0 else 0)
    offered = (between, MPI.COMM_NULL, [], "world", None, comm.Get_group())
    said = [said_by(lambda one=one: gradscale.ShardedGradScaler(group=one, timeout=5.0)) for one in offered]
    between.Free()
    half.Free()
    return said


@alone
def dropped_by_mpi(comm: Any) -> list[bool]:
    """Start a reduction and forget it before the other ranks have come; MPI still needs its memory."""
    collectives = registry.collectives_for(comm, 5.0)
    alive = []
    for rank in range(comm.size):
        if comm.rank == rank:
            sent = np.zeros(3, dtype=np.int32)
            watched = weakref.ref(sent)
            collectives.start_max(sent)
            del sent
            gc.collect()
            alive.append(watched() is not None)
        comm.Barrier()
    return alive


# Over torch.


def vector(*values: int) -> Any:
    """Return what is reduced."""
    import torch

    return torch.tensor(values, dtype=torch.int32)


def mesh_of_the_world(group: Any, shape: tuple[int, ...], bad_rank: int) -> tuple[Any, ...]:
    """Agree over a mesh that covers the world; the rank and size, and whether its group is the world's."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    collectives: Any = registry.collectives_for(mesh, 20.0)
    is_the_worlds = collectives._group.group is group
    return skips(mesh, group.rank() == bad_rank), collectives.rank, collectives.size, is_the_worlds


def part_of_a_mesh(group: Any, bad_rank: int) -> dict[str, Any]:
    """Agree over two dimensions of three, which are the rows of a grid of 2 x 2 ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))["b", "c"]
    first, second = (registry.collectives_for(mesh, 20.0) for _ in range(2))
    return {
        "skips": skips(mesh, group.rank() == bad_rank),
        "size": first.size,
        "made once": first._group.group is second._group.group,
        "is the world's": first._group.group is group,
    }


def outside(group: Any) -> dict[str, str]:
    """Offer groups and meshes that this rank is not in, from the last rank, and use them on the others."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    members = list(range(group.size() - 1))
    part = dist.new_group(members)
    mesh = DeviceMesh("cpu", [members], mesh_dim_names=("a", "b"))
    answers = {"group": refusal(part), "mesh": refusal(mesh)}
    if group.rank() in members:
        assert skips(part, group.rank() == 0) == skips(mesh, group.rank() == 0) == (True, 32768.0)
    return answers


def what_is_no_group(group: Any) -> dict[str, str]:
    """Offer what is not a group, and one whose only device this machine lacks."""
    import torch
    import torch.distributed as dist

    offered = {"str": "world", "int": 3, "ProcessGroupGloo": group._get_backend(torch.device("cpu")), "list": [group]}
    said = {name: refusal(one) for name, one in offered.items()}
    if not torch.cuda.is_available():
        said["device"] = refusal(dist.new_group(backend="cuda:gloo"))
    return said


def worlds_end(group: Any, folder: str) -> dict[str, Any]:
    """Destroy the world, go on without one, and begin another."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from gradscale_torch.collectives import TorchCollectives

    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (size, 1))
    explicit, default = TorchCollectives(group, 20.0), TorchCollectives(None, 20.0)
    dist.destroy_process_group()
    late = TorchCollectives(None, 20.0)
    scaler = gradscale.ShardedGradScaler(group=late)
    said: dict[str, Any] = {"late": (late.rank, late.size)}

    def ask(when: str) -> None:
        for name, collectives in (("explicit", explicit), ("default", default)):
            said[f"{name}{when}"] = said_by(
                lambda collectives=collectives: said.update(largest=collectives.start_max(vector(rank))().tolist())
            )
        said[f"group{when}"], said[f"mesh{when}"] = refusal(group), refusal(mesh)

    ask(" without")
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=size)
    ask("")
    said["late skipped"] = iterate(scaler, SGD(None), gradients("numpy", np.inf if rank == 0 else 1.0)).skipped
    said["late after"] = (late.rank, late.size)
    return said


def two_under_way_time_out(group: Any, folder: str) -> list[str]:
    """Wait in vain for the first of two reductions, then ask for the second."""
    if group.rank() == 0:
        wait_for(folder, "gave up", group.size() - 1)
        return []
    collectives = registry.collectives_for(group, 0.5)
    pending = [collectives.start_max(vector(1)), collectives.start_max(vector(2))]
    said = [said_by(finish).partition(":")[0] for finish in (*pending, *pending)]
    tell(folder, "gave up", group.rank())
    return said


def late_member_of_a_mesh(group: Any, late_rank: int, folder: str) -> list[Any]:
    """Construct over part of a mesh, on one rank too late, and once more in time."""
    from torch.distributed.device_mesh import DeviceMesh

    rank, size = group.rank(), group.size() - 1
    mesh = DeviceMesh("cpu", [list(range(size))], mesh_dim_names=("a", "b"))
    if rank == size:
        return []
    said = []
    if rank == late_rank:
        wait_for(folder, "gave up", size - 1)
    else:
        said = [said_by(lambda: gradscale.ShardedGradScaler(group=mesh, timeout=0.5))]
        tell(folder, "gave up", rank)
    return [*said, skips(mesh, rank == late_rank)]


def dropped_by_torch(group: Any) -> dict[str, Any]:
    """Start reductions and forget them before the other ranks have come; torch still needs their memory."""
    import torch
    import torch.distributed as dist

    from gradscale_torch import collectives as adapter

    collectives = registry.collectives_for(group, 20.0)
    largest = []
    for rank in range(group.size()):
        if group.rank() == rank:
            for value in range(20):
                collectives.start_max(vector(1000 * rank + value))
            gc.collect()
            [torch.zeros(1, dtype=torch.int32) for _ in range(1000)]
            time.sleep(0.2)
            dist.barrier()
        else:
            time.sleep(0.1)
            largest.append([collectives.start_max(vector(-1))().item() for _ in range(20)])
            dist.barrier()
    collectives.start_max(vector(0))()
    return {"largest": largest, "kept": len(adapter._under_way)}


LISTS = [
    [[rank, 1, 2, 3] for rank in range(3)],
    [[5 * (rank == 1), 7, -7] for rank in range(3)],
    [[0, rank, -rank] for rank in range(3)],
    [[-rank, 4, 5, 6] for rank in range(3)],
    [[2**31 - 1 - rank, 1, 2] for rank in range(3)],
    [[0, 2**31 - 1, -(2**31) + rank] for rank in range(3)],
    [[0, 0, 0]] * 3,
    [[rank, -rank] for rank in range(3)],
    [[rank] for rank in range(3)],
]
# As long as a vector of the agreement, for which two numbers travel where they tell enough.
LISTS += [[[*one, *[7] * (22 - len(one))] for one in offered] for offered in LISTS]
"""What each of up to three ranks offers, one reduction after the other."""


def numbers(group: Any) -> list[list[int]]:
    """Reduce lists of numbers: verdicts that differ, fingerprints that differ, the largest numbers, short lists."""
    collectives: Any = registry.collectives_for(group, 20.0)
    results = []
    for offered in LISTS:
        pending = collectives.start_max(list(offered[group.rank()]))
        result = pending()
        assert type(result) is list
        assert pending() == result
        results.append(result)
    return results


def finished_in_another_order(group: Any, bad: int) -> dict[str, Any]:
    """Step two optimizers with bad gradients, on rank 0 the second first; what happened, and how many reductions."""
    import torch
    from fsdp_scenarios import started

    import gradscale_torch

    skips(group, False)
    scaler = gradscale_torch.ShardedGradScaler("cpu", init_scale=4.0)
    optimizers = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(bad + 1)]
        optimizers.append(torch.optim.SGD(parameters, lr=1.0))
    before = started()
    scaler.scale(torch.ones(()))
    for index, optimizer in enumerate(optimizers):
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            # Each rank has its own count of bad ones.
            parameter.grad = torch.full((2,), np.inf if number < bad - group.rank() - index else 1.0)
        scaler.unscale_(optimizer)
    for optimizer in reversed(optimizers) if group.rank() == 0 else optimizers:
        scaler.step(optimizer)
    scaler.update()
    counts = [scaler.last_step(optimizer).nonfinite for optimizer in optimizers]
    return {"nonfinite": counts, "scale": scaler.get_scale(), "reductions": started() - before}


def polled(group: Any, folder: str) -> str:
    """Wait as on accelerators, by asking again and again; first for ranks that come, then for one that does not."""
    import torch

    collectives: Any = registry.collectives_for(group, 1.0)
    collectives._carriers = {"cpu": "ucc"}
    check_collectives(collectives, torch.zeros(()), repetitions=20)
    pending = collectives.start_max(vector(group.rank()))
    pending.wait()
    assert pending._work.is_completed()
    assert pending().tolist() == [group.size() - 1]
    if group.rank() == 0:
        wait_for(folder, "gave up", group.size() - 1)
        return ""
    said = said_by(lambda: collectives.start_max(vector(1)).wait())
    tell(folder, "gave up", group.rank())
    return said


# GroupAgreement, over any group.


def _on_host(state: gradscale.ScaleState) -> list[int]:
    return registry.backend_for(state.scale).read(fingerprint(state))


def pure_loop(group: Any, bad_rank: int, value: float, library: str) -> dict[str, Any]:
    """Train four steps; at the second one rank's gradients are not finite."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale(growth_interval=2)
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    state = policy.init(loss(library))
    counts, states = [], []
    for step in range(4):
        grads = gradients(library, value if (rank, step) == (bad_rank, 1) else 1.0)
        _, nonfinite = gradscale.unscale(grads, state)
        agreed = agree(nonfinite, state)
        if type(agreed) is not type(nonfinite) or agreed.shape != () or agreed.dtype != nonfinite.dtype:
            msg = f"the count must come back as it was given, got {agreed!r} for {nonfinite!r}"
            raise TypeError(msg)
        counts.append(int(agreed))
        state = policy.update(state, nonfinite=agreed)
        states.append(_on_host(state))
    return {"counts": counts, "states": states}


def differing(group: Any, drifting_rank: int, what: str) -> dict[str, Any]:
    """Let one rank hold another scale, have another policy, or leave out a call; then agree twice."""
    rank, _ = rank_and_size(group)
    is_drifting = rank == drifting_rank
    policy = gradscale.DynamicScale(growth_interval=7 if what == "policy" and is_drifting else 5)
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    like = loss("numpy")
    state = gradscale.DynamicScale(init_scale=2.0 if what == "scale" and is_drifting else 4.0).init(like)
    _, nonfinite = gradscale.unscale(gradients("numpy"), state)
    if what == "call" and is_drifting:
        # As if this rank had made one call more before.
        agree._calls += 1
    failures = []
    for _ in range(2):
        try:
            agree(nonfinite, state)
        except gradscale.GradscaleError as error:
            failures.append(Failure.of(error))
    return {"failures": failures}


def exhaustion(group: Any, bad_rank: int) -> list[str]:
    """Overflow on one rank at a minimum that must be raised, and go on."""
    rank, _ = rank_and_size(group)
    policy = gradscale.DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    agree = gradscale.GroupAgreement(group, policy, timeout=20.0)
    state = policy.init(loss("numpy"))
    raised = []
    for value in (float("nan"), 1.0):
        _, nonfinite = gradscale.unscale(gradients("numpy", value if rank == bad_rank else 1.0), state)
        try:
            agree(nonfinite, state)
            raised.append("")
        except gradscale.ScaleUnderflowError as error:
            raised.append(str(error))
    return raised
