"""GradScaler: what it does to gradients, optimizers and the scale in iterations that are called in the right order."""

import gc
import math

import numpy as np
import pytest
from libraries import Library
from optimizers import Tree

from gradscale import GradScaler, ShardedGradScaler, StaticScale
from gradscale.testing import run_ranks

# How optimizers are called and kept.


class Slotted:
    """Cannot be referenced weakly."""

    __slots__ = ("grads",)

    def step(self) -> str:
        return "stepped"


@pytest.mark.numpy
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


def test_the_scale_lives_in_the_library_of_the_first_floating_array(arrays: Library, strict: Library):
    stranger = np.asarray(3) if arrays.name.startswith("strict") else strict.asarray(3, "int32")
    scaler = GradScaler()
    count, loss = scaler.scale((stranger, arrays.asarray(2.0)))
    assert count is stranger
    arrays.assert_array(loss, 131072.0)
    scaler = GradScaler()
    assert scaler.scale([stranger, None]) == [stranger, None]
    arrays.assert_array(scaler.scale(arrays.asarray(2.0)), 131072.0)


def test_gradients_of_before_a_load_tell_nothing_of_the_loaded_scale(arrays: Library):
    scaler, optimizer = GradScaler(policy=StaticScale(1.0)), Tree([arrays.asarray([1.0])])
    scaler.scale(arrays.asarray(1.0))
    scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})
    for gradient in (1.0, 1024.0):
        optimizer.grads = [arrays.asarray([gradient])]
        scaler.step(optimizer)
        arrays.assert_array(optimizer.grads[0], [1.0])
        scaler.update()
        scaler.scale(arrays.asarray(1.0))
