"""NCCLCollectives: agreement over NCCL communicators, in stream order, with a timeout that aborts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cupy
from array_api_compat import array_namespace

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.errors import BackendError, InvalidTypeError, InvalidValueError
from gradscale.groups import GroupWait
from gradscale_cupy.availability import nccl_module, require_nccl
from gradscale_cupy.host import is_over

__all__ = ["NCCLCollectives", "NCCLGroupBackend", "Pending", "backend"]

nccl = nccl_module()

# Seconds. The device has nothing to do while the host sleeps longer than the answer takes.
_LONGEST_PAUSE = 2e-4
# NCCL's own end of a communicator may wait for ranks that are gone.
_ABORTING = 10.0

_PER_THREAD = 2  # cudaStreamPerThread, which is another stream in another thread
_ON_DEVICE = frozenset({2, 10, 13})  # CUDA, ROCm and managed memory, in DLPack


class NCCLCollectives:
    """MAX all-reduces over an NCCL communicator, in one order with the user's own collectives over it.

    Parameters
    ----------
    group : cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
        One communicator for each process or thread; of several in one thread the first would wait for the second.
    timeout : float
        Seconds to wait for the other ranks in each collective; ``math.inf`` for ever.

    Attributes
    ----------
    identity : object
        The group as it was given, over which other objects like this one may agree.
    rank, size, device : int
        Position in the communicator (that of an NCCLBackend need not be MPI's, also with ``use_mpi=True``), number of
        ranks, and CUDA device.

    Raises
    ------
    BackendNotAvailableError
        When CuPy finds no NCCL library, and names the package; or no device that it can use.
    InvalidTypeError
        For what is no communicator.
    BackendError
        When the communicator was destroyed, or an earlier collective over it given up.

    Notes
    -----
    Constructing sends nothing. Starting a collective does not make the host wait, but for the first one of each length,
    in which NCCL connects the ranks. Calling what ``start_max`` returns is one host wait, so that a step over k groups
    has k, and the read that follows finds its answer there. ``Pending.on_stream`` has none, nor has a collective that
    is captured into a CUDA graph: there nobody looks at the time, and the host's next read waits for the ranks. A graph
    needs ``x`` and the Pending for as long as it is launched.

    The timeout, an error of NCCL or CUDA, and Ctrl-C abort the communicator, so that the kernel that waits on the
    device ends; every rank needs another one then. Not to be started between ``nccl.groupStart`` and ``groupEnd``.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        require_nccl()
        self._comm = _communicator(group)
        self.identity = group
        self._timeout = timeout
        self._group = GroupWait(
            self._comm,
            library="NCCL",
            timeout=timeout,
            refusal="an agreement over this communicator was given up, and it was aborted: pass another one on every "
            "rank",
            rank=-1,
            size=0,
            describe=_described,
        )
        self.require_usable()
        self.rank = self._group.rank = self._comm.rank_id()
        self.size = self._group.size = self._comm.size()
        self.device: int = self._comm.device_id()
        self._group.on_give_up = functools.partial(_abort, self._comm, self.device)
        # The lengths that have gone over these ranks, for which NCCL has its connections.
        self._connected: set[int] = set()

    def __repr__(self) -> str:
        return f"NCCLCollectives(rank={self.rank}, size={self.size}, timeout={self._timeout})"

    def start_max(self, x: Array, /) -> Pending:
        """Begin an element-wise MAX all-reduce on the current stream; calling what is returned finishes it.

        Parameters
        ----------
        x : array
            1-d int32 of any library; left alone. A CuPy array must be on the communicator's device, and so must one of
            another library that is on a CUDA device, which is shared by DLPack; others pass through the host.

        Returns
        -------
        Pending
            When called, returns a new array of the same library and device, the same one each time. The call raises
            CollectiveTimeoutError when some rank does not come, and BackendError for NCCL's and CUDA's own errors.

        Raises
        ------
        InvalidValueError
            For another dtype or dimension, for an array on another device than the communicator's, and for one that
            passes through the host while the stream is captured.
        BackendError, CollectiveTimeoutError
            When the communicator was destroyed or given up, or NCCL refuses; when some rank does not connect.
        """
        self.require_usable()
        xp = array_namespace(x)
        if x.ndim != 1 or x.dtype != xp.int32:
            msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
            raise InvalidValueError(msg)
        with cupy.cuda.Device(self.device):
            stream = cupy.cuda.get_current_stream()
            is_captured = stream.is_capturing()
            is_shared = self._is_shared(x, is_captured)
            if isinstance(x, cupy.ndarray):
                send = cupy.ascontiguousarray(x)
            elif is_shared:
                send = cupy.ascontiguousarray(cupy.from_dlpack(x))
            else:
                send = cupy.asarray(registry.backend_for(x).read(x), dtype=cupy.int32)
            result = cupy.empty_like(send)
            event = cupy.cuda.Event(disable_timing=True)
            self._start(send, result, stream, event)
        return Pending(self, send, result, stream, event, is_captured, x, is_shared)

    def example(self) -> Array:
        """Return a 0-d float32 array on the communicator's device: a rank that never has one takes part with CuPy's."""
        with cupy.cuda.Device(self.device):
            return cupy.zeros((), dtype=cupy.float32)

    def _is_shared(self, x: Array, is_captured: bool) -> bool:
        """Tell whether an array is on the communicator's device, where NCCL can read it; else the host can."""
        if isinstance(x, cupy.ndarray):
            where = x.device.id
        elif hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _ON_DEVICE:
            where = x.__dlpack_device__()[1]
        elif is_captured:
            msg = (
                f"only arrays of the communicator's device can be reduced while a stream is captured, got "
                f"{type(x).__name__}: pass a CuPy array"
            )
            raise InvalidValueError(msg)
        else:
            return False
        if where != self.device:
            msg = (
                f"x must be on the communicator's device, CUDA device {self.device}, got an array on CUDA device "
                f"{where}: pass arrays of one device and a communicator that was made on it"
            )
            raise InvalidValueError(msg)
        return True

    def _start(self, send: Array, result: Array, stream: Any, event: Any) -> None:
        """Put the collective on the stream, and the event behind it."""

        def issue() -> None:
            pointers = send.data.ptr, result.data.ptr
            self._comm.allReduce(*pointers, send.size, nccl.NCCL_INT32, nccl.NCCL_MAX, stream.ptr)

        def start() -> None:
            if send.size in self._connected or stream.ptr == _PER_THREAD:
                issue()
            else:
                # To connect the ranks NCCL waits for all of them, without a look at signals or the time.
                issued = _in_thread(issue, self.device)
                self._poll(issued.done)
                issued.result()
                self._connected.add(send.size)
            event.record(stream)

        # Also Ctrl-C between two steps gives up: other ranks may be waiting for this one.
        self._group.run(start)

    def require_usable(self) -> None:
        """Raise BackendError when the communicator was given up, destroyed or aborted."""
        self._group.require_usable()
        if not self._comm.comm:
            msg = "the communicator was destroyed or aborted: pass another one on every rank, also to set_group()"
            raise BackendError(msg)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Make the host wait until something is done, NCCL fails, or the time is over."""
        self._group.run(lambda: self._poll(is_done))

    def _poll(self, is_done: Callable[[], bool]) -> None:
        def is_settled() -> bool:
            is_over = is_done()
            # Also of what is done: a communicator that has failed gives no answers.
            self._comm.check_async_error()
            return is_over

        self._group.until(is_settled, longest_pause=_LONGEST_PAUSE)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Pending:
    """A reduction under way. Calling it finishes it and returns the result."""

    _collectives: NCCLCollectives
    # What NCCL reads, until it is known to be done; and what it writes to.
    _send: Array | None
    _array: Array
    _stream: Any
    _event: Any
    # While a stream is captured, nothing can be asked of its events.
    _is_captured: bool
    _x: Array
    _is_shared: bool
    _result: Array = None

    def __call__(self) -> Array:
        """Return the result; the host waits for the ranks, unless the collective is captured into a CUDA graph.

        Raises
        ------
        CollectiveTimeoutError
            When some rank does not come in time.
        BackendError
            When NCCL or CUDA fail, or the communicator was given up before.
        """
        self._wait()
        return self.on_stream()

    def on_stream(self) -> Array:
        """Return the result without a host wait, to be used on the stream that is current now.

        An array that passes through the host is waited for all the same.
        """
        with cupy.cuda.Device(self._collectives.device):
            if not self._is_shared:
                self._wait()
            elif self._send is not None:
                self._collectives.require_usable()
                current = cupy.cuda.get_current_stream()
                if current != self._stream:
                    current.wait_event(self._event)
            if self._result is None:
                self._result = _like(self._array, self._x, self._is_shared)
        return self._result

    def _wait(self) -> None:
        if self._send is not None and not self._is_captured:
            self._collectives.require_usable()
            self._collectives.wait(lambda: is_over(self._event))
            self._send = None


class NCCLGroupBackend:
    """The adapter for CuPy's NCCL communicators."""

    name = "cupy_backends"

    def collectives(self, group: Any, /, *, timeout: float) -> NCCLCollectives:
        """Wrap a communicator. See :class:`NCCLCollectives`."""
        return NCCLCollectives(group, timeout)


backend = NCCLGroupBackend()


def _communicator(group: Any) -> Any:
    """Return the communicator itself; CuPy keeps that of an NCCLBackend in a private attribute."""
    for found in (group, getattr(group, "_comm", None)):
        if isinstance(found, nccl.NcclCommunicator):
            return found
    msg = (
        f"group must be a cupy.cuda.nccl.NcclCommunicator or a cupyx.distributed.NCCLBackend that holds one, got "
        f"{group!r} of type {type(group).__name__}"
    )
    raise InvalidTypeError(msg)


def _described(error: Exception) -> str:
    """Return an error's text; where CuPy has no name for a status of NCCL's, it raises KeyError with the number."""
    if isinstance(error, KeyError):
        return (
            f"NCCL's status {error} (6: a remote rank or the network to it failed; 7: the communicator does not block, "
            f"by NCCL_COMM_BLOCKING=0 or its config, and CuPy needs one that does)"
        )
    return str(error) or repr(error)


def _abort(comm: Any, device: int, error: BaseException) -> None:
    """Abort a communicator, so that nothing on the device waits any more."""
    # In a thread, which may be left behind.
    aborted = _in_thread(comm.abort, device)
    try:
        aborted.result(_ABORTING)
    except TimeoutError:
        error.add_note(f"NCCL has not aborted the communicator within {_ABORTING:g} s: end this process")
    except Exception as failure:
        error.add_note(f"the communicator could not be aborted: {_described(failure)}: end this process")


def _in_thread(call: Callable[[], Any], device: int) -> Future[None]:
    """Call something on a device, in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        # Never set back: a new thread begins on device 0, and setting that would take memory there.
        with contextlib.suppress(Exception):
            cupy.cuda.Device(device).use()
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="gradscale NCCL", daemon=True).start()
    return future


def _like(values: Array, x: Array, is_shared: bool) -> Array:
    """Return a CuPy array as one of the library and device of ``x``."""
    if isinstance(x, cupy.ndarray):
        return values
    xp = array_namespace(x)
    if is_shared:
        return xp.from_dlpack(values)
    return xp.asarray(cupy.asnumpy(values).tolist(), dtype=x.dtype, device=registry.backend_for(x).placement(x))
