"""Runs as a process of its own, since Keras takes its backend when it is imported: the class for it, and Keras's own.

``calls`` uses the class without ``fit``; ``weights`` saves weights alone; ``rules`` and ``recipes_keep_rules`` hold
loops to those of check_trainer; ``recipe`` runs the recipe and Keras's own scaler, and goes on with and without having
been saved. Each asserts what must come of it.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from recipe_blocks import INTEROP, JAX_PAGE, TORCH_PAGE, run_on, run_on_names
from scenarios import raised
from waiting_trainers import WaitingTrainer

import gradscale
from gradscale import InvalidTypeError, InvalidValueError, StaticScale, presets

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


def recipe(folder: Path):
    """Run the recipe of this backend, which skips as by Keras's own optimizer, also when it was saved and loaded."""
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    overflows = [1, 3, 8]
    inputs, targets = made_pairs(overflows)
    names = {"model": made_model(), "inputs": inputs, "targets": targets}
    with contextlib.redirect_stdout(io.StringIO()):
        names = run_on(JAX_PAGE if IS_JAX else TORCH_PAGE, "keras", **names)
    model = names["model"]
    found, scale = told(model), scale_in(model.optimizer)
    assert (found["iterations"], scale) == (5, [2.0**13, 0])
    assert IS_JAX or [r.skipped for r in names["scaler"].history] == [k in overflows for k in range(1, 9)]
    for blocks in (("before", "state"), (f"after_{keras.config.backend()}",)):
        names |= {"model": made_model()}
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                names = run_on(INTEROP / "other.md", f"keras_{block}", **names)
        assert told(names["model"]) == found
    saved = names["foreign"].state_dict
    assert [saved["scale"], saved["_growth_tracker"]] == scale_in(names["optimizer"]) == scale

    model.save(folder / "model.keras")
    ends = []
    for one in (model, keras.models.load_model(folder / "model.keras")):
        one.fit(*made_pairs([2]), batch_size=8, shuffle=False, verbose=0)
        ends.append(told(one) | {"scale": scale_in(one.optimizer)})
    assert ends[0] == ends[1]
    assert (ends[0]["iterations"], ends[0]["scale"]) == (12, [2.0**12, 6])


def calls(_folder: Path):
    """Use the class without a model: its example, steps of a policy that tolerates overflows, and bad arguments."""
    found = importlib.import_module(f"gradscale_{keras.config.backend()}.keras_optimizer")
    made, sgd = found.ScaledOptimizer, keras.optimizers.SGD(1.0)
    tried = doctest.testmod(found)
    assert tried.failed == 0 < tried.attempted
    policy = presets.megatron(init_scale=8.0)
    optimizer = made(sgd, policy if IS_JAX else torchs("cpu", policy=policy))
    weight = keras.Variable(np.zeros(1, np.float32))
    # The first overflow is tolerated, and the second one is not.
    for error, scale, moved in ((1.0, 8.0, -1.0), (np.inf, 8.0, -1.0), (np.inf, 8.0, -1.0), (2.0, 4.0, -3.0)):
        assert stepped(optimizer, weight, error) == (scale, moved)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(optimizer)))
    load = keras.saving.deserialize_keras_object
    kept, loaded = (one.policy if IS_JAX else one.scaler.state_dict()["policy"] for one in (optimizer, load(config)))
    assert repr(loaded) == repr(kept)
    bad, own = (json.loads(json.dumps(config)) for _ in range(2))
    saved = bad["config"]["policy" if IS_JAX else "scaler"]
    saved["growth_factor"] = saved["policy"]["growth_factor"] = "twice"
    raised(gradscale.StateDictError, lambda: load(bad), "'twice'")
    del own["config"]["policy" if IS_JAX else "scaler"]["policy"]
    if IS_JAX:
        raised(InvalidValueError, lambda: load(own), "the saved optimizer has a policy of your own")
    else:
        # It is the scaler's own then, as with torch's state dicts.
        load(own)
    said = "policy must be an instance of a policy" if IS_JAX else "scaler must be a GradScaler or ShardedGradScaler"
    raised(InvalidTypeError, lambda: made(keras.optimizers.SGD(1.0), 1024.0), said)
    said = "apply needs the variables, got none; call apply(grads, variables)"
    raised(InvalidValueError, lambda: optimizer.apply([keras.ops.zeros(1)]), said)
    told = "inner_optimizer must be an optimizer of Keras that does not scale", "an optimizer that scales already"
    for inner in ("adam", keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))):
        raised(InvalidTypeError, lambda inner=inner: made(inner), *told)
    plain = in_any_order(lambda inner: inner)
    assert in_any_order(lambda inner: made(inner, StaticScale(1.0)) if IS_JAX else inner) == plain


def in_any_order(around):
    """Return two variables after steps in which they come in another order, and one comes alone."""
    optimizer = around(keras.optimizers.Adam(0.5))
    pair = [keras.Variable(np.full(1, value, np.float32)) for value in (1.0, 2.0)]
    optimizer.build(pair)
    for chosen in ([0, 1], [1, 0], [1]):
        given = [keras.ops.convert_to_tensor(np.full(1, 8.0 * (k + 1), np.float32)) for k in chosen]
        optimizer.apply_gradients([(grad, pair[k]) for grad, k in zip(given, chosen, strict=True)])
    return [keras.ops.convert_to_numpy(one.value).tolist() for one in pair]


def stepped(optimizer, weight, grad: float = 0.5, dtype: str = "float32") -> tuple[float, float]:
    """Return the scale, and a weight after a step by a gradient of a dtype."""
    scale = float(optimizer.scale_loss(keras.ops.convert_to_tensor(np.float32(1.0))))
    optimizer.apply_gradients([(keras.ops.convert_to_tensor(np.asarray([grad * scale], dtype)), weight)])
    return scale, float(keras.ops.convert_to_numpy(weight.value)[0])


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

    model, expected = fitted(compiled(), [1, 3]), [2.0**14, 5]
    assert scale_in(model.optimizer) == expected
    path = folder / "model.weights.h5"
    model.save_weights(path)
    again = compiled()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    assert scale_in(again.optimizer) == expected
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    fitted(compiled(), [1, 3], callbacks=[backup])
    # It has come to its one epoch already.
    assert scale_in(fitted(compiled(), [], callbacks=[backup]).optimizer) == expected
    if IS_JAX:
        return

    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    other = compiled(torchs("cpu", init_scale=8.0))
    other.optimizer.build(other.trainable_variables)
    # The scale is kept where the store has none.
    other.optimizer.load_own_variables({key: value for key, value in store.items() if key.isdigit()})
    assert scale_in(other.optimizer)[0] == 8.0

    disabled = fitted(compiled(torchs("cpu", enabled=False)), [])
    disabled.save(folder / "disabled.keras")
    loaded = keras.models.load_model(folder / "disabled.keras")
    assert not loaded.optimizer.scaler.is_enabled()
    assert told(loaded) == told(disabled)

    # As Keras's own optimizer does, which casts gradients to the dtype of the weight; and after Ctrl-C.
    for dtype, of_grad in (("float32", "float16"), ("float16", "float16"), ("float16", "float32")):
        weight = keras.Variable(np.ones(1), dtype=dtype)
        assert stepped(found.ScaledOptimizer(keras.optimizers.SGD(0.5)), weight, dtype=of_grad)[1] == 0.75
    for part, call, kept in (("inner_optimizer", "apply", 0.75), ("scaler", "update", 0.5)):
        optimizer, weight = found.ScaledOptimizer(keras.optimizers.SGD(0.5)), keras.Variable(np.ones(1))
        owner, ends = getattr(optimizer, part), [KeyboardInterrupt, mock.DEFAULT]
        interrupted = mock.patch.object(owner, call, side_effect=ends, wraps=getattr(owner, call))
        with interrupted, contextlib.suppress(KeyboardInterrupt):
            stepped(optimizer, weight, dtype="float16")
        assert stepped(optimizer, weight, dtype="float16")[1] == kept


def rules(folder: Path):
    """Hold a loop of Keras, which saves and loads the model as a file, to the rules of check_trainer."""
    found = importlib.import_module(f"gradscale_{keras.config.backend()}.keras_optimizer")
    inputs, targets = made_pairs([])

    class Trainer:
        def __init__(self, init_scale: float = 2.0**10):
            options = {"init_scale": init_scale, "growth_interval": 3}
            scaler = gradscale.DynamicScale(**options) if IS_JAX else torchs("cpu", **options)
            self.model = made_model()
            rate = keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
            self.model.compile(optimizer=found.ScaledOptimizer(keras.optimizers.Adam(rate), scaler), loss="mse")

        def step(self, index: int, fault: float):
            rows = slice(8 * index, 8 * index + 8)
            self.model.train_on_batch(inputs[rows], targets[rows] * np.float32(fault))

        def state(self):
            optimizer = self.model.optimizer
            moments = [np.asarray(one) for one in optimizer.inner_optimizer.variables]
            rate = float(optimizer.inner_optimizer.learning_rate)
            return {"weights": self.model.get_weights(), "moments": moments, "rate": rate, "scale": scale_in(optimizer)}

        def save(self):
            self.model.save(folder / "trainer.keras")
            return folder / "trainer.keras"

        def load(self, path: Path):
            self.model = keras.models.load_model(path)

    report = gradscale.testing.check_trainer(Trainer, steps=6)
    assert report.faults == []
    assert report.runs == 5 + 6 + 2 + 6


def recipes_keep_rules(folder: Path):
    """Hold the recipes, which call fit, to the rules of check_trainer: each step fits one batch."""
    inputs, targets = made_pairs([])

    class Trainer(WaitingTrainer):
        def __init__(self, page: Path, block: str):
            self.model = made_model()
            self.model.fit = self.fit
            self.begin(run_on_names, page, block, {"model": self.model, "inputs": inputs, "targets": targets})

        def fit(self, inputs: Any, targets: Any, **options: Any):
            for index in self.steps():
                rows = slice(8 * index, 8 * index + 8)
                bad = targets[rows] * np.float32(self.fault)
                keras.Model.fit(self.model, inputs[rows], bad, verbose=0, **options)

        def state(self):
            optimizer = self.model.optimizer
            moments = [np.asarray(one) for one in optimizer.inner_optimizer.variables]
            return {"weights": self.model.get_weights(), "moments": moments, "scale": scale_in(optimizer)}

        def save(self):
            self.model.save(folder / "recipe.keras")
            return folder / "recipe.keras"

        def load(self, path: Path):
            self.model = keras.models.load_model(path)

    page, after = JAX_PAGE if IS_JAX else TORCH_PAGE, f"keras_after_{keras.config.backend()}"
    for where, block in ((page, "keras"), (INTEROP / "other.md", after)):
        report = gradscale.testing.check_trainer(functools.partial(Trainer, where, block), steps=4, kinds=["nan"])
        assert report.faults == []
        assert report.runs == 5 + 3 + 4


def torchs(*arguments, **options):
    from gradscale_torch import GradScaler

    return GradScaler(*arguments, **options)


IS_JAX = keras.config.backend() == "jax"

if __name__ == "__main__":
    # The last one sets the dtypes of all that follows.
    for what in (calls, weights, rules, recipes_keep_rules, recipe):
        what(Path(sys.argv[1]))
