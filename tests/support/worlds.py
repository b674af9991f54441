"""Worlds: where a scenario runs on several ranks, as threads of this process or as real processes.

A scenario is a function of ``scenarios.py`` that takes a group as its first argument. Every world runs it on each rank
and returns what each rank returned or raised, so that one test serves them all. The ranks of MPI serve the scenarios of
a module one after the other; one that ends badly, or needs processes that have run nothing else, is marked ``@alone``.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pool import Pool

from gradscale.testing import run_ranks

HERE = Path(__file__).parent
MPI_RUNNER = HERE / "mpi_runner.py"
GLOO_RUNNER = HERE / "gloo_runner.py"

Scenario = TypeVar("Scenario", bound=Callable[..., Any])


def alone(scenario: Scenario) -> Scenario:
    """Mark a scenario that needs ranks which serve nothing else, before and after: some come late, or never."""
    scenario.is_alone = True  # type: ignore[attr-defined]
    return scenario


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank raised, with what is asserted of it."""

    kind: str
    bases: tuple[str, ...]
    message: str
    attributes: dict[str, Any]
    traceback: str = dataclasses.field(default="", compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        plain = {name: value for name, value in vars(error).items() if isinstance(value, (int, float, str, type(None)))}
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return cls(type(error).__name__, bases, str(error), plain, "".join(traceback.format_exception(error)))


def run_cases(group: Any, module: str, name: str, cases: Sequence[tuple[Any, ...]]) -> tuple[list[Any], bool]:
    """Run a scenario's cases as one rank; what they returned or raised, and whether one has raised."""
    scenario = getattr(importlib.import_module(module), name)
    results: list[Any] = []
    has_raised = False
    for case in cases:
        try:
            results.append(scenario(group, *case))
        except Exception as error:
            results.append(Failure.of(error))
            has_raised = True
    return results, has_raised


def find_mpiexec() -> str | None:
    """Return the mpiexec of this environment, or of the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi_command(size: int, *arguments: str | Path) -> list[str]:
    """Return the command line that runs Python on several ranks, oversubscribed if need be."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        msg = "there is no mpiexec beside this Python nor on the PATH: install gradscale[mpich]"
        raise FileNotFoundError(msg)
    return [mpiexec, "-n", str(size), sys.executable, *map(str, arguments)]


def mpi_environment() -> dict[str, str]:
    """Return the environment for real ranks: Open MPI wants to be told that root and oversubscription are meant."""
    return os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


@dataclasses.dataclass(frozen=True)
class ThreadWorld:
    """Ranks that are threads of this process."""

    size: int
    # A timeout that a healthy rank does not pass, in seconds.
    short_timeout: ClassVar[float] = 1.0

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a scenario on every rank; results, or a Failure for a rank that raised."""

        def call(group: Any) -> Any:
            return scenario(group, *args)

        results = run_ranks(self.size, call, timeout=_timeout(args), return_exceptions=True)
        results = [Failure.of(result) if isinstance(result, BaseException) else result for result in results]
        print_failures(results)
        return results

    def run_each(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        """Run a scenario once for each tuple of arguments; the results of each."""
        return [self.run(scenario, *case) for case in cases]


@dataclasses.dataclass(frozen=True)
class ProcessWorld:
    """Ranks that are processes, which are given a task and answer what they returned."""

    size: int
    short_timeout: ClassVar[float] = 2.0

    def run(self, scenario: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a scenario on every rank; results, or a Failure for a rank that raised."""
        return self.run_each(scenario, [args])[0]

    def run_each(
        self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float = 240.0
    ) -> list[list[Any]]:
        """Run a scenario once for each tuple of arguments, all in the same processes; the results of each."""
        by_case = [list(results) for results in zip(*self.answers(scenario, cases, limit), strict=True)]
        for results in by_case:
            print_failures(results)
        return by_case

    def answers(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float) -> list[list[Any]]:
        """Run a scenario's cases within some seconds; for each rank the results of the cases."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class MPIWorld(ProcessWorld):
    """Ranks that are processes under mpiexec; the group is COMM_WORLD for a scenario that is alone, or a duplicate."""

    def answers(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float) -> list[list[Any]]:
        """Give the task to ranks that are there, or to new ones."""
        is_alone = getattr(scenario, "is_alone", False)
        task = pickle.dumps((scenario.__module__, scenario.__name__, cases, is_alone))
        return mpi_ranks.run(self.size, task, limit, is_alone)


mpi_ranks = Pool(lambda size, address: mpi_command(size, MPI_RUNNER, address), mpi_environment)


@dataclasses.dataclass(frozen=True)
class GlooWorld(ProcessWorld):
    """Ranks that are processes of torch.distributed; the group is the default one, over gloo.

    They are forked off a process that has imported torch, which takes longer than most scenarios.
    """

    def answers(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float) -> list[list[Any]]:
        """Write the task to a file, and read the answers that the ranks write beside it."""
        with tempfile.TemporaryDirectory() as folder:
            task = Path(folder, "task.pickle")
            task.write_bytes(pickle.dumps((scenario.__module__, scenario.__name__, cases)))
            status, output = self.launch(task, limit)
            answers = [Path(folder, f"{rank}.pickle") for rank in range(self.size)]
            missing = [answer.stem for answer in answers if not answer.exists()]
            if missing or status:
                msg = f"ranks {missing} gave no answer, status {status}:\n{output}"
                raise RuntimeError(msg)
            return [pickle.loads(answer.read_bytes()) for answer in answers]

    def launch(self, task: Path, limit: float) -> tuple[int, str]:
        """Run a task on forked ranks, of which those that outlast the limit are killed; a status, and the output."""
        server = _gloo_server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([str(task), self.size, limit]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            msg = f"the process that forks the ranks ended with status {server.wait(10)}"
            raise RuntimeError(msg)
        statuses = json.loads(answer)
        printed = [f"rank {rank}: {task.with_name(f'{rank}.txt').read_text()}" for rank in range(self.size)]
        return next(filter(None, statuses), 0), f"statuses {statuses}\n{''.join(printed)}"


@functools.cache
def _gloo_server() -> subprocess.Popen[str]:
    """Start the process that forks the ranks; it lives as long as this one."""
    server = subprocess.Popen(
        [sys.executable, str(GLOO_RUNNER)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def each(
    world: ThreadWorld | ProcessWorld, scenario: Callable[..., Any], cases: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Run a scenario's cases, and yield each with what the ranks returned, after asserting that none has raised."""
    cases = list(cases)
    for case, results in zip(cases, world.run_each(scenario, cases), strict=True):
        assert not any(isinstance(result, Failure) for result in results), (case, results)
        yield case, results


def assert_all_equal(results: Sequence[Any]) -> None:
    """Assert that all ranks have returned the same, and that none has raised."""
    assert not [result for result in results if isinstance(result, Failure)], results
    assert all(result == results[0] for result in results), results


def print_failures(results: Sequence[Any]) -> None:
    """Print the tracebacks of the ranks that raised, for the test that fails by it."""
    for rank, result in enumerate(results):
        if isinstance(result, Failure):
            print(f"rank {rank} of {len(results)} raised:\n{result.traceback}")


def _timeout(args: Sequence[Any]) -> float:
    """Return the timeout that a scenario is given in a dict of settings, so that threads obey it too."""
    for value in args:
        if isinstance(value, dict) and "timeout" in value:
            return float(value["timeout"])
    return 30.0
