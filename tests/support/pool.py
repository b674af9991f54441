"""Worlds of ranks under mpiexec that stay up: a rank starts, imports and loads its kernels once for many scenarios.

A world serves one task after the other for as long as each ends cleanly on every rank. One that broke, or that a
scenario has changed, is ended and replaced; one in which a rank hangs or dies is killed with all its ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["INDIFFERENT", "Pool", "World"]

Command: TypeAlias = Callable[[str], list[str]]
"""The command line that starts the ranks of a world, given the address that they connect to."""

# Environment variables that pytest sets for each test, and JAX when it is imported.
INDIFFERENT = {"PYTEST_CURRENT_TEST", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"}

STARTING = 60.0  # seconds
ENDING = 60.0  # seconds
_FORWARDING = 1.0  # seconds
_POLLING = 0.1  # seconds
_STOPPING = 10.0  # seconds


class World:
    """Ranks that are connected to this process, and wait for tasks without using the processor.

    Parameters
    ----------
    size : int
        The number of ranks.
    command : callable
        Returns the command line for an address.
    environment : dict
        Of the ranks.
    starting : float, default 60.0
        Seconds for all ranks to connect.

    Raises
    ------
    RuntimeError
        When the ranks do not connect: they end, or take too long; with what they printed.
    """

    def __init__(self, size: int, command: Command, environment: dict[str, str], starting: float = STARTING) -> None:
        self.size = size
        self.tasks = 0
        self.pids: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name, "ranks"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            self._process = subprocess.Popen(
                command(address),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
            try:
                self._accept(listener, time.monotonic() + starting)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket, end: float) -> None:
        while len(self._connections) < self.size:
            if wait([listener], _POLLING):
                connection = Connection(listener.accept()[0].detach())
                rank, pid = connection.recv()
                self._connections[rank], self.pids[rank] = connection, pid
            elif self._process.poll() is not None or time.monotonic() > end:
                missing = sorted(set(range(self.size)) - self._connections.keys())
                raise self._broken(f"ranks {missing} did not connect")

    def ask(self, task: bytes, limit: float) -> tuple[list[Any], list[str]]:
        """Run a task on every rank within some seconds; what each answered, and why the world cannot be used again.

        Raises
        ------
        RuntimeError
            When a rank ends or hangs; with its traceback, if it hangs. The world is dead by then, with all its ranks.
        """
        self.tasks += 1
        answers: dict[int, tuple[Any, str]] = {}
        end = time.monotonic() + limit
        try:
            for connection in self._connections.values():
                connection.send_bytes(task)
            while len(answers) < self.size:
                pending = {self._connections[rank]: rank for rank in self._connections.keys() - answers.keys()}
                ready = wait(list(pending), max(0.0, end - time.monotonic()))
                for connection in pending.keys() & set(ready):
                    answers[pending[connection]] = pickle.loads(connection.recv_bytes())
                if not ready:
                    self._print_where(list(pending.values()))
                    raise self._broken(f"ranks {sorted(pending.values())} gave no answer within {limit:g} s")
        except (EOFError, OSError) as error:
            missing = sorted(self._connections.keys() - answers.keys())
            raise self._broken(f"ranks {missing} gave no answer: one has ended") from error
        except BaseException:
            self.kill()
            raise
        return [answers[rank][0] for rank in range(self.size)], [answers[rank][1] for rank in range(self.size)]

    def is_alive(self) -> bool:
        """Return whether every rank waits for a task."""
        return self._process.poll() is None and not wait(list(self._connections.values()), 0.0)

    def end(self) -> None:
        """Let the ranks end, as a program does.

        Raises
        ------
        RuntimeError
            When they do not, or one ends with a failure; with what they printed.
        """
        for connection in self._connections.values():
            connection.close()
        try:
            status = self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._print_where(list(self.pids))
            raise self._broken(f"the ranks did not end within {ENDING:g} s") from None
        if status:
            raise self._broken("the ranks did not end well")
        self._clear()

    def kill(self) -> None:
        """End every rank at once, and the launcher; a world that has ended is left as it is."""
        self._stop()
        self._clear()

    def _stop(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self._process.terminate()
        try:
            self._process.wait(_STOPPING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _clear(self) -> None:
        self.pids.clear()
        for connection in self._connections.values():
            connection.close()
        self._printed.close()
        self._folder.cleanup()

    def _print_where(self, ranks: list[int]) -> None:
        """Let ranks print what they are doing."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)
        # The launcher forwards what was printed through a pipe.
        time.sleep(_FORWARDING)

    def _broken(self, what: str) -> RuntimeError:
        """Kill the world; the error for it, with all that was printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A launcher that ends by itself has printed why.
            self._process.wait(_FORWARDING)
        status = self._process.poll()
        self._stop()
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")
        self._clear()
        return RuntimeError(f"{what}; the launcher's status is {status}, this was task {self.tasks}:\n{printed}")


class Pool:
    """The worlds that stay up, at most one of each size.

    Parameters
    ----------
    command : callable
        Returns the command line for a number of ranks and an address.
    environment : callable
        Returns the environment that ranks would be started in now. A world of another one, or of another folder, is
        replaced.
    """

    def __init__(self, command: Callable[[int, str], list[str]], environment: Callable[[], dict[str, str]]) -> None:
        self._command = command
        self._environment = environment
        self._worlds: dict[int, tuple[World, Any]] = {}
        self._failures: list[RuntimeError] = []

    def run(self, size: int, task: bytes, limit: float, is_alone: bool = False) -> list[Any]:
        """Run a task on as many ranks; what each answered. Alone, in processes that serve nothing else."""
        environment = self._environment()
        if is_alone:
            world = self._start(size, environment)
            answers, _ = world.ask(task, limit)
            world.end()
            return answers
        world = self._take(size, environment)
        # It goes back only after a clean end.
        answers, reasons = world.ask(task, limit)
        if any(reasons):
            self._end(world)
        else:
            self._worlds[size] = world, _key(environment)
        return answers

    def _take(self, size: int, environment: dict[str, str]) -> World:
        world, key = self._worlds.pop(size, (None, None))
        if world is not None and world.is_alive() and key == _key(environment):
            return world
        if world is not None:
            self._end(world)
        return self._start(size, environment)

    def _start(self, size: int, environment: dict[str, str]) -> World:
        return World(size, lambda address: self._command(size, address), environment)

    def _end(self, world: World) -> None:
        # What goes wrong here is no failure of the next test, and must not hide what a scenario has raised.
        try:
            world.end()
        except RuntimeError as error:
            self._failures.append(error)

    def close(self) -> None:
        """End all worlds.

        Raises
        ------
        RuntimeError
            When one did not end well, now or when it was replaced after its last task.
        """
        while self._worlds:
            self._end(self._worlds.popitem()[1][0])
        failures, self._failures = self._failures, []
        if failures:
            raise RuntimeError("\n".join(map(str, failures)))


def _key(environment: dict[str, str]) -> tuple[dict[str, str], Path]:
    """Return what the ranks of a world inherit."""
    return {name: value for name, value in environment.items() if name not in INDIFFERENT}, Path.cwd()
