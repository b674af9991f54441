"""MPICollectives: agreement over any mpi4py intracommunicator, non-blocking, with a timeout."""

from __future__ import annotations

import array
import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from gradscale import registry
from gradscale.core.backend import DoneRead, HostRead
from gradscale.core.protocols import Array
from gradscale.errors import BackendNotAvailableError, CallOrderError, InvalidTypeError, InvalidValueError
from gradscale.extras import needs, remedy
from gradscale.waiting import GroupWait, on_fork, refuse_forked

with needs("gradscale_numpy.mpi", "mpi"):
    try:
        from mpi4py import MPI
    except RuntimeError as error:
        # mpi4py is installed, and finds no MPI library.
        _said = str(error).partition("\n")[0]
        _msg = f"gradscale_numpy.mpi needs an MPI library, got: {_said}; load the cluster's, or {remedy('mpich')}"
        raise BackendNotAvailableError(_msg) from error

__all__ = ["MPIBackend", "MPICollectives", "backend"]

_Vector: TypeAlias = NDArray[Any]
_Buffer: TypeAlias = "_Vector | array.array[int]"
_B = TypeVar("_B", bound="_Buffer")
_R = TypeVar("_R")

# DLPack's number of the host.
_HOST = 1
# Seconds between two looks at a device that is still busy.
_LONGEST_PAUSE = 2e-4

# Requests that are not done, also if they were given up, with the buffers that MPI still reads and writes.
_under_way: dict[int, tuple[object, ...]] = {}


# In a child after fork: the process that has initialised its MPI.
_started_by: list[int] = []


def _note_parent(parent: int) -> None:
    if MPI.Is_initialized() and not _started_by:
        _started_by.append(parent)


on_fork(_note_parent)


def _require_running() -> None:
    """Raise if a call would end the process inside of MPI, or take the place of the parent process."""
    if _started_by:
        refuse_forked("MPI", f"MPI was initialised by process {_started_by[0]}")
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


class _Duplicate:
    """The duplicate of a user's communicator, kept as an attribute of it and freed with it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.is_given_up = False
        # Those that were started and wait for their device, in the order that all ranks send them in.
        self.unsent: deque[_Reduction] = deque()

    def give_up(self, _: BaseException) -> None:
        """Keep what is under way, and send nothing more."""
        self.is_given_up = True
        self.unsent.clear()

    def free(self) -> None:
        """Free the communicator, unless a rank has been lost, since freeing waits for all of them."""
        if not self.is_given_up and not MPI.Is_finalized():
            self.comm.Free()


@dataclasses.dataclass(slots=True, eq=False)
class _Reduction:
    """An all-reduce of what the host does not have yet: its copy and, once it is sent, its request and result."""

    copy: HostRead
    sent: tuple[MPI.Request, _Vector] | None = None


@functools.cache
def _attribute() -> int:
    """Return the key of that attribute; made late, since MPI may be initialized after the import."""
    return MPI.Comm.Create_keyval(delete_fn=lambda _comm, _keyval, duplicate: duplicate.free())


class MPICollectives:
    """MAX all-reduces over a duplicate of a communicator, so that its messages never meet the user's.

    The duplicate is made once for each communicator and freed with it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Constructing is collective over it.
    timeout : float
        Seconds to wait for the other ranks, here and in each collective.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        For an intercommunicator, and for a null communicator.
    CollectiveTimeoutError
        When some rank does not construct its own in time.
    CallOrderError
        When MPI is not initialised, or finalised.
    BackendError
        When an earlier collective over the communicator was given up; in a child after fork, for its parent's MPI.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
            msg = "group must be a communicator that this process belongs to, got MPI.COMM_NULL"
            raise InvalidValueError(msg)
        if not isinstance(comm, MPI.Intracomm):
            msg = f"group must be an MPI intracommunicator (Merge() makes one of an intercommunicator), got {comm!r}"
            raise InvalidTypeError(msg)
        _require_running()
        self._timeout = timeout
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        found: Any = comm.Get_attr(_attribute())
        if found is not None:
            self._use(found)
            self._group.require_usable()
            return
        duplicate, request = comm.Idup()
        _under_way[id(request)] = (request, duplicate)
        self._use(_Duplicate(duplicate))
        self._wait(request, "the construction of a ShardedGradScaler")
        comm.Set_attr(_attribute(), self._group.group)

    def _use(self, duplicate: _Duplicate) -> None:
        self._unsent = duplicate.unsent
        self._comm = duplicate.comm
        where = f"rank {self.rank} of {self.size}"
        self._group = GroupWait(
            duplicate,
            library="MPI",
            timeout=self._timeout,
            refusal=f"an agreement over this communicator was given up on {where}: pass another one on every rank, "
            f"such as comm.Dup()",
            rank=self.rank,
            size=self.size,
            on_give_up=duplicate.give_up,
        )

    def __repr__(self) -> str:
        return f"MPICollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    takes_lists = True
    """``start_max`` takes lists, too."""

    @property
    def identity(self) -> object:
        """An object that lives as long as the communicator, and that its other collectives share."""
        return self._group.group

    def start_max(self, x: Array | list[int], /) -> Callable[[], Array | list[int]]:
        """Begin an element-wise MAX all-reduce; the returned call finishes it.

        Parameters
        ----------
        x : array or list of int
            1-d int32 of any library, or numbers that int32 holds; not to be modified until the call has returned.
            Arrays of other libraries pass through the host. Those of a device whose adapter copies without a wait are
            sent when the host has to wait for them anyway: in the call, or before the next array is sent.

        Returns
        -------
        callable
            Returns a new array of the same library and device, or a list. It raises CollectiveTimeoutError when some
            rank does not come, after which the group cannot be used any more, and BackendError for MPI's own errors.

        Raises
        ------
        CallOrderError
            When MPI was finalised.
        BackendError
            After a collective that was given up; in a child after fork.
        """
        _require_not_finalized()
        self._group.require_usable()
        if isinstance(x, list):
            numbers = array.array("i", x)
            return self._start(numbers, numbers[:], array.array.tolist)
        is_host = isinstance(x, np.ndarray)
        if x.ndim != 1 or x.dtype != (np.int32 if is_host else array_namespace(x).int32):
            msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
            raise InvalidValueError(msg)
        send = np.ascontiguousarray(x) if is_host else _shared_with_host(x)
        if send is None:
            return self._start_from_device(x, registry.backend_for(x).start_read(x))
        return self._start(send, np.empty_like(send), lambda received: received if is_host else _like(received, x))

    def _start(self, send: _B, receive: _B, finished: Callable[[_B], _R]) -> Callable[[], _R]:
        if self._unsent:
            self._send_until(None)
        request = self._send(send, receive)

        def finish() -> _R:
            self._wait(request, "the agreement on a step")
            return finished(receive)

        return finish

    def _start_from_device(self, x: Array, copy: HostRead) -> Callable[[], Array]:
        """Queue an array that is on its way to the host."""
        reduction = _Reduction(copy)
        self._unsent.append(reduction)
        if isinstance(copy, DoneRead):
            self._send_until(None)

        def finish() -> Array:
            if reduction.sent is None:
                self._group.require_usable()
                self._send_until(reduction)
            assert reduction.sent is not None
            request, receive = reduction.sent
            self._wait(request, "the agreement on a step")
            return _like(receive, x)

        return finish

    def _send_until(self, last: _Reduction | None) -> None:
        """Send the queued ones in order, up to one of them, or all.

        One that Ctrl-C interrupts stays in its place. One that fails takes the group with it: the other ranks send it.
        """
        while self._unsent and (last is None or last.sent is None):
            first = self._unsent[0]
            try:
                what = "its own device, before the agreement on a step"
                self._group.until(first.copy.is_done, what, longest_pause=_LONGEST_PAUSE)
                send = np.asarray(first.copy(), dtype=np.int32)
                receive = np.empty_like(send)
                first.sent = self._send(send, receive), receive
            except Exception as error:
                self._group.give_up(error)
                raise
            self._unsent.popleft()

    def _send(self, send: _Buffer, receive: _Buffer) -> MPI.Request:
        """Return the request of an all-reduce."""
        try:
            request = self._comm.Iallreduce(send, receive, op=MPI.MAX)
        except MPI.Exception as error:
            raise self._group.failure(error) from error
        _under_way[id(request)] = (request, send, receive)
        return request

    def example(self) -> _Vector:
        """Return a 0-d float32 array: a rank that never has an array takes part with NumPy's."""
        return np.zeros((), dtype=np.float32)

    def _wait(self, request: MPI.Request, operation: str) -> None:
        """Poll a request until it is done or the time is over."""
        _require_not_finalized()
        self._group.run(self._group.until, request.Test, operation)
        _under_way.pop(id(request), None)


def _shared_with_host(x: Array) -> _Vector | None:
    """Return an array of another library as NumPy's, if its memory is the host's; else None."""
    if not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] != _HOST:
        return None
    try:
        return np.ascontiguousarray(np.from_dlpack(x))
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None


def _like(values: _Vector, x: Array) -> Array:
    """Return a NumPy array as one of the library and device of ``x``."""
    xp = array_namespace(x)
    return xp.asarray(values.tolist(), dtype=x.dtype, device=registry.backend_for(x).placement(x))


class MPIBackend:
    """The adapter for mpi4py's communicators."""

    name = "mpi4py"

    def collectives(self, group: Any, /, *, timeout: float) -> MPICollectives:
        """Wrap a communicator; collective over it. See :class:`MPICollectives`."""
        return MPICollectives(group, timeout)


backend = MPIBackend()
