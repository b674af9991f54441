"""Whole iterations (scale, step, update) of many small gradients: against torch's scaler, and what skip= adds."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Call, Idle, Row, interleaved
from gradscale_numpy import NumpyBackend

_COUNTS = (1, 10, 100, 300, 1_000, 10_000)
_SIZE = 10  # elements
# An iteration of many gradients is timed alone, one of few so often that a round takes as long.
_TOGETHER = 300
# At a scale of 1 nothing would be multiplied, and at a larger one gradients would shrink from round to round.
_SETTINGS: dict[str, Any] = {"init_scale": 1.0 + 2.0**-23, "growth_interval": 1 << 30}
_TARGETS = {
    ("numpy", 1): 1.1,
    ("numpy", 300): 0.8,
    ("numpy with fast", 1): 1.15,
    ("numpy with fast", 300): 0.75,
    ("torch", 1): 1.05,
    ("torch", 300): 0.6,
}


def _iterated(scaler, loss, optimizer, times: int) -> Callable[[], None]:
    def run():
        for _ in range(times):
            scaler.scale(loss)
            scaler.step(optimizer)
            scaler.update()

    return run


def _numpy(count: int, times: int, *, fast: bool) -> Callable[[], None]:
    optimizer = Idle(np.ones(_SIZE, np.float32) for _ in range(count))
    scaler = gradscale.GradScaler(**_SETTINGS, backend=NumpyBackend(fast=fast))
    return _iterated(scaler, np.ones((), np.float32), optimizer, times)


def _torch(kind, count: int, times: int) -> Callable[[], None]:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(_SIZE)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(_SIZE)
    return _iterated(kind("cpu", **_SETTINGS), torch.ones(()), Idle(parameters=parameters), times)


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


def _judged(size: int, *, skips: bool, clips: bool) -> Callable[[], None]:
    """Return iterations of 300 gradients, each with a loss of its own."""
    optimizer = Idle(np.ones(size, np.float32) for _ in range(_TOGETHER))
    skip = gradscale.SkipSpikes() if skips else None
    scaler = gradscale.GradScaler(**_SETTINGS, backend=NumpyBackend(fast=False), skip=skip)
    losses = itertools.cycle([np.asarray(x, np.float32) for x in np.random.default_rng(0).normal(2.0, 0.1, 1_000)])

    def run():
        scaler.scale(next(losses))
        if clips:
            scaler.unscale_(optimizer, max_norm=1e9)
        scaler.step(optimizer)
        scaler.update()

    return run


def spikes(quick: bool) -> list[Row]:
    """Time what judging losses and norms adds to an iteration with NumPy, when the windows are full."""
    rows = []
    for size in (_SIZE, 1_000):
        for clips, judged in ((False, "losses"), (True, "losses and norms")):
            runs = {name: _judged(size, skips=name == "skip", clips=clips) for name in ("skip", "peer")}
            for run in runs.values():
                for _ in range(150):
                    run()
            medians = interleaved({name: Call(run) for name, run in runs.items()}, 100 if quick else 1_000)
            case = f"iteration of 300 gradients of {size} elements, skip= with {judged} / without skip="
            rows.append(Row(case, medians["skip"], medians["peer"], "s", 1.25))
    return rows


CASES = {"iterations": iterations, "spikes": spikes}
