"""Which ranks reports are told on, and verdicts that outlive the state that they were made with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optimizers import Tree

import gradscale
from gradscale import DynamicScale
from gradscale.core.vector import Verdict
from gradscale.reports.recorder import Reports, step_report
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.iteration import Iteration, Parts
from gradscale.scaler.live_state import ArrayState
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.unscaler import ArrayFound, ArrayUnscaler
from gradscale.scaler.verdict import PendingVerdict
from gradscale.testing import ThreadCollectives, run_ranks


def test_callbacks_are_called_on_rank_0_and_where_they_want_it() -> None:
    told: list[Any] = []
    everywhere = gradscale.callbacks.every_rank(lambda report: told.append(("everywhere", report.iteration)))
    reports: Reports[PendingVerdict] = Reports([lambda report: told.append(("first", report.iteration)), everywhere])
    assert reports.wants_each_step
    for iteration, (nonfinite, rank) in enumerate([(1, 0), (0, 0), (1, 1)]):
        reports.record(
            Tree(), step_report(Verdict(nonfinite, nonfinite, False, 4.0), iteration), lambda rank=rank: rank
        )
    assert told == [("first", 0), ("everywhere", 0), ("everywhere", 2)]


def test_ranks_of_a_grid_of_groups_have_numbers_of_their_own() -> None:
    class Axis:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    ranks = {Agreement([Axis(i, 2), Axis(j, 3)]).rank() for i in range(2) for j in range(3)}  # type: ignore[list-item]
    assert ranks == set(range(6))
    assert Agreement([Axis(1, 2)], own_rank=lambda: 7).rank() == 7  # type: ignore[list-item]
    assert Agreement([Axis(1, 2)], own_rank=lambda: None).rank() == 1  # type: ignore[list-item]


@pytest.mark.numpy
def test_a_verdict_of_before_a_loaded_state_ends_no_later_iteration() -> None:
    def rank(group: ThreadCollectives) -> Any:
        agreement, live = Agreement([group]), ArrayState(DynamicScale(init_scale=4.0 * (1 + group.rank)))
        state = live.current(np.float32(1.0))
        parts = Parts(live, ArrayScaling(), ArrayUnscaler(), agreement, Reports(), PendingVerdict)
        old = PendingVerdict(Iteration(1, parts), ArrayFound(0, None), state, agreement.groups, Tree())
        for _ in range(2):
            with pytest.raises(gradscale.ScaleDesyncError):
                old.verdict()
            agreement.recover()
        with pytest.raises(gradscale.ScaleDesyncError):
            old.verdict()
        return agreement.failure

    assert run_ranks(2, rank) == [None, None]
