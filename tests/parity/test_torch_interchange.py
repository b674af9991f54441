"""State dicts and pickles that say more than torch's, or come at another time; and what a bad one leaves behind."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from axes_torch import GradScaler, ShardedGradScaler, TorchScaler, torch
from small_torch import Small, assert_same

from gradscale import CallOrderError, DynamicScale, ScaleDesyncError, StateDictError, StaticScale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
# Powers of two, since torch's ShardedGradScaler rounds others.
SETTINGS = {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 4}


def trained(scaler, gradients: list[float]):
    """Train on with these gradients; return the scale, the tracker and the parameter after each iteration."""
    run, seen = Small(scaler, momentum=0.9), []
    for gradient in gradients:
        run.iterate(gradient)
        seen.append([*run.state, run.parameter.detach().clone()])
    return seen


def started(make, gradients: list[float]):
    """Return a scaler that has seen some iterations."""
    scaler = make("cpu", **SETTINGS)
    trained(scaler, gradients)
    return scaler


MORE = [0.5, 0.25, -1.0, math.nan, 1.0, 2.0, 3.0, 4.0]


def test_a_policy_that_torch_does_not_know_is_saved_and_torch_loads_its_part_of_it():
    policy = DynamicScale(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0)
    scaler = GradScaler("cpu", policy=policy)
    trained(scaler, [1.0, math.inf])
    saved = scaler.state_dict()
    assert saved["_overflow_tracker"] == 1
    restored, plain = GradScaler("cpu"), TorchScaler("cpu")
    for one in (restored, plain):
        one.load_state_dict(saved)
    assert plain.state_dict() == {key: saved[key] for key in KEYS}
    assert_same(trained(restored, MORE), trained(scaler, MORE))
    plain.load_state_dict(GradScaler("cpu", policy=StaticScale(init_scale=32.0)).state_dict())
    assert plain.get_scale() == 32.0


@pytest.mark.usefixtures("group")
def test_an_unpickled_sharded_scaler_agrees_over_the_default_group_and_asks_for_any_other():
    scaler = started(ShardedGradScaler, [1.0, math.inf, 3.0])
    assert_same(trained(pickle.loads(pickle.dumps(scaler)), MORE), trained(scaler, MORE))
    scaler.set_group(torch.distributed.group.WORLD)
    unpickled = pickle.loads(pickle.dumps(scaler))
    with pytest.raises(CallOrderError, match="set_group"):
        trained(unpickled, MORE)


# Going on.


@pytest.mark.parametrize("variant", ["SGD", "SGD-fused"])
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale-step"])
def test_gradients_after_a_resume_are_of_a_loss_that_was_scaled(how: str, explicit: bool, variant: str):
    before = started(GradScaler, [1.0])
    scaler = pickle.loads(pickle.dumps(before)) if how == "pickle" else GradScaler("cpu")
    if how == "state_dict":
        scaler.load_state_dict(before.state_dict())
    run = Small(scaler, variant)
    run.parameter.grad = torch.full((2,), 2048.0)
    if how == "state_dict":
        with pytest.raises(AssertionError, match=r"scale\(\) has never been called since a state was loaded"):
            run.step(explicit=explicit)
        assert (run.parameter.grad.tolist(), run.held) == ([2048.0, 2048.0], [[0.0, 0.0]])
        return
    with pytest.warns(UserWarning, match=r"scale\(\) was not called in iteration \d, and the gradients of SGD"):
        run.step(explicit=explicit)
    assert (run.held, run.state, run.report.skipped) == ([[-2.0, -2.0]], (1024.0, 2), False)


# What cannot be loaded.

GOOD: dict[str, Any] = dict(zip(KEYS, (8.0, 2.0, 0.5, 10, 3), strict=True))


@pytest.mark.parametrize("key", ["_init_scale", "_growth_factor", "_growth_interval", "_init_growth_tracker"])
def test_a_pickle_of_torchs_with_a_bad_number_is_refused(key: str):
    state = started(TorchScaler, [1.0]).__getstate__()
    with pytest.raises(StateDictError):
        GradScaler.__new__(GradScaler).__setstate__({**state, key: -1})


def test_a_state_dict_that_is_loaded_after_the_backward_pass_serves_the_next_iteration():
    run = Small(GradScaler("cpu", init_scale=4.0))
    run.give(1.0)
    run.scaler.load_state_dict({**GOOD, "scale": 1024.0})
    run.step()
    # The gradients were scaled by 4.
    assert run.held == [[-1.0, -1.0]]
    assert run.state == (1024.0, 4)


def test_a_checkpoint_after_ranks_have_differed_is_loaded_into_the_same_tensors():
    def rank(group: ThreadCollectives) -> tuple[bool, float]:
        run = Small(GradScaler("cpu", group=group))
        run.give(1.0)
        saved, tensor = run.scaler.state_dict(), run.scaler._scale
        if group.rank:
            run.scaler.set_growth_factor(4.0)
        with pytest.raises(ScaleDesyncError):
            run.scaler.step(run.optimizer)
        run.scaler.load_state_dict(saved | {"scale": 8.0})
        return run.scaler._scale is tensor, run.scaler.get_scale()

    assert run_ranks(2, rank) == [(True, 8.0)] * 2
