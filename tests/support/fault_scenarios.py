"""What the ranks do in the table of faults: iterations, in one of which ranks are suspended, late, killed or raise.

Run as a program, this is one rank under mpiexec, which writes its answer to a folder: for faults that the ranks of a
pool do not survive. What mpiexec starts is the parent of the rank.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from events import tell, wait_for
from scenarios import Trainer, failure_of, rank_and_size
from worlds import Failure, alone

import gradscale

__all__ = ["CLEAN", "FAULTS", "FAULTY_ITERATION", "ITERATIONS", "TIMEOUT", "UNDER_WAY", "fault", "forked", "suspended"]

TIMEOUT = 3.0  # seconds
ITERATIONS = 6
FAULTY_ITERATION = 4
# The last rank overflows in this one.
_OVERFLOWING_ITERATION = 2
CLEAN = {"failure": None, "steps": ITERATIONS - 1, "scale": 32768.0}
"""What a rank answers when nothing has come of a fault, beside the seconds."""

# Seconds from the beginning of the faulty iteration until ranks are suspended, and until the late one among them comes.
_UNTIL_SUSPENDED = 0.7
UNDER_WAY = 1.2
LONGER = TIMEOUT + 2.0


def suspend(seconds: float, after: float = 0.0) -> None:
    """Let this process be suspended for some seconds, after others."""
    pid = os.getpid()
    command = f"sleep {after}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL)


def _suspend_here(seconds: float) -> None:
    """Be suspended at this very place."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], stdin=subprocess.DEVNULL):
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise(_: Any = None) -> None:
    msg = "this rank fails on purpose"
    raise ValueError(msg)


def _suspend_all(is_faulty: bool) -> None:
    # All of them in the midst of waiting for the faulty one, which comes soon after.
    suspend(LONGER, after=_UNTIL_SUSPENDED)
    if is_faulty:
        time.sleep(UNDER_WAY)


def _on_faulty(call: Callable[[], None]) -> Callable[[bool], None]:
    return lambda is_faulty: call() if is_faulty else None


FAULTS: dict[str, Callable[[bool], None]] = {
    "one suspended for a while": _on_faulty(lambda: _suspend_here(TIMEOUT / 3)),
    "one suspended for longer than the timeout": _on_faulty(lambda: _suspend_here(LONGER)),
    "all suspended for longer than the timeout": _suspend_all,
    "late": _on_faulty(lambda: time.sleep(TIMEOUT / 3)),
    "later than the timeout": _on_faulty(lambda: time.sleep(LONGER)),
    "raises": _on_faulty(_raise),
    "killed": _on_faulty(lambda: os.kill(os.getpid(), signal.SIGKILL)),
}
"""What happens in the faulty iteration, given whether this is the faulty rank."""


def _prepared(group: Any, kind: str) -> Trainer:
    # What is slow the first time is not equally slow on each rank.
    Trainer(group, kind, 1, timeout=60.0).iterate((0,))
    return Trainer(group, kind, 1, timeout=TIMEOUT)


def fault(group: Any, name: str, faulty_rank: int, kind: str) -> dict[str, Any]:
    """Make iterations with a fault in one of them; what has become of it.

    ``seconds`` is the longest time for one iteration, without this rank's own fault before it.
    """
    rank, size = rank_and_size(group)
    trainer = _prepared(group, kind)
    failure, longest, whole = None, 0.0, 0.0
    for iteration in range(1, ITERATIONS + 1):
        begin = time.monotonic()
        if iteration == FAULTY_ITERATION:
            FAULTS[name](rank == faulty_rank)
        after_fault = time.monotonic()
        try:
            is_bad = (iteration, rank) == (_OVERFLOWING_ITERATION, size - 1)
            trainer.iterate((0,), value=np.inf if is_bad else 1.0)
        except gradscale.GradscaleError as error:
            failure = Failure.of(error)
        end = time.monotonic()
        longest, whole = max(longest, end - after_fault), max(whole, end - begin)
        if failure is not None:
            break
    times = {"seconds": longest, "with the fault": whole}
    return {"failure": failure, "steps": trainer.steps, "scale": trainer.scaler.get_scale(), **times}


def _second(group: Any, operation: str, timeout: float) -> tuple[Callable[[], Any], Trainer | None]:
    """Return an operation of the second iteration, after a first one, and whose step it is."""
    if operation == "construction":
        return lambda: gradscale.ShardedGradScaler(group=group, timeout=timeout), None
    if operation == "agreement":
        policy = gradscale.DynamicScale()
        agree = gradscale.GroupAgreement(group, policy, timeout=timeout)
        state = policy.init(np.zeros((), np.float32))
        nonfinite = np.zeros((), np.int32)
        agree(nonfinite, state)
        return lambda: agree(nonfinite, state), None
    trainer = Trainer(group, operation if operation.startswith("torch") else "numpy", 1, timeout=timeout)
    trainer.iterate((0,))
    trainer.refill()
    (optimizer,) = trainer.optimizers
    if operation == "norm":
        return lambda: trainer.scaler.unscale_(optimizer, max_norm=1.0, norm_over="group"), trainer
    if operation == "diagnosis":
        return lambda: trainer.scaler.diagnose(optimizer, gather=True), trainer
    return lambda: trainer.scaler.step(optimizer), trainer


@alone
def absence(group: Any, operation: str, absent_rank: int, how: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Let one rank raise before it comes to an operation, or come too late; the others try twice."""
    rank, size = rank_and_size(group)
    call, trainer = _second(group, operation, settings["timeout"])
    if rank == absent_rank:
        if how == "raises":
            _raise()
        wait_for(settings["folder"], "gave up", size - 1)
    failures, times = [], [time.monotonic()]
    for _ in range(1 if rank == absent_rank else 2):
        failures.append(failure_of(call))
        times.append(time.monotonic())
    tell(settings["folder"], "gave up", rank)
    return {"failures": failures, "seconds": times[1] - times[0], "steps": None if trainer is None else trainer.steps}


@alone
def suspended(group: Any, name: str, faulty_rank: int, kind: str) -> dict[str, Any]:
    """Do the same in processes that serve nothing else."""
    return fault(group, name, faulty_rank, kind)


@alone
def forked(group: Any, forking_rank: int, kind: str) -> dict[str, Any]:
    """Step, and construct, in a child after fork; and go on in the parents."""
    rank, _ = rank_and_size(group)
    trainer = _prepared(group, kind)
    trainer.iterate((0,))
    said: Any = []
    if rank == forking_rank:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            calls = (lambda: trainer.iterate((0,)), lambda: Trainer(group, kind, 1))
            failures = [failure_of(call) for call in calls]
            answers = [failure and f"{failure.kind}: {failure.message}" for failure in failures]
            os.write(writable, json.dumps([os.getpid(), os.getppid(), *answers]).encode())
            os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as answered:
            said = json.loads(answered.read())
        os.waitpid(child, 0)
    trainer.iterate((0,), value=np.inf if rank == forking_rank else 1.0)
    trainer.iterate((0,))
    return {"steps": trainer.steps, "scale": trainer.scaler.get_scale(), "said": said}


def be_a_rank(folder: str, name: str, faulty_rank: str, kind: str) -> None:
    """Be one rank under mpiexec."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    try:
        answer = fault(MPI.COMM_WORLD, name, int(faulty_rank), kind)
    except Exception as error:
        answer = Failure.of(error)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(answer))
    wait_for_answers(folder, size)
    # MPI's own end waits for the dead one.
    os._exit(0)


def wait_for_answers(folder: str, size: int) -> None:
    """Wait until all ranks but one have answered, or have had the time to."""
    end = time.monotonic() + 20.0
    while len(list(Path(folder).glob("*.pickle"))) < size - 1 and time.monotonic() < end:
        time.sleep(0.01)


def main() -> None:
    """Start a rank, so that the launcher does not learn of its death and leaves the others alone."""
    if sys.argv[1] == "rank":
        be_a_rank(*sys.argv[2:])
        return
    # It inherits the launcher's connections, too.
    size, *rest = sys.argv[1:]
    subprocess.run([sys.executable, __file__, "rank", *rest], close_fds=False, check=False)
    wait_for_answers(rest[0], int(size))


if __name__ == "__main__":
    main()
