"""The agreement of two ranks on one optimizer, against one bare Allreduce of the same bytes.

``rows`` launches this module under mpiexec; run by itself, it is one of the ranks.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gradscale
from benchmarks.measure import STEADY, Idle, Row, by_the_clock, interleaved

_CALLS = 200  # in each round


def rows(quick: bool) -> list[Row]:
    """Run two ranks and return what they measured."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")
    beside_python = Path(sys.executable).parent
    mpiexec = shutil.which("mpiexec", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise ModuleNotFoundError("there is no mpiexec beside this Python nor on the PATH", name="mpich")
    command = [mpiexec, "-n", "2", sys.executable, "-m", __spec__.name, "11" if quick else "51"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stdout}{finished.stderr}")
    times = json.loads(finished.stdout)
    group, allreduce = (times[name] - times["alone"] for name in ("group", "alone and Allreduce"))
    return [
        Row("Collectives.start_max, 2 ranks / Allreduce", times["start_max"], times["Allreduce"], "s", 2.0),
        Row("what a group of 2 ranks adds to an iteration / what Allreduce adds", group, allreduce, "s", 1.3),
    ]


def measure(rounds: int) -> dict[str, float]:
    """Return the median seconds of one call of each kind, as this rank sees them."""
    import numpy as np
    from mpi4py import MPI

    from gradscale.scaler.claim import LENGTH

    comm = MPI.COMM_WORLD
    x = np.arange(LENGTH, dtype=np.int32)
    received = np.empty_like(x)
    collectives = gradscale.registry.collectives_for(comm, timeout=60)
    optimizer = Idle([np.ones(10, np.float32)])

    def allreduce():
        comm.Allreduce(x, received, op=MPI.MAX)

    def iteration(between: Callable[[], object] = lambda: None, scaler: gradscale.GradScaler | None = None):
        scaler = scaler or gradscale.GradScaler(**STEADY)
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
        "alone": iteration(),
        "alone and Allreduce": iteration(allreduce),
        "group": iteration(scaler=gradscale.ShardedGradScaler(group=comm, **STEADY)),
    }
    return interleaved(calls, rounds, timed)


def main():
    """Measure as one rank, and print the numbers on the first."""
    from mpi4py import MPI

    times = measure(int(sys.argv[1]))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(times))


CASES = {"agreement": rows}

if __name__ == "__main__":
    main()
