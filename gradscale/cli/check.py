"""``gradscale check``: a self-test of agreement over the real group, under mpiexec or torchrun."""

from __future__ import annotations

import difflib
import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from gradscale.cli.check_page import describe, notes, print_page
from gradscale.cli.check_stages import FAULTS
from gradscale.cli.check_supervisor import supervise
from gradscale.cli.output import console, error_line, print_json
from gradscale.extras import needs

__all__ = ["check"]

_COMMANDS = (
    "mpiexec -n 4 python -m gradscale check --group mpi, or "
    "torchrun --nproc-per-node 2 -m gradscale check --group torch"
)
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        msg = f"--backend is for --group torch, got --backend {backend.value} with --group {chosen.value}"
        raise typer.BadParameter(msg)
    kind, rank = _parse_fault(fault)
    _require(chosen)

    def show(page: dict[str, Any]) -> None:
        if as_json:
            print_json(page | {"notes": notes(page)})
        else:
            print_page(console(), page)
        for problem in page["problems"]:
            error_line(f"check: {describe(problem)}")

    settings = {
        "group": chosen.value,
        "timeout": timeout,
        "backend": backend.value if backend else None,
        "fault": (kind, rank),
    }
    raise typer.Exit(supervise(settings, show))


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


def _require(group: Group) -> None:
    """Raise MissingExtraError unless what the group is made with is installed."""
    module, extra = {Group.mpi: ("mpi4py", "mpi"), Group.torch: ("torch", "torch")}[group]
    with needs(f"check --group {group.value}", extra, module):
        pass
