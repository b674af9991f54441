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
from gradscale import GradScaler, registry
from gradscale.core.backend import Backend
from gradscale.testing import check_library

pytestmark = pytest.mark.tier("ranks")


@pytest.fixture
def dask() -> Iterator[Library]:
    """Return dask's row."""
    with opened("dask") as library:
        yield library


@pytest.mark.parametrize(("optimizers", "explicit"), [(1, False), (1, True), (2, False)])
def test_dask_computes_once_for_each_step_and_its_plan_does_not_grow(dask: Library, optimizers: int, explicit: bool):
    from dask import config
    from dask.local import get_sync

    computed, sizes, scaler = [], [], GradScaler(init_scale=8.0, growth_interval=3)

    def compute(graph, keys, **options):
        computed.append(keys)
        return get_sync(graph, keys, **options)

    with config.set(scheduler=compute):
        assert dask.item(dask.asarray(1.0)) == 1.0
        assert len(computed) == 1, "the count must see a computation"
        for iteration in range(8):
            computed.clear()
            sizes.append(len(dict(scaler.scale(dask.asarray(1.0)).dask)))
            value = math.inf if iteration == 3 else 1.0
            for number in range(optimizers):
                # In chunks, of which the last is bad.
                optimizer = Tree([dask.asarray([2.0]), dask.asarray([3.0, value]).rechunk(1)])
                if explicit:
                    scaler.unscale_(optimizer)
                assert len(computed) == number
                scaler.step(optimizer)
                assert (len(computed), optimizer.steps) == (number + 1, int(iteration != 3))
            scaler.update()
            assert len(computed) == optimizers
        assert max(sizes[3:]) <= max(sizes[:3]), sizes
        assert scaler.get_scale() == 16.0


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
    scaler, optimizer = GradScaler(skip=gradscale.SkipSpikes(above=50.0, of=quantity)), Tree()
    for value, reason in ((np.float32(2.0), "stepped"), (np.float32(100.0), "spike")):
        factor = scaler.scale(ndonnx.asarray(value)) / ndonnx.asarray(value)
        optimizer.grads = [ndonnx.asarray(np.full(2, value, np.float32)) * factor]
        scaler.unscale_(optimizer, max_norm=1e6)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).reason == reason
