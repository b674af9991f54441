"""State dicts: complete, in torch's keys, checked before anything is changed."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
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
    "gradual": presets.chainer(growth_interval=5, init_scale=64.0),
}
SEQUENCE = [1.0, math.nan, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest):
    """Return a policy of each kind."""
    return POLICIES[request.param]


def run(arrays: Library, scaler: GradScaler, values: list[float]):
    """Return the report and the state after each iteration."""
    optimizer = Tree()
    return [(iterate(arrays, scaler, optimizer, [value]), scaler.state_dict()) for value in values]


FACTORS = ["scale", "growth_factor", "backoff_factor", "growth_interval"]


def test_the_keys_and_plain_types_of_a_state_dict(arrays: Library, policy):
    scaler = GradScaler(policy=policy)
    run(arrays, scaler, SEQUENCE)
    saved = scaler.state_dict()
    trackers = ["_growth_tracker", "_overflow_tracker", "_rescale_tracker"]
    assert list(saved) == [*FACTORS, *trackers, "version", "iteration", "policy", "counts", "steps"]
    assert saved["policy"] == {"kind": type(policy).__name__, **dataclasses.asdict(policy)}
    assert saved["iteration"] == len(SEQUENCE) + 1
    for value in [*saved.values(), *saved["policy"].values()]:
        assert type(value) in (float, int, bool, str, dict, tuple, type(None)), value
    fresh = GradScaler(policy=policy).state_dict()
    assert list(fresh) == list(saved)
    assert (fresh["scale"], fresh["_growth_tracker"], fresh["iteration"]) == (policy.init_scale, 0, 1)


# What may be loaded.

TORCH = {"scale": 1024.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}


def test_the_five_keys_of_torch_are_enough(arrays: Library):
    scaler = GradScaler(policy=DynamicScale(min_scale=2.0, hysteresis=2))
    scaler.load_state_dict(TORCH)
    expected = DynamicScale(growth_factor=3.0, backoff_factor=0.25, growth_interval=7, min_scale=2.0, hysteresis=2)
    assert {key: scaler.state_dict()[key] for key in TORCH} == TORCH
    assert scaler.state_dict()["policy"] == GradScaler(policy=expected).state_dict()["policy"]
    assert [state["scale"] for _, state in run(arrays, scaler, [1.0, 1.0])] == [1024.0, 3072.0]
    # They say nothing of steps, so that these count from 0.
    assert scaler.counts()["taken"] == 2
    scaler.load_state_dict(TORCH)
    assert scaler.counts()["taken"] == 0


@pytest.mark.parametrize("form", [np.asarray, np.float64], ids=["0-d arrays", "numpy scalars"])
def test_what_checkpoint_formats_make_of_it_loads(form):
    integers = ("growth_interval", "_growth_tracker")
    saved = {name: np.int32(value) if name in integers else form(value) for name, value in TORCH.items()}
    scaler = GradScaler()
    scaler.load_state_dict(MappingProxyType(saved | {"unknown": object(), "scheduler": None}))
    assert {key: scaler.state_dict()[key] for key in TORCH} == TORCH


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 4.0), (2.0**30, 256.0), (64.0, 64.0)])
def test_a_scale_outside_of_the_bounds_is_moved_to_the_nearer(scale: float, expected: float):
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0, max_scale=256.0))
    scaler.load_state_dict(TORCH | {"scale": scale})
    assert scaler.get_scale() == expected


def test_a_static_scale_and_torchs_factors():
    scaler = GradScaler(policy=StaticScale(8.0))
    scaler.load_state_dict(TORCH)
    assert scaler.get_scale() == 1024.0
    assert scaler.state_dict()["policy"] == {"kind": "StaticScale", "init_scale": 8.0}
    with pytest.raises(StateDictError, match="growth_factor"):
        scaler.load_state_dict(TORCH | {"growth_factor": math.nan})
    # The factors of a static scale are none of a dynamic one.
    static = scaler.state_dict()
    del static["policy"]
    scaler.load_state_dict(static)
    with pytest.raises(StateDictError, match="growth_factor"):
        GradScaler().load_state_dict(static)


# What may not.

BROKEN: dict[str, tuple[Any, str]] = {
    "no mapping": ([("scale", 1.0)], "nothing was changed"),
    "empty": ({}, "empty, as a disabled scaler saves it; .* enabled=False"),
    "scale alone": (
        {"scale": 1.0},
        r"keys \['growth_factor', .* are missing, got \['scale'\] .*load_foreign_state",
    ),
    "newer version": (TORCH | {"version": 2}, "version 2 is newer than 1, .* upgrade it"),
    "version zero": (TORCH | {"version": 0}, "nothing was changed"),
    "version of text": (TORCH | {"version": "1"}, "nothing was changed"),
    "iteration zero": (TORCH | {"iteration": 0}, "nothing was changed"),
    "long scale": (TORCH | {"scale": 10**5000}, "scale .*got an integer of 16610 bits"),
}
POLICY_BROKEN: list[tuple[Any, str]] = [
    ("DynamicScale", "nothing was changed"),
    ({}, "nothing was changed"),
    ({"kind": "Other"}, "nothing was changed"),
    ({"kind": []}, "nothing was changed"),
    ({"kind": np.array(["a", "b"])}, "the kind of the policy must be one of .*got array"),
    ({"kind": "DynamicScale", "margin": 3}, r"not know, got \['margin'\]; a DynamicScale has"),
    ({"kind": "DynamicScale", 3: 3}, "nothing was changed"),
    ({"kind": "DynamicScale", "hysteresis": 0}, "hysteresis"),
]
BROKEN |= {f"policy {policy!r:.40}": (TORCH | {"policy": policy}, said) for policy, said in POLICY_BROKEN}
TRACKERS = ("_growth_tracker", "_overflow_tracker", "_rescale_tracker", "iteration")
for _keys, _values in (
    (TORCH, (None, "1", math.nan, math.inf, -1, [1.0], True, 10**400, np.array([1.0, 2.0]))),
    (TRACKERS, (-1, 1.5, 2**63, "0", None)),
    (("scale",), (0.0, 1e-40, 1e39)),
):
    BROKEN |= {
        f"{key}={value!r:.20}": (TORCH | {key: value}, f"{key} must be .*; nothing was changed")
        for key in _keys
        for value in _values
    }


@pytest.mark.parametrize(("given", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_state_dict_is_refused_and_changes_nothing(given, said: str):
    with_state, without = GradScaler(growth_interval=3), GradScaler(growth_interval=3)
    with_state.scale(np.float32(1.0))
    for scaler in (with_state, without):
        before = scaler.state_dict()
        with pytest.raises(StateDictError, match=said) as caught:
            scaler.load_state_dict(copy.copy(given))
        assert isinstance(caught.value, ValueError)
        assert scaler.state_dict() == before


def test_an_edited_factor_wins_over_the_saved_policy_and_the_scalers_own_policy_serves_without_one():
    scaler = GradScaler(policy=DynamicScale(hysteresis=2, growth_interval=5))
    scaler.load_state_dict(scaler.state_dict() | {"growth_interval": 500})
    saved = scaler.state_dict()
    assert (saved["growth_interval"], saved["policy"]["hysteresis"]) == (500, 2)
    del saved["policy"]
    other = GradScaler(policy=DynamicScale(hysteresis=3, min_scale=4.0))
    other.load_state_dict(saved)
    policy = other.state_dict()["policy"]
    assert (policy["hysteresis"], policy["min_scale"], other.get_growth_interval()) == (3, 4.0, 500)


def test_a_policy_of_the_users_is_never_replaced():
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


SAVED = GradScaler(init_scale=1024.0).state_dict()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_scale_that_is_set_before_any_array_is_not_that_of_a_copy(copied: Callable[[GradScaler], GradScaler]):
    scaler = GradScaler()
    scaler.load_state_dict(SAVED)
    other = copied(scaler)
    scaler.update(8.0)
    assert (scaler.get_scale(), other.get_scale()) == (8.0, 1024.0)


@pytest.mark.parametrize("road", [copy.copy, copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_after_a_load_has_the_loaded_scale_and_no_gradients_of_the_one_before(
    arrays: Library, road: Callable[[GradScaler], GradScaler]
):
    scaler, optimizer = GradScaler(), Tree()
    factor = scaler.scale(arrays.asarray(1.0))
    scaler.load_state_dict(SAVED)
    other = road(scaler)
    assert other.get_scale() == 1024.0
    optimizer.grads = [factor * arrays.asarray([5.0])]
    with pytest.raises(CallOrderError, match=r"scale\(\) has never been called since a state was loaded"):
        other.step(optimizer)
    optimizer.grads = [other.scale(arrays.asarray([5.0]))]
    other.step(optimizer)
    arrays.assert_array(optimizer.grads[0], [5.0])
