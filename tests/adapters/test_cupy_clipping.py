"""Clipping of CuPy arrays over the stand-in: the norm from the pass that unscales, and no wait of the host.

The kernels are those of unscale.cu, compiled for the host. Nothing here runs on a device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from host_cupy import HostCupy
from optimizers import Tree

from gradscale import DynamicScale, GradScaler
from gradscale.scaler.scaler import iteration_of

pytestmark = pytest.mark.numpy


def launches(cupy: Any) -> list[str]:
    return [entry[1] for entry in cupy.log if entry[0] == "launch"]


def ready(cupy: Any, scale: float = 4.0) -> GradScaler:
    scaler = GradScaler(init_scale=scale)
    scaler.scale(cupy.ones((), dtype=np.float32))
    return scaler


def test_the_norm_comes_from_the_launches_that_unscale_and_the_host_reads_nothing(cupy: Any) -> None:
    grads = [cupy.ones(k, dtype=np.float32) for k in (9, 0, 7)] + [cupy.ones((4, 4), dtype=np.float16)]
    optimizer, scaler = Tree(grads), ready(cupy)
    cupy.log.clear()
    norm = scaler.unscale_(optimizer, max_norm=0.5)
    assert launches(cupy) == [
        *("square_float32_float32", "square_float16_float16", "add_squares", "clip_float32", "clip_float16")
    ]
    assert not [entry for entry in cupy.log if entry[0] == "read"]
    # 32 elements of a quarter.
    assert norm is not None
    assert norm.get() == np.float32(math.sqrt(2.0))
    factor = np.float32(0.5 / (math.sqrt(2.0) + 1e-6))
    assert optimizer.grads[0] is grads[0]
    assert grads[0].get().tolist() == [np.float32(0.25) * factor] * 9
    assert grads[3].get()[0, 0] == np.float16(np.float32(0.25) * factor)
    cupy.log.clear()
    scaler.step(optimizer)
    assert [entry for entry in cupy.log if entry[0] == "read"] == [("read", 0)]
    assert optimizer.steps == 1


def test_masters_are_clipped_and_planned_once_more(cupy: Any) -> None:
    optimizer, scaler = Tree([cupy.ones(4, dtype=np.float16)]), ready(cupy)
    optimizer.master_dtype = np.float32  # type: ignore[attr-defined]
    cupy.log.clear()
    norm = scaler.unscale_(optimizer, max_norm=0.1)
    assert launches(cupy) == ["square_float16_float32", "add_squares", "clip_float32"]
    assert norm is not None
    assert norm.get() == 0.5
    assert optimizer.grads[0].get().tolist() == [np.float32(0.25) * np.float32(0.1 / (0.5 + 1e-6))] * 4


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_anywhere_skips_the_step_and_leaves_the_others_unclipped(
    cupy: Any, place: int, value: float
) -> None:
    grads = []
    for index, number in enumerate((0, 1, 1, 0)):
        with cupy.cuda.Device(number):
            dtype = np.float16 if index == 3 else np.float32
            grads.append(cupy.array([4.0, value if index == place else 8.0], dtype=dtype))
    optimizer, scaler = Tree(grads), ready(cupy)
    norm = scaler.unscale_(optimizer, max_norm=0.5)
    assert norm is not None
    assert not math.isfinite(norm.get())
    assert [float(x.get()[0]) for x in grads] == [1.0] * 4
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.steps, scaler.get_scale()) == (0, 2.0)


@pytest.mark.parametrize("home", [0, 1])
def test_devices_have_one_norm_and_one_factor(cupy: Any, home: int) -> None:
    grads = []
    for number in (0, 1):
        with cupy.cuda.Device(number):
            grads.append(cupy.array([12.0 if number else 16.0], dtype=np.float32))
    optimizer = Tree(grads)
    with cupy.cuda.Device(home):
        scaler = ready(cupy)
        cupy.log.clear()
        norm = scaler.unscale_(optimizer, max_norm=1.0)
    assert norm is not None
    assert (norm.device.id, norm.get()) == (home, 5.0)
    factor = np.float32(1.0 / (5.0 + 1e-6))
    assert [x.get()[0] for x in grads] == [np.float32(4.0) * factor, np.float32(3.0) * factor]
    entries = [entry for entry in cupy.log if entry[0] == "launch"]
    assert sorted(entry[1:3] for entry in entries) == [
        (name, number) for name in ("add_squares", "clip_float32", "square_float32_float32") for number in (0, 1)
    ]
    with cupy.cuda.Device(home):
        scaler.step(optimizer)
        scaler.update()
        assert (optimizer.steps, scaler.get_scale()) == (1, 4.0)
    live = iteration_of(scaler).live
    assert live.is_made
    assert [field.device.id for field in live.current()] == [home] * 4


def test_dtypes_without_a_kernel_count_in_the_norm_and_are_clipped(cupy: Any, cupy_backend: Any) -> None:
    state = DynamicScale(init_scale=4.0).init(cupy.zeros((), dtype=np.float32))
    grads = [cupy.array([12.0], dtype=np.float64), cupy.array([16.0], dtype=np.float32)]
    out = [cupy.zeros(1, dtype=np.float16), cupy.zeros(1, dtype=np.float32)]
    made, nonfinite, squares = cupy_backend.unscale_with_squares(grads, state, out=out)
    assert (nonfinite.get(), squares.get(), squares.dtype) == (0, 25.0, np.float64)
    # No kernel takes arrays with gaps.
    gapped = cupy.ones((3,) * 9, dtype=np.float32)[(slice(None, None, 2),) * 9]
    cupy_backend.multiply_in_place([*made, gapped], cupy.array(0.5, dtype=np.float32))
    assert [float(x.get()[0]) for x in made] == [1.5, 2.0]
    assert (gapped.get() == 0.5).all()


def test_no_arrays_have_a_norm_of_zero(cupy: Any, cupy_backend: Any) -> None:
    state = DynamicScale().init(cupy.zeros((), dtype=np.float32))
    made, nonfinite, squares = cupy_backend.unscale_with_squares([], state)
    assert (list(made), nonfinite.get(), squares.get(), squares.dtype) == ([], 0, 0.0, np.float64)
    empty = [cupy.zeros((0, 3), dtype=np.float32)]
    assert cupy_backend.unscale_with_squares(empty, state, out=empty)[2].get() == 0.0


def test_a_graph_captures_the_norm_and_the_clipping(cupy: Any, cupy_backend: Any) -> None:
    grads = [cupy.ones(4, dtype=np.float16)]
    masters = [cupy.zeros(4, dtype=np.float32)]
    state = DynamicScale(init_scale=4.0).init(cupy.zeros((), dtype=np.float32))
    half = cupy.array(0.5, dtype=np.float32)
    HostCupy.capturing = {0}
    # Nothing is copied to the device, which the stand-in would refuse.
    _, _, squares = cupy_backend.unscale_with_squares(grads, state, out=masters)
    cupy_backend.multiply_in_place(masters, half)
    HostCupy.capturing = set()
    assert (squares.get(), masters[0].get().tolist()) == (0.25, [0.125] * 4)
