"""The page of a check: what rank 0 found, for people."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from rich.console import Console

from gradscale.cli.output import table

__all__ = ["describe", "notes", "print_page"]

_MOST_RANKS = 16
_GROUPS = {"mpi": "MPI", "torch": "torch.distributed"}


def print_page(out: Console, page: dict[str, Any]) -> None:
    """Print the page.

    Parameters
    ----------
    out : Console
        Where to.
    page : dict
        As ``check --json`` prints it.
    """
    ranks = "1 rank" if page["size"] == 1 else f"{page['size']} ranks"
    out.print(f"gradscale check, {ranks} over {_GROUPS[page['group']]}: ", style="bold", end="")
    out.print("passed" if page["ok"] else "FAILED", style="bold green" if page["ok"] else "bold red")
    _print_ranks(out, page["ranks"])
    _print_stages(out, page["stages"])
    latency = page["latency"]
    if latency is not None:
        out.print(
            f"one agreement takes {latency['median_us']:.0f} us (median on the slowest rank), at most "
            f"{latency['p95_us']:.0f} us in 95 % of {latency['calls']} calls",
            soft_wrap=True,
        )
    for note in notes(page):
        out.print(f"note: {note}", style="yellow", soft_wrap=True)
    for problem in page["problems"]:
        out.print(describe(problem), style="red", soft_wrap=True)


def describe(problem: dict[str, Any]) -> str:
    """Return one line about a problem, with the rank's name first if one is to blame."""
    whose = "" if problem["rank"] is None else f"rank {problem['rank']}: "
    return f"{whose}{problem['problem']}"


def notes(page: dict[str, Any]) -> list[str]:
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


def _print_ranks(out: Console, ranks: list[dict[str, Any]]) -> None:
    if not ranks:
        return
    rows = table("rank", "host", "process", "device", "gradscale")
    for rank in ranks[:_MOST_RANKS]:
        rows.add_row(str(rank["rank"]), rank["host"], str(rank["pid"]), rank["device"], rank["gradscale"])
    if len(ranks) > _MOST_RANKS:
        rows.add_row("...", f"and {len(ranks) - _MOST_RANKS} more", "", "", "")
    out.print(rows)
    out.print(", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items()), soft_wrap=True)


def _print_stages(out: Console, stages: list[dict[str, Any]]) -> None:
    if not stages:
        return
    rows = table("what was tried", "result", "seconds")
    for kind, group in groupby(stages, key=lambda stage: stage["kind"]):
        of_kind = list(group)
        is_good = all(stage["ok"] for stage in of_kind)
        rows.add_row(kind, "ok" if is_good else "FAILED", f"{sum(stage['seconds'] for stage in of_kind):.2f}")
    out.print(rows)
