"""The presets against the recorded scales of 43 variants of known systems, step by step.

``policy_traces.json`` holds the scale after each step of four sequences of clean (C) and overflowing (O) steps, as the
original code gave it, or what it raised. Common numbers: scale 256, interval 4, factor 2, minimum 1.

Equal means: the float32 that is nearest to the recorded number. Most of those are float32 numbers, so that it means
equal; Chainer and guided-diffusion compute in float64, and theirs are not.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import Library

from gradscale import presets
from gradscale.core.validation import SMALLEST_NORMAL

# Pure functions, and many calls of them; see conftest.py.
TRACED = LONG = True

TRACES = json.loads(Path(__file__).with_name("policy_traces.json").read_text(encoding="utf-8"))
SEQUENCES: dict[str, str] = TRACES["sequences"]
IMPLEMENTATIONS: dict[str, dict[str, Any]] = TRACES["implementations"]
RECORDED: dict[str, dict[str, list[Any]]] = {
    name: variant["scale_after_each_step"] for name, variant in IMPLEMENTATIONS.items()
}

# Presets that are not called like the package.
PRESETS = {
    "apex.amp_C.update_scale_hysteresis": "apex_hysteresis",
    "deepspeed.FP16_Optimizer": "deepspeed_stage0",
    "paddle.phi.update_loss_scaling": "paddle_static",
}
NOT_EXPRESSED = {"optax.apply_if_finite(max_consecutive_errors=3)": "has no scale"}

# Our names of the recorded parameters.
SETTINGS = {
    recorded: name
    for name, variants in {
        "init_scale": "init",
        "growth_factor": "growth factor",
        "backoff_factor": "backoff",
        "growth_interval": "window interval period incr_every_n_steps dynamic_growth_steps",
        "hysteresis": "delayed_shift decr_every_n_nan_or_inf",
        "raise_at_min": "raise_error_at_min_scale",
        "min_scale": "min min_loss_scale minimum_scale",
        "max_scale": "max",
    }.items()
    for recorded in variants.split()
}
# What a preset does not let one change, with the value that it has; and what the record says of itself.
FIXED: dict[str, Any] = {
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "min_scale": 1,
    "lg_growth_per_step": 0.001,
    "lg_backoff": 1,
    "bad_step_max": 1000,
    "keras": "3.15.1",
}


def system_of(name: str) -> str:
    """Return the name of a variant's preset."""
    return PRESETS.get(name.partition("(")[0], name.partition(".")[0])


def preset(name: str):
    """Return the preset of a variant, with the parameters that it was recorded with."""
    system = system_of(name)
    known = {name: each.default for name, each in inspect.signature(getattr(presets, system)).parameters.items()}
    settings = {} if system != "apex" else {"max_scale": None}
    for parameter, value in IMPLEMENTATIONS[name]["params"].items():
        setting = SETTINGS.get(parameter, parameter)
        if setting in known and value is not None:
            settings[setting] = value
        elif setting in known and setting != "threshold":
            assert (setting, known[setting]) == ("min_scale", SMALLEST_NORMAL)
        else:
            assert value is None or value == FIXED[setting], f"{name} was recorded with {parameter}={value}"
    return presets.named(system, **settings)


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
        if arrays.name == "dask":
            import dask

            # Its plan would otherwise hold all the steps before.
            state = type(state)(*map(arrays.asarray, dask.compute(*state), ("float32", *["int32"] * 3)))
        got.append(arrays.item(state.scale))
    return got


def nearest(recorded: list[Any]):
    """Return a recorded trace in float32, with "raised" in place of the original's exception."""
    return ["raised" if isinstance(value, dict) else float(np.float32(value)) for value in recorded]


VARIANTS = [name for name in RECORDED if name not in NOT_EXPRESSED]


def test_no_variant_is_left_out():
    assert len(RECORDED) == 43
    assert len(VARIANTS) == 42
    assert all(set(recorded) == set(SEQUENCES) for recorded in RECORDED.values())
    # torch is no part of the record: its own code is run beside ours.
    assert set(map(system_of, VARIANTS)) == set(presets.names()) - {"torch"}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_scale_is_the_originals_after_each_step(arrays: Library, name: str):
    rule = preset(name)
    for sequence, steps in SEQUENCES.items():
        expected = nearest(RECORDED[name][sequence])
        assert len(expected) == len(steps) or expected[-1] == "raised"
        assert trace(arrays, rule, steps) == expected, sequence


PLAIN: dict[str, Any] = {"init_scale": 256.0, "growth_interval": 4}


def test_a_wrong_rule_does_not_pass(strict: Library):
    """Every preset is told apart from its neighbours by some sequence."""
    h2 = "(h=2)"
    wrong = {
        f"megatron.DynamicGradScaler{h2}": presets.apex_hysteresis(**PLAIN, hysteresis=2),
        f"apex.amp_C.update_scale_hysteresis{h2}": presets.paddle(**PLAIN, hysteresis=2),
        "flax.DynamicScale": presets.deepspeed_stage0(**PLAIN),
        "jmp.DynamicLossScale": presets.flax(**PLAIN, min_scale=1.0),
        "guided_diffusion.MixedPrecisionTrainer": presets.guided_diffusion(init_scale=256.0, growth_interval=1001),
        "fairseq.DynamicLossScaler(tol=0.3,threshold=None,min=0.0001)": presets.fairseq(**PLAIN),
        "deepspeed.DynamicLossScaler(h=1,consecutive=True,raise=True)": presets.deepspeed(
            **PLAIN, hysteresis=1, raise_at_min=False
        ),
    }
    for name, rule in wrong.items():
        differs = [trace(strict, rule, steps) != nearest(RECORDED[name][key]) for key, steps in SEQUENCES.items()]
        assert any(differs), name
