"""Libraries without an adapter: dask computes nothing before the host read, and once for it; ndonnx is eager."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from axes import require
from libraries import Library, opened
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, GradScaler, registry
from gradscale.core.backend import Backend
from gradscale.scaler.scaler import iteration_of
from gradscale.testing import check_library

pytestmark = pytest.mark.tier("ranks")


class Computations:
    """A scheduler of dask that counts how often it is asked to compute."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, keys, **options):
        from dask.local import get_sync

        self.count += 1
        return get_sync(graph, keys, **options)


@pytest.fixture
def dask() -> Iterator[Library]:
    """Return dask's row."""
    with opened("dask") as library:
        yield library


@pytest.fixture
def computations(dask: Library) -> Iterator[Computations]:
    """Return the count of what dask computes from now on."""
    from dask import config

    scheduler = Computations()
    with config.set(scheduler=scheduler):
        assert dask.item(dask.asarray(1.0)) == 1.0
        assert scheduler.count == 1, "the count must see a computation"
        scheduler.count = 0
        yield scheduler


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_"])
def test_the_scaler_computes_once_for_each_step_of_dask(dask: Library, computations: Computations, explicit: bool):
    scaler = GradScaler(init_scale=8.0)
    for value in (1.0, math.inf, 1.0):
        before = computations.count
        scaler.scale(dask.asarray(1.0))
        optimizer = Tree([dask.asarray([value]), dask.asarray([value, 3.0])])
        if explicit:
            scaler.unscale_(optimizer)
        assert computations.count == before
        scaler.step(optimizer)
        assert computations.count == before + 1
        scaler.update()
        assert computations.count == before + 1
        assert optimizer.steps == (0 if math.isinf(value) else 1)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_scalers_plan_does_not_grow_from_iteration_to_iteration(dask: Library, optimizers: int):
    scaler = GradScaler(init_scale=8.0, policy=None, growth_interval=3)
    sizes = []
    for iteration in range(8):
        scaler.scale(dask.asarray(1.0))
        for _ in range(optimizers):
            scaler.step(Tree([dask.asarray([math.inf if iteration == 3 else 1.0])]))
        scaler.update()
        live = iteration_of(scaler).live
        assert live.state is not None
        sizes.append(len(dict(live.current().scale.dask)))
    assert max(sizes[2:]) <= max(sizes[:2]), sizes
    assert scaler.get_scale() == 16.0


def test_arrays_of_dask_in_chunks_are_judged_in_every_chunk(dask: Library):
    from dask import array

    state = DynamicScale(init_scale=4.0).init(dask.asarray(1.0))
    for place in range(6):
        values = np.arange(6, dtype=np.float32)
        values[place] = np.nan
        unscaled, nonfinite = gradscale.unscale([array.from_array(values, chunks=2)], state)
        assert dask.item(nonfinite) == 1
        dask.assert_array(unscaled[0], values / 4)


@pytest.fixture
def ndonnx():
    """Return ndonnx, whose import warns that its values come from onnx's reference implementation."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="onnxruntime is not installed")
        return require("ndonnx")


def test_ndonnx_serves_the_core_as_it_is(ndonnx):
    array = ndonnx.asarray(np.zeros(3, np.float32))
    check_library(array)
    assert type(registry.backend_for(array)) is Backend


@pytest.mark.parametrize("quantity", ["loss", "norm"])
def test_a_rule_for_spikes_judges_arrays_of_a_library_that_moves_none(ndonnx, quantity):
    scaler, optimizer = GradScaler(skip=gradscale.SkipSpikes(window=8, of=quantity)), Tree()
    reasons = []
    for step in range(7):
        value = np.float32(100.0 if step == 5 else 2.0 + step % 2)
        factor = scaler.scale(ndonnx.asarray(value)) / ndonnx.asarray(value)
        optimizer.grads = [ndonnx.asarray(np.full(2, value, np.float32)) * factor]
        scaler.unscale_(optimizer, max_norm=1e6)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
    assert reasons == ["stepped"] * 5 + ["spike", "stepped"]
