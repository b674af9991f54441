"""``gradscale check``: a self-test of agreement over the real group, under mpiexec or torchrun.

The process that mpiexec or torchrun has started supervises one rank, its only child, and leaves MPI and torch to that
one. So it can still speak when the rank dies, hangs or never gets in, and the launcher learns of a death only after
rank 0 has had the time to report.
"""

from __future__ import annotations

import difflib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer
from rich.console import Console

from gradscale.cli.check_rank import FAULTS, MARGIN
from gradscale.cli.launchers import launched_rank, launched_size
from gradscale.cli.output import console, error_line, print_json, table
from gradscale.extras import needs

__all__ = ["check"]

_COMMANDS = (
    "mpiexec -n 4 python -m gradscale check --group mpi, or "
    "torchrun --nproc-per-node 2 -m gradscale check --group torch"
)
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_RANKS = 16
# What people call a group, and the module that it needs; the extra that brings that one has the group's name.
_GROUPS = {"mpi": ("MPI", "mpi4py"), "torch": ("torch.distributed", "torch")}


class Group(StrEnum):
    """What the ranks agree over."""

    mpi = "mpi"
    torch = "torch"


class Transport(StrEnum):
    """A backend of torch.distributed."""

    gloo = "gloo"
    nccl = "nccl"


def check(
    group: Annotated[
        Group | None, typer.Option(help="What to agree over. Default: what the ranks were started with.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=1e6, help="Seconds to wait for a rank.")] = 60.0,
    backend: Annotated[
        Transport | None,
        typer.Option(help="Of torch.distributed. Default: nccl where each rank has a CUDA device, else gloo."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
    fault: Annotated[
        str,
        typer.Option(
            metavar="KIND:RANK",
            help=f"Fail on purpose on one rank, to see what that looks like: {', '.join(FAULTS)}.",
        ),
    ] = "",
) -> None:
    """Test agreement over the real group: every rank runs this command.

    The ranks report in; an inf and a NaN on each rank in turn must make all of them skip; clean gradients must let all
    of them step; another scale on each rank in turn must be found by all; a late rank must be waited for; and the
    latency of one agreement is measured. Rank 0 prints one page. The exit code is 1 on every rank if anything failed,
    and the rank to blame is named.
    """
    chosen = group or _detect()
    if backend is not None and chosen is not Group.torch:
        msg = f"--backend is for --group torch, got --backend {backend} with --group {chosen}"
        raise typer.BadParameter(msg)
    settings = {"group": chosen, "timeout": timeout, "backend": backend, "fault": _parse_fault(fault)}
    with needs(f"check --group {chosen}", chosen, _GROUPS[chosen][1]):
        pass

    def show(page: dict[str, Any]) -> None:
        if as_json:
            print_json(page | {"notes": _notes(page)})
        else:
            _print_page(console(), page)
        for problem in page["problems"]:
            error_line(f"check: {_describe(problem)}")

    raise typer.Exit(_supervise(settings, show))


def _detect() -> Group:
    """Return the group that the environment speaks of."""
    by_torchrun = all(name in os.environ for name in _TORCH)
    by_mpiexec = any(name in os.environ for name in _MPI)
    if by_torchrun == by_mpiexec:
        found = "both mpiexec and torchrun have left traces" if by_mpiexec else "neither mpiexec nor torchrun has"
        msg = f"which group to check is not clear ({found} in the environment): {_COMMANDS}"
        raise typer.BadParameter(msg, param_hint="--group")
    return Group.torch if by_torchrun else Group.mpi


def _parse_fault(text: str) -> tuple[str, int]:
    """Return the kind and the rank; an empty kind for no fault."""
    if not text:
        return "", -1
    kind, _, rank = text.partition(":")
    if kind not in FAULTS:
        near = difflib.get_close_matches(kind, FAULTS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FAULTS)}"
        msg = f"there is no fault {kind!r}: {hint}"
        raise typer.BadParameter(msg, param_hint="--fault")
    if not rank.isdecimal():
        msg = f"must be a kind and a rank, such as {kind}:1, got {text!r}"
        raise typer.BadParameter(msg, param_hint="--fault")
    return kind, int(rank)


class _Rank:
    """What is known of the rank."""

    def __init__(
        self, child: subprocess.Popen[bytes], connection: Connection, show: Callable[[dict[str, Any]], None]
    ) -> None:
        self.child = child
        self.connection = connection
        self._show = show
        self.rank = launched_rank()
        self.size = launched_size()
        self.stage = "its start"
        self.limit = 0.0
        self._deadline: float | None = None
        self.has_joined = False
        self.code: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({socket.gethostname()}, process {self.child.pid})"

    def seconds_left(self) -> float | None:
        """Return the time that it has left in its stage, or None before the first one."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def heed(self, message: dict[str, Any]) -> None:
        """Act on one message of the rank's."""
        if "stage" in message:
            self.stage, self.limit = message["stage"], message["limit"]
            self._deadline = time.monotonic() + self.limit
        if "rank" in message:
            self.rank, self.size, self.has_joined = message["rank"], message["size"], True
        if "page" in message:
            self._show(message["page"])
            self.connection.send("shown")
        if "line" in message:
            seen = f"{message['line']} (seen by {self})" if self.has_joined else f"{self} {message['line']}"
            error_line(f"check: {seen}")
        self.code = message.get("end", self.code)


def _supervise(settings: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> int:
    """Run one rank to its end and return the exit code; the page is shown on the rank that has it."""
    ours, theirs = multiprocessing.Pipe()
    os.set_inheritable(theirs.fileno(), True)
    command = [
        sys.executable,
        "-P",
        "-m",
        "gradscale.cli.check_rank",
        json.dumps(settings | {"descriptor": theirs.fileno()}),
    ]
    # The rank inherits the launcher's connections, too.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    theirs.close()
    try:
        return _watch(_Rank(child, ours, show), settings["timeout"])
    finally:
        child.kill()
        child.wait()
        ours.close()


def _watch(rank: _Rank, timeout: float) -> int:
    """Heed the rank's messages until it ends or its time is over."""
    while rank.connection.poll(rank.seconds_left()):
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            return _code(rank, timeout)
        rank.heed(message)
    hint = "it hangs" if rank.has_joined else "some rank has not come to it"
    error_line(f"check: {rank} has not come out of {rank.stage} in {rank.limit:g} s: {hint}")
    return 1


def _code(rank: _Rank, timeout: float) -> int:
    """Return the exit code of a rank that has ended: what it has said, or 1 after a line about its death."""
    status = rank.child.wait()
    if rank.code is not None:
        return rank.code
    ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
    error_line(f"check: {rank} {ending}, in: {rank.stage}")
    if rank.has_joined and str(rank.size) != "1":
        # The launcher would end the others before one of them has printed the page.
        time.sleep(timeout + 4 * MARGIN)
    return 1


def _print_page(out: Console, page: dict[str, Any]) -> None:
    """Print the page for people, as ``check --json`` has it for programs."""
    size = "1 rank" if page["size"] == 1 else f"{page['size']} ranks"
    out.print(f"gradscale check, {size} over {_GROUPS[page['group']][0]}: ", style="bold", end="")
    out.print("passed" if page["ok"] else "FAILED", style="bold green" if page["ok"] else "bold red")
    if ranks := page["ranks"]:
        rows = table("rank", "host", "process", "device", "gradscale")
        for rank in ranks[:_MOST_RANKS]:
            rows.add_row(str(rank["rank"]), rank["host"], str(rank["pid"]), rank["device"], rank["gradscale"])
        if len(ranks) > _MOST_RANKS:
            rows.add_row("...", f"and {len(ranks) - _MOST_RANKS} more", "", "", "")
        out.print(rows)
        out.print(", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()), soft_wrap=True)
    if page["stages"]:
        rows = table("what was tried", "result", "seconds")
        for kind, group in groupby(page["stages"], key=lambda stage: stage["kind"]):
            stages = list(group)
            result = "ok" if all(stage["ok"] for stage in stages) else "FAILED"
            rows.add_row(kind, result, f"{sum(stage['seconds'] for stage in stages):.2f}")
        out.print(rows)
    if latency := page["latency"]:
        out.print(
            f"one agreement takes {latency['median_us']:.0f} us (median on the slowest rank), at most "
            f"{latency['p95_us']:.0f} us in 95 % of {latency['calls']} calls",
            soft_wrap=True,
        )
    for note in _notes(page):
        out.print(f"note: {note}", style="yellow", soft_wrap=True)
    for problem in page["problems"]:
        out.print(_describe(problem), style="red", soft_wrap=True)


def _describe(problem: dict[str, Any]) -> str:
    """Return one line about a problem, with the rank's name first if one is to blame."""
    whose = "" if problem["rank"] is None else f"rank {problem['rank']}: "
    return f"{whose}{problem['problem']}"


def _notes(page: dict[str, Any]) -> list[str]:
    """Return what a reader should know beside the result."""
    found = []
    ranks = page["ranks"]
    if page["size"] == 1:
        found.append("1 rank proves nothing about agreement: start several, with mpiexec -n 4 or torchrun")
    for host, count in Counter(rank["host"] for rank in ranks).items():
        cores = next(rank["cores"] for rank in ranks if rank["host"] == host)
        if count > cores:
            found.append(f"{count} ranks share the {cores} cores of {host}: the latency is that of taking turns")
    for library in ranks[0]["versions"] if ranks else ():
        versions = sorted({rank["versions"].get(library, "none") for rank in ranks})
        if len(versions) > 1:
            found.append(f"the ranks have different versions of {library}: {', '.join(versions)}")
    return found
