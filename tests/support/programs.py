"""Running the examples as users do: a program with a line changed, and one that Ctrl-C interrupts in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["CHANGED", "interrupted"]

CHANGED = """
import sys
from pathlib import Path
old, new, program = sys.argv[1:4]
source = Path(program).read_text()
assert source.count(old) == 1
del sys.argv[:3]
exec(compile(source.replace(old, new), program, "exec"))
"""
"""Runs a program after a line of it has been replaced; the line, the other and the program are in the arguments."""


def interrupted(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """Start a program of 100,000 steps, interrupt it after its first ones, and return its status and errors."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # So that the signal goes, as from a terminal, to a launcher and its ranks, and not to this process.
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        seen = ""
        while not re.search(r"\| [1-9]\d*/100000", seen):
            seen += (character := process.stdout.read(1))
            assert character, seen
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, errors
