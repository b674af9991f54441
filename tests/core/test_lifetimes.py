"""What a scaler keeps alive: no gradients, and no optimizers but some; nothing waits for the collector."""

import gc
import math
import weakref

import numpy as np
import pytest
from optimizers import Tree

from gradscale import GradScaler, ShardedGradScaler
from gradscale.testing import run_ranks

pytestmark = [pytest.mark.numpy, pytest.mark.usefixtures("_no_collector")]


class Gradient(np.ndarray):  # type: ignore[type-arg]
    """An array that can be referenced weakly."""


@pytest.fixture(scope="module")
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def begun() -> tuple[GradScaler, Tree]:
    """Return a scaler that has scaled a loss, and an optimizer with its gradient."""
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(np.float32(1.0))
    return scaler, Tree([np.array([4.0, 8.0], np.float32).view(Gradient)])


@pytest.mark.parametrize("call", ["unscale_", "step"])
@pytest.mark.parametrize("max_norm", [None, 20.0], ids=["", "clipped"])
def test_an_iteration_keeps_neither_an_optimizer_nor_gradients_nor_its_scaler(call: str, max_norm: float | None):
    scaler, optimizer = begun()
    if call == "unscale_" or max_norm is not None:
        scaler.unscale_(optimizer, max_norm=max_norm)
    if call == "step":
        scaler.step(optimizer)
    optimizer.seen.clear()
    assert optimizer.grads[0].tolist() == [1.0, 2.0]
    held = [weakref.ref(one) for one in (optimizer, optimizer.grads[0])]
    del optimizer
    assert [reference() for reference in held] == [None] * 2
    held = [weakref.ref(scaler)]
    del scaler
    assert held[0]() is None, "it is in a cycle"


class Slotted:
    """Cannot be referenced weakly."""

    __slots__ = ("grads",)

    def step(self) -> str:
        return "stepped"


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "over-a-group"])
def test_of_optimizers_that_cannot_be_referenced_weakly_some_are_kept_alive_and_not_all(ranks: int):
    def train(group=None):
        scaler = GradScaler() if group is None else ShardedGradScaler(group=group)
        for value in [1.0, math.inf] * 100:
            optimizer = Slotted()
            optimizer.grads = [scaler.scale(np.full(1, value, np.float32))]
            scaler.step(optimizer)
            assert scaler.last_step(optimizer).skipped == math.isinf(value)
            scaler.update()
        assert sum(type(one) is Slotted for one in gc.get_objects()) <= 101 * max(ranks, 1)

    run_ranks(ranks, train) if ranks else train()
