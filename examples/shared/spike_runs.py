"""What spikes.py is asked, and what it tells of its four runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shared.options import add_options, check_options, said_once
from shared.report import print_table
from shared.torch_ranks import Ranks
from shared.torch_runs import Run, smooth

WINDOWS = 8  # of text, in the batch of all ranks
TITLES = ("validation loss", "beside the first", "steps taken", "skipped", "seconds")
NOTE = "CPUs may compute bfloat16 in software: the seconds say nothing about accelerators."
# By method: a colour, a width and a style. The first lies under the last.
STYLES = {
    "clean": ("#B9BEC6", 6.0, "-"),
    "bad": ("#D1495B", 1.8, "-"),
    "clip": ("#30638E", 1.2, ":"),
    "skip": ("#1B7F5C", 1.8, "-"),
}


def parse_options(parser: argparse.ArgumentParser, ranks: Ranks) -> argparse.Namespace:
    """Return the command line's options, and in which steps the last rank is wrong."""
    add_options(parser, steps=600, output="spikes.png")
    text = "steps from one bad batch to the next (default: %(default)s)"
    parser.add_argument("--every", type=int, default=200, help=text)
    with said_once(ranks.rank):
        options = parser.parse_args()
        check_options(parser, options)
        if options.every < 1:
            parser.error(f"--every must be at least 1, got {options.every}")
        if ranks.size > WINDOWS:
            parser.error(f"there is one window of text for each of {WINDOWS} ranks at most, got {ranks.size} ranks")
    # None in the last step, after which nothing could recover.
    options.inject = [(step, ranks.size - 1) for step in range(options.every, options.steps, options.every)]
    return options


def report_runs(runs: Sequence[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Print the table, and write the picture."""
    losses = [run.values["validation loss"][-1] for run in runs]
    rows = []
    for run, loss in zip(runs, losses, strict=True):
        taken, skipped, _, seconds = run.counts()
        rows.append((run.name, f"{loss:.4f}", f"{loss / losses[0] - 1:+.1%}", taken, skipped, seconds))
    print_table(TITLES, rows, NOTE)
    write_picture(runs, options, ranks)
    print(f"wrote {options.output}")


def write_picture(runs: Sequence[Run], options: argparse.Namespace, ranks: Ranks) -> None:
    """Write the training losses, with a line at each bad batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(f"A small language model in bfloat16 on {ranks}, one of which has bad batches")
    ax = figure.subplots()
    for number, (step, rank) in enumerate(options.inject):
        ax.axvline(step, color="#8A8F98", linewidth=1, linestyle="--")
        text = f" bad batch\n on rank {rank}" if number == 0 else " bad batch"
        ax.text(step, 0.99, text, color="#5A5F68", va="top", transform=ax.get_xaxis_transform())
    losses = [smooth(run.values["loss"]) for run in runs]
    for run, loss in zip(runs, losses, strict=True):
        colour, width, style = STYLES[run.method]
        label = f"{run.name}: {run.values['validation loss'][-1]:.2f}"
        ax.plot(range(1, len(loss) + 1), loss, style, color=colour, linewidth=width, label=label)
    # Without the fall of the first steps.
    later = [value for loss in losses for value in loss[min(options.steps - 1, options.every // 2) :]]
    ax.set(xlabel="step", ylabel="training loss (nats per character)", ylim=(min(later) - 0.2, max(later) + 0.2))
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower left", frameon=False, title="run: validation loss at its end", alignment="left")
    figure.savefig(options.output, dpi=120)
