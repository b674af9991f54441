"""Reports whose verdict the CPU reads later, and verdicts that outlive their group or state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, StepReport
from gradscale.core.vector import Verdict
from gradscale.reports.recorder import Reports, step_report
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.iteration import Iteration, Parts
from gradscale.scaler.live_state import ArrayState
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.unscaler import ArrayFound, ArrayUnscaler
from gradscale.scaler.verdict import PendingVerdict
from gradscale.testing import ThreadCollectives, run_ranks


class Late:
    """A verdict that arrives when it is told to."""

    is_captured = False

    def __init__(self, nonfinite: int) -> None:
        self.arrived = False
        self.reads = 0
        self.found = Verdict(nonfinite, nonfinite, False, 8.0)

    def has_arrived(self) -> bool:
        return self.arrived

    def verdict(self) -> Verdict:
        self.reads += 1
        return self.found


def test_deferred_verdicts_are_read_when_somebody_asks() -> None:
    reports: Reports[Late] = Reports()
    optimizers, late = [Tree(), Tree()], [Late(1), Late(0)]
    for number, (optimizer, pending) in enumerate(zip(optimizers, late, strict=True)):
        reports.record_later(optimizer, number, pending)
        assert optimizer in reports
    assert list(reports.poll()) == []
    # In order: the second waits for the first.
    late[1].arrived = True
    assert list(reports.poll()) == []
    late[0].arrived = True
    assert list(reports.poll()) == late
    assert list(reports.poll()) == []
    assert [pending.reads for pending in late] == [0, 0]
    assert reports.last(optimizers[0]) == StepReport(True, 8.0, 1, "overflow", 0, 0, 1)
    assert reports.last(optimizers[0]) is reports.last(optimizers[0])
    assert late[0].reads == 1
    assert [report.skipped for report in reports.history] == [True, False]


def test_what_a_captured_graph_writes_has_no_place_in_the_history() -> None:
    reports: Reports[Late] = Reports()
    optimizer, pending = Tree(), Late(1)
    pending.is_captured = pending.arrived = True
    reports.record_later(optimizer, 1, pending)
    assert reports.history == []
    assert list(reports.poll()) == []
    assert reports.last(optimizer).skipped
    # A replay overwrites it.
    pending.found = Verdict(0, 0, False, 8.0)
    assert not reports.last(optimizer).skipped


def test_a_later_report_takes_the_place_of_a_deferred_one() -> None:
    reports: Reports[Late] = Reports(history_size=2)
    optimizer, pending = Tree(), Late(1)
    reports.record_later(optimizer, 1, pending)
    reports.record(optimizer, step_report(Verdict(0, 0, False, 4.0), 2))
    assert reports.last(optimizer).iteration == 2
    reports.record_later(optimizer, 3, pending)
    assert reports.last(optimizer).iteration == 3
    assert [report.iteration for report in reports.history] == [2, 3]


def test_callbacks_are_called_on_rank_0_and_where_they_want_it() -> None:
    told: list[Any] = []
    everywhere = gradscale.callbacks.every_rank(lambda report: told.append(("everywhere", report.iteration)))
    reports: Reports[Late] = Reports([lambda report: told.append(("first", report.iteration)), everywhere])
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
