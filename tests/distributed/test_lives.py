"""A scaler's random life, held to a plain model in each call, alone and on every rank; what an iteration refuses."""

import functools
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lives
import numpy as np
import pytest
from axes import require
from scenarios import OF_A_SCALE, SGD, Alone, iterate
from tiers import examples, later
from worlds import ThreadWorld, agree

import gradscale
from gradscale import GradScaler, InvalidTypeError, InvalidValueError, ShardedGradScaler, StateDictError, StepGuard

pytestmark = pytest.mark.numpy
LIBRARIES = ["numpy", "strict", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.tier("ranks")])]


@pytest.mark.parametrize("library", LIBRARIES)
# The life of the first seed has all that is drawn within few calls.
@pytest.mark.parametrize("seed", [1, *later("all", 2, 3, 4, 5, 6, 7, 9, 10)])
def test_a_random_life_alone_is_the_models(seed: int, library: str):
    require(library)
    counts = lives.live(None, examples(10_000 if library == "numpy" else 1_500), seed, library)["counts"]
    if library == "numpy":
        raised = ("unscale", "refuse", "step", "minimise", "update", "resume")
        reasons = ("stepped", "overflow", "spike", "refused", "closure steps", "closure skips", "closure has begun")
        named = (*lives.CALLS, *lives.ENDS, *reasons, *(f"{name} raises" for name in raised))
        assert min((counts[name], name) for name in named) > (0, "")


# Warnings of all ranks may come in any thread.
@pytest.mark.filterwarnings("ignore:scale.. was not called in iteration:UserWarning")
@pytest.mark.filterwarnings("ignore:skip= judges .*, and found nothing in this step:UserWarning")
@pytest.mark.filterwarnings("ignore:step.. of .*, none of whose parameters has a gradient:UserWarning")
@pytest.mark.parametrize("library", ["numpy", *later("ranks", "torch")])
def test_a_random_life_is_the_models_on_every_rank(world, library: str):
    require(library)
    agree(world, lives.live, [(examples(2_000) if isinstance(world, ThreadWorld) else 2_000, 7, library)])


STEPPED = gradscale.StepReport(False, 4.0, 0, "stepped", 1)
UPDATED = gradscale.UpdateReport(1, 4.0, False, 0, (STEPPED,), 4.0, {"taken": 1, "overflow": 0})
OTHER = UPDATED._replace(steps=(STEPPED._replace(reason="spike"),))
FIRST = {
    "counts": (UPDATED, UPDATED._replace(counts={"taken": 0}), "^told, counts: {.*} of the scaler, {'taken': 0} of"),
    "reports": ([UPDATED], [OTHER], "^told, 0, steps, 0, reason: 'stepped' .* 'spike' .*goes before a refusal"),
    "types": ({"scale": 4.0}, {"scale": 4}, "^told, scale: 4.0 of the scaler, 4 of the model .*one update"),
    "keys": ({"scale": 4.0}, {"steps": 4.0}, "^told: {'scale': 4.0} of the scaler, {'steps': 4.0} of the model$"),
    "lengths": ([1.0], [1.0, 2.0], r"^told: \[1.0\] of the scaler, \[1.0, 2.0\] of the model$"),
}


@pytest.mark.parametrize(("found", "expected", "said"), FIRST.values(), ids=FIRST)
def test_the_first_difference_from_the_model_is_told_by_its_rule(found: Any, expected: Any, said: str):
    assert re.search(said, lives.difference(found, expected, "told"))


def test_a_life_that_differs_says_in_what_and_what_came_before(monkeypatch: pytest.MonkeyPatch):
    saved = gradscale.GradScaler.state_dict
    monkeypatch.setattr(gradscale.GradScaler, "state_dict", lambda scaler: saved(scaler) | {"iteration": 99})
    said = r"^the saved state, iteration: 99 of the scaler, \d+ of the model \(one more after each update"
    with pytest.raises(AssertionError, match=said) as caught:
        lives.live(None, 2_000, 1)
    assert "rank 0 of 1: [" in caught.value.__notes__[0]


TORCHS = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
TRACKERS = ("_growth_tracker", "_overflow_tracker", "_rescale_tracker", "iteration")
SCALES = (0, 0.0, -1.0, math.inf, math.nan, 1e39, 1e-40, np.float32("nan"))
NO_SCALES = ("128", True, 1j, [128.0], object(), np.array([1.0, 2.0]), np.array([]), np.array(True), np.array("128"))
NO_NUMBERS = (None, "1", math.nan, math.inf, -1, [1.0], True, 10**400, np.array([1.0, 2.0]))
NEW_SCALE, CALL_IT = "new_scale must be .*got", r"must be an instance, got .*: call it, SGD\(\.\.\.\)$"
EACH = "an optimizer must have .*, got a (list|tuple|dict) of [12]: .* for each optimizer$"
# What is said of a state dict, the key, and values of it.
STATES: list[tuple[Any, ...]] = [
    ("version 2 is newer than 1, .* upgrade it", "version", 2),
    ("", "version", 0, "1"),
    ("", "iteration", 0),
    (r"counts\['taken'\]", "counts", {"taken": -1}),
    ("scale .*got an integer of 16610 bits", "scale", 10**5000),
    ("scale must be", "scale", 0.0, 1e-40, 1e39),
    ("", "policy", "DynamicScale", {}, {"kind": "Other"}, {"kind": []}, {"kind": "DynamicScale", 3: 3}),
    ("the kind of the policy must be one of .*got array", "policy", {"kind": np.array(["a", "b"])}),
    (r"not know, got \['margin'\]; a DynamicScale has", "policy", {"kind": "DynamicScale", "margin": 3}),
    ("hysteresis", "policy", {"kind": "DynamicScale", "hysteresis": 0}),
    ("spikes must be the text", "spikes", [], "{", '{"loss": 1}', "[" * 10**5),
    (r"spikes\[0\] must be a mapping", "spikes", "[3]"),
    (r"spikes\[0\]\['loss'\] must be a mapping", "spikes", '[{"loss": [1.0]}]'),
    (r"'values'\] must be a list", "spikes", '[{"loss": {"values": "1", "skipped": 0}}]'),
    *((r"'values'\] must be", "spikes", f'[{{"loss": {{"values": [{x}], "skipped": 0}}}}]') for x in ("NaN", 1e39)),
    *((r"'skipped'\] must be", "spikes", f'[{{"loss": {{"values": [1.0]{x}}}}}]') for x in ("", ', "skipped": -1')),
    *((f"{key} must be", key, *NO_NUMBERS) for key in TORCHS),
    *((f"{key} must be", key, -1, 1.5, 2**63, "0", None) for key in TRACKERS),
]


@pytest.mark.parametrize("kind", ["alone", "guard", "grid"])
def test_what_is_refused_in_the_middle_of_an_iteration_says_why_and_changes_nothing(kind: str):
    grid = functools.partial(ShardedGradScaler, group=[Alone(), Alone()])
    make: Callable[..., Any] = {"alone": GradScaler, "guard": StepGuard, "grid": grid}[kind]
    s, optimizer = make(skip=gradscale.SkipSpikes()), SGD([np.ones(1, np.float32)])
    several = [optimizer], (optimizer, optimizer), {"one": optimizer}
    # Over a group the others would wait for a message of unscale_.
    calls = s.step, s.refuse, s.diagnose, *[s.unscale_] * (kind != "grid")
    clip = lambda options: s.unscale_(optimizer, **options)  # noqa: E731
    # What is said, the call, and values for it.
    types: list[tuple[Any, ...]] = [
        (NEW_SCALE, s.update, *NO_SCALES),
        *((name, functools.partial(setattr, s, name), "print", [print, None]) for name in ("on_skip", "on_update")),
        (r"an optimizer must have step\(\)", s.refuse, "adam", object()),
        (r"must have step\(\), got .* of type SimpleNamespace", s.step, SimpleNamespace(grads=[])),
        *(row for call in calls for row in ((CALL_IT, call, SGD), (EACH, call, *several))),
        ("loss must be a", lambda x: s.scale(np.float32(1.0), loss=x), "1.0", True, np.ones(2), np.int32(1), 1j, [1.0]),
    ]
    values: list[tuple[Any, ...]] = [
        (NEW_SCALE, s.update, *SCALES, *(np.asarray([[x]]) for x in SCALES)),
        ('norm_over must be "rank" or "group", got \'world\'', clip, {"max_norm": 1.0, "norm_over": "world"}),
        ("got no max_norm", clip, {"norm_over": "rank"}),
    ]
    if kind == "grid":
        values.append(("one group, got 2", clip, {"max_norm": 1.0, "norm_over": "group"}))
    states: list[tuple[Any, ...]] = [
        ("nothing was changed", s.load_state_dict, [("scale", 1.0)], None),
        ("empty, as a disabled scaler saves it; .* enabled=False", s.load_state_dict, {}),
        ("'growth_factor', .* missing, .*load_foreign_state", s.load_state_dict, {"scale": 1.0}),
    ]
    for said, key, *wrong in STATES:
        states.append((f"{said}.*; nothing was changed", s.load_state_dict, *(TORCHS | {key: x} for x in wrong)))
    iterate(s, optimizer, optimizer.grads)
    s.scale(np.float32(1.0))
    s.step(optimizer)
    before = s.state_dict()
    for error, rows in ((InvalidTypeError, types), (InvalidValueError, values), (StateDictError, states)):
        for said, call, *wrong in rows:
            for value in wrong:
                with pytest.raises(error, match=said) as caught:
                    call(value)
                # A guard does not speak of a scale.
                assert kind != "guard" or error is StateDictError or not OF_A_SCALE.search(str(caught.value))
    assert s.state_dict() == before
    s.update()
    assert s.counts()["taken"] == 2
