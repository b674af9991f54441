"""What the tests of training frameworks share: a small run in float16, its bits, and torch's own scaler beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from axes import require

# Scales after each of ten steps from 1024, growing after three clean ones, of which the third and the sixth overflow.
STEPS = 10
OVERFLOWS = (3, 6)
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0]
TRACKERS = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
SKIPS = [step in OVERFLOWS for step in range(1, STEPS + 1)]
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}

Make = Callable[[], Any]
Row = dict[str, Any]


def maker(name: str) -> Make:
    """Return what makes a scaler of torch or of gradscale for the CPU."""
    torch = require("torch")
    if name == "torch":
        return lambda: torch.amp.GradScaler("cpu", **SETTINGS)
    from gradscale_torch import GradScaler

    return lambda: GradScaler("cpu", **SETTINGS)


def network(seed: int = 0) -> Any:
    """Return a small network, with the same weights for the same seed."""
    torch = require("torch")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(count: int = STEPS) -> list[Any]:
    """Return ``count`` inputs of the network, of shape ``(4, 8)``."""
    torch = require("torch")
    return list(torch.randn((count, 4, 8), generator=torch.Generator().manual_seed(1)))


def optimizer_named(name: str, model: Any) -> Any:
    """Return an optimizer by its name, such as ``AdamW-fused``."""
    kind, _, variant = name.partition("-")
    options = {variant: True} if variant else {}
    return getattr(require("torch").optim, kind)(model.parameters(), lr=0.1, **options)


def overflow(model: Any) -> None:
    """Put an inf into one gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def bits(*models: Any) -> str:
    """Return every bit of the weights."""
    return "".join(parameter.detach().numpy().tobytes().hex() for model in models for parameter in model.parameters())


def column(rows: list[Row], name: str) -> list[Any]:
    """Return one column."""
    return [row[name] for row in rows]


def same_as_torch(run: Callable[[Make], list[Row]], make: Make) -> list[Row]:
    """Return the rows of a run, which must be those of the same run with torch's scaler."""
    rows = run(make)
    assert rows
    assert rows == run(maker("torch"))
    return rows


def warns_of_older_gradients(make: Make) -> AbstractContextManager[object]:
    """Expect the warning of gradients that are older than the last update, which torch's scaler does not give."""
    is_torchs = not hasattr(make(), "last_step")
    return nullcontext() if is_torchs else pytest.warns(UserWarning, match="step each optimizer before update")


def check_weights_move(weights: list[str], moves: list[bool]) -> None:
    """Check that the weights, of which the first are the initial ones, move in these steps and stay in all others."""
    assert [old != new for old, new in itertools.pairwise(weights)] == moves
