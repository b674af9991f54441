"""``gradscale check``: a self-test of agreement over the real group, under mpiexec or torchrun.

The process that mpiexec or torchrun has started runs one rank as its only child, which alone uses MPI or torch. So it
can still speak when the rank dies or hangs, and the launcher, which ends all ranks when one has failed, learns of a
death only after rank 0 has reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Annotated

import typer

from gradscale.extras import needs
from gradscale.tools.cli.check_rank import END, MARGIN, MPIEXEC, TORCHRUN, Page, named
from gradscale.tools.cli.output import console, error_line, print_json, seconds, table

RANK_PROGRAM = ("-P", "-m", "gradscale.tools.cli.check_rank")
"""Python's arguments for one rank; those of its ``main`` follow."""

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Those of torchrun and of MPI come first: inside of a step of Slurm they speak of the inner launch.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_MOST_RANKS = 16
# The name of a group for people, and the module that it needs; its extra has the group's name.
_GROUPS = {"mpi": ("MPI", "mpi4py"), "torch": ("torch.distributed", "torch")}


def _group(given: str) -> str:
    """Return the group that is given, or that the environment speaks of."""
    if given and given not in _GROUPS:
        msg = f"must be mpi or torch, got {given!r}; with CUDA devices torch uses NCCL by itself"
        raise typer.BadParameter(msg)
    by_torchrun = all(name in os.environ for name in _TORCH)
    by_mpiexec = any(name in os.environ for name in _MPI)
    if not given and by_torchrun == by_mpiexec:
        found = "both mpiexec and torchrun have" if by_mpiexec else "neither mpiexec nor torchrun has"
        msg = f"give --group mpi or --group torch: {found} started this process. Start it with {MPIEXEC}, or {TORCHRUN}"
        raise typer.BadParameter(msg)
    return given or ("torch" if by_torchrun else "mpi")


def check(
    group: Annotated[
        str,
        typer.Option(
            metavar="mpi|torch",
            callback=_group,
            help="What to agree over. Default: what the ranks were started with.",
            show_default=False,
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(callback=seconds, help="Seconds to wait for a rank, from 0.1 on.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Test agreement over the real group: every rank runs this command.

    The ranks report in; an inf and a NaN on each rank in turn must make all of them skip; clean gradients must let all
    of them step; another scale on each rank in turn must be found by all; a late rank must be waited for; and the
    latency of one agreement is measured. torch.distributed uses nccl if each rank has a CUDA device, else gloo. Rank 0
    prints one page. The exit code is 1 on every rank if anything failed, and the rank to blame is named.
    """
    library, module = _GROUPS[group]
    with needs(f"check --group {group}", group, module):
        pass
    rank, size = _launched(_RANKS, 0), _launched(_SIZES, 1)
    if rank == 0:
        # All that a rank imports takes its time.
        starting = f"starting {_ranks(size)} over {library}, with up to {timeout:g} s for each stage"
        print(f"gradscale check: {starting}", file=sys.stderr, flush=True)

    connection, theirs = multiprocessing.Pipe()
    os.set_inheritable(theirs.fileno(), True)
    command = [sys.executable, *RANK_PROGRAM, json.dumps([group, timeout, rank, size, theirs.fileno()])]
    # The rank inherits the launcher's connections, too.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    theirs.close()
    try:
        code = _watch(process, connection, rank, size, as_json)
    finally:
        process.kill()
        process.wait()
    raise typer.Exit(code)


def _launched(names: Sequence[str], default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _watch(process: subprocess.Popen[bytes], connection: Connection, rank: int, size: int, as_json: bool) -> int:
    """Follow a rank until it ends or its time in a stage is over, show rank 0's page, and return the exit code."""
    stage, limit = "its start", 1e6
    page: Page | None = None  # of a rank that has joined
    status: int | None = None
    while connection.poll(limit):
        try:
            stage, limit, rank, size, page = connection.recv()
        except (EOFError, OSError):
            status = process.wait()
            break
        if stage == END and page is not None:
            if rank == 0:
                show(page, as_json)
            if not page["ok"]:
                connection.send("go on")
    if stage == END and status in (0, 1):
        return status
    if status is None:
        hint = "some rank has not come to it" if page is None else "it hangs"
        why = f"has not come out of {stage} in {limit:g} s: {hint}"
    else:
        ending = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        why = f"{ending}, in: {stage}"
    error_line(f"check: {named(rank, size, process.pid)} {why}")
    if page is not None and rank == 0 and stage != END:
        within = f" within {page['timeout']:g} s" if status is None else ""
        page["ok"], page["problems"] = False, [{"rank": 0, "problem": f"did not answer{within}, in: {stage}"}]
        show(page, as_json)
    if page is not None and size > 1:
        # The launcher would end the others before rank 0 has printed the page; they end all.
        time.sleep(page["timeout"] + 5 * MARGIN)
    return 1


def show(page: Page, as_json: bool) -> None:
    """Print the page as JSON or for people, and the faults on stderr."""
    notes = _notes(page)
    if as_json:
        print_json(page | {"notes": notes})
    else:
        _print_page(page, notes)
    for problem in page["problems"]:
        error_line(f"check: rank {problem['rank']}: {problem['problem']}")


def _print_page(page: Page, notes: Sequence[str]) -> None:
    """Print the page for people."""
    out = console()
    out.print(f"gradscale check, {_ranks(page['size'])} over {_GROUPS[page['group']][0]}: ", style="bold", end="")
    if page["ok"] and page["size"] == 1:
        out.print("nothing to compare", style="bold yellow")
    else:
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
    for note in notes:
        out.print(f"note: {note}", style="yellow", soft_wrap=True)
    for problem in page["problems"]:
        out.print(f"rank {problem['rank']}: {problem['problem']}", style="red", soft_wrap=True)


def _notes(page: Page) -> list[str]:
    """Return notes for the reader of the result."""
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
