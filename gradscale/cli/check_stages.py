"""The stages of a check: what every rank does in each, and what rank 0 makes of their reports."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import gradscale
from gradscale.cli.check_worlds import World
from gradscale.core import registry

__all__ = ["FAULTS", "Fault", "Problem", "Reports", "Stage", "stages", "warm_up"]

FAULTS = ("late", "hang", "die", "desync", "verdict", "version")
"""What can be made to fail on purpose."""

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_SCALE = 1024.0
_LATE = 0.3  # seconds
_FOR_EVER = 1e6
_WARM_UP = 20
_CALLS = 200

Reports = dict[int, dict[str, Any]]
Problem = tuple[int | None, str]
"""A rank and what is wrong with it; None for what no single rank can be blamed for."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What fails on purpose, and on which rank.

    Attributes
    ----------
    kind : str
        One of FAULTS, or "" for none.
    rank : int
        The rank that fails.
    """

    kind: str = ""
    rank: int = -1

    def is_on(self, kind: str, rank: int) -> bool:
        """Tell whether this rank has this fault."""
        return (kind, rank) == (self.kind, self.rank)


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of the check.

    Attributes
    ----------
    name : str
        What is tried, for people.
    kind : str
        Stages of one kind are one line of the page.
    work : callable
        What each rank does; returns its report, as plain Python values.
    judge : callable
        What rank 0 finds wrong in the reports of all ranks.
    """

    name: str
    kind: str
    work: Callable[[], dict[str, Any]]
    judge: Callable[[Reports], list[Problem]]


class _Optimizer:
    """Counts its steps."""

    def __init__(self, grads: list[Any]) -> None:
        self.grads = grads
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class _Deaf:
    """Collectives that answer that no gradient was bad, whatever the ranks have found."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def start_max(self, x: Any, /) -> Callable[[], Any]:
        finish = self._inner.start_max(x)

        def answer() -> Any:
            values = finish()
            values[0] = 0
            return values

        return answer


class _Rank:
    """What one rank does in the stages."""

    def __init__(self, world: World, fault: Fault, timeout: float) -> None:
        self.world = world
        self.fault = fault
        self.timeout = timeout
        self.group: Any = None

    def has(self, kind: str) -> bool:
        return self.fault.is_on(kind, self.world.rank)

    def report_in(self) -> dict[str, Any]:
        if self.has("late"):
            time.sleep(_FOR_EVER)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": self.world.device,
            "cores": os.cpu_count() or 1,
            "launched": _launched(),
            "gradscale": "0.0.0 (on purpose)" if self.has("version") else gradscale.__version__,
            "versions": {"python": platform.python_version()} | self.world.versions(),
        }

    def join(self) -> dict[str, Any]:
        group = self.world.join(self.timeout)
        self.group = registry.collectives_for(group, self.timeout)
        return {"rank": self.group.rank, "size": self.group.size}

    def warm_up(self) -> None:
        """Take a step alone: what is compiled or loaded at the first call is no time that others wait for."""
        scaler = gradscale.GradScaler(init_scale=_SCALE)
        self._iterate(scaler, _SCALE)

    def iterate(self, value: float, *, has_drifted: bool = False, delay: float = 0.0) -> dict[str, Any]:
        """Take one step with a value among the gradients and a new scaler, with another scale if it has drifted."""
        group = _Deaf(self.group) if self.has("verdict") else self.group
        scaler = gradscale.ShardedGradScaler(group=group, init_scale=_SCALE, timeout=self.timeout)
        if has_drifted:
            scaler.load_state_dict(scaler.state_dict() | {"scale": 2 * _SCALE})
        time.sleep(delay)
        return self._iterate(scaler, value)

    def _iterate(self, scaler: gradscale.GradScaler, value: float) -> dict[str, Any]:
        optimizer = _Optimizer(self.world.gradients(value))
        # Without it the scaler has no state yet.
        scaler.scale(optimizer.grads[0][:1])
        scaler.step(optimizer)
        saw = scaler.last_step(optimizer).local_nonfinite > 0
        scaler.update()
        return {
            "steps": optimizer.steps,
            "scale": scaler.get_scale(),
            "state": {key: repr(value) for key, value in scaler.state_dict().items()},
            "saw": saw,
        }

    def verdict(self, bad: int, value: float) -> dict[str, Any]:
        if bad == 0 and self.has("hang"):
            time.sleep(_FOR_EVER)
        if bad == 0 and self.has("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.iterate(value if self.world.rank == bad else _SCALE)

    def step(self, *, has_drifted: bool) -> dict[str, Any]:
        """Take a clean step."""
        try:
            return self.iterate(_SCALE, has_drifted=has_drifted)
        except gradscale.ScaleDesyncError as error:
            return {"desync": str(error), "scale": 2 * _SCALE if has_drifted else _SCALE}

    def late(self, late: int) -> dict[str, Any]:
        """Take a step for which one rank comes late, and brings an inf that the others cannot know of before."""
        is_late = self.world.rank == late
        return self.iterate(math.inf if is_late else _SCALE, delay=_LATE if is_late else 0.0)

    def latency(self) -> dict[str, Any]:
        message = self.world.message()
        taken: list[float] = []
        for _ in range(_WARM_UP + _CALLS):
            begin = time.perf_counter()
            pending = self.group.start_max(message)
            pending()
            # Where only the stream waits.
            getattr(pending, "wait", lambda: None)()
            taken.append((time.perf_counter() - begin) * 1e6)
        taken = sorted(taken[_WARM_UP:])
        return {"median": statistics.median(taken), "p95": taken[math.ceil(0.95 * len(taken)) - 1], "calls": _CALLS}


def warm_up(world: World) -> None:
    """Use a scaler alone, before the ranks wait for each other; ``world`` need not have been entered."""
    _Rank(world, Fault(), 1.0).warm_up()


def stages(world: World, fault: Fault, timeout: float) -> list[Stage]:
    """Return the stages in order, the first one before the group is made.

    Parameters
    ----------
    world : World
        This process among the others.
    fault : Fault
        What fails on purpose.
    timeout : float
        Seconds that a rank waits for the others in each collective.
    """
    rank = _Rank(world, fault, timeout)
    everyone, last = range(world.size), world.size - 1
    return [
        Stage("report in", "ranks report in", rank.report_in, partial(_judge_versions, fault)),
        Stage("make the group", "the group is made", rank.join, _judge_group),
        *(
            Stage(
                f"{value} on rank {bad}",
                "inf and NaN on each rank in turn: all skip",
                partial(rank.verdict, bad, value),
                partial(_judge_steps, steps=0, scale=_SCALE / 2, bad=bad),
            )
            for bad in everyone
            for value in (math.inf, math.nan)
        ),
        Stage(
            "clean step",
            "clean gradients: all step",
            partial(rank.step, has_drifted=rank.has("desync")),
            partial(_judge_steps, steps=1, scale=_SCALE),
        ),
        *(
            Stage(
                f"other scale on rank {drifted}",
                "another scale on each rank in turn: found on all",
                partial(rank.step, has_drifted=world.rank == drifted),
                partial(_judge_desync, drifted),
            )
            for drifted in (everyone if world.size > 1 else ())
        ),
        Stage(
            f"late rank {last}",
            f"a rank that comes {_LATE:g} s late is waited for",
            partial(rank.late, last),
            partial(_judge_steps, steps=0, scale=_SCALE / 2, bad=last),
        ),
        Stage("latency", "latency of one agreement", rank.latency, lambda _: []),
    ]


def _launched() -> int:
    """Return how many processes the launcher says that it has started; 1 where it says nothing."""
    said = [os.environ.get(name, "") for name in _SIZES]
    return max((int(text) for text in said if text.isdecimal()), default=1)


def _judge_versions(fault: Fault, reports: Reports) -> list[Problem]:
    right = reports[0]["gradscale"]
    problems: list[Problem] = [
        (rank, f"has gradscale {report['gradscale']}, and rank 0 has {right}: install one version everywhere")
        for rank, report in reports.items()
        if report["gradscale"] != right
    ]
    launched = reports[0]["launched"]
    if len(reports) == 1 and launched > 1:
        # What all would take for a check of one rank that has passed.
        problems.append(
            (
                None,
                f"{launched} processes were started, and each is alone in its group: for MPI take the mpiexec of the "
                f"library that mpi4py uses (gradscale doctor mpi names it), for torch.distributed torchrun",
            )
        )
    if fault.rank >= len(reports):
        problems.append((None, f"--fault names rank {fault.rank}, and there are {len(reports)} ranks, from 0"))
    return problems


def _judge_group(reports: Reports) -> list[Problem]:
    return [
        (rank, f"is rank {report['rank']} of {report['size']} of the group, not {rank} of {len(reports)}")
        for rank, report in reports.items()
        if (report["rank"], report["size"]) != (rank, len(reports))
    ]


def _judge_steps(reports: Reports, *, steps: int, scale: float, bad: int | None = None) -> list[Problem]:
    """Name the ranks that did not do, or do not hold, what all should."""
    problems: list[Problem] = []
    desyncs = {rank: report for rank, report in sorted(reports.items()) if "desync" in report}
    if desyncs:
        odd = {rank: report for rank, report in desyncs.items() if report["scale"] != _SCALE} or desyncs
        return [
            (rank, f"holds scale {report['scale']!r} where {_SCALE!r} is right: {report['desync']}")
            for rank, report in odd.items()
        ]
    for rank, report in sorted(reports.items()):
        if report["steps"] != steps:
            done = "stepped" if report["steps"] > steps else "skipped"
            problems.append((rank, f"{done} where every rank should have {'skipped' if not steps else 'stepped'}"))
        elif report["scale"] != scale:
            problems.append((rank, f"holds scale {report['scale']!r} where {scale!r} is right"))
        elif report["saw"] != (rank == bad):
            problems.append((rank, f"found {'inf or NaN' if report['saw'] else 'nothing'} in its own gradients"))
    if problems:
        return problems
    usual = Counter(repr(report["state"]) for report in reports.values()).most_common(1)[0][0]
    return [
        (rank, f"holds another state than most ranks: {report['state']}, not {usual}")
        for rank, report in sorted(reports.items())
        if repr(report["state"]) != usual
    ]


def _judge_desync(drifted: int, reports: Reports) -> list[Problem]:
    problems: list[Problem] = []
    for rank, report in sorted(reports.items()):
        own = 2 * _SCALE if rank == drifted else _SCALE
        wanted = (f"scale from {_SCALE!r} to {2 * _SCALE!r}", f"here {own!r}", f"rank {rank} of {len(reports)}")
        if "desync" not in report:
            problems.append((rank, f"did not notice that rank {drifted} holds another scale"))
        elif not all(part in report["desync"] for part in wanted):
            problems.append((rank, f"noticed another scale on rank {drifted}, and said: {report['desync']}"))
    return problems
