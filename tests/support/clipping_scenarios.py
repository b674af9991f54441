"""What the ranks do in the tests of clipping: the norm over a group, a rank that is late for it, two that differ."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from events import tell, wait_for
from scenarios import SGD, rank_and_size
from worlds import Failure

import gradscale

__all__ = ["PARTS", "clip_parts", "late_for_the_norm", "own_norm"]

# What the ranks hold: the last of three has no gradient at all.
PARTS = ([3.0, -4.0, 0.5], [12.0], [])


def clip_parts(group: Any, bad_rank: int, value: float) -> dict[str, Any]:
    """Make three iterations, the second with a bad value on one rank, clipped to the norm of all ranks' parts."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0, init_scale=8.0, backend="numpy")
    optimizer = SGD(None)
    norms, skipped, clipped = [], [], []
    for iteration in range(3):
        scaler.scale(np.float32(1.0))
        mine = np.array(PARTS[rank], np.float32) * np.float32(scaler.get_scale())
        is_bad = (rank, iteration) == (bad_rank, 1)
        optimizer.grads = [np.append(mine, np.float32(value))] if is_bad else [mine] if mine.size else []
        norm = scaler.unscale_(optimizer, max_norm=2.0, norm_over="group")
        norms.append(np.asarray(norm).tobytes())
        clipped.append([x.tolist() for x in optimizer.grads])
        scaler.step(optimizer)
        skipped.append(scaler.last_step(optimizer).skipped)
        scaler.update()
    return {"norms": norms, "skipped": skipped, "clipped": clipped, "scale": scaler.get_scale()}


def own_norm(group: Any) -> tuple[float, list[float]]:
    """Clip what every rank holds to its own norm."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0, init_scale=8.0)
    optimizer = SGD(None)
    scaler.scale(np.float32(1.0))
    optimizer.grads = [np.array([24.0 * (rank + 1)], np.float32)]
    norm = scaler.unscale_(optimizer, max_norm=1.5, norm_over="rank")
    scaler.step(optimizer)
    return float(np.asarray(norm)), optimizer.grads[0].tolist()


def late_for_the_norm(group: Any, absent_rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Let one rank never ask for the norm."""
    rank, size = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=settings["timeout"], init_scale=8.0)
    optimizer = SGD(None)
    scaler.scale(np.float32(1.0))
    optimizer.grads = [np.array([24.0], np.float32)]
    begin = time.monotonic()
    failures = []
    if rank == absent_rank:
        # The others give up before this rank ends.
        wait_for(settings["folder"], "gave up", size - 1)
        return {"failures": failures, "seconds": 0.0}
    for _ in range(2):
        try:
            scaler.unscale_(optimizer, max_norm=1.0, norm_over="group")
        except gradscale.GradscaleError as error:
            failures.append(Failure.of(error))
    seconds = time.monotonic() - begin
    tell(settings["folder"], "gave up", rank)
    return {"failures": failures, "seconds": seconds}
