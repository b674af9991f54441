"""The recipes that skip spikes in bfloat16, on the pages of torch: each block runs with FSDP2 on two ranks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from axes import require
from axes_torch import gradscale_torch, torch
from recipe_blocks import GUARD_PAGE, run_on
from worlds import GlooWorld, each

import gradscale

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]

BATCHES, SPIKE = 72, 70


def test_the_loop_of_one_process_skips_a_spike():
    scenarios = importlib.import_module("spike_recipe_scenarios")
    model = scenarios.made_model()
    given: dict[str, Any] = {
        "gradscale": gradscale,
        "gradscale_torch": gradscale_torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "loader": scenarios.made_loader(BATCHES),
        "loss_of": scenarios.Losses((SPIKE,), 1e6),
    }
    names = run_on(GUARD_PAGE, "spikes", **given)
    skipped = [(report.iteration, report.reason, report.by) for report in names["guard"].history if report.skipped]
    assert skipped == [(SPIKE, "spike", 0)]


@pytest.mark.parametrize("name", ["guard_ddp", "guard_fsdp2", "torchtitan"])
def test_no_rank_makes_the_step_of_a_batch_that_is_a_spike_on_one(name: str):
    if name == "torchtitan":
        require("torchtitan")
    scenario = importlib.import_module("spike_recipe_scenarios").guarded
    cases = [(name, (SPIKE,), 0), (name, (SPIKE,), 1), *[(name, (), 0)] * (name != "torchtitan")]
    for (_, spikes, _), answers in each(GlooWorld(2), scenario, cases):
        answer, steps = answers[0], BATCHES - len(spikes)
        assert answer == answers[1]
        assert (answer["skipped"], answer["steps"]) == ([(SPIKE, "spike")] * len(spikes), {float(steps)})
        assert (answer["scale"], answer["counts"]["spike"]) == (1.0, len(spikes))
        if name == "guard_ddp":
            assert answer["followed"] == (steps, steps)
        if name == "torchtitan":
            # The warm-up's next step is the 72nd of a hundred.
            assert answer["rates"] == pytest.approx([0.01 * 72 / 100])
