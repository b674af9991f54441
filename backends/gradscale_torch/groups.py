"""Which process group an agreement goes over, and on which of its devices: groups, meshes, the default group."""

from __future__ import annotations

import math
import os
import weakref
from datetime import timedelta
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradscale.errors import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    InvalidTypeError,
    InvalidValueError,
)
from gradscale.waiting import on_fork, poll, refuse_forked

__all__ = [
    "HOST_BACKENDS",
    "LOOKALIKE",
    "carriers",
    "default_group",
    "example_device",
    "is_alive",
    "is_lookalike",
    "resolve",
    "seconds",
    "travels_on",
]

# Backends that are given CPU tensors only. They are registered for accelerators too, but MPI needs a library built for
# that, gloo copies to the CPU itself, and the fake one of torch's tests never says that it is done.
HOST_BACKENDS = frozenset({"gloo", "mpi", "fake"})

# The backend of an object that only looks like a process group.
LOOKALIKE = "lookalike"

# "For ever", and times close to it, for libraries that count in 64-bit nanoseconds.
_LONGEST = 365 * 86400.0
_LONGEST_PAUSE = 5e-2
_CONSTRUCTION = "the construction of a ShardedGradScaler"

# The groups that were made for meshes, by the default group of their world and their ranks.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


# The process that each group belongs to, by its id; a child after fork inherits the objects, and not their threads.
_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _note_owner(parent: int) -> None:
    """Take note of the default group, which need not have been used before the fork."""
    group = default_group()
    if group is not None:
        _owners.setdefault(group, parent)


on_fork(_note_owner)


def seconds(timeout: float) -> float:
    """Return a timeout as a number that torch can take."""
    return min(timeout, _LONGEST)


def default_group() -> dist.ProcessGroup | None:
    """Return the default group, or None before ``init_process_group``."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def is_lookalike(group: object) -> TypeGuard[dist.ProcessGroup]:
    """Return whether an object that is none of torch's groups has ``rank()``, ``size()`` and ``allreduce()``."""
    # Torch's own backends have them, too, but are used through their group.
    is_backend = type(group).__module__.startswith(("torch._C.", "torch.distributed."))
    is_torchs = isinstance(group, (dist.ProcessGroup, DeviceMesh)) or is_backend
    return not is_torchs and all(callable(getattr(group, name, None)) for name in ("rank", "size", "allreduce"))


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group belongs to the present world; torch itself would go on using a destroyed one."""
    if is_lookalike(group):
        return True
    try:
        dist.get_backend(group)
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True


def resolve(group: object, timeout: float) -> dist.ProcessGroup:
    """Return the process group of a user's ``group``: alive, with this process in it and a device of this machine.

    None is the default group. A mesh is one group of all its ranks: the default group if it covers the world, its own
    group if it has one dimension, else a group that is made once for these ranks, collectively over them.
    """
    if not dist.is_available():
        msg = "this build of torch has no torch.distributed: install another, or use gradscale's other groups"
        raise BackendError(msg)
    if group is None:
        found = default_group()
        if found is None:
            raise CallOrderError(_NOT_INITIALISED)
    elif isinstance(group, DeviceMesh):
        found = _of_mesh(group, timeout)
    elif isinstance(group, dist.ProcessGroup) or is_lookalike(group):
        found = group
    elif _is_non_member(group):
        msg = (
            f"group must be a process group that this process belongs to, got GroupMember.NON_GROUP_MEMBER, which "
            f"new_group() returns outside the group (this is rank {dist.get_rank() if default_group() else '?'} of the "
            f"world): construct the scaler on members only, or pass another group here"
        )
        raise InvalidValueError(msg)
    else:
        msg = (
            f"group must be a torch.distributed ProcessGroup, a DeviceMesh, None for the default group, or a list of "
            f"these, got {group!r} of type {type(group).__name__}"
        )
        raise InvalidTypeError(msg)
    _require_alive(found)
    owner = _owners.setdefault(found, os.getpid())
    if owner != os.getpid():
        refuse_forked("torch.distributed", f"this one was made by process {owner}")
    if found.rank() < 0:
        msg = f"group must be a process group that this process belongs to, got {found!r}, in which it has no rank"
        raise InvalidValueError(msg)
    if not carriers(found):
        msg = (
            f"group must carry tensors of a device of this machine, got a group of {_configuration(found)!r}, and "
            f"none of these is available here: pass one that has gloo, such as new_group(backend='gloo')"
        )
        raise InvalidValueError(msg)
    return found


_NOT_INITIALISED = (
    "torch.distributed is not initialised, so there is no default group: call torch.distributed.init_process_group() "
    "before the first step, in a program that torchrun starts (torchrun --nproc-per-node 2 program.py)"
)


def _is_non_member(group: object) -> bool:
    # An int, an object or None, depending on torch's version and on how new_group was called.
    non_member = dist.GroupMember.NON_GROUP_MEMBER
    return type(group) is type(non_member) and bool(group == non_member)


def _require_alive(group: dist.ProcessGroup) -> None:
    if not is_alive(group):
        msg = (
            f"group must belong to the present world, got {group!r}, a process group of a destroyed world, or one that "
            f"was never made by init_process_group(), new_group() or a DeviceMesh: pass a group made after the last "
            f"destroy_process_group()"
        )
        raise InvalidValueError(msg)


def _of_mesh(mesh: DeviceMesh, timeout: float) -> dist.ProcessGroup:
    world = default_group()
    if world is None:
        msg = f"group must belong to the present world, got {mesh!r}, a mesh of a destroyed world: make it anew"
        raise InvalidValueError(msg)
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if dist.get_rank() not in ranks:
        msg = (
            f"group must be a mesh that this process belongs to, got {mesh!r} on rank {dist.get_rank()} of the world: "
            f"construct the scaler on the mesh's ranks only"
        )
        raise InvalidValueError(msg)
    try:
        dimensions = mesh.get_all_groups()
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        msg = f"group must be a mesh of the present world, got {mesh!r}, whose groups are not there: {error}"
        raise InvalidValueError(msg) from error
    for dimension in dimensions:
        _require_alive(dimension)
    if mesh.ndim == 1:
        return dimensions[0]
    if len(ranks) == world.size():
        return world
    made = _made.setdefault(world, {})
    if ranks not in made:
        made[ranks] = _make(ranks, mesh, timeout)
    return made[ranks]


def _make(ranks: tuple[int, ...], mesh: DeviceMesh, timeout: float) -> dist.ProcessGroup:
    """Make a group of some ranks of the world; collective over these, and over no others."""
    if dist.get_backend() == "mpi":
        msg = (
            f"torch's MPI backend cannot make a group for {mesh!r} without the ranks outside it: pass the groups of "
            f"its dimensions, group=mesh.get_all_groups()"
        )
        raise InvalidValueError(msg)
    # torch waits for the members without looking at signals; once all have come, it does not wait.
    _meet(ranks, timeout)
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=seconds(timeout)),
            use_local_synchronization=True,
            group_desc="gradscale",
        )
    except (NotImplementedError, RuntimeError, ValueError) as error:
        msg = (
            f"torch failed to make a group for {mesh!r}: {error}. Pass the groups of its dimensions instead, "
            f"group=mesh.get_all_groups()"
        )
        raise BackendError(msg) from error
    return made


def _meet(ranks: tuple[int, ...], timeout: float) -> None:
    """Wait in the store of the world until all members have come, or the time is over.

    The store may have outlived worlds in which they met before.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"gradscale/{','.join(map(str, ranks))}"
    size = len(ranks)
    wanted = math.ceil(store.add(key, 1) / size) * size
    try:
        if not poll(lambda: store.add(key, 0) >= wanted, timeout, longest_pause=_LONGEST_PAUSE):
            raise CollectiveTimeoutError(ranks.index(dist.get_rank()), size, timeout, operation=_CONSTRUCTION)
    except RuntimeError as error:
        msg = f"the store of the world failed while the ranks {ranks} of a mesh met: {error}"
        raise BackendError(msg) from error
    except BaseException:
        store.add(key, -1)
        raise


def _configuration(group: dist.ProcessGroup) -> str:
    return str(dist.get_backend_config(group))


def carriers(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends of a group by device type, of those devices that this machine has."""
    if is_lookalike(group):
        return {"cpu": LOOKALIKE}
    pairs = [pair.partition(":") for pair in _configuration(group).split(",")]
    return {kind: backend for kind, _, backend in pairs if backend and _is_available(kind)}


def _is_available(kind: str) -> bool:
    if kind == "cpu":
        return True
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (AttributeError, RuntimeError):
        return False


def travels_on(found: dict[str, str], device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return the device on which a tensor of ``device`` is reduced.

    Its own, if the group carries it without the CPU; else the CPU, if the group has a backend for it; else the
    group's accelerator. So the ranks' tensors must all be on devices of one type.
    """
    if device.type in found and (device.type == "cpu" or found[device.type] not in HOST_BACKENDS):
        return device
    if "cpu" in found:
        return torch.device("cpu")
    kind = next(iter(found))
    return group.bound_device_id or torch.device(kind, torch.get_device_module(kind).current_device())


def example_device(found: dict[str, str], group: dist.ProcessGroup, asked: object) -> torch.device:
    """Return the device for a rank that has no arrays: that of the mesh, or the group's accelerator, or the CPU."""
    kinds = [kind for kind, backend in found.items() if kind != "cpu" and backend not in HOST_BACKENDS]
    if isinstance(asked, DeviceMesh) and asked.device_type in found:
        kinds = [asked.device_type] if asked.device_type in kinds else []
    return travels_on(found, torch.device(kinds[0] if kinds else "cpu"), group)
