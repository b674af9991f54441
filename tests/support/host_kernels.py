"""The kernels of gradscale_cupy compiled for the host, where loops take the place of blocks and threads."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from axes import require_program

__all__ = ["SOURCE", "launch", "library"]

SOURCE = Path(str(resources.files("gradscale_cupy") / "unscale.cu"))


@functools.cache
def library() -> ctypes.CDLL:
    """Return the kernels, compiled once in a process; any warning is an error."""
    compiler = require_program("c++")
    folder = tempfile.mkdtemp(prefix="gradscale-kernels-")
    path = Path(folder) / "libunscale.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-x", "c++", str(SOURCE), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def launch(
    kernel: str, table: Any, first_chunks: Any, chunk: int, scale: float, blocks: int = 5, threads: int = 3
) -> int:
    """Run a kernel on the host over memory that the table names, and return its verdict: 1 for something not finite."""
    inputs = [np.ascontiguousarray(table), np.ascontiguousarray(first_chunks, np.int64), np.array([scale], np.float32)]
    verdict = np.zeros(1, np.int32)
    rows, chunks, factor, found = (ctypes.c_void_p(x.ctypes.data) for x in (*inputs, verdict))
    count, size = ctypes.c_int(len(table)), ctypes.c_longlong(chunk)
    getattr(library(), kernel)(
        rows, chunks, count, size, factor, found, ctypes.c_longlong(blocks), ctypes.c_int(threads)
    )
    return int(verdict[0])
