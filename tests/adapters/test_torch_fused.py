"""Fused optimizers whose verdict the host reads later, as on a device: reports, and drift between ranks.

Tensors of the host stand in for a device's: the scaler is told that reading them would make the host wait.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from axes_torch import GradScaler, ShardedGradScaler
from small_torch import Small

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tensors of the host like those of a device."""
    monkeypatch.setattr("gradscale_torch.verdicts.would_wait", lambda _: True)


def fused(scaler: Any) -> Small:
    """Return a run with a fused optimizer."""
    return Small(scaler, "SGD-fused", start=1.0, lr=0.5)


def test_a_policy_that_raises_at_its_minimum_is_read_at_once() -> None:
    run = fused(GradScaler("cpu", policy=gradscale.DynamicScale(init_scale=2.0, min_scale=2.0, at_min="raise")))
    with pytest.raises(gradscale.ScaleUnderflowError, match=r"minimum, 2\.0"):
        run.iterate(math.nan)
    assert run.held == [[1.0, 1.0]]


@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-then-step"])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_all_ranks_skip_by_themselves(bad_rank: int, explicit: bool) -> None:
    def rank(group: ThreadCollectives) -> Any:
        run = fused(ShardedGradScaler("cpu", init_scale=4.0, growth_interval=1, group=group))
        run.iterate(math.inf if group.rank == bad_rank else 1.0, explicit=explicit)
        report = run.report
        run.iterate(1.0, explicit=explicit)
        told = (report.skipped, report.reason, report.scale, report.nonfinite, report.local_nonfinite)
        return told, run.held, run.scaler.get_scale(), group.calls

    # With a greeting before the first of two.
    assert run_ranks(3, rank) == [
        ((True, "overflow", 4.0, 1, int(rank == bad_rank)), [[0.5, 0.5]], 4.0, 3) for rank in range(3)
    ]


def test_ranks_that_differ_do_not_step_and_are_told_at_the_next_call() -> None:
    def rank(group: ThreadCollectives) -> Any:
        run = fused(ShardedGradScaler("cpu", init_scale=4.0 if group.rank == 0 else 8.0, group=group))
        with pytest.raises(gradscale.ScaleDesyncError, match=r"scale from 4\.0 to 8\.0"):
            run.iterate(1.0)
        return run.held

    assert run_ranks(2, rank) == [[[1.0, 1.0]]] * 2


def test_an_update_is_reported_if_somebody_wants_it_after_the_step() -> None:
    run = fused(GradScaler("cpu"))
    updates: list[Any] = []
    run.give(math.inf)
    run.scaler.step(run.optimizer)
    run.scaler.on_update = updates.append
    run.scaler.update()
    [update] = updates
    assert (update.skipped, update.scale, update.new_scale) == (True, 65536.0, 32768.0)
    assert update.steps == (run.report,)
