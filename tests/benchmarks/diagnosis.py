"""Diagnosing gradients: the time of scaler.diagnose, in reads of the gradients' memory.

One read is the fastest pass that the library itself makes over them: the maximum of their bits as int32, which no
library computes slower than a copy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Calls, Idle, Row, compared

_READS = 6.0
_COUNT, _SIZE = 30, 1 << 20


def _rows(quick: bool, convert: Callable[[Any], Any], like, read: Callable[[Any], object]) -> list[Row]:
    """Return rows for gradients that are made of NumPy's, of a library that reads one by ``read``."""
    rng, rows = np.random.default_rng(0), []
    size = _SIZE >> 2 if quick else _SIZE
    for kind in ("normal", "half of them 0", "some inf and NaN"):
        arrays = [rng.standard_normal(size, np.float32) for _ in range(_COUNT)]
        for array in arrays:
            if kind == "half of them 0":
                array[rng.random(size) < 0.5] = 0
            elif kind != "normal":
                array[::1000], array[1::2000] = np.inf, np.nan
        gradients, scaler = [convert(array) for array in arrays], gradscale.GradScaler()
        scaler.scale(like)
        peer = partial(lambda x: [*map(read, x)], gradients)
        calls: Calls = {"diagnose": partial(scaler.diagnose, Idle(gradients)), "peer": peer}
        library = type(like).__module__.partition(".")[0]
        case = f"{{}}, {_COUNT} float32 arrays of {library} of {size >> 10} Ki, {kind} / one read"
        rows += compared(case, calls, 7 if quick else 21, _READS)
    return rows


def with_numpy(quick: bool) -> list[Row]:
    """Diagnose NumPy gradients."""
    return _rows(quick, np.asarray, np.float32(1), lambda gradient: gradient.view(np.int32).max())


def with_torch(quick: bool) -> list[Row]:
    """Diagnose torch gradients of the host."""
    import torch

    torch.set_num_threads(1)
    return _rows(quick, torch.from_numpy, torch.ones(()), lambda gradient: gradient.view(torch.int32).amax())
