"""``gradscale bench``: the rows of the benchmark table that the installed libraries allow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradscale_bench.cases import Outcome
from gradscale_bench.measure import Row, readable
from gradscale_cli.output import console, error_line, require_writable, table

__all__ = ["bench"]


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller arrays and fewer rounds: to see that it runs.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers to FILE, too.", dir_okay=False)
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="SUBSTRING", help="Run only cases with this in their name; --list shows them.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 when a target is missed or a case is not run.")
    ] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of the cases and exit.")] = False,
) -> None:
    """Measure gradscale against peers and limits in the same process.

    Times are medians over rounds that take turns, on one thread. A busy machine spoils them. What cannot be run is
    listed with the reason and the pip command.
    """
    # A process of its own, since libraries read how many threads they may have when they are imported.
    command = [sys.executable, "-m", "gradscale_bench"]
    if list_names:
        raise typer.Exit(subprocess.run([*command, "--list"], check=False).returncode)
    command += ["--lines", "--only", only]
    command += [option for option, given in (("--quick", quick), ("--check", check)) if given]
    if json_file is not None:
        require_writable(json_file, "--json")
        command += ["--json", str(json_file)]
    outcomes, code = _run(command)
    if outcomes:
        _print(console(), outcomes)
    for outcome in outcomes:
        if outcome.failed:
            error_line(f"bench: {outcome.name} failed: {outcome.reason}")
    if code and check and not any(outcome.failed for outcome in outcomes):
        error_line("bench: a target was missed, or a case was not run")
    raise typer.Exit(code)


def _run(command: list[str]) -> tuple[list[Outcome], int]:
    """Run the benchmark and show its progress on stderr; what became of each case, and the exit code."""
    outcomes: list[Outcome] = []
    with (
        console(stderr=True).status("starting") as status,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = _parse(line)
                if "begun" in event:
                    status.update(f"case {len(outcomes) + 1}: {event['begun']}")
                if "ended" in event:
                    ended = event["ended"]
                    rows = [Row(**row) for row in ended.pop("rows")]
                    outcomes.append(Outcome(rows=rows, **ended))
        except BaseException:
            process.kill()
            raise
    return outcomes, process.returncode


def _parse(line: str) -> dict[str, Any]:
    """Return an event; what a library may have printed is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _print(out: Console, outcomes: list[Outcome]) -> None:
    rows = table("case", "ours", "other", "ratio", "target", "met")
    for row in (row for outcome in outcomes for row in outcome.rows):
        target, met = ("", "") if row.target is None else (f"{row.target:.2f}", "yes" if row.met else "NO")
        ours, other = readable(row.ours, row.unit), readable(row.other, row.unit)
        rows.add_row(row.case, ours, other, f"{row.ratio:.3f}", target, met, style=None if row.met else "yellow")
    if rows.row_count:
        out.print(rows)
    for outcome in outcomes:
        if outcome.reason and not outcome.failed:
            out.print(f"not run: {outcome.name}, because {outcome.reason}", soft_wrap=True)
