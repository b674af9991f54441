"""Runs a scenario's cases on this rank of COMM_WORLD, and writes what they returned or raised beside the task."""

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))

from worlds import Failure


def main() -> None:
    """Run the task named on the command line."""
    task = Path(sys.argv[1])
    module, name, cases = pickle.loads(task.read_bytes())
    scenario = getattr(importlib.import_module(module), name)
    results: list[Any] = []
    for args in cases:
        try:
            results.append(scenario(MPI.COMM_WORLD, *args))
        except Exception as error:
            results.append(Failure.of(error))
    task.with_name(f"{MPI.COMM_WORLD.rank}.pickle").write_bytes(pickle.dumps(results))


main()
