"""What fp16_rl.py is asked, and what it tells of its three runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.options import add_options, check_injections, check_options, said_once
from shared.policy import PROMPTS
from shared.report import draw_runs, print_table
from shared.torch_ranks import Ranks
from shared.torch_runs import Run, smooth

TITLES = ("vowels", "mismatch", "steps taken", "skipped", "zero gradients", "seconds")
NOTE = """Vowels: the reward, the mean of the last 10 steps. Mismatch: the mean of all steps. CPUs may compute half
precision in software: the seconds say nothing about accelerators."""
# Of which the distribution is drawn: powers of ten, and bins in each.
DECADES, BINS = (-7, 0), 10


def parse_options(parser: argparse.ArgumentParser, ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options."""
    add_options(parser, steps=200, output="fp16_rl.png", example="60:1")
    text = "batches of which this one is counted as one, each with its share of the loss (default: %(default)s)"
    parser.add_argument("--accumulate", type=int, default=1, help=text)
    text = "steps in which the language model learns the text first, in float32 (default: %(default)s)"
    parser.add_argument("--text-steps", type=int, default=600, help=text)
    with said_once(ranks.rank):
        options = parser.parse_args()
        check_options(parser, options)
        check_injections(parser, options, ranks.size)
        if options.accumulate < 1 or options.text_steps < 0:
            found = f"{options.accumulate} and {options.text_steps}"
            parser.error(f"--accumulate must be at least 1 and --text-steps at least 0, got {found}")
        if ranks.size > PROMPTS:
            parser.error(f"there is one prompt for each of {PROMPTS} ranks at most, got {ranks.size} ranks")
    return options


def describe(differences: Tensor) -> str:
    """Return the numbers of a distribution of |log p(train) - log p(inference)|."""
    middle, high = differences.quantile(torch.tensor([0.5, 0.99])).tolist()
    mean, largest = differences.mean(), differences.max()
    return f"median {middle:.1e}, mean {mean:.1e}, 99 % below {high:.1e}, largest {largest:.1e}"


def report_runs(runs: Sequence[Run], differences: dict[str, Tensor], options: argparse.Namespace, ranks: Ranks) -> None:
    """Print the table, and write the picture."""
    rewards = [smooth(run.values["reward"]) for run in runs]
    rows = [
        (run.name, f"{reward[-1]:.1%}", f"{sum(run.values['mismatch']) / options.steps:.1e}", *run.counts())
        for run, reward in zip(runs, rewards, strict=True)
    ]
    print_table(TITLES, rows, NOTE)
    write_picture(runs, differences, options, ranks)
    print(f"wrote {options.output}")


def write_picture(
    runs: Sequence[Run], differences: dict[str, Tensor], options: argparse.Namespace, ranks: Ranks
) -> None:
    """Write the two distributions above, the scale, and the rewards below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    figure = Figure(figsize=(9, 11), layout="constrained")
    top, middle, bottom = figure.subplots(3)
    figure.suptitle(f"Reinforcement learning in half precision with FSDP2 on {ranks}")
    edges = torch.logspace(*DECADES, (DECADES[1] - DECADES[0]) * BINS + 1)
    for name, found in differences.items():
        label = f"{name}: median {found.median():.1e}, mean {found.mean():.1e}"
        shares = torch.full_like(found, 1 / len(found))
        # The axis has no place for what is smaller, or 0.
        drawn = found.clamp(min=float(edges[0]))
        top.hist(drawn, edges, weights=shares, histtype="stepfilled", alpha=0.5, label=label)
    top.set(xscale="log", xlabel="|log p(train) - log p(inference)|, before the first step")
    top.set_ylabel("share of characters")
    top.yaxis.set_major_locator(MultipleLocator(0.01))
    top.yaxis.set_major_formatter("{x:.0%}")
    top.spines[["top", "right"]].set_visible(False)
    top.legend(loc="upper left", frameon=False)
    bottom.sharex(middle)
    steps = range(1, options.steps + 1)
    curves = [(run.name, steps, smooth(run.values["reward"])) for run in runs]
    draw_runs(middle, bottom, [runs[-1].history], curves, "vowels, the reward", percent=True)
    bottom.legend(loc="lower right", frameon=False)
    figure.savefig(options.output, dpi=120)
