"""Ranks in one process: each a thread, to test a training loop with."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from array_api_compat import array_namespace

from gradscale.core import validation
from gradscale.core.protocols import Array
from gradscale.errors import CollectiveTimeoutError, GradscaleError

__all__ = ["RankFailedError", "ThreadCollectives", "run_ranks"]

_Result = TypeVar("_Result")


class RankFailedError(GradscaleError, RuntimeError):
    """Another rank of ``run_ranks`` raised; its exception is what ``run_ranks`` raises.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def work(group):
    ...     try: group.start_max(np.zeros(1, np.int32))() if group.rank == 0 else 1 // 0
    ...     except gradscale.testing.RankFailedError as error: print(error)
    >>> try: gradscale.testing.run_ranks(2, work)
    ... except ZeroDivisionError as error: print(error)
    rank 0 of 2 waits for rank 1, which raised
    integer division or modulo by zero
    """


class _World:
    """What the ranks share: the contributions to each collective, by its position in the sequence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.contributions: dict[int, dict[int, Array]] = {}
        self.results: dict[int, Array] = {}
        self.collected: dict[int, int] = {}
        self.failed_rank: int | None = None


class ThreadCollectives:
    """One rank of a group of threads; what ``run_ranks`` passes to the function.

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
        self._timeout = timeout

    def start_max(self, x: Array, /) -> Callable[[], Array]:
        """Begin an element-wise MAX all-reduce of an array; the returned call finishes it."""
        world, position = self._world, self.calls
        self.calls += 1
        with world.changed:
            contributions = world.contributions.setdefault(position, {})
            # A copy, as a message is: what the rank does to its array later must not be seen.
            contributions[self.rank] = array_namespace(x).asarray(x, copy=True)
            if len(contributions) == self.size:
                maximum = array_namespace(x).maximum
                world.results[position] = functools.reduce(maximum, world.contributions.pop(position).values())
                world.changed.notify_all()

        taken: list[Array] = []

        def finish() -> Array:
            if taken:
                return taken[0]
            with world.changed:
                done = world.changed.wait_for(
                    lambda: position in world.results or world.failed_rank is not None, self._timeout
                )
                if position in world.results:
                    taken.append(array_namespace(x).asarray(world.results[position], copy=True))
                    world.collected[position] = world.collected.get(position, 0) + 1
                    if world.collected[position] == self.size:
                        del world.results[position], world.collected[position]
                    return taken[0]
            if done:
                msg = f"rank {self.rank} of {self.size} waits for rank {world.failed_rank}, which raised"
                raise RankFailedError(msg)
            raise CollectiveTimeoutError(self.rank, self.size, self._timeout)

        return finish


def run_ranks(
    size: int,
    function: Callable[[ThreadCollectives], _Result],
    *,
    timeout: float = 30.0,
    return_exceptions: bool = False,
) -> list[_Result]:
    """Call a function on several ranks, each a thread of this process, and return their results in order.

    Parameters
    ----------
    size : int
        Number of ranks.
    function : callable
        Called once on each rank with its :class:`ThreadCollectives`, which is a group for ``ShardedGradScaler``.
    timeout : float, default 30.0
        Seconds that a rank waits for the others in a collective.
    return_exceptions : bool, default False
        False: the first exception of a rank wakes the ranks that wait for it, and is raised. True: a failing rank
        leaves silently, as a process that died, and exceptions stand in the list in place of results.

    Returns
    -------
    list
        The results, by rank.

    Examples
    --------
    >>> import gradscale
    >>> def work(group):
    ...     return group.rank, group.size
    >>> gradscale.testing.run_ranks(3, work)
    [(0, 3), (1, 3), (2, 3)]
    """
    size = validation.integer("size", size, 1, validation.LARGEST_INT32)
    world = _World(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCollectives(world, rank, timeout))
        except BaseException as error:
            results[rank] = error
            with world.changed:
                failures.append(error)
                if not return_exceptions and world.failed_rank is None:
                    world.failed_rank = rank
                    world.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures and not return_exceptions:
        raise failures[0]
    return results
