"""``gradscale check``: a self-test of agreement over the real group, under mpiexec or torchrun.

The process that mpiexec or torchrun has started runs one rank as its only child, which alone uses MPI or torch. So it
can still speak when the rank dies or hangs, and the launcher, which ends all ranks when one has failed, learns of it
only after rank 0 has reported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from enum import StrEnum
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Annotated

import typer
from rich import print_json

from gradscale.extras import needs
from gradscale.tools.cli.check_rank import END, LAUNCHERS, MARGIN, Report
from gradscale.tools.cli.output import AsJSON, console, error_line, table

RANK_PROGRAM = ("-P", "-m", "gradscale.tools.cli.check_rank")
"""Python's arguments for one rank; those of its ``main`` follow."""

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Group(StrEnum):
    """What carries a group; its extra has the same name."""

    mpi = "mpi"
    torch = "torch"


def _launched() -> Group:
    """Return the group that the environment speaks of."""
    if all(name in os.environ for name in _TORCH):
        return Group.torch
    if any(name in os.environ for name in _MPI):
        return Group.mpi
    msg = f"neither mpiexec nor torchrun has started this process: start it with {', or '.join(LAUNCHERS.values())}"
    raise typer.BadParameter(msg)


def check(
    group: Annotated[
        Group | None,
        typer.Option(help="What to agree over. Default: what the ranks were started with.", show_default=False),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=1e6, help="How long a rank may take.")
    ] = 60.0,
    as_json: AsJSON = False,
) -> None:
    """Test agreement over the real group: every rank runs this command.

    The ranks report in; an inf and a NaN on each rank in turn must make all of them skip; clean gradients must let all
    of them step; another scale on each rank in turn must be found by all; a late rank must be waited for; and the
    latency of one agreement is measured. torch.distributed uses nccl if each rank has a CUDA device, else gloo. Rank 0
    prints one page. The exit code is 1 on every rank if anything failed, and the rank to blame is named; it is 2 if one
    process alone has compared nothing.
    """
    group = group or _launched()
    with needs(f"check --group {group}", group, "mpi4py" if group is Group.mpi else "torch"):
        pass
    connection, theirs = multiprocessing.Pipe()
    os.set_inheritable(theirs.fileno(), True)
    command = [sys.executable, *RANK_PROGRAM, json.dumps([group, timeout, theirs.fileno()])]
    # The rank inherits the launcher's connections, too; Ctrl-C reaches this process alone.
    # Its libraries may print, and the report alone is for stdout.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, close_fds=False, process_group=0)
    theirs.close()
    try:
        code = _watch(process, connection, as_json)
    finally:
        process.kill()
        process.wait()
    raise typer.Exit(code)


def _watch(process: subprocess.Popen[bytes], connection: Connection, as_json: bool) -> int:
    """Follow a rank to its end, show rank 0's page, and return the exit code."""
    page, rank, problem = _follow(process, connection)
    if problem:
        who = f"rank {rank} of {page['size']}" if page["size"] else "a rank"
        error_line(f"check: {who} ({socket.gethostname()}, process {process.pid}) {problem}")
        page |= {"ok": False, "problems": [{"rank": rank, "problem": problem}]}
    is_alone = page["ok"] and page["size"] == 1
    page["ok"] = page["ok"] and not is_alone
    if page["size"] and rank == 0:
        show(page, as_json)
        for one in page["problems"]:
            error_line(f"check: rank {one['rank']}: {one['problem']}")
    if is_alone:
        error_line(f"check: one process alone has nothing to compare, start several: {LAUNCHERS[page['group']]}")
    if not problem:
        process.wait()
    elif page["size"] > 1:
        # The launcher would end the others before rank 0 has printed the page; they end all.
        time.sleep(page["timeout"] + 5 * MARGIN)
    return 2 if is_alone else int(not page["ok"])


def _follow(process: subprocess.Popen[bytes], connection: Connection) -> tuple[Report, int, str]:
    """Wait until a rank ends or its time in a stage is over; return its page, its number, and where it was lost."""
    stage, limit, rank, ending = "its start", 1e6, 0, ""
    page: Report = {"ok": True, "size": 0}
    while page["ok"] and connection.poll(limit):
        try:
            stage, limit, rank, page = connection.recv()
        except EOFError:
            if process.wait() == 0 and stage == END:
                return page, rank, ""
            ending = f": it ended with exit code {process.returncode}"
            break
    return page, rank, f"did not answer{ending or f' within {limit:g} s'}, in: {stage}" if page["ok"] else ""


def show(page: Report, as_json: bool) -> None:
    """Print the page as JSON or for people."""
    if as_json:
        print_json(data=page)
        return
    out, ranks = console(), page["ranks"]
    result = "passed" if page["ok"] else "FAILED" if page["problems"] else "nothing to compare, start several ranks"
    out.print(f"gradscale check over {page['group']}, size {page['size']}: {result}", style="bold")
    if ranks:
        rows = [(str(rank["rank"]), rank["host"], str(rank["pid"]), rank["device"]) for rank in ranks]
        out.print(table(("rank", "host", "process", "device"), rows))
        modules = {name: sorted({one["versions"].get(name, "none") for one in ranks}) for name in ranks[0]["versions"]}
        out.print(", ".join(f"{name} {' and '.join(versions)}" for name, versions in modules.items()))
    if page["stages"]:
        named = groupby(page["stages"], key=lambda stage: re.sub(r"rank \d+", "each rank", stage["name"]))
        tried = [(what, "ok" if all(stage["ok"] for stage in stages) else "FAILED") for what, stages in named]
        out.print(table(("what was tried", "result"), tried))
    if page["latency_us"] is not None:
        out.print(f"one agreement takes {page['latency_us']:.0f} us (median on the slowest rank)")
