"""``gradscale doctor``: what is installed, usable, or broken and why."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Annotated

import typer
from rich import print_json

from gradscale.tools.cli.output import AsJSON, console, table
from gradscale.tools.cli.probe import Component, Finding, components, find
from gradscale.tools.versions import system

_LAUNCHER = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "MPI_LOCAL", "MLX_")
_STYLES = {"ok": "green", "broken": "bold red", "timed out": "yellow", "missing": "dim"}


def examine(
    chosen: Sequence[Component], timeout: float, tell: Callable[[str], object] = lambda _: None
) -> list[Finding]:
    """Use components at the same time, each in a process of its own, which may crash or hang; tell how far it is."""
    end = time.monotonic() + timeout
    # A process alone: under mpiexec or mlx.launch, it is none of its ranks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    started: list[Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for component in chosen:
            command = [sys.executable, "-P", "-m", "gradscale.tools.cli.probe", component.name]
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, errors="replace", env=environment)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        findings = []
        for number, (component, process) in enumerate(zip(chosen, started, strict=True), 1):
            tell(f"using {component.name}, {number} of {len(chosen)}")
            # One that had no room for its output goes on when it is waited for.
            findings.append(_outcome(component, process, max(end - time.monotonic(), 1.0)))
        return findings


def _outcome(component: Component, process: Popen[str], timeout: float) -> Finding:
    try:
        printed, errors = process.communicate(timeout=timeout)
    except TimeoutExpired:
        reason = "importing and using it was not done in time; a longer --timeout gives it more"
        return Finding(component.name, "timed out", reason)
    with contextlib.suppress(IndexError, ValueError, TypeError):
        # A library may print, too, also when the process ends.
        return Finding(**json.loads([line for line in printed.splitlines() if line.startswith('{"name"')][-1]))
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"its process ended with exit code {process.returncode}"
    return Finding(component.name, "broken", component.remedy(reason))


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="What to look at, such as numpy mpi or numpy,mpi. Default: all, or what is required."),
    ] = None,
    require: Annotated[str, typer.Option(metavar="NAMES", help="Exit with 0 only if these work: numpy,mpi.")] = "",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=1e6, help="How long all may take.")] = 300.0,
    as_json: AsJSON = False,
) -> None:
    """Say which adapters are installed, usable, or broken and why.

    Each one is really used, in a process of its own: its arrays are scaled, unscaled and judged, its group makes a
    reduction. The exit code is 0 if everything that is required works, or, if nothing is required, if everything that
    is installed works.
    """
    required, wanted = find(_separated(require)), find(_separated(",".join(names or ())))
    chosen = list(dict.fromkeys([*wanted, *required])) or components()
    with console(stderr=True).status("") as status:
        findings = examine(chosen, timeout, status.update)
    needed = {component.name for component in required}
    judged = [finding for finding in findings if (finding.name in needed if needed else finding.status != "missing")]
    bad = [finding for finding in judged if finding.status != "ok"]
    if as_json:
        entries = [finding._asdict() for finding in findings]
        print_json(data={"ok": not bad, "system": system(), "components": entries})
    else:
        _print(findings)
    raise typer.Exit(int(bool(bad)))


def _separated(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _print(findings: Sequence[Finding]) -> None:
    rows = []
    for finding in findings:
        details = dict(finding.details)
        versions = details.pop("versions", {})
        parts = (f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in details.items())
        version = ", ".join(dict.fromkeys(versions.values())) if isinstance(versions, dict) else ""
        text = finding.reason or "; ".join(parts)
        rows.append((finding.name, finding.status, version, text))
    console().print(system(), style="bold")
    columns = ("what", "state", "version", "details")
    console().print(table(columns, rows, [_STYLES[finding.status] for finding in findings]))
