"""``gradscale doctor``: what is installed, usable, or broken and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

import gradscale
from gradscale.cli.output import console, error_line, print_json, table
from gradscale.cli.probe import Component, components, find
from gradscale.errors import BackendNotAvailableError, MissingExtraError

__all__ = ["Finding", "doctor", "examine"]

_LAUNCHER = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "MPI_LOCAL")
# What is to be killed when the user interrupts.
_running: set[subprocess.Popen[str]] = set()
# How a traceback ends whose text names the remedy, such as a driver; another pip command would mislead.
_SAYS_WHAT_TO_DO = tuple(
    f"{kind.__module__}.{kind.__name__}: " for kind in (BackendNotAvailableError, MissingExtraError)
)
_STYLES = {"ok": "green", "broken": "bold red", "missing": "dim"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found out about one component."""

    name: str
    # It was used and gave the right answers; is not installed; or failed.
    status: Literal["ok", "missing", "broken"]
    reason: str = ""  # why it is missing or broken
    command: str = ""  # the pip command that may help; empty where there is none, or the reason says what to do
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # what was done with it, versions, devices

    @property
    def remedy(self) -> str:
        """The reason, and the command where there is one."""
        return f"{self.reason}; from a clone of gradscale: {self.command}" if self.command else self.reason


def examine(component: Component, timeout: float) -> Finding:
    """Use one component in a process of its own, so that whatever it does ends with that one, or after some seconds."""
    missing = [module for module in component.modules if not _is_installed(module)]
    if missing:
        return Finding(component.name, "missing", f"{', '.join(missing)} not installed", component.command)
    process = subprocess.Popen(
        [sys.executable, "-m", "gradscale.cli.probe", component.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A process alone: under mpiexec, it is none of its ranks.
        env={name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)},
    )
    _running.add(process)
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        reason = f"importing and using it was not done after {timeout:g} s; a longer --timeout gives it more"
        return Finding(component.name, "broken", reason)
    finally:
        process.kill()
        process.wait()
        _running.discard(process)
    status = process.returncode
    if status == 0:
        try:
            return Finding(component.name, "ok", details=json.loads(printed.splitlines()[-1]))
        except (IndexError, ValueError):
            return Finding(component.name, "broken", "its process ended before it was used", component.command)
    ending = f"its process ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"
    reason = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), ending)
    if reason.startswith(_SAYS_WHAT_TO_DO):
        return Finding(component.name, "broken", reason.partition(": ")[2])
    return Finding(component.name, "broken", reason, component.command)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # Something is there, and broken.
        return True


def _examine_all(chosen: Sequence[Component], timeout: float) -> list[Finding]:
    """Use several at a time; what still runs is killed when the user interrupts."""
    with (
        console(stderr=True).status(f"using {len(chosen)} libraries, each in a process of its own"),
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        try:
            return list(pool.map(lambda component: examine(component, timeout), chosen))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                process.kill()
            raise


def doctor(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to look at, such as numpy mpi or numpy,mpi. Default: everything.")
    ] = None,
    require: Annotated[
        str, typer.Option(metavar="NAMES", help="Exit with 0 only if these work, such as numpy,mpi.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=0.1, max=1e6, help="Seconds until something counts as hanging.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Say which adapters and extras are installed, usable, or broken and why.

    Each one is really used, in a process of its own: its arrays are scaled, unscaled and judged, its group makes a
    reduction. The exit code is 0 if everything that is required works, or, where nothing is required, if nothing that
    is installed is broken.
    """
    required, wanted = _separated(require), _separated(",".join(names or ()))
    if require and not required:
        msg = f"give names, such as numpy,mpi, got {require!r}"
        raise typer.BadParameter(msg, param_hint="--require")
    if names and not wanted:
        msg = f"give names, such as numpy,mpi, got {' '.join(names)!r}"
        raise typer.BadParameter(msg, param_hint="NAMES")
    try:
        needed = {component.name for component in find(required)}
        chosen = find([*wanted, *required]) if wanted else components()
    except KeyError as error:
        raise typer.BadParameter(error.args[0]) from None
    findings = _examine_all(chosen, timeout)
    if needed:
        bad = [finding for finding in findings if finding.name in needed and finding.status != "ok"]
    else:
        bad = [finding for finding in findings if finding.status == "broken"]
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
        error_line(f"doctor: {finding.name} is {finding.status}: {finding.remedy}")
    raise typer.Exit(int(bool(bad)))


def _separated(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _rows(findings: Sequence[Finding]) -> Table:
    rows = table("what", "state", "version", "details")
    for finding in findings:
        details = dict(finding.details)
        versions = ", ".join(dict.fromkeys(details.pop("versions", {}).values()))
        text = finding.remedy
        if finding.status == "ok":
            did = f"works ({details.pop('did')})"
            shown = (
                f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in details.items()
            )
            text = "; ".join([did, *shown])
        rows.add_row(finding.name, finding.status, versions, text, style=_STYLES[finding.status])
    return rows
