"""Diagnosing gradients: the time of scaler.diagnose, in reads of the gradients' memory.

One read is the fastest pass that the library itself makes over them: the maximum of their bits as int32, which no
library computes slower than a copy.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import gradscale
from benchmarks.measure import Call, Idle, Row, interleaved

_READS = 6.0
_COUNT, _SIZE = 30, 1 << 20


def _diagnosis(gradients: Sequence[Any], like) -> Call:
    """Return a call of GradScaler.diagnose on a plain optimizer."""
    optimizer = Idle(gradients)
    scaler = gradscale.GradScaler()
    scaler.scale(like)
    return Call(lambda: scaler.diagnose(optimizer))


def _kinds(quick: bool):
    """Return gradients of normal numbers, with zeros among them, and with inf and NaN."""
    rng = np.random.default_rng(0)
    size = _SIZE >> 2 if quick else _SIZE
    normal = [rng.standard_normal(size, np.float32) for _ in range(_COUNT)]
    zeros = [gradient.copy() for gradient in normal]
    overflown = [gradient.copy() for gradient in normal]
    for half_zero, bad in zip(zeros, overflown, strict=True):
        half_zero[rng.random(size) < 0.5] = 0
        bad[::1000], bad[1::2000] = np.inf, np.nan
    return {"normal": normal, "half of them 0": zeros, "some inf and NaN": overflown}


def _rows(quick: bool, convert: Callable[[Any], Any], like, read: Callable[[Any], object]) -> list[Row]:
    """Return rows for gradients that are made of NumPy's, of a library that reads one by ``read``."""
    rows = []
    for kind, arrays in _kinds(quick).items():
        gradients = [convert(array) for array in arrays]
        calls = {
            "diagnose": _diagnosis(gradients, like),
            "read": Call(partial(lambda those: [read(gradient) for gradient in those], gradients)),
        }
        times = interleaved(calls, 7 if quick else 21)
        library = type(like).__module__.partition(".")[0]
        case = f"diagnose, {_COUNT} float32 arrays of {library} of {arrays[0].size >> 10} Ki, {kind} / one read"
        rows.append(Row(case, times["diagnose"], times["read"], "s", _READS))
    return rows


def with_numpy(quick: bool) -> list[Row]:
    """Diagnose NumPy gradients."""
    return _rows(quick, np.asarray, np.float32(1), lambda gradient: gradient.view(np.int32).max())


def with_torch(quick: bool) -> list[Row]:
    """Diagnose torch gradients of the host."""
    import torch

    torch.set_num_threads(1)
    return _rows(quick, torch.from_numpy, torch.ones(()), lambda gradient: gradient.view(torch.int32).amax())


CASES = {"diagnosis": with_numpy, "diagnosis-torch": with_torch}
