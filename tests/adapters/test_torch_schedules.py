"""What step_schedule takes of torch's learning-rate schedules; that they hold on skips is in test_torch_devices."""

from __future__ import annotations

import math

import pytest
from axes_torch import GradScaler, torch
from small_torch import Small

import gradscale

pytestmark = pytest.mark.torch

rates = torch.optim.lr_scheduler


@pytest.mark.parametrize(("enabled", "taken", "best"), [(True, 2, 0.5), (False, 3, 0.25)], ids=["", "disabled"])
def test_a_plateau_is_given_the_metrics_of_steps_that_were_made(enabled: bool, taken: int, best: float):
    run = Small(GradScaler("cpu", enabled=enabled))
    plateau = rates.ReduceLROnPlateau(run.optimizer, factor=0.5, patience=0, threshold=0.0)
    for gradient, metric in ((1.0, 1.0), (math.inf, 0.25), (1.0, 0.5)):
        run.iterate(gradient)
        run.scaler.step_schedule(run.optimizer, plateau, metrics=metric)
    assert (plateau.last_epoch, plateau.best) == (taken, best)


def test_what_is_no_schedule_is_refused_and_so_is_an_optimizer_without_a_step():
    run = Small(GradScaler("cpu"))
    schedule = rates.StepLR(run.optimizer, 1)
    with pytest.raises(gradscale.CallOrderError, match=r"needs a step\(\) of this optimizer first"):
        run.scaler.step_schedule(run.optimizer, schedule)
    run.iterate(1.0)
    for wrong, said in ((None, "must be a learning-rate schedule.*got None"), (run.optimizer, "so it is .* got SGD")):
        with pytest.raises(gradscale.InvalidTypeError, match=rf"{said}: call step_schedule\(optimizer, schedule\)"):
            run.scaler.step_schedule(schedule, wrong)
    assert schedule.last_epoch == 0
