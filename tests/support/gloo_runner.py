"""Forks the ranks of gloo worlds off one process that has imported torch, for as long as its input is open.

A line of the input is a task, a number of ranks and a limit in seconds; the answer is a line with their exit statuses.
Each rank runs the task's cases in a world of its own and writes what they returned or raised beside the task.
"""

import gc
import json
import os
import pickle
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Their import takes longer than most scenarios that need them.
import torch.distributed.fsdp
import torch.distributed.tensor

sys.path.insert(0, str(Path(__file__).parent))

import scenarios
from worlds import run_cases

import gradscale
from gradscale import registry

LINGERING = 15.0  # seconds


def run_rank(task: Path, rank: int, size: int) -> None:
    """Run a task as one rank."""
    torch.set_num_threads(1)
    # The store is a file, so that no two worlds of a machine can meet at one port.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.with_name('store')}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    results, _ = run_cases(dist.group.WORLD, *pickle.loads(task.read_bytes()))
    answers = [task.with_name(f"{other}.pickle") for other in range(size)]
    answers[rank].write_bytes(pickle.dumps(results))
    # A rank that raised stays, as MPI's do: had it ended, the others would find its connections closed. One that died
    # never answers.
    end = time.monotonic() + LINGERING
    while not all(answer.exists() for answer in answers) and time.monotonic() < end:
        time.sleep(0.002)


def fork_rank(task: Path, rank: int, size: int) -> int:
    """Return the process id of a new rank."""
    process = os.fork()
    if process:
        return process
    with task.with_name(f"{rank}.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        run_rank(task, rank, size)
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Freeing all that was imported takes longer than most scenarios; programs that end are tested by themselves.
    os._exit(status)


def wait_for(processes: list[int], limit: float) -> list[int]:
    """Return the exit statuses; processes that outlast the limit are killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + limit
    while len(statuses) < len(processes):
        for process in set(processes) - statuses.keys():
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
            found, status = os.waitpid(process, os.WNOHANG if time.monotonic() <= end else 0)
            if found:
                statuses[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return [statuses[process] for process in processes]


def main() -> None:
    """Serve until the input ends."""
    # What takes longest is done once for all ranks: adapters are loaded, and their kernels compiled.
    registry.get("torch")
    # torch imports its compiler with the first optimizer.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scenarios.iterate(gradscale.GradScaler(), scenarios.SGD(None), scenarios.gradients("numpy"))
    gc.freeze()
    for line in sys.stdin:
        task, size, limit = json.loads(line)
        processes = [fork_rank(Path(task), rank, size) for rank in range(size)]
        print(json.dumps(wait_for(processes, limit)), flush=True)


main()
