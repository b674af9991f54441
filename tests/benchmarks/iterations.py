"""Whole iterations (scale, step, update) of many small gradients: against torch's scaler, and what skip= adds."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Idle, Row, compared
from gradscale_numpy import NumpyBackend

_COUNTS = (1, 10, 100, 300, 1_000, 10_000)
_SIZE = 10  # elements
# An iteration of many gradients is timed alone, one of few so often that a round takes as long.
_TOGETHER = 300
# At a scale of 1 nothing would be multiplied, and at a larger one gradients would shrink from round to round.
_SETTINGS: dict[str, Any] = {"init_scale": 1.0 + 2.0**-23, "growth_interval": 1 << 30}
_TARGETS = {"numpy": {1: 1.1, 300: 0.8}, "numpy with fast": {1: 1.15, 300: 0.75}, "torch": {1: 1.05, 300: 0.6}}


def _iterated(scaler, losses, optimizer, times: int, clips: bool = False) -> Callable[[], None]:
    """Return iterations, which were made once."""

    def run():
        for _ in range(times):
            scaler.scale(next(losses))
            if clips:
                scaler.unscale_(optimizer, max_norm=1e9)
            scaler.step(optimizer)
            scaler.update()

    run()
    return run


def _of_numpy(count: int, size: int = _SIZE) -> Idle:
    return Idle(np.ones(size, np.float32) for _ in range(count))


def iterations(quick: bool) -> list[Row]:
    """Time an optimizer that does nothing, with more and more gradients of 10 elements."""
    import torch

    from benchmarks.torch_scalers import idle
    from gradscale_torch import GradScaler

    rows = []
    for count in _COUNTS:
        times, calls = max(1, _TOGETHER // (10 + count)), {}
        for name, fast in (("numpy", False), ("numpy with fast", True)):
            scaler = gradscale.GradScaler(**_SETTINGS, backend=NumpyBackend(fast=fast))
            calls[name] = _iterated(scaler, itertools.repeat(np.ones((), np.float32)), _of_numpy(count), times)
        for name, kind in (("torch", GradScaler), ("peer", torch.amp.GradScaler)):
            losses = itertools.repeat(torch.ones(()))
            calls[name] = _iterated(kind("cpu", **_SETTINGS), losses, idle((count, _SIZE)), times)
        rounds = max(11, 20_000 // (10 + count) // times) // (5 if quick else 1)
        case = f"iteration of {count} gradients of {_SIZE} elements, {{}} / torch's"
        targets = {name: known.get(count, 1.0) for name, known in _TARGETS.items()}
        made = compared(case, calls, rounds, targets)
        rows += [Row(row.case, row.ours / times, row.other / times, row.target) for row in made]
    return rows


def spikes(quick: bool) -> list[Row]:
    """Time what judging losses and norms adds to an iteration with NumPy, when the windows are full."""
    rows = []
    for size, (clips, judged) in itertools.product((_SIZE, 1_000), ((False, "losses"), (True, "losses and norms"))):
        calls = {}
        for name, skip in (("skip=", gradscale.SkipSpikes()), ("peer", None)):
            scaler = gradscale.GradScaler(**_SETTINGS, backend=NumpyBackend(fast=False), skip=skip)
            losses = [np.asarray(x, np.float32) for x in np.random.default_rng(0).normal(2.0, 0.1, 1_000)]
            calls[name] = _iterated(scaler, itertools.cycle(losses), _of_numpy(_TOGETHER, size), 1, clips)
            for _ in range(150):
                calls[name]()
        case = f"iteration of 300 gradients of {size} elements, {{}} with {judged} / without skip="
        rows += compared(case, calls, 100 if quick else 1_000, 1.25)
    return rows
