"""Spikes by a rule, and what the user refuses: errors, warnings and windows; lives.py has which steps are skipped."""

import copy
import gc
import json
import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
from optimizers import Tree, iterate_plainly

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
ONE = gradscale.StaticScale(1.0)


def trained(steps: int = 5, **settings) -> tuple[gradscale.GradScaler, Tree]:
    """Return a scaler and an optimizer after usual steps."""
    scaler, optimizer = gradscale.GradScaler(**{"skip": RULE} | settings), Tree()
    for _ in range(steps):
        assert iterate_plainly(scaler, optimizer).reason == "stepped"
    return scaler, optimizer


@pytest.mark.tier("ranks")
def test_so_many_optimizers_that_none_is_ever_judged_are_told_of():
    scaler, kept = gradscale.GradScaler(skip=RULE), [Tree() for _ in range(65)]
    for optimizer in kept[:-1]:
        iterate_plainly(scaler, optimizer)
    with pytest.warns(UserWarning, match="has begun window 65, one for each optimizer that is alive"):
        iterate_plainly(scaler, kept[-1])


def test_a_shorter_window_goes_on_from_the_last_of_the_saved_values():
    saved = trained(policy=ONE)[0].state_dict()
    saved["spikes"][0]["loss"]["values"] = [1.0, 2.0, 3.0, 4.0, 5.0]
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes(window=4, of="loss")), Tree()
    scaler.load_state_dict(saved)
    iterate_plainly(scaler, optimizer, loss=6.0)
    assert scaler.state_dict()["spikes"][0]["loss"]["values"] == [3.0, 4.0, 5.0, 6.0]


def test_a_new_optimizer_continues_the_window_of_one_that_is_deleted_in_a_cycle():
    class Cyclic(Tree):
        def __init__(self):
            super().__init__()
            self.owner = self

    gc.collect()
    gc.disable()
    try:
        scaler = gradscale.GradScaler(skip=RULE)
        reasons = [iterate_plainly(scaler, Cyclic(), loss=loss).reason for loss in (1.0, 1.0, 1.0, 1.0, 9.0)]
    finally:
        gc.enable()
    assert reasons == ["stepped"] * 4 + ["spike"]
    assert len(scaler.state_dict()["spikes"]) == 1


def test_callbacks_logs_and_schedules_tell_a_spike_from_an_overflow_and_count(caplog, tmp_path):
    logs = [gradscale.callbacks.LogUpdates(summary_every=8), gradscale.callbacks.JSONLines(tmp_path / "scale.jsonl")]
    skipped: list[Any] = []
    scaler, optimizer = trained(on_skip=lambda report: skipped.append(report.reason), on_update=logs)
    stepped: list[int] = []
    schedule = type("Schedule", (), {"step": lambda _: stepped.append(1)})()
    with caplog.at_level(logging.INFO):
        for loss, gradient in ((9.0, 1.0), (1.0, math.inf)):
            iterate_plainly(scaler, optimizer, gradient, loss)
            scaler.step_schedule(optimizer, schedule)
        scaler.refuse(optimizer)
        iterate_plainly(scaler, optimizer)
    assert skipped == ["spike", "overflow", "refused"]
    assert stepped == []
    rows = [json.loads(row) for row in (tmp_path / "scale.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == [None] * 5 + skipped
    assert rows[-1]["counts"] == {"taken": 5, "overflow": 1, "spike": 1, "refused": 1}
    # The second has the words that watchers of clusters look for: non-finite grad, NaN, inf, skipped.
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "step skipped: rank 0 saw a spike",
        "step skipped at scale 65536, 1 non-finite gradient (inf or NaN)",
        "scale backed off, 65536 -> 32768",
        "step skipped: rank 0 refused it",
        "3 of the last 8 steps skipped (37.5 %), scale 32768; in all 5 taken, 1 overflow, 1 spike, 1 refused",
    ]


@pytest.mark.parametrize(
    "answer", [False, 0.0, (), (0, None), (True, None, None), (np.zeros(2),), [False], "no"], ids=str
)
def test_an_optimizer_declines_by_no_other_answers(answer):
    scaler, optimizer = gradscale.GradScaler(), Tree()
    optimizer.step = lambda: answer  # type: ignore[method-assign]
    assert iterate_plainly(scaler, optimizer).reason == "stepped"


def test_not_stepped_is_one_object_in_copies_and_pickles():
    one = gradscale.NOT_STEPPED
    assert all(other is one for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))))
    assert (repr(one), str(one)) == ("gradscale.NOT_STEPPED",) * 2
