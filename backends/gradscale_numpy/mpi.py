"""MPICollectives: agreement over any mpi4py intracommunicator, non-blocking, with a timeout."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.core.validation import wrong_type
from gradscale.errors import BackendError, BackendNotAvailableError, CallOrderError, InvalidValueError, warn_caller
from gradscale.extras import needs, remedy
from gradscale.waiting import GroupWait, forbid_forked, on_fork, poll, require_message

with needs("gradscale_numpy.mpi", "mpi"):
    try:
        from mpi4py import MPI
    except RuntimeError as error:
        # mpi4py is installed, and finds no MPI library.
        _reason = str(error).partition("\n")[0]
        _msg = f"gradscale_numpy.mpi needs an MPI library, got: {_reason}; load the cluster's, or {remedy('mpich')}"
        raise BackendNotAvailableError(_msg) from error

__all__ = ["MPIBackend", "MPICollectives", "backend"]
__dir__ = __all__.copy

_Vector: TypeAlias = NDArray[Any]

# Requests that are not done, also if they were given up, with their communicator and the buffers that MPI still uses.
_under_way: dict[int, tuple[Any, ...]] = {}
# Seconds that a message may take to end when its communicator is freed, to which all ranks have come by then.
_ENDING = 2.0


_senders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_has_warned = False

# In a child after fork: the process that has initialised its MPI.
_started_by: list[int] = []


def _note_parent(parent: int) -> None:
    if MPI.Is_initialized() and not _started_by:
        _started_by.append(parent)


on_fork(_note_parent)


def _require_running() -> None:
    """Raise if a call would end the process inside of MPI, or take the place of the parent process."""
    if _started_by:
        forbid_forked("MPI", f"MPI was initialised by process {_started_by[0]}")
    if not MPI.Is_initialized():
        msg = (
            "MPI is not initialised in this process, so its communicators cannot be used: call MPI.Init() before the "
            "scaler is constructed, or leave mpi4py.rc.initialize at True"
        )
        raise CallOrderError(msg)
    _require_not_finalized()


def _require_not_finalized() -> None:
    if MPI.Is_finalized():
        msg = (
            "MPI was finalised in this process, so its communicators cannot be used any more: construct and step "
            "scalers before MPI.Finalize()"
        )
        raise CallOrderError(msg)


def _warn_of_threads() -> None:
    """Warn once of a thread that MPI is not initialised for."""
    global _has_warned
    level, thread = MPI.Query_thread(), threading.current_thread()
    _senders.add(thread)
    is_serial = level == MPI.THREAD_SERIALIZED and sum(one.is_alive() for one in _senders) > 1
    if not _has_warned and (is_serial or (level < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main())):
        _has_warned = True
        warn_caller(
            f"MPI is initialised for calls of {'one thread at a time' if is_serial else 'its main thread alone'}, of "
            f"ours and yours together, and may fail in any way, got a step in {thread.name}: leave "
            f"mpi4py.rc.thread_level at 'multiple', with an MPI library that has it, or train in one thread"
        )


class _Duplicate:
    """The duplicate of a user's communicator, kept as an attribute of it and freed with it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.is_given_up = False

    def give_up(self, _: BaseException) -> None:
        """Keep the messages under way, and send no more."""
        self.is_given_up = True

    def free(self) -> None:
        """Free the communicator, unless a rank has been lost, since freeing waits for all of them."""
        if not self.is_given_up and not MPI.Is_finalized():
            # Open MPI goes on with messages of communicators that are gone, and crashes.
            under_way = [request for request, comm, *_ in _under_way.values() if comm is self.comm]
            poll(lambda: all(request.Test() for request in under_way), _ENDING)
            self.comm.Free()


@functools.cache
def _attribute() -> int:
    """Return the key of that attribute, created at its first use: MPI may be initialized after the import."""
    return MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, duplicate: duplicate.free())


class MPICollectives:
    """MAX all-reduces over a duplicate of a communicator, so that its messages never meet the user's.

    The duplicate is created once per communicator, which is collective over it, and freed with it. A rank waits for
    the others ``timeout`` seconds, here and in each collective.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        For an intercommunicator, and for a null communicator.
    CollectiveTimeoutError
        When some rank does not construct its own in time, or does not come to a collective.
    CallOrderError
        When MPI is not initialised, or finalised.
    BackendError
        When MPI fails, and after that or a collective that was given up; for a communicator that was freed; in a child
        after fork, for its parent's MPI.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
            msg = "group must be a communicator that this process belongs to, got MPI.COMM_NULL"
            raise InvalidValueError(msg)
        if not isinstance(comm, MPI.Intracomm):
            raise wrong_type(comm, "group", "an MPI intracommunicator (Merge() makes one of an intercommunicator)")
        _require_running()
        self._timeout = timeout
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        existing: Any = comm.Get_attr(_attribute())
        if existing is not None:
            self._use(existing)
            self._group.require_usable()
            return
        duplicate, request = comm.Idup()
        _under_way[id(request)] = (request, duplicate)
        self._use(_Duplicate(duplicate))
        self._wait(request, "the construction of a ShardedGradScaler")
        comm.Set_attr(_attribute(), self.identity)

    def _use(self, duplicate: _Duplicate) -> None:
        self._comm = duplicate.comm
        self._group = GroupWait(
            duplicate,
            library="MPI",
            timeout=self._timeout,
            refusal=f"an agreement over this communicator was given up on rank {self.rank} of {self.size}: pass "
            f"another one on every rank, such as comm.Dup()",
            rank=self.rank,
            size=self.size,
            on_give_up=duplicate.give_up,
        )
        self.within = self._group.within
        # It lives as long as the communicator, and is that of its other collectives.
        self.identity = duplicate

    def __repr__(self) -> str:
        return f"MPICollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin a MAX all-reduce as :class:`gradscale.Collectives` do; the host reads a device's array now."""
        _require_not_finalized()
        if self._comm == MPI.COMM_NULL:
            msg = f"the communicator was freed on rank {self.rank} of {self.size}: keep it, or set_group() to another"
            raise BackendError(msg)
        require_message(x)
        is_host = isinstance(x, np.ndarray)
        send = np.ascontiguousarray(x) if is_host else np.asarray(registry.backend_for(x).read(x), dtype=np.int32)
        receive = np.empty_like(send)
        request = self._group.run(self._comm.Iallreduce, send, receive, op=MPI.MAX)
        _under_way[id(request)] = (request, self._comm, send, receive)

        def finish() -> Array:
            _require_not_finalized()
            # Here, since an error in the start would lose the group.
            _warn_of_threads()
            self._wait(request, "the agreement on a step")
            return receive if is_host else registry.backend_for(x).integers(receive.tolist(), x)

        return finish

    def example(self) -> _Vector:
        """Return a 0-d float32 array: a rank that never has an array takes part with NumPy's."""
        return np.zeros((), dtype=np.float32)

    def _wait(self, request: MPI.Request, operation: str) -> None:
        self._group.run(self._group.until, request.Test, operation)
        _under_way.pop(id(request), None)


class MPIBackend:
    """The adapter for mpi4py's communicators."""

    name = "mpi4py"

    def collectives(self, group: Any, /, *, timeout: float) -> MPICollectives:
        """Wrap a communicator; collective over it. See :class:`MPICollectives`."""
        return MPICollectives(group, timeout)


backend = MPIBackend()
