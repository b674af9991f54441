"""What the process that ranks of gloo are forked off has done before, and what each of them does then.

All that takes longer than most scenarios is done once: torch is imported, adapters are loaded, kernels compiled.
"""

import gc
import os
from datetime import timedelta
from pathlib import Path

import scenarios
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from worlds import serve

import gradscale
from gradscale import registry


def run_rank(folder: Path, rank: int, size: int, task: bytes):
    """Run a task as one rank, which prints to a file."""
    with Path(folder, f"{rank}.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    # The store is a file, so that no two worlds of a machine can meet at one port.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    serve(folder, dist.group.WORLD, rank, size, task)


registry.get("torch")
# torch imports its compiler with the first optimizer.
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
scenarios.iterate(gradscale.GradScaler(), scenarios.SGD(None), scenarios.gradients("numpy"))
gc.freeze()
