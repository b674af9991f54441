"""The three runs on the digits, and what is recorded of each; for NumPy and CuPy, on any number of ranks."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gradscale import GradScaler, StepReport
from shared.digits import LAYER_SIZES, Array, forward, load_images
from shared.options import add_options, check_injections, check_options, said_once
from shared.ranks import Ranks
from shared.report import change, named, print_table, progress_bar, say, spread, those, write_plot

BATCH_SIZE = 512
LEARNING_RATE = 0.01
# Short, so that a few hundred steps show the scale grow until float16 overflows; 2000 is usual.
GROWTH_INTERVAL = 25
STEPS_BETWEEN_TESTS = 10
TITLES = ("test accuracy", "training loss", "steps taken", "skipped", "zero gradients", "seconds")
FORMATS = (".1%", ".5f", ".0f", ".0f", ".1%", ".1f")
KINDS = (
    ("fp32", np.float32, False),
    ("fp16, no scaling", np.float16, False),
    ("fp16 with gradscale", np.float16, True),
)


class ShardedAdam:
    """Adam for one shard of the weights. gradscale needs ``grads`` and ``step()``, and honours ``master_dtype``."""

    # The scaler replaces the scaled float16 gradients by unscaled float32 ones.
    master_dtype = np.float32

    def __init__(self, weights: Array) -> None:
        self.weights = weights.copy()
        self.grads: Any = None
        self.mean = self.mean_square = weights - weights
        self.steps = 0

    def step(self) -> None:
        """Update the float32 master weights."""
        self.steps += 1
        gradient = self.grads.astype(np.float32, copy=False)
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.mean_square = 0.999 * self.mean_square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.steps)
        mean_square = self.mean_square / (1 - 0.999**self.steps)
        self.weights -= LEARNING_RATE * mean / (np.sqrt(mean_square) + 1e-8)


@dataclasses.dataclass
class Run:
    """One of the three runs: its settings, and what came of it."""

    name: str
    dtype: type[np.floating[Any]]
    is_scaled: bool = False
    history: list[StepReport] = dataclasses.field(default_factory=list)
    accuracies: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    count: int = 0  # of steps
    loss: float = math.nan
    zeros: Any = 0  # gradients of this rank, and then of all: how many, and then which part of them
    seconds: float = math.nan
    is_verified: bool = False

    def steps(self, options: argparse.Namespace, ranks: Ranks) -> Iterator[int]:
        """Yield the numbers of the steps, from 1, with a progress bar."""
        self.count, self.ranks = options.steps, ranks
        begin = time.perf_counter()
        with progress_bar(self.name, self.count, 19, ranks.rank) as self.progress:
            for step in range(1, self.count + 1):
                yield step
                self.progress.update()
        self.seconds = time.perf_counter() - begin

    def say_skipped(
        self, step: int, outcomes: Sequence[tuple[bool, bool]], old: float, new: float, injections: Any
    ) -> None:
        """Say which ranks saw an overflow, which ranks skipped, and what became of the scale."""
        if self.ranks.rank == 0:
            saw, skipped = zip(*outcomes, strict=True)
            numbers = [f"{rank} (injected)" if (step, rank) in injections else f"{rank}" for rank in those(saw)]
            seen = f"{'rank' if len(numbers) == 1 else 'ranks'} {' '.join(numbers)}"
            say(f"step {step}: overflow seen by {seen}; {named(those(skipped))} skipped; {change(old, new)}")

    def test(self, step: int, weights: Array, images: Array, labels: Array) -> None:
        """Record the accuracy, at some steps and on rank 0."""
        if self.ranks.rank == 0 and (step % STEPS_BETWEEN_TESTS == 0 or step == self.count):
            mean = (forward(weights, images)[-1].argmax(axis=1) == labels).mean()
            accuracy = float(mean.get() if hasattr(mean, "get") else mean)  # CuPy's is on the GPU
            self.accuracies.append((step, accuracy))
            self.progress.set_postfix_str(f"accuracy {accuracy:.1%}", refresh=False)

    def verify(self, weights: bytes, scaler: GradScaler, optimizer: ShardedAdam) -> None:
        """Compare what must be the same on all ranks, and add up what is of each."""
        state = json.dumps([scaler.state_dict(), optimizer.steps], sort_keys=True)
        digest = hashlib.sha256(weights + state.encode()).hexdigest()
        self.is_verified = len(set(self.ranks.all_gather_objects(digest))) == 1
        zeros = self.ranks.all_gather_objects((int(self.zeros), len(optimizer.grads)))
        self.zeros = sum(zero for zero, _ in zeros) / (self.count * sum(size for _, size in zeros))

    @property
    def skipped(self) -> list[int]:
        """The steps that were left out."""
        return [report.iteration for report in self.history if report.skipped]

    def results(self) -> tuple[float, ...]:
        """Return the numbers of the table."""
        skipped = len(self.skipped)
        return self.accuracies[-1][1], self.loss, self.count - skipped, skipped, self.zeros, self.seconds


def parse_options(parser: argparse.ArgumentParser, output: str, ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options: the parser's own, and those that every such program has."""
    add_options(parser, steps=600, output=output, example="120:2", flag="--output")
    text = "seeds, from --seed on; the table has the mean and the range, the plot the first (default: %(default)s)"
    parser.add_argument("--seeds", type=int, default=1, help=text)
    with said_once(ranks.rank):
        options = parser.parse_args()
        if options.seeds < 1:
            parser.error(f"--seeds must be at least 1, got {options.seeds}")
        check_options(parser, options, "--output")
        check_injections(parser, options, ranks.size)
    return options


def write_picture(runs: Sequence[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Write the plot of the runs."""
    title = f"Handwritten digits learnt in float16 on {ranks}"
    curves = [(run.name, [step for step, _ in run.accuracies], [share for _, share in run.accuracies]) for run in runs]
    write_plot(options.output, title, [runs[-1].history], curves, "test accuracy", percent=True)


def compare(train: Callable[..., None], options: argparse.Namespace, ranks: Ranks, note: str) -> int:
    """Make the three runs with each seed, report and verify."""
    runs = []
    for seed in range(options.seed, options.seed + options.seeds):
        options.seed = seed
        if ranks.rank == 0 and options.seeds > 1:
            say(f"seed {seed}:")
        images, labels, *test = ranks.broadcast(load_images(options.seed) if ranks.rank == 0 else None)
        data = images, np.eye(LAYER_SIZES[-1], dtype=np.float32)[labels], *test
        runs += [Run(name, dtype, is_scaled) for name, dtype, is_scaled in KINDS]
        for run in runs[-len(KINDS) :]:
            train(run, options, data, ranks)
    is_verified = all(run.is_verified for run in runs)
    if ranks.rank == 0:
        rows = []
        for kind, (name, _, _) in enumerate(KINDS):
            columns = zip(*(run.results() for run in runs[kind :: len(KINDS)]), strict=True)
            rows.append((name, *(spread(*column) for column in zip(columns, FORMATS, strict=True))))
        print_table(TITLES, rows, note)
        write_picture(runs[: len(KINDS)], options, ranks)
        print(f"wrote {options.output}")
        verdict = "verified: weights and scaler state are bit-identical"
        print(verdict if is_verified else "FAILED: weights or scaler state differ", f"on {ranks}")
    return 0 if is_verified else 1
