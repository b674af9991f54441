"""What the tests of the adapters share: NumPy's kernels, CuPy on a device, scalers for frameworks."""

from __future__ import annotations

import sys

import pytest
from axes import require
from cupy_devices import require_cupy


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest):
    """Return NumPy's adapter with each of its kernels."""
    from gradscale_numpy import NumpyBackend

    if request.param == "numba":
        require("fast")
    return NumpyBackend(fast=request.param == "numba")


@pytest.fixture
def cupy():
    """Return CuPy, on a machine with CUDA."""
    cupy = require_cupy()
    yield cupy
    cupy.cuda.Device().synchronize()


@pytest.fixture
def cupy_backend(cupy):  # noqa: ARG001
    """Return an adapter for CuPy arrays that has seen none yet."""
    from gradscale_cupy.arrays import CupyBackend

    return CupyBackend()


@pytest.fixture
def reset_accelerate():
    """Forget accelerate's global state afterwards."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
