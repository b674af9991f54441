"""Waiting for the other ranks of a group, and giving a group up: for every adapter that brings groups."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar

from gradscale.errors import BackendError, CollectiveTimeoutError, GradscaleError, InvalidValueError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Array: TypeAlias = Any

# Seconds. At first other ranks on this core get their turn; then the core is left to them for longer and longer.
_YIELDING = 2e-3
_SHORTEST_PAUSE = 5e-5
_LONGEST_PAUSE = 1e-3
# What one gap between two questions counts at most, and of the whole time: a process that asks so rarely did not run.
_LARGEST_GAP = 0.5
_LARGEST_SHARE = 0.25
# Seconds before a wait is logged.
_SILENT = 60.0
# Seconds. A device has nothing to do while the host sleeps longer than its answer takes.
DEVICE_PAUSE = 2e-4
# A library may wait for ranks that are gone while it aborts a communicator.
_ABORTING = 10.0

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def poll(is_done: Callable[[], bool], timeout: float, *, longest_pause: float = _LONGEST_PAUSE) -> bool:
    """Ask until something is done, and return True; return False when ``timeout`` seconds are over.

    Ctrl-C is seen between two questions. Time in which this process does not run (SIGSTOP, a paused container,
    ``scontrol suspend``) counts at most half a second, since the other ranks may have been suspended as well. So
    ``is_done`` may itself wait only for less than that; it is called at least once, and once more at the end.
    """
    waited = 0.0
    last = time.monotonic()
    largest_gap = min(_LARGEST_GAP, _LARGEST_SHARE * timeout)
    pause = _SHORTEST_PAUSE
    while not is_done():
        now = time.monotonic()
        waited += min(now - last, largest_gap)
        last = now
        if waited >= timeout:
            return is_done()
        if waited < _YIELDING:
            _give_way()
        else:
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)
    return True


def wait_and_tell(wait: Callable[[float], bool], timeout: float, rank: int, size: int, operation: str) -> bool:
    """Return whether the other ranks have come in time; after a minute log who waits for them, and how long yet."""
    has_come = wait(min(timeout, _SILENT))
    if has_come or timeout <= _SILENT:
        return has_come
    left = f"gives up in {timeout - _SILENT:g} s" if timeout < threading.TIMEOUT_MAX else "never gives up"
    text = "rank %d of %d has waited %g s for the other ranks to come to %s, and %s: look at what they do"
    logging.getLogger("gradscale").warning(text, rank, size, _SILENT, operation, left)
    return wait(timeout - _SILENT)


def in_thread(call: Callable[[], _Result]) -> Future[_Result]:
    """Call something in a thread that does not keep the process alive."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gradscale", daemon=True).start()
    return future


def call_within(call: Callable[[], _Result], timeout: float) -> _Result:
    """Call something that may wait for ever; TimeoutError after some seconds, when its thread is left behind."""
    future = in_thread(call)
    if not poll(future.done, timeout):
        msg = f"there was no answer within {timeout:g} s"
        raise TimeoutError(msg)
    return future.result()


def on_fork(note: Callable[[int], object]) -> None:
    """Call something in every child after fork, with the process id of its parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: note(os.getppid()))


def forbid_forked(library: str, owner: str) -> NoReturn:
    """Raise BackendError in a child after fork that uses its parent's group; ``owner`` is a sentence."""
    msg = (
        f"a process group belongs to the process that made it: {owner}, got process {os.getpid()}, a child after "
        f"fork, which cannot use {library} in its parent's place. Call the scaler in the parent alone, or start the "
        f'child by multiprocessing.get_context("spawn"), with a group or a scaler of its own'
    )
    raise BackendError(msg)


def require_message(x: _Array) -> None:
    """Raise InvalidValueError unless an array is 1-d int32, as all that ranks send each other is."""
    if x.ndim != 1 or str(x.dtype).rpartition(".")[2] != "int32":
        msg = f"only 1-d int32 arrays are reduced, got {x.ndim}-d {x.dtype}"
        raise InvalidValueError(msg)


# Why a group can no longer be used. The groups are kept: freeing some waits for lost ranks.
_give_up_reasons: dict[Hashable, str] = {}


@dataclasses.dataclass(eq=False)
class GroupWait:
    """How one rank waits for the others of a group.

    A group whose wait was given up is unusable, through any object: the messages under way would meet those sent later.
    A later use raises ``refusal``, which says what to pass instead, with the reason. ``group`` is the library's own and
    has a hash; ``describe`` returns the text of a library's exception; ``on_give_up`` is called with it, once.
    """

    group: Any
    _: dataclasses.KW_ONLY
    library: str
    timeout: float
    refusal: str
    rank: int
    size: int
    describe: Callable[[Exception], str] = str
    on_give_up: Callable[[BaseException], None] | None = None
    process: int = dataclasses.field(default_factory=os.getpid, init=False)

    def require_usable(self) -> None:
        """Raise BackendError when the group was given up, with the reason, or belongs to the parent process."""
        if self.process != os.getpid():
            # The ranks cannot tell the messages of a child after fork from its parent's.
            forbid_forked(self.library, f"rank {self.rank} of {self.size} is process {self.process}")
        if _give_up_reasons and self.group in _give_up_reasons:
            msg = f"{self.refusal}. It was given up for: {_give_up_reasons[self.group]}"
            raise BackendError(msg)

    def give_up(self, error: BaseException) -> None:
        """Give the group up for an error; the first one is kept."""
        if self.group not in _give_up_reasons:
            _give_up_reasons[self.group] = repr(error)
            if self.on_give_up is not None:
                self.on_give_up(error)

    def failure(self, error: Exception) -> BackendError:
        """Give the group up for an exception of the library, and return the error to raise from it."""
        where = f"rank {self.rank} of {self.size}"
        text = f"{self.library} failed on {where} while the ranks agreed on a step: {self.describe(error)}"
        failure = BackendError(text)
        self.give_up(failure)
        return failure

    def run(
        self, call: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        """Call something of the library; an exception, Ctrl-C as well, gives the group up.

        BackendError comes from the library's exceptions, and for a group that is not usable; gradscale's are raised as
        they are.
        """
        if _give_up_reasons or self.process != os.getpid():
            self.require_usable()
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if isinstance(error, GradscaleError):
                self.give_up(error)
                raise
            raise self.failure(error) from error
        except BaseException as error:
            self.give_up(error)
            raise

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let waits end after some seconds, if not before."""
        timeout, self.timeout = self.timeout, min(self.timeout, seconds)
        try:
            yield
        finally:
            self.timeout = timeout

    def until(
        self,
        is_done: Callable[[], bool],
        operation: str = "the agreement on a step",
        *,
        longest_pause: float = _LONGEST_PAUSE,
    ) -> None:
        """Poll until something is done; CollectiveTimeoutError when the time is over."""
        wait = functools.partial(poll, is_done, longest_pause=longest_pause)
        if not wait_and_tell(wait, self.timeout, self.rank, self.size, operation):
            raise CollectiveTimeoutError(self.rank, self.size, self.timeout, operation=operation)


class DeviceCommunicator(Protocol):
    """One rank's communicator of a library whose collectives run on a device: where two bindings of it differ."""

    rank: int
    size: int

    @property
    def example(self) -> Callable[[], _Array] | None:
        """A call that returns a 0-d float32 array, for a rank that never has one; None without a library."""

    def all_reduce(self, x: _Array, start: Callable[..., None]) -> tuple[Callable[[], bool], Callable[[], _Array]]:
        """Prepare a MAX all-reduce of a copy of ``x``, behind what its library has yet to do, and start it.

        ``start(issue)`` calls ``issue``, perhaps in a new thread, which makes the device its current one;
        ``start(issue, here=True)`` calls it in this thread. Returns a call that tells without a wait whether the device
        has done it, and one that returns the result then.
        """

    def check(self) -> None:
        """Raise the error that the library has noticed by itself, if any; no wait."""

    def abort(self) -> None:
        """End what the device waits for, in a new thread."""


class DeviceCollectives:
    """MAX all-reduces on a device, in one order with the user's own over the communicator; a timeout ends them there.

    Constructing sends nothing. Starting a collective makes the host wait only for the first one of each length, in
    which the library connects the ranks. To finish one is a host wait.

    The timeout, an error of the library, and Ctrl-C end what the communicator has under way on the device; every rank
    needs another one then. ``bind`` makes a DeviceCommunicator of the library's own, which is ``group.group``.
    """

    def __init__(self, group: GroupWait, bind: Callable[[GroupWait], DeviceCommunicator], identity: object) -> None:
        self.identity = identity
        self._group = group
        group.require_usable()
        self._comm = bind(group)
        self.rank = group.rank = self._comm.rank
        self.size = group.size = self._comm.size
        self.example, self.within = self._comm.example, group.within
        group.on_give_up = functools.partial(end_on_device, self._comm.abort, "the communicator", group.describe)
        # The lengths that have gone over these ranks, for which the library has its connections.
        self._connected: set[int] = set()

    def __repr__(self) -> str:
        return f"DeviceCollectives({self._group.group!r}, rank={self.rank}, size={self.size})"

    def start_max(self, x: _Array, /) -> Callable[[], _Array]:
        """Begin an element-wise MAX all-reduce of a 1-d int32 array, left alone; the returned call finishes it."""
        self._group.require_usable()
        require_message(x)
        # Also Ctrl-C between two steps gives up: other ranks may be waiting for this one.
        run, start = self._group.run, functools.partial(self._start, x.shape[0])
        is_over, result = self._comm.all_reduce(x, lambda issue, **options: run(start, issue, **options))

        @functools.cache
        def finish() -> _Array:
            self._group.run(self._poll, is_over)
            return result()

        return finish

    def _start(self, length: int, issue: Callable[[], None], *, here: bool = False) -> None:
        if here or length in self._connected:
            issue()
            return
        # To connect the ranks the library waits for all of them, heeding neither signals nor the time.
        issued = in_thread(issue)
        self._poll(issued.done)
        issued.result()
        self._connected.add(length)

    def _poll(self, is_done: Callable[[], bool]) -> None:
        """Make the host wait until something is done, the library fails, or the time is over."""

        def is_settled() -> bool:
            has_come = is_done()
            # Also if it is done: a communicator that has failed gives no answers.
            self._comm.check()
            return has_come

        self._group.until(is_settled, longest_pause=DEVICE_PAUSE)


def end_on_device(
    abort: Callable[[], None], what: str, describe: Callable[[Exception], str], error: BaseException
) -> None:
    """Let nothing on a device wait for a group any more; what went wrong there becomes a note of the error."""
    try:
        # In a thread, which may be left behind.
        call_within(abort, _ABORTING)
    except TimeoutError:
        error.add_note(f"{what} was not aborted within {_ABORTING:g} s: end this process")
    except Exception as failure:
        error.add_note(f"{what} could not be aborted: {describe(failure)}: end this process")
