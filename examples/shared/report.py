"""What is shown of the runs: a progress bar, the skipped steps, a table and a plot."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import compress, count
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from gradscale import StepReport, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = tuple[str, Sequence[float], Sequence[float]]  # label, x, y


def progress_bar(name: str, steps: int, width: int, rank: int = 0) -> tqdm[None]:
    """Return a progress bar, which is shown by rank 0, and on a terminal alone."""
    hidden = rank != 0 or not sys.stdout.isatty()
    return tqdm(total=steps, desc=f"{name:{width}}", file=sys.stdout, ncols=100, disable=hidden)


def named(numbers: Iterable[int], what: str = "rank") -> str:
    """Return "rank 2", "ranks 0 1", or nothing."""
    texts = [str(number) for number in numbers]
    return f"{what if len(texts) == 1 else f'{what}s'} {' '.join(texts)}" if texts else ""


def those(flags: Iterable[object]) -> Iterable[int]:
    """Return the ranks whose flag is true."""
    return compress(count(), flags)


def change(old: float, new: float) -> str:
    """Return what became of the scale, in powers of two."""
    return f"scale 2^{math.log2(old):g} -> 2^{math.log2(new):g}"


def say(line: str) -> None:
    """Print a line beside a progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of some numbers, and their range if they differ."""
    mean, low, high = (format(value, form) for value in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    """Print what came of the runs: a name and numbers in each row."""
    first, *widths = (max(map(len, column)) for column in zip(("", *titles), *rows, strict=True))
    print()
    for name, *cells in (("", *titles), *rows):
        print(f"{name:{first}}  {'  '.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=True))}")
    print(f"({note})\n")


def write_plot(
    path: Path,
    title: str,
    histories: Sequence[Sequence[StepReport]],
    curves: Sequence[Curve],
    label: str,
    percent: bool,
) -> None:
    """Write the scale of runs with gradscale above, and what each run has learnt below; a share, or a loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    figure.suptitle(title)
    top, bottom = figure.subplots(2, sharex=True)
    draw_runs(top, bottom, histories, curves, label, percent)
    figure.savefig(path, dpi=120)


def draw_runs(
    top: Axes,
    bottom: Axes,
    histories: Sequence[Sequence[StepReport]],
    curves: Sequence[Curve],
    label: str,
    percent: bool,
) -> None:
    """Draw the scale of runs with gradscale, and what each run has learnt; a share, or a loss."""
    for history in histories:
        plot.history(history, ax=top)
    top.set_xlabel("")
    for (name, x, y), style in zip(curves, ["-", "-", "--", ":"], strict=False):
        bottom.plot(x, y, style, label=name)
    bottom.set(xlabel="step", ylabel=label)
    bottom.grid(color="#E4E4E4", linewidth=0.8)
    bottom.spines[["top", "right"]].set_visible(False)
    if percent:
        bottom.set_ylim(0, 1)
        bottom.yaxis.set_major_formatter("{x:.0%}")
    bottom.legend(loc="center right" if percent else "upper right", frameon=False)
