"""Whole iterations (scale, step, update) of many small gradients, of each library, against torch's scaler."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Call, Idle, Row, interleaved
from gradscale_numpy import NumpyBackend

__all__ = ["CASES", "plot"]

_COUNTS = (1, 10, 100, 300, 1_000, 10_000)
_SIZE = 10  # elements
# An iteration of many gradients is timed alone, one of few so often that a round takes as long.
_TOGETHER = 300
_SETTINGS: dict[str, Any] = {"init_scale": 1.0, "growth_interval": 1 << 30}
_TARGETS = {
    ("numpy", 1): 1.1,
    ("numpy", 300): 0.8,
    ("numpy with fast", 1): 0.85,
    ("numpy with fast", 300): 0.5,
    ("torch", 1): 1.05,
    ("torch", 300): 0.6,
}


def _iterated(scaler: Any, loss: Any, optimizer: Any, times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

    return run


def _numpy(count: int, times: int, *, fast: bool) -> Callable[[], None]:
    parameters = [SimpleNamespace(grad=np.ones(_SIZE, np.float32)) for _ in range(count)]
    optimizer = Idle(parameters)
    scaler = gradscale.GradScaler(**_SETTINGS, backend=NumpyBackend(fast=fast))
    return _iterated(scaler, np.ones((), np.float32), optimizer, times)


def _torch(kind: Any, count: int, times: int) -> Callable[[], None]:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(_SIZE)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(_SIZE)
    return _iterated(kind("cpu", **_SETTINGS), torch.ones(()), Idle(parameters), times)


def iterations(quick: bool) -> list[Row]:
    """Time an optimizer that does nothing, with more and more gradients of 10 elements."""
    import torch

    import gradscale_torch

    torch.set_num_threads(1)
    rows = []
    for count in _COUNTS:
        times = max(1, _TOGETHER // (10 + count))
        runs = {
            "numpy": _numpy(count, times, fast=False),
            "numpy with fast": _numpy(count, times, fast=True),
            "torch": _torch(gradscale_torch.GradScaler, count, times),
            "peer": _torch(torch.amp.GradScaler, count, times),
        }
        for run in runs.values():
            run()
        rounds = max(11, 20_000 // (10 + count) // times) // (5 if quick else 1)
        medians = interleaved({name: Call(run) for name, run in runs.items()}, rounds)
        for name in ("numpy", "numpy with fast", "torch"):
            case = f"iteration of {count} gradients of {_SIZE} elements, {name} / torch's"
            target = _TARGETS.get((name, count), 1.0)
            rows.append(Row(case, medians[name] / times, medians["peer"] / times, "s", target))
    return rows


def plot(rows: Iterable[Row], path: Path) -> None:
    """Draw how the cost of an iteration grows with the number of gradients: both axes logarithmic.

    Raises
    ------
    ValueError
        When there is no row of an iteration.
    """
    from matplotlib.figure import Figure

    points: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for row in rows:
        found = re.fullmatch(rf"iteration of (\d+) gradients of {_SIZE} elements, (.+) / torch's", row.case)
        if found is not None:
            points[f"gradscale, {found[2]}"][int(found[1])] = row.ours
            points["torch.amp.GradScaler"][int(found[1])] = row.other
    if not points:
        msg = "there are no times of iterations to be drawn: run the case 'iterations'"
        raise ValueError(msg)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, times in points.items():
        style = "k--o" if name.startswith("torch") else "-o"
        axes.loglog(times.keys(), [1e6 * seconds for seconds in times.values()], style, label=name, markersize=4)
    axes.set(xlabel=f"gradients of {_SIZE} elements", ylabel="microseconds for one iteration")
    axes.grid(which="major", alpha=0.4)
    axes.legend()
    figure.savefig(path, dpi=120)


CASES = {"iterations": iterations}
"""By name, what measures some rows of the table; called with whether to be quick."""
