"""poll: make the host wait until something is done or the time is over, and leave the processor to the other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["poll"]

# Seconds. At first other ranks on this core get their turn; then the core is left to them for longer and longer.
_YIELDING = 2e-3
_SHORTEST_PAUSE = 5e-5
_LONGEST_PAUSE = 1e-3

_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def poll(is_done: Callable[[], bool], timeout: float, *, longest_pause: float = _LONGEST_PAUSE) -> bool:
    """Ask until something is done; Ctrl-C is seen between two questions.

    Parameters
    ----------
    is_done : callable
        What is asked, once at least. What it raises ends the wait.
    timeout : float
        Seconds; ``math.inf`` for ever.
    longest_pause : float, default 0.001
        Seconds that pass between two questions at most.

    Returns
    -------
    bool
        True when it is done, False when the time is over.
    """
    begin = time.monotonic()
    pause = _SHORTEST_PAUSE
    while not is_done():
        waited = time.monotonic() - begin
        if waited > timeout:
            return False
        if waited < _YIELDING:
            _give_way()
        else:
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)
    return True
