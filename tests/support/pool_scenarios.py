"""What ranks do in the tests of the pool itself: they end well, raise, hang, and die."""

from __future__ import annotations

import atexit
import os
import signal
import time

from worlds import alone

__all__ = ["behave", "behave_alone"]


def behave(comm, how: str = "well", where: int = 0) -> tuple[int, str]:
    """Do something on one rank; the process, and the name of its communicator."""
    if how == "well":
        comm.Barrier()
    elif comm.rank == where:
        if how == "hangs":
            time.sleep(3600.0)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails at its end":
            atexit.register(os._exit, 3)
        assert how != "raises", "this rank fails on purpose"
    return os.getpid(), comm.Get_name()


@alone
def behave_alone(comm, how: str = "well", where: int = 0) -> tuple[int, str]:
    """Do the same in processes that serve nothing else."""
    return behave(comm, how, where)
