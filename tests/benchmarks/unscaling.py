"""Unscaling NumPy gradients, without numba and with it, against NumPy's and torch's own ways."""

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import gradscale
from benchmarks.measure import Call, Idle, Row, interleaved
from gradscale_numpy import NumpyBackend

Array = NDArray[Any]

_FACTOR = np.float32(1)


def _backends() -> dict[str, NumpyBackend]:
    """Return the NumPy adapter without numba, and with it where it is installed."""
    backends = {"without numba": NumpyBackend(fast=False)}
    if importlib.util.find_spec("numba") is not None:
        backends["with numba"] = NumpyBackend(fast=True)
    return backends


def _unscale_in_place(gradients: Sequence[Array], backend: NumpyBackend, scale: float) -> Call:
    """Return a call of GradScaler.unscale_ on a plain optimizer, and the end of that iteration."""
    optimizer = Idle(gradients)
    scaler = gradscale.GradScaler(policy=gradscale.StaticScale(scale), backend=backend)
    scaler.scale(np.ones((), np.float32))
    return Call(lambda: scaler.unscale_(optimizer), scaler.update)


def large_array(quick: bool) -> list[Row]:
    """Unscale one large float32 array in place, or look at it at a scale of 1, against the bare multiplication."""
    gradient = np.random.default_rng(0).standard_normal((128 if quick else 256) << 18, np.float32)
    backends = _backends()
    # Of almost 1, so that gradients do not shrink from round to round.
    scales = {"": 1.0 + 2.0**-23, ", scale 1": 1.0}
    calls = {
        name + suffix: _unscale_in_place([gradient], backend, scale)
        for name, backend in backends.items()
        for suffix, scale in scales.items()
    }
    calls["peer"] = Call(lambda: np.multiply(gradient, _FACTOR, out=gradient))
    times = interleaved(calls, 11 if quick else 41)
    targets = {"without numba": 1.6, "with numba": 1.1, "without numba, scale 1": 1.0, "with numba, scale 1": 1.0}
    case = f"GradScaler.unscale_, one float32 array of {gradient.nbytes >> 20} MiB, {{}} / np.multiply"
    return [Row(case.format(name), times[name], times["peer"], "s", targets[name]) for name in calls if name != "peer"]


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

    def into_new_arrays(backend: NumpyBackend):
        # The function looks its adapter up; let it find this one.
        with mock.patch.object(gradscale.registry, "backend_for", return_value=backend):
            return gradscale.unscale([gradient], state, dtype=np.float32)

    def into_masters(backend: NumpyBackend):
        with mock.patch.object(gradscale.registry, "backend_for", return_value=backend):
            return gradscale.unscale([gradient], state, out=[masters])

    calls = {"peer": Call(peer)}
    for name, backend in _backends().items():
        calls[f"gradscale.unscale, new arrays, {name}"] = Call(partial(into_new_arrays, backend))
        calls[f"gradscale.unscale, out=masters, {name}"] = Call(partial(into_masters, backend))
    times = interleaved(calls, 11 if quick else 31)
    case = f"{size >> 20} Mi float16 to float32, {{}} / astype, multiply, isfinite"
    return [
        Row(case.format(name), times[name], times["peer"], "s", 0.12 if "with numba" in name else 0.55)
        for name in calls
        if name != "peer"
    ]


CASES = {"large": large_array, "masters": master_gradients}
