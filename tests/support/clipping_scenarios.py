"""What the ranks do in the tests of clipping by the norm of all ranks' parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from scenarios import begun

__all__ = ["PARTS", "clip_parts"]

# What the ranks hold: the last of three has no gradient at all.
PARTS = ([3.0, -4.0, 0.5], [12.0], [])


def clip_parts(group: Any, bad_rank: int, value: float) -> dict[str, Any]:
    """Make three iterations, the second with a bad value on one rank, clipped to the norm of all ranks' parts."""
    rank, scaler, optimizer = begun(group, init_scale=8.0, backend="numpy")
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
