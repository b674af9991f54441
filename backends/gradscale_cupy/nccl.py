"""NCCLGroupBackend: agreement over CuPy's NCCL communicators, in stream order, with a timeout that aborts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

from gradscale import registry
from gradscale.core.protocols import Array
from gradscale.core.validation import wrong_type
from gradscale.errors import BackendError, InvalidValueError
from gradscale.waiting import DeviceCollectives, GroupWait
from gradscale_cupy.availability import explained, forbid_capture, nccl_module, require_nccl

nccl = nccl_module()

_NOT_READY = 600  # of CUDA's runtime
_PER_THREAD = 2  # cudaStreamPerThread, which is another stream in another thread


class CupyCommunicator:
    """What ``DeviceCollectives`` needs of an NcclCommunicator; messages are CuPy's, on the current stream."""

    def __init__(self, group: GroupWait) -> None:
        self._comm: cupy.cuda.nccl.NcclCommunicator = group.group
        self._require_open()
        self.rank: int = self._comm.rank_id()
        self.size: int = self._comm.size()
        self._device: int = self._comm.device_id()

    def example(self) -> Array:
        """Return a 0-d float32 array on the communicator's device."""
        with explained("an array was made on the communicator's device"), cupy.cuda.Device(self._device):
            return cupy.zeros((), dtype=cupy.float32)

    def all_reduce(self, x: Array, start: Callable[..., None]) -> tuple[Callable[[], bool], Callable[[], Array]]:
        """Start a MAX all-reduce; arrays of other libraries pass through the host."""
        self._require_open()
        is_ours = isinstance(x, cupy.ndarray)
        if is_ours and x.device.id != self._device:
            msg = (
                f"x must be on the communicator's device, CUDA device {self._device}, got an array on CUDA device "
                f"{x.device.id}: pass arrays of one device and a communicator that was made on it"
            )
            raise InvalidValueError(msg)
        with explained("an agreement over NCCL was begun"), cupy.cuda.Device(self._device):
            forbid_capture("an agreement over NCCL")
            # A copy, which goes back to CuPy's memory in the order of the stream, whatever becomes of ``x``.
            sent = cupy.array(x if is_ours else registry.backend_for(x).read(x), dtype=cupy.int32, order="C")
            stream, event, here = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True), sent.data.ptr

            def issue() -> None:
                # Never set back: a new thread begins on device 0, and setting that would take memory there.
                cupy.cuda.Device(self._device).use()
                self._comm.allReduce(here, here, sent.size, nccl.NCCL_INT32, nccl.NCCL_MAX, stream.ptr)
                event.record(stream)

            start(issue, here=stream.ptr == _PER_THREAD)

        def result() -> Array:
            if is_ours:
                return sent
            with explained("an agreement over NCCL was read"), cupy.cuda.Device(self._device):
                return registry.backend_for(x).integers(cupy.asnumpy(sent).tolist(), x)

        return lambda: _is_over(event), result

    def check(self) -> None:
        """Raise NCCL's asynchronous error."""
        self._require_open()
        self._comm.check_async_error()

    def abort(self) -> None:
        """Abort the communicator, unless it was destroyed."""
        with contextlib.suppress(Exception):
            cupy.cuda.Device(self._device).use()
        if self._comm.comm:
            self._comm.abort()

    def _require_open(self) -> None:
        if not self._comm.comm:
            msg = "the communicator was destroyed or aborted: pass another one on every rank, also to set_group()"
            raise BackendError(msg)


class NCCLGroupBackend:
    """The adapter for CuPy's NCCL communicators."""

    name = "cupy_backends"

    def collectives(self, group: object, /, *, timeout: float) -> DeviceCollectives:
        """Wrap a communicator.

        Parameters
        ----------
        group : cupy.cuda.nccl.NcclCommunicator or cupyx.distributed.NCCLBackend
            One communicator for each process or thread; of several in one thread the first would wait for the second.
            InvalidTypeError for anything else.
        timeout : float
            Seconds to wait for the other ranks in each collective; ``math.inf`` for ever.

        Raises
        ------
        BackendNotAvailableError
            When CuPy finds no NCCL library, and names the package; or no device that it can use.
        BackendError
            When the communicator was destroyed, or an earlier collective over it given up.

        Notes
        -----
        The rank of an NCCLBackend need not be MPI's, also with ``use_mpi=True``. A step over k groups has k waits of
        the host, and the read that follows finds its answer there.

        A CuPy array must be on the communicator's device, else it is an InvalidValueError; CallOrderError while its
        stream is capturing a CUDA graph. Not to be started between ``nccl.groupStart`` and ``groupEnd``.
        """
        require_nccl()
        comm = _communicator(group)
        refusal = "this communicator was given up, and it was aborted: pass another one on every rank"
        wait = GroupWait(comm, library="NCCL", timeout=timeout, refusal=refusal, rank=-1, size=0, describe=_described)
        return DeviceCollectives(wait, CupyCommunicator, group)


backend = NCCLGroupBackend()


def _communicator(group: object) -> cupy.cuda.nccl.NcclCommunicator:
    """Return the communicator itself; CuPy keeps that of an NCCLBackend in a private attribute."""
    for candidate in (group, getattr(group, "_comm", None)):
        if isinstance(candidate, nccl.NcclCommunicator):
            return candidate
    expected = "a cupy.cuda.nccl.NcclCommunicator or a cupyx.distributed.NCCLBackend that holds one"
    raise wrong_type(group, "group", expected)


def _described(error: Exception) -> str:
    """Return an error's text; CuPy raises KeyError for a status of NCCL's that it has no name for."""
    if isinstance(error, KeyError):
        return (
            f"NCCL's status {error} (6: a remote rank or the network to it failed; 7: the communicator does not block, "
            f"by NCCL_COMM_BLOCKING=0 or its config, and CuPy needs one that does)"
        )
    return str(error) or repr(error)


def _is_over(event: cupy.cuda.Event) -> bool:
    """Tell whether a device has come to an event; no wait. CUDARuntimeError if it has failed, which ``done`` hides."""
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)
