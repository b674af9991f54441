"""What the ranks do in the tests of torch.distributed itself: groups, meshes, worlds that end, ranks that come late."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from events import tell, wait_for
from scenarios import SGD, gradients, iterate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from worlds import Failure

import gradscale
from gradscale.testing import check_collectives
from gradscale_torch import ShardedGradScaler
from gradscale_torch import collectives as torch_collectives
from gradscale_torch.collectives import TorchCollectives


def skips(group: Any, bad_rank: int) -> tuple[bool, float]:
    """Make an iteration that overflows on one rank of the world; whether this rank skipped, and its scale."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    report = iterate(scaler, SGD(None), gradients("numpy", np.nan if dist.get_rank() == bad_rank else 1.0))
    return report.skipped, scaler.get_scale()


def refusal(group: Any) -> str:
    """Return what a scaler or the adapter itself says to something that cannot be its group."""
    try:
        TorchCollectives(group, 5.0)
    except gradscale.GradscaleError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def vector(*values: int) -> torch.Tensor:
    """Return what is reduced."""
    return torch.tensor(values, dtype=torch.int32)


def mesh_of_the_world(group: Any, shape: tuple[int, ...], bad_rank: int) -> dict[str, Any]:
    """Agree over a mesh that covers the world."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    collectives = TorchCollectives(mesh, 20.0)
    return {
        "skips": skips(mesh, bad_rank),
        "rank": collectives.rank,
        "size": collectives.size,
        "is the world's": collectives._group.group is group,
    }


def part_of_a_mesh(group: Any, bad_rank: int) -> dict[str, Any]:
    """Agree over two dimensions of three, which are the rows of a grid of 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))["b", "c"]
    first, second = TorchCollectives(mesh, 20.0), TorchCollectives(mesh, 20.0)
    return {
        "skips": skips(mesh, bad_rank),
        "size": first.size,
        "made once": first._group.group is second._group.group,
        "is the world's": first._group.group is group,
    }


def grid(_: Any, bad_rank: int, kind: str) -> tuple[bool, float]:
    """Agree over both dimensions of a grid in turn, or over its rows alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    groups = {"both": mesh.get_all_groups(), "rows": rows, "mixed": [rows, mesh["row"]]}
    return skips(groups[kind], bad_rank)


def outside(_: Any) -> dict[str, str]:
    """Offer groups and meshes that this rank is not in, from the last rank, and use them on the others."""
    members = list(range(dist.get_world_size() - 1))
    group = dist.new_group(members)
    mesh = DeviceMesh("cpu", [members], mesh_dim_names=("a", "b"))
    answers = {"group": refusal(group), "mesh": refusal(mesh)}
    if dist.get_rank() in members:
        assert skips(group, 0) == skips(mesh, 0) == (True, 32768.0)
    return answers


def wrong_groups(group: Any) -> dict[str, str]:
    """Offer what is not a group."""
    offered = {"text": "world", "number": 3, "backend": group._get_backend(torch.device("cpu")), "list": [group]}
    return {name: refusal(one) for name, one in offered.items()}


def devices_elsewhere(_: Any) -> str:
    """Offer a group whose only device this machine lacks."""
    return refusal(dist.new_group(backend="cuda:gloo"))


def worlds_end(group: Any, folder: str) -> dict[str, Any]:
    """Destroy the world, go on without one, and begin another."""
    rank, size = group.rank(), group.size()
    mesh = init_device_mesh("cpu", (size, 1))
    explicit, default = TorchCollectives(group, 20.0), TorchCollectives(None, 20.0)
    dist.destroy_process_group()
    late = TorchCollectives(None, 20.0)
    scaler = gradscale.ShardedGradScaler(group=late)
    said: dict[str, Any] = {"late": (late.rank, late.size)}

    def ask(name: str, collectives: TorchCollectives) -> None:
        try:
            said[name] = collectives.start_max(vector(rank))().tolist()
        except gradscale.GradscaleError as error:
            said[name] = f"{type(error).__name__}: {error}"

    ask("explicit without", explicit)
    ask("default without", default)
    said["group without"], said["mesh without"] = refusal(group), refusal(mesh)
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=size)
    ask("explicit", explicit)
    ask("default", default)
    said["late skipped"] = iterate(scaler, SGD(None), gradients("numpy", np.inf if rank == 0 else 1.0)).skipped
    said["late after"] = (late.rank, late.size)
    said["group"], said["mesh"] = refusal(group), refusal(mesh)
    return said


def after_a_timeout(group: Any, late_rank: int, folder: str) -> dict[str, Any]:
    """Time out, wait for the late rank by other means, and go on over a new group."""
    others_way = dist.new_group()
    skips(group, 0)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=0.5)
    earlier = TorchCollectives(group, 0.5)
    refused = []
    if group.rank() == late_rank:
        wait_for(folder, "gave up", group.size() - 1)
    try:
        iterate(scaler, SGD(None), gradients("numpy"))
    except gradscale.CollectiveTimeoutError:
        tell(folder, "gave up", group.rank())
        refused = [refusal(group), refusal(None), refusal(init_device_mesh_of(group))]
        try:
            earlier.start_max(vector(1))
        except gradscale.BackendError as error:
            refused.append(f"{type(error).__name__}: {error}")
    # The late rank met the messages of the others, and knows nothing of their timeout; they tell it.
    failures = torch.tensor(len(refused) // 4)
    dist.all_reduce(failures, group=others_way)
    return {"failures": int(failures), "refused": refused, "skips": skips(dist.new_group(), late_rank)}


def init_device_mesh_of(group: Any) -> DeviceMesh:
    """Return a mesh over a group, without a message."""
    return DeviceMesh.from_group(group, "cpu")


def two_under_way_time_out(group: Any, folder: str) -> list[str]:
    """Wait in vain for the first of two reductions, then ask for the second."""
    if group.rank() == 0:
        wait_for(folder, "gave up", group.size() - 1)
        return []
    collectives = TorchCollectives(group, 0.5)
    pending = [collectives.start_max(vector(1)), collectives.start_max(vector(2))]
    said = []
    for finish in (*pending, *pending):
        try:
            finish()
        except gradscale.GradscaleError as error:
            said.append(type(error).__name__)
    tell(folder, "gave up", group.rank())
    return said


def late_member_of_a_mesh(_: Any, late_rank: int, folder: str) -> list[Any]:
    """Construct over part of a mesh, on one rank too late, and once more in time."""
    size = dist.get_world_size() - 1
    mesh = DeviceMesh("cpu", [list(range(size))], mesh_dim_names=("a", "b"))
    if dist.get_rank() == size:
        return []
    said: list[Any] = []
    if dist.get_rank() == late_rank:
        wait_for(folder, "gave up", size - 1)
    else:
        try:
            gradscale.ShardedGradScaler(group=mesh, timeout=0.5)
        except gradscale.CollectiveTimeoutError as error:
            said.append(Failure.of(error))
        tell(folder, "gave up", dist.get_rank())
    return [*said, skips(mesh, late_rank)]


def dropped(group: Any) -> dict[str, Any]:
    """Start reductions and forget them before the other ranks have come; torch still needs their memory."""
    collectives = TorchCollectives(group, 20.0)
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
    return {"largest": largest, "kept": len(torch_collectives._under_way)}


def odd_arrays(group: Any) -> list[list[int]]:
    """Reduce views that are not contiguous, memory that cannot be written, and an array on another device."""
    import array_api_strict as strict

    collectives = TorchCollectives(group, 20.0)
    tensor = torch.arange(10, dtype=torch.int32) + group.rank()
    array = tensor.numpy().copy()
    array.flags.writeable = False
    elsewhere = strict.arange(3, dtype=strict.int32, device=strict.Device("device1"))
    offered = [tensor[::3], array, array[::3], array[::-3], elsewhere]
    results = [collectives.start_max(one)() for one in offered]
    assert [type(result) for result in results] == [type(one) for one in offered]
    assert results[-1].device == elsewhere.device
    assert tensor.tolist() == array.tolist() == list(range(group.rank(), group.rank() + 10))
    return [[int(value) for value in result] for result in results]


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
    collectives = TorchCollectives(group, 20.0)
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
    skips(group, 0)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizers = []
    for _ in range(2):
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(bad + 1)]
        optimizers.append(torch.optim.SGD(parameters, lr=1.0))
    reductions = []
    original = TorchCollectives.reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        reductions.append(1)
        return original(*args, **kwargs)

    TorchCollectives.reduce = counting  # type: ignore[method-assign]
    try:
        scaler.scale(torch.ones(()))
        for index, optimizer in enumerate(optimizers):
            for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
                # Each rank has its own count of bad ones.
                parameter.grad = torch.full((2,), np.inf if number < bad - group.rank() - index else 1.0)
            scaler.unscale_(optimizer)
        for optimizer in reversed(optimizers) if group.rank() == 0 else optimizers:
            scaler.step(optimizer)
        scaler.update()
    finally:
        TorchCollectives.reduce = original  # type: ignore[method-assign]
    counts = [scaler.last_step(optimizer).nonfinite for optimizer in optimizers]
    return {"nonfinite": counts, "scale": scaler.get_scale(), "reductions": len(reductions)}


def wrong_arrays(group: Any) -> list[str]:
    """Try to reduce what is not a 1-d int32 array."""
    collectives = TorchCollectives(group, 5.0)
    messages = []
    for array in (
        torch.zeros(3),
        torch.zeros(3, dtype=torch.int64),
        vector(1)[None],
        np.zeros(3),
        np.zeros((1, 3), "i4"),
    ):
        try:
            collectives.start_max(array)
            messages.append("accepted")
        except gradscale.InvalidValueError as error:
            messages.append(str(error).rpartition("got ")[2])
    return messages


def overlapped(group: Any, rounds: int) -> float:
    """Use the group between unscale_ and step, blocking and not, as gradient clipping does."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    optimizer = SGD(None)
    total = torch.zeros(())
    for iteration in range(rounds):
        scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy")
        mine = torch.full((16,), group.rank(), dtype=torch.int32)
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, async_op=True)
        scaler.unscale_(optimizer)
        norm = torch.ones(())
        dist.all_reduce(norm)
        total += norm
        if iteration % 2:
            work.wait()
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            work.wait()
        scaler.update()
        assert mine.tolist() == [group.size() - 1] * 16
    return total.item()


def polled(group: Any, folder: str) -> list[str]:
    """Wait as on accelerators, by asking again and again; first for ranks that come, then for one that does not."""
    collectives = TorchCollectives(group, 1.0)
    collectives._carriers = {"cpu": "ucc"}
    check_collectives(collectives, torch.zeros(()), repetitions=20)
    pending = collectives.start_max(vector(group.rank()))
    pending.wait()
    assert pending._work.is_completed()
    assert pending().tolist() == [group.size() - 1]
    if group.rank() == 0:
        wait_for(folder, "gave up", group.size() - 1)
        return []
    try:
        collectives.start_max(vector(1)).wait()
    except gradscale.CollectiveTimeoutError as error:
        return [str(error)]
    finally:
        tell(folder, "gave up", group.rank())
    return ["came"]


def never_an_array(group: Any, empty_rank: int) -> list[Any]:
    """Take part on a rank that never has a loss, a gradient or a backend named."""
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    optimizer = SGD(None)
    seen = []
    for iteration in range(3):
        if group.rank() == empty_rank:
            optimizer.grads = []
        else:
            scaler.scale(torch.ones(()))
            optimizer.grads = gradients("torch", np.nan if iteration == 1 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.last_step(optimizer).skipped, scaler.get_scale()))
    return seen
