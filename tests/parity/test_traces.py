"""The presets against the recorded scales of 41 variants of known systems, step by step.

``policy_traces.json`` holds the scale after each step of four sequences of clean (C) and overflowing (O) steps, as the
original code gave it, or what it raised. Common numbers: scale 256, interval 4, factor 2, minimum 1.

Equal means: the float32 that is nearest to the recorded number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import Library, opened

from gradscale import presets

TRACES = json.loads(Path(__file__).with_name("policy_traces.json").read_text(encoding="utf-8"))
SEQUENCES: dict[str, str] = TRACES["sequences"]
IMPLEMENTATIONS: dict[str, dict[str, Any]] = TRACES["implementations"]
RECORDED: dict[str, dict[str, list[Any]]] = {
    name: variant["scale_after_each_step"] for name, variant in IMPLEMENTATIONS.items()
}

late = pytest.mark.tier("ranks")
LIBRARIES = [
    "numpy",
    pytest.param("strict", marks=late),
    pytest.param("jax-jit", marks=[pytest.mark.jax, pytest.mark.tier("all")]),
]

# The name and the settings of each variant's preset, by what it was recorded with ("params"). What optax leaves out has
# no scale.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    name: variant["preset"] for name, variant in IMPLEMENTATIONS.items() if not name.startswith("optax")
}


def trace(arrays: Library, rule, sequence: str):
    """Return the scale after each step, ending in "raised" where an overflow exhausts the policy."""
    update: Callable[..., Any] = rule.update
    if arrays.name == "jax-jit":
        import jax

        update = jax.jit(update)
    state = rule.init(arrays.asarray(0.0))
    got: list[Any] = []
    for step in sequence:
        at_min_scale = rule.at_min_scale(state)
        if step == "O" and at_min_scale is not None and arrays.item(at_min_scale):
            return [*got, "raised"]
        state = update(state, nonfinite=arrays.asarray(int(step == "O"), "int32"))
        got.append(arrays.item(state.scale))
    return got


def nearest(recorded: list[Any]):
    """Return a recorded trace in float32, with "raised" in place of the original's exception."""
    return ["raised" if isinstance(value, dict) else float(np.float32(value)) for value in recorded]


def test_no_variant_is_left_out():
    assert (len(RECORDED), len(PRESETS)) == (41, 40)
    assert all(set(recorded) == set(SEQUENCES) for recorded in RECORDED.values())
    # torch is no part of the record: its own code is run beside ours.
    assert {system for system, _ in PRESETS.values()} == set(presets.names()) - {"torch"}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", PRESETS)
def test_the_scale_is_the_originals_after_each_step(library: str, name: str):
    system, settings = PRESETS[name]
    rule = presets.named(system, **settings)
    with opened(library) as arrays:
        for sequence, steps in SEQUENCES.items():
            expected = nearest(RECORDED[name][sequence])
            assert len(expected) == len(steps) or expected[-1] == "raised"
            assert trace(arrays, rule, steps) == expected, sequence


PLAIN: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 4}


def test_a_wrong_rule_does_not_pass():
    """Every preset is told apart from its neighbours by some sequence."""
    h2 = "(h=2)"
    wrong = {
        f"megatron.DynamicGradScaler{h2}": presets.apex_hysteresis(**PLAIN, hysteresis=2),
        f"apex.amp_C.update_scale_hysteresis{h2}": presets.paddle(**PLAIN, hysteresis=2),
        "flax.DynamicScale": presets.deepspeed_stage0(**PLAIN),
        "jmp.DynamicLossScale": presets.flax(**PLAIN, min_scale=1.0),
        "fairseq.DynamicLossScaler(tol=0.3,threshold=None,min=0.0001)": presets.fairseq(**PLAIN),
        "deepspeed.DynamicLossScaler(h=1,consecutive=True,raise=True)": presets.deepspeed(
            **PLAIN, hysteresis=1, raise_at_min=False
        ),
    }
    with opened("numpy") as library:
        for name, rule in wrong.items():
            differs = [trace(library, rule, steps) != nearest(RECORDED[name][key]) for key, steps in SEQUENCES.items()]
            assert any(differs), name
