"""Serves tasks as one rank of a world that stays up, until the process that sends them closes the connection.

A task is a scenario, its cases, and whether it is the only one of these ranks. The only one has COMM_WORLD, others a
communicator of their own.
"""

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path

from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))

from worlds import run_cases


def main():
    """Serve until the connection is closed."""
    # For a rank that hangs.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    world = MPI.COMM_WORLD
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send((world.rank, os.getpid()))
        while True:
            try:
                scenario, cases, is_alone = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            communicator = world if is_alone else world.Dup()
            connection.send(run_cases(communicator, scenario, cases))
            if not is_alone:
                communicator.Free()


main()
