"""TorchCollectives: agreement over torch.distributed's groups and meshes, non-blocking, with a timeout."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeGuard

import torch
import torch.distributed as dist
from array_api_compat import array_namespace
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from gradscale import registry, waiting
from gradscale.core.protocols import Array
from gradscale.core.validation import wrong_type, wrong_value
from gradscale.errors import BackendError, CallOrderError, CollectiveTimeoutError, InvalidValueError
from gradscale_torch.devices import CPU, forbid_capture, is_capturing

Tensor = torch.Tensor

# How long a wait in gloo does not see Ctrl-C.
_MOMENT = timedelta(milliseconds=50)
# Seconds by which the library's own timeout is later, so that a user sees ours.
_LATER = 10.0

# Unfinished work, which torch still reads and writes, with its buffer and its group, even if it was given up or nobody
# waits for it any more.
_under_way: dict[int, tuple[dist.Work, Tensor, dist.ProcessGroup]] = {}

_OF_THE_DEVICE = "agree over a group of this device, such as one of NCCL, on gradients that are on it"
CPU_IN_DLPACK = 1


@atexit.register
def _keep_groups_alive() -> None:
    """Keep groups with unfinished work alive for ever: freeing one of gloo's waits for ranks that may never come."""
    _drop_finished_work()
    for _, _, group in _under_way.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# Stands for the default group before there is one.
_DEFAULT_GROUP = types.SimpleNamespace()


class TorchCollectives:
    """MAX all-reduces over a process group or mesh, issued in the group itself, in one order with the user's own.

    ``group`` None is the default group at the time of each collective. An object with ``rank()``, ``size()`` and
    ``allreduce(tensors, options)`` serves as well, but waits without a timeout. Constructing is collective over a mesh
    of several dimensions that does not cover the world.

    If the group has several backends ("cpu:gloo,cuda:nccl"), the ranks' arrays must be on devices of one type. The CPU
    sees Ctrl-C and the timeout where it waits: over gloo and MPI in the call that finishes a reduction. On an
    accelerator that call makes the stream wait, and the CPU waits in ``wait``, before it reads the result; there the
    group is aborted when it is given up. What the CPU never reads is left to the library's own watchdog.
    """

    @property
    def identity(self) -> object:
        """The process group, or an object that stands for the default group while there is none."""
        if self._user_group is None or self._group is None:
            # Of the world that there is now.
            return default_group() or _DEFAULT_GROUP
        return self._group.group

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, timeout: float) -> None:
        self._user_group = group
        self._timeout = timeout
        self._group: waiting.GroupWait | None = None
        self.rank, self.size = -1, 0
        if group is not None or default_group() is not None:
            self._resolve().require_usable()

    def __repr__(self) -> str:
        return f"TorchCollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    def start_max(self, x: Array, /) -> Reduction:
        """Begin a MAX all-reduce of 1-d int32, where :func:`travels_on` says; calling the result finishes it."""
        group = self.resolve()
        waiting.require_message(x)
        message = x if isinstance(x, Tensor) else _as_tensor(x)
        device = travels_on(self._carriers, message.device, group.group)
        if device != message.device:
            forbid_capture(device if message.is_cpu else message.device, _OF_THE_DEVICE)
        # It is sent, and then receives the result.
        buffer = message.to(device, copy=True, memory_format=torch.contiguous_format)
        return Reduction(self._carriers.get(device.type), group, self.reduce(group, buffer), buffer, x)

    @property
    def within(self) -> Callable[[float], contextlib.AbstractContextManager[None]]:
        """Ends waits after some seconds; an object that only looks like a group has none, and waits for ever."""
        group = self.resolve()
        if self._is_lookalike:
            msg = "what only looks like a process group waits for ever"
            raise AttributeError(msg)
        return group.within

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a 0-d float64 tensor over the ranks, on its device; every rank calls it."""
        group = self.resolve()
        buffer = x.detach().to(travels_on(self._carriers, x.device, group.group), copy=True).reshape(1)
        work = self.reduce(group, buffer, "SUM")
        total: Tensor = Reduction(self._carriers.get(buffer.device.type), group, work, buffer, x)()
        return total.reshape(())

    def reduce(self, group: waiting.GroupWait, buffer: Tensor, operation: str = "MAX") -> dist.Work:
        """Start an all-reduce in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, operation))
        if hasattr(options, "asyncOp"):
            # Older torch, such as 2.6, has no other reductions.
            options.asyncOp = True
        options.timeout = self._librarys_timeout
        work: dist.Work = group.run(group.group.allreduce, [buffer], options)
        # Captured work belongs to the graph, and during the capture nothing may be queried.
        is_captured = not buffer.is_cpu and is_capturing(buffer.device)
        if not self._is_lookalike and not is_captured:
            _drop_finished_work()
            _under_way[id(work)] = (work, buffer, group.group)
        return work

    def example(self) -> Tensor:
        """Return a 0-d float32 tensor on a device of the group, for a rank that never has an array."""
        group = self.resolve().group
        return torch.zeros((), dtype=torch.float32, device=example_device(self._carriers, group, self._user_group))

    def resolve(self) -> waiting.GroupWait:
        """Return the group, looked up at first use and, for the default group, when another world has begun.

        Before, rank and size of the default group are not known.
        """
        group = self._group
        if group is None or (self._user_group is None and dist.group.WORLD is not group.group):
            group = self._resolve()
        elif self._user_group is not None and not is_alive(group.group):
            msg = (
                f"the process group was destroyed after the scaler was constructed (rank {self.rank} of {self.size}): "
                f"construct the scaler after init_process_group(), or call set_group() with a group of this world"
            )
            raise BackendError(msg)
        return group

    def _resolve(self) -> waiting.GroupWait:
        group = _process_group_of(self._user_group, self._timeout)
        self._carriers = carriers(group)
        self._is_lookalike = self._carriers.get("cpu") == _LOOKALIKE
        self.rank, self.size = group.rank(), group.size()
        # gloo's own clock goes on while the process is suspended, so its time is never over.
        timeout = math.inf if self._carriers.get("cpu") == "gloo" else self._timeout + _LATER
        self._librarys_timeout = timedelta(seconds=seconds(timeout))
        self._group = waiting.GroupWait(
            group,
            library="torch.distributed",
            timeout=self._timeout,
            refusal=f"an agreement over this process group was given up on rank {self.rank} of {self.size}: pass "
            f"another one on every rank, such as torch.distributed.new_group()",
            rank=self.rank,
            size=self.size,
            on_give_up=functools.partial(_abort, group, self._carriers),
        )
        return self._group


def _abort(group: dist.ProcessGroup, carriers: dict[str, str], error: BaseException) -> None:
    """End waits on an accelerator; a group of the CPU has none there."""
    abort: Callable[[], None] | None = getattr(group, "abort", None)
    if abort is None or not any(kind != "cpu" and one not in _HOST_BACKENDS for kind, one in carriers.items()):
        return
    waiting.end_on_device(abort, "the process group", str, error)


@dataclasses.dataclass(slots=True, eq=False)
class Reduction:
    """A reduction under way. Calling it finishes it and returns the result."""

    _carrier: str | None
    _group: waiting.GroupWait
    _work: dist.Work
    _buffer: Tensor
    _x: Array
    _is_done: bool = False
    _result: Array = None

    def __call__(self) -> Array:
        """Return the result; on an accelerator the stream and not the CPU waits for the ranks."""
        if self._result is None:
            x, buffer = self._x, self._buffer
            if buffer.is_cpu or not isinstance(x, Tensor) or x.device != buffer.device:
                self.wait()
            elif not self._is_done:
                # The stream waits, and keeps the order from here on.
                self._group.run(self._work.wait)
                _under_way.pop(id(self._work), None)
            self._result = buffer.to(x.device) if isinstance(x, Tensor) else _like(buffer, x)
            self._x = None
        return self._result

    def wait(self) -> None:
        """Make the CPU wait for the ranks, on any device."""
        if not self._is_done:
            self._group.run(self._wait)
            _under_way.pop(id(self._work), None)
            self._is_done = True

    def _wait(self) -> None:
        # All that the work of a lookalike must have is wait().
        if self._carrier != _LOOKALIKE:
            # Some wait without looking at signals and the time, and accelerators do not wait at all.
            is_over = self._wait_a_moment if self._carrier == "gloo" else self._work.is_completed
            self._group.until(is_over, longest_pause=waiting.DEVICE_PAUSE)
        # Raises its failure.
        self._work.wait()

    def _wait_a_moment(self) -> bool:
        """Wait in gloo itself, which wakes this thread at once, and leaves the core to gloo's own until then."""
        try:
            self._work.wait(_MOMENT)
        except RuntimeError:
            # The moment is over, or the work has failed, which the last wait raises.
            return self._work.is_completed()
        return True


def _drop_finished_work() -> None:
    for key, (work, _, _) in list(_under_way.items()):
        # If the device has failed, whoever waits for it will see that.
        with contextlib.suppress(RuntimeError):
            if work.is_completed():
                # Another thread may have finished it.
                _under_way.pop(key, None)


def _as_tensor(x: Array) -> Tensor:
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] == CPU_IN_DLPACK:
        # torch takes no read-only memory by DLPack, and ends the process at a negative stride.
        return torch.tensor(registry.backend_for(x).read(x), dtype=torch.int32, device=CPU)
    return from_dlpack(array_namespace(x).asarray(x, copy=True))


def _like(values: Tensor, x: Array) -> Array:
    if values.is_cpu:
        return registry.backend_for(x).integers(values.tolist(), x)
    return array_namespace(x).from_dlpack(values)


# Which group.

# Backends for CPU tensors only. They are registered for accelerators too, but MPI needs a library built for
# that, gloo copies to the CPU itself, and the fake one of torch's tests never says that it is done.
_HOST_BACKENDS = frozenset({"gloo", "mpi", "fake"})

# The backend of an object that only looks like a process group.
_LOOKALIKE = "lookalike"

# "For ever", and times close to it, for libraries that count in 64-bit nanoseconds.
_LONGEST = 365 * 86400.0
_MEETING_PAUSE = 5e-2
_CONSTRUCTION = "the construction of a ShardedGradScaler"

# The groups of meshes, by the default group of their world and their ranks.
_mesh_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


# The process that each group belongs to, by its id; a child after fork inherits the objects, and not their threads.
_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def _note_owner(parent: int) -> None:
    """Record the default group, which need not have been used before the fork."""
    group = default_group()
    if group is not None:
        _owners.setdefault(group, parent)


waiting.on_fork(_note_owner)


def seconds(timeout: float) -> float:
    """Return a timeout as a number that torch accepts."""
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


def _process_group_of(user_group: object, timeout: float) -> dist.ProcessGroup:
    """Return the process group of a user's ``group``: alive, with this process in it and a device of this machine.

    None is the default group. A mesh is one group of all its ranks: the default group if it covers the world, its own
    group if it has one dimension, else a group that is made once for these ranks, collectively over them.
    """
    if not dist.is_available():
        msg = "this build of torch has no torch.distributed: install another, or use gradscale's other groups"
        raise BackendError(msg)
    # An int, an object or None, depending on torch's version and on how new_group was called.
    non_member = dist.GroupMember.NON_GROUP_MEMBER
    if user_group is None:
        group = default_group()
        if group is None:
            raise CallOrderError(_NOT_INITIALISED)
    elif isinstance(user_group, DeviceMesh):
        group = _of_mesh(user_group, timeout)
    elif isinstance(user_group, dist.ProcessGroup) or is_lookalike(user_group):
        group = user_group
    elif type(user_group) is type(non_member) and user_group == non_member:
        msg = (
            f"group must be a process group that this process belongs to, got GroupMember.NON_GROUP_MEMBER, which "
            f"new_group() returns outside the group (this is rank {dist.get_rank() if default_group() else '?'} of the "
            f"world): construct the scaler on members only, or pass another group here"
        )
        raise InvalidValueError(msg)
    else:
        expected = "a torch.distributed ProcessGroup, a DeviceMesh, None for the default group, or a list of these"
        raise wrong_type(user_group, "group", expected)
    _require_alive(group)
    owner = _owners.setdefault(group, os.getpid())
    if owner != os.getpid():
        waiting.forbid_forked("torch.distributed", f"this one was made by process {owner}")
    if group.rank() < 0:
        raise wrong_value(group, "group", "a process group that this process belongs to", ", in which it has no rank")
    if not carriers(group):
        msg = (
            f"group must carry tensors of a device of this machine, got a group of {dist.get_backend_config(group)!r}, "
            f"and none of these is available here: pass one that has gloo, such as new_group(backend='gloo')"
        )
        raise InvalidValueError(msg)
    return group


_NOT_INITIALISED = (
    "torch.distributed is not initialised, so there is no default group: call torch.distributed.init_process_group() "
    "before the first step, in a program that torchrun starts (torchrun --nproc-per-node 2 program.py)"
)


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
        raise wrong_value(mesh, "group", "of the present world", ", a mesh of a destroyed world: make it anew")
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if dist.get_rank() not in ranks:
        advice = f" on rank {dist.get_rank()} of the world: construct the scaler on the mesh's ranks only"
        raise wrong_value(mesh, "group", "a mesh that this process belongs to", advice)
    try:
        dimensions = mesh.get_all_groups()
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        advice = f", whose groups are not there: {error}"
        raise wrong_value(mesh, "group", "a mesh of the present world", advice) from error
    for dimension in dimensions:
        _require_alive(dimension)
    if mesh.ndim == 1:
        return dimensions[0]
    if len(ranks) == world.size():
        return world
    groups = _mesh_groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = _make_group(ranks, mesh, timeout)
    return groups[ranks]


def _make_group(ranks: tuple[int, ...], mesh: DeviceMesh, timeout: float) -> dist.ProcessGroup:
    """Make a group of some ranks of the world; collective over these, and over no others."""
    # torch waits for the members without looking at signals; once all have come, it does not wait.
    _await_members(ranks, timeout)
    try:
        group: dist.ProcessGroup = dist.new_group(
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
    return group


def _await_members(ranks: tuple[int, ...], timeout: float) -> None:
    """Wait in the store of the world until all members have come, or the time is over; they may have come before."""
    store = dist.distributed_c10d._get_default_store()
    key = f"gradscale/{','.join(map(str, ranks))}"
    size, own = len(ranks), ranks.index(dist.get_rank())
    target = math.ceil(store.add(key, 1) / size) * size
    try:
        wait = functools.partial(waiting.poll, lambda: store.add(key, 0) >= target, longest_pause=_MEETING_PAUSE)
        if not waiting.wait_and_tell(wait, timeout, own, size, _CONSTRUCTION):
            raise CollectiveTimeoutError(own, size, timeout, operation=_CONSTRUCTION)
    except RuntimeError as error:
        msg = f"the store of the world failed while the ranks {ranks} of a mesh met: {error}"
        raise BackendError(msg) from error
    except BaseException:
        store.add(key, -1)
        raise


def carriers(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backends of a group by device type, of those devices that this machine has."""
    if is_lookalike(group):
        return {"cpu": _LOOKALIKE}
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config(group)).split(",")]
    return {kind: backend for kind, _, backend in pairs if backend and _is_available(kind)}


def _is_available(kind: str) -> bool:
    try:
        return bool(torch.get_device_module(kind).is_available())
    except (AttributeError, RuntimeError):
        return False


def travels_on(backends: dict[str, str], device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return the device on which the group reduces a tensor of ``device``; the ranks' must all be of one type.

    It is the tensor's own, if the group carries it without the CPU; else the CPU, or else the group's accelerator.
    """
    if device.type in backends and (device.type == "cpu" or backends[device.type] not in _HOST_BACKENDS):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    kind = next(iter(backends))
    return group.bound_device_id or torch.device(kind, torch.get_device_module(kind).current_device())


def example_device(backends: dict[str, str], group: dist.ProcessGroup, user_group: object) -> torch.device:
    """Return the device for a rank that has no arrays: that of the mesh, or the group's accelerator, or the CPU."""
    kinds = [kind for kind, backend in backends.items() if kind != "cpu" and backend not in _HOST_BACKENDS]
    if isinstance(user_group, DeviceMesh) and user_group.device_type in backends:
        kinds = [user_group.device_type] if user_group.device_type in kinds else []
    return travels_on(backends, torch.device(kinds[0] if kinds else "cpu"), group)
