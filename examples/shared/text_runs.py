"""What train_fsdp.py is asked, and what it tells of its three runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from shared.options import add_options, check_injections, check_options, said_once
from shared.report import print_table, write_plot
from shared.text import WINDOWS
from shared.torch_ranks import Ranks
from shared.torch_runs import Run, smooth

TITLES = ("validation loss", "training loss", "steps taken", "skipped", "zero gradients", "seconds")
NOTE = """Training loss: the mean of the last 10 steps. Characters that a batch does not hold have zero gradients in
float32, too. CPUs may compute float16 in software: the seconds say nothing about accelerators."""


def report_runs(runs: Sequence[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Print the table, how far float16 is from float32, and write the plot."""
    losses = [smooth(run.values["loss"]) for run in runs]
    print_table(
        TITLES,
        [
            (run.name, f"{run.values['validation loss'][-1]:.4f}", f"{loss[-1]:.4f}", *run.counts())
            for run, loss in zip(runs, losses, strict=True)
        ],
        NOTE,
    )
    for run, loss in zip(runs[1:], losses[1:], strict=True):
        gap = max(abs(a - b) for a, b in zip(loss, losses[0], strict=True))
        print(f"{run.name}: training loss is always within {gap:.4f} of {runs[0].name}")
    steps = range(1, options.steps + 1)
    curves = [(run.name, steps, loss) for run, loss in zip(runs, losses, strict=True)]
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
