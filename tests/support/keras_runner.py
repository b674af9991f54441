"""Runs as a process of its own, since Keras takes its backend when it is imported: a recipe, and Keras's own scaler.

Prints a JSON object: what either has come to, and what the recipe goes on to with and without having been saved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from recipe_blocks import JAX_PAGE, TORCH_PAGE, blocks_on

BATCHES, FEATURES = 8, 6
# As in the recipes, so that the same batches overflow.
SETTINGS = {"initial_scale": 2.0**16, "dynamic_growth_steps": 500}


def made_model() -> Any:
    """Return a small network that computes in float16, always the same."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(FEATURES, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def made_pairs(overflows: list[int]) -> tuple[Any, Any]:
    """Return inputs and targets of 8 examples a batch, of which some batches overflow, counted from 1."""
    inputs = np.random.default_rng(0).normal(size=(8 * BATCHES, FEATURES)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True) / 16
    for batch in overflows:
        targets[8 * (batch - 1)] = np.inf
    return inputs, targets


def told(model: Any) -> dict[str, Any]:
    """Return a model's weights, bit for bit, and how many steps its optimizer has taken."""
    weights = [np.asarray(weight).tobytes().hex() for weight in model.get_weights()]
    return {"weights": weights, "iterations": int(model.optimizer.iterations)}


def main() -> None:
    """Run the recipe of the backend that KERAS_BACKEND names."""
    overflows, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    inputs, targets = made_pairs(overflows)
    names = {"model": made_model(), "inputs": inputs, "targets": targets}
    is_jax = keras.backend.backend() == "jax"
    exec(compile(blocks_on(JAX_PAGE if is_jax else TORCH_PAGE)["keras"], "keras recipe", "exec"), names)
    model = names["model"]
    answer: dict[str, Any] = {"recipe": told(model)}
    if is_jax:
        state = names["optimizer"].state()
        answer |= {"scale": float(state.scale), "tracker": int(state.growth_tracker)}
    else:
        scaler = names["scaler"]
        answer |= {"scale": scaler.get_scale(), "tracker": scaler._get_growth_tracker()}
        answer["skipped"] = [report.skipped for report in scaler.history]

    own = made_model()
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), **SETTINGS)
    own.compile(optimizer=wrapped, loss="mse")
    own.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
    answer |= {"own": told(own), "own_scale": float(wrapped.dynamic_scale), "own_tracker": int(wrapped.step_counter)}

    model.save(folder / "model.keras")
    loaded = keras.models.load_model(
        folder / "model.keras", custom_objects={"ScaledOptimizer": names["ScaledOptimizer"]}
    )
    for name, one in (("on", model), ("loaded_on", loaded)):
        one.fit(*made_pairs([2]), batch_size=8, shuffle=False, verbose=0)
        answer[name] = told(one)
        if is_jax:
            answer[name]["scale"] = float(one.optimizer.state().scale)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
