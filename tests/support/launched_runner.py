"""Serves tasks as one rank of a world that stays up, until the process that sends them closes the connection.

A task is a scenario, its cases, and whether it is the only one of these ranks. Under MPI the only one has COMM_WORLD,
others a communicator of their own; over MLX's ring the group is the same one in each task.
"""

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import rank_and_size
from worlds import run_cases


def main(kind: str, address: str):
    """Serve until the connection is closed."""
    # For a rank that hangs.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    if kind == "mpi":
        from mpi4py.MPI import COMM_WORLD as group  # noqa: N811
    else:
        import mlx.core as mx

        group = mx.distributed.init(strict=True, backend="ring")
    with Client(address, "AF_UNIX") as connection:
        connection.send((rank_and_size(group)[0], os.getpid()))
        while True:
            try:
                scenario, cases, is_alone = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            own = group.Dup() if kind == "mpi" and not is_alone else None
            connection.send(run_cases(own or group, scenario, cases))
            if own is not None:
                own.Free()


main(*sys.argv[1:])
