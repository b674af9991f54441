"""What an agreement costs does not grow with the number of ranks, nor with what they hold."""

import math

import numpy as np
import pytest
from optimizers import Tree
from scenarios import Counting

import gradscale
from gradscale import ShardedGradScaler
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.numpy

LARGEST = 128  # bytes
ITERATIONS = 3
DTYPES = (np.float32, np.float16, np.float64, np.complex64)


def sent_by_a_rank(group: ThreadCollectives, optimizers: int, gradients: int) -> list[int]:
    """Return the bytes of each message that a rank sends in some iterations: several dtypes, and an overflow."""
    counting = Counting(group)
    scaler = ShardedGradScaler(group=counting)
    trees = [Tree() for _ in range(optimizers)]
    for iteration in range(ITERATIONS):
        scaler.scale(np.ones((), np.float32))
        value = np.inf if (group.rank, iteration) == (group.size - 1, 1) else 1.0
        for index, tree in enumerate(trees):
            tree.grads = [np.full(3, value, DTYPES[place % 4]) for place in range(gradients)]
            if index % 2:
                scaler.unscale_(tree)
            scaler.step(tree)
        scaler.update()
    assert [tree.steps for tree in trees] == [ITERATIONS - 1] * optimizers
    return [x.nbytes for x in counting.sent]


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_a_rank_sends_one_short_message_for_each_optimizer_and_iteration(size: int):
    for optimizers, gradients in ((1, 1), (1, 100), (3, 1)):
        sent = run_ranks(size, lambda group, wanted=(optimizers, gradients): sent_by_a_rank(group, *wanted))
        assert all(rank == sent[0] for rank in sent)
        greeting, *messages = sent[0]
        assert greeting == 16
        assert len(messages) == optimizers * ITERATIONS
        assert len(set(messages)) == 1
        assert 0 < messages[0] <= LARGEST


@pytest.mark.parametrize(("size", "rounds"), [(1, 1), (8, 1), (9, 2), (17, 3)])
def test_norms_diagnoses_and_what_differs_travel_in_messages_of_the_same_length(size: int, rounds: int):
    def train(group: ThreadCollectives) -> list[int]:
        counting, tree = Counting(group), Tree([np.full(1, 65536.0, np.float32)])
        scaler = ShardedGradScaler(group=counting)
        scaler.scale(np.ones((), np.float32))
        norm = scaler.unscale_(tree, max_norm=1.0, norm_over="group")
        assert math.isclose(float(norm), math.sqrt(size), rel_tol=1e-6)
        # Beside the comparison of versions and the agreement on the step.
        assert len(counting.sent) == 2 + rounds
        scaler.diagnose(tree, gather=True)
        scaler.step(tree)
        scaler.update(4.0 if group.rank == 1 else 8.0)
        if size > 1:
            with pytest.raises(gradscale.ScaleDesyncError, match=r"4\.0 on rank 1"):
                scaler.step(tree)
        return [x.nbytes for x in counting.sent]

    for greeting, *messages in run_ranks(size, train):
        assert (greeting, {*messages}) == (16, {84})
