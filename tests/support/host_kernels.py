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
from typing import Any

import numpy as np
from axes import require_program

__all__ = [
    "ARGUMENTS",
    "FOLDER",
    "SOURCE",
    "ThreadsDoNotMeetError",
    "add_squares",
    "compiled",
    "launch",
    "library",
    "options_of",
    "run",
]

FOLDER = "GRADSCALE_TEST_KERNELS"
"""The variable that names the folder where the processes of a session share what they compile."""

_FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC")

_TABLE = (np.uint8, np.int64, np.int32, np.int64)
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


class ThreadsDoNotMeetError(Exception):
    """Threads of a block wait at different barriers, or some are over: a device would hang, or go on with anything."""


def options_of(kernel: str) -> tuple[str, ...]:
    """Return the options by which a compiler makes one kernel of the source alone."""
    kind, *types = kernel.split("_")
    only = f"-DGRADSCALE_ONLY=GRADSCALE_{kind}"
    if kind == "add":
        return "-std=c++17", only
    return "-std=c++17", only, f"-DGRADSCALE_SOURCE={types[0]}", f"-DGRADSCALE_TARGET={types[-1]}"


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernels, compiled once for all processes of a session; any warning is an error."""
    return compiled(SOURCE)


def compiled(source: Path, *options: str) -> ctypes.CDLL:
    """Return the kernels of a file like unscale.cu, compiled with more options."""
    compiler = require_program("c++")
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="gradscale-kernels-"))
    command = [compiler, *_FLAGS, *options, f'-DGRADSCALE_KERNELS="{source}"', str(_CUDA)]
    key = hashlib.sha256(source.read_bytes() + _CUDA.read_bytes() + repr(command).encode()).hexdigest()
    path = folder / f"{key}.so"
    with (folder / f"{key}.lock").open("w") as lock:
        # Whoever comes second waits for the first, and compiles where that has failed.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = folder / f"{key}.part"
            subprocess.run([*command, "-o", str(made)], check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))


def run(kernels: ctypes.CDLL, name: str, blocks: int, threads: int, values: Sequence[Any]) -> None:
    """Run one kernel of a library with arguments of ctypes."""
    call = getattr(kernels, f"launch_{name}")
    call.restype = ctypes.c_char_p
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    failure = call(ctypes.c_uint(blocks), ctypes.c_uint(threads), places)
    if failure is not None:
        msg = f"{name}: {failure.decode()}"
        raise ThreadsDoNotMeetError(msg)


def launch(
    kernel: str,
    table: Any,
    first_chunks: Any,
    chunk: int,
    *arguments: Any,
    blocks: int = 2,
    threads: int = 64,
    kernels: ctypes.CDLL | None = None,
) -> None:
    """Run a kernel on the host over memory that the table names, with arrays for what comes after the table."""
    expected = ARGUMENTS[kernel.partition("_")[0]][4:]
    assert tuple(x.dtype for x in arguments) == tuple(map(np.dtype, expected))
    tables = [np.ascontiguousarray(table), np.ascontiguousarray(first_chunks, np.int64)]
    rows, chunks, *rest = (ctypes.c_void_p(x.ctypes.data) for x in (*tables, *arguments))
    sizes = ctypes.c_int(len(table)), ctypes.c_longlong(chunk)
    run(kernels or library(), kernel, blocks, threads, (rows, chunks, *sizes, *rest))


def add_squares(squares: Any, threads: int = 64, kernels: ctypes.CDLL | None = None) -> float:
    """Return what the last kernel makes of the sums of all chunks."""
    total = np.full((), np.nan)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (squares, total)]
    values = pointers[0], ctypes.c_longlong(squares.size), pointers[1]
    run(kernels or library(), "add_squares", 1, threads, values)
    return float(total)
