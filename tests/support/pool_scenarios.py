"""What ranks do in the tests of the pool itself: they end well, raise, hang, die, and leave things behind."""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from worlds import alone

__all__ = ["behave", "behave_alone"]

LEFT = "GRADSCALE_TEST_LEFT_BEHIND"


def behave(comm: Any, how: str = "well", where: int = 0) -> dict[str, Any]:
    """Do something on one rank, and say who this is."""
    found: dict[str, Any] = {"pid": os.getpid(), "left behind": os.environ.get(LEFT), "communicator": comm.Get_name()}
    if how == "well":
        comm.Barrier()
    elif comm.rank == where:
        WAYS[how](found)
    return found


@alone
def behave_alone(comm: Any, how: str = "well", where: int = 0) -> dict[str, Any]:
    """Do the same in processes that serve nothing else."""
    return behave(comm, how, where)


def _raise(_: Any) -> None:
    msg = "this rank fails on purpose"
    raise KeyError(msg)


def _hang(_: Any) -> None:
    time.sleep(3600.0)


WAYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "raises": _raise,
    "hangs": _hang,
    "is killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "ends": lambda _: sys.exit("this rank ends on purpose"),
    "answers what cannot be sent": lambda found: found.update(function=lambda: None),
    "sets a variable": lambda _: os.environ.update({LEFT: "1"}),
    "draws a number": lambda _: random.random(),
    "changes the folder": lambda _: os.chdir(os.sep),
    "fails at its end": lambda _: atexit.register(os._exit, 3),
}
