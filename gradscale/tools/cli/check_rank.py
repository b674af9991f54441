"""One rank of a check: its stages, and rank 0's page of all ranks' reports.

A collective that some rank does not come to tells nobody which one it is. So every rank also reports to rank 0 outside
of the group that is checked: by messages of its own over MPI, or by the store of torch.distributed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import gradscale
from gradscale.core import registry
from gradscale.core.protocols import Array, Collectives
from gradscale.errors import BackendError, CollectiveTimeoutError
from gradscale.scaler import claim as claims
from gradscale.tools.cli.output import error_line
from gradscale.tools.cli.probe import mpi_library

END = "its end"
"""The message after the last stage, with the complete page."""

MPIEXEC = "mpiexec -n 4 python -m gradscale check --group mpi"
TORCHRUN = "torchrun --nproc-per-node 2 -m gradscale check --group torch"
"""How a check is started."""

MARGIN = 2.0
"""Seconds for a report to reach rank 0. A rank that failed leaves it three times that to name the rank to blame."""

SCALE = 1024.0
"""The scale that all ranks begin with."""

_PAUSE = 2e-3  # seconds
_LATE = 0.3
_WARM_UP = 20
_CALLS = 200

Report: TypeAlias = dict[str, Any]
"""A rank's report to rank 0 on a stage: an ``error``, and whether it ``is_consequence``, or what was asked for."""

Page: TypeAlias = dict[str, Any]
"""The result of a check, as ``check --json`` prints it but for the notes."""


class _MPIWorld:
    """The ranks of MPI.COMM_WORLD: who they are, and messages between them that need no collective."""

    device = "cpu"  # of the gradients, for people
    entrance = "MPI_Init"  # what enter() waits in, for people
    # Known once it is entered.
    rank, size = 0, 1

    def enter(self) -> None:
        """Become one of the ranks."""
        # It initializes MPI, which waits for all ranks, however long it takes.
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        # Requests and buffers live as long as this.
        self._sent: list[Any] = []

    def join(self) -> object:
        """Return the group; collective over all ranks."""
        return self._comm

    def array(self, values: Sequence[float], dtype: str) -> Array:
        """Return an array on this rank's device, also before it is entered."""
        import numpy as np

        return np.array(values, dtype)

    def versions(self) -> dict[str, str]:
        """Return the versions of the group's libraries."""
        return {"numpy": version("numpy"), "mpi4py": version("mpi4py"), "MPI": mpi_library()}

    def put(self, number: int, report: Report) -> None:
        """Leave the report of a stage for rank 0."""
        self._sent.append(self._comm.isend(report, 0, number))

    def get(self, rank: int, number: int) -> Report | None:
        """Return the report of a rank on a stage, or None if it has not come yet."""
        message = self._comm.improbe(rank, number)
        return None if message is None else message.recv()

    def leave(self) -> None:
        """Leave the group, after rank 0 has had all reports."""
        for request in self._sent:
            request.wait()

    def abort(self) -> None:
        """End all ranks, as far as the group's library can."""
        self._comm.Abort(1)


class _TorchWorld:
    """The ranks of torch's default process group, as torchrun starts them; the methods are those of _MPIWorld."""

    entrance = "the connection to the store"
    rank, size = 0, 1

    def __init__(self, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._dist: Any = dist
        torch.set_num_threads(1)
        place, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        has_nccl = torch.cuda.is_available() and torch.cuda.device_count() >= here and dist.is_nccl_available()
        self._backend = "nccl" if has_nccl else "gloo"
        self._device = torch.device("cuda", place) if has_nccl else torch.device("cpu")
        self.device = "cpu"
        if has_nccl:
            torch.cuda.set_device(self._device)
            self.device = f"{self._device} {torch.cuda.get_device_name(self._device)}"
        self._timeout = timedelta(seconds=timeout)

    def enter(self) -> None:
        # As init_process_group does it by default: by what torchrun leaves in the environment.
        self._store, self.rank, self.size = next(self._dist.rendezvous("env://", timeout=self._timeout))
        # A rank that comes much sooner must not give up before rank 0 can say who is missing.
        if self.rank == 0:
            self._store.set("rank 0", "is here")
        self._store.wait(["rank 0"], self._timeout)

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
        return {"torch": version("torch"), "backend": self._backend}

    def put(self, number: int, report: Report) -> None:
        self._store.set(f"{self.rank} {number}", json.dumps(report))

    def get(self, rank: int, number: int) -> Report | None:
        key = f"{rank} {number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def leave(self) -> None:
        # The store of the reports may be in the process of rank 0.
        self._dist.barrier()
        self._dist.destroy_process_group()

    def abort(self) -> None:
        # Their launcher ends the other ranks.
        os._exit(1)


class _Optimizer:
    grads: list[Array]

    def step(self) -> str:
        """Say that it was called."""
        return "stepped"


class Rank:
    """The stages of a check on one rank; the work of a stage returns an error if it did not go as it should."""

    group: Collectives

    def __init__(self, world: _MPIWorld | _TorchWorld, timeout: float, launched: int) -> None:
        self.world, self._timeout, self._launched = world, timeout, launched

    def run(self, page: Page, tell: Callable[[str], None]) -> None:
        """Go through the stages to the end or to the first problem, after telling the name of each, and fill the page.

        On rank 0 it is that of all ranks, else that of this one.
        """
        rank, page["size"] = self.world.rank, self.world.size
        for number, (name, kind, work) in enumerate(self._stages()):
            tell(name)
            begin = time.monotonic()
            try:
                report = work()
            except Exception as error:
                is_consequence = isinstance(error, (CollectiveTimeoutError, BackendError))
                report = {"error": f"{type(error).__name__}: {error}", "is_consequence": is_consequence}
            reports = {rank: report}
            if rank:
                self.world.put(number, report)
            else:
                self._receive(reports, number, begin + self._timeout + MARGIN)
            problems = self._judge(reports)
            page["ok"] = not problems
            page["problems"] = [{"rank": bad, "problem": f"{problems[bad]}, in: {name}"} for bad in sorted(problems)]
            seconds = round(time.monotonic() - begin, 3)
            page["stages"].append({"name": name, "kind": kind, "ok": not problems, "seconds": seconds})
            if number == 0:
                page["ranks"] = [{"rank": one, **reports[one]} for one in sorted(reports)]
            if problems:
                return
        median, p95 = (round(max(report[key] for report in reports.values()), 1) for key in ("median", "p95"))
        page["latency"] = {"median_us": median, "p95_us": p95, "calls": _CALLS}

    def _stages(self) -> list[tuple[str, str, Callable[[], Report]]]:
        """Return the name, the kind and the work of each stage, in order."""
        everyone, last = range(self.world.size), self.world.size - 1
        bad = "inf and NaN on each rank in turn: all skip"
        other = "another scale on each rank in turn: found on all"
        late = f"a rank that comes {_LATE:g} s late is waited for"
        return [
            ("report in", "ranks report in", self.report_in),
            ("make the group", "the group is made", self.join),
            *(
                (f"{value} on rank {rank}", bad, partial(self.overflow, rank, value))
                for rank in everyone
                for value in (math.inf, math.nan)
            ),
            ("clean step", "clean gradients: all step", self.clean_step),
            *((f"other scale on rank {rank}", other, partial(self._drift, rank)) for rank in everyone if last),
            # It brings an inf that the others cannot know of before.
            (f"late rank {last}", late, partial(self.overflow, last, math.inf, delay=_LATE)),
            ("latency", "latency of one agreement", self._latency),
        ]

    def _receive(self, reports: dict[int, Report], number: int, end: float) -> None:
        """Add the reports of the other ranks on a stage that come by some time."""
        while len(reports) < self.world.size and time.monotonic() < end:
            for rank in range(1, self.world.size):
                if rank not in reports and (report := self.world.get(rank, number)) is not None:
                    reports[rank] = report
            time.sleep(_PAUSE)

    def _judge(self, reports: dict[int, Report]) -> dict[int, str]:
        """Return the faults by rank: errors in the reports of a stage, or on rank 0 that some are missing."""
        missing = set() if self.world.rank else set(range(self.world.size)) - reports.keys()
        if missing:
            return dict.fromkeys(missing, f"did not answer within {self._timeout:g} s")
        failed = {rank: report for rank, report in reports.items() if "error" in report}
        # A rank that waited in vain for one that failed is not to blame.
        blamed = {rank: report for rank, report in failed.items() if not report.get("is_consequence")} or failed
        if blamed:
            return {rank: report["error"] for rank, report in blamed.items()}
        versions = {rank: report["gradscale"] for rank, report in reports.items() if "gradscale" in report}
        text = f"has gradscale {{}}, and rank 0 has {versions.get(0)}: install one version everywhere"
        return {rank: text.format(one) for rank, one in versions.items() if one != versions.get(0, one)}

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
        optimizer = _Optimizer()
        optimizer.grads = [array([SCALE] * 8, "float32"), array([SCALE, SCALE, value], "float16")]
        # Without it the scaler has no state yet.
        scaler.scale(optimizer.grads[0][:1])
        done = scaler.step(optimizer) or "skipped"
        scaler.update()
        if done != wanted:
            return {"error": f"{done} where every rank should have {wanted}"}
        found, right = scaler.get_scale(), SCALE if done == "stepped" else SCALE / 2
        return {} if found == right else {"error": f"holds scale {found!r} where {right!r} is right"}

    def _latency(self) -> Report:
        # As long as the message of a scaler.
        message = self.world.array(range(claims.LENGTH), "int32")
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


def named(rank: int, size: int, process: int) -> str:
    """Return a rank of this host for people."""
    return f"rank {rank} of {size} ({socket.gethostname()}, process {process})"


def _hear(parent: Connection) -> None:
    """Return when the parent process has printed the page of a rank that failed; end this one when it is gone."""
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)


def main(group: str, timeout: float, place: int, launched: int, descriptor: int) -> None:
    """Run one rank, whose place among how many is the launcher's word; tell the parent process how it gets on."""
    parent = Connection(descriptor)
    hearing = threading.Thread(target=_hear, args=(parent,), daemon=True)
    hearing.start()
    page: Page = {"ok": True, "group": group, "timeout": timeout, "ranks": [], "stages": [], "latency": None}
    try:
        world = _MPIWorld() if group == "mpi" else _TorchWorld(timeout)
        rank = Rank(world, timeout, launched)
        rank.warm_up()
        parent.send((world.entrance, timeout + MARGIN, place, launched, None))
        world.enter()
    except (ImportError, RuntimeError, OSError, KeyError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        if group == "torch" and "RANK" not in os.environ:
            first += f": start it with {TORCHRUN}"
        reason = f"cannot join the group over {group}: {type(error).__name__}: {first}"
        error_line(f"check: {named(place, launched, os.getpid())} {reason}")
        parent.send((END, timeout, place, launched, None))
        os._exit(1)
    place, limit = world.rank, timeout + (5 if world.rank else 2) * MARGIN
    rank.run(page, lambda stage: parent.send((stage, limit, place, world.size, page)))
    if not page["ok"] and place:
        # Rank 0 names the rank to blame and ends all; or it is gone.
        time.sleep(3 * MARGIN)
        error_line(f"check: {named(place, world.size, os.getpid())}: {page['problems'][0]['problem']}")
    parent.send((END, limit, place, world.size, page))
    if not page["ok"]:
        hearing.join()
        world.abort()
    world.leave()


if __name__ == "__main__":
    try:
        main(*json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        os._exit(130)
