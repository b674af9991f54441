"""What the tests of training frameworks share: a small run in float16, its bits, and torch's own scaler beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, TorchScaler, torch

# Scales after each of ten steps from 1024, growing after three clean ones, of which the third and the sixth overflow.
STEPS = 10
OVERFLOWS = (3, 6)
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0]
TRACKERS = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
SKIPS = [step in OVERFLOWS for step in range(1, STEPS + 1)]
STEPPED = [not skipped for skipped in SKIPS]
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}
KINDS = {"torch": TorchScaler, "gradscale": GradScaler}
BOTH = list(KINDS)

Make = Callable[[], Any]
Row = dict[str, Any]
Run = Callable[[Make], list[Row]]


def maker(name: str) -> Make:
    """Return what makes a scaler of torch or of gradscale for the CPU."""
    return lambda: KINDS[name]("cpu", **SETTINGS)


def network(seed: int = 0) -> Any:
    """Return a small network, with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(count: int = STEPS) -> list[Any]:
    """Return ``count`` inputs of the network, of shape ``(4, 8)``."""
    return list(torch.randn((count, 4, 8), generator=torch.Generator().manual_seed(1)))


def loss_of(model: Any, batch: Any) -> Any:
    """Return the loss of a batch."""
    return model(batch).square().mean()


class Loader:
    """Batches, as Lightning takes them; a list would be several loaders."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def trainer_with(precision: Any, **options: Any) -> Any:
    """Return Lightning's Trainer for the CPU, which writes nothing."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"max_epochs": 1, "enable_model_summary": False, **silent, **options}
    return require("lightning").pytorch.Trainer(accelerator="cpu", devices=1, plugins=precision, **given)


def fabric_with(precision: Any) -> Any:
    """Return Lightning's Fabric for the CPU."""
    return require("lightning").fabric.Fabric(accelerator="cpu", devices=1, plugins=precision)


def optimizer_named(name: str, model: Any) -> Any:
    """Return an optimizer by its name, such as ``AdamW-fused``."""
    kind, _, variant = name.partition("-")
    options = {variant: True} if variant else {}
    return getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)


def overflow(model: Any) -> None:
    """Put an inf into one gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def bits(*models: Any) -> str:
    """Return every bit of the weights."""
    return "".join(parameter.detach().numpy().tobytes().hex() for model in models for parameter in model.parameters())


def row(scaler: Any, *models: Any, **more: Any) -> Row:
    """Return what is known after a step."""
    return {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "weights": bits(*models), **more}


def column(rows: list[Row], name: str) -> list[Any]:
    """Return one column."""
    return [row[name] for row in rows]


def same_as_torch(run: Run, make: Make, skips: Sequence[bool] = SKIPS) -> list[Row]:
    """Return the rows of a run, which must be those of the same run with torch's scaler; ours reports the skips."""
    scalers = []

    def made() -> Any:
        scalers.append(make())
        return scalers[-1]

    rows = run(made)
    assert rows
    assert rows == run(maker("torch"))
    if hasattr(scalers[0], "history"):
        assert [report.skipped for report in scalers[0].history] == list(skips)
    return rows


def check_run(rows: list[Row], first: str | None = None) -> None:
    """Check the scales and the trackers, and that the weights, the first of which are given, stay where one skips."""
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    check_weights_move([bits(network()) if first is None else first, *column(rows, "weights")], STEPPED)


def warns_of_older_gradients(make: Make) -> AbstractContextManager[object]:
    """Expect the warning of gradients that are older than the last update, which torch's scaler does not give."""
    is_torchs = not hasattr(make(), "last_step")
    return nullcontext() if is_torchs else pytest.warns(UserWarning, match="step each optimizer before update")


def check_weights_move(weights: list[str], moves: list[bool]) -> None:
    """Check that the weights, of which the first are the initial ones, move in these steps and stay in all others."""
    assert [old != new for old, new in itertools.pairwise(weights)] == moves
