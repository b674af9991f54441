"""Whether a device has come to an event, and what it still reads until then, which is kept."""

from __future__ import annotations

import cupy
from cupy.cuda import runtime

__all__ = ["forget", "forget_all_over", "is_over", "keep_until"]

_NOT_READY = 600  # of CUDA's runtime; if the driver has the same condition, it has the same number

# Threads share it, and each change of it is one step.
_kept: dict[cupy.cuda.Event, object] = {}


def is_over(event: cupy.cuda.Event) -> bool:
    """Tell whether a device has come to an event; no wait. CUDARuntimeError if the device has failed.

    ``Event.done`` takes a failure for not being ready.
    """
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == 0)


def keep_until(event: cupy.cuda.Event, held: object) -> None:
    """Keep memory that a device reads or writes, whoever else drops it, until the event is found to be over."""
    _kept[event] = held


def forget(event: cupy.cuda.Event) -> None:
    """Keep nothing for an event any more; another thread may have been first."""
    _kept.pop(event, None)


def forget_all_over() -> None:
    """Ask all events, and keep nothing for those that are over; no wait."""
    for event in list(_kept):
        if is_over(event):
            forget(event)
