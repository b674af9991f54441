"""MLX: the suite on every dtype, one evaluation for a step, and training by a scaler and by the pure functions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from axes import require
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, SkipSpikes, StaticScale
from gradscale.testing import check_backend, check_library

mx = require("mlx")
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

import gradscale_mlx  # noqa: E402

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float64"])
def test_the_adapter_gives_the_bits_of_the_pure_core(dtype: str):
    check_backend(gradscale_mlx.backend, mx.zeros(1), dtypes=[getattr(mx, dtype)])


def test_mlx_needs_no_adapter_for_the_pure_functions():
    check_library(mx.zeros(1))
    assert isinstance(gradscale.registry.backend_for(mx.zeros(1)), gradscale_mlx.MlxBackend)


def test_an_iteration_evaluates_once(monkeypatch: pytest.MonkeyPatch):
    evaluations: Counter[str] = Counter()

    def count(owner, name: str):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            evaluations[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("eval", "async_eval"):
        count(mx, name)
    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "__array__", "__repr__"):
        # Some came with later versions.
        if hasattr(mx.array, name):
            count(mx.array, name)
    assert bool(mx.array(True))
    assert evaluations == {"__bool__": 1}
    scaler, tree, weights = GradScaler(init_scale=1024.0, skip=SkipSpikes(window=8)), Tree(), mx.ones(3)
    for iteration in range(6):
        bad = math.nan if iteration == 3 else 1.0
        evaluations.clear()
        tree.grads = mx.grad(lambda w, bad=bad: scaler.scale((w * w).sum() * bad))(weights)
        scaler.unscale_(tree, max_norm=10.0)
        assert not evaluations
        scaler.step(tree)
        scaler.update()
        assert evaluations == {"eval": 1}, iteration
        is_taken = mx.array(not scaler.last_step(tree).skipped)
        weights = gradscale.select(is_taken, weights - 0.25 * tree.grads, weights)
    assert (tree.steps, scaler.get_scale(), weights.tolist()) == (5, 512.0, [0.5**5] * 3)


def test_what_a_scaler_cannot_do_in_a_transformed_function_or_with_an_optimizer_alone_is_said(
    monkeypatch: pytest.MonkeyPatch,
):
    def step(weights):
        scaler = GradScaler()
        scaler.step(Tree([mx.grad(lambda w: scaler.scale((w * w).sum()))(weights)]))

    for transform in (mx.compile, mx.vmap):
        with pytest.raises(InvalidTypeError, match=r"transforms cannot do, got: .*outside of mx.compile"):
            transform(step)(mx.ones((2, 3)))
    scaler = GradScaler()
    scaler.scale(mx.array(1.0))
    with pytest.raises(InvalidTypeError, match=r"an optimizer must have .*got .*SGD"):
        scaler.step(optim.SGD(0.1))

    # An error of MLX itself is not explained.
    monkeypatch.setattr(mx, "eval", mock.Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        gradscale_mlx.backend.read(mx.zeros(1, mx.int32))


# Training with mlx.nn and mlx.optimizers.


STEPS, BAD = 12, {4: -math.inf, 7: math.nan}
OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.05),
    "adamw-scheduled": lambda: optim.AdamW(optim.cosine_decay(0.05, STEPS)),
    "adam-corrected": lambda: optim.Adam(0.05, bias_correction=True),
    "adafactor": lambda: optim.Adafactor(),
    "muon-and-lion": lambda: optim.MultiOptimizer([optim.Muon(0.05), optim.Lion(0.01)], [lambda _, x: x.ndim == 2]),
}


def made(name: str, dtype):
    """Return a small model, of which the second layer learns, and an optimizer."""
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.relu, nn.Linear(16, 4))
    model.layers[0].freeze()
    model.set_dtype(dtype)
    return gradscale_mlx.ModelAndOptimizer(model, OPTIMIZERS[name]())


def everything(trained) -> dict[str, Any]:
    """Return the weights and the optimizer's state as Python's numbers."""
    kept = {"model": trained.model.parameters(), "optimizer": trained.optimizer.state}
    return {name: (str(x.dtype), x.astype(mx.float32).tolist()) for name, x in tree_flatten(kept)}


def loss_of(model, x, y):
    return mx.mean(mx.square(model(x) - y))


def by_scaler(trained, policy, **settings):
    """Return a step of a GradScaler, which tells whether it was skipped."""
    scaler = GradScaler(policy=policy, **settings)
    differentiate = nn.value_and_grad(trained.model, lambda x, y: scaler.scale(loss_of(trained.model, x, y)))

    def step(x, y):
        _, trained.grads = differentiate(x, y)
        scaler.step(trained)
        scaler.update()
        return scaler.last_step(trained).skipped

    return step


def by_functions(trained, policy, compiled=lambda step, _: step):
    """Return the same step, by the pure functions and ``step_if``."""
    model, held = trained.model, [policy.init(mx.zeros(()))]
    captured = [model.state, trained.optimizer.state]

    def pure(state, x, y):
        grads = nn.value_and_grad(model, lambda x, y: gradscale.scale(loss_of(model, x, y), state))(x, y)[1]
        grads, nonfinite = gradscale.unscale(grads, state)
        trained.step_if(nonfinite == 0, grads)
        return policy.update(state, nonfinite=nonfinite), nonfinite

    run = compiled(pure, captured)

    def step(x, y):
        held[0], nonfinite = run(held[0], x, y)
        mx.eval(captured)
        return bool(nonfinite)

    return step


def by_compiled_functions(trained, policy):
    return by_functions(trained, policy, lambda step, kept: mx.compile(step, inputs=kept, outputs=kept))


def train(by, name: str, dtype, policy, *, is_bad: bool = True, **settings):
    """Train on batches, two of which are bad or left out; return what came of it, and which were skipped."""
    trained = made(name, dtype)
    step, skipped = by(trained, policy, **settings), []
    mx.random.seed(1)
    for number in range(STEPS):
        x, y = (mx.random.normal((6, size)).astype(dtype) for size in (8, 4))
        if is_bad and number in BAD:
            x[2, 3] = BAD[number]
        if is_bad or number not in BAD:
            skipped.append(step(x, y))
    return everything(trained), skipped


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bad_batches_leave_what_a_run_without_them_leaves_in_any_loop(name: str):
    fresh, ends = everything(made(name, mx.float32)), []
    policy = DynamicScale(init_scale=1024.0, growth_interval=3)
    for by, dtype in ((by_scaler, mx.bfloat16), *((by, mx.float32) for by in (by_compiled_functions, by_functions))):
        ended, skipped = train(by, name, dtype, policy)
        without, _ = train(by, name, dtype, StaticScale(1024.0 if dtype == mx.float32 else 1.0), is_bad=False)
        assert skipped == [step in BAD for step in range(STEPS)]
        assert ended == without
        ends.append(ended)
    assert ends[1] == ends[2]
    moved = {key for key in fresh if key.startswith("model") and ends[-1][key] != fresh[key]}
    assert moved == {"model.layers.2.weight", "model.layers.2.bias"}
    assert train(by_scaler, name, mx.float32, policy)[0] == ends[-1]
    # Without a scaler a batch stays in the weights or in the optimizer's state for good.
    assert "nan" in repr(train(by_scaler, name, mx.bfloat16, None, enabled=False)[0])


@pytest.mark.parametrize("pred", [False, mx.array([False, True])], ids=["bool", "two"])
def test_a_step_that_cannot_be_chosen_leaves_the_model_and_its_optimizer_as_they_were(pred):
    trained = made("adam-corrected", mx.float32)
    grads = trained.model.trainable_parameters()
    trained.optimizer.init(grads)
    before = everything(trained)
    with pytest.raises(InvalidTypeError):
        trained.step_if(pred, grads)
    assert everything(trained) == before


@pytest.mark.parametrize("skip", [None, SkipSpikes(above=5.0)], ids=["no rule", "rule"])
@pytest.mark.parametrize("has_group", [False, True], ids=["alone", "group"])
def test_a_guards_step_judges_lazy_and_plain_values(has_group: bool, skip):
    guard = gradscale.StepGuard(group=mx.distributed.init() if has_group else None, skip=skip)
    for good, bad in ((1.0, math.nan), (mx.array(1.0), mx.array(math.inf)), (mx.array([1.0]), math.inf)):
        for name in ("loss", "norm"):
            optimizer = Tree([mx.array([1.0])])
            # Of which one is a number and the other an array.
            other = {"loss" if name == "norm" else "norm": mx.array(1.0) if isinstance(good, float) else 1.0}
            for value, is_bad in ((good, False), (bad, True)):
                guard.step(optimizer, **{name: value}, **other)
                report = guard.last_step(optimizer)
                assert report.reason == (("spike" if name == "loss" else "overflow") if is_bad else "stepped")
            assert optimizer.steps == 1
