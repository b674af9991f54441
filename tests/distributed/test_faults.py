"""Ranks that fail, come late, fork, or are suspended or killed: an error on every rank that can be told, never a hang.

The table of faults x worlds, most of it in tier ``all``: an error on every living rank, or the right result, within the
timeout and 5 s.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenarios import Trainer, raised, rank_and_size, tell, wait_for
from worlds import Failure, MPIWorld, ProcessWorld, ThreadWorld, agree

import gradscale

LATER = pytest.mark.tier("ranks")
TIMEOUT, GRACE, LONGER = 3.0, 5.0, 5.0  # seconds; the last is longer than the timeout


def suspend(seconds: float, after: float = 0.0):
    """Let this process be suspended for some seconds, after others."""
    pid = os.getpid()
    command = f"sleep {after}; kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL)


def suspend_here(seconds: float):
    """Be suspended at this very place."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], stdin=subprocess.DEVNULL):
        os.kill(os.getpid(), signal.SIGSTOP)


# What happens on the faulty rank in the faulty iteration, and whether all come to the right result all the same.
ALL_SUSPENDED = "all suspended for longer than the timeout"
FAULTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "one suspended for a while": (lambda: suspend_here(TIMEOUT / 3), True),
    "one suspended for longer than the timeout": (lambda: suspend_here(LONGER), False),
    # All of them in the midst of waiting for the faulty one, which comes soon after.
    ALL_SUSPENDED: (lambda: time.sleep(1.2), True),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), False),
}


def prepared(group) -> Trainer:
    # What is slow the first time is not equally slow on each rank.
    Trainer(group, "numpy", 1, timeout=60.0).iterate((0,))
    return Trainer(group, "numpy", 1, timeout=TIMEOUT)


def fault(group, name: str, faulty_rank: int):
    """Make six iterations with a fault in the fourth; each ends in time, with the right result or an error."""
    rank, size = rank_and_size(group)
    trainer, (happen, is_harmless) = prepared(group), FAULTS[name]
    failure, longest, whole, is_all = None, 0.0, 0.0, name == ALL_SUSPENDED
    for iteration in range(1, 7):
        begin = time.monotonic()
        if iteration == 4 and is_all:
            suspend(LONGER, after=0.7)
        if iteration == 4 and rank == faulty_rank:
            happen()
        after_fault = time.monotonic()
        try:
            # The last rank overflows.
            trainer.iterate((0,), value=np.inf if (iteration, rank) == (2, size - 1) else 1.0)
        except gradscale.GradscaleError as error:
            failure = error
        end = time.monotonic()
        longest, whole = max(longest, end - after_fault), max(whole, end - begin)
        if failure is not None:
            break
    assert longest < LONGER * is_all + TIMEOUT + GRACE
    assert not is_all or whole > LONGER - 1.0, "the ranks were not suspended"
    if is_harmless:
        assert (failure, trainer.steps, trainer.scaler.get_scale()) == (None, 5, 32768.0)
    else:
        assert failure is not None
        assert trainer.steps < 5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.tier("ranks" if name == ALL_SUSPENDED else "all")) for name in FAULTS]
)
def test_a_fault_is_an_error_on_every_living_rank_or_harmless(processes: ProcessWorld, name: str):
    if name == "killed" and isinstance(processes, MPIWorld):
        pytest.skip("mpiexec ends the other ranks")
    for faulty_rank in [1] if name == ALL_SUSPENDED else range(processes.size):
        case = [(name, faulty_rank)]
        answers = processes.launch(fault, case, 90.0)[0] if name == "killed" else processes.answers(fault, case, 280.0)
        # The scenario has asserted what a fault comes to.
        faulty = answers.pop(faulty_rank)
        assert faulty == (None if name == "killed" else [None]), faulty_rank
        assert answers == [[None]] * (processes.size - 1), (faulty_rank, answers)


# What a rank that does not come leaves the others in, what they wait for, and what they are told the next time.
STEP = "the agreement on a step"
AGAIN = (gradscale.CollectiveTimeoutError, "rank {} of {} waited")
ANOTHER = (gradscale.BackendError, "needs set_group() with another one")
WAITING: dict[str, tuple[int | None, str, tuple[Any, str]]] = {
    **dict.fromkeys(("numpy", "torch fused"), (2, STEP, AGAIN)),
    **dict.fromkeys(("norm", "diagnosis"), (2, STEP, ANOTHER)),
    "agreement": (1, STEP, (gradscale.BackendError, "construct a new GroupAgreement on all of them")),
    "construction": (None, "the construction of a ShardedGradScaler", AGAIN),
}


def second(group, operation: str, timeout: float):
    """Return an operation of the second iteration, after a first one, and whose step it is."""
    if operation == "construction":
        return lambda: gradscale.ShardedGradScaler(group=group, timeout=timeout), None
    if operation == "agreement":
        policy, nonfinite = gradscale.DynamicScale(), np.zeros((), np.int32)
        agree, state = gradscale.GroupAgreement(group, policy, timeout=timeout), policy.init(np.zeros((), np.float32))
        agree(nonfinite, state)
        return lambda: agree(nonfinite, state), None
    trainer, (rank, size) = (
        Trainer(group, operation if operation.startswith("torch") else "numpy", 1, timeout=timeout),
        rank_and_size(group),
    )
    # The last rank overflows.
    trainer.iterate((0,), value=np.inf if rank == size - 1 else 1.0)
    trainer.refill()
    scaler, (optimizer,) = trainer.scaler, trainer.optimizers
    calls = {
        "norm": lambda: scaler.unscale_(optimizer, max_norm=1.0, norm_over="group"),
        "diagnosis": lambda: scaler.diagnose(optimizer, gather=True),
    }
    return calls.get(operation, lambda: scaler.step(optimizer)), trainer


def absence(group, operation: str, absent_rank: int, how: str, settings: dict[str, Any]):
    """Let one rank raise before it comes to an operation, or come too late: a timeout on the others, who try twice."""
    (rank, size), timeout = rank_and_size(group), settings["timeout"]
    call, trainer = second(group, operation, timeout)
    if rank == absent_rank:
        if how == "raises":
            raise ValueError("this rank fails on purpose")
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
    # A fused optimizer is called, and skips by itself.
    assert trainer is None or (trainer.steps, trainer.scaler.get_scale()) == (operation == "torch fused", 2.0**15)
    tell(settings["folder"], "gave up", rank)


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        # No other quick test finds an overflow that MPI or gloo does not tell, or a wait for them that has no end.
        pytest.param("numpy", "is late", marks=pytest.mark.tier("quick")),
        pytest.param("numpy", "raises", marks=LATER),
        *(pytest.param(operation, "is late", marks=LATER) for operation in ("norm", "diagnosis", "agreement")),
        pytest.param("torch fused", "is late", marks=[LATER, pytest.mark.torch]),
    ],
)
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others(world, operation: str, how: str, tmp_path: Path):
    absent_rank = (world.size - 1) // 2 if isinstance(world, ThreadWorld) else world.size - 1
    settings = {"timeout": world.short_timeout, "folder": str(tmp_path)}
    results = world.run(absence, operation, absent_rank, how, settings)
    assert isinstance(results.pop(absent_rank), Failure) == (how == "raises")
    assert results == [None] * (world.size - 1)


@LATER
def test_a_rank_that_constructs_no_scaler_is_a_timeout_on_the_others(mpi: MPIWorld, tmp_path: Path):
    settings = {"timeout": mpi.short_timeout, "folder": str(tmp_path)}
    agree(mpi, absence, [("construction", mpi.size - 1, "is late", settings)])


def forked(group, forking_rank: int):
    """Step, and construct, in a child after fork, which is refused; and go on in the parents."""
    rank, size = rank_and_size(group)
    trainer = prepared(group)
    trainer.iterate((0,))
    if rank == forking_rank:
        parent = os.getpid()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                said = f"process {parent}, got process {os.getpid()}, a child after fork"
                refused = f"rank {rank} of {size} is process {parent}"
                raised(gradscale.BackendError, lambda: trainer.iterate((0,)), said, refused)
                raised(gradscale.BackendError, lambda: Trainer(group, "numpy", 1), said)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, "the child was not refused, or told something else"
    trainer.iterate((0,), value=np.inf if rank == forking_rank else 1.0)
    trainer.iterate((0,))
    assert (trainer.steps, trainer.scaler.get_scale()) == (2, 32768.0)


@LATER
def test_a_child_after_fork_is_refused_and_its_parents_go_on(processes: ProcessWorld):
    agree(processes, forked, [(1,)])
