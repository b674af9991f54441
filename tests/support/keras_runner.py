"""Runs as a process of its own, since Keras takes its backend when it is imported: the class for it, and Keras's own.

``recipe`` runs the recipe and Keras's own scaler, and goes on with and without having been saved; ``calls`` uses the
class without ``fit``; ``weights`` saves weights alone. Each prints a JSON object of what came of it.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from recipe_blocks import INTEROP, JAX_PAGE, TORCH_PAGE, run_on

import gradscale
from gradscale import StaticScale, presets

BATCHES, FEATURES = 8, 6


def made_model():
    """Return a small network that computes in float16, always the same."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(FEATURES, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def made_pairs(overflows: list[int]):
    """Return inputs and targets of 8 examples a batch, of which some batches overflow, counted from 1."""
    inputs = np.random.default_rng(0).normal(size=(8 * BATCHES, FEATURES)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True) / 16
    for batch in overflows:
        targets[8 * (batch - 1)] = np.inf
    return inputs, targets


def told(model):
    """Return a model's weights, bit for bit, and how many steps its optimizer has taken."""
    weights = [np.asarray(weight).tobytes().hex() for weight in model.get_weights()]
    return {"weights": weights, "iterations": int(model.optimizer.iterations)}


def scale_in(optimizer) -> list[float]:
    """Return the scale and the number of clean steps in a row."""
    if IS_JAX:
        return [float(optimizer.scale_state.scale), float(optimizer.scale_state.growth_tracker)]
    return [optimizer.scaler.get_scale(), optimizer.scaler.state_dict()["_growth_tracker"]]


def recipe(overflows: list[int], folder: Path):
    """Run the recipe of this backend."""
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    inputs, targets = made_pairs(overflows)
    names = {"model": made_model(), "inputs": inputs, "targets": targets}
    with contextlib.redirect_stdout(io.StringIO()):
        names = run_on(JAX_PAGE if IS_JAX else TORCH_PAGE, "keras", **names)
    model = names["model"]
    answer: dict[str, Any] = {"recipe": told(model), "scale": scale_in(model.optimizer)}
    if not IS_JAX:
        answer["skipped"] = [report.skipped for report in names["scaler"].history]

    for name, blocks in (("own", ("before", "state")), ("moved", (f"after_{keras.config.backend()}",))):
        names |= {"model": made_model()}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                names = run_on(INTEROP / "keras.md", block, **names)
        answer[name] = told(names["model"])
    saved = names["foreign"].state_dict
    answer |= {"own_scale": [saved["scale"], saved["_growth_tracker"]], "moved_scale": scale_in(names["optimizer"])}

    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    for name, one in (("on", model), ("loaded_on", loaded)):
        one.fit(*made_pairs([2]), batch_size=8, shuffle=False, verbose=0)
        answer[name] = told(one) | {"scale": scale_in(one.optimizer)}
    return answer


def raised(call) -> str:
    """Return the error that a call raises, by its class and its message."""
    try:
        call()
    except gradscale.GradscaleError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def calls():
    """Use the class without a model: its example, steps of a policy that tolerates overflows, and bad arguments."""
    found = importlib.import_module(f"gradscale_{keras.config.backend()}.keras_optimizer")
    made, sgd = found.ScaledOptimizer, keras.optimizers.SGD(1.0)
    policy = presets.megatron(init_scale=8.0)
    if IS_JAX:
        optimizer = made(sgd, policy)
    else:
        from gradscale_torch import GradScaler

        optimizer = made(sgd, GradScaler("cpu", policy=policy))
    weight = keras.Variable(np.zeros(1, np.float32))
    seen = []
    for error in (1.0, np.inf, np.inf, 2.0):
        scaled = float(optimizer.scale_loss(keras.ops.convert_to_tensor(np.float32(1.0))))
        grads = keras.ops.convert_to_tensor(np.asarray([error * scaled], np.float32))
        optimizer.apply_gradients([(grads, weight)])
        seen.append([scaled, float(keras.ops.convert_to_numpy(weight.value)[0])])
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    again = keras.saving.deserialize_keras_object(config)
    bad = json.loads(json.dumps(config))
    saved = bad["config"]["policy" if IS_JAX else "scaler"]
    saved["growth_factor"] = saved["policy"]["growth_factor"] = "twice"
    own = json.loads(json.dumps(config))
    del own["config"]["policy" if IS_JAX else "scaler"]["policy"]
    return {
        "example": doctest.testmod(found)._asdict(),
        "seen": seen,
        "saved": repr(again.policy if IS_JAX else again.scaler.state_dict()["policy"]),
        "kept": repr(policy if IS_JAX else optimizer.scaler.state_dict()["policy"]),
        "no scaler": raised(lambda: made(keras.optimizers.SGD(1.0), 1024.0)),
        "no variables": raised(lambda: optimizer.apply([grads])),
        "bad state": raised(lambda: keras.saving.deserialize_keras_object(bad)),
        "no optimizer": [
            raised(lambda inner=inner: made(inner))
            for inner in (
                *("adam", None, 3, keras.optimizers.SGD, json.loads(json.dumps(config))),
                *(around(keras.optimizers.SGD(1.0)) for around in (keras.optimizers.LossScaleOptimizer, made)),
            )
        ],
        "in any order": [
            in_any_order(around)
            for around in (lambda inner: made(inner, StaticScale(1.0)) if IS_JAX else inner, lambda inner: inner)
        ],
        "no policy": raised(lambda: keras.saving.deserialize_keras_object(own)),
    }


def in_any_order(around):
    """Return two variables after steps in which they come in another order, and one comes alone."""
    optimizer = around(keras.optimizers.Adam(0.5))
    pair = [keras.Variable(np.full(1, value, np.float32)) for value in (1.0, 2.0)]
    optimizer.build(pair)
    for chosen in ([0, 1], [1, 0], [1]):
        given = [keras.ops.convert_to_tensor(np.full(1, 8.0 * (k + 1), np.float32)) for k in chosen]
        optimizer.apply_gradients([(grad, pair[k]) for grad, k in zip(given, chosen, strict=True)])
    return [keras.ops.convert_to_numpy(one.value).tolist() for one in pair]


def stepped(optimizer, dtype: str, grads: str, weight=None) -> float:
    """Return a weight of a dtype, 1 at first, after a step of gradients of a dtype that are 0.5."""
    weight = keras.Variable(np.ones(1), dtype=dtype) if weight is None else weight
    scaled = float(optimizer.scale_loss(keras.ops.convert_to_tensor(np.float32(0.5))))
    optimizer.apply_gradients([(keras.ops.convert_to_tensor(np.asarray([scaled], grads)), weight)])
    return float(keras.ops.convert_to_numpy(weight.value)[0])


def weights(folder: Path):
    """Save and load weights without the model, and back up a run; on torch use other scalers, too, and dtypes."""
    found = importlib.import_module(f"gradscale_{keras.config.backend()}.keras_optimizer")

    def compiled(*arguments):
        model = made_model()
        model.compile(optimizer=found.ScaledOptimizer(keras.optimizers.SGD(0.25), *arguments), loss="mse")
        return model

    def fitted(model, overflows: list[int], **options):
        model.fit(*made_pairs(overflows), batch_size=8, shuffle=False, verbose=0, **options)
        return model

    model = fitted(compiled(), [1, 3])
    answer: dict[str, Any] = {"scale": scale_in(model.optimizer)}
    path = folder / "model.weights.h5"
    model.save_weights(path)
    again = compiled()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    answer["loaded"] = scale_in(again.optimizer)
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    fitted(compiled(), [1, 3], callbacks=[backup])
    # It has come to its one epoch already.
    answer["restored"] = scale_in(fitted(compiled(), [], callbacks=[backup]).optimizer)
    if IS_JAX:
        return answer

    from gradscale_torch import GradScaler

    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    kept = {key: value for key, value in store.items() if key.isdigit()}
    other = compiled(GradScaler("cpu", init_scale=8.0))
    other.optimizer.build(other.trainable_variables)
    other.optimizer.load_own_variables(kept)
    answer["kept where absent"] = scale_in(other.optimizer)[0]

    disabled = fitted(compiled(GradScaler("cpu", enabled=False)), [])
    disabled.save(folder / "disabled.keras")
    loaded = keras.models.load_model(folder / "disabled.keras")
    answer["disabled"] = [loaded.optimizer.scaler.is_enabled(), told(loaded) == told(disabled)]

    pairs = [("float32", "float16"), ("float16", "float16"), ("float16", "float32")]
    answer["stepped"] = [stepped(found.ScaledOptimizer(keras.optimizers.SGD(0.5)), *pair) for pair in pairs]
    for part, call in (("inner_optimizer", "apply"), ("scaler", "update")):
        optimizer, weight = found.ScaledOptimizer(keras.optimizers.SGD(0.5)), keras.Variable(np.ones(1))
        owner, ends = getattr(optimizer, part), [KeyboardInterrupt, mock.DEFAULT]
        interrupted = mock.patch.object(owner, call, side_effect=ends, wraps=getattr(owner, call))
        with interrupted, contextlib.suppress(KeyboardInterrupt):
            stepped(optimizer, *pairs[0], weight)
        answer["stepped"].append(stepped(optimizer, *pairs[0], weight))
    return answer


IS_JAX = keras.config.backend() == "jax"

if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "recipe":
        answer = recipe(json.loads(arguments[0]), Path(arguments[1]))
    else:
        answer = calls() if kind == "calls" else weights(Path(arguments[0]))
    print(json.dumps(answer))
