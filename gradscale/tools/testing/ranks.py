"""Ranks that are threads of one process, to test a training loop with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import validation
from gradscale.core.protocols import Array
from gradscale.errors import GradscaleError, InvalidValueError
from gradscale.waiting import GroupWait

_Result = TypeVar("_Result")


class RankFailedError(GradscaleError, RuntimeError):
    """Another rank of ``run_ranks`` raised; its exception is what ``run_ranks`` raises."""


class _Collective:
    """One collective: the arrays that ranks have sent, and its result once all have."""

    def __init__(self) -> None:
        self.sent: dict[int, Array] = {}
        self.result: Array | GradscaleError | None = None


class _World:
    """The collectives that the ranks of a group have begun, by their position in the sequence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.begun: dict[int, _Collective] = {}
        self.failed_rank: int | None = None


class ThreadCollectives:
    """One rank of a group of threads; ``run_ranks`` passes it to the function.

    Attributes
    ----------
    rank, size : int
        Position in the group, and number of ranks.
    calls : int
        How many collectives this rank has started.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def largest(group):  # a ThreadCollectives
    ...     return group.start_max(np.asarray([group.rank, 7], np.int32))().tolist()
    >>> gradscale.testing.run_ranks(2, largest)
    [[1, 7], [1, 7]]
    """

    def __init__(self, world: _World, rank: int, timeout: float) -> None:
        self.rank = rank
        self.size = world.size
        self.calls = 0
        self._world = world
        wait = GroupWait(world, library="threads", timeout=timeout, refusal="", rank=rank, size=world.size)
        self._until, self.within = wait.until, wait.within

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin an element-wise MAX all-reduce of an array; the returned call finishes it.

        InvalidTypeError for an object that is no array. The call raises InvalidValueError, on every rank, if the ranks'
        arrays differ in library, shape or dtype.
        """
        if not is_array_api_obj(x):
            raise validation.wrong_type(x, "what is reduced", "an array")
        world, position = self._world, self.calls
        self.calls += 1
        with world.lock:
            this = world.begun.setdefault(position, _Collective())
            # A copy, as a message is: what the rank does to its array later must not be seen.
            this.sent[self.rank] = array_namespace(x).asarray(x, copy=True)
            if len(this.sent) == self.size:
                this.result = _maximum(world.begun.pop(position).sent)

        def finish() -> Array:
            self._until(lambda: this.result is not None or world.failed_rank is not None)
            if isinstance(this.result, GradscaleError):
                raise type(this.result)(*this.result.args)
            if this.result is not None:
                return array_namespace(x).asarray(this.result, copy=True)
            msg = f"rank {self.rank} of {self.size} waits for rank {world.failed_rank}, which raised"
            raise RankFailedError(msg)

        return finish


def _maximum(arrays: dict[int, Array]) -> Array | GradscaleError:
    """Return the element-wise MAX of the ranks' arrays, or the error for arrays that do not go together."""
    sent = {rank: (array_namespace(x).__name__, tuple(x.shape), f"{x.dtype}") for rank, x in sorted(arrays.items())}
    if len({*sent.values()}) > 1:
        return InvalidValueError(f"every rank must send an array of one library, shape and dtype, got by rank {sent}")
    xs = list(arrays.values())
    return functools.reduce(array_namespace(xs[0]).maximum, xs)


def run_ranks(
    size: int,
    function: Callable[[ThreadCollectives], _Result],
    *,
    timeout: float = 30.0,
    return_exceptions: bool = False,
) -> list[_Result]:
    """Call a function on several ranks, each a thread of this process, and return the results by rank.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Called once on each rank with its :class:`ThreadCollectives`, which is a group for ``ShardedGradScaler``.
    timeout : float, default 30.0
        Seconds that a rank waits for the others in a collective; ``math.inf`` for ever.
    return_exceptions : bool, default False
        False: the first exception of a rank wakes the ranks that wait for it, and is raised. True: a failing rank
        leaves silently, as a process that died, and its exception is its result.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        For a size, a function or a timeout that is none.

    Examples
    --------
    >>> import gradscale
    >>> def work(group):
    ...     return group.rank, group.size
    >>> gradscale.testing.run_ranks(3, work)
    [(0, 3), (1, 3), (2, 3)]
    """
    size = validation.integer("size", size, 1, validation.LARGEST_INT32)
    if not callable(function):
        raise validation.wrong_type(function, "function", "callable")
    seconds = validation.timeout(timeout)
    world = _World(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCollectives(world, rank, seconds))
        except BaseException as error:
            results[rank] = error
            with world.lock:
                if not return_exceptions and world.failed_rank is None:
                    world.failed_rank = rank

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failed_rank is not None:
        raise results[world.failed_rank]
    return results
