"""Training with mlx.nn and mlx.optimizers: a bad batch leaves no trace, in the scaler's loop and in compiled ones."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, StaticScale

mx = require("mlx")
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402

import gradscale_mlx  # noqa: E402

pytestmark = pytest.mark.mlx

STEPS, BAD = 12, (4, 7)


class LoRALinear(nn.Module):
    """A frozen linear layer, and two small matrices that learn beside it."""

    def __init__(self, linear, rank: int = 2):
        super().__init__()
        self.linear = linear
        outputs, inputs = linear.weight.shape
        self.lora_a = mx.random.normal((inputs, rank)) / math.sqrt(inputs)
        self.lora_b = mx.zeros((rank, outputs))

    def __call__(self, x):
        return self.linear(x) + x @ self.lora_a @ self.lora_b


def made_model(dtype):
    """Return a small model of which only the LoRA matrices are trained."""
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.relu, nn.Linear(16, 4))
    model.freeze()
    model.layers[0], model.layers[2] = LoRALinear(model.layers[0]), LoRALinear(model.layers[2])
    model.layers[0].linear.freeze()
    model.layers[2].linear.freeze()
    model.set_dtype(dtype)
    return model


def batches(dtype, bad: float | None):
    """Return the batches, of which two hold a bad number, or are left out."""
    mx.random.seed(1)
    made = [(mx.random.normal((6, 8)).astype(dtype), mx.random.normal((6, 4)).astype(dtype)) for _ in range(STEPS)]
    if bad is None:
        return [batch for step, batch in enumerate(made) if step not in BAD]
    for step in BAD:
        made[step][0][2, 3] = bad
    return made


OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.05),
    "adamw-scheduled": lambda: optim.AdamW(optim.cosine_decay(0.05, STEPS)),
    "adam-corrected": lambda: optim.Adam(0.05, bias_correction=True),
    "adafactor": lambda: optim.Adafactor(),
    "muon-and-lion": lambda: optim.MultiOptimizer([optim.Muon(0.05), optim.Lion(0.01)], [lambda name, _: "_a" in name]),
}


def everything(model, optimizer):
    """Return the weights and the optimizer's state as Python's numbers."""
    mx.eval(model.state, optimizer.state)
    kept = {"model": model.parameters(), "optimizer": optimizer.state}
    return {name: (str(x.dtype), x.astype(mx.float32).tolist()) for name, x in tree_flatten(kept)}


def loss_of(model, x, y):
    return mx.mean(mx.square(model(x) - y))


def scalers_loop(dtype, optimizer, given: list[tuple[Any, Any]], **settings):
    """Train with a GradScaler, and return what came of it, and which steps were skipped."""
    model, scaler = made_model(dtype), GradScaler(**settings)
    trained = gradscale_mlx.ModelAndOptimizer(model, optimizer)
    skipped = []

    def scaled_loss(x, y):
        return scaler.scale(loss_of(model, x, y))

    differentiate = nn.value_and_grad(model, scaled_loss)
    for batch in given:
        _, trained.grads = differentiate(*batch)
        scaler.step(trained)
        scaler.update()
        mx.eval(model.state, optimizer.state)
        skipped.append(scaler.last_step(trained).skipped)
    return everything(model, optimizer), skipped


def pure_loop(dtype, optimizer, given: list[tuple[Any, Any]], policy, is_compiled: bool):
    """Train by the pure functions and ``step_if``, and return what came of it."""
    model = made_model(dtype)
    trained = gradscale_mlx.ModelAndOptimizer(model, optimizer)
    captured = [model.state, optimizer.state]

    def step(state, x, y):
        grads = nn.value_and_grad(model, lambda x, y: gradscale.scale(loss_of(model, x, y), state))(x, y)[1]
        grads, nonfinite = gradscale.unscale(grads, state)
        trained.step_if(nonfinite == 0, grads)
        return policy.update(state, nonfinite=nonfinite)

    if is_compiled:
        step = functools.partial(mx.compile, inputs=captured, outputs=captured)(step)
    state = policy.init(mx.zeros(()))
    for batch in given:
        state = step(state, *batch)
        mx.eval(captured, state)
    return everything(model, optimizer)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_batch_in_bfloat16_leaves_the_weights_of_a_run_without_it(name: str, bad: float):
    settings: dict[str, Any] = {"policy": StaticScale(1.0)}
    ended, skipped = scalers_loop(mx.bfloat16, OPTIMIZERS[name](), batches(mx.bfloat16, bad), **settings)
    without, _ = scalers_loop(mx.bfloat16, OPTIMIZERS[name](), batches(mx.bfloat16, None), **settings)
    assert skipped == [step in BAD for step in range(STEPS)]
    assert ended == without
    fresh = everything(made_model(mx.bfloat16), optim.SGD(0.1))
    moved = {key for key in fresh if key.startswith("model") and ended[key] != fresh[key]}
    assert moved == {f"model.layers.{layer}.lora_{part}" for layer in (0, 2) for part in "ab"}
    # Without a scaler the batch stays in the weights or in the optimizer's state for good.
    spoilt, _ = scalers_loop(mx.bfloat16, OPTIMIZERS[name](), batches(mx.bfloat16, bad), enabled=False)
    assert ("nan" in repr(spoilt), "nan" in repr(ended)) == (True, False)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_pure_loop_and_the_compiled_one_skip_what_the_scaler_skips(name: str):
    given, policy = batches(mx.float32, math.nan), DynamicScale(init_scale=1024.0, growth_interval=3)
    ended, _ = scalers_loop(mx.float32, OPTIMIZERS[name](), given, policy=policy)
    assert pure_loop(mx.float32, OPTIMIZERS[name](), given, policy, False) == ended
    compiled = pure_loop(mx.float32, OPTIMIZERS[name](), given, policy, True)
    without = pure_loop(mx.float32, OPTIMIZERS[name](), batches(mx.float32, None), StaticScale(1024.0), True)
    assert compiled == without


@pytest.mark.parametrize("pred", [False, mx.array([False, True])], ids=["bool", "two"])
def test_a_step_that_cannot_be_chosen_leaves_the_model_and_its_optimizer_as_they_were(pred):
    model = nn.Linear(2, 2)
    trained = gradscale_mlx.ModelAndOptimizer(model, optim.Adam(0.1))
    grads = tree_map(lambda x: mx.full(x.shape, math.nan), model.trainable_parameters())
    trained.optimizer.init(grads)
    before = [x.tolist() for _, x in tree_flatten((model.parameters(), trained.optimizer.state))]
    with pytest.raises(InvalidTypeError):
        trained.step_if(pred, grads)
    assert [x.tolist() for _, x in tree_flatten((model.parameters(), trained.optimizer.state))] == before


def test_an_optimizer_of_mlx_alone_is_no_optimizer_of_a_scaler():
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    with pytest.raises(InvalidTypeError, match=r"an optimizer must have .*got .*SGD"):
        scaler.step(optim.SGD(0.1))
