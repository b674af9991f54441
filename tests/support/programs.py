"""Running the examples as users do: under torchrun, with a line changed, interrupted by Ctrl-C; what they leave."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = [
    "CHANGED",
    "changed",
    "interrupted",
    "launch_torch",
    "lines",
    "png_size",
    "torch_command",
    "torch_environment",
]

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


_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torch_environment(program: Path) -> dict[str, str]:
    """Return an environment without GPUs, in which copies of a program find what it shares with the others."""
    paths = os.pathsep.join(filter(None, (str(program.parent), os.environ.get("PYTHONPATH"))))
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def torch_command(size: int, program: Path, *arguments: object) -> list[str]:
    """Return the command line: under torchrun, or for one rank without."""
    launcher = [] if size == 1 else [*_TORCHRUN, str(size)]
    return [sys.executable, *launcher, str(program), *map(str, arguments)]


def launch_torch(
    folder: Path, size: int, program: Path, *arguments: object, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program with torch on ``size`` ranks."""
    command = torch_command(size, program, *arguments)
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=150, check=False
    )


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


def png_size(path: Path) -> tuple[int, int]:
    """Return width and height, after decoding the whole image."""
    from matplotlib.image import imread

    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert imread(path).shape == (height, width, 4)
    return width, height


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
