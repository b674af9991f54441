"""Runs that another system began and gradscale goes on with: the scale after every step is what it would have been.

jmp, flax and Keras themselves, cut at random points of random runs; Megatron, DeepSpeed, apex and NeMo by the recorded
traces.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import opened
from optimizers import Tree, iterate
from tiers import examples

from gradscale import GradScaler, ScaleUnderflowError
from gradscale.tools.foreign import ForeignState, load_foreign_state

# Before Keras is imported; its default is TensorFlow.
os.environ["KERAS_BACKEND"] = "numpy"

TRACES = json.loads(Path(__file__).with_name("policy_traces.json").read_text(encoding="utf-8"))
SEQUENCES: dict[str, str] = TRACES["sequences"]

# The originals that can be installed: each runs some steps and returns the scales, and says what is to be loaded.


class Jmp:
    """jmp.DynamicLossScale, by factors of 4."""

    def __init__(self, scale: float, interval: int):
        self.jnp = require("jax").numpy
        zero, least = self.jnp.zeros((), self.jnp.int32), self.jnp.float32(0.125)
        self.original = require("jmp").DynamicLossScale(self.jnp.float32(scale), zero, interval, 4, least)

    def step(self, overflows: bool) -> float:
        self.original = self.original.adjust(self.jnp.asarray(not overflows))
        return float(self.original.loss_scale)

    def saved(self, _: str):
        return vars(self.original)


class Flax:
    """flax.training.dynamic_scale.DynamicScale."""

    def __init__(self, scale: float, interval: int):
        require("flax")
        from flax.training.dynamic_scale import DynamicScale as FlaxScale

        self.jnp = require("jax").numpy
        self.original: Any = FlaxScale(growth_interval=interval, scale=self.jnp.float32(scale))

    def step(self, overflows: bool) -> float:
        error = self.jnp.float32(np.inf if overflows else 1.0)
        self.original = self.original.value_and_grad(lambda weight: error * weight)(self.jnp.float32(1.0)).dynamic_scale
        return float(self.original.scale)

    def saved(self, road: str):
        from flax import serialization

        return vars(self.original) if road == "fields" else serialization.to_state_dict(self.original)


class Keras:
    """Keras' LossScaleOptimizer, on NumPy."""

    def __init__(self, scale: float, interval: int):
        self.keras = require("keras")
        self.variable = self.keras.Variable(np.ones(1, np.float32))
        optimizers = self.keras.optimizers
        self.optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.0), scale, interval)
        self.optimizer.build([self.variable])

    def step(self, overflows: bool) -> float:
        value = np.asarray([np.inf if overflows else 1.0], np.float32)
        self.optimizer.apply([self.keras.ops.convert_to_tensor(value)], [self.variable])
        return float(self.optimizer.dynamic_scale)

    def saved(self, road: str):
        if road == "variables":
            return {variable.name: variable for variable in self.optimizer.variables}
        numbered: dict[str, Any] = {}
        self.optimizer.save_own_variables(numbered)
        import h5py

        file = h5py.File("optimizer.h5", "w", driver="core", backing_store=False)
        for name, value in numbered.items():
            file[name] = value
        return file


def run(original, steps: str) -> list[float]:
    """Return the scale after each step."""
    return [original.step(step == "O") for step in steps]


FACTORS = {"growth_factor", "backoff_factor", "growth_interval", "min_scale"}
late = pytest.mark.tier("ranks")
# What is saved on which road, and what of it one has to say.
ORIGINALS = [
    pytest.param(Jmp, "", set(), marks=pytest.mark.jax, id="jmp"),
    pytest.param(Flax, "fields", set(), marks=pytest.mark.jax, id="flax-fields"),
    pytest.param(Flax, "state dict", FACTORS, marks=pytest.mark.jax, id="flax-state dict"),
    *[pytest.param(Keras, road, {"growth_interval"}, marks=late, id=f"keras-{road}") for road in ("variables", "h5")],
]


# Keras' variables predate NumPy 2's copy=.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(("kind", "road", "missing"), ORIGINALS)
@settings(max_examples=examples(15))
@given(
    steps=st.lists(st.sampled_from("CCCO"), min_size=1, max_size=30).map("".join),
    cut=st.floats(0, 1),
    interval=st.integers(1, 5),
    scale=st.integers(-3, 20).map(lambda power: 2.0**power),
)
def test_a_run_that_the_original_began_goes_on_as_there(
    kind, road: str, missing: set[str], steps: str, cut: float, interval: int, scale: float
):
    at = round(cut * len(steps))
    original = kind(scale, interval)
    run(original, steps[:at])
    given = {"growth_interval": interval} if missing else {}
    loaded = load_foreign_state(original.saved(road), **given)
    assert (loaded.format, set(loaded.missing)) == (kind.__name__.lower(), missing)
    assert set(loaded.assumed) <= missing - {"growth_interval"}
    assert ours(loaded, steps[at:]) == run(original, steps[at:])


# Those of which there is nothing here but a record.

WINDOW = {"scale_factor": 2.0, "scale_window": 4}
SAVED_BY_RECORD = ("apex.amp_C", "apex.fp16_utils", "apex.contrib", "megatron", "deepspeed")
RECORDED: dict[str, Any] = {
    name: variant["scale_after_each_step"]
    for name, variant in TRACES["implementations"].items()
    if name.startswith(SAVED_BY_RECORD)
}


def loaded_at(name: str, scales: list[float], before: str) -> ForeignState:
    """Return what is made of the state that a system saves after some steps, of these scales; the first is 256."""
    scale, done, last = scales[-1], len(before), before.rfind("O")
    clean = done - 1 - last
    grown = max((step + 1 for step in range(done) if scales[step + 1] > scales[step]), default=0)
    hysteresis = int(name.partition("h=")[2][:1] or 1)
    # Some refill it on every clean step, the others when the scale grows.
    is_refilled = "amp_C" in name or "consecutive=True" in name
    spent = before.count("O", before.rfind("C") + 1 if is_refilled else grown)
    counted = {"cur_scale": scale, "cur_iter": done, "last_overflow_iter": last, **WINDOW}
    if "amp_C" in name:
        saved = {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 4}
        saved |= {"_growth_tracker": clean % 4, "_hysteresis_tracker": hysteresis - spent}
        return load_foreign_state(saved, hysteresis=hysteresis)
    if "megatron" in name:
        saved = {"scale": np.asarray([scale]), "growth_tracker": clean % 4, "hysteresis_tracker": hysteresis - spent}
        return load_foreign_state(saved, growth_interval=4, hysteresis=hysteresis)
    if "LossScaler(h=" in name:
        counted |= {"min_scale": 1, "delayed_shift": hysteresis, "cur_hysteresis": max(hysteresis - spent, 1)}
        flags = {"consecutive_hysteresis": "consecutive=True", "raise_error_at_min_scale": "raise=True"}
        return load_foreign_state(counted | {key: text in name for key, text in flags.items()})
    if "contrib" in name or "stage0" in name:
        counted["dynamic_loss_scale"] = True
    return load_foreign_state(counted, format=name.partition(".")[0])


def ours(loaded: ForeignState, steps: str):
    """Return the scale after each step of a scaler that goes on from a saved state."""
    with opened("numpy") as library:
        scaler, optimizer = GradScaler(), Tree()
        scaler.load_state_dict(loaded.state_dict)
        got: list[Any] = []
        for step in steps:
            try:
                iterate(library, scaler, optimizer, [float("nan") if step == "O" else 1.0])
            except ScaleUnderflowError:
                return [*got, "raised"]
            got.append(scaler.get_scale())
        return got


@pytest.mark.tier("ranks")
@pytest.mark.numpy
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_goes_on_from_wherever_it_is_cut(name: str):
    for sequence, steps in SEQUENCES.items():
        scales = ["raised" if isinstance(scale, dict) else scale for scale in RECORDED[name][sequence]]
        stride = len(steps) // examples(len(steps))
        for cut in range(0, len(scales), stride):
            if "raised" not in scales[:cut]:
                loaded = loaded_at(name, [256.0, *scales[:cut]], steps[:cut])
                assert ours(loaded, steps[cut:]) == scales[cut:], (sequence, cut)


def test_a_tracker_that_is_off_by_one_is_told_apart():
    loaded = loaded_at("megatron.DynamicGradScaler(h=2)", [256.0], "")
    for key in ("_growth_tracker", "_overflow_tracker"):
        wrong = ForeignState("megatron", loaded.policy, loaded.state_dict | {key: 1}, (), {})
        assert any(ours(wrong, steps) != ours(loaded, steps) for steps in ("CCCC", "OOCC")), key
