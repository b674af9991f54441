"""What launchers tell a process before it has joined a group: its rank, and how many processes there are."""

from __future__ import annotations

import os

__all__ = ["largest_launched_size", "launched_rank", "launched_size"]

# Those of torchrun and of MPI come first: inside of a step of Slurm they speak of the inner launch.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_rank() -> str:
    """Return the rank that the launcher speaks of, or "0"."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0")


def launched_size() -> str:
    """Return the number of processes that the launcher speaks of, or "1"."""
    return next((os.environ[name] for name in _SIZES if name in os.environ), "1")


def largest_launched_size() -> int:
    """Return the largest number of processes that any launcher speaks of, or 1."""
    said = [os.environ.get(name, "") for name in _SIZES]
    return max((int(text) for text in said if text.isdecimal()), default=1)
