"""The agreement of two ranks on one optimizer, against one bare Allreduce of the same bytes.

``rows`` launches this module under mpiexec; run by itself, it is one of the ranks.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mpi4py  # noqa: F401 - MPI itself would make a rank of the process that launches the ranks
import numpy as np

import gradscale
from benchmarks.measure import STEADY, Idle, Row, by_the_clock, interleaved
from gradscale.errors import BackendNotAvailableError
from gradscale.extras import remedy
from gradscale.scaler.claim import LENGTH

_CALLS = 200  # in each round


def rows(quick: bool) -> list[Row]:
    """Run two ranks and return what they measured."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise BackendNotAvailableError(f"there is no mpiexec beside this Python nor on the PATH; {remedy('mpich')}")
    command = [mpiexec, "-n", "2", sys.executable, "-m", __name__, "11" if quick else "51"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout}{finished.stderr}")
    times = json.loads(finished.stdout)
    group, allreduce = (times[name] - times["alone"] for name in ("group", "alone and Allreduce"))
    return [
        Row("Collectives.start_max, 2 ranks / Allreduce", times["start_max"], times["Allreduce"], 2.0),
        Row("what a group of 2 ranks adds to an iteration / what Allreduce adds", group, allreduce, 1.3),
    ]


def _measured(rounds: int) -> tuple[int, dict[str, float]]:
    """Return this rank, and the median seconds of one call of each kind as it sees them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    x = np.arange(LENGTH, dtype=np.int32)
    received = np.empty_like(x)
    collectives = gradscale.registry.collectives_for(comm, timeout=60)
    optimizer = Idle([np.ones(10, np.float32)])

    def allreduce():
        comm.Allreduce(x, received, op=MPI.MAX)

    def iteration(scaler: gradscale.GradScaler, between: Callable[[], object] = lambda: None):
        scaler.scale(np.ones((), np.float32))

        def run():
            scaler.unscale_(optimizer)
            between()
            scaler.step(optimizer)
            scaler.update()

        return run

    def timed(run: Callable[[], object]) -> float:
        comm.Barrier()
        return by_the_clock(lambda: [run() for _ in range(_CALLS)]) / _CALLS

    calls: dict[str, Callable[[], object]] = {
        "Allreduce": allreduce,
        "start_max": lambda: collectives.start_max(x)(),
        # Within an iteration the ranks drift apart, and every collective waits for the last of them.
        "alone": iteration(gradscale.GradScaler(**STEADY)),
        "alone and Allreduce": iteration(gradscale.GradScaler(**STEADY), allreduce),
        "group": iteration(gradscale.ShardedGradScaler(group=comm, **STEADY)),
    }
    return comm.rank, interleaved(calls, rounds, timed)


if __name__ == "__main__":
    rank, measured = _measured(int(sys.argv[1]))
    if rank == 0:
        print(json.dumps(measured))
