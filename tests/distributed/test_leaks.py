"""A long run keeps nothing of its iterations: the memory of a process that agrees over gloo, thousands of times."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]

# torch keeps a record of the last 2,000 collectives, and a scaler one of the last 1,024 steps: both are full by then.
PROGRAM = """
import ctypes, gc, sys
import torch
import torch.distributed as dist
import gradscale_torch

WARM_UP, ITERATIONS = 3_000, 6_000
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.0)
scaler = gradscale_torch.ShardedGradScaler("cpu", process_group=dist.group.WORLD)
kept = []

def iterate(count):
    for iteration in range(count):
        scaler.scale(weight.sum() * (float("inf") if iteration % 500 == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if sys.argv[2] == "bytes":
            kept.append(bytearray(23))
        if sys.argv[2] == "memory of C":
            libc.malloc(48)

libc = ctypes.CDLL(None)
# Of its ten sizes, 4 is what is in memory maps of its own, and 7 what is in use beside them.
libc.mallinfo2.restype = type("Sizes", (ctypes.Structure,), {"_fields_": [("all", ctypes.c_size_t * 10)]})

def used():
    gc.collect()
    sizes = libc.mallinfo2().all
    return sys.getallocatedblocks(), sizes[4] + sizes[7]

iterate(WARM_UP)
before = used()
iterate(ITERATIONS)
print(*(after - first for after, first in zip(used(), before)))
assert len(scaler.history) == 1024
"""
# Bounds for 6,000 iterations: of Python's blocks, and of bytes from malloc, where 23 an iteration would be 138,000.
MOST_BLOCKS = 500
MOST_BYTES = 70_000

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc says what is in use")


def grown(tmp_path: Path, leak: str) -> tuple[int, int]:
    """Return by how many blocks, and by how many bytes, a run of one rank has grown."""
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), leak],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    blocks, size = map(int, completed.stdout.split())
    return blocks, size


@needs_glibc
def test_a_run_over_gloo_keeps_nothing_of_an_iteration(tmp_path: Path) -> None:
    require("torch")
    blocks, size = grown(tmp_path, "none")
    assert blocks < MOST_BLOCKS
    assert size < MOST_BYTES


@needs_glibc
def test_what_is_kept_of_each_iteration_would_be_seen(tmp_path: Path) -> None:
    require("torch")
    (tmp_path / "second").mkdir()
    assert grown(tmp_path, "bytes")[0] > 10 * MOST_BLOCKS
    assert grown(tmp_path / "second", "memory of C")[1] > MOST_BYTES
