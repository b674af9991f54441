"""State dicts and pickles between torch's scalers and ours, both ways; and what a bad one leaves behind."""

from __future__ import annotations

import io
import itertools
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
BOTH = (GradScaler, TorchScaler)
PAIRS = list(itertools.product(BOTH, BOTH))


def trained(scaler, gradients: list[float]):
    """Train on with these gradients; return the scale, the tracker and the parameter after each iteration."""
    run, seen = Small(scaler, momentum=0.9), []
    for gradient in gradients:
        run.iterate(gradient)
        seen.append([*run.state, run.parameter.detach().clone()])
    return seen


def started(make, gradients: list[float], settings: dict[str, float] = SETTINGS):
    """Return a scaler that has seen some iterations."""
    scaler = make("cpu", **settings)
    trained(scaler, gradients)
    return scaler


def saved_and_loaded(state):
    """Return what torch's safe loading makes of what it has saved."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Fresh, in the middle of a run of clean steps, just after growth, and after an overflow.
HISTORIES = {"fresh": [], "clean": [1.0, 2.0], "grown": [1.0] * 4, "backed-off": [1.0, math.inf, 3.0]}
MORE = [0.5, 0.25, -1.0, math.nan, 1.0, 2.0, 3.0, 4.0]


@pytest.fixture(params=HISTORIES)
def history(request: pytest.FixtureRequest) -> list[float]:
    """Return gradients that a scaler has seen before it is saved."""
    return HISTORIES[request.param]


def assert_all_go_on_alike(scalers: list[Any]):
    """Assert that each of some scalers trains on as the first does."""
    first, *others = (trained(scaler, MORE) for scaler in scalers)
    for other in others:
        assert_same(other, first)


# State dicts.


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("live", [False, True], ids=["lazy", "live"])
def test_a_run_goes_on_alike_whichever_scaler_saved_it_and_whichever_loads_it(
    history: list[float], pair: tuple[Any, Any], live: bool
):
    scalers = []
    for source, target in itertools.product(pair, pair):
        saved = started(source, history).state_dict()
        assert_same(saved_and_loaded(saved), saved)
        scalers.append(started(target, [1.0] * live, {"init_scale": 7.0}))
        scalers[-1].load_state_dict(saved_and_loaded(saved))
        assert scalers[-1].state_dict() == saved
    assert_all_go_on_alike(scalers)


def test_a_policy_that_torch_does_not_know_is_saved_and_torch_loads_its_part_of_it():
    policy = DynamicScale(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0)
    scaler = GradScaler("cpu", policy=policy)
    trained(scaler, [1.0, math.inf])
    saved = saved_and_loaded(scaler.state_dict())
    assert saved["_overflow_tracker"] == 1
    restored, plain = GradScaler("cpu"), TorchScaler("cpu")
    for one in (restored, plain):
        one.load_state_dict(saved)
    assert plain.state_dict() == {key: saved[key] for key in KEYS}
    assert_all_go_on_alike([restored, scaler])
    plain.load_state_dict(GradScaler("cpu", policy=StaticScale(init_scale=32.0)).state_dict())
    assert plain.get_scale() == 32.0


# Pickles.


@pytest.mark.parametrize("live", [False, True], ids=["lazy", "live"])
def test_what_one_scaler_pickles_the_other_restores(history: list[float], live: bool):
    scalers = []
    for source, target in PAIRS:
        before = started(source, history)
        scalers.append(started(target, [1.0], {}) if live else target.__new__(target))
        scalers[-1].__setstate__(pickle.loads(pickle.dumps(before.__getstate__())))
        assert scalers[-1].state_dict() == before.state_dict()
        assert scalers[-1]._scale is None
        assert (scalers[-1].is_enabled(), scalers[-1]._device) == (True, "cpu")
        scaler = target("cpu")
        scaler.__setstate__(source("cpu", enabled=False).__getstate__())
        assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    assert_all_go_on_alike(scalers)


@pytest.mark.usefixtures("group")
def test_an_unpickled_sharded_scaler_agrees_over_the_default_group_and_asks_for_any_other(history: list[float]):
    scaler = started(ShardedGradScaler, history)
    assert_all_go_on_alike([pickle.loads(pickle.dumps(scaler)), scaler])
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
