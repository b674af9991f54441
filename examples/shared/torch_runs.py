"""A run with torch: its settings, what is recorded of its steps, and what must be the same on all ranks."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from gradscale import StepReport
from gradscale_torch import GradScaler, ShardedGradScaler
from shared.report import change, named, progress_bar, say, those
from shared.torch_ranks import Ranks


@dataclasses.dataclass
class Run:
    """One of the runs that are compared: its settings, and what came of it."""

    name: str
    method: str
    dtype: torch.dtype
    is_scaled: bool
    history: list[StepReport] = dataclasses.field(default_factory=list)
    values: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    zeros: list[float] = dataclasses.field(default_factory=list)
    skips: list[Sequence[bool]] = dataclasses.field(default_factory=list)  # of each step, by rank
    seconds: float = math.nan
    is_verified: bool = False

    def steps(self, options: argparse.Namespace, ranks: Ranks) -> Iterator[int]:
        """Yield the numbers of the steps, from 1, with a progress bar that shows what is recorded first."""
        self.injections, self.ranks = options.inject, ranks
        begin = time.perf_counter()
        with progress_bar(self.name, options.steps, 22, ranks.rank) as progress:
            for step in range(1, options.steps + 1):
                yield step
                shown, values = next(iter(self.values.items()))
                progress.set_postfix_str(f"{shown} {values[-1]:.3f}", refresh=False)
                progress.update()
        self.seconds = time.perf_counter() - begin

    def record(
        self, step: int, report: StepReport, new_scale: float, zeros: tuple[int, int] = (0, 1), **values: float
    ) -> None:
        """Record what all ranks have found in a step, values as their means, and say if it was skipped."""
        saw_it = report.local_nonfinite > 0 or report.by == self.ranks.rank
        outcomes = self.ranks.all_gather_objects((values, zeros, saw_it, report.skipped))
        found, counts, saw, skipped = zip(*outcomes, strict=True)
        for name in values:
            self.values[name].append(sum(each[name] for each in found) / self.ranks.size)
        self.zeros.append(sum(zeros for zeros, _ in counts) / sum(total for _, total in counts))
        self.skips.append(skipped)
        if any(skipped) and self.ranks.rank == 0:
            source = named(rank for at, rank in self.injections if at == step)
            injected = f" injected on {source}," if source else ""
            seen = f"seen by {named(those(saw))}; {named(those(skipped))} skipped"
            became = f"; {change(report.scale, new_scale)}" if report.scale != new_scale else ""
            say(f"step {step}: {report.reason}{injected} {seen}{became}")

    def agrees(self, digest: str) -> bool:
        """Return whether all ranks have the same, and skipped the same steps: all those with an injected overflow."""
        is_skipped_by_all = all(all(skipped) == any(skipped) for skipped in self.skips)
        are_injected_skipped = not self.is_scaled or all(all(self.skips[step - 1]) for step, _ in self.injections)
        return len(set(self.ranks.all_gather_objects(digest))) == 1 and is_skipped_by_all and are_injected_skipped

    def counts(self) -> tuple[str, ...]:
        """Return the cells of the table that every run has: steps taken, skipped, zero gradients, seconds."""
        skipped, zeros = sum(report.skipped for report in self.history), sum(self.zeros) / len(self.zeros)
        return f"{len(self.zeros) - skipped}", f"{skipped}", f"{zeros:.1%}", f"{self.seconds:.1f}"


def held_gradients(model: nn.Module) -> list[Tensor]:
    """Return what this rank holds: its shards, or in DDP all gradients."""
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in held]


def count_zeros(gradients: Sequence[Tensor]) -> tuple[int, int]:
    """Return how many of the gradients' elements are zero, and how many there are."""
    return sum(int((part == 0).sum()) for part in gradients), sum(part.numel() for part in gradients)


def full_weights(model: nn.Module) -> dict[str, Any]:
    """Return the weights, gathered from all shards on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def digest(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | ShardedGradScaler, **more: Any
) -> str:
    """Return a hash of the weights, gathered from all shards, of the scaler's state and of the optimizer's steps.

    The latter because a rank that skipped alone would gather the same weights as the others. The losses that spikes are
    compared with are of each rank.
    """
    values = b"".join(weight.cpu().numpy().tobytes() for _, weight in sorted(full_weights(model).items()))
    steps = sorted({float(state["step"]) for state in optimizer.state.values()})
    state = {name: value for name, value in scaler.state_dict().items() if name != "spikes"}
    return hashlib.sha256(values + json.dumps([state, steps, more], sort_keys=True).encode()).hexdigest()


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and the nine before."""
    return [sum(values[max(0, end - 10) : end]) / min(10, end) for end in range(1, len(values) + 1)]
