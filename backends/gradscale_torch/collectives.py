"""TorchCollectives: agreement over torch.distributed's groups and meshes, non-blocking, with a timeout."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from array_api_compat import array_namespace
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.errors import BackendError, InvalidValueError
from gradscale.waiting import GroupWait, in_thread, poll
from gradscale_torch import groups
from gradscale_torch.devices import integers, is_capturing, refuse_capture

__all__ = ["Reduction", "TorchCollectives"]

Tensor = torch.Tensor

# Seconds in which the CPU polls before it sleeps, since it is woken late; other ranks on its core get their turn.
_SOON = 2e-3
# Seconds. Signals, Ctrl-C among them, are seen between two slices.
_SLICE = timedelta(seconds=0.1)
# Seconds between two looks at a device, which has nothing to do while the CPU sleeps longer than the answer takes.
_LONGEST_PAUSE = 2e-4
# Seconds that the end of a group on an accelerator may take, since it may wait for ranks that are gone.
_ABORTING = 10.0
# Seconds by which the library's own timeout is later, so that a user sees ours.
_LATER = 10.0

# Unfinished work, which torch still reads and writes, with its buffer and its group, even if it was given up or nobody
# asks for it any more.
_under_way: dict[int, tuple[dist.Work, Tensor, dist.ProcessGroup]] = {}

_OF_THE_DEVICE = "agree over a group of this device, such as one of NCCL, on gradients that are on it"
_CPU = torch.device("cpu")
_CPU_IN_DLPACK = 1


@atexit.register
def _leave() -> None:
    """Keep groups with unfinished work alive for ever: freeing one of gloo's waits for ranks that may never come."""
    _forget_what_is_done()
    for _, _, group in _under_way.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# Stands for the default group before there is one.
_DEFAULT_GROUP = types.SimpleNamespace()


class TorchCollectives:
    """MAX all-reduces over a process group or mesh, made in the group itself, in one order with the user's own.

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
        if self._asked is None or self._group is None:
            # Of the world that there is now.
            return groups.default_group() or _DEFAULT_GROUP
        return self._group.group

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, timeout: float) -> None:
        self._asked = group
        self._timeout = timeout
        self._group: GroupWait | None = None
        self.rank, self.size = -1, 0
        if group is not None or groups.default_group() is not None:
            self._resolve().require_usable()

    def __repr__(self) -> str:
        return f"TorchCollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    @property
    def is_of_present_world(self) -> bool:
        """Whether the group that was looked up has not been destroyed."""
        return self._group is not None and groups.is_alive(self._group.group)

    def start_max(self, x: Array, /) -> Reduction:
        """Begin an element-wise MAX all-reduce of 1-d int32; calling the result finishes it.

        The buffer is on the array's own device if the group carries it, else on the CPU or the group's accelerator.
        """
        group = self._usable()
        sent = x if isinstance(x, Tensor) else _as_tensor(x)
        if sent.dtype != torch.int32 or sent.ndim != 1:
            msg = f"only 1-d int32 arrays are reduced, got {sent.ndim}-d {sent.dtype}"
            raise InvalidValueError(msg)
        where = self._travels_on(sent.device, group)
        # It is sent, and then receives the result.
        buffer = sent.to(where, copy=True, memory_format=torch.contiguous_format)
        return Reduction(self, group, self.reduce(group, buffer), buffer, x)

    def _travels_on(self, device: torch.device, group: GroupWait) -> torch.device:
        """Return where what is on a device travels; no graph may be captured there."""
        where = groups.travels_on(self._carriers, device, group.group)
        if where != device:
            refuse_capture(where if device.type == "cpu" else device, _OF_THE_DEVICE)
        return where

    @property
    def within(self) -> Callable[[float], contextlib.AbstractContextManager[None]]:
        """Lets waits end after some seconds, if not before; those of what only looks like a group have no end."""
        group = self._usable()
        if self._is_lookalike:
            msg = "what only looks like a process group waits for ever"
            raise AttributeError(msg)
        return group.within

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a 0-d float64 tensor over the ranks, on its device; every rank calls it."""
        group = self._usable()
        buffer = x.detach().to(groups.travels_on(self._carriers, x.device, group.group), copy=True).reshape(1)
        work = self.reduce(group, buffer, "SUM")
        total: Tensor = Reduction(self, group, work, buffer, x)()
        return total.reshape(())

    def reduce(self, group: GroupWait, buffer: Tensor, operation: Literal["MAX", "SUM"] = "MAX") -> dist.Work:
        """Start an all-reduce in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, operation))
        if hasattr(options, "asyncOp"):
            # Older torch, such as 2.6, has no other reductions.
            options.asyncOp = True
        options.timeout = self._librarys_timeout
        try:
            work: dist.Work = group.group.allreduce([buffer], options)
        except Exception as error:
            raise group.failure(error) from error
        # Captured work belongs to the graph, and during the capture nothing may be asked for.
        is_captured = buffer.device.type != "cpu" and is_capturing(buffer.device)
        if not self._is_lookalike and not is_captured:
            _forget_what_is_done()
            _under_way[id(work)] = (work, buffer, group.group)
        return work

    def finish(self, group: GroupWait, work: dist.Work, where: torch.device) -> None:
        """Make the CPU wait until a reduction on some device is done, it fails, or the time is over."""
        group.require_usable()
        if self._is_lookalike:
            # All that it must have is wait().
            group.run(work.wait)
        else:
            # UCC waits without looking at the time; accelerators do not wait at all.
            is_polled = where.type != "cpu" or self._carriers["cpu"] == "ucc"
            group.run(self._wait, group, work, is_polled)
        _under_way.pop(id(work), None)

    def _wait(self, group: GroupWait, work: dist.Work, is_polled: bool) -> None:
        if is_polled:
            group.until(work.is_completed, longest_pause=_LONGEST_PAUSE)
        elif not poll(work.is_completed, min(_SOON, self._timeout)):
            group.until(lambda: _is_over(work))
        # Raises its failure.
        work.wait()

    def example(self) -> Tensor:
        """Return a 0-d float32 tensor on a device of the group, for a rank that never has an array."""
        group = self._usable().group
        return torch.zeros((), dtype=torch.float32, device=groups.example_device(self._carriers, group, self._asked))

    def resolve(self) -> None:
        """Look the default group up, before which rank and size are not known."""
        self._usable()

    def _usable(self) -> GroupWait:
        """Return the group, looked up at first use and, for the default group, when another world has begun."""
        group = self._group
        if group is None or (self._asked is None and dist.group.WORLD is not group.group):
            group = self._resolve()
        elif self._asked is not None and not groups.is_alive(group.group):
            msg = (
                f"the process group was destroyed after the scaler was constructed (rank {self.rank} of {self.size}): "
                f"construct the scaler after init_process_group(), or call set_group() with a group of this world"
            )
            raise BackendError(msg)
        group.require_usable()
        return group

    def _resolve(self) -> GroupWait:
        group = groups.resolve(self._asked, self._timeout)
        self._carriers = groups.carriers(group)
        self._is_gloo_on_cpu = self._carriers.get("cpu") == "gloo"
        self._is_lookalike = self._carriers.get("cpu") == groups.LOOKALIKE
        self.rank, self.size = group.rank(), group.size()
        # gloo's own clock goes on while the process is suspended, so its time is never over.
        timeout = math.inf if self._is_gloo_on_cpu else self._timeout + _LATER
        self._librarys_timeout = timedelta(seconds=groups.seconds(timeout))
        where = f"rank {self.rank} of {self.size}"
        self._group = GroupWait(
            group,
            library="torch.distributed",
            timeout=self._timeout,
            refusal=f"an agreement over this process group was given up on {where}: pass another one on every rank, "
            f"such as torch.distributed.new_group()",
            rank=self.rank,
            size=self.size,
            on_give_up=functools.partial(_abort, group, self._carriers),
        )
        return self._group


def _abort(group: dist.ProcessGroup, carriers: dict[str, str], error: BaseException) -> None:
    """End what waits on an accelerator; a group of the CPU has nothing there."""
    abort: Callable[[], None] | None = getattr(group, "abort", None)
    if abort is None or not any(kind != "cpu" and one not in groups.HOST_BACKENDS for kind, one in carriers.items()):
        return

    # In a thread, which may be left behind.
    aborted = in_thread(abort)
    try:
        aborted.result(_ABORTING)
    except TimeoutError:
        error.add_note(f"the process group was not aborted within {_ABORTING:g} s: end this process")
    except Exception as failure:
        error.add_note(f"the process group could not be aborted: {failure}: end this process")


def _is_over(work: dist.Work) -> bool:
    """Wait for a reduction for a slice of time, and tell whether it is done or has failed."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        return work.is_completed()
    return True


class Reduction:
    """A reduction under way. Calling it finishes it and returns the result."""

    __slots__ = ("_buffer", "_collectives", "_group", "_is_done", "_result", "_work", "_x")

    def __init__(
        self,
        collectives: TorchCollectives,
        group: GroupWait,
        work: dist.Work,
        buffer: Tensor,
        x: Array,
    ) -> None:
        self._collectives, self._group, self._work = collectives, group, work
        self._buffer, self._x = buffer, x
        self._is_done = False
        self._result: Array = None

    def __call__(self) -> Array:
        """Return the result; on an accelerator the stream and not the CPU waits for the ranks."""
        if self._result is None:
            x, where = self._x, self._buffer.device
            if where.type == "cpu" or not isinstance(x, Tensor) or x.device != where:
                self.wait()
            elif not self._is_done:
                self._order()
            self._result = _like(self._buffer, x)
            self._x = None
        return self._result

    def wait(self) -> None:
        """Make the CPU wait for the ranks, on any device."""
        if not self._is_done:
            self._collectives.finish(self._group, self._work, self._buffer.device)
            self._is_done = True

    def _order(self) -> None:
        """Make the stream wait for the reduction."""
        try:
            self._work.wait()
        except Exception as error:
            raise self._group.failure(error) from error
        # The stream keeps the order from here on.
        _under_way.pop(id(self._work), None)


def _forget_what_is_done() -> None:
    for key, (work, _, _) in list(_under_way.items()):
        # If the device has failed, whoever waits for it will see that.
        with contextlib.suppress(RuntimeError):
            if work.is_completed():
                # Another thread may have finished it.
                _under_way.pop(key, None)


def _as_tensor(x: Array) -> Tensor:
    """Return an array of another library as a tensor, by DLPack or through the CPU."""
    xp = array_namespace(x)
    if x.dtype != xp.int32 or x.ndim != 1:
        msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
        raise InvalidValueError(msg)
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] == _CPU_IN_DLPACK:
        # torch takes no read-only memory by DLPack, and ends the process at a negative stride.
        return integers(registry.backend_for(x).read(x), _CPU)
    return from_dlpack(xp.asarray(x, copy=True))


def _like(values: Tensor, x: Array) -> Array:
    """Return a tensor as an array of the library and device of ``x``."""
    if isinstance(x, Tensor):
        return values.to(x.device)
    xp = array_namespace(x)
    if values.device.type == "cpu":
        return xp.asarray(values.tolist(), dtype=x.dtype, device=registry.backend_for(x).placement(x))
    return xp.from_dlpack(values)
