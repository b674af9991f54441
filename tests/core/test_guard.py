"""StepGuard: what it takes over of a scaler, and what it says; lives.py and diagnoses.py have the rest."""

import logging
import math

import numpy as np
import pytest
from libraries import Library
from optimizers import Momentum, Tree, iterate_plainly

import gradscale
from gradscale import GradScaler, SkipSpikes, StepGuard
from gradscale.tools.callbacks import LogUpdates

RULE = SkipSpikes(window=8, min_values=4, of="loss")


def test_a_guard_skips_bad_steps_and_leaves_gradients_as_they_are(arrays: Library):
    guard, optimizer = StepGuard(), Tree()
    for value, reason in ((3.0, "stepped"), (math.nan, "overflow"), (math.inf, "overflow"), (-3.0, "stepped")):
        optimizer.grads = [given := arrays.asarray([value, 1.0])]
        guard.step(optimizer)
        guard.update()
        assert guard.last_step(optimizer).reason == reason
        arrays.assert_array(optimizer.grads[0], [value, 1.0])
        arrays.assert_array(given, [value, 1.0])
    assert (guard.get_scale(), optimizer.steps) == (1.0, 2)


def test_a_group_that_cannot_be_joined_or_a_new_scale_leaves_a_guard_as_it_is():
    guard, optimizer = StepGuard(), Tree([np.full(1, 4.0, np.float32)])
    with pytest.raises(gradscale.InvalidTypeError):
        guard.set_group("world")
    assert guard.unscale_(optimizer, max_norm=1.0) == 4.0
    with pytest.raises(gradscale.InvalidValueError, match=r"new_scale must be 1 for a guard, .*got 4\.0"):
        guard.update(4.0)


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "used"])
def test_the_state_of_a_scaler_of_float16_gives_counts_and_windows_and_no_scale(is_met: bool):
    scaler, optimizer = GradScaler(init_scale=1024.0, skip=RULE), Tree()
    for value in (1.0, 1.0, np.inf, 1.0):
        iterate_plainly(scaler, optimizer, value)
    guard, other = StepGuard(skip=RULE), Tree()
    if is_met:
        iterate_plainly(guard, other, 1.0)
    saved = scaler.state_dict()
    guard.load_state_dict(saved)
    held = guard.state_dict()
    assert {name: held[name] for name in ("iteration", "counts", "spikes")} == {
        name: saved[name] for name in ("iteration", "counts", "spikes")
    }
    assert iterate_plainly(guard, other, 3.0, 1.0).reason == "stepped"
    assert (other.grads[0].tolist(), guard.get_scale()) == ([3.0] * 3, 1.0)


def test_what_a_guard_shows_and_logs_speaks_of_no_scale(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    guard = StepGuard(diagnose="on_overflow", on_update=LogUpdates(summary_every=2), skip=RULE)
    for _ in range(2):
        iterate_plainly(guard, Momentum(1), np.nan)
    told = "step skipped, 1 non-finite gradient (inf or NaN): layer.0; the model is at fault"
    summary = "2 of the last 2 steps skipped (100 %); in all 0 taken, 2 non-finite, 0 spike, 0 refused"
    assert caplog.messages == [f"iteration 1: {told}", f"iteration 2: {told}", f"iteration 2: {summary}"]
    assert repr(guard).startswith("StepGuard(skip=SkipSpikes(window=8")
