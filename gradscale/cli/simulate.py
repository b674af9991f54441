"""``gradscale simulate``: what presets would have done to the scale, side by side, over a trace or a model of one."""

from __future__ import annotations

import ast
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradscale.cli.output import console, print_json, table
from gradscale.core.protocols import Policy
from gradscale.core.validation import LARGEST_FLOAT32
from gradscale.errors import BackendNotAvailableError, InvalidTypeError, InvalidValueError
from gradscale.policies import presets
from gradscale.policies.plain import LARGEST_FLOAT16
from gradscale.policies.simulation import Gradients, Simulation, SyntheticGradients, measured, recorded
from gradscale.policies.simulation import simulate as run_policy
from gradscale.reports import plot as plots
from gradscale.reports.logs import read_log

__all__ = ["simulate"]

_WIDEST = 10_000  # columns, more than any table needs
_LONG = 200_000  # steps, from which on a progress bar is worth its place


def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            help="A JSONL log with 'skipped', 'overflow' or 'magnitude' in each row, or steps such as CCOC "
            "(C clean, O overflow).",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            "-p",
            metavar="NAME[:SETTING=VALUE,...]",
            help="What to run; more than once for several. Default: torch.",
            show_default=False,
        ),
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Run over a log-normal model of gradients.")] = False,
    steps: Annotated[str, typer.Option(help="Of the model: how many steps.")] = "1e5",
    seed: Annotated[int, typer.Option(help="Of the model: its random numbers.")] = 0,
    median: Annotated[float, typer.Option(help="Of the model: the median magnitude in the first step.")] = 2.0**-22,
    sigma: Annotated[
        float, typer.Option(help="Of the model: standard deviation within a step, in powers of two.")
    ] = 4.0,
    elements: Annotated[str, typer.Option(help="Of the model: how many elements the gradients have.")] = "1e6",
    drift: Annotated[float, typer.Option(help="Of the model: powers of two by which each step changes them.")] = 0.0,
    spike_probability: Annotated[float, typer.Option(help="Of the model: how probable a spike is in a step.")] = 0.0,
    spike_size: Annotated[float, typer.Option(help="Of the model: powers of two that a spike adds.")] = 6.0,
    nan_probability: Annotated[
        float, typer.Option(help="Of the model: how probable a NaN is, whatever the scale.")
    ] = 0.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the scales; .png, .svg or .pdf.")
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing; the default without --plot.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run presets over one trace, and show their skipped steps and scales side by side."""
    if plot is not None and no_plot:
        msg = "give --plot FILE or --no-plot, not both"
        raise typer.BadParameter(msg, param_hint="--plot")
    chosen = _policies(preset or ["torch"])
    if plot is not None:
        _require_picture(plot)
    try:
        if synthetic and trace is not None:
            msg = f"give a trace or --synthetic, not both, got {trace!r}"
            raise typer.BadParameter(msg, param_hint="TRACE")
        if synthetic:
            source: Gradients | SyntheticGradients = SyntheticGradients(
                steps=_count("--steps", steps),
                seed=seed,
                median=median,
                sigma=sigma,
                elements=_count("--elements", elements),
                drift=drift,
                spike_probability=spike_probability,
                spike_size=spike_size,
                nan_probability=nan_probability,
            )
        else:
            source = _read(trace)
        results = _run(chosen, source)
        if plot is not None:
            plots.simulation(results, plot)
    except (InvalidValueError, InvalidTypeError, BackendNotAvailableError) as error:
        raise _refused(error) from None
    if as_json:
        print_json([result.to_dict() for result in results])
    else:
        _print(results)
        if plot is not None:
            console().print(f"plot: {plot}")


def _refused(error: Exception, hint: str | None = None) -> typer.BadParameter:
    """Return an error as one line, with exit code 2."""
    return typer.BadParameter(" ".join(str(error).split()), param_hint=hint)


def _policies(presets_given: list[str]) -> list[tuple[str, Policy]]:
    """Return the policies of ``name:setting=value,...``, each with what was given as its name."""
    chosen = []
    for text in presets_given:
        name, _, listed = text.partition(":")
        settings = {}
        for item in filter(None, listed.split(",")):
            setting, is_given, value = item.partition("=")
            if not is_given:
                msg = f"a setting must be NAME=VALUE, such as growth_interval=500, got {item!r}"
                raise typer.BadParameter(msg, param_hint="--preset")
            if setting.strip() in settings:
                msg = f"{setting.strip()} is given twice in {text!r}"
                raise typer.BadParameter(msg, param_hint="--preset")
            settings[setting.strip()] = _value(value.strip())
        try:
            chosen.append((text, presets.named(name.strip(), **settings)))
        except (InvalidValueError, InvalidTypeError) as error:
            raise _refused(error, "--preset") from None
    return chosen


def _value(text: str) -> Any:
    """Return what a setting says: a number (2**16 as well), true, false, none, or text."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    base, is_power, exponent = text.partition("**")
    try:
        if not is_power:
            return ast.literal_eval(text)
        # In floats, which have an end: a large power of integers would be computed for ever.
        power = float(ast.literal_eval(base)) ** float(ast.literal_eval(exponent))
        return int(power) if "." not in text and power.is_integer() else power
    except (ValueError, SyntaxError, TypeError, ArithmeticError):
        return text


def _count(option: str, text: str) -> int:
    """Return a whole number above 0, which may be written as 1e6 or 1_000_000."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if number < 1 or number != number // 1:
        msg = f"it must be a whole number above 0, such as 1e6, got {text!r}"
        raise typer.BadParameter(msg, param_hint=option)
    return int(number)


def _require_picture(path: Path) -> None:
    """Refuse a picture that cannot be written before anything is simulated, and leave nothing behind."""
    suffixes = (".png", ".svg", ".pdf")
    if path.suffix.lower() not in suffixes:
        msg = f"the plot must end in {', '.join(suffixes)}, got {str(path)!r}"
        raise typer.BadParameter(msg, param_hint="--plot")
    try:
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        msg = f"cannot write {str(path)!r}: {error.strerror}"
        raise typer.BadParameter(msg, param_hint="--plot") from None


def _read(trace: str | None) -> Gradients:
    """Return the gradients of a log, or of steps given as letters."""
    if trace is None:
        msg = "give a trace (a log file, or steps such as CCOC) or --synthetic"
        raise typer.BadParameter(msg, param_hint="TRACE")
    looks_like_path = trace.lower().endswith((".jsonl", ".json")) or "/" in trace
    # Path's is_file() raises for steps that are too many for a file's name.
    if not looks_like_path and not os.path.isfile(trace):  # noqa: PTH113
        return recorded(trace)
    rows = read_log(trace)
    if all(row.get("magnitude") is not None for row in rows):
        magnitudes = [_number(trace, row) for row in rows]
        if not any(map(_is_unexplained, rows)):
            return measured(magnitudes)
    return recorded([_is_overflow(trace, row) for row in rows])


def _is_unexplained(row: dict[str, Any]) -> bool:
    """Tell whether a step was skipped though its magnitude fits: it is that of the finite gradients alone."""
    scale = row.get("scale")
    if row.get("skipped") is not True or not isinstance(scale, (int, float)) or not 0 < scale <= LARGEST_FLOAT32:
        return False
    return bool(row["magnitude"] <= LARGEST_FLOAT16 / scale)


def _number(trace: str, row: dict[str, Any]) -> float:
    value = row["magnitude"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        msg = f"line {row['line']} of {trace!r} must have a magnitude that is a number from 0 on, got {value!r}"
        raise InvalidValueError(msg)
    return value


def _is_overflow(trace: str, row: dict[str, Any]) -> bool:
    value = row.get("skipped", row.get("overflow"))
    if isinstance(value, bool):
        return value
    shown = {name: value for name, value in row.items() if name != "line"}
    msg = f"line {row['line']} of {trace!r} must have 'skipped' or 'overflow' as true or false, got {shown!r:.120}"
    raise InvalidValueError(msg)


def _run(chosen: list[tuple[str, Policy]], source: Gradients | SyntheticGradients) -> list[Simulation]:
    """Simulate each policy, with a progress bar on a terminal where that takes long."""
    count = source.steps if isinstance(source, SyntheticGradients) else len(source.largest)
    errors = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=errors, transient=True)
    task = progress.add_task("", total=count)

    def start(name: str) -> Callable[[int], None]:
        progress.reset(task, description=name, total=count)
        return lambda done: progress.update(task, completed=done)

    # Nothing is shown of a bar that is not started.
    with progress if count >= _LONG and errors.is_terminal else contextlib.nullcontext():
        gradients = source.gradients(start("gradients")) if isinstance(source, SyntheticGradients) else source
        return [run_policy(policy, gradients, name=name, progress=start(name)) for name, policy in chosen]


def _print(results: list[Simulation]) -> None:
    """Print the totals: a row for each run, or where the terminal is too narrow for that a list for each."""
    titles = ("preset", "skipped", "% skipped", "final scale", "smallest", "largest", "underflow %", "raised in step")
    rows = [_cells(result) for result in results]
    made = table(*titles)
    for column in made.columns[1:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*row)
    out = console()
    if out.measure(made, options=out.options.update(max_width=_WIDEST)).maximum <= out.width:
        out.print(made)
        return
    for row in rows:
        out.print(f"\n{row[0]}")
        for title, cell in zip(titles[1:], row[1:], strict=True):
            if cell:
                out.print(f"  {title:14}  {cell}")


def _cells(result: Simulation) -> tuple[str, ...]:
    total = result.to_dict()
    underflow, raised = total["underflow_fraction"], total["raised_at"]
    return (
        result.name,
        f"{total['skipped']:,} of {total['steps']:,}",
        f"{100 * total['skipped_fraction']:.3g}",
        *(f"{total[f'{which}_scale']:.10g}" for which in ("final", "smallest", "largest")),
        "" if underflow is None else f"{100 * underflow:.3g}",
        "" if raised is None else f"{raised:,}",
    )
