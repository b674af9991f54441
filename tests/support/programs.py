"""Running the examples as users do: under torchrun, with a line changed, interrupted by Ctrl-C; what they leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["TORCHRUN", "changed", "interrupted", "lines"]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
"""What Python runs to start ranks of torch; their number follows."""


def changed(folder: Path, program: Path, *changes: tuple[str, str]) -> Path:
    """Return a copy of a program with some of its text replaced."""
    source = program.read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    copy = folder / "changed.py"
    copy.write_text(source)
    return copy


def lines(completed: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what was printed, without the progress bars."""
    printed = re.split(r"[\r\n]+", completed.stdout)
    return [line for line in printed if line.strip() and not re.search(r"it/s|s/it", line)]


def interrupted(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, begun: bytes = rb"\| [1-9]\d*/100000"
) -> tuple[int, str]:
    """Start a program, interrupt it once it has printed what ``begun`` matches, and return its status and errors.

    It prints to a terminal, without which it has no progress bar that tells of its steps, which are 100,000.
    """
    terminal, end = pty.openpty()
    # Without a size tqdm takes it for one with no room.
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
        # So that the signal goes, as from a terminal, to a launcher and its ranks, and not to this process.
        start_new_session=True,
    )
    os.close(end)
    printed = threading.Thread(target=_drain, args=(terminal, seen := bytearray()))
    printed.start()
    try:
        while not re.search(begun, seen):
            assert process.poll() is None, seen
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        printed.join(20)
        os.close(terminal)
    return process.returncode, errors


def _drain(terminal: int, seen: bytearray):
    """Read what is printed to a terminal, until nobody has it open any more."""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            return
        seen += part
