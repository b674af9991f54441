"""NCCLCollectives: agreement over NCCL communicators, in stream order, with a timeout that aborts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.errors import BackendError, InvalidTypeError, InvalidValueError
from gradscale.waiting import GroupWait, call_within, in_thread, require_message
from gradscale_cupy.availability import explained, forbid_capture, nccl_module, require_nccl

nccl = nccl_module()

# Seconds. The device has nothing to do while the host sleeps longer than the answer takes.
_LONGEST_PAUSE = 2e-4
# NCCL's own end of a communicator may wait for ranks that are gone.
_ABORTING = 10.0

_NOT_READY = 600  # of CUDA's runtime
_PER_THREAD = 2  # cudaStreamPerThread, which is another stream in another thread


class NCCLCollectives:
    """MAX all-reduces over an NCCL communicator, in one order with the user's own collectives over it.

    Parameters
    ----------
    group : cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
        One communicator for each process or thread; of several in one thread the first would wait for the second.
    timeout : float
        Seconds to wait for the other ranks in each collective; ``math.inf`` for ever.

    Raises
    ------
    BackendNotAvailableError
        When CuPy finds no NCCL library, and names the package; or no device that it can use.
    InvalidTypeError
        For anything but a communicator.
    BackendError
        When the communicator was destroyed, or an earlier collective over it given up.

    Notes
    -----
    The rank of an NCCLBackend need not be MPI's, also with ``use_mpi=True``. Constructing sends nothing. Starting a
    collective makes the host wait only for the first one of each length, in which NCCL connects the ranks. To finish
    one is a host wait, so that a step over k groups has k, and the read that follows finds its answer there.

    The timeout, an error of NCCL or CUDA, and Ctrl-C abort the communicator, so that the kernel that waits on the
    device ends; every rank needs another one then. Not to be started between ``nccl.groupStart`` and ``groupEnd``.
    """

    def __init__(self, group: object, timeout: float) -> None:
        require_nccl()
        self._comm = _communicator(group)
        self.identity = group
        self._timeout = timeout
        self._group = GroupWait(
            self._comm,
            library="NCCL",
            timeout=timeout,
            refusal="this communicator was given up, and it was aborted: pass another one on every rank",
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

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin an element-wise MAX all-reduce on the current stream; the returned call finishes it.

        The 1-d int32 array is left alone. A CuPy array must be on the communicator's device, else it is an
        InvalidValueError; arrays of other libraries pass through the host. The call returns the same array each time.
        CallOrderError while the stream is capturing a CUDA graph.
        """
        self.require_usable()
        require_message(x)
        is_ours = isinstance(x, cupy.ndarray)
        if is_ours and x.device.id != self.device:
            msg = (
                f"x must be on the communicator's device, CUDA device {self.device}, got an array on CUDA device "
                f"{x.device.id}: pass arrays of one device and a communicator that was made on it"
            )
            raise InvalidValueError(msg)
        with explained("an agreement over NCCL was begun"), cupy.cuda.Device(self.device):
            forbid_capture("an agreement over NCCL")
            # A copy, which goes back to CuPy's memory in the order of the stream, whatever becomes of ``x``.
            result = cupy.array(x if is_ours else registry.backend_for(x).read(x), dtype=cupy.int32, order="C")
            # Also Ctrl-C between two steps gives up: other ranks may be waiting for this one.
            event = self._group.run(self._start, result)

        @functools.cache
        def finish() -> Array:
            self.require_usable()
            self._group.run(self._poll, lambda: _is_over(event))
            if is_ours:
                return result
            with explained("an agreement over NCCL was read"), cupy.cuda.Device(self.device):
                return registry.backend_for(x).integers(cupy.asnumpy(result).tolist(), x)

        return finish

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Let waits end after some seconds, if not before."""
        return self._group.within(seconds)

    def example(self) -> Array:
        """Return a 0-d float32 array on the communicator's device: a rank that never has one takes part with CuPy's."""
        with explained("an array was made on the communicator's device"), cupy.cuda.Device(self.device):
            return cupy.zeros((), dtype=cupy.float32)

    def _start(self, x: Array) -> cupy.cuda.Event:
        """Put the collective on the current stream, in place, and return the event behind it."""
        stream, here = cupy.cuda.get_current_stream(), x.data.ptr
        issue = functools.partial(self._comm.allReduce, here, here, x.size, nccl.NCCL_INT32, nccl.NCCL_MAX, stream.ptr)
        if x.size in self._connected or stream.ptr == _PER_THREAD:
            issue()
        else:
            # To connect the ranks NCCL waits for all of them, without a look at signals or the time.
            issued = in_thread(functools.partial(_on_device, self.device, issue))
            self._poll(issued.done)
            issued.result()
            self._connected.add(x.size)
        return stream.record()

    def require_usable(self) -> None:
        """Raise BackendError when the communicator was given up, destroyed or aborted."""
        self._group.require_usable()
        if not self._comm.comm:
            msg = "the communicator was destroyed or aborted: pass another one on every rank, also to set_group()"
            raise BackendError(msg)

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Make the host wait until something is done, NCCL fails, or the time is over."""

        def is_settled() -> bool:
            has_come = is_done()
            # Also if it is done: a communicator that has failed gives no answers.
            self._comm.check_async_error()
            return has_come

        self._group.until(is_settled, longest_pause=_LONGEST_PAUSE)


class NCCLGroupBackend:
    """The adapter for CuPy's NCCL communicators."""

    name = "cupy_backends"

    def collectives(self, group: object, /, *, timeout: float) -> NCCLCollectives:
        """Wrap a communicator."""
        return NCCLCollectives(group, timeout)


backend = NCCLGroupBackend()


def _communicator(group: object) -> cupy.cuda.nccl.NcclCommunicator:
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
    """Return an error's text; CuPy raises KeyError for a status of NCCL's that it has no name for."""
    if isinstance(error, KeyError):
        return (
            f"NCCL's status {error} (6: a remote rank or the network to it failed; 7: the communicator does not block, "
            f"by NCCL_COMM_BLOCKING=0 or its config, and CuPy needs one that does)"
        )
    return str(error) or repr(error)


def _abort(comm: cupy.cuda.nccl.NcclCommunicator, device: int, error: BaseException) -> None:
    """Abort a communicator, so that nothing on the device waits any more."""
    try:
        # In a thread, which may be left behind.
        call_within(functools.partial(_on_device, device, comm.abort), _ABORTING)
    except TimeoutError:
        error.add_note(f"NCCL has not aborted the communicator within {_ABORTING:g} s: end this process")
    except Exception as failure:
        error.add_note(f"the communicator could not be aborted: {_described(failure)}: end this process")


def _on_device(device: int, call: Callable[[], None]) -> None:
    """Call something on a device, in a new thread."""
    # Never set back: a new thread begins on device 0, and setting that would take memory there.
    with contextlib.suppress(Exception):
        cupy.cuda.Device(device).use()
    call()


def _is_over(event: cupy.cuda.Event) -> bool:
    """Tell whether a device has come to an event; no wait. CUDARuntimeError if it has failed, which ``done`` hides."""
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)
