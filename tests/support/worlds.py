"""Worlds: where a scenario runs on several ranks, as threads of this process or as real processes.

A scenario is a function that takes a group as its first argument. Every world runs it on each rank and returns what
each rank returned or raised, so that one test serves them all.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from gradscale.testing import run_ranks

HERE = Path(__file__).parent
RUNNER = HERE / "launched_runner.py"
_LINGERING = 15.0  # seconds


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    traceback: str = dataclasses.field(compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an exception."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def find_mpiexec() -> str | None:
    """Return the mpiexec of this environment, or of the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpi_command(size: int, *arguments: str | Path) -> list[str]:
    """Return the command line that runs Python on several ranks, oversubscribed if need be."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError("there is no mpiexec beside this Python nor on the PATH: install gradscale[mpich]")
    return [mpiexec, "-n", str(size), sys.executable, *map(str, arguments)]


def mlx_command(size: int, *arguments: str | Path) -> list[str]:
    """Return the command line that runs Python on several ranks of MLX's ring, at free ports of this machine."""
    launcher = Path(sys.executable).with_name("mlx.launch")
    options = ("-n", str(size), "--backend", "ring", "-p", str(free_port(size)))
    return [str(launcher), *options, "--", sys.executable, *map(str, arguments)]


def free_port(count: int) -> int:
    """Return the first of some ports in a row that are free, below those that the system gives to others."""
    while True:
        first = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


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
class World:
    """A number of ranks."""

    size: int
    # A timeout that a healthy rank does not pass, in seconds.
    short_timeout: ClassVar[float] = 2.0

    def run(self, scenario: Callable[..., Any], *args):
        """Run a scenario on every rank; results, or a Failure for a rank that raised."""
        return self.run_each(scenario, [args])[0]

    def run_each(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float = 280.0):
        """Run a scenario once for each tuple of arguments, within some seconds; the results of each."""
        by_case = [list(results) for results in zip(*self.answers(scenario, cases, limit), strict=True)]
        for results in by_case:
            for rank, result in enumerate(results):
                if isinstance(result, Failure):
                    print(f"rank {rank} of {len(results)} raised:\n{result.traceback}")
        return by_case


@dataclasses.dataclass(frozen=True)
class ThreadWorld(World):
    """Ranks that are threads of this process."""

    short_timeout: ClassVar[float] = 1.0

    def answers(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float):
        """Run the cases one after the other, each on threads of its own."""
        del limit
        by_case = []
        for case in cases:
            # So that threads obey the timeout that a scenario is given in a dict of settings.
            given = [float(one["timeout"]) for one in case if isinstance(one, dict) and "timeout" in one]
            call = functools.partial(lambda case, group: scenario(group, *case), case)
            by_case.append(run_ranks(self.size, call, timeout=given[0] if given else 30.0, return_exceptions=True))
        return [
            [Failure.of(one) if isinstance(one, BaseException) else one for one in of]
            for of in zip(*by_case, strict=True)
        ]


class ProcessWorld(World):
    """Ranks that are processes of their own, each of which writes its answer to a file."""

    kind: ClassVar[str]
    launcher: ClassVar[Callable[..., list[str]]]

    def answers(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float):
        """Run the cases on new ranks."""
        answers, said = self.launch(scenario, cases, limit)
        if None in answers:
            raise RuntimeError(said)
        return answers

    def launch(self, scenario: Callable[..., Any], cases: Sequence[tuple[Any, ...]], limit: float):
        """Return what each rank answered, None where it did not within some seconds, and what became of them."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            statuses = self.start(folder, pickle.dumps((scenario, cases, limit)), limit)
            printed = "".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("*.txt")))
            files = [folder / f"{rank}.pickle" for rank in range(self.size)]
            answers = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        if any(statuses) and not any(answer is None or _has_failed(answer) for answer in answers):
            raise RuntimeError(f"the ranks did not end well: {statuses}\n{printed}")
        return answers, f"statuses {statuses}\n{printed}"

    def start(self, folder: Path, task: bytes, limit: float) -> list[int | None]:
        """Run a task with a launcher; return its status."""
        (folder / "task").write_bytes(task)
        # Loading numba takes longer than most scenarios, and not equally long on each rank.
        environment = mpi_environment() | {"GRADSCALE_NUMPY_FAST": "0"}
        with (folder / "launcher.txt").open("wb") as said:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": subprocess.STDOUT}
            command = self.launcher(self.size, RUNNER, self.kind, folder)
            launcher = subprocess.Popen(command, env=environment, **options)
            try:
                # Ranks that hang say where, and end.
                return [launcher.wait(limit + 60.0)]
            finally:
                launcher.kill()


class MPIWorld(ProcessWorld):
    """Ranks that are processes under mpiexec; the group is COMM_WORLD."""

    kind = "mpi"
    launcher = staticmethod(mpi_command)


class MlxWorld(ProcessWorld):
    """Ranks that are processes under mlx.launch, connected by MLX's ring."""

    kind = "mlx"
    launcher = staticmethod(mlx_command)


@dataclasses.dataclass(frozen=True)
class GlooWorld(ProcessWorld):
    """Ranks that are processes of torch.distributed; the group is the default one, over gloo.

    They are forked off a process that has imported torch, which takes longer than most scenarios.
    """

    def start(self, folder: Path, task: bytes, limit: float) -> list[int | None]:
        """Run a task; return the status of each rank."""
        ranks = [_forking().Process(target=_run_gloo, args=(folder, k, self.size, task)) for k in range(self.size)]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            for rank in ranks:
                rank.start()
        end = time.monotonic() + limit
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        for rank in ranks:
            rank.kill()
            rank.join()
        return [rank.exitcode for rank in ranks]


@functools.cache
def _forking():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gloo_runner"])
    return context


def _run_gloo(*task):
    importlib.import_module("gloo_runner").run_rank(*task)


def _has_failed(results: Iterable[Any]) -> bool:
    return any(isinstance(one, Failure) for one in results)


def serve(folder: Path, group, rank: int, size: int, task: bytes):
    """Run a task as one rank, and write what its cases returned or raised to a file."""
    scenario, cases, limit = pickle.loads(task)
    faulthandler.dump_traceback_later(limit, exit=True)
    answers = [folder / f"{other}.pickle" for other in range(size)]
    results: list[Any] = []
    for case in cases:
        try:
            results.append(scenario(group, *case))
        except Exception as error:
            results.append(Failure.of(error))
    (folder / f"{rank}.part").write_bytes(pickle.dumps(results))
    (folder / f"{rank}.part").rename(answers[rank])
    # A rank that raised stays: had it ended, the others would find its connections closed. One that died never answers.
    end = time.monotonic() + _LINGERING
    while not all(answer.exists() for answer in answers) and time.monotonic() < end:
        time.sleep(0.002)
    if _has_failed(results):
        # Some libraries would wait here for messages that others have not sent.
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def each(world: World, scenario: Callable[..., Any], cases: Iterable[tuple[Any, ...]]):
    """Run a scenario's cases; each with what the ranks returned, after asserting that none has raised.

    ValueError without a case, which would show nothing.
    """
    cases = list(cases)
    if not cases:
        msg = f"each() and agree() need at least one case of {scenario.__name__}, got none"
        raise ValueError(msg)
    found = list(zip(cases, world.run_each(scenario, cases), strict=True))
    for case, results in found:
        assert not _has_failed(results), (case, results)
    return found


def agree(world: World, scenario: Callable[..., Any], cases: Iterable[tuple[Any, ...]]):
    """Run a scenario's cases, and assert that none has raised, and that all ranks have returned the same."""
    for case, results in each(world, scenario, cases):
        assert all(result == results[0] for result in results), (case, results)
