"""What the tests of training frameworks share: a small run in float16, its bits, and torch's own scaler beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from axes import require
from axes_torch import GradScaler, TorchScaler, torch

# Scales after each of ten steps from 1024, growing after three clean ones, of which the third and the sixth overflow.
STEPS = 10
OVERFLOWS = (3, 6)
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 256.0, 256.0, 256.0, 512.0, 512.0]
TRACKERS = [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
SKIPS = [step in OVERFLOWS for step in range(1, STEPS + 1)]
SETTINGS = {"init_scale": 1024.0, "growth_interval": 3}

Make = Callable[[], Any]
Row = dict[str, Any]


def torchs():
    """Return torch's scaler for the CPU."""
    return TorchScaler("cpu", **SETTINGS)


def ours():
    """Return ours."""
    return GradScaler("cpu", **SETTINGS)


def network(seed: int = 0):
    """Return a small network, with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(count: int = STEPS):
    """Return ``count`` inputs of the network, of shape ``(4, 8)``."""
    return list(torch.randn((count, 4, 8), generator=torch.Generator().manual_seed(1)))


def loss_of(model, batch):
    """Return the loss of a batch."""
    return model(batch).square().mean()


class Loader:
    """Batches, as Lightning takes them; a list would be several loaders."""

    def __init__(self, batches: Sequence[Any]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def trainer_with(precision, **options):
    """Return Lightning's Trainer for the CPU, which writes nothing."""
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"max_epochs": 1, **dict.fromkeys(silent, False), **options}
    return require("lightning").pytorch.Trainer(accelerator="cpu", devices=1, plugins=precision, **given)


def overflow(model):
    """Put an inf into one gradient."""
    next(model.parameters()).grad.view(-1)[0] = math.inf


def bits(*models) -> str:
    """Return every bit of the weights."""
    return "".join(parameter.detach().numpy().tobytes().hex() for model in models for parameter in model.parameters())


def row(scaler, *models, **more) -> Row:
    """Return what is known after a step."""
    return {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker(), "weights": bits(*models), **more}


def column(rows: list[Row], name: str):
    """Return one column."""
    return [row[name] for row in rows]


def same_as_torchs(run: Callable[[Make], list[Row]]) -> list[Row]:
    """Return the rows of a run with our scaler, which must be those of the same run with torch's."""
    rows = run(ours)
    assert rows
    assert rows == run(torchs)
    return rows


def check_run(rows: list[Row]):
    """Check the scales, the trackers, and that the weights stay exactly where a step is skipped."""
    assert column(rows, "scale") == SCALES
    assert column(rows, "tracker") == TRACKERS
    weights = [bits(network()), *column(rows, "weights")]
    assert [old == new for old, new in itertools.pairwise(weights)] == SKIPS
