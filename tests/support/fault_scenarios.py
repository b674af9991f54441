"""What the ranks do in the table of faults: iterations, in one of which ranks are suspended, late, killed or raise.

Run as a program, this is one rank under mpiexec, which writes its answer to a folder: for faults that the ranks of a
pool do not survive. What mpiexec starts is the parent of the rank.
"""

import contextlib
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
from scenarios import Trainer, raised, rank_and_size
from worlds import alone, run_cases

import gradscale

GRACE = 5.0  # seconds
TIMEOUT = 3.0  # seconds
ITERATIONS = 6
FAULTY_ITERATION = 4
# The last rank overflows in this one.
_OVERFLOWING_ITERATION = 2

# Seconds from the beginning of the faulty iteration until ranks are suspended, and until the late one among them comes.
_UNTIL_SUSPENDED = 0.7
UNDER_WAY = 1.2
LONGER = TIMEOUT + 2.0


def suspend(seconds: float, after: float = 0.0):
    """Let this process be suspended for some seconds, after others."""
    pid = os.getpid()
    command = f"sleep {after}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL)


def _suspend_here(seconds: float):
    """Be suspended at this very place."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], stdin=subprocess.DEVNULL):
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise(_=None):
    raise ValueError("this rank fails on purpose")


def _suspend_all(is_faulty: bool):
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

HARMLESS = {"one suspended for a while", "all suspended for longer than the timeout", "late"}
"""Of these comes the right result on all ranks; of others an error on all that live."""


def _prepared(group, kind: str) -> Trainer:
    # What is slow the first time is not equally slow on each rank.
    Trainer(group, kind, 1, timeout=60.0).iterate((0,))
    return Trainer(group, kind, 1, timeout=TIMEOUT)


def fault(group, name: str, faulty_rank: int, kind: str):
    """Make iterations with a fault in one of them; each ends in time, with the right result or an error."""
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
            failure = error
        end = time.monotonic()
        longest, whole = max(longest, end - after_fault), max(whole, end - begin)
        if failure is not None:
            break
    is_all = name.startswith("all")
    assert longest < (LONGER if is_all else 0.0) + TIMEOUT + GRACE
    assert not is_all or whole > LONGER - 1.0, "the ranks were not suspended"
    if name in HARMLESS:
        assert (failure, trainer.steps, trainer.scaler.get_scale()) == (None, ITERATIONS - 1, 32768.0)
    else:
        assert failure is not None
        assert trainer.steps < ITERATIONS - 1


# What a rank that does not come leaves the others in, what they wait for, and what they are told the next time.
_STEP = "the agreement on a step"
_AGAIN = (gradscale.CollectiveTimeoutError, "rank {} of {} waited")
_ANOTHER = (gradscale.BackendError, "needs set_group() with another one")
WAITING: dict[str, tuple[int | None, str, tuple[Any, str]]] = {
    "numpy": (2, _STEP, _AGAIN),
    "torch": (2, _STEP, _AGAIN),
    "torch fused": (2, _STEP, _AGAIN),
    "norm": (2, _STEP, _ANOTHER),
    "diagnosis": (2, _STEP, _ANOTHER),
    "agreement": (1, _STEP, (gradscale.BackendError, "construct a new GroupAgreement on all of them")),
    "construction": (None, "the construction of a ShardedGradScaler", _AGAIN),
}


def _second(group, operation: str, timeout: float):
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
def absence(group, operation: str, absent_rank: int, how: str, settings: dict[str, Any]):
    """Let one rank raise before it comes to an operation, or come too late: a timeout on the others, who try twice."""
    (rank, size), timeout = rank_and_size(group), settings["timeout"]
    call, trainer = _second(group, operation, timeout)
    if rank == absent_rank:
        if how == "raises":
            _raise()
        wait_for(settings["folder"], "gave up", size - 1)
        with contextlib.suppress(gradscale.GradscaleError):
            call()
        return
    iteration, waited_for, (kind, then) = WAITING[operation]
    where = "" if iteration is None else f" in iteration {iteration}"
    said = f"rank {rank} of {size} waited {timeout:g} s for {waited_for}{where}"
    begin = time.monotonic()
    error = raised(gradscale.CollectiveTimeoutError, call, said)
    assert 0.9 * timeout <= time.monotonic() - begin < 30.0
    assert isinstance(error, TimeoutError)
    told = {"rank": rank, "size": size, "seconds": timeout, "iteration": iteration, "operation": waited_for}
    assert vars(error) | told == vars(error)
    raised(kind, call, then.format(rank, size))
    assert trainer is None or trainer.steps == 1
    tell(settings["folder"], "gave up", rank)


@alone
def suspended(group, name: str, faulty_rank: int, kind: str):
    """Do the same in processes that serve nothing else."""
    fault(group, name, faulty_rank, kind)


@alone
def forked(group, forking_rank: int, kind: str):
    """Step, and construct, in a child after fork, which is refused; and go on in the parents."""
    rank, size = rank_and_size(group)
    trainer = _prepared(group, kind)
    trainer.iterate((0,))
    if rank == forking_rank:
        parent = os.getpid()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                said = f"process {parent}, got process {os.getpid()}, a child after fork"
                refused = f"rank {rank} of {size} is process {parent}"
                raised(gradscale.BackendError, lambda: trainer.iterate((0,)), said, refused)
                raised(gradscale.BackendError, lambda: Trainer(group, kind, 1), said)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, "the child was not refused, or told something else"
    trainer.iterate((0,), value=np.inf if rank == forking_rank else 1.0)
    trainer.iterate((0,))
    assert (trainer.steps, trainer.scaler.get_scale()) == (2, 32768.0)


def be_a_rank(folder: str, name: str, faulty_rank: str, kind: str):
    """Be one rank under mpiexec."""
    from mpi4py import MPI

    answer = run_cases(MPI.COMM_WORLD, fault, [(name, int(faulty_rank), kind)])
    Path(folder, f"{MPI.COMM_WORLD.rank}.pickle").write_bytes(pickle.dumps(answer))
    wait_for_answers(folder, MPI.COMM_WORLD.size)
    # MPI's own end waits for the dead one.
    os._exit(0)


def wait_for_answers(folder: str, size: int):
    """Wait until all ranks but one have answered, or have had the time to."""
    end = time.monotonic() + 20.0
    while len(list(Path(folder).glob("*.pickle"))) < size - 1 and time.monotonic() < end:
        time.sleep(0.01)


def main():
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
