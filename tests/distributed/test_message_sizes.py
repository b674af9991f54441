"""What an agreement costs does not grow with the number of ranks, nor with what they hold."""

import math

import numpy as np
import pytest
from optimizers import Tree
from scenarios import Counting

import gradscale
from gradscale import ShardedGradScaler
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = [
    pytest.mark.numpy,
    pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning"),
]

DTYPES = (np.float32, np.float16, np.float64, np.complex64)


@pytest.mark.parametrize(("size", "rounds"), [(1, 1), (2, 1), (8, 1), (9, 2), (17, 3)])
def test_a_rank_sends_short_messages_one_for_each_optimizer_and_iteration_and_some_for_a_norm(size: int, rounds: int):
    def train(group: ThreadCollectives) -> list[int]:
        counting, trees = Counting(group), [Tree() for _ in range(3)]
        scaler = ShardedGradScaler(group=counting)
        for iteration in range(3):
            scaler.scale(np.ones((), np.float32))
            value = np.inf if (group.rank, iteration) == (size - 1, 1) else 1.0
            for tree, count in zip(trees, (1, 100, 4), strict=True):
                tree.grads = [np.full(3, value, DTYPES[place % 4]) for place in range(count)]
                if count > 1:
                    scaler.unscale_(tree)
                scaler.step(tree)
            scaler.update()
        assert [tree.steps for tree in trees] == [2, 2, 2]
        # Beside the comparison of versions.
        assert len(counting.sent) == 1 + 9
        tree = trees[0]
        tree.grads = [np.full(1, 32768.0, np.float32)]
        scaler.scale(np.ones((), np.float32))
        norm = scaler.unscale_(tree, max_norm=1.0, norm_over="group")
        assert math.isclose(float(norm), math.sqrt(size), rel_tol=1e-6)
        # Beside the agreement on the step.
        assert len(counting.sent) == 10 + 1 + rounds
        scaler.diagnose(tree, gather=True)
        scaler.step(tree)
        scaler.update(4.0 if group.rank == 1 else 8.0)
        if size > 1:
            with pytest.raises(gradscale.ScaleDesyncError, match=r"4\.0 on rank 1"):
                scaler.step(tree)
        return [x.nbytes for x in counting.sent]

    for greeting, *messages in run_ranks(size, train):
        assert (greeting, {*messages}) == (16, {84})
