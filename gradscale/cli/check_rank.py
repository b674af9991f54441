"""One rank of a check: the stages that it goes through with the others, and what rank 0 makes of their reports.

``check`` starts it as a process of its own, so that someone is left to say so when it is killed, hangs in a library or
waits in MPI_Init: ``python -m gradscale.cli.check_rank SETTINGS``, with the settings as JSON.

A collective that some rank does not come to tells nobody which one it is. So every rank reports to rank 0 beside the
group that is checked, by messages of its own over MPI or by the store of torch.distributed, and rank 0 knows who has
not.
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gradscale
from gradscale.cli.launchers import largest_launched_size
from gradscale.cli.probe import mpi_library
from gradscale.core import registry
from gradscale.errors import BackendError, BackendNotAvailableError, CollectiveTimeoutError

__all__ = ["FAULTS", "MARGIN", "main"]

FAULTS = ("late", "hang", "die", "desync", "verdict", "version")
"""What can be made to fail on purpose."""

MARGIN = 2.0
"""Seconds for a report to reach rank 0; the others give rank 0 up after twice that, and a rank is killed after five."""

_PAUSES = (1e-3, 2e-2)  # seconds, the first and the longest
_LEAVING = 0.3
_LATE = 0.3
_FOR_EVER = 1e6
_GOODBYE = -1  # after all stages
_TAG = 1  # of messages over MPI
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SCALE = 1024.0
_WARM_UP = 20
_CALLS = 200

_Reports = dict[int, dict[str, Any]]
# A rank and what is wrong with it; None for what no single rank can be blamed for.
_Problem = tuple[int | None, str]


class _Stage(NamedTuple):
    """One step of the check."""

    name: str
    kind: str  # stages of one kind are one line of the page
    work: Callable[[], dict[str, Any]]  # what each rank does; returns its report, as plain Python values
    judge: Callable[[_Reports], list[_Problem]]  # what rank 0 finds wrong in the reports of all ranks


class _MPIWorld:
    """The ranks of MPI.COMM_WORLD: who they are, and messages between them that need no collective."""

    device = "cpu"  # what the gradients are on, for people
    entrance = "MPI_Init"  # what enter() waits in, for people

    def __init__(self) -> None:
        # Known once it is entered.
        self.rank, self.size = 0, 1
        self._comm: Any = None
        self._received: dict[str, Any] = {}
        # Requests and buffers live as long as this.
        self._sent: list[Any] = []

    def enter(self) -> None:
        """Become one of the ranks."""
        # It initializes MPI, which waits for all ranks, however long it takes.
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size

    def join(self) -> Any:
        """Return the group; collective over all ranks."""
        return self._comm

    def array(self, values: list[Any], dtype: str) -> Any:
        """Return an array on this rank's device, also before it is entered."""
        import numpy as np

        return np.array(values, dtype)

    def versions(self) -> dict[str, str]:
        """Return the versions of what the group is made with."""
        found = {name: importlib.metadata.version(name) for name in ("numpy", "mpi4py")}
        return found | {"MPI": mpi_library()}

    def put(self, key: str, value: Any) -> None:
        """Leave a message under a key: rank 0 for all others, each of those for rank 0."""
        others = (0,) if self.rank else range(1, self.size)
        self._sent += [self._comm.isend((key, value), rank, _TAG) for rank in others]

    def get(self, key: str) -> Any:
        """Return the message under a key, or None if it has not come yet."""
        while (found := self._comm.improbe(tag=_TAG)) is not None:
            sent_key, value = found.recv()
            self._received[sent_key] = value
        return self._received.get(key)

    def leave(self, code: int) -> None:
        """Leave the group; with a code other than 0, end all ranks, as far as the group's library can."""
        if code:
            self._comm.Abort(code)
        for request in self._sent:
            request.wait()


class _TorchWorld:
    """The ranks of torch's default process group, as torchrun starts them; the methods are those of _MPIWorld.

    The backend is one of torch.distributed's: None for NCCL where each rank of this machine has a CUDA device of its
    own, else gloo.
    """

    entrance = "the connection to the store"

    def __init__(self, backend: str | None, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        torch.set_num_threads(1)
        self.rank, self.size, place, here = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
        )
        has_nccl = torch.cuda.is_available() and torch.cuda.device_count() >= here and dist.is_nccl_available()
        self._backend = backend or ("nccl" if has_nccl else "gloo")
        self._device = torch.device("cpu")
        self.device = "cpu"
        if self._backend == "nccl":
            if not has_nccl:
                msg = (
                    f"nccl needs a CUDA device for each rank of this machine, got {torch.cuda.device_count()} for "
                    f"{here}; leave --backend out, or give --backend gloo"
                )
                raise BackendNotAvailableError(msg)
            self._device = torch.device("cuda", place)
            torch.cuda.set_device(self._device)
            self.device = f"{self._device} {torch.cuda.get_device_name(self._device)}"
        self._store: Any = None
        self._timeout = timedelta(seconds=timeout)

    def enter(self) -> None:
        dist: Any = self._dist
        environment = os.environ
        if "WORLD_SIZE" not in environment:
            self._store = dist.HashStore()
            return
        # torchrun keeps the store itself; other launchers leave that to rank 0.
        is_kept = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            environment["MASTER_ADDR"],
            int(environment["MASTER_PORT"]),
            self.size,
            self.rank == 0 and not is_kept,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        self._store = dist.PrefixStore(f"gradscale check {environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def join(self) -> Any:
        self._dist.init_process_group(
            self._backend,
            store=self._dist.PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=self._timeout,
        )
        return self._dist.group.WORLD

    def array(self, values: list[Any], dtype: str) -> Any:
        return self._torch.tensor(values, dtype=getattr(self._torch, dtype), device=self._device)

    def versions(self) -> dict[str, str]:
        return {"torch": str(self._torch.__version__), "backend": self._backend}

    def put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def leave(self, code: int) -> None:
        # torch has no way to end the other ranks, which their launcher does.
        if not code:
            self._dist.destroy_process_group()


_World = _MPIWorld | _TorchWorld


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


class _Stages:
    """What this rank does in each stage, with a fault or without, and how the reports are judged."""

    def __init__(self, world: _World, fault: tuple[str, int], timeout: float) -> None:
        self._world = world
        self._fault = fault
        self._timeout = timeout
        self._group: Any = None

    def has(self, kind: str) -> bool:
        """Tell whether this rank is to fail so."""
        return self._fault == (kind, self._world.rank)

    def listed(self) -> list[_Stage]:
        """Return the stages in order, the first one before the group is made."""
        own, everyone, last = self._world.rank, range(self._world.size), self._world.size - 1
        overflow = partial(_judge_steps, steps=0, scale=_SCALE / 2)
        return [
            _Stage("report in", "ranks report in", self._report_in, self._judge_versions),
            _Stage("make the group", "the group is made", self._join, _judge_group),
            *(
                _Stage(
                    f"{value} on rank {bad}",
                    "inf and NaN on each rank in turn: all skip",
                    partial(self._overflow, bad, value),
                    partial(overflow, bad=bad),
                )
                for bad in everyone
                for value in (math.inf, math.nan)
            ),
            _Stage(
                "clean step",
                "clean gradients: all step",
                partial(self._clean_step, has_drifted=self.has("desync")),
                partial(_judge_steps, steps=1, scale=_SCALE),
            ),
            *(
                _Stage(
                    f"other scale on rank {drifted}",
                    "another scale on each rank in turn: found on all",
                    partial(self._clean_step, has_drifted=own == drifted),
                    partial(_judge_desync, drifted),
                )
                for drifted in (everyone if last else ())
            ),
            # It brings an inf that the others cannot know of before.
            _Stage(
                f"late rank {last}",
                f"a rank that comes {_LATE:g} s late is waited for",
                partial(self._step, math.inf, delay=_LATE) if own == last else partial(self._step, _SCALE),
                partial(overflow, bad=last),
            ),
            _Stage("latency", "latency of one agreement", self._latency, lambda _: []),
        ]

    def warm_up(self) -> None:
        """Take a step alone: what is compiled or loaded at the first call is no time that others wait for."""
        self._iterate(gradscale.GradScaler(init_scale=_SCALE), _SCALE)

    def _report_in(self) -> dict[str, Any]:
        if self.has("late"):
            time.sleep(_FOR_EVER)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": self._world.device,
            "cores": os.cpu_count() or 1,
            "launched": largest_launched_size(),
            "gradscale": "0.0.0 (on purpose)" if self.has("version") else gradscale.__version__,
            "versions": {"python": platform.python_version()} | self._world.versions(),
        }

    def _judge_versions(self, reports: _Reports) -> list[_Problem]:
        right, launched = reports[0]["gradscale"], reports[0]["launched"]
        problems: list[_Problem] = [
            (rank, f"has gradscale {report['gradscale']}, and rank 0 has {right}: install one version everywhere")
            for rank, report in reports.items()
            if report["gradscale"] != right
        ]
        if len(reports) == 1 and launched > 1:
            # What all would take for a check of one rank that has passed.
            alone = (
                f"{launched} processes were started, and each is alone in its group: for MPI take the mpiexec of the "
                f"library that mpi4py uses (gradscale doctor mpi names it), for torch.distributed torchrun"
            )
            problems.append((None, alone))
        if self._fault[1] >= len(reports):
            problems.append((None, f"--fault names rank {self._fault[1]}, and there are {len(reports)} ranks, from 0"))
        return problems

    def _join(self) -> dict[str, Any]:
        self._group = registry.collectives_for(self._world.join(), self._timeout)
        return {"rank": self._group.rank, "size": self._group.size}

    def _overflow(self, bad: int, value: float) -> dict[str, Any]:
        if bad == 0 and self.has("hang"):
            time.sleep(_FOR_EVER)
        if bad == 0 and self.has("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._step(value if self._world.rank == bad else _SCALE)

    def _clean_step(self, *, has_drifted: bool) -> dict[str, Any]:
        own = 2 * _SCALE if has_drifted else _SCALE
        try:
            return self._step(_SCALE, scale=own)
        except gradscale.ScaleDesyncError as error:
            return {"desync": str(error), "scale": own}

    def _step(self, value: float, *, scale: float = _SCALE, delay: float = 0.0) -> dict[str, Any]:
        """Take one step of a new scaler with a value among the gradients."""
        group = _Deaf(self._group) if self.has("verdict") else self._group
        scaler = gradscale.ShardedGradScaler(group=group, init_scale=_SCALE, timeout=self._timeout)
        if scale != _SCALE:
            scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
        time.sleep(delay)
        return self._iterate(scaler, value)

    def _iterate(self, scaler: gradscale.GradScaler, value: float) -> dict[str, Any]:
        array = self._world.array
        optimizer = _Optimizer([array([_SCALE] * 8, "float32"), array([_SCALE, _SCALE, value], "float16")])
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

    def _latency(self) -> dict[str, Any]:
        # As long as what a scaler agrees on.
        message = self._world.array(list(range(16)), "int32")
        taken: list[float] = []
        for _ in range(_WARM_UP + _CALLS):
            begin = time.perf_counter()
            pending = self._group.start_max(message)
            pending()
            # Where only the stream waits.
            getattr(pending, "wait", lambda: None)()
            taken.append((time.perf_counter() - begin) * 1e6)
        taken = sorted(taken[_WARM_UP:])
        return {"median": statistics.median(taken), "p95": taken[math.ceil(0.95 * len(taken)) - 1], "calls": _CALLS}


def _judge_group(reports: _Reports) -> list[_Problem]:
    return [
        (rank, f"is rank {report['rank']} of {report['size']} of the group, not {rank} of {len(reports)}")
        for rank, report in reports.items()
        if (report["rank"], report["size"]) != (rank, len(reports))
    ]


def _judge_steps(reports: _Reports, *, steps: int, scale: float, bad: int | None = None) -> list[_Problem]:
    """Name the ranks that did not do, or do not hold, what all should."""
    desyncs = {rank: report for rank, report in reports.items() if "desync" in report}
    if desyncs:
        odd = {rank: report for rank, report in desyncs.items() if report["scale"] != _SCALE} or desyncs
        return [
            (rank, f"holds scale {report['scale']!r} where {_SCALE!r} is right: {report['desync']}")
            for rank, report in odd.items()
        ]
    problems: list[_Problem] = []
    for rank, report in reports.items():
        if report["steps"] != steps:
            done = "stepped" if report["steps"] > steps else "skipped"
            problems.append((rank, f"{done} where every rank should have {'skipped' if not steps else 'stepped'}"))
        elif report["scale"] != scale:
            problems.append((rank, f"holds scale {report['scale']!r} where {scale!r} is right"))
        elif report["saw"] != (rank == bad):
            problems.append((rank, f"found {'inf or NaN' if report['saw'] else 'nothing'} in its own gradients"))
    if problems:
        return problems
    states = {rank: repr(report["state"]) for rank, report in reports.items()}
    usual = Counter(states.values()).most_common(1)[0][0]
    return [
        (rank, f"holds another state than most ranks: {state}, not {usual}")
        for rank, state in states.items()
        if state != usual
    ]


def _judge_desync(drifted: int, reports: _Reports) -> list[_Problem]:
    problems: list[_Problem] = []
    for rank, report in reports.items():
        own = 2 * _SCALE if rank == drifted else _SCALE
        wanted = (f"scale from {_SCALE!r} to {2 * _SCALE!r}", f"here {own!r}", f"rank {rank} of {len(reports)}")
        if "desync" not in report:
            problems.append((rank, f"did not notice that rank {drifted} holds another scale"))
        elif not all(part in report["desync"] for part in wanted):
            problems.append((rank, f"noticed another scale on rank {drifted}, and said: {report['desync']}"))
    return problems


class _Supervisor:
    """The process that started this one: it is told where this one is, prints the page, and outlives it."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._answered = threading.Event()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self._connection.recv():
                self._answered.set()
        # A rank whose supervisor has ended has no business left.
        os._exit(1)

    def tell(self, **message: Any) -> None:
        self._connection.send(message)

    def show(self, page: dict[str, Any]) -> None:
        self.tell(page=page)
        self._answered.wait(MARGIN)


class _Conversation:
    """Goes through the stages in step with the other ranks."""

    def __init__(self, world: _World, supervisor: _Supervisor, settings: dict[str, Any]) -> None:
        self._world, self._supervisor = world, supervisor
        self._timeout: float = settings["timeout"]
        self._words = 0
        self.is_deputy = False
        self.page: dict[str, Any] = {
            "ok": True,
            "group": settings["group"],
            "size": world.size,
            "timeout": self._timeout,
            "ranks": [],
            "stages": [],
            "latency": None,
            "problems": [],
        }

    def run(self, stages: _Stages) -> bool:
        """Run the stages to the end or to the first problem, on every rank; whether all went well."""
        listed = stages.listed()
        begin = self._begin(listed[0])
        # The others are told that rank 0 is there, so that they wait for its judgement, which may take longer.
        if self._world.rank and not self._listen(listed[0], begin + self._timeout):
            return False
        if self._world.rank == 0 and not stages.has("late"):
            self.say(True)
        return all(self._take(number, stage) for number, stage in enumerate(listed))

    def _take(self, number: int, stage: _Stage) -> bool:
        """Go through one stage; whether to go on."""
        begin = self._begin(stage)
        try:
            report = stage.work()
        except Exception as error:
            is_consequence = isinstance(error, (CollectiveTimeoutError, BackendError))
            report = {"error": f"{type(error).__name__}: {error}", "consequence": is_consequence}
        if self._world.rank:
            self._report(number, report)
            return self._listen(stage, begin + self._timeout + 2 * MARGIN)
        # At first ranks need not come at the same time; then each one's collectives end by the timeout.
        end = time.monotonic() + self._timeout if number == 0 else begin + self._timeout + MARGIN
        reports = self._gather(number, report, end)
        problems = self._judge(stage, reports)
        seconds = round(time.monotonic() - begin, 3)
        self.page["stages"].append({"name": stage.name, "kind": stage.kind, "ok": not problems, "seconds": seconds})
        self.page["problems"] += [{"rank": rank, "problem": f"{text}, in: {stage.name}"} for rank, text in problems]
        self.page["ok"] = not problems
        if number == 0:
            self.page["ranks"] = [{"rank": rank} | report for rank, report in reports.items()]
        if problems:
            return False
        if stage.name == "latency":
            slowest = max(reports.values(), key=lambda report: report["median"])
            self.page["latency"] = {
                "median_us": round(slowest["median"], 1),
                "p95_us": round(max(report["p95"] for report in reports.values()), 1),
                "calls": slowest["calls"],
            }
        self.say(True)
        return True

    def _begin(self, stage: _Stage) -> float:
        """Tell the supervisor where this rank is, and return the time."""
        # The others give a rank up sooner, and name it.
        self._supervisor.tell(stage=stage.name, limit=self._timeout + 5 * MARGIN)
        return time.monotonic()

    def _listen(self, stage: _Stage, end: float) -> bool:
        """Wait for rank 0's word until a time of the monotonic clock; whether to go on."""
        rank, size = self._world.rank, self._world.size
        # Rank 1 stands in for rank 0, and the others give it the time.
        with contextlib.suppress(ConnectionError, RuntimeError):
            for _ in _until(end + (MARGIN if rank > 1 else 0.0)):
                word = self._world.get(f"word {self._words}")
                if word is not None:
                    self._words += 1
                    return bool(word)
        problem = f"did not answer rank {rank} within {self._timeout:g} s, in: {stage.name}"
        self.page |= {"ok": False, "problems": [{"rank": 0, "problem": problem}]}
        self.is_deputy = rank == 1
        if self.is_deputy:
            self._supervisor.show(self.page)
        else:
            self._supervisor.tell(line=f"rank 0 of {size}: {problem}")
        return False

    def _judge(self, stage: _Stage, reports: _Reports) -> list[_Problem]:
        """Return what is wrong in the reports of a stage, or that some are missing."""
        missing = [rank for rank in range(self._world.size) if rank not in reports]
        if missing:
            return [(rank, f"did not answer within {self._timeout:g} s") for rank in missing]
        failed = {rank: report for rank, report in reports.items() if "error" in report}
        # Who waited in vain for a rank that failed is not to blame.
        blamed = {rank: report for rank, report in failed.items() if not report["consequence"]} or failed
        return [(rank, report["error"]) for rank, report in blamed.items()] or stage.judge(reports)

    def _gather(self, number: int, own: dict[str, Any], end: float) -> _Reports:
        """Return the reports of a stage in the order of ranks, having waited for all of them until some time."""
        found = {0: own}
        for _ in _until(end):
            for rank in range(self._world.size):
                if rank not in found and (report := self._world.get(f"report {number} {rank}")) is not None:
                    found[rank] = report
            if len(found) == self._world.size:
                break
        return dict(sorted(found.items()))

    def _report(self, number: int, report: dict[str, Any]) -> None:
        """Let rank 0 have what this rank has found in a stage."""
        self._world.put(f"report {number} {self._world.rank}", report)

    def say(self, goes_on: bool) -> None:
        """Tell the other ranks whether to go on; on rank 0."""
        self._world.put(f"word {self._words}", goes_on)
        self._words += 1

    def part(self) -> None:
        """Say goodbye; rank 0 waits for all, since the store of their messages may be in its process."""
        if self._world.rank:
            self._report(_GOODBYE, {})
        else:
            self._supervisor.show(self.page)
            self._gather(_GOODBYE, {}, time.monotonic() + MARGIN)


def _until(end: float) -> Iterator[None]:
    """Yield until a time of the monotonic clock, more and more seldom: ranks may share a core."""
    pause, longest = _PAUSES
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(2 * pause, longest)
    yield


def main() -> None:
    """Run one rank; its supervisor makes the exit code of what it is told."""
    settings = json.loads(sys.argv[1])
    group, timeout = settings["group"], settings["timeout"]
    supervisor = _Supervisor(settings["descriptor"])
    try:
        world: _World = _MPIWorld() if group == "mpi" else _TorchWorld(settings["backend"], timeout)
        kind, rank = settings["fault"]
        stages = _Stages(world, (kind, rank), timeout)
        stages.warm_up()
        supervisor.tell(stage=world.entrance, limit=timeout + MARGIN)
        world.enter()
    except (ImportError, RuntimeError, OSError, KeyError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        supervisor.tell(line=f"cannot join the group over {group}: {type(error).__name__}: {first}", end=1)
        os._exit(1)
    supervisor.tell(rank=world.rank, size=world.size)
    conversation = _Conversation(world, supervisor, settings)
    if conversation.run(stages):
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
        main()
    except KeyboardInterrupt:
        os._exit(130)
