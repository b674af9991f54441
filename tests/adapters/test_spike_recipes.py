"""The recipes that skip spikes in bfloat16, on the pages of torch: each block runs with FSDP2 on two ranks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from axes import require
from axes_torch import gradscale_torch, torch
from batches import Batch
from recipe_blocks import GUARD_PAGE, run_on

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


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("name", ["guard_ddp", "guard_fsdp2", "torchtitan"])
def test_no_rank_makes_the_step_of_a_batch_that_is_a_spike_on_one(name: str, bad_rank: int):
    if name == "torchtitan":
        require("torchtitan")
    case = (name, (SPIKE,), bad_rank)
    answers = Batch("spike_recipe_scenarios", lambda _: [case]).answer(2, *case)
    assert answers[0] == answers[1]
    answer = answers[0]
    assert answer["skipped"] == [(SPIKE, "spike")]
    assert answer["steps"] == {BATCHES - 1.0}
    assert (answer["scale"], answer["counts"]["spike"]) == (1.0, 1)
    if name == "guard_ddp":
        assert answer["followed"] == (BATCHES - 1, BATCHES - 1)
    if name == "torchtitan":
        # The warm-up's next step is the 72nd of a hundred.
        assert answer["rates"] == pytest.approx([0.01 * 72 / 100])


@pytest.mark.parametrize("name", ["guard_ddp", "guard_fsdp2"])
def test_a_run_without_spikes_makes_every_step(name: str):
    case = (name, (), 0)
    for answer in Batch("spike_recipe_scenarios", lambda _: [case]).answer(2, *case):
        assert (answer["skipped"], answer["steps"]) == ([], {float(BATCHES)})
