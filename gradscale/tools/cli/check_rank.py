"""One rank of a check: its stages, and what rank 0 makes of all ranks' reports.

A collective that some rank does not come to tells nobody which one it is. So every rank also reports to rank 0 outside
of the group that is checked: by messages of its own over MPI, or by the store of torch.distributed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import math
import os
import platform
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import gradscale
from gradscale.core import registry, vector
from gradscale.core.protocols import Array, Collectives
from gradscale.errors import BackendError, CollectiveTimeoutError
from gradscale.tools.cli.probe import mpi_library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MARGIN", "SCALE", "Conversation", "Message", "Page", "Problem", "Settings", "Stages", "main"]

MARGIN = 2.0
"""Seconds for a report to reach rank 0; the others give rank 0 up after twice that, and a rank is killed after five."""

SCALE = 1024.0
"""The scale that all ranks begin with."""

_PAUSE = 2e-3  # seconds
_LEAVING = 0.3
_LATE = 0.3
_GOODBYE = -1  # after all stages
_TAG = 1  # of messages over MPI
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_WARM_UP = 20
_CALLS = 200


class Settings(TypedDict):
    """What a supervisor starts a rank with; rank and size by the launcher's word."""

    group: str
    timeout: float
    rank: int
    size: int
    descriptor: int


class Report(TypedDict, total=False):
    """What a rank tells rank 0 of a stage, or rank 0 the others."""

    rank: int
    host: str
    pid: int
    device: str
    cores: int
    gradscale: str
    versions: dict[str, str]
    median: float
    p95: float
    error: str
    is_consequence: bool
    goes_on: bool


class Problem(TypedDict):
    """What is wrong with a rank."""

    rank: int
    problem: str


class StageResult(TypedDict):
    """How a stage went; stages of one kind are one line of the page."""

    name: str
    kind: str
    ok: bool
    seconds: float


class Latency(TypedDict):
    """The latency of one agreement: of the slowest ranks."""

    median_us: float
    p95_us: float
    calls: int


class Page(TypedDict):
    """The result of a check."""

    ok: bool
    group: str
    size: int
    timeout: float
    ranks: list[Report]
    stages: list[StageResult]
    latency: Latency | None
    problems: list[Problem]


class Message(TypedDict, total=False):
    """What a rank tells its supervisor: the stage it is in, its place, the page, a line for stderr, its exit code."""

    stage: str
    limit: float
    rank: int
    size: int
    page: Page
    line: str
    end: int


Reports = dict[int, Report]


class Stage(NamedTuple):
    """One step of the check; the work of each rank returns an error if it did not go as it should."""

    name: str
    kind: str
    work: Callable[[], Report]


class _MPIWorld:
    """The ranks of MPI.COMM_WORLD: who they are, and messages between them that need no collective."""

    device = "cpu"  # of the gradients, for people
    entrance = "MPI_Init"  # what enter() waits in, for people

    def __init__(self) -> None:
        # Known once it is entered.
        self.rank, self.size = 0, 1
        self._received: dict[str, Report] = {}
        # Requests and buffers live as long as this.
        self._sent: list[MPI.Request] = []

    def enter(self) -> None:
        """Become one of the ranks."""
        # It initializes MPI, which waits for all ranks, however long it takes.
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size

    def join(self) -> object:
        """Return the group; collective over all ranks."""
        return self._comm

    def array(self, values: Sequence[float], dtype: str) -> Array:
        """Return an array on this rank's device, also before it is entered."""
        import numpy as np

        return np.array(values, dtype)

    def versions(self) -> dict[str, str]:
        """Return the versions of the group's libraries."""
        found = {name: importlib.metadata.version(name) for name in ("numpy", "mpi4py")}
        return found | {"MPI": mpi_library()}

    def put(self, key: str, report: Report) -> None:
        """Leave a message under a key: rank 0 for all others, each of those for rank 0."""
        others = (0,) if self.rank else range(1, self.size)
        self._sent += [self._comm.isend((key, report), rank, _TAG) for rank in others]

    def get(self, key: str) -> Report | None:
        """Return the message under a key, or None if it has not come yet."""
        while (found := self._comm.improbe(tag=_TAG)) is not None:
            sent_key, report = found.recv()
            self._received[sent_key] = report
        return self._received.get(key)

    def leave(self, code: int) -> None:
        """Leave the group; with a code other than 0, end all ranks, as far as the group's library can."""
        if code:
            self._comm.Abort(code)
        for request in self._sent:
            request.wait()


class _TorchWorld:
    """The ranks of torch's default process group, as torchrun starts them; the methods are those of _MPIWorld."""

    entrance = "the connection to the store"

    def __init__(self, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._dist: Any = dist
        torch.set_num_threads(1)
        # Known once it is entered.
        self.rank, self.size = 0, 1
        place, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        has_nccl = torch.cuda.is_available() and torch.cuda.device_count() >= here and dist.is_nccl_available()
        self._backend = "nccl" if has_nccl else "gloo"
        self._device = torch.device("cpu")
        self.device = "cpu"
        if has_nccl:
            self._device = torch.device("cuda", place)
            torch.cuda.set_device(self._device)
            self.device = f"{self._device} {torch.cuda.get_device_name(self._device)}"
        self._timeout = timedelta(seconds=timeout)

    def enter(self) -> None:
        # As init_process_group does it by default: by what torchrun leaves in the environment.
        self._store, self.rank, self.size = next(self._dist.rendezvous("env://", timeout=self._timeout))

    def join(self) -> object:
        store = self._dist.PrefixStore("group", self._store)
        self._dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        return self._dist.group.WORLD

    def array(self, values: Sequence[float], dtype: str) -> Array:
        import torch

        return torch.tensor(values, dtype=getattr(torch, dtype), device=self._device)

    def versions(self) -> dict[str, str]:
        return {"torch": importlib.metadata.version("torch"), "backend": self._backend}

    def put(self, key: str, report: Report) -> None:
        self._store.set(key, json.dumps(report))

    def get(self, key: str) -> Report | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def leave(self, code: int) -> None:
        # torch has no way to end the other ranks, which their launcher does.
        if not code:
            self._dist.destroy_process_group()


_World = _MPIWorld | _TorchWorld


class _Optimizer:
    """Counts its steps."""

    def __init__(self, grads: list[Array]) -> None:
        self.grads = grads
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class Stages:
    """The work of this rank in each stage."""

    group: Collectives

    def __init__(self, world: _World, settings: Settings) -> None:
        self.world = world
        self._timeout, self._launched = settings["timeout"], settings["size"]

    def listed(self) -> list[Stage]:
        """Return the stages in order."""
        everyone, last = range(self.world.size), self.world.size - 1
        bad = "inf and NaN on each rank in turn: all skip"
        other = "another scale on each rank in turn: found on all"
        late = f"a rank that comes {_LATE:g} s late is waited for"
        return [
            Stage("report in", "ranks report in", self.report_in),
            Stage("make the group", "the group is made", self.join),
            *(
                Stage(f"{value} on rank {rank}", bad, partial(self.overflow, rank, value))
                for rank in everyone
                for value in (math.inf, math.nan)
            ),
            Stage("clean step", "clean gradients: all step", self.clean_step),
            *(Stage(f"other scale on rank {rank}", other, partial(self._drift, rank)) for rank in everyone if last),
            # It brings an inf that the others cannot know of before.
            Stage(f"late rank {last}", late, partial(self.overflow, last, math.inf, delay=_LATE)),
            Stage("latency", "latency of one agreement", self._latency),
        ]

    def warm_up(self) -> None:
        """Take a step alone, so that nobody waits for what is compiled or loaded at the first call."""
        self._step(gradscale.GradScaler(init_scale=SCALE), SCALE, wanted="stepped")

    def report_in(self) -> Report:
        """Say who this rank is."""
        report: Report = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": self.world.device,
            "cores": os.cpu_count() or 1,
            "gradscale": gradscale.__version__,
            "versions": {"python": platform.python_version()} | self.world.versions(),
        }
        if self.world.size == 1 and self._launched > 1:
            # It would pass for a check of all of them.
            report["error"] = (
                f"{self._launched} processes were started, and each is alone in its group: for MPI take the mpiexec "
                f"of the library that mpi4py uses (gradscale doctor mpi names it), for torch.distributed torchrun"
            )
        return report

    def join(self) -> Report:
        """Make the group that is checked."""
        self.group = registry.collectives_for(self.world.join(), self._timeout)
        return {}

    def overflow(self, bad: int, value: float, *, delay: float = 0.0) -> Report:
        """Step with a bad value on one rank, which may come late."""
        scaler = self._scaler(SCALE)
        is_bad = self.world.rank == bad
        time.sleep(delay if is_bad else 0.0)
        return self._step(scaler, value if is_bad else SCALE, wanted="skipped")

    def clean_step(self, scale: float = SCALE) -> Report:
        """Step with finite gradients, under the scale that all should have or another one."""
        try:
            return self._step(self._scaler(scale), SCALE, wanted="stepped")
        except gradscale.ScaleDesyncError as error:
            text = f"holds scale {scale!r} where {SCALE!r} is right: {error}"
            return {"error": text, "is_consequence": scale == SCALE}

    def _drift(self, drifted: int) -> Report:
        """Step under another scale on one rank, which every rank has to notice."""
        try:
            self._step(self._scaler(2 * SCALE if self.world.rank == drifted else SCALE), SCALE, wanted="stepped")
        except gradscale.ScaleDesyncError:
            return {}
        return {"error": f"did not notice that rank {drifted} holds another scale"}

    def _scaler(self, scale: float) -> gradscale.GradScaler:
        scaler = gradscale.ShardedGradScaler(group=self.group, init_scale=SCALE, timeout=self._timeout)
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
        return scaler

    def _step(self, scaler: gradscale.GradScaler, value: float, *, wanted: str) -> Report:
        """Make one iteration with a value among the gradients."""
        array = self.world.array
        optimizer = _Optimizer([array([SCALE] * 8, "float32"), array([SCALE, SCALE, value], "float16")])
        # Without it the scaler has no state yet.
        scaler.scale(optimizer.grads[0][:1])
        scaler.step(optimizer)
        scaler.update()
        done, right = ("stepped", SCALE) if optimizer.steps else ("skipped", SCALE / 2)
        if done != wanted:
            return {"error": f"{done} where every rank should have {wanted}"}
        found = scaler.get_scale()
        return {} if found == right else {"error": f"holds scale {found!r} where {right!r} is right"}

    def _latency(self) -> Report:
        # As long as the message of a scaler.
        message = self.world.array(range(vector.LENGTH), "int32")
        taken: list[float] = []
        for _ in range(_WARM_UP + _CALLS):
            begin = time.perf_counter()
            pending = self.group.start_max(message)
            pending()
            # For groups whose call makes only the stream wait.
            getattr(pending, "wait", lambda: None)()
            taken.append((time.perf_counter() - begin) * 1e6)
        taken = sorted(taken[_WARM_UP:])
        return {"median": statistics.median(taken), "p95": taken[math.ceil(0.95 * len(taken)) - 1]}


class _Supervisor:
    """The process that started this one: it knows the stage of this one, prints the page, and outlives it."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        # A launcher may end the supervisor of a rank that hangs.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    def tell(self, **message: Unpack[Message]) -> None:
        self._connection.send(message)

    def show(self, page: Page) -> None:
        self.tell(page=page)
        self._connection.poll(MARGIN)


class Conversation:
    """Goes through the stages in step with the other ranks."""

    def __init__(self, world: _World, supervisor: _Supervisor, settings: Settings) -> None:
        self._world, self._supervisor = world, supervisor
        self._timeout = settings["timeout"]
        self._words = 0
        self.is_deputy = False
        self.page = Page(
            ok=True,
            group=settings["group"],
            size=world.size,
            timeout=self._timeout,
            ranks=[],
            stages=[],
            latency=None,
            problems=[],
        )

    def run(self, stages: list[Stage]) -> bool:
        """Run the stages to the end or to the first problem, on every rank; return whether all went well."""
        begin = self._begin(stages[0])
        # The others learn that rank 0 is there, so that they wait for its judgement, which may take longer.
        if not self._world.rank:
            self.say(True)
        elif not self._hears(stages[0], begin + self._timeout):
            return False
        return all(self._passes(number, stage) for number, stage in enumerate(stages))

    def _passes(self, number: int, stage: Stage) -> bool:
        begin = self._begin(stage)
        try:
            report = stage.work()
        except Exception as error:
            is_consequence = isinstance(error, (CollectiveTimeoutError, BackendError))
            report = {"error": f"{type(error).__name__}: {error}", "is_consequence": is_consequence}
        if self._world.rank:
            self._report(number, report)
            return self._hears(stage, begin + self._timeout + 2 * MARGIN)
        # At first ranks need not come at the same time; then each one's collectives end by the timeout.
        end = time.monotonic() + self._timeout if number == 0 else begin + self._timeout + MARGIN
        reports = self._gather(number, report, end)
        problems = self._judge(reports)
        seconds = round(time.monotonic() - begin, 3)
        page = self.page
        page["stages"].append({"name": stage.name, "kind": stage.kind, "ok": not problems, "seconds": seconds})
        page["problems"] += [
            Problem(rank=one["rank"], problem=f"{one['problem']}, in: {stage.name}") for one in problems
        ]
        page["ok"] = not problems
        if number == 0:
            page["ranks"] = [{"rank": rank, **report} for rank, report in reports.items()]
        if problems:
            return False
        if stage.name == "latency":
            median, p95 = (max(report[key] for report in reports.values()) for key in ("median", "p95"))
            page["latency"] = {"median_us": round(median, 1), "p95_us": round(p95, 1), "calls": _CALLS}
        self.say(True)
        return True

    def _begin(self, stage: Stage) -> float:
        """Tell the supervisor where this rank is, and return the time."""
        # The others give a rank up sooner, and name it.
        self._supervisor.tell(stage=stage.name, limit=self._timeout + 5 * MARGIN)
        return time.monotonic()

    def _hears(self, stage: Stage, end: float) -> bool:
        """Wait for rank 0's word until some time; return whether to go on."""
        rank, size = self._world.rank, self._world.size
        # Rank 1 stands in for rank 0, and the others give it the time.
        with contextlib.suppress(ConnectionError, RuntimeError):
            for _ in _until(end + (MARGIN if rank > 1 else 0.0)):
                word = self._world.get(f"word {self._words}")
                if word is not None:
                    self._words += 1
                    return word["goes_on"]
        text = f"did not answer rank {rank} within {self._timeout:g} s, in: {stage.name}"
        self.page["ok"], self.page["problems"] = False, [Problem(rank=0, problem=text)]
        self.is_deputy = rank == 1
        if self.is_deputy:
            self._supervisor.show(self.page)
        else:
            self._supervisor.tell(line=f"rank 0 of {size}: {text}")
        return False

    def _judge(self, reports: Reports) -> list[Problem]:
        """Return the errors in the reports of a stage, or that some are missing."""
        missing = [rank for rank in range(self._world.size) if rank not in reports]
        if missing:
            return [Problem(rank=rank, problem=f"did not answer within {self._timeout:g} s") for rank in missing]
        failed = {rank: report for rank, report in reports.items() if "error" in report}
        # A rank that waited in vain for one that failed is not to blame.
        blamed = {rank: report for rank, report in failed.items() if not report.get("is_consequence")} or failed
        if blamed:
            return [Problem(rank=rank, problem=report["error"]) for rank, report in blamed.items()]
        right = reports[0].get("gradscale")
        versions = {rank: report.get("gradscale") for rank, report in reports.items()}
        return [
            Problem(
                rank=rank, problem=f"has gradscale {version}, and rank 0 has {right}: install one version everywhere"
            )
            for rank, version in versions.items()
            if version != right
        ]

    def _gather(self, number: int, own: Report, end: float) -> Reports:
        """Return the reports of a stage that have come by some time, in the order of ranks."""
        found = {0: own}
        for _ in _until(end):
            for rank in range(self._world.size):
                if rank not in found and (report := self._world.get(f"report {number} {rank}")) is not None:
                    found[rank] = report
            if len(found) == self._world.size:
                break
        return dict(sorted(found.items()))

    def _report(self, number: int, report: Report) -> None:
        self._world.put(f"report {number} {self._world.rank}", report)

    def say(self, goes_on: bool) -> None:
        """Tell the other ranks whether to go on; on rank 0."""
        self._world.put(f"word {self._words}", {"goes_on": goes_on})
        self._words += 1

    def part(self) -> None:
        """Say goodbye; rank 0 waits for all, since the store of their messages may be in its process."""
        if self._world.rank:
            self._report(_GOODBYE, {})
        else:
            self._supervisor.show(self.page)
            self._gather(_GOODBYE, {}, time.monotonic() + MARGIN)


def _until(end: float) -> Iterator[None]:
    """Yield until a time of the monotonic clock, and once after it."""
    while time.monotonic() < end:
        yield
        time.sleep(_PAUSE)
    yield


def main(settings: Settings) -> None:
    """Run one rank; its supervisor takes the exit code from its last message."""
    group, timeout = settings["group"], settings["timeout"]
    supervisor = _Supervisor(settings["descriptor"])
    try:
        world: _World = _MPIWorld() if group == "mpi" else _TorchWorld(timeout)
        stages = Stages(world, settings)
        stages.warm_up()
        supervisor.tell(stage=world.entrance, limit=timeout + MARGIN)
        world.enter()
    except (ImportError, RuntimeError, OSError, KeyError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        if group == "torch" and "RANK" not in os.environ:
            first += ": start it with torchrun --nproc-per-node 2 -m gradscale check --group torch"
        supervisor.tell(line=f"cannot join the group over {group}: {type(error).__name__}: {first}", end=1)
        os._exit(1)
    supervisor.tell(rank=world.rank, size=world.size)
    conversation = Conversation(world, supervisor, settings)
    if conversation.run(stages.listed()):
        conversation.part()
        supervisor.tell(end=0)
        world.leave(0)
        return
    if world.rank == 0:
        supervisor.show(conversation.page)
        with contextlib.suppress(Exception):
            conversation.say(False)
    supervisor.tell(end=1)
    # All others leave on rank 0's word, or are ended by an abort; the store of the words may be in this process.
    time.sleep(_LEAVING if world.rank == 0 or conversation.is_deputy else 2 * MARGIN)
    world.leave(1)
    os._exit(1)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        os._exit(130)
