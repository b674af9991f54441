"""Spikes by a rule, and what the user refuses: errors, warnings and windows; lives.py has which steps are skipped."""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from optimizers import Tree

import gradscale

RULE = gradscale.SkipSpikes(window=8, min_values=4, of="loss")
ONE = gradscale.StaticScale(1.0)


def iterate(
    scaler: gradscale.GradScaler, optimizer: Tree, loss: float, gradient: float = 1.0, **clip
) -> gradscale.StepReport:
    """Make one iteration."""
    scaler.scale(np.float32(loss))
    optimizer.grads = [np.full(3, gradient * scaler.get_scale(), np.float32)]
    if clip:
        scaler.unscale_(optimizer, **clip)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)


def trained(steps: int = 5, **settings) -> tuple[gradscale.GradScaler, Tree]:
    """Return a scaler and an optimizer after usual steps."""
    scaler, optimizer = gradscale.GradScaler(**{"skip": RULE} | settings), Tree()
    for _ in range(steps):
        assert iterate(scaler, optimizer, 1.0).reason == "stepped"
    return scaler, optimizer


def test_a_disabled_scaler_refuses_nothing_and_what_cannot_be_stepped_is_refused_nowhere():
    with pytest.raises(gradscale.InvalidValueError, match="a disabled scaler makes every step"):
        gradscale.GradScaler(enabled=False).refuse(Tree())
    for wrong in ("adam", object()):
        with pytest.raises(gradscale.InvalidTypeError, match=r"an optimizer must have step\(\)"):
            gradscale.GradScaler().refuse(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "loss", "is_spike"),
    [(np.asarray(9), None, False), (np.complex64(9.0), None, False), (np.float32(1.0), 10**400, True)],
    ids=["integers", "complex", "beyond-any-float"],
)
def test_of_other_numbers_those_that_are_given_are_losses(outputs, loss: float | None, is_spike: bool):
    scaler, optimizer = trained(policy=ONE)
    scaler.scale(np.float32(1.0))
    scaler.scale(outputs, loss=loss)
    optimizer.grads = [np.ones(3, np.float32)]
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped == is_spike


@pytest.mark.parametrize("loss", ["1.0", True, np.ones(2, np.float32), np.int32(1), 1j, [1.0]], ids=str)
def test_a_loss_of_another_kind_is_refused(loss):
    scaler, _ = trained()
    with pytest.raises(gradscale.InvalidTypeError, match="loss must be a number"):
        scaler.scale(np.float32(1.0), loss=loss)


@pytest.mark.parametrize(
    ("given", "clip", "told"),
    [
        pytest.param(np.ones(2, np.float32), {}, 1, id="losses-of-several-elements"),
        pytest.param(np.float32(1.0), {}, 0, id="loss"),
        pytest.param(np.ones(2, np.float32), {"max_norm": 1.0}, 0, id="norm"),
        pytest.param(False, {}, 0, id="nothing-on-purpose"),
    ],
)
def test_a_rule_that_has_nothing_to_judge_is_told_of_once(given, clip: dict[str, float], told: int):
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes()), Tree()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            scaler.scale(np.float32(1.0), loss=False) if given is False else scaler.scale(given)
            optimizer.grads = [np.ones(3, np.float32)]
            if clip:
                scaler.unscale_(optimizer, **clip)
            scaler.step(optimizer)
            scaler.update()
    assert [str(one.message)[:38] for one in caught] == ["skip= judges loss and norm, and found "] * told


def test_that_warning_as_an_error_comes_before_anything_is_touched():
    scaler, optimizer = gradscale.GradScaler(init_scale=4.0, skip=RULE), Tree()
    scaler.scale(np.ones(2, np.float32))
    optimizer.grads = [np.full(3, 4.0, np.float32)]
    with pytest.raises(UserWarning, match="found nothing in this step"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    assert (optimizer.grads[0].tolist(), optimizer.steps) == ([1.0] * 3, 1)


def test_so_many_optimizers_that_none_is_ever_judged_are_told_of():
    scaler, kept = gradscale.GradScaler(skip=RULE), [Tree() for _ in range(65)]
    for optimizer in kept[:-1]:
        iterate(scaler, optimizer, 1.0)
    with pytest.warns(UserWarning, match="has begun window 65, one for each optimizer that is alive"):
        iterate(scaler, kept[-1], 1.0)


def test_a_window_in_a_state_dict_is_a_copy():
    scaler, _ = trained()
    other = gradscale.GradScaler(skip=RULE)
    other.load_state_dict(saved := scaler.state_dict())
    other.state_dict()["spikes"][0]["loss"]["values"].clear()
    assert other.state_dict()["spikes"] == saved["spikes"]


@pytest.mark.parametrize(
    ("spikes", "message"),
    [
        pytest.param({"loss": 1}, "spikes must be a list", id="mapping"),
        pytest.param([3], r"spikes\[0\] must be a mapping", id="number"),
        pytest.param([{"loss": [1.0]}], r"spikes\[0\]\['loss'\] must be a mapping", id="list"),
        pytest.param([{"loss": {"values": "1"}}], r"'values'\] must be a list", id="text"),
        pytest.param([{"loss": {"values": [math.nan], "skipped": 0}}], r"'values'\] must be", id="nan"),
        pytest.param([{"loss": {"values": [1e39], "skipped": 0}}], r"'values'\] must be", id="too-large"),
        pytest.param([{"loss": {"values": [1.0], "skipped": -1}}], r"'skipped'\] must be", id="negative"),
        pytest.param([{"loss": {"values": [1.0]}}], r"'skipped'\] must be", id="missing"),
    ],
)
def test_bad_windows_in_a_state_dict_change_nothing(spikes, message: str):
    scaler, _ = trained()
    before = scaler.state_dict()
    with pytest.raises(gradscale.StateDictError, match=message):
        scaler.load_state_dict(before | {"spikes": spikes})
    assert scaler.state_dict() == before


def test_a_shorter_window_goes_on_from_the_last_of_the_saved_values():
    saved = trained(policy=ONE)[0].state_dict()
    saved["spikes"][0]["loss"]["values"] = [1.0, 2.0, 3.0, 4.0, 5.0]
    scaler, optimizer = gradscale.GradScaler(policy=ONE, skip=gradscale.SkipSpikes(window=4, of="loss")), Tree()
    scaler.load_state_dict(saved)
    iterate(scaler, optimizer, 6.0)
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
        reasons = [iterate(scaler, Cyclic(), loss).reason for loss in (1.0, 1.0, 1.0, 1.0, 9.0)]
    finally:
        gc.enable()
    assert reasons == ["stepped"] * 4 + ["spike"]
    assert len(scaler.state_dict()["spikes"]) == 1


def test_what_is_no_rule_is_refused():
    with pytest.raises(gradscale.InvalidTypeError, match="skip must be a SkipSpikes"):
        gradscale.GradScaler(skip="spikes")  # type: ignore[arg-type]


def test_callbacks_logs_and_schedules_tell_a_spike_from_an_overflow(caplog, tmp_path):
    log = gradscale.callbacks.JSONLines(tmp_path / "scale.jsonl")
    skipped: list[Any] = []
    scaler, optimizer = trained(
        on_skip=[lambda report: skipped.append(report.reason)], on_update=[gradscale.callbacks.LogUpdates(), log]
    )
    stepped: list[int] = []
    schedule = type("Schedule", (), {"step": lambda _: stepped.append(1)})()
    with caplog.at_level(logging.WARNING):
        for loss, gradient in ((9.0, 1.0), (1.0, math.inf)):
            iterate(scaler, optimizer, loss, gradient)
            scaler.step_schedule(optimizer, schedule)
        scaler.refuse(optimizer)
        iterate(scaler, optimizer, 1.0)
    assert skipped == ["spike", "overflow", "refused"]
    assert stepped == []
    rows = [json.loads(row) for row in (tmp_path / "scale.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == [None] * 5 + skipped
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "step skipped: rank 0 saw a spike",
        "step skipped at scale 65536, 1 non-finite gradient (inf or NaN)",
        "step skipped: rank 0 refused it",
    ]


@pytest.mark.parametrize(
    "answer", [False, 0.0, (), (0, None), (True, None, None), (np.zeros(2),), [False], "no"], ids=str
)
def test_an_optimizer_declines_by_no_other_answers(answer):
    scaler, optimizer = gradscale.GradScaler(), Tree()
    optimizer.step = lambda: answer  # type: ignore[method-assign]
    assert iterate(scaler, optimizer, 1.0).reason == "stepped"


def test_not_stepped_is_one_object_in_copies_and_pickles():
    one = gradscale.NOT_STEPPED
    assert all(other is one for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))))
    assert (repr(one), str(one)) == ("gradscale.NOT_STEPPED",) * 2
