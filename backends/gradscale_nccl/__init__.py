"""NCCLBackend: agreement over the communicators of NCCL's own bindings, nccl4py, with arrays of any library on CUDA."""

from __future__ import annotations

from collections.abc import Callable

from array_api_compat import array_namespace

from gradscale.core.protocols import Array
from gradscale.core.validation import wrong_type
from gradscale.extras import needs
from gradscale.waiting import DeviceCollectives, GroupWait

with needs("gradscale_nccl", "nccl4py", "nccl"):
    from cuda.core import Device
    from cuda.core.utils import StridedMemoryView
    from nccl.bindings.nccl import NCCLError
    from nccl.core import Communicator, NcclRedOp

__all__ = ["NCCLBackend", "backend"]
__dir__ = __all__.copy


class Nccl4pyCommunicator:
    """What ``DeviceCollectives`` needs of a Communicator; messages are reduced on a stream of its own."""

    example = None

    def __init__(self, group: GroupWait) -> None:
        self._comm: Communicator = group.group
        self._run = group.run
        self.rank: int = self._comm.rank
        self.size: int = self._comm.nranks
        self._stream = self._run(self._device).create_stream()
        # Copies of arrays, which the device may yet read and write.
        self._under_way: dict[int, StridedMemoryView] = {}

    def all_reduce(self, x: Array, start: Callable[..., None]) -> tuple[Callable[[], bool], Callable[[], Array]]:
        """Start a MAX all-reduce of an array on the communicator's device, which becomes this thread's current one."""
        copy, xp = self._run(self._copy, x), array_namespace(x)
        event = self._device().create_event()

        def issue() -> None:
            self._device()
            self._comm.allreduce(copy, copy, NcclRedOp.MAX, stream=self._stream)
            # With a communicator that does not block, it may not be on the stream yet.
            self.check()
            self._stream.record(event)

        start(issue)

        def result() -> Array:
            # A new array on the same memory, since some libraries take theirs for immutable.
            return xp.from_dlpack(self._under_way.pop(copy.ptr))

        return lambda: bool(event.is_done), result

    def check(self) -> None:
        """Raise NCCL's asynchronous error."""
        if status := self._comm.get_async_error():
            raise NCCLError(status)

    def abort(self) -> None:
        """Revoke the communicator, which can be shrunk then; abort it if this NCCL cannot."""
        try:
            self._comm.revoke()
        except Exception:
            self._comm.abort()

    def _copy(self, x: Array) -> StridedMemoryView:
        """Return a copy of an array; the stream waits for that of the array's library."""
        self._device()
        copy = StridedMemoryView.from_dlpack(array_namespace(x).asarray(x, copy=True), int(self._stream.handle))
        self._under_way[copy.ptr] = copy
        return copy

    def _device(self) -> Device:
        """Make the communicator's device the current one, and return it."""
        self._comm.device.set_current()
        return self._comm.device


class NCCLBackend:
    """The adapter for nccl4py's communicators."""

    name = "nccl"

    def collectives(self, group: object, /, *, timeout: float) -> DeviceCollectives:
        """Wrap a communicator.

        Parameters
        ----------
        group : nccl.core.Communicator
            One that blocks, as it does without ``NCCLConfig(blocking=False)`` and NCCL_COMM_BLOCKING=0. One for each
            process or thread; of several in one thread the first would wait for the second. InvalidTypeError for
            anything else, and for one that was destroyed or aborted; BackendError if an earlier collective over it was
            given up.
        timeout : float
            Seconds to wait for the other ranks in each collective; ``math.inf`` for ever.

        Notes
        -----
        Arrays are those of any library with DLPack, on the communicator's device, which a step makes the thread's
        current one. A rank that holds none names its library by ``backend=``. A step over k groups has k waits of the
        host, before the read.

        What is given up ends in ``revoke()``, or in ``abort()`` with an NCCL that lacks it: then ``shrink()`` makes a
        communicator of the ranks that are left.
        """
        if not isinstance(group, Communicator) or not group.is_valid:
            raise wrong_type(group, "group", "an nccl.core.Communicator that was not destroyed")
        refusal = "this communicator was given up, and it was aborted: pass another one on every rank, such as shrink()"
        wait = GroupWait(group, library="NCCL", timeout=timeout, refusal=refusal, rank=-1, size=0)
        return DeviceCollectives(wait, Nccl4pyCommunicator, group)


backend = NCCLBackend()
