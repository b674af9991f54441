"""The kernels of gradscale_cupy compiled for the host, where each thread of a block runs for itself: host_cuda.cpp."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from axes import require_program

if TYPE_CHECKING:
    from gradscale_cupy.plan import Launch

__all__ = [
    "ARGUMENTS",
    "FOLDER",
    "SOURCE",
    "ThreadsDoNotMeetError",
    "add_squares",
    "compiled",
    "launch",
    "library",
    "run",
]

FOLDER = "GRADSCALE_TEST_KERNELS"
"""The variable that names the folder where the processes of a session share what they compile."""

THREADS = 64
"""Threads of a block: fewer than on a device, which does the same and takes the host less time."""

_FLAGS = (
    "-std=c++17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-tautological-compare",
    "-Werror",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
)

_TABLE = (np.uint8, np.int32, np.int32)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "unscale": (*_TABLE, np.float32, np.int32),
    "square": (*_TABLE, np.float32, np.int32, np.float64),
    "clip": (*_TABLE, np.float32),
    "add": (np.float64, np.int64, np.float64),
}
"""What the kernels of each kind take, by the first word of their names: the dtypes of arrays and numbers."""

# Found without an import, which wants CuPy.
_package = importlib.util.find_spec("gradscale_cupy")
assert _package is not None
assert _package.origin is not None
SOURCE = Path(_package.origin).with_name("unscale.cu")
_CUDA = Path(__file__).with_name("host_cuda.cpp")
_HEADER = _CUDA.with_suffix(".h")


class ThreadsDoNotMeetError(Exception):
    """Threads of a block wait at different barriers, or some are over: a device would hang, or go on with anything."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernels, compiled once for all processes of a session; any warning is an error."""
    return compiled(SOURCE, f"-DGRADSCALE_THREADS={THREADS}")


@functools.cache
def _folder() -> Path:
    return Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="gradscale-kernels-"))


def compiled(source: Path, *options: str) -> ctypes.CDLL:
    """Return the kernels of a file like unscale.cu, compiled with more options."""
    compiler = require_program("c++")
    folder = _folder()
    command = [compiler, *_FLAGS, *options, f'-DGRADSCALE_KERNELS="{source}"', str(_CUDA)]
    key = hashlib.sha256(
        source.read_bytes() + _CUDA.read_bytes() + _HEADER.read_bytes() + repr(command).encode()
    ).hexdigest()
    path = folder / f"{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        # Whoever comes second waits for the first, and compiles where that has failed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = folder / f"{key}.part"
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


def run(kernels: ctypes.CDLL, name: str, blocks: int, values: Sequence[Any], threads: int = THREADS):
    """Run one kernel of a library, compiled for so many threads, with arguments of ctypes."""
    call = getattr(kernels, f"launch_{name}")
    call.restype = ctypes.c_char_p
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    failure = call(ctypes.c_uint(blocks), ctypes.c_uint(threads), places)
    if failure is not None:
        msg = f"{name}: {failure.decode()}"
        raise ThreadsDoNotMeetError(msg)


def launch(
    kernel: str, one: Launch, chunk: int, *arguments, kernels: ctypes.CDLL | None = None, threads: int = THREADS
):
    """Run a kernel on the host over memory that a plan names, with arrays for what comes after the tables."""
    expected = ARGUMENTS[kernel.partition("_")[0]][3:]
    assert tuple(x.dtype for x in arguments) == tuple(map(np.dtype, expected))
    rows, chunks, *rest = (ctypes.c_void_p(x.ctypes.data) for x in (one.table, one.chunks, *arguments))
    run(kernels or library(), kernel, len(one.chunks), (rows, chunks, ctypes.c_int(chunk), *rest), threads)


def add_squares(squares) -> float:
    """Return what the last kernel makes of the sums of all chunks."""
    total = np.full((), np.nan)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (squares, total)]
    run(library(), "add_squares", 1, (pointers[0], ctypes.c_longlong(squares.size), pointers[1]))
    return float(total)
