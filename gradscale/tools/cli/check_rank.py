"""One rank of a check: its stages, and rank 0's page of all ranks' reports.

A collective that some rank does not come to tells nobody which one it is. So every rank also reports to rank 0 outside
of the group that is checked: by messages of its own over MPI, or by the store of torch.distributed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import threading
import time
import timeit
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from array_api_compat import array_namespace
from array_api_compat import device as device_of

import gradscale
from gradscale.core import registry
from gradscale.core.protocols import Array, Collectives
from gradscale.errors import BackendError, CollectiveTimeoutError
from gradscale.scaler import claim as claims
from gradscale.tools.cli.output import error_line
from gradscale.tools.cli.probe import mpi_library

END = "its end"
"""The message after the last stage, with the complete page."""

LAUNCHERS = {
    "mpi": "mpiexec -n 4 python -m gradscale check --group mpi",
    "torch": "torchrun --nproc-per-node 2 -m gradscale check --group torch",
}
"""How a check of each group is started."""

MARGIN = 2.0
"""Seconds for a report to reach rank 0."""

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_SCALE = 1024.0

Report: TypeAlias = dict[str, Any]
"""A rank's report to rank 0 on a stage: an ``error``, and whether it ``is_consequence``, or the stage's results."""


class _MPIWorld:
    """The ranks of MPI.COMM_WORLD: who they are, and messages between them that need no collective."""

    def enter(self) -> None:
        # The import initializes MPI, which waits for all ranks, however long it takes.
        from mpi4py import MPI

        self.group: Any = MPI.COMM_WORLD
        self.rank, self.size = self.group.rank, self.group.size

    def versions(self) -> dict[str, str]:
        return {"numpy": version("numpy"), "mpi4py": version("mpi4py"), "MPI": mpi_library()}

    def send(self, number: int, report: Report) -> None:
        """Leave the report of a stage for rank 0."""
        self.group.send(report, 0, number)

    def get(self, rank: int, number: int) -> Report | None:
        """Return the report of a rank on a stage, or None if it has not come yet."""
        message = self.group.improbe(rank, number)
        return None if message is None else message.recv()

    def leave(self) -> None:
        """Leave the group, after rank 0 has had all reports."""


class _TorchWorld:
    """The ranks of torch's default process group, as torchrun starts them; the methods are those of _MPIWorld."""

    def __init__(self, timeout: float) -> None:
        import torch
        import torch.distributed as dist

        self._dist: Any = dist
        has_nccl = dist.is_nccl_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._backend = "nccl" if has_nccl else "gloo"
        if has_nccl:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            torch.set_default_device("cuda")
        self._timeout = timedelta(seconds=timeout)

    def enter(self) -> None:
        # As init_process_group does it by default: by what torchrun leaves in the environment.
        self._store, self.rank, self.size = next(self._dist.rendezvous("env://", timeout=self._timeout))
        store = self._dist.PrefixStore("group", self._store)
        self._dist.init_process_group(
            self._backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        self.group: Any = self._dist.group.WORLD

    def versions(self) -> dict[str, str]:
        return {"torch": version("torch"), "backend": self._backend}

    def send(self, number: int, report: Report) -> None:
        self._store.set(f"{self.rank} {number}", json.dumps(report))

    def get(self, rank: int, number: int) -> Report | None:
        key = f"{rank} {number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def leave(self) -> None:
        # The store of the reports may be in the process of rank 0.
        self._dist.barrier()
        self._dist.destroy_process_group()


class _Optimizer:
    grads: list[Array]

    def step(self) -> str:
        return "stepped"


class Rank:
    """The stages of a check on one rank; the work of a stage returns an error if it did not go as it should."""

    group: Collectives

    def __init__(self, world: _MPIWorld | _TorchWorld, like: Array, timeout: float) -> None:
        self.world, self._timeout, self._like = world, timeout, like
        self._xp = array_namespace(like)

    def run(self, page: Report, tell: Callable[[str], None]) -> None:
        """Go through the stages up to a problem, tell the name of each, and fill the page, on rank 0 for all ranks."""
        page["size"] = self.world.size
        for number, (name, work) in enumerate(self._stages()):
            tell(name)
            end = time.monotonic() + self._timeout + MARGIN
            try:
                report = work()
            except Exception as error:
                is_consequence = isinstance(error, (CollectiveTimeoutError, BackendError))
                report = {"error": f"{type(error).__name__}: {error}", "is_consequence": is_consequence}
            reports = self._reports(number, report, end)
            failed = {rank: one for rank, one in reports.items() if "error" in one}
            # A rank that waited in vain for one that failed is not to blame.
            blamed = {rank: one for rank, one in failed.items() if not one.get("is_consequence")} or failed
            page["problems"] = [
                {"rank": rank, "problem": f"{one['error']}, in: {name}"} for rank, one in sorted(blamed.items())
            ]
            page["ok"] = not failed
            page["stages"].append({"name": name, "ok": not failed})
            if failed:
                return
            if number == 0:
                page["ranks"] = [{"rank": rank, **one} for rank, one in sorted(reports.items())]
        page["latency_us"] = round(max(one["latency_us"] for one in reports.values()), 1)

    def _reports(self, number: int, report: Report, end: float) -> dict[int, Report]:
        """Send the report of a stage to rank 0, which returns those of all ranks that come by some time."""
        reports = {self.world.rank: report}
        if self.world.rank:
            self.world.send(number, report)
            return reports
        while len(reports) < self.world.size and time.monotonic() < end:
            for rank in range(1, self.world.size):
                if rank not in reports and (come := self.world.get(rank, number)) is not None:
                    reports[rank] = come
            time.sleep(2e-3)
        missing = {"error": f"did not answer within {self._timeout:g} s"}
        return dict.fromkeys(range(self.world.size), missing) | reports

    def _stages(self) -> list[tuple[str, Callable[[], Report]]]:
        everyone, last = range(self.world.size), self.world.size - 1
        values = [(value, rank) for value in (math.inf, math.nan) for rank in everyone]
        return [
            ("report in", self.report_in),
            ("make the group", self.join),
            *((f"{value} on rank {rank}", partial(self.overflow, rank, value)) for value, rank in values),
            ("clean step", lambda: self.iterate(self._scaler(_SCALE), _SCALE, wanted="stepped")),
            *((f"other scale on rank {rank}", partial(self._drift, rank)) for rank in everyone if last),
            # An inf that the other ranks cannot know of before.
            ("late inf", partial(self.overflow, last, math.inf, delay=0.3)),
            ("latency", self._latency),
        ]

    def report_in(self) -> Report:
        """Say who this rank is."""
        launched = next((int(os.environ[name]) for name in _SIZES if name in os.environ), 1)
        if launched > self.world.size == 1:
            # A check of this rank alone would pass for one of all ranks.
            alone = f"{launched} processes were started, and each is alone in its group"
            return {"error": f"{alone}: take the mpiexec of the MPI that doctor names"}
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device_of(self._like)),
            "versions": {"gradscale": gradscale.__version__} | self.world.versions(),
        }

    def join(self) -> Report:
        """Make the group that is checked."""
        self.group = registry.collectives_for(self.world.group, self._timeout)
        return {}

    def overflow(self, bad: int, value: float, *, delay: float = 0.0) -> Report:
        """Step with a bad value on one rank, which may come late."""
        scaler = self._scaler(_SCALE)
        is_bad = self.world.rank == bad
        time.sleep(delay if is_bad else 0.0)
        return self.iterate(scaler, value if is_bad else _SCALE, wanted="skipped")

    def _drift(self, drifted: int) -> Report:
        """Step under another scale on one rank, which every rank has to notice."""
        try:
            self.iterate(self._scaler(2 * _SCALE if self.world.rank == drifted else _SCALE), _SCALE, wanted="stepped")
        except gradscale.ScaleDesyncError:
            return {}
        return {"error": f"did not notice that rank {drifted} holds another scale"}

    def _scaler(self, scale: float) -> gradscale.GradScaler:
        # The policy is the same on all ranks.
        scaler = gradscale.ShardedGradScaler(group=self.group, init_scale=_SCALE, timeout=self._timeout)
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
        return scaler

    def iterate(self, scaler: gradscale.GradScaler, value: float, *, wanted: str) -> Report:
        """Make one iteration with a value among the gradients."""
        optimizer, xp = _Optimizer(), self._xp
        optimizer.grads = [xp.full((8,), _SCALE, dtype=xp.float32), xp.asarray([_SCALE, value], dtype=xp.float32)]
        # The first call of scale() makes the scaler's state.
        scaler.scale(optimizer.grads[0][:1])
        done = scaler.step(optimizer) or "skipped"
        scaler.update()
        return {} if done == wanted else {"error": f"{done} where every rank should have {wanted}"}

    def _latency(self) -> Report:
        # As long as the message of a scaler.
        message = self._xp.zeros((claims.LENGTH,), dtype=self._xp.int32)

        def agree() -> None:
            pending = self.group.start_max(message)
            pending()
            # For groups whose call makes only the stream wait.
            getattr(pending, "wait", lambda: None)()

        return {"latency_us": statistics.median(timeit.repeat(agree, number=1, repeat=200)) * 1e6}


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # the parent process says nothing
    os._exit(1)


def main(group: str, timeout: float, descriptor: int) -> None:
    """Run one rank; tell the parent process how it gets on, and end with it."""
    parent = Connection(descriptor)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    page: Report = {"ok": True, "group": group, "timeout": timeout, "size": 0, "ranks": [], "stages": []}
    page |= {"problems": [], "latency_us": None}
    try:
        world = _MPIWorld() if group == "mpi" else _TorchWorld(timeout)
        rank = Rank(world, registry.get("numpy" if group == "mpi" else group).example(), timeout)
        # A step alone, so that nobody waits for what is compiled or loaded at the first call.
        rank.iterate(gradscale.GradScaler(init_scale=_SCALE), _SCALE, wanted="stepped")
        parent.send(("waiting for all ranks to start: one is missing", timeout + MARGIN, 0, page))
        world.enter()
    except Exception as error:
        sys.exit(f"gradscale: check: cannot join the group over {group}: {type(error).__name__}: {error}")
    limit = timeout + (5 if world.rank else 2) * MARGIN
    rank.run(page, lambda stage: parent.send((stage, limit, world.rank, page)))
    parent.send((END, limit, world.rank, page))
    if not page["ok"]:
        # Rank 0 names the rank to blame and ends all; or it is gone.
        time.sleep(3 * MARGIN if world.rank else MARGIN)
        if world.rank:
            error_line(f"check: rank {world.rank}: {page['problems'][0]['problem']}")
        # torch's launcher ends the other ranks.
        getattr(world.group, "Abort", os._exit)(1)
    world.leave()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
