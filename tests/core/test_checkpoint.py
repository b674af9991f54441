"""State dicts: complete, in torch's keys, checked before anything is changed; and pickling and copying."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from axes import require
from libraries import Library
from optimizers import Tree, iterate

from gradscale import CallOrderError, DynamicScale, GradScaler, StateDictError, StaticScale, presets

# See conftest.py.
LONG = True

POLICIES = {
    "default": DynamicScale(),
    "everything": DynamicScale(
        init_scale=512.0,
        growth_factor=1.5,
        backoff_factor=0.3,
        growth_interval=3,
        growth_after="first_interval_plus_one",
        hysteresis=2,
        hysteresis_refill=("growth", "backoff"),
        min_scale=0.1,
        max_scale=2.0**20,
        at_min="hold",
    ),
    "tolerance": DynamicScale(tolerance=0.3, growth_interval=3, at_min="raise"),
    "static": StaticScale(8.0),
    "delayed": presets.mxnet(growth_interval=2),
    "widening": presets.metaseq(growth_interval=3, tolerance=0.3),
    "gradual": presets.chainer(growth_interval=5, init_scale=64.0),
}
SEQUENCE = [1.0, math.nan, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Any:
    """Return a policy of each kind."""
    return POLICIES[request.param]


def run(arrays: Library, scaler: GradScaler, values: list[float]) -> list[Any]:
    """Return the report and the state after each iteration."""
    optimizer = Tree()
    return [(iterate(arrays, scaler, optimizer, [value]), scaler.state_dict()) for value in values]


ROADS: dict[str, Callable[[GradScaler], GradScaler]] = {}


def _load(saved: Any) -> GradScaler:
    scaler = GradScaler(policy=DynamicScale(init_scale=3.0, growth_interval=11))
    scaler.load_state_dict(saved)
    return scaler


ROADS["state_dict"] = lambda scaler: _load(scaler.state_dict())
ROADS["json"] = lambda scaler: _load(json.loads(json.dumps(scaler.state_dict())))
ROADS["pickle"] = lambda scaler: pickle.loads(pickle.dumps(scaler))
ROADS["deepcopy"] = copy.deepcopy
ROADS["copy"] = copy.copy


def assert_goes_on_exactly(arrays: Library, policy: Any, roads: Callable[[int], Iterable[str]]) -> None:
    """Cut a run at each iteration, and go on by some roads to the end of it."""
    straight = run(arrays, GradScaler(policy=policy), SEQUENCE)
    first = GradScaler(policy=policy)
    for cut in range(len(SEQUENCE)):
        for road in roads(cut):
            second = ROADS[road](first)
            assert second.state_dict() == first.state_dict(), road
            assert run(arrays, second, SEQUENCE[cut:]) == straight[cut:], road
        assert run(arrays, first, SEQUENCE[cut : cut + 1]) == straight[cut : cut + 1]


def test_a_run_goes_on_exactly_from_any_iteration(arrays: Library, policy: Any) -> None:
    # Each road from every fifth iteration.
    assert_goes_on_exactly(arrays, policy, lambda cut: [list(ROADS)[cut % len(ROADS)]])


@pytest.mark.tier("all")
def test_a_run_goes_on_exactly_from_any_iteration_by_any_road(arrays: Library, policy: Any) -> None:
    assert_goes_on_exactly(arrays, policy, lambda _: ROADS)


@pytest.mark.parametrize("road", ["state_dict", "json"])
def test_a_live_scaler_takes_a_state_dict_over_where_it_is(arrays: Library, policy: Any, road: str) -> None:
    first, second = GradScaler(policy=policy), GradScaler()
    run(arrays, first, SEQUENCE)
    run(arrays, second, SEQUENCE[:3])
    saved = first.state_dict()
    second.load_state_dict(json.loads(json.dumps(saved)) if road == "json" else saved)
    assert second.state_dict() == saved
    assert run(arrays, second, SEQUENCE) == run(arrays, first, SEQUENCE)


def test_a_copy_goes_its_own_way(arrays: Library) -> None:
    first = GradScaler(growth_interval=1)
    run(arrays, first, [1.0])
    before = first.state_dict()
    for road in ROADS:
        other = ROADS[road](first)
        run(arrays, other, [1.0, 1.0])
        other.set_growth_interval(9)
        assert first.state_dict() == before


@pytest.mark.torch
def test_a_copy_may_go_on_in_another_library() -> None:
    from libraries import opened

    with opened("numpy") as first, opened("torch") as second:
        scaler = GradScaler(growth_interval=3)
        run(first, scaler, [math.nan, 1.0])
        reports = run(second, pickle.loads(pickle.dumps(scaler)), [1.0, 1.0])
        assert [state["scale"] for _, state in reports] == [32768.0, 65536.0]


def test_the_keys_and_plain_types_of_a_state_dict(arrays: Library, policy: Any) -> None:
    scaler = GradScaler(policy=policy)
    run(arrays, scaler, SEQUENCE)
    saved = scaler.state_dict()
    assert list(saved)[:4] == ["scale", "growth_factor", "backoff_factor", "growth_interval"]
    assert set(saved) == {
        "scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
        "_overflow_tracker",
        "_rescale_tracker",
        "version",
        "iteration",
        "policy",
    }
    assert saved["policy"] == {"kind": type(policy).__name__, **dataclasses.asdict(policy)}
    assert saved["iteration"] == len(SEQUENCE) + 1
    for value in [*saved.values(), *saved["policy"].values()]:
        assert type(value) in (float, int, bool, str, dict, tuple, type(None)), value


def test_the_state_dict_of_a_fresh_scaler_is_complete(policy: Any) -> None:
    saved = GradScaler(policy=policy).state_dict()
    assert saved["scale"] == policy.init_scale
    assert (saved["_growth_tracker"], saved["iteration"]) == (0, 1)


# What may be loaded.

TORCH = {"scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


def test_the_five_keys_of_torch_are_enough(arrays: Library) -> None:
    scaler = GradScaler(policy=DynamicScale(min_scale=2.0, hysteresis=2))
    scaler.load_state_dict(TORCH)
    expected = DynamicScale(growth_factor=3.0, backoff_factor=0.25, growth_interval=7, min_scale=2.0, hysteresis=2)
    assert {key: scaler.state_dict()[key] for key in TORCH} == TORCH
    assert scaler.state_dict()["policy"] == GradScaler(policy=expected).state_dict()["policy"]
    assert [state["scale"] for _, state in run(arrays, scaler, [1.0, 1.0])] == [1024.0, 3072.0]


def test_a_resumed_scaler_may_unscale_before_it_scales(arrays: Library) -> None:
    scaler = GradScaler()
    scaler.load_state_dict(TORCH)
    optimizer = Tree([arrays.asarray([2048.0])])
    with pytest.warns(UserWarning, match=r"scale\(\) was not called"):
        scaler.step(optimizer)
    arrays.assert_array(optimizer.seen[0][0], [2.0])


@pytest.mark.parametrize(
    "saved",
    [
        {name: np.asarray(value) for name, value in TORCH.items()},
        {name: np.float64(value) if isinstance(value, float) else np.int32(value) for name, value in TORCH.items()},
        OrderedDict(TORCH),
        MappingProxyType(TORCH),
        TORCH | {"unknown": object(), "scheduler": None},
    ],
    ids=["0-d arrays", "numpy scalars", "OrderedDict", "read-only", "unknown keys"],
)
def test_what_checkpoint_formats_make_of_it_loads(saved: Any) -> None:
    scaler = GradScaler()
    scaler.load_state_dict(saved)
    assert {key: scaler.state_dict()[key] for key in TORCH} == TORCH


def test_leaving_out_the_policy_keeps_the_scalers_own() -> None:
    saved = GradScaler(policy=DynamicScale(hysteresis=3, growth_interval=5)).state_dict()
    del saved["policy"]
    scaler = GradScaler(policy=DynamicScale(hysteresis=2, min_scale=4.0))
    scaler.load_state_dict(saved)
    assert scaler.state_dict()["policy"]["hysteresis"] == 2
    assert scaler.state_dict()["policy"]["min_scale"] == 4.0
    assert scaler.get_growth_interval() == 5


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 4.0), (2.0**30, 256.0), (64.0, 64.0)])
def test_a_scale_outside_of_the_bounds_is_moved_to_the_nearer(scale: float, expected: float) -> None:
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0, max_scale=256.0))
    scaler.load_state_dict(TORCH | {"scale": scale})
    assert scaler.get_scale() == expected


def test_a_static_scale_and_torchs_factors() -> None:
    scaler = GradScaler(policy=StaticScale(8.0))
    scaler.load_state_dict(TORCH)
    assert scaler.get_scale() == 1024.0
    assert scaler.state_dict()["policy"] == {"kind": "StaticScale", "init_scale": 8.0}
    with pytest.raises(StateDictError, match="growth_factor"):
        scaler.load_state_dict(TORCH | {"growth_factor": math.nan})
    static = scaler.state_dict()
    del static["policy"]
    scaler.load_state_dict(static)
    with pytest.raises(StateDictError, match="growth_factor"):
        GradScaler().load_state_dict(static)


# What may not.

BROKEN: dict[str, Any] = {
    "no mapping": [("scale", 1.0)],
    "none": None,
    "empty": {},
    "newer version": TORCH | {"version": 2},
    "version zero": TORCH | {"version": 0},
    "version of text": TORCH | {"version": "1"},
    "iteration zero": TORCH | {"iteration": 0},
    "policy of text": TORCH | {"policy": "DynamicScale"},
    "policy of another kind": TORCH | {"policy": {"kind": "Other"}},
    "policy of an unhashable kind": TORCH | {"policy": {"kind": []}},
    "policy without kind": TORCH | {"policy": {}},
    "policy with an unknown setting": TORCH | {"policy": {"kind": "DynamicScale", "margin": 3}},
    "policy with a bad setting": TORCH | {"policy": {"kind": "DynamicScale", "hysteresis": 0}},
    "policy with a key that is no text": TORCH | {"policy": {"kind": "DynamicScale", 3: 3}},
}
for _key in TORCH:
    BROKEN[f"no {_key}"] = {name: value for name, value in TORCH.items() if name != _key}
    for _value in (None, "1", math.nan, math.inf, -1, [1.0], True, 10**400, np.array([1.0, 2.0])):
        BROKEN[f"{_key}={_value!r:.20}"] = TORCH | {_key: _value}
for _key in ("_growth_tracker", "_overflow_tracker", "_rescale_tracker", "iteration"):
    for _value in (-1, 1.5, 2**63, "0", None):
        BROKEN[f"{_key}={_value!r}"] = TORCH | {_key: _value}
for _value in (0.0, 1e-40, 1e39):
    BROKEN[f"scale={_value}"] = TORCH | {"scale": _value}


@pytest.mark.parametrize("wrong", BROKEN)
def test_a_broken_state_dict_is_refused_and_changes_nothing(wrong: str) -> None:
    with_state, without = GradScaler(growth_interval=3), GradScaler(growth_interval=3)
    with_state.scale(np.float32(1.0))
    for scaler in (with_state, without):
        before = scaler.state_dict()
        given = copy.copy(BROKEN[wrong])
        with pytest.raises(StateDictError) as caught:
            scaler.load_state_dict(given)
        assert isinstance(caught.value, ValueError)
        assert scaler.state_dict() == before
        assert repr(given) == repr(BROKEN[wrong])


def test_an_edited_factor_wins_over_the_saved_policy() -> None:
    scaler = GradScaler(policy=DynamicScale(hysteresis=2))
    scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 500})
    assert scaler.get_growth_interval() == 500
    assert scaler.state_dict()["policy"]["hysteresis"] == 2


def test_a_policy_of_the_users_is_never_replaced() -> None:
    class Mine(DynamicScale):
        """A policy of a user's own."""

    scaler = GradScaler(policy=Mine(growth_interval=3))
    with pytest.raises(StateDictError, match=r"holds a DynamicScale, and this scaler's policy is .*leave out the key"):
        scaler.load_state_dict(GradScaler().state_dict())
    saved = GradScaler(init_scale=8.0, growth_interval=5).state_dict()
    del saved["policy"]
    scaler.load_state_dict(saved)
    assert "policy=test_a_policy_of_the_users_is_never_replaced.<locals>.Mine(" in repr(scaler)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 5)


@pytest.mark.numpy
def test_gradients_under_way_are_unscaled_by_what_they_were_scaled_with() -> None:
    scaler, optimizer = GradScaler(), Tree()
    factor = scaler.scale(np.float32(1.0))
    scaler.load_state_dict(GradScaler(init_scale=1024.0).state_dict())
    optimizer.grads = [np.full(3, 5.0, np.float32) * factor]
    scaler.step(optimizer)
    assert optimizer.grads[0].tolist() == [5.0] * 3
    scaler.update()
    assert scaler.get_scale() == 1024.0
    assert float(scaler.scale(np.float32(1.0))) == 1024.0


@pytest.mark.parametrize("road", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_that_would_divide_gradients_under_way_by_a_loaded_scale_is_refused(arrays: Library, road: Any) -> None:
    scaler, optimizer = GradScaler(), Tree()
    factor = scaler.scale(arrays.asarray(1.0))
    road(scaler)
    scaler.load_state_dict(GradScaler(init_scale=1024.0).state_dict())
    with pytest.raises(CallOrderError, match=r"the copy would divide them by the loaded scale"):
        road(scaler)
    optimizer.grads = [factor * arrays.asarray([5.0])]
    scaler.step(optimizer)
    arrays.assert_array(optimizer.grads[0], [5.0])
    scaler.update()
    road(scaler)


def test_the_messages_name_what_is_wrong() -> None:
    scaler = GradScaler()
    for saved, message in (
        ({}, "empty, as a disabled scaler saves it; .* enabled=False"),
        (TORCH | {"scale": math.nan}, "scale must be a finite number, got nan; nothing was changed"),
        (TORCH | {"version": 2}, "version 2 is newer than 1, .* upgrade it"),
        (TORCH | {"_growth_tracker": -3}, "_growth_tracker must be an integer from 0 .* got -3"),
        (TORCH | {"scale": 10**5000}, "scale .*got an integer of 16610 bits"),
        (TORCH | {"policy": {"kind": np.array(["a", "b"])}}, "the kind of the policy must be one of .*got array"),
        (TORCH | {"policy": {"kind": "DynamicScale", "warmup": 3}}, r"not know, got \['warmup'\]; a DynamicScale has"),
        ({"scale": 1.0}, r"keys \['growth_factor', .*'_growth_tracker'\] are missing, got \['scale'\]"),
    ):
        with pytest.raises(StateDictError, match=message):
            scaler.load_state_dict(saved)


# With torch's own scaler.


@pytest.mark.torch
def test_a_state_dict_of_torch_loads_here_and_ours_there() -> None:
    torch = require("torch")
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=4)
    theirs.scale(torch.tensor(1.0))
    theirs._growth_tracker.fill_(3)
    ours = GradScaler()
    ours.load_state_dict(pickle.loads(pickle.dumps(theirs.state_dict())))
    assert {key: ours.state_dict()[key] for key in theirs.state_dict()} == theirs.state_dict()
    ours.scale(np.float32(1.0))
    ours.step(Tree([np.ones(1, np.float32)]))
    ours.update()
    assert ours.get_scale() == 1024.0
    theirs.load_state_dict(ours.state_dict())
    assert (theirs.get_scale(), theirs._get_growth_tracker(), theirs.get_growth_interval()) == (1024.0, 0, 4)
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(GradScaler(policy=StaticScale(8.0)).state_dict())
    assert fresh.get_scale() == 8.0
