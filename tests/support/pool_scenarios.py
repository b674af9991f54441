"""What ranks do in the tests of the pool itself: they end well, raise, hang, and die."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

from worlds import alone

__all__ = ["behave", "behave_alone"]


def behave(comm: Any, how: str = "well", where: int = 0) -> tuple[int, str]:
    """Do something on one rank; the process, and the name of its communicator."""
    if how == "well":
        comm.Barrier()
    elif comm.rank == where:
        {"raises": _raise, "hangs": _hang, "is killed": _kill, "fails at its end": _fail_at_the_end}[how]()
    return os.getpid(), comm.Get_name()


@alone
def behave_alone(comm: Any, how: str = "well", where: int = 0) -> tuple[int, str]:
    """Do the same in processes that serve nothing else."""
    return behave(comm, how, where)


def _raise() -> None:
    msg = "this rank fails on purpose"
    raise KeyError(msg)


def _hang() -> None:
    time.sleep(3600.0)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_at_the_end() -> None:
    atexit.register(os._exit, 3)
