"""The supervisor of one rank: starts it, prints its page, and says so when it dies, hangs or never gets in.

It is the process that mpiexec or torchrun has started, and it leaves MPI and torch to the rank, its only child. So it
can still speak when that one cannot, and the launcher learns of a death only after rank 0 has had the time to report.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gradscale.cli.check_rank import MARGIN
from gradscale.cli.output import error_line

__all__ = ["supervise"]

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_SLICE = 0.2  # seconds
_BLOCK = 1 << 16


class _Rank:
    """What is known of the rank."""

    def __init__(self, child: subprocess.Popen[bytes], show: Callable[[dict[str, Any]], None]) -> None:
        self.child = child
        self._show = show
        self.rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
        self.size = next((os.environ[name] for name in _SIZES if name in os.environ), "1")
        self.stage = "its start"
        self.limit = self.deadline = float("inf")
        self.has_joined = False
        self.code: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({socket.gethostname()}, process {self.child.pid})"

    def heed(self, message: dict[str, Any]) -> None:
        """Act on one message of the rank's."""
        if "stage" in message:
            self.stage, self.limit = message["stage"], message["limit"]
            self.deadline = time.monotonic() + self.limit
        if "rank" in message:
            self.rank, self.size, self.has_joined = message["rank"], message["size"], True
        if "page" in message:
            self._show(message["page"])
            assert self.child.stdin is not None
            self.child.stdin.write(b"shown\n")
            self.child.stdin.flush()
        if "line" in message:
            seen = f"{message['line']} (seen by {self})" if self.has_joined else f"{self} {message['line']}"
            error_line(f"check: {seen}")
        self.code = message.get("end", self.code)


def supervise(settings: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> int:
    """Run one rank to its end and return the exit code.

    Parameters
    ----------
    settings : dict
        For the rank: ``group``, ``timeout``, ``backend``, ``fault``.
    show : callable
        Called with the page, on the rank that has it.
    """
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    command = [sys.executable, "-m", "gradscale.cli.check_rank", json.dumps(settings | {"descriptor": writing})]
    # The rank inherits the launcher's connections, too.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=False)
    os.close(writing)
    rank = _Rank(child, show)
    try:
        return _watch(rank, reading, settings["timeout"])
    finally:
        child.kill()
        child.wait()
        os.close(reading)


def _watch(rank: _Rank, reading: int, timeout: float) -> int:
    """Heed the rank's messages until it ends or its time is over."""
    unread = b""
    while True:
        ready, _, _ = select.select([reading], [], [], _SLICE)
        if ready:
            block = os.read(reading, _BLOCK)
            if not block:
                break
            *lines, unread = (unread + block).split(b"\n")
            for line in lines:
                rank.heed(json.loads(line))
        elif time.monotonic() > rank.deadline:
            hint = "it hangs" if rank.has_joined else "some rank has not come to it"
            error_line(f"check: {rank} has not come out of {rank.stage} in {rank.limit:g} s: {hint}")
            return 1
    status = rank.child.wait()
    if rank.code is not None:
        return rank.code
    error_line(f"check: {rank} {_describe(status)}, in: {rank.stage}")
    if rank.has_joined and str(rank.size) != "1":
        # The launcher would end the others before one of them has printed the page.
        time.sleep(timeout + 4 * MARGIN)
    return 1


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"
