"""State dicts and pickles between torch's scalers and ours, both ways; and what a bad one leaves behind."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
from torch_runs import assert_same

from gradscale import CallOrderError, DynamicScale, GradscaleError, ScaleDesyncError, StateDictError, StaticScale
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.torch

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
SETTINGS = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 4}


def trained(torch: Any, scaler: Any, gradients: list[float]) -> list[Any]:
    """Train on with these gradients; return the scale, the tracker and the parameter after each iteration."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    seen = []
    for gradient in gradients:
        parameter.grad = torch.full((2,), gradient) * scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        seen.append([scaler.get_scale(), scaler._get_growth_tracker(), parameter.detach().clone()])
    return seen


def started(torch: Any, make: Any, gradients: list[float]) -> Any:
    """Return a scaler that has seen some iterations."""
    scaler = make("cpu", **SETTINGS)
    trained(torch, scaler, gradients)
    return scaler


# Fresh, in the middle of a run of clean steps, just after growth, and after an overflow.
HISTORIES = {"fresh": [], "clean": [1.0, 2.0], "grown": [1.0] * 4, "backed-off": [1.0, math.inf, 3.0]}
MORE = [0.5, 0.25, -1.0, math.nan, 1.0, 2.0, 3.0, 4.0]


@pytest.fixture(params=HISTORIES)
def history(request: pytest.FixtureRequest) -> list[float]:
    """Return gradients that a scaler has seen before it is saved."""
    return HISTORIES[request.param]


# State dicts.


def test_state_dicts_are_torchs(torch: Any, ours: Any, theirs: Any, history: list[float]) -> None:
    saved, expected = (started(torch, make, history).state_dict() for make in (ours, theirs))
    assert_same(saved, expected)
    assert list(saved) == KEYS


@pytest.mark.parametrize("live", [False, True], ids=["lazy", "live"])
def test_a_run_goes_on_alike_whichever_scaler_saved_it_and_whichever_loads_it(
    torch: Any, ours: Any, theirs: Any, history: list[float], live: bool
) -> None:
    runs = []
    for source in (ours, theirs):
        saved = started(torch, source, history).state_dict()
        for target in (ours, theirs):
            scaler = target("cpu", init_scale=7.0)
            if live:
                trained(torch, scaler, [1.0])
            scaler.load_state_dict(copy.deepcopy(saved))
            assert scaler.state_dict() == saved
            runs.append(trained(torch, scaler, MORE))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_state_dicts_pass_torchs_safe_loading(torch: Any, ours: Any, theirs: Any, history: list[float]) -> None:
    for source, target in ((ours, theirs), (theirs, ours), (ours, ours)):
        saved = started(torch, source, history).state_dict()
        file = io.BytesIO()
        torch.save({"scaler": saved}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["scaler"]
        assert_same(loaded, saved)
        scaler = target("cpu")
        scaler.load_state_dict(loaded)
        assert scaler.state_dict() == saved


def test_a_policy_that_torch_does_not_know_is_saved_and_torch_loads_its_part_of_it(
    torch: Any, ours: Any, theirs: Any
) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=3, hysteresis=2, max_scale=64.0)
    scaler = ours("cpu", policy=policy)
    trained(torch, scaler, [1.0, math.inf])
    saved = scaler.state_dict()
    assert saved["_overflow_tracker"] == 1
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    restored, plain = ours("cpu"), theirs("cpu")
    restored.load_state_dict(loaded)
    plain.load_state_dict(loaded)
    assert plain.state_dict() == {key: saved[key] for key in KEYS}
    assert_same(trained(torch, restored, MORE), trained(torch, scaler, MORE))
    static = ours("cpu", policy=StaticScale(init_scale=32.0))
    plain.load_state_dict(static.state_dict())
    assert plain.get_scale() == 32.0


@pytest.mark.usefixtures("group")
def test_the_sharded_scalers_state_dicts_are_torchs(torch: Any, history: list[float]) -> None:
    from torch.distributed.fsdp import sharded_grad_scaler

    from gradscale_torch import ShardedGradScaler

    runs = []
    powers = {"init_scale": 2.0**10, "growth_interval": 4}
    for source in (ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler):
        scaler = source("cpu", **powers)
        trained(torch, scaler, history)
        for target in (ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler):
            restored = target("cpu")
            restored.load_state_dict(scaler.state_dict())
            assert restored.state_dict() == scaler.state_dict()
            runs.append(trained(torch, restored, MORE))
    for run in runs[1:]:
        assert_same(run, runs[0])


# Pickles.


@pytest.mark.parametrize("live", [False, True], ids=["lazy", "live"])
def test_what_one_scaler_pickles_the_other_restores(
    torch: Any, ours: Any, theirs: Any, history: list[float], live: bool
) -> None:
    runs = []
    for source in (ours, theirs):
        for target in (ours, theirs):
            state = started(torch, source, history).__getstate__()
            if live:
                scaler = target("cpu")
                trained(torch, scaler, [1.0])
            else:
                scaler = target.__new__(target)
            scaler.__setstate__(pickle.loads(pickle.dumps(state)))
            assert scaler.state_dict() == started(torch, source, history).state_dict()
            assert scaler._scale is None
            assert scaler.is_enabled()
            assert scaler._device == "cpu"
            runs.append(trained(torch, scaler, MORE))
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_a_pickle_of_ours_holds_everything_that_torchs_holds(
    torch: Any, ours: Any, theirs: Any, history: list[float]
) -> None:
    mine, other = (started(torch, make, history).__getstate__() for make in (ours, theirs))
    assert {key: mine[key] for key in other} == other


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_goes_on_alike_and_on_its_own(
    torch: Any, ours: Any, theirs: Any, history: list[float], how: str
) -> None:
    runs = []
    for make in (ours, theirs):
        scaler = started(torch, make, history)
        copied = pickle.loads(pickle.dumps(scaler)) if how == "pickle" else copy.deepcopy(scaler)
        assert type(copied) is type(scaler)
        runs += [trained(torch, copied, MORE), trained(torch, scaler, MORE)]
    for run in runs[1:]:
        assert_same(run, runs[0])


@pytest.mark.usefixtures("group")
def test_an_unpickled_sharded_scaler_agrees_over_the_default_group_and_asks_for_any_other(
    torch: Any, history: list[float]
) -> None:
    from gradscale_torch import ShardedGradScaler

    scaler = started(torch, ShardedGradScaler, history)
    unpickled = pickle.loads(pickle.dumps(scaler))
    assert_same(trained(torch, unpickled, MORE), trained(torch, scaler, MORE))
    scaler.set_group(torch.distributed.group.WORLD)
    unpickled = pickle.loads(pickle.dumps(scaler))
    with pytest.raises(CallOrderError, match="set_group"):
        trained(torch, unpickled, MORE)


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_a_pickle_in_the_middle_of_an_iteration_is_an_error_as_at_torchs(
    torch: Any, ours: Any, theirs: Any, call: str
) -> None:
    for make, error in ((theirs, AssertionError), (ours, CallOrderError)):
        scaler = make("cpu")
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(torch.ones(()))
        getattr(scaler, call)(optimizer)
        for copier in (pickle.dumps, copy.deepcopy):
            with pytest.raises(error, match="beginning of an iteration"):
                copier(scaler)
        scaler.update()
        pickle.dumps(scaler)


def test_a_disabled_scaler_is_restored_disabled(ours: Any, theirs: Any) -> None:
    for source, target in ((ours, theirs), (theirs, ours), (ours, ours)):
        scaler = target("cpu")
        scaler.__setstate__(source("cpu", enabled=False).__getstate__())
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0
        assert scaler.state_dict() == {}


# Going on.


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_after_a_resume_torch_cannot_unscale_before_it_scales_and_ours_can(
    torch: Any, ours: Any, theirs: Any, how: str, call: str, fused: bool
) -> None:
    for make in (theirs, ours):
        before = started(torch, make, [1.0])
        if how == "pickle":
            scaler = pickle.loads(pickle.dumps(before))
        else:
            scaler = make("cpu")
            scaler.load_state_dict(before.state_dict())
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
        parameter.grad = torch.full((2,), 2000.0)
        if make is theirs:
            with pytest.raises(AssertionError, match="_scale is None"):
                getattr(scaler, call)(optimizer)
            continue
        with pytest.warns(UserWarning, match=r"scale\(\) was not called in iteration \d, and gradients of SGD"):
            getattr(scaler, call)(optimizer)
        if call == "unscale_":
            scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [-2.0, -2.0]
        assert not scaler.last_step(optimizer).skipped
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1000.0, 2)


# What cannot be loaded.

GOOD: dict[str, Any] = {
    "scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 10,
    "_growth_tracker": 3,
}
BAD = {
    **{f"without-{key}": {name: value for name, value in GOOD.items() if name != key} for key in GOOD},
    "empty": {},
    "scale-zero": {**GOOD, "scale": 0.0},
    "scale-inf": {**GOOD, "scale": math.inf},
    "scale-nan": {**GOOD, "scale": math.nan},
    "scale-negative": {**GOOD, "scale": -8.0},
    "scale-text": {**GOOD, "scale": "8.0"},
    "scale-none": {**GOOD, "scale": None},
    "scale-subnormal": {**GOOD, "scale": 1e-42},
    "growth-factor-one": {**GOOD, "growth_factor": 1.0},
    "backoff-factor-two": {**GOOD, "backoff_factor": 2.0},
    "backoff-factor-nan": {**GOOD, "backoff_factor": math.nan},
    "interval-zero": {**GOOD, "growth_interval": 0},
    "interval-half": {**GOOD, "growth_interval": 0.5},
    "tracker-negative": {**GOOD, "_growth_tracker": -1},
    "tracker-huge": {**GOOD, "_growth_tracker": 2**31},
    "tracker-nan": {**GOOD, "_growth_tracker": math.nan},
}


def everything(scaler: Any) -> list[Any]:
    """Return all that a state dict can change."""
    factors = [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]
    return [*factors, scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict(), repr(scaler)]


@pytest.mark.parametrize("live", [False, True], ids=["lazy", "live"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_state_dict_is_refused_and_changes_nothing(torch: Any, ours: Any, name: str, live: bool) -> None:
    scaler = ours("cpu", **SETTINGS)
    if live:
        trained(torch, scaler, [1.0, 1.0])
    before, tensors = everything(scaler), (scaler._scale, scaler._growth_tracker)
    with pytest.raises(StateDictError):
        scaler.load_state_dict(BAD[name])
    assert everything(scaler) == before
    assert scaler._scale is tensors[0]
    assert scaler._growth_tracker is tensors[1]
    reference = ours("cpu", **SETTINGS)
    if live:
        trained(torch, reference, [1.0, 1.0])
    assert_same(trained(torch, scaler, MORE), trained(torch, reference, MORE))


@pytest.mark.parametrize("bad", [None, 3, "text", [1, 2]], ids=["none", "int", "text", "list"])
def test_what_is_no_mapping_is_refused(ours: Any, bad: Any) -> None:
    scaler = ours("cpu")
    with pytest.raises(GradscaleError, match="mapping"):
        scaler.load_state_dict(bad)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("name", ["scale-zero", "scale-nan", "scale-inf"])
def test_torch_trains_on_with_the_scale_of_a_corrupted_checkpoint_and_ours_refuses_it(
    torch: Any, ours: Any, theirs: Any, name: str
) -> None:
    broken = theirs("cpu")
    broken.load_state_dict(BAD[name])
    *_, (scale, _, parameter) = trained(torch, broken, [1.0] * 20)
    assert not (scale > 0.0 and math.isfinite(scale))
    if name == "scale-zero":
        # All gradients are 0, which is finite, and are divided by 0.
        assert parameter.isnan().all()
    else:
        # Every step is skipped, for good.
        assert parameter.tolist() == [0.0, 0.0]
    sound = ours("cpu")
    with pytest.raises(StateDictError, match="scale"):
        sound.load_state_dict(BAD[name])
    [_, (scale, _, parameter)] = trained(torch, sound, [1.0] * 2)
    assert (scale, parameter.tolist()) == (65536.0, pytest.approx([-2.9] * 2))


@pytest.mark.parametrize("key", ["_init_scale", "_growth_factor", "_growth_interval", "_init_growth_tracker"])
def test_a_pickle_of_torchs_with_a_bad_number_is_refused(torch: Any, ours: Any, theirs: Any, key: str) -> None:
    state = started(torch, theirs, [1.0]).__getstate__()
    scaler = ours.__new__(ours)
    with pytest.raises(StateDictError):
        scaler.__setstate__({**state, key: -1})


def test_a_state_dict_is_refused_in_the_middle_of_an_iteration(torch: Any, ours: Any) -> None:
    scaler = ours("cpu", init_scale=4.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match="load_state_dict"):
        scaler.load_state_dict(GOOD)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == -0.25


def test_a_state_dict_that_is_loaded_after_the_backward_pass_serves_the_next_iteration(torch: Any, ours: Any) -> None:
    scaler = ours("cpu", init_scale=4.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(1) * scaler.scale(torch.ones(()))
    scaler.load_state_dict({**GOOD, "scale": 1024.0})
    scaler.step(optimizer)
    # The gradients were scaled by 4.
    assert parameter.item() == -1.0
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (1024.0, 4)


def test_a_checkpoint_after_ranks_have_differed_is_loaded_into_the_same_tensors(torch: Any) -> None:
    from gradscale_torch import GradScaler

    def rank(group: ThreadCollectives) -> tuple[bool, float]:
        scaler, parameter = GradScaler("cpu", group=group), torch.nn.Parameter(torch.zeros(1))
        parameter.grad = scaler.scale(torch.ones(1))
        saved, tensor = scaler.state_dict(), scaler._scale
        if group.rank:
            scaler.set_growth_factor(4.0)
        with pytest.raises(ScaleDesyncError):
            scaler.step(torch.optim.SGD([parameter]))
        scaler.load_state_dict(saved | {"scale": 8.0})
        return scaler._scale is tensor, scaler.get_scale()

    assert run_ranks(2, rank) == [(True, 8.0)] * 2
