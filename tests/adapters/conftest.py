"""What the tests of the adapters share: NumPy's kernels, a stand-in for CuPy, scalers for frameworks."""

from __future__ import annotations

import sys

import pytest
from axes import require
from host_cupy import installed


@pytest.fixture(params=["numpy", "numba"])
def backend(request: pytest.FixtureRequest):
    """Return NumPy's adapter with each of its kernels."""
    from gradscale_numpy import NumpyBackend

    if request.param == "numba":
        require("fast")
    return NumpyBackend(fast=request.param == "numba")


@pytest.fixture
def cupy():
    """Return the stand-in for CuPy, whose kernels run on the host."""
    with installed() as module:
        yield module


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
