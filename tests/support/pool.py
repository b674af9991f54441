"""Ranks under mpiexec that stay up: a rank starts, imports and loads its kernels once for many scenarios.

They serve one task after the other for as long as each ends cleanly on every rank. When one raises, hangs or dies, all
are killed, and the next task gets others.
"""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

STARTING = 60.0  # seconds
ENDING = 60.0  # seconds
_FORWARDING = 1.0  # seconds, in which a launcher forwards what ranks have printed


class Ranks:
    """Ranks that are connected to this process, and wait for tasks without using the processor.

    Parameters
    ----------
    size : int
        The number of ranks.
    command : callable
        Returns the command line that starts them, given the address that they connect to.
    environment : dict
        Of the ranks.
    """

    def __init__(self, size: int, command: Callable[[str], list[str]], environment: dict[str, str]):
        self.pids: dict[int, int] = {}
        self._connections: dict[int, Connection] = {}
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := str(Path(folder, "ranks")))
            listener.listen(size)
            listener.settimeout(STARTING)
            self._launcher = subprocess.Popen(
                command(address),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )
            try:
                while len(self.pids) < size:
                    connection = Connection(listener.accept()[0].detach())
                    rank, self.pids[rank] = connection.recv()
                    self._connections[rank] = connection
            except TimeoutError:
                raise self._broken(f"of {size} ranks {sorted(self.pids)} have connected") from None

    def ask(self, task: bytes, limit: float):
        """Run a task on every rank within some seconds; what each answered.

        Raises
        ------
        RuntimeError
            When a rank ends or hangs; with its traceback, if it hangs. All ranks are dead by then.
        """
        answers: dict[int, Any] = {}
        end = time.monotonic() + limit
        missing = sorted(self.pids)
        try:
            for connection in self._connections.values():
                connection.send_bytes(task)
            while missing:
                ready = wait([self._connections[rank] for rank in missing], max(0.0, end - time.monotonic()))
                if not ready:
                    self._print_where(missing)
                    raise self._broken(f"ranks {missing} gave no answer within {limit:g} s")
                answers |= {
                    rank: self._connections[rank].recv() for rank in missing if self._connections[rank] in ready
                }
                missing = sorted(self.pids.keys() - answers.keys())
        except (EOFError, OSError) as error:
            raise self._broken(f"ranks {missing} gave no answer: one has ended") from error
        except BaseException:
            self.kill()
            raise
        return [answers[rank] for rank in sorted(answers)]

    def end(self):
        """Let the ranks end, as a program does; a RuntimeError if one does not, or fails."""
        for connection in self._connections.values():
            connection.close()
        try:
            status = self._launcher.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._print_where(sorted(self.pids))
            raise self._broken(f"the ranks did not end within {ENDING:g} s") from None
        if status:
            raise self._broken("the ranks did not end well")
        self._printed.close()

    def kill(self):
        """End every rank at once, and the launcher."""
        self._stop()
        self._printed.close()

    def _stop(self):
        for connection in self._connections.values():
            connection.close()
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        self._launcher.terminate()
        try:
            self._launcher.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()

    def _print_where(self, ranks: list[int]):
        """Let ranks print what they are doing."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)

    def _broken(self, what: str) -> RuntimeError:
        """Kill the ranks; the error for it, with all that was printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_FORWARDING)
        self._stop()
        with self._printed as printed:
            printed.seek(0)
            said = printed.read().decode(errors="replace")
        return RuntimeError(f"{what}; the launcher's status is {self._launcher.returncode}:\n{said}")
