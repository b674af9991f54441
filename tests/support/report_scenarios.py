"""What the ranks do in the tests of reports over a group: functions of a group that return plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scenarios import SGD, gradients, rank_and_size

import gradscale
from gradscale import StepReport, UpdateReport

__all__ = ["callbacks_on", "callbacks_without_a_group"]


class EveryRank:
    """Collects reports on every rank."""

    every_rank = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, report: Any) -> None:
        """Keep a report."""
        self.seen.append(report)


def callbacks_on(group: Any, bad_rank: int, grouped: str) -> dict[str, Any]:
    """Return what the callbacks of this rank were told in a clean iteration and one with an overflow on one rank."""
    skips: list[StepReport] = []
    updates: list[UpdateReport] = []
    every_skip, every_update = EveryRank(), EveryRank()
    groups = {"one": group, "list": [group], "grid": [group, _Alone()]}
    scaler = gradscale.ShardedGradScaler(
        group=groups[grouped], on_skip=[skips.append, every_skip], on_update=[updates.append, every_update]
    )
    rank, _ = rank_and_size(group)
    optimizer = SGD(None)
    for value in (1.0, math.inf):
        scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy", value if rank == bad_rank else 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {
        "skips": [report.iteration for report in skips],
        "updates": [(report.iteration, report.skipped) for report in updates],
        "every skip": [(report.iteration, report.nonfinite, report.local_nonfinite) for report in every_skip.seen],
        "every update": [(report.iteration, report.skipped, report.rank) for report in every_update.seen],
        "history": [(report.skipped, report.scale) for report in scaler.history],
    }


class _Alone:
    """A group of one rank."""

    rank, size = 0, 1

    def start_max(self, x: Any, /) -> Any:
        """Agree with oneself."""
        return lambda: x


def callbacks_without_a_group(group: Any, fused: bool) -> dict[str, Any]:
    """Return what each rank of a replicated run (DDP) is told by torch's replacement, which decides alone."""
    import torch

    import gradscale_torch

    rank, _ = rank_and_size(group)
    updates: list[UpdateReport] = []
    every = EveryRank()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
    scaler = gradscale_torch.GradScaler("cpu", on_update=[updates.append, every])
    for value in (1.0, math.inf):
        weight.grad = scaler.scale(torch.tensor(value)) * torch.ones(2)
        scaler.step(optimizer)
        scaler.update()
    assert [report.rank for report in every.seen] == [rank, rank]
    return {"first": len(updates), "every": [report.skipped for report in every.seen]}
