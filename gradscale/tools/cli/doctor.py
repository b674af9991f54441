"""``gradscale doctor``: what is installed, usable, or broken and why."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Annotated

import typer
from rich.table import Table

import gradscale
from gradscale.tools.cli.output import console, error_line, print_json, seconds, table
from gradscale.tools.cli.probe import Component, Finding, components, find

_LAUNCHER = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "MPI_LOCAL")
_LEAST = 1.0  # seconds
_STYLES = {"ok": "green", "broken": "bold red", "timed out": "yellow", "missing": "dim"}


def examine(chosen: Sequence[Component], timeout: float) -> list[Finding]:
    """Use components at the same time, each in a process of its own, which may crash or hang."""
    end = time.monotonic() + timeout
    # A process alone: under mpiexec, it is none of its ranks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    started: list[Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for component in chosen:
            command = [sys.executable, "-P", "-m", "gradscale.tools.cli.probe", component.name]
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, errors="replace", env=environment)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        return [_outcome(*pair, timeout, end) for pair in zip(chosen, started, strict=True)]


def _outcome(component: Component, process: Popen[str], timeout: float, end: float) -> Finding:
    try:
        # One that had no room for its output goes on from here.
        printed, errors = process.communicate(timeout=max(end - time.monotonic(), _LEAST))
    except TimeoutExpired:
        reason = f"importing and using it was not done after {timeout:g} s; a longer --timeout gives it more"
        return Finding(component.name, "timed out", reason)
    status, reason = process.returncode, "its process ended before it was used"
    if status == 0:
        with contextlib.suppress(IndexError, ValueError, TypeError):
            return Finding(**json.loads(printed.splitlines()[-1]))
    else:
        ending = f"its process ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"
        reason = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), ending)
    return Finding(component.name, "broken", reason, component.command)


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="What to look at, such as numpy mpi or numpy,mpi. Default: all, or what is required."),
    ] = None,
    require: Annotated[
        str, typer.Option(metavar="NAMES", help="Exit with 0 only if these work, such as numpy,mpi.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(callback=seconds, help="Seconds that all may take together, from 0.1 on.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Say which adapters are installed, usable, or broken and why.

    Each one is really used, in a process of its own: its arrays are scaled, unscaled and judged, its group makes a
    reduction. The exit code is 0 if everything that is required works, or, if nothing is required, if everything that
    is installed works.
    """
    required, wanted = _separated("--require", require), _separated("NAMES", ",".join(names or ()))
    try:
        needed = {component.name for component in find(required)}
        chosen = find([*wanted, *required]) or components()
    except KeyError as error:
        raise typer.BadParameter(error.args[0]) from None
    with console(stderr=True).status(f"using {len(chosen)} libraries, each in a process of its own"):
        findings = examine(chosen, timeout)
    judged = [finding for finding in findings if (finding.name in needed if needed else finding.status != "missing")]
    bad = [finding for finding in judged if finding.status != "ok"]
    system = {
        "gradscale": gradscale.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if as_json:
        print_json({"ok": not bad, **system, "components": [dataclasses.asdict(finding) for finding in findings]})
    else:
        out = console()
        out.print(f"gradscale {system['gradscale']}, Python {system['python']}, {system['system']}", style="bold")
        out.print(_rows(findings))
    for finding in bad:
        verb = "has" if finding.status == "timed out" else "is"
        error_line(f"doctor: {finding.name} {verb} {finding.status}: {finding.remedy}")
    raise typer.Exit(int(bool(bad)))


def _separated(option: str, text: str) -> list[str]:
    """Return the names in a list with commas."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if text and not found:
        msg = f"give names, such as numpy,mpi, got {text!r}"
        raise typer.BadParameter(msg, param_hint=option)
    return found


def _rows(findings: Sequence[Finding]) -> Table:
    rows = table("what", "state", "version", "details")
    for finding in findings:
        details = dict(finding.details)
        versions, did = details.pop("versions", None), details.pop("did", None)
        text = finding.remedy
        if finding.status == "ok":
            shown = (
                f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in details.items()
            )
            text = "; ".join([f"works ({did})", *shown])
        version = ", ".join(dict.fromkeys(versions.values())) if isinstance(versions, dict) else ""
        rows.add_row(finding.name, finding.status, version, text, style=_STYLES[finding.status])
    return rows
