"""Running the examples as users do: a program with a line changed, and one that Ctrl-C interrupts in the middle."""

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

__all__ = ["CHANGED", "interrupted"]

CHANGED = """
import sys
from pathlib import Path
old, new, program = sys.argv[1:4]
source = Path(program).read_text()
sys.path.insert(0, str(Path(program).parent))
assert source.count(old) == 1
del sys.argv[:3]
exec(compile(source.replace(old, new), program, "exec"))
"""
"""Runs a program after a line of it has been replaced; the line, the other and the program are in the arguments."""


def interrupted(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """Start a program of 100,000 steps, interrupt it after its first ones, and return its status and errors.

    It prints to a terminal, without which it has no progress bar that tells of its steps.
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
        while not re.search(rb"\| [1-9]\d*/100000", seen):
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


def _drain(terminal: int, seen: bytearray) -> None:
    """Read what is printed to a terminal, until nobody has it open any more."""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:
            return
        seen += part
