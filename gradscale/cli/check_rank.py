"""One rank of a check: goes through the stages with the others, and tells its supervisor where it is.

Started by ``check`` as a process of its own, so that someone is left to say so when it is killed, hangs in a library or
waits in MPI_Init. Runs ``python -m gradscale.cli.check_rank SETTINGS``, with the settings as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from gradscale.cli.check_stages import Fault, Problem, Reports, Stage, stages, warm_up
from gradscale.cli.check_worlds import MPIWorld, TorchWorld, World
from gradscale.errors import BackendError, CollectiveTimeoutError

__all__ = ["MARGIN", "main"]

MARGIN = 2.0
"""Seconds for a report to reach rank 0; the others give rank 0 up after twice that, and a rank is killed after five."""

_PAUSES = (1e-3, 2e-2)  # seconds, the first and the longest
_LEAVING = 0.3
_GOODBYE = -1  # after all stages
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class _Supervisor:
    """The process that started this one: it is told where this one is, prints the page, and outlives it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._answered = threading.Event()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for _ in sys.stdin:
            self._answered.set()
        # A rank whose supervisor has ended has no business left.
        os._exit(1)

    def tell(self, **message: Any) -> None:
        os.write(self._descriptor, json.dumps(message).encode() + b"\n")

    def show(self, page: dict[str, Any]) -> None:
        self.tell(page=page)
        self._answered.wait(MARGIN)


class _Conversation:
    """Goes through the stages in step with the other ranks."""

    def __init__(self, world: World, supervisor: _Supervisor, settings: dict[str, Any], fault: Fault) -> None:
        self.world, self.supervisor, self.fault = world, supervisor, fault
        self.is_deputy = False
        self.timeout: float = settings["timeout"]
        self.page: dict[str, Any] = {
            "ok": True,
            "group": settings["group"],
            "size": world.size,
            "timeout": self.timeout,
            "ranks": [],
            "stages": [],
            "latency": None,
            "problems": [],
        }

    def run(self, all_stages: list[Stage]) -> bool:
        """Run the stages to the end or to the first problem, on every rank; whether all went well."""
        for number, stage in enumerate(all_stages):
            if number == 0 and not self._meet(stage):
                return False
            begin = self._begin(stage)
            try:
                report = stage.work()
            except Exception as error:
                report = {"error": f"{type(error).__name__}: {error}", "consequence": _is_consequence(error)}
            self.world.post(number, report)
            if self.world.rank:
                if not self._listen(stage, begin + self.timeout + 2 * MARGIN):
                    return False
                continue
            problems = self._judge(number, stage, begin)
            seconds = time.monotonic() - begin
            entry = {"name": stage.name, "kind": stage.kind, "ok": not problems, "seconds": round(seconds, 3)}
            self.page["stages"].append(entry)
            self._note(number, stage.name, problems)
            if problems:
                return False
            self.world.say({"go": True})
        return True

    def _meet(self, stage: Stage) -> bool:
        """Let the others know that rank 0 is there, so that they wait for its judgement, which may take longer."""
        if self.world.rank == 0:
            if not self.fault.is_on("late", 0):
                self.world.say({"here": True})
            return True
        return self._listen(stage, self._begin(stage) + self.timeout)

    def _begin(self, stage: Stage) -> float:
        """Tell the supervisor where this rank is, and return the time."""
        # The others give a rank up sooner, and name it.
        self.supervisor.tell(stage=stage.name, limit=self.timeout + 5 * MARGIN)
        return time.monotonic()

    def _listen(self, stage: Stage, end: float) -> bool:
        """Wait for rank 0's word until a time of the monotonic clock; whether to go on."""
        rank, size = self.world.rank, self.world.size
        # Rank 1 stands in for rank 0, and the others give it the time.
        with contextlib.suppress(ConnectionError, RuntimeError):
            for _ in _until(end + (MARGIN if rank > 1 else 0.0)):
                word = self.world.hear()
                if word is not None:
                    return any(word.values())
        problem = f"did not answer rank {rank} within {self.timeout:g} s, in: {stage.name}"
        self.page |= {"ok": False, "problems": [{"rank": 0, "problem": problem}], "size": size}
        self.is_deputy = rank == 1
        if self.is_deputy:
            self.supervisor.show(self.page)
        else:
            self.supervisor.tell(line=f"rank 0 of {size}: {problem}")
        return False

    def _judge(self, number: int, stage: Stage, begin: float) -> list[Problem]:
        """Gather the reports of a stage, and return what is wrong in them."""
        reports: Reports = {}
        # At first ranks need not come at the same time; then each one's collectives end by the timeout.
        end = time.monotonic() + self.timeout if number == 0 else begin + self.timeout + MARGIN
        for _ in _until(end):
            reports = self.world.reports(number)
            if len(reports) == self.world.size:
                break
        missing = [rank for rank in range(self.world.size) if rank not in reports]
        if missing:
            return [(rank, f"did not answer within {self.timeout:g} s") for rank in missing]
        failed = {rank: report for rank, report in sorted(reports.items()) if "error" in report}
        # Who waited in vain for a rank that failed is not to blame.
        blamed = {rank: report for rank, report in failed.items() if not report["consequence"]} or failed
        return [(rank, report["error"]) for rank, report in blamed.items()] or stage.judge(reports)

    def part(self) -> None:
        """Say goodbye; rank 0 waits for all, since the store of their messages may be in its process."""
        self.world.post(_GOODBYE, {})
        if self.world.rank == 0:
            self.supervisor.show(self.page)
            for _ in _until(time.monotonic() + MARGIN):
                if len(self.world.reports(_GOODBYE)) == self.world.size:
                    break

    def _note(self, number: int, name: str, problems: list[Problem]) -> None:
        """Put what is known after a stage on the page."""
        reports = self.world.reports(number)
        if number == 0:
            self.page["ranks"] = [{"rank": rank} | report for rank, report in sorted(reports.items())]
        if name == "latency" and not problems:
            slowest = max(reports.values(), key=lambda report: report["median"])
            self.page["latency"] = {
                "median_us": round(slowest["median"], 1),
                "p95_us": round(max(report["p95"] for report in reports.values()), 1),
                "calls": slowest["calls"],
            }
        self.page["problems"] += [{"rank": rank, "problem": f"{text}, in: {name}"} for rank, text in problems]
        self.page["ok"] = not self.page["problems"]


def _is_consequence(error: Exception) -> bool:
    return isinstance(error, (CollectiveTimeoutError, BackendError))


def _until(end: float) -> Iterator[None]:
    """Yield until a time of the monotonic clock, more and more seldom: ranks may share a core."""
    pause, longest = _PAUSES
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(2 * pause, longest)
    yield


def _enter(settings: dict[str, Any], supervisor: _Supervisor) -> World:
    """Become one of the ranks."""
    is_mpi = settings["group"] == "mpi"
    world: World = MPIWorld() if is_mpi else TorchWorld(settings["backend"])
    warm_up(world)
    entering = "MPI_Init" if is_mpi else "the connection to the store"
    supervisor.tell(stage=entering, limit=settings["timeout"] + MARGIN)
    world.enter(settings["timeout"])
    return world


def main() -> None:
    """Run one rank; its supervisor makes the exit code of what it is told."""
    settings = json.loads(sys.argv[1])
    supervisor = _Supervisor(settings["descriptor"])
    try:
        world = _enter(settings, supervisor)
    except (ImportError, RuntimeError, OSError, KeyError, ValueError) as error:
        supervisor.tell(line=f"cannot join the group over {settings['group']}: {_one_line(error)}", end=1)
        os._exit(1)
    supervisor.tell(rank=world.rank, size=world.size)
    fault = Fault(*settings["fault"])
    conversation = _Conversation(world, supervisor, settings, fault)
    is_good = conversation.run(stages(world, fault, settings["timeout"]))
    if is_good:
        conversation.part()
        supervisor.tell(end=0)
        world.leave(0)
        return
    if world.rank == 0:
        supervisor.show(conversation.page)
        with contextlib.suppress(Exception):
            world.say({"go": False})
    supervisor.tell(end=1)
    # All others leave on rank 0's word, or are ended by an abort; the store of the words may be in this process.
    time.sleep(_LEAVING if world.rank == 0 or conversation.is_deputy else 2 * MARGIN)
    world.leave(1)
    os._exit(1)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)
