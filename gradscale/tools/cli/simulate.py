"""``gradscale simulate``: run presets over one trace, and compare what they do to the scale."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from gradscale.core.messages import key_names
from gradscale.core.protocols import Policy
from gradscale.core.validation import LARGEST_FLOAT16, LARGEST_FLOAT32
from gradscale.errors import GradscaleError, InvalidValueError
from gradscale.policies import presets
from gradscale.tools import plot as plots
from gradscale.tools.callbacks import read_log
from gradscale.tools.cli.output import console, print_json, table
from gradscale.tools.simulation import Gradients, Simulation, measured, recorded
from gradscale.tools.simulation import simulate as run_policy

_WIDEST = 10_000  # columns, more than any table needs
_SAME = "The trace says which steps overflow, so every preset skips the same ones; a log with magnitudes tells more."
_HELD = "spike", "refused"


def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A log of JSON lines with 'skipped', 'overflow' or 'magnitude' in each row (- for stdin), or steps "
            "such as CCOC (C clean, O overflow).",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            "-p",
            metavar="NAME[:SETTING=VALUE,...]",
            help="What to run; more than once for several. Default: torch.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the scales; .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run presets over one trace, and show their skipped steps and scales side by side."""
    if not trace:
        msg = "give a log such as scale.jsonl, or steps such as CCOC"
        raise typer.BadParameter(msg, param_hint="TRACE")
    chosen = [(name, _policy(name)) for name in preset or ["torch"]]
    try:
        gradients = _read(trace)
        results = [run_policy(policy, gradients, name=name) for name, policy in chosen]
        if plot is not None:
            plots.simulation(results, plot)
    except GradscaleError as error:
        raise _refused(error) from None
    if as_json:
        print_json([result.to_dict() for result in results])
        return
    _print([_cells(result) for result in results])
    if len(results) > 1 and set(gradients.largest) <= {0.0, math.inf}:
        console().print(_SAME)
    if plot is not None:
        console().print(f"plot: {plot}")


def _refused(error: Exception, hint: str | None = None) -> typer.BadParameter:
    """Return an error as one line, with exit code 2."""
    return typer.BadParameter(" ".join(str(error).split()), param_hint=hint)


def _policy(text: str) -> Policy:
    """Return the policy of ``name:setting=value,...``."""
    name, _, listed = text.partition(":")
    settings: dict[str, object] = {}
    for item in filter(None, listed.split(",")):
        setting, is_given, value = (part.strip() for part in item.partition("="))
        if not is_given:
            msg = f"a setting must be NAME=VALUE, such as growth_interval=500, got {item!r}"
            raise typer.BadParameter(msg, param_hint="--preset")
        if setting in settings:
            msg = f"{setting} is given twice in {text!r}"
            raise typer.BadParameter(msg, param_hint="--preset")
        settings[setting] = _value(value)
    try:
        return presets.named(name.strip(), **settings)
    except GradscaleError as error:
        raise _refused(error, "--preset") from None


def _value(text: str) -> object:
    """Return a setting's value: a number (2**16 as well), true, false, none, or text."""
    base, is_power, exponent = text.partition("**")
    try:
        # In floats, which have an end: a large power of integers would be computed for ever.
        number = math.pow(float(base), float(exponent) if is_power else 1.0)
    except (ValueError, OverflowError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
    return int(number) if number.is_integer() else number


def _read(trace: str) -> Gradients:
    """Return the gradients of a log, or of steps given as letters."""
    # Path's is_file() raises for steps that are too many for a file's name.
    is_log = trace == "-" or trace.lower().endswith((".jsonl", ".json")) or "/" in trace or os.path.isfile(trace)  # noqa: PTH113
    if not is_log:
        try:
            return recorded(trace)
        except InvalidValueError as error:
            msg = f"{trace!r:.60} is neither a file nor steps: {error}"
            raise InvalidValueError(msg) from None
    if Path(trace).is_char_device():
        msg = f"the log must be a file or a pipe, got {trace!r}, a device"
        raise InvalidValueError(msg)
    # Spikes and refusals move no scale.
    rows = [row for row in read_log("/dev/stdin" if trace == "-" else trace) if row.get("reason") not in _HELD]
    if all(row.get("magnitude") is not None for row in rows) and not any(map(_is_unexplained, rows)):
        return measured(row["magnitude"] for row in rows)
    steps: list[Any] = [row.get("skipped", row.get("overflow")) for row in rows]
    if None in steps:
        row = rows[steps.index(None)]
        msg = (
            f"each row of a log must have 'skipped' or 'overflow', or each 'magnitude', got in line {row['line']} of "
            f"{trace!r} the keys {key_names(row.keys() - {'line'})}"
        )
        raise InvalidValueError(msg)
    return recorded(steps)


def _is_unexplained(row: dict[str, object]) -> bool:
    """Tell whether a step was skipped though its magnitude, that of the finite gradients, fits."""
    scale, magnitude = row.get("scale"), row["magnitude"]
    if row.get("skipped") is not True or not isinstance(scale, (int, float)) or not 0 < scale <= LARGEST_FLOAT32:
        return False
    return isinstance(magnitude, (int, float)) and magnitude <= LARGEST_FLOAT16 / scale


def _print(rows: list[dict[str, str]]) -> None:
    """Print the totals: a row for each run, or a list for each if the terminal is too narrow for that."""
    made = table(*rows[0])
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*row.values())
    out = console()
    if out.measure(made, options=out.options.update(max_width=_WIDEST)).maximum <= out.width:
        out.print(made)
        return
    for row in rows:
        out.print("", *(f"{title:14}  {cell}" for title, cell in row.items() if cell), sep="\n")


def _cells(result: Simulation) -> dict[str, str]:
    return {
        "preset": result.name,
        "skipped": f"{result.skipped_steps:,} of {result.steps:,}{' (stopped early)' * (result.raised_at is not None)}",
        "% skipped": f"{100 * result.skipped_steps / result.steps:.3g}",
        "final scale": f"{result.final_scale:.10g}",
        "smallest": f"{min(result.scale):.10g}",
        "largest": f"{max(result.scale):.10g}",
        "error in step": "" if result.raised_at is None else f"{result.raised_at:,}",
    }
