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
from rich.console import Console

import gradscale
from gradscale.cli.components import Component, components, find
from gradscale.cli.output import console, error_line, print_json, table
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
    """What was found out about one component.

    Attributes
    ----------
    name : str
        The component's.
    status : {"ok", "missing", "broken"}
        Whether it was used and gave the right answers; is not installed; failed; or has no adapter.
    reason : str
        Why it is missing or broken.
    command : str
        The pip command that may help; empty where there is none, or the reason says what to do.
    details : dict
        What was done with it, versions, devices.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    reason: str = ""
    command: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


def examine(component: Component, timeout: float) -> Finding:
    """Use one component in a process of its own, so that whatever it does ends with that one.

    Parameters
    ----------
    component : Component
        What to use.
    timeout : float
        Seconds until it counts as hanging.
    """
    missing = [module for module in component.modules if not _is_installed(module)]
    if missing:
        return Finding(component.name, "missing", f"{', '.join(missing)} not installed", component.command)
    command = [sys.executable, "-m", "gradscale.cli.probe", component.name]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
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
    if process.returncode == 0:
        try:
            details = json.loads(printed.splitlines()[-1])
        except (IndexError, ValueError):
            return Finding(component.name, "broken", "its process ended before it was used", component.command)
        return Finding(component.name, "ok", details=details)
    reason = _last_line(errors) or f"its process ended with {_ending(process.returncode)}"
    if reason.startswith(_SAYS_WHAT_TO_DO):
        return Finding(component.name, "broken", reason.partition(": ")[2])
    return Finding(component.name, "broken", reason, component.command)


def _examine_all(chosen: Sequence[Component], timeout: float) -> list[Finding]:
    """Use several at a time; what still runs is killed when the user interrupts."""
    with (
        console(stderr=True).status(f"using {len(chosen)} libraries, each in a process of its own"),
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        findings = [pool.submit(examine, component, timeout) for component in chosen]
        try:
            return [finding.result() for finding in findings]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(_running):
                process.kill()
            raise


def _environment() -> dict[str, str]:
    """Return the environment of one process alone: under mpiexec, it is none of its ranks."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # Something is there, and broken.
        return True


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def doctor(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to look at, such as numpy or mpi. Default: everything.")
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
    required = [name.strip() for name in require.split(",") if name.strip()]
    if require and not required:
        msg = f"give names, such as numpy,mpi, got {require!r}"
        raise typer.BadParameter(msg, param_hint="--require")
    try:
        needed = find(required)
        chosen = find([*names, *required]) if names else components()
    except KeyError as error:
        raise typer.BadParameter(error.args[0]) from None
    findings = _examine_all(chosen, timeout)
    needed_names = {component.name for component in needed}
    bad = [
        finding
        for finding in findings
        if (finding.status != "ok" if needed_names else finding.status == "broken")
        and (not needed_names or finding.name in needed_names)
    ]
    if as_json:
        print_json({"ok": not bad, **_system(), "components": [dataclasses.asdict(finding) for finding in findings]})
    else:
        _print(console(), findings)
    for finding in bad:
        error_line(f"doctor: {finding.name} is {finding.status}: {_with_remedy(finding)}")
    raise typer.Exit(int(bool(bad)))


def _system() -> dict[str, str]:
    return {
        "gradscale": gradscale.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _print(out: Console, findings: Sequence[Finding]) -> None:
    system = _system()
    out.print(f"gradscale {system['gradscale']}, Python {system['python']}, {system['system']}", style="bold")
    rows = table("what", "state", "version", "details")
    for finding in findings:
        details = dict(finding.details)
        versions = ", ".join(dict.fromkeys(details.pop("versions", {}).values()))
        rows.add_row(finding.name, finding.status, versions, _describe(finding, details), style=_STYLES[finding.status])
    out.print(rows)


def _with_remedy(finding: Finding) -> str:
    return f"{finding.reason}; from a clone of gradscale: {finding.command}" if finding.command else finding.reason


def _describe(finding: Finding, details: dict[str, Any]) -> str:
    if finding.status != "ok":
        return _with_remedy(finding)
    did = details.pop("did")
    rest = [f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in details.items()]
    return "; ".join([f"works ({did})", *rest])
