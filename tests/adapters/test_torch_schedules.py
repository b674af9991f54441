"""Learning-rate schedules hold on skipped steps: 12 steps of which 8 are skipped are 4 steps of the schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes_torch import GradScaler, ShardedGradScaler, torch
from small_torch import Small

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch

STEPS = 12
OVERFLOWS = frozenset({1, 2, 4, 5, 6, 8, 9, 12})  # the first and the last, too
TAKEN = [sum(taken not in OVERFLOWS for taken in range(1, step + 1)) for step in range(1, STEPS + 1)]
FACTOR = 0.5
rates = torch.optim.lr_scheduler


def decaying(run: Small) -> Any:
    """Return a schedule whose rate tells how often it has been stepped."""
    return rates.StepLR(run.optimizer, 1, FACTOR)


def train(run: Small, hold: Callable[[], object], overflows: frozenset[int] = OVERFLOWS) -> list[float]:
    """Make the steps, each followed by ``hold``, and return the learning rate after each."""
    seen = []
    for step in range(1, STEPS + 1):
        run.iterate(math.inf if step in overflows else 1.0)
        hold()
        seen.append(run.optimizer.param_groups[0]["lr"])
    return seen


def held(run: Small, *schedules: Any) -> Callable[[], None]:
    """Return what steps some schedules where the optimizer has stepped."""

    def hold() -> None:
        for schedule in schedules:
            run.scaler.step_schedule(run.optimizer, schedule)

    return hold


@pytest.mark.parametrize("name", ["SGD", "AdamW", "SGD-fused", "AdamW-fused"])
def test_a_schedule_takes_the_steps_that_the_optimizer_takes(name: str) -> None:
    run = Small(GradScaler("cpu"), name)
    schedule = decaying(run)
    assert train(run, held(run, schedule)) == [FACTOR**taken for taken in TAKEN]
    assert schedule.last_epoch == TAKEN[-1] == 4


@pytest.mark.parametrize("name", ["SGD", "SGD-fused"])
def test_the_schedules_of_all_ranks_stay_equal(name: str) -> None:
    def rank(group: ThreadCollectives) -> Any:
        run = Small(ShardedGradScaler("cpu", group=group), name)
        # Each rank has overflows that the other one does not have.
        own = frozenset(step for step in OVERFLOWS if step % 2 == group.rank)
        return train(run, held(run, decaying(run)), own)

    assert run_ranks(2, rank) == [[FACTOR**taken for taken in TAKEN]] * 2


def test_the_rates_are_those_of_plain_torch_without_the_skipped_steps() -> None:
    def chained(optimizer: Any) -> Any:
        warmup, cosine = rates.LinearLR(optimizer, 0.1, total_iters=2), rates.CosineAnnealingLR(optimizer, 4)
        return rates.SequentialLR(optimizer, [warmup, cosine], milestones=[2])

    plain, run = (Small(GradScaler("cpu")) for _ in range(2))
    schedule = chained(plain.optimizer)
    expected = [plain.optimizer.param_groups[0]["lr"]]
    for _ in range(TAKEN[-1]):
        plain.optimizer.step()
        schedule.step()
        expected.append(plain.optimizer.param_groups[0]["lr"])
    mine = chained(run.optimizer)
    assert train(run, held(run, mine)) == [expected[taken] for taken in TAKEN]
    assert mine.state_dict() == schedule.state_dict()


def test_each_optimizer_holds_its_own_schedules() -> None:
    scaler = GradScaler("cpu")
    runs = [Small(scaler, name) for name in ("SGD", "AdamW")]
    schedules = [[decaying(run), decaying(run)] for run in runs]
    for step in range(1, STEPS + 1):
        runs[0].give(1.0)
        runs[1].give(math.inf if step in OVERFLOWS else 1.0)
        for run, own in zip(runs, schedules, strict=True):
            scaler.step(run.optimizer)
            held(run, *own)()
        scaler.update()
    assert [[schedule.last_epoch for schedule in own] for own in schedules] == [[12, 12], [4, 4]]


def test_a_plateau_is_given_its_metric() -> None:
    run = Small(GradScaler("cpu"))
    plateau = rates.ReduceLROnPlateau(run.optimizer, factor=FACTOR, patience=0, threshold=0.0)
    step = run.scaler.step_schedule
    seen = train(run, lambda: step(run.optimizer, plateau, 1.0))
    # The first of four metrics is the best, and none of the others is better.
    assert (plateau.last_epoch, plateau.best, seen[-1]) == (4, 1.0, FACTOR**3)
    step(run.optimizer, plateau, metrics=0.5)
    assert plateau.last_epoch == 4
    train(run, lambda: step(run.optimizer, plateau, metrics=0.5))
    assert (plateau.last_epoch, plateau.best) == (8, 0.5)


def test_a_disabled_scaler_skips_nothing() -> None:
    run = Small(GradScaler("cpu", enabled=False))
    schedule = decaying(run)
    train(run, held(run, schedule))
    assert schedule.last_epoch == STEPS


def test_a_step_that_a_closure_has_made_at_a_lower_scale_counts() -> None:
    run = Small(GradScaler("cpu", init_scale=8.0))
    schedule, gradients = decaying(run), [1.0, math.inf]
    run.scaler.step(run.optimizer, lambda: run.give(gradients.pop()))
    run.scaler.update()
    held(run, schedule)()
    assert (gradients, schedule.last_epoch) == ([], 1)


def test_what_is_no_schedule_is_refused_and_so_is_an_optimizer_without_a_step() -> None:
    run = Small(GradScaler("cpu"))
    schedule = decaying(run)
    with pytest.raises(gradscale.CallOrderError, match=r"needs a step\(\) of this optimizer first"):
        held(run, schedule)()
    run.iterate(1.0)
    for wrong in (None, run.optimizer):
        with pytest.raises(gradscale.InvalidTypeError, match=r"call step_schedule\(optimizer, schedule\)"):
            run.scaler.step_schedule(schedule, wrong)
    assert schedule.last_epoch == 0


def test_gradscales_own_scaler_holds_a_schedule_of_any_kind() -> None:
    class Stepping:
        grads = (1.0,)
        steps = 0

        def step(self) -> None:
            self.steps += 1

    scaler, optimizer, schedule = gradscale.GradScaler(), Stepping(), Stepping()
    for step in range(1, STEPS + 1):
        optimizer.grads = (scaler.scale(np.full(2, math.inf if step in OVERFLOWS else 1.0, np.float32)),)
        scaler.step(optimizer)
        scaler.step_schedule(optimizer, schedule)
        scaler.update()
    assert schedule.steps == optimizer.steps == 4
