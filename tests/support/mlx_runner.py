"""Serves tasks as one rank of MLX's ring, as mpi_runner.py does under MPI. The group is the same one in each task."""

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))

from worlds import run_cases


def main():
    """Serve until the connection is closed."""
    # For a rank that hangs.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    group = mx.distributed.init(strict=True, backend="ring")
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send((group.rank(), os.getpid()))
        while True:
            try:
                scenario, cases, _ = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send(run_cases(group, scenario, cases))


main()
