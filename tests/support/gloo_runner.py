"""What the process that ranks of gloo are forked off has done before, and what each of them does then.

All that takes longer than most scenarios is done once: torch is imported, adapters are loaded, kernels compiled.
"""

import gc
import os
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import scenarios
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from worlds import run_cases

import gradscale
from gradscale import registry

LINGERING = 15.0  # seconds


def run_rank(folder: Path, rank: int, size: int, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]]):
    """Run a scenario's cases as one rank, and write what they returned or raised to a file."""
    with Path(folder, f"{rank}.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    # The store is a file, so that no two worlds of a machine can meet at one port.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    results = run_cases(dist.group.WORLD, scenario, cases)
    answers = [Path(folder, f"{other}.pickle") for other in range(size)]
    answers[rank].write_bytes(pickle.dumps(results))
    # A rank that raised stays, as MPI's do: had it ended, the others would find its connections closed. One that died
    # never answers.
    end = time.monotonic() + LINGERING
    while not all(answer.exists() for answer in answers) and time.monotonic() < end:
        time.sleep(0.002)


registry.get("torch")
# torch imports its compiler with the first optimizer.
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
scenarios.iterate(gradscale.GradScaler(), scenarios.SGD(None), scenarios.gradients("numpy"))
gc.freeze()
