"""The three runs on text, and what is recorded of each."""

from __future__ import annotations

import argparse
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
from shared.options import add_options, check_injections, check_options, said_once
from shared.report import change, named, print_table, progress_bar, say, those, write_plot
from shared.text import WINDOWS
from shared.torch_ranks import Ranks

TITLES = ("validation loss", "training loss", "steps taken", "skipped", "zero gradients", "seconds")
NOTE = """Training loss: the mean of the last 10 steps. Characters that a batch does not hold have zero gradients in
float32, too. CPUs may compute float16 in software: the seconds say nothing about accelerators."""


@dataclasses.dataclass
class Run:
    """One of the three runs: its settings, and what came of it."""

    name: str
    method: str
    dtype: torch.dtype
    is_scaled: bool
    history: list[StepReport] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    zeros: list[float] = dataclasses.field(default_factory=list)
    validation_loss: float = math.nan
    seconds: float = math.nan
    is_verified: bool = False

    def steps(self, options: argparse.Namespace, ranks: Ranks) -> Iterator[int]:
        """Yield the numbers of the steps, from 1, with a progress bar."""
        self.injections, self.ranks = options.inject, ranks
        begin = time.perf_counter()
        with progress_bar(self.name, options.steps, 22, ranks.rank) as progress:
            for step in range(1, options.steps + 1):
                yield step
                progress.set_postfix_str(f"loss {self.losses[-1]:.3f}", refresh=False)
                progress.update()
        self.seconds = time.perf_counter() - begin

    def record(self, step: int, loss: float, zeros: tuple[int, int], report: StepReport, new_scale: float) -> None:
        """Record what all ranks have found in a step, and say if it was skipped."""
        outcomes = self.ranks.all_gather_objects((loss, zeros, report.local_nonfinite > 0, report.skipped))
        losses, counts, saw, skipped = zip(*outcomes, strict=True)
        self.losses.append(sum(losses) / self.ranks.size)
        self.zeros.append(sum(zeros for zeros, _ in counts) / sum(total for _, total in counts))
        if any(skipped) and self.ranks.rank == 0:
            source = named(rank for at, rank in self.injections if at == step)
            injected = f" injected on {source}," if source else ""
            seen = f"seen by {named(those(saw))}; {named(those(skipped))} skipped"
            say(f"step {step}: overflow{injected} {seen}; {change(report.scale, new_scale)}")

    def row(self) -> tuple[str, ...]:
        """Return a row of the table."""
        skipped, zeros = sum(report.skipped for report in self.history), sum(self.zeros) / len(self.zeros)
        results = f"{self.validation_loss:.4f}", f"{smooth(self.losses)[-1]:.4f}"
        return (
            self.name,
            *results,
            f"{len(self.losses) - skipped}",
            f"{skipped}",
            f"{zeros:.1%}",
            f"{self.seconds:.1f}",
        )


def held_gradients(model: nn.Module) -> list[Tensor]:
    """Return what this rank holds: its shards, or in DDP all gradients."""
    held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in held]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | ShardedGradScaler) -> str:
    """Return a hash of the weights, gathered from all shards, of the scaler's state and of the optimizer's steps.

    The latter because a rank that skipped alone would gather the same weights as the others.
    """
    weights: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    values = b"".join(weight.cpu().numpy().tobytes() for _, weight in sorted(weights.items()))
    steps = sorted({float(state["step"]) for state in optimizer.state.values()})
    return hashlib.sha256(values + json.dumps([scaler.state_dict(), steps], sort_keys=True).encode()).hexdigest()


def smooth(losses: list[float]) -> list[float]:
    """Return the mean of each loss and the nine before."""
    return [sum(losses[max(0, end - 10) : end]) / min(10, end) for end in range(1, len(losses) + 1)]


def report_runs(runs: Sequence[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Print the table, how far float16 is from float32, and write the plot."""
    print_table(TITLES, [run.row() for run in runs], NOTE)
    for run in runs[1:]:
        gap = max(abs(a - b) for a, b in zip(smooth(run.losses), smooth(runs[0].losses), strict=True))
        print(f"{run.name}: training loss is always within {gap:.4f} of {runs[0].name}")
    steps = range(1, options.steps + 1)
    curves = [(run.name, steps, smooth(run.losses)) for run in runs]
    title = f"Text learnt in float16 with {runs[-1].method} on {ranks}"
    write_plot(options.output, title, [runs[-1].history], curves, "training loss (nats per character)", percent=False)
    print(f"wrote {options.output}")


def parse_options(parser: argparse.ArgumentParser, ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options."""
    methods = parser.add_mutually_exclusive_group()
    for method, module in [("FSDP1", "FullyShardedDataParallel"), ("DDP", "DistributedDataParallel and autocast")]:
        settings: dict[str, Any] = {"dest": "method", "action": "store_const", "const": method, "default": "FSDP2"}
        methods.add_argument(f"--{method.lower()}", help=f"float16 with {module} instead of fully_shard", **settings)
    add_options(parser, steps=200, output="train_fsdp.png", example="60:1")
    with said_once(ranks.rank):
        options = parser.parse_args()
        check_options(parser, options)
        check_injections(parser, options, ranks.size)
        if ranks.size > WINDOWS:
            parser.error(f"there is one window of text for each of {WINDOWS} ranks at most, got {ranks.size} ranks")
    return options
