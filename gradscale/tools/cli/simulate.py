"""``gradscale simulate``: run presets over one trace, and compare what they do to the scale."""

from __future__ import annotations

import ast
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import print_json

from gradscale.core import validation
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidValueError, short_repr
from gradscale.policies import presets
from gradscale.scaler.reports import KEEPS_SCALE_NAMES
from gradscale.tools import plot as plots
from gradscale.tools.callbacks import LogRow, read_log, was_skipped
from gradscale.tools.cli.output import AsJSON, console, table
from gradscale.tools.simulation import Gradients, Simulation, recorded
from gradscale.tools.simulation import simulate as run_policy


def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="A log of JSON lines with 'skipped', 'overflow' or 'magnitude' in each row (- for stdin), or steps "
            "such as CCOC (C clean, O overflow).",
        ),
    ],
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset", "-p", metavar="NAME[:SETTING=VALUE,...]", help="What to run; may be repeated. Default: torch."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the scales; .png, .svg or .pdf.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Run presets over one trace, and show their skipped steps and scales side by side."""
    chosen = [(name, _policy(name)) for name in preset or ["torch"]]
    gradients = _read(trace)
    results = [run_policy(policy, gradients, name=name) for name, policy in chosen]
    if plot is not None:
        plots.simulation(results, plot)
    if as_json:
        print_json(data=[result.to_dict() for result in results])
        return
    _print(results)


def _policy(text: str) -> Policy:
    """Return the policy of ``name:setting=value,...``."""
    name, _, options = text.partition(":")
    settings = (item.partition("=") for item in options.split(",") if item)
    return presets.named(name, **{setting: _value(value) for setting, _, value in settings})


def _value(text: str) -> object:
    """Return a setting's value: a number, True, False, None, or text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _read(trace: str) -> Gradients:
    """Return the gradients of a log, or of steps written as letters."""
    # Path's exists() raises for steps that are too many for a file's name.
    if trace == "-" or os.path.exists(trace):  # noqa: PTH110
        rows = list(read_log("/dev/stdin" if trace == "-" else trace))
        steps = map(_as_step, rows, [{}, *rows])
        return Gradients([_largest(step) for step in steps if step is not None])
    try:
        return recorded(trace)
    except InvalidValueError as error:
        msg = f"{trace!r:.60} is neither a file nor steps: {error}"
        raise InvalidValueError(msg) from None


def _as_step(row: LogRow, before: LogRow) -> LogRow | None:
    """Return a row as that of one step; None if no step affects the scale, as those of spikes and refusals do not."""
    if not was_skipped(row) or row.get("reason") == "overflow":
        return row
    now, last = _counts(row), {} if row.get("iteration") == 1 else _counts(before)
    if now is None or last is None:
        return None if row.get("reason") in KEEPS_SCALE_NAMES else row
    outcomes = [name for name in ("overflow", "taken") if now.get(name, 0) > last.get(name, 0)]
    return row | {"skipped": outcomes[0] == "overflow"} if outcomes else None


def _counts(row: LogRow) -> dict[str, int] | None:
    """Return the numbers of steps up to a row; None if it has none."""
    if row.get("counts") is None:
        return None
    what = f"'counts' in line {row['line']}"
    counts = validation.mapping(what, row["counts"])
    return {name: validation.integer(f"{short_repr(name)} of {what}", n, 0, sys.maxsize) for name, n in counts.items()}


def _largest(row: LogRow) -> float:
    """Return the largest magnitude in a step: inf or 0 if the log says no more than whether it overflowed."""
    skipped, magnitude, where = was_skipped(row), row.get("magnitude"), f"in line {row['line']}"
    if row.get("retries") and not skipped:
        # A closure has overflowed above it.
        most = validation.LARGEST_FLOAT16 / validation.scale(f"'new_scale' {where}", row.get("new_scale"))
        return math.nextafter(most, 0.0)
    if magnitude is None:
        name = f"'skipped' or 'overflow', without a 'magnitude', {where}"
        return math.inf if validation.boolean(name, skipped) else 0.0
    largest = validation.magnitude(f"'magnitude' {where}", magnitude)
    scaled = largest * validation.magnitude(f"'scale' {where}", row.get("scale", math.inf))
    # That of the finite gradients: beside it there may have been an inf.
    return math.inf if skipped is True and scaled <= validation.LARGEST_FLOAT16 else largest


def _print(results: list[Simulation]) -> None:
    rows = []
    for result in results:
        skipped = f"{result.skipped_steps:,} of {result.steps:,} ({100 * result.skipped_steps / result.steps:.3g} %)"
        ending = "" if result.raised_at is None else f", then an error in step {result.raised_at:,}"
        scales = result.final_scale, min(result.scale), max(result.scale)
        rows.append((result.name, skipped + ending, *(f"{scale:.10g}" for scale in scales)))
    console().print(table(("preset", "skipped", "final scale", "smallest", "largest"), rows))
