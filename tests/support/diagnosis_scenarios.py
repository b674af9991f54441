"""What the ranks do in the tests of gathered diagnoses: functions of a group, run in every world."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scenarios import SGD, begun, gradients, loss, rank_and_size
from worlds import Failure

import gradscale


def bad_on(group: Any, bad_rank: int, library: str, when: str) -> dict[str, Any]:
    """Gather a diagnosis before or after a step in which one rank holds a NaN."""
    rank, scaler, optimizer = begun(group)
    optimizer.grads = gradients(library)
    if rank == bad_rank:
        optimizer.grads[1] = optimizer.grads[1] * math.nan
    scaler.scale(loss(library))
    if when != "before":
        scaler.step(optimizer)
    if when == "after update":
        scaler.update()
    report = scaler.diagnose(optimizer, ["a", "b", "c"], gather=True)
    if when == "before":
        scaler.step(optimizer)
    return {
        "report": report.to_dict(),
        "text": str(report),
        "skipped": scaler.last_step(optimizer).skipped,
        "local": len(scaler.diagnose(optimizer).entries),
    }


def on_overflow(group: Any, bad_rank: int, bad_loss: bool) -> Any:
    """Let the scaler gather by itself when a step is skipped."""
    rank, scaler, optimizer = begun(group, diagnose="on_overflow")
    optimizer.grads = gradients("numpy", np.inf if rank == bad_rank else 1.0)
    scaler.scale(np.float32(np.nan if bad_loss and rank == bad_rank else 1.0))
    scaler.step(optimizer)
    report = scaler.last_step(optimizer).overflow
    return None if report is None else report.to_dict()


def nothing_on(group: Any, empty_rank: int) -> dict[str, Any]:
    """Gather where one rank has seen no array at all."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0, backend="numpy")
    if rank != empty_rank:
        scaler.scale(np.float32(1.0))
    return scaler.diagnose(SGD([] if rank == empty_rank else gradients("numpy")), gather=True).to_dict()


def many(group: Any, count: int) -> dict[str, Any]:
    """Gather more parameters than a report lists."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0)
    scaler.scale(np.float32(1.0))
    grads = [np.full(2, np.inf if rank == 0 and k < 5 else 1.0, np.float32) for k in range(count)]
    report = scaler.diagnose(SGD(grads), gather=True)
    worst = [(entry.rank, entry.index) for entry in report.nonfinite]
    return {
        "entries": len(report.entries),
        "omitted": (report.omitted_nonfinite, report.omitted_finite),
        "worst": sorted(worst),
        "head": str(report).splitlines()[0],
    }


def refused_on(group: Any, bad_rank: int, kind: str) -> Failure:
    """Give one rank too few names, an iterator of names that fails, or a gradient that is none; then gather again."""
    rank, _ = rank_and_size(group)
    scaler = gradscale.ShardedGradScaler(group=group, timeout=20.0, backend="numpy")
    scaler.scale(np.float32(1.0))
    optimizer = SGD(gradients("numpy"))
    names: Any = None if kind == "gradient" else ["a", "b", "c"]
    if rank == bad_rank and kind == "gradient":
        optimizer.grads = [np.array(["text"])]
    elif rank == bad_rank:
        names = {"too few": ["a"], "failing": (missing["name"] for missing in [{}])}[kind]
    try:
        scaler.diagnose(optimizer, names, gather=True)
    except (gradscale.GradscaleError, KeyError) as error:
        optimizer.grads = gradients("numpy")
        scaler.diagnose(optimizer, gather=True)
        scaler.step(optimizer)
        return Failure.of(error)
    msg = "what fails was taken"
    raise RuntimeError(msg)


def scaled_on(group: Any, scaling_rank: int) -> list[dict[str, Any]]:
    """Call ``scale`` on one rank alone, as a pipeline does; what is gathered in the second iteration and after it."""
    rank, scaler, optimizer = begun(group)
    reports = []
    for value in (np.inf, 1.0):
        if rank == scaling_rank:
            scaler.scale(np.float32(1.0))
        optimizer.grads = gradients("numpy", value)
        reports.append(scaler.diagnose(optimizer, gather=True).to_dict())
        scaler.step(optimizer)
        scaler.update()
    return [*reports, scaler.diagnose(optimizer, gather=True).to_dict()]


def unusual_on(group: Any, bad_rank: int, kind: str) -> Any:
    """Gather with torch's replacement where one rank has a parameter that is no tensor, or an expanded gradient."""
    import torch

    import gradscale_torch

    rank, _ = rank_and_size(group)
    scaler = gradscale_torch.GradScaler("cpu", group=group, init_scale=4.0)
    scaler.scale(torch.ones(()))
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 4.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if rank == bad_rank and kind == "no tensor":
        optimizer.param_groups[0]["params"].append("text")
    elif rank == bad_rank:
        weight.grad = torch.tensor([4.0]).expand(2)
    try:
        return scaler.diagnose(optimizer, gather=True).to_dict()
    except gradscale.GradscaleError as error:
        return Failure.of(error)
