"""Learning-rate schedules hold on skipped steps: 12 steps of which 8 are skipped are 4 steps of the schedule."""

from __future__ import annotations

import math

import pytest
from axes_torch import GradScaler, torch
from small_torch import Small

import gradscale

pytestmark = pytest.mark.torch

STEPS = 12
OVERFLOWS = frozenset({1, 2, 4, 5, 6, 8, 9, 12})  # the first and the last, too
FACTOR = 0.5
# What is taken of each schedule after each step.
TAKEN = [sum(taken not in OVERFLOWS for taken in range(1, step + 1)) for step in range(1, STEPS + 1)]
rates = torch.optim.lr_scheduler


def train(run: Small, overflows: frozenset[int] = OVERFLOWS) -> tuple[list[float], int]:
    """Make the steps and those of a schedule, and return the rate after each and how many the schedule has taken."""
    schedule, seen = rates.StepLR(run.optimizer, 1, FACTOR), []
    for step in range(1, STEPS + 1):
        run.iterate(math.inf if step in overflows else 1.0)
        run.scaler.step_schedule(run.optimizer, schedule)
        seen.append(run.optimizer.param_groups[0]["lr"])
    return seen, schedule.last_epoch


HELD = [FACTOR**taken for taken in TAKEN], 4


@pytest.mark.parametrize("name", ["SGD", "AdamW", "SGD-fused", "AdamW-fused"])
def test_a_schedule_takes_the_steps_that_the_optimizer_takes(name: str):
    assert train(Small(GradScaler("cpu"), name)) == HELD
    assert train(Small(GradScaler("cpu", enabled=False), name))[1] == STEPS


def test_each_optimizer_holds_its_own_schedules():
    scaler = GradScaler("cpu")
    runs = [Small(scaler, name) for name in ("SGD", "AdamW")]
    schedules = [rates.StepLR(run.optimizer, 1, FACTOR) for run in runs]
    for run, gradient in zip(runs, (1.0, math.inf), strict=True):
        run.give(gradient)
    for run, schedule in zip(runs, schedules, strict=True):
        scaler.step(run.optimizer)
        scaler.step_schedule(run.optimizer, schedule)
    assert [schedule.last_epoch for schedule in schedules] == [1, 0]


def test_a_plateau_is_given_its_metric():
    run = Small(GradScaler("cpu"))
    plateau = rates.ReduceLROnPlateau(run.optimizer, factor=FACTOR, patience=0, threshold=0.0)
    for gradient, metric in ((1.0, 1.0), (math.inf, 0.25), (1.0, 0.5)):
        run.iterate(gradient)
        run.scaler.step_schedule(run.optimizer, plateau, metrics=metric)
    assert (plateau.last_epoch, plateau.best) == (2, 0.5)


def test_what_is_no_schedule_is_refused_and_so_is_an_optimizer_without_a_step():
    run = Small(GradScaler("cpu"))
    schedule = rates.StepLR(run.optimizer, 1, FACTOR)
    with pytest.raises(gradscale.CallOrderError, match=r"needs a step\(\) of this optimizer first"):
        run.scaler.step_schedule(run.optimizer, schedule)
    run.iterate(1.0)
    for wrong, said in ((None, "must be a learning-rate schedule.*got None"), (run.optimizer, "so it is .* got SGD")):
        with pytest.raises(gradscale.InvalidTypeError, match=rf"{said}: call step_schedule\(optimizer, schedule\)"):
            run.scaler.step_schedule(schedule, wrong)
    assert schedule.last_epoch == 0
