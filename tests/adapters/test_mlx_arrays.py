"""MLX's arrays: the suite on every dtype, one evaluation for a step, and the pure functions under mx.compile."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from axes import require

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, SkipSpikes
from gradscale.core.arithmetic import fingerprint
from gradscale.testing import check_backend, check_library

mx = require("mlx")
import gradscale_mlx  # noqa: E402

pytestmark = pytest.mark.mlx

DTYPES = ("float16", "bfloat16", "float32", "complex64", "float64")
POLICY = DynamicScale(init_scale=1024.0, growth_interval=2)


class Descent:
    """Weights and their gradient, stepped lazily."""

    def __init__(self):
        self.weights, self.grads, self.steps = mx.ones(3), None, 0

    def step(self):
        self.weights = self.weights - 0.25 * self.grads
        self.steps += 1


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count whatever makes MLX evaluate an array."""
    counted: Counter[str] = Counter()

    def counting(owner, name: str):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for name in ("eval", "async_eval"):
        counting(mx, name)
    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "__array__", "__repr__"):
        # Some came with later versions.
        if hasattr(mx.array, name):
            counting(mx.array, name)
    return counted


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_adapter_gives_the_bits_of_the_pure_core(dtype: str):
    check_backend(gradscale_mlx.backend, mx.zeros(1), dtypes=[getattr(mx, dtype)])


def test_mlx_needs_no_adapter_for_the_pure_functions():
    check_library(mx.zeros(1))
    assert isinstance(gradscale.registry.backend_for(mx.zeros(1)), gradscale_mlx.MlxBackend)
    assert not hasattr(mx.array, "device")


@pytest.mark.xfail(raises=AttributeError, reason="array_api_compat has nothing for MLX's arrays, which have no device")
def test_array_api_compat_knows_where_an_array_of_mlx_is():
    # When this passes, device and on of core/arithmetic.py can go for array_api_compat's own device() and constructors.
    import array_api_compat

    array_api_compat.device(mx.zeros(1))


def test_an_iteration_evaluates_once(evaluations: Counter[str]):
    assert bool(mx.array(True))
    assert evaluations == {"__bool__": 1}
    scaler, descent = GradScaler(init_scale=1024.0, skip=SkipSpikes(window=8)), Descent()
    for iteration in range(6):
        bad = math.nan if iteration == 3 else 1.0
        differentiate = mx.value_and_grad(lambda w, bad=bad: scaler.scale((w * w).sum() * bad))
        evaluations.clear()
        _, descent.grads = differentiate(descent.weights)
        scaler.unscale_(descent, max_norm=10.0)
        assert not evaluations
        scaler.step(descent)
        scaler.update()
        assert evaluations == {"eval": 1}, iteration
    assert (descent.steps, scaler.get_scale(), descent.weights.tolist()) == (5, 512.0, [0.5**5] * 3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_pure_functions_under_compile_give_the_bits_they_give_outside(bad: float):
    def step(weights, state, factor):
        grads = mx.grad(lambda w: gradscale.scale((w * w * factor).sum(), state))(weights)
        grads, nonfinite = gradscale.unscale(grads, state)
        moved = {"w": weights - 0.3 * grads}
        return gradscale.select(nonfinite == 0, moved, {"w": weights})["w"], POLICY.update(state, nonfinite=nonfinite)

    ends = []
    for call in (step, mx.compile(step)):
        weights, state = mx.array([1.0, -2.0, 1e-3]), POLICY.init(mx.zeros(()))
        for iteration in range(8):
            weights, state = call(weights, state, mx.array(bad if iteration in (2, 3) else 1.0))
        mx.eval(weights, state)
        assert isinstance(state, gradscale.ScaleState)
        ends.append((weights.tolist(), gradscale_mlx.backend.read(fingerprint(state))))
    assert ends[0] == ends[1]
    # Doubled after two clean steps, halved twice, doubled twice again.
    assert gradscale_mlx.backend.read(state.scale[None].astype(mx.int32)) == [2048]


def test_a_scaler_in_a_function_that_mlx_transforms_says_what_to_call():
    def step(weights):
        scaler, descent = GradScaler(), Descent()
        descent.grads = mx.grad(lambda w: scaler.scale((w * w).sum()))(weights)
        scaler.step(descent)

    for transform in (mx.compile, mx.vmap):
        with pytest.raises(InvalidTypeError, match=r"transforms cannot do, got: .*outside of mx.compile"):
            transform(step)(mx.ones((2, 3)))


def test_master_gradients_and_dtypes_that_are_none_are_told_apart():
    scaler, descent = GradScaler(init_scale=4.0), Descent()
    descent.master_dtype = mx.float32  # type: ignore[attr-defined]
    scaler.scale(mx.array(1.0))
    descent.grads = mx.array([4.0, 8.0, 2.0**-24], mx.float16)
    scaler.step(descent)
    assert (descent.grads.dtype, descent.grads.tolist()) == (mx.float32, [1.0, 2.0, 2.0**-26])
    scaler.update()
    scaler.scale(mx.array(1.0))
    descent.master_dtype = "float32"  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match="must be a real floating dtype"):
        scaler.unscale_(descent)


def test_an_error_of_mlx_itself_is_not_explained(monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        msg = "out of memory"
        raise RuntimeError(msg)

    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        gradscale_mlx.backend.read(mx.zeros(1, mx.int32))
