"""TorchCollectives: agreement over torch.distributed's groups and meshes, non-blocking, with a timeout."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import math
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from array_api_compat import array_namespace
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.errors import BackendError, InvalidValueError
from gradscale.groups import GroupWait, poll
from gradscale_torch import groups
from gradscale_torch.verdicts import integers, is_capturing, refuse_capture

__all__ = ["Pending", "TorchCollectives"]

# Seconds in which the host asks before it sleeps, which it is woken from late; ranks on its core get their turn.
_SOON = 2e-3
# Seconds. Signals, Ctrl-C among them, are seen between two slices.
_SLICE = timedelta(seconds=0.1)
# How much later than this timeout the library's own is where the host does not wait, so that this one is what a user
# sees.
_LATER = 10.0

# What torch still reads and writes: work that is not done, also if it was given up or if nobody asks for it any more,
# with its buffer and its group.
_under_way: dict[int, tuple[Any, torch.Tensor, dist.ProcessGroup]] = {}
_MANY = 8

_OF_THE_DEVICE = "agree over a group of this device, such as one of NCCL, on gradients that are on it"
_HOST = torch.device("cpu")
_CPU = 1  # in DLPack
# Elements: vectors of fewer or more are sent whole. More have a part for each rank, in which all are different.
_FEW, _MOST = 2, 32
_HASH_BITS, _FIRST_BITS = 47, 15
_NO_FIRST = (1 << _FIRST_BITS) - 1


@atexit.register
def _leave() -> None:
    """Keep groups with unfinished work alive for ever: freeing one of gloo's waits for ranks that may never come."""
    for group in {group for work, _, group in _under_way.values() if not _is_completed(work)}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class _DefaultGroup:
    """What stands for the default group before there is one."""


_DEFAULT_GROUP = _DefaultGroup()


class TorchCollectives:
    """MAX all-reduces over a process group or a device mesh.

    They are made in the group itself, in one order with the user's own collectives.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh or None
        None is the default group at the time of each collective, which may not be there yet when this is constructed.
        An object with ``rank()``, ``size()`` and ``allreduce(tensors, options)`` serves as well; waiting is then up to
        what it returns, and has no timeout.
        A mesh is one group of all its ranks; constructing is collective over those of a mesh that has several
        dimensions and does not cover the world.
    timeout : float
        Seconds to wait for the other ranks, here and in each collective; ``math.inf`` for ever.

    Attributes
    ----------
    rank, size : int
        Position in the group, and number of ranks; -1 and 0 while there is no default group.

    Raises
    ------
    CallOrderError, InvalidTypeError, InvalidValueError
        For what cannot be a group here; see :func:`gradscale_torch.groups.resolve`.
    CollectiveTimeoutError
        When some rank of a mesh does not construct its own in time.
    BackendError
        When an earlier collective over the group was given up.

    Notes
    -----
    The ranks' arrays must be on devices of one type, if the group has several backends ("cpu:gloo,cuda:nccl").

    Over gloo and MPI the host waits, and sees Ctrl-C and the timeout. On an accelerator (NCCL, XCCL) the stream waits
    and the host does not, unless it is made to by ``Pending.wait``; without that a rank that never comes is found by
    the library's own watchdog, which ends the process some seconds after this timeout. Run on gloo; the paths of NCCL,
    XCCL, UCC and MPI have not been run.
    """

    takes_lists = True
    """That ``start_max`` takes lists, too."""

    @property
    def identity(self) -> Any:
        """The process group, over which others like this may agree, or what stands for it while there is none."""
        return _DEFAULT_GROUP if self._group is None else self._group.group

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, timeout: float) -> None:
        self._asked = group
        self._timeout = timeout
        self._group: GroupWait | None = None
        self.rank, self.size = -1, 0
        if group is not None or groups.default_group() is not None:
            self._resolve().require_usable()

    def __repr__(self) -> str:
        return f"TorchCollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    def start_max(self, x: Array | list[int], /) -> Pending:
        """Begin an element-wise MAX all-reduce; calling what is returned finishes it.

        Parameters
        ----------
        x : array or list of int
            1-d int32 of any library, or numbers that int32 holds; left alone. An array is copied to a device that the
            group carries: its own, or the CPU, or the group's accelerator.

        Returns
        -------
        Pending
            When called, returns a new array of the same library and device, or a new list, the same one each time. The
            call raises CollectiveTimeoutError when some rank does not come, after which the group cannot be used any
            more, and BackendError for torch's own errors, of which a rank that ended is one.

        Raises
        ------
        CallOrderError
            When there is no default group yet.
        BackendError
            When the group was destroyed, or a collective over it given up.
        """
        group = self._usable()
        if isinstance(x, list) and self._is_gloo_on_host and _FEW < len(x) <= _MOST:
            return self._start_short(group, x, x, is_home=False)
        sent = x if isinstance(x, torch.Tensor) else _as_tensor(x)
        if sent.dtype != torch.int32 or sent.ndim != 1:
            msg = f"only 1-d int32 arrays are reduced, got {sent.ndim}-d {sent.dtype}"
            raise InvalidValueError(msg)
        came_from = sent.device
        if came_from not in self._routes:
            self._routes[came_from] = groups.travels_on(self._carriers, came_from, group.group)
        where = self._routes[came_from]
        if where != came_from:
            refuse_capture(where if came_from.type == "cpu" else came_from, _OF_THE_DEVICE)
        is_home = sent is x and where == came_from
        if where.type == "cpu" and self._is_gloo_on_host and _FEW < len(sent) <= _MOST:
            return self._start_short(group, x, sent.tolist(), is_home=is_home)
        # What is sent is also what is received.
        buffer = (
            sent.clone(memory_format=torch.contiguous_format) if where == came_from else sent.to(where).contiguous()
        )
        return Pending(self, group, self._reduce(group, buffer, self._options), buffer, x, is_home)

    def _start_short(self, group: GroupWait, x: Array | list[int], values: list[int], *, is_home: bool) -> Pending:
        """Send two integers for the vector."""
        buffer = torch.tensor(_shortened(values), dtype=torch.int64, device="cpu")
        work = self._reduce(group, buffer, self._options)
        return Pending(self, group, work, buffer, x, is_home, values)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a 0-d float64 tensor over the ranks, on its device; every rank calls it.

        On the host it waits, as what ``start_max`` returns does.
        """
        group = self._usable()
        where = groups.travels_on(self._carriers, x.device, group.group)
        buffer = x.detach().to(where, copy=True).reshape(1)
        is_home = where == x.device
        total: torch.Tensor = Pending(self, group, self._reduce(group, buffer, self._sum_options), buffer, x, is_home)()
        return total.reshape(())

    def _reduce(self, group: GroupWait, buffer: torch.Tensor, options: Any) -> Any:
        try:
            work = group.group.allreduce([buffer], options)
        except Exception as error:
            raise group.failure(error) from error
        # What is captured belongs to the graph, and while it is nothing may be asked for.
        if not self._is_lookalike and not is_capturing(buffer.device):
            if len(_under_way) > _MANY:
                _forget_what_is_done()
            _under_way[id(work)] = (work, buffer, group.group)
        return work

    def example(self) -> torch.Tensor:
        """Return a 0-d float32 tensor on a device of the group, for a rank that never has an array."""
        group = self._current().group
        return torch.zeros((), dtype=torch.float32, device=groups.example_device(self._carriers, group, self._asked))

    def resolve(self) -> None:
        """Look the default group up, before which rank and size are not known."""
        self._current()

    def _usable(self) -> GroupWait:
        group = self._current()
        group.require_usable()
        return group

    def _current(self) -> GroupWait:
        """Return the group, looked up at first use and, for the default group, when another world has begun."""
        if self._group is None or (self._asked is None and groups.default_group() is not self._group.group):
            return self._resolve()
        if not groups.is_alive(self._group.group):
            msg = (
                f"the process group was destroyed after the scaler was constructed (rank {self.rank} of {self.size}): "
                f"construct the scaler after init_process_group(), or call set_group() with a group of this world"
            )
            raise BackendError(msg)
        return self._group

    def _resolve(self) -> GroupWait:
        group = groups.resolve(self._asked, self._timeout)
        self._carriers = groups.carriers(group)
        self._is_gloo_on_host = self._carriers.get("cpu") == "gloo"
        self._is_lookalike = self._carriers.get("cpu") == groups.LOOKALIKE
        self._routes: dict[torch.device, torch.device] = {}
        self.rank, self.size = group.rank(), group.size()
        self._options = self._options_for(dist.ReduceOp.MAX)
        self._sum_options = self._options_for(dist.ReduceOp.SUM)
        where = f"rank {self.rank} of {self.size}"
        self._group = GroupWait(
            group,
            library="torch.distributed",
            timeout=self._timeout,
            refusal=f"an agreement over this process group was given up on {where}: pass another one on every rank, "
            f"such as torch.distributed.new_group()",
            rank=self.rank,
            size=self.size,
        )
        return self._group

    def _options_for(self, operation: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        if hasattr(options, "asyncOp"):
            # Older torch, such as 2.6, has no other reductions.
            options.asyncOp = True
        # gloo's own clock goes on while the process is suspended, so its time is never over.
        timeout = math.inf if self._is_gloo_on_host else self._timeout + _LATER
        options.timeout = timedelta(seconds=groups.seconds(timeout))
        return options

    def wait(self, group: GroupWait, work: Any, where: torch.device) -> None:
        """Make the host wait until a reduction on some device is done, it fails, or the time is over."""
        group.require_usable()
        if self._is_lookalike:
            # All that it must have is wait().
            group.run(work.wait)
            return
        # UCC waits without looking at the time; accelerators do not wait at all.
        is_polled = where.type != "cpu" or self._carriers["cpu"] == "ucc"
        group.run(self._poll if is_polled else self._wait_in_slices, group, work)

    def _poll(self, group: GroupWait, work: Any) -> None:
        group.until(work.is_completed)
        work.wait()

    def _wait_in_slices(self, group: GroupWait, work: Any) -> None:
        poll(work.is_completed, min(_SOON, self._timeout))
        group.until(lambda: _is_over(work))


def _is_over(work: Any) -> bool:
    """Wait for a reduction for a slice of time, and tell whether it is done; raise what it has failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        # The slice is over, or the reduction has failed; then it is completed, and says so again.
        if not work.is_completed():
            return False
        work.wait()
    return True


class Pending:
    """A reduction under way. Calling it finishes it and returns the result."""

    __slots__ = (
        *("_buffer", "_collectives", "_group", "_is_done", "_is_home"),
        *("_result", "_values", "_work", "_x"),
    )

    def __init__(
        self,
        collectives: TorchCollectives,
        group: GroupWait,
        work: Any,
        buffer: torch.Tensor,
        x: Array | list[int],
        is_home: bool,
        values: list[int] | None = None,
    ) -> None:
        self._collectives = collectives
        self._group = group
        self._work = work
        self._buffer = buffer
        self._x = x
        # The vector for which two integers are under way.
        self._values = values
        # Whether the buffer is of the library and on the device that the result must have.
        self._is_home = is_home
        self._is_done = False
        self._result: Array = None

    def __call__(self) -> Array:
        """Return the result; on an accelerator, where the stream and not the host waits for the ranks."""
        if self._result is None:
            if not self._is_home or self._buffer.device.type == "cpu":
                self.wait()
            elif not self._is_done:
                self._order()
            # What was sent for a vector has left the result.
            if self._result is None:
                self._result = self._buffer if self._is_home else _like(self._buffer, self._x)
            self._x = None
        return self._result

    def wait(self) -> None:
        """Make the host wait for the ranks, on any device.

        Raises
        ------
        CollectiveTimeoutError
            When some rank does not come in time.
        BackendError
            When the reduction fails.
        """
        if not self._is_done:
            self._wait_once()
            if self._values is not None:
                self._result = _list_like(self._whole(self._values), self._x)
            self._is_done = True

    def _wait_once(self) -> None:
        self._collectives.wait(self._group, self._work, self._buffer.device)
        _under_way.pop(id(self._work), None)

    def _whole(self, values: list[int]) -> list[int]:
        """Return the MAX of the vectors; where they differ but for the first number, every rank sends its own whole."""
        most, minus_least = self._buffer.tolist()
        first = most & _NO_FIRST
        if most >> _FIRST_BITS == -minus_least and first != _NO_FIRST:
            return [first, *values[1:]]
        collectives = self._collectives
        self._buffer = integers(values, _HOST)
        self._work = collectives._reduce(self._group, self._buffer, collectives._options)
        self._wait_once()
        whole: list[int] = self._buffer.tolist()
        return whole

    def _order(self) -> None:
        """Let what is put on the stream from now on come after the reduction."""
        try:
            self._work.wait()
        except Exception as error:
            raise self._group.failure(error) from error
        # The stream keeps the order from here on.
        _under_way.pop(id(self._work), None)


def _shortened(values: list[int]) -> list[int]:
    """Return two int64 whose MAX tells that of vectors which differ in the first number at most.

    Gloo sends more messages for more elements: over 3 ranks 22 take five times as long as 2. The greatest and the least
    hash of all other numbers say whether the ranks hold the same; the greatest first number that fits is below it.
    """
    first, *others = values
    packed = struct.pack(f"<{len(others)}i", *others)
    hashed = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> (64 - _HASH_BITS)
    return [hashed << _FIRST_BITS | (first if 0 <= first < _NO_FIRST else _NO_FIRST), -hashed]


def _forget_what_is_done() -> None:
    for key, (work, _, _) in list(_under_way.items()):
        if _is_completed(work):
            del _under_way[key]


def _is_completed(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        # The device has failed, which whoever waits for it is told.
        return False


def _as_tensor(x: Array) -> torch.Tensor:
    """Return an array of another library, or a list, as a tensor, by DLPack or through the host."""
    if isinstance(x, list):
        return integers(x, _HOST)
    xp = array_namespace(x)
    if x.dtype != xp.int32 or x.ndim != 1:
        msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
        raise InvalidValueError(msg)
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] == _CPU:
        # torch takes no read-only memory by DLPack, and ends the process at a negative stride.
        return integers(registry.backend_for(x).read(x), _HOST)
    return from_dlpack(xp.asarray(x, copy=True))


def _like(values: torch.Tensor, x: Array) -> Array:
    """Return a tensor as an array of the library and device of ``x``, or as a list."""
    if isinstance(x, torch.Tensor):
        return values.to(x.device)
    if isinstance(x, list) or values.device.type == "cpu":
        return _list_like(values.tolist(), x)
    return array_namespace(x).from_dlpack(values)


def _list_like(values: list[int], x: Array) -> Array:
    """Return numbers as an array of the library and device of ``x``, or as they are."""
    if isinstance(x, list):
        return values
    if isinstance(x, torch.Tensor):
        return integers(values, x.device)
    return array_namespace(x).asarray(values, dtype=x.dtype, device=registry.backend_for(x).placement(x))
