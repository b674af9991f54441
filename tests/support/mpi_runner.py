"""Serves tasks as one rank of a world that stays up, until the process that sends them closes the connection.

A task is a scenario, its cases, and whether it is the only one of this world; the answer is what they returned or
raised, and why this rank cannot serve another. The only one has COMM_WORLD, others a communicator of their own.
"""

import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))

from pool import INDIFFERENT
from worlds import run_cases


def inherited() -> dict[str, Any]:
    """Return what a scenario may have changed for the next one."""
    environment = {name: value for name, value in os.environ.items() if name not in INDIFFERENT}
    found: dict[str, Any] = {"environment": environment, "folder": Path.cwd(), "random": random.getstate()}
    found["numpy.random"] = pickle.dumps(np.random.get_state())  # noqa: NPY002
    if "torch" in sys.modules:
        found["torch.random"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return found


def why_spoiled(before: dict[str, Any]) -> str:
    """Return what is left of a scenario that could meet the next one, or an empty string."""
    after = inherited()
    changed = [name for name in before if before[name] != after[name]]
    adapter = sys.modules.get("gradscale_numpy.mpi")
    if adapter is not None and adapter._under_way:
        changed.append("messages under way")
    return ", ".join(changed)


def run(communicator: MPI.Intracomm, module: str, name: str, cases: list[tuple[Any, ...]]) -> tuple[list[Any], str]:
    """Run a scenario's cases; the results, and why this rank cannot be used again."""
    importlib.import_module(module)
    before = inherited()
    results, has_raised = run_cases(communicator, module, name, cases)
    return results, "a scenario has raised" if has_raised else why_spoiled(before)


def main() -> None:
    """Serve until the connection is closed."""
    # For a rank that hangs.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    communicator = MPI.COMM_WORLD
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send((MPI.COMM_WORLD.rank, os.getpid()))
        while True:
            try:
                module, name, cases, is_alone = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if communicator != MPI.COMM_WORLD:
                # Every rank has ended its last task well, or would not be given another.
                communicator.Free()
            if is_alone:
                # Loading numba takes longer than most scenarios, and not equally long on each rank.
                os.environ.setdefault("GRADSCALE_NUMPY_FAST", "0")
            else:
                communicator = MPI.COMM_WORLD.Dup()
            connection.send_bytes(pickle.dumps(run(communicator, module, name, cases)))


main()
