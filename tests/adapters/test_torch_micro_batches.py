"""keeps() of torch: what a checksum of gradients tells apart, beside dense ones of IEEE numbers."""

import math
from typing import Any

import pytest
from axes_torch import StepGuard, torch

import gradscale
from gradscale.testing import run_ranks

pytestmark = pytest.mark.torch


def sparse(indices: list[int], values: list[list[float]]) -> Any:
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), (5, 2), check_invariants=True)


ROW, OTHER = [1.0, 2.0], [3.0, 4.0]
EQUAL = {
    "a sum": (sparse([2, 2, 0], [ROW, OTHER, ROW]), sparse([0, 2], [ROW, [4.0, 6.0]])),
    "their order": (sparse([2, 0], [ROW, OTHER]), sparse([0, 2], [OTHER, ROW])),
}
DIFFERENT = {
    "indices": (sparse([1], [ROW]), sparse([2], [ROW])),
    "sparse values": (sparse([1, 2], [ROW, OTHER]), sparse([1, 2], [OTHER, ROW])),
    "complex values": tuple(torch.tensor([first, 1.0 + 1.0j]) for first in (1.0 + 2.0j, 2.0 + 1.0j)),
    "eight bits": tuple(torch.tensor(one).to(torch.float8_e5m2) for one in (ROW, ROW[::-1])),
}


@pytest.mark.parametrize("case", EQUAL | DIFFERENT)
def test_gradients_that_ranks_hold_unlike_are_an_error_after_a_drop(case: str):
    def rank(group) -> str:
        gradient = (EQUAL | DIFFERENT)[case][group.rank]
        weight = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        optimizer, guard = torch.optim.SGD([weight], lr=0.1), StepGuard(group=group)
        optimizer.step = lambda: None  # type: ignore[method-assign]
        assert [guard.keeps(loss) for loss in (torch.tensor(1.0), torch.tensor(math.nan))] == [True, False]
        weight.grad = gradient
        try:
            guard.step(optimizer)
        except gradscale.ScaleDesyncError as error:
            return str(error)
        return guard.last_step(optimizer).reason

    said = run_ranks(2, rank)
    assert all("of the gradients, which differ" in one if case in DIFFERENT else one == "stepped" for one in said)
