"""The recipes of the pages for torch keep the rules of check_trainer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from axes import require
from axes_torch import GradScaler, torch
from recipe_blocks import GUARD_PAGE, TORCH_PAGE
from waiting_trainers import RecipeTrainer

import gradscale
from gradscale.testing import check_trainer

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]

nn = torch.nn
FEATURES, STEPS = 6, 6
BATCHES = list(torch.randn((STEPS, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


def loss_of(model, batch):
    return model(batch).float().square().mean()


def made(page, name: str, init_scale: float = 2.0**10, **others) -> RecipeTrainer:
    """Return a recipe with what it takes for granted."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))
    names: dict[str, Any] = {"model": model, "loss_of": loss_of, "rule": gradscale.SkipSpikes(window=8)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name in ("schedule", "accelerate", "accelerate_bfloat16", "fabric", "fabric_bfloat16"):
        names["schedule"] = torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.9)
    names["scaler"] = GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    names |= others
    return RecipeTrainer(page, name, BATCHES, names)


PLAIN = ("schedule", "followers", "accumulate", "clip_norm", "clip_value", "clip_each", "penalty")


@pytest.mark.parametrize("name", PLAIN)
def test_a_problems_recipe_has_no_fault(name: str):
    report = check_trainer(functools.partial(made, TORCH_PAGE, name), steps=STEPS)
    assert report.faults == []
    assert report.runs == 5 + 6 + 2 + STEPS


class MovesAllSchedules(GradScaler):
    def step_schedule(self, _, schedule):
        schedule.step()


def test_a_recipe_with_a_fault_is_found():
    def make():
        return made(TORCH_PAGE, "schedule", scaler=MovesAllSchedules("cpu"))

    # Not the first step: torch itself warns of a schedule that is moved before the optimizer.
    report = check_trainer(make, steps=STEPS, kinds=["inf"], bad_steps=[1, 3, (1, 2)], raises=False)
    assert [fault.part for fault in report.faults] == ["optimizer.param_groups[0].lr"] * 3, str(report)


@pytest.mark.parametrize("name", ["accelerate", "accelerate_bfloat16"])
@pytest.mark.usefixtures("reset_accelerate")
def test_accelerates_recipes_have_no_fault(name: str):
    require("accelerate")
    from accelerate.state import AcceleratorState

    def make():
        AcceleratorState._reset_state(reset_partial_state=True)
        return made(TORCH_PAGE, name)

    assert check_trainer(make, steps=STEPS).faults == []


def test_the_guards_recipe_has_no_fault():
    assert check_trainer(lambda: made(GUARD_PAGE, "guard-torch"), steps=STEPS).faults == []
