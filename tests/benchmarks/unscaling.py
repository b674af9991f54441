"""Unscaling NumPy gradients, without numba and with it, against NumPy's and torch's own ways."""

import importlib.util
import itertools
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import gradscale
from benchmarks.measure import Idle, Row, compared
from gradscale_numpy import NumpyBackend

_FACTOR = np.float32(1)


def _backends() -> dict[str, NumpyBackend]:
    """Return the NumPy adapter without numba, and with it where it is installed."""
    kinds = {"without numba": False, "with numba": True}
    has_numba = importlib.util.find_spec("numba") is not None
    return {name: NumpyBackend(fast=fast) for name, fast in kinds.items() if has_numba or not fast}


def large_array(quick: bool) -> list[Row]:
    """Unscale one large float32 array in place, or look at it at a scale of 1, against the bare multiplication."""
    gradient = np.random.default_rng(0).standard_normal((128 if quick else 256) << 18, np.float32)
    calls: dict[str, Any] = {"peer": lambda: np.multiply(gradient, _FACTOR, out=gradient)}
    targets = {}
    for name, backend in _backends().items():
        # Of almost 1, so that gradients do not shrink from round to round.
        for suffix, scale in (("", 1.0 + 2.0**-23), (", scale 1", 1.0)):
            scaler = gradscale.GradScaler(policy=gradscale.StaticScale(scale), backend=backend)
            scaler.scale(np.ones((), np.float32))
            calls[name + suffix] = partial(scaler.unscale_, Idle([gradient])), scaler.update
            targets[name + suffix] = 1.0 if suffix else {"without numba": 1.6, "with numba": 1.1}[name]
    case = f"GradScaler.unscale_, one float32 array of {gradient.nbytes >> 20} MiB, {{}} / np.multiply"
    return compared(case, calls, 11 if quick else 41, targets)


def master_gradients(quick: bool) -> list[Row]:
    """Unscale float16 gradients to float32, against astype, multiply and isfinite."""
    size = (4 if quick else 16) << 20
    gradient = np.random.default_rng(0).standard_normal(size, np.float32).astype(np.float16)
    masters = np.empty(size, np.float32)
    state = gradscale.DynamicScale(init_scale=1.0).init(like=masters)

    def peer():
        wide = gradient.astype(np.float32)
        np.multiply(wide, _FACTOR, out=wide)
        return np.isfinite(wide).all()

    def unscale(backend: NumpyBackend, **options: Any):
        # The function looks its adapter up; let it find this one.
        with mock.patch.object(gradscale.registry, "backend_for", return_value=backend):
            return gradscale.unscale([gradient], state, **options)

    calls: dict[str, Any] = {"peer": peer}
    targets = {}
    options: dict[str, Any] = {"new arrays": {"dtype": np.float32}, "out=masters": {"out": [masters]}}
    for (name, backend), (into, given) in itertools.product(_backends().items(), options.items()):
        case = f"gradscale.unscale, {into}, {name}"
        calls[case] = partial(unscale, backend, **given)
        targets[case] = 0.12 if name == "with numba" else 0.55
    case = f"{size >> 20} Mi float16 to float32, {{}} / astype, multiply, isfinite"
    return compared(case, calls, 11 if quick else 31, targets)
