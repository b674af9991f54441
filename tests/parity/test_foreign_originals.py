"""Runs that another system began and gradscale goes on with: the scale after every step is what it would have been.

torch, jmp, flax and Keras themselves, cut at random points of random runs; Megatron, DeepSpeed, apex, NeMo and fairseq
by their documented rules, which are first held against the recorded traces.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from foreign_rules import RULES, Megatron, ours
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from gradscale.interop.foreign import ForeignState, load_foreign_state

# Before Keras is imported; its default is TensorFlow.
os.environ.setdefault("KERAS_BACKEND", "numpy")

TRACES = json.loads(Path(__file__).with_name("policy_traces.json").read_text(encoding="utf-8"))
SEQUENCES: dict[str, str] = TRACES["sequences"]

STEPS = st.lists(st.sampled_from("CCCO"), min_size=1, max_size=30).map("".join)
CUTS = st.floats(0, 1)
INTERVALS = st.integers(1, 5)
SCALES = st.integers(-3, 20).map(lambda power: 2.0**power)


def split(steps: str, cut: float) -> tuple[str, str]:
    """Return the steps before and after a point that is given as a fraction."""
    at = round(cut * len(steps))
    return steps[:at], steps[at:]


# The originals that can be installed. Each runs some steps and returns the scales; `state` is saved in between.


class Torch:
    """torch.amp.GradScaler on the CPU."""

    def __init__(self, scale: float, interval: int) -> None:
        torch = require("torch")
        self.parameter = torch.nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.SGD([self.parameter], 0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self.scaler.scale(torch.ones(()))

    def run(self, steps: str) -> list[float]:
        torch = require("torch")
        scales = []
        for step in steps:
            self.parameter.grad = torch.full((), float("inf") if step == "O" else 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales


@pytest.mark.torch
@settings(max_examples=examples(40))
@given(steps=STEPS, cut=CUTS, interval=INTERVALS, scale=SCALES)
def test_a_run_that_torch_began_goes_on_as_in_torch(steps: str, cut: float, interval: int, scale: float) -> None:
    before, after = split(steps, cut)
    original = Torch(scale, interval)
    original.run(before)
    loaded = load_foreign_state(original.scaler.state_dict())
    assert (loaded.format, loaded.missing) == ("torch", ())
    assert ours(loaded, after) == original.run(after)


def run_jmp(original: Any, steps: str) -> tuple[Any, list[float]]:
    jnp = require("jax").numpy
    scales = []
    for step in steps:
        original = original.adjust(jnp.asarray(step == "C"))
        scales.append(float(original.loss_scale))
    return original, scales


@pytest.mark.jax
@settings(max_examples=examples(15))
@given(steps=STEPS, cut=CUTS, interval=INTERVALS, scale=SCALES, factor=st.sampled_from([2, 4]))
def test_a_run_that_jmp_began_goes_on_as_in_jmp(
    steps: str, cut: float, interval: int, scale: float, factor: int
) -> None:
    jmp, jnp = require("jmp"), require("jax").numpy
    before, after = split(steps, cut)
    zero, least = jnp.zeros((), jnp.int32), jnp.float32(0.125)
    original, _ = run_jmp(jmp.DynamicLossScale(jnp.float32(scale), zero, interval, factor, least), before)
    loaded = load_foreign_state(vars(original))
    assert (loaded.format, loaded.missing) == ("jmp", ())
    assert ours(loaded, after) == run_jmp(original, after)[1]


def run_flax(original: Any, steps: str) -> tuple[Any, list[float]]:
    jnp = require("jax").numpy
    scales = []
    for step in steps:
        error = jnp.float32(np.inf if step == "O" else 1.0)
        original = original.value_and_grad(lambda weight, error=error: error * weight)(jnp.float32(1.0)).dynamic_scale
        scales.append(float(original.scale))
    return original, scales


@pytest.mark.jax
@pytest.mark.parametrize("road", ["fields", "state dict", "msgpack"])
@settings(max_examples=examples(10))
@given(steps=STEPS, cut=CUTS, interval=INTERVALS, scale=SCALES)
def test_a_run_that_flax_began_goes_on_as_in_flax(
    road: str, steps: str, cut: float, interval: int, scale: float
) -> None:
    require("flax")
    from flax import serialization
    from flax.training.dynamic_scale import DynamicScale as FlaxScale

    jnp = require("jax").numpy
    before, after = split(steps, cut)
    original, _ = run_flax(FlaxScale(growth_interval=interval, scale=jnp.float32(scale)), before)
    if road == "fields":
        loaded = load_foreign_state(vars(original))
        assert loaded.missing == ()
    else:
        saved = serialization.to_state_dict(original)
        if road == "msgpack":
            saved = serialization.msgpack_restore(serialization.to_bytes(original))
        loaded = load_foreign_state(saved, growth_interval=interval)
        assert set(loaded.missing) == {"growth_factor", "backoff_factor", "growth_interval", "min_scale"}
        assert "growth_interval" not in loaded.assumed
    assert loaded.format == "flax"
    assert ours(loaded, after) == run_flax(original, after)[1]


class Keras:
    """Keras' LossScaleOptimizer, on whichever of its backends is in use."""

    def __init__(self, scale: float, interval: int) -> None:
        self.keras = require("keras")
        self.variable = self.keras.Variable(np.ones(1, np.float32))
        optimizers = self.keras.optimizers
        self.optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.0), scale, interval)
        self.optimizer.build([self.variable])

    def run(self, steps: str) -> list[float]:
        scales = []
        for step in steps:
            value = np.asarray([np.inf if step == "O" else 1.0], np.float32)
            # With jax, apply() works inside a compiled step alone.
            variables = [variable.value for variable in self.optimizer.variables]
            gradients = [self.keras.ops.convert_to_tensor(value)]
            _, changed = self.optimizer.stateless_apply(variables, gradients, [self.variable.value])
            for variable, new in zip(self.optimizer.variables, changed, strict=True):
                variable.assign(new)
            scales.append(float(self.optimizer.dynamic_scale))
        return scales

    def saved(self, road: str, folder: Path) -> Any:
        if road == "variables":
            return {variable.name: variable for variable in self.optimizer.variables}
        numbered: dict[str, Any] = {}
        self.optimizer.save_own_variables(numbered)
        if road == "numbered":
            return numbered
        import h5py

        with h5py.File(folder / "optimizer.h5", "w") as file:
            for name, value in numbered.items():
                file[name] = value
        return h5py.File(folder / "optimizer.h5")


# Keras' variables predate NumPy 2's copy=.
@pytest.mark.tier("ranks")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize(
    ("seed", "road"), [(0, "variables"), (1, "numbered"), (2, "h5"), (3, "variables"), (4, "numbered"), (5, "h5")]
)
def test_a_run_that_keras_began_goes_on_as_in_keras(road: str, seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    steps = "".join(draw.choice(list("CCCO"), 30))
    before, after = split(steps, draw.random())
    interval = int(draw.integers(1, 6))
    original = Keras(256.0, interval)
    original.run(before)
    loaded = load_foreign_state(original.saved(road, tmp_path), growth_interval=interval)
    assert (loaded.format, loaded.missing, dict(loaded.assumed)) == ("keras", ("growth_interval",), {})
    assert ours(loaded, after) == original.run(after)


# Those that are here by their rules alone.


def theirs(rule: Any, steps: str) -> list[Any]:
    """Return the scale after each step of a rule, which is left at the last."""
    scales: list[Any] = []
    for step in steps:
        try:
            rule.update(step == "O")
        except RuntimeError:
            return [*scales, "raised"]
        scales.append(rule.scale)
    return scales


def recorded(name: str, sequence: str) -> list[Any]:
    scales = TRACES["implementations"][name]["scale_after_each_step"][sequence]
    return ["raised" if isinstance(scale, dict) else scale for scale in scales]


@pytest.mark.parametrize("name", RULES)
def test_the_rules_are_the_originals(name: str) -> None:
    for sequence, steps in SEQUENCES.items():
        assert theirs(copy.copy(RULES[name]), steps) == recorded(name, sequence), sequence


@pytest.mark.tier("ranks")
@pytest.mark.numpy
@pytest.mark.parametrize("name", RULES)
def test_a_recorded_run_goes_on_from_wherever_it_is_cut(name: str) -> None:
    for sequence, steps in SEQUENCES.items():
        original = copy.copy(RULES[name])
        stride = len(steps) // examples(len(steps))
        for cut in range(len(steps)):
            if cut % stride == 0:
                loaded = original.load()
                assert loaded.format == ("nemo" if "amp_C" in name else name.partition(".")[0])
                expected = theirs(copy.copy(original), steps[cut:])
                if "fairseq" not in name:
                    assert expected == recorded(name, sequence)[cut:]
                assert ours(loaded, steps[cut:]) == expected, (sequence, cut)
            if theirs(original, steps[cut]) == ["raised"]:
                break


def test_a_tracker_that_is_off_by_one_is_told_apart() -> None:
    loaded = Megatron(2).load()
    for key in ("_growth_tracker", "_overflow_tracker"):
        wrong = ForeignState("megatron", loaded.policy, loaded.state_dict | {key: 1}, (), {})
        assert any(ours(wrong, steps) != ours(loaded, steps) for steps in ("CCCC", "OOCC")), key
