"""Scaling under jax.jit against flax's and jmp's own code: unscale, the verdict, a train step.

XLA has its own threads, the same ones for every call here. Where a call returns new arrays, the time that the system
takes to hand out their pages is most of it, and is everyone's: the rows against a bare multiplication show how much.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import gradscale
from benchmarks.measure import Call, Row, interleaved

__all__ = ["CASES"]


def _gradients(quick: bool) -> list[Any]:
    """Return two float32 arrays, finite and not small."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    return [jax.numpy.asarray(rng.standard_normal((8 if quick else 16) << 20, np.float32)) for _ in range(2)]


def _jmp() -> Any:
    # By name, for it has no types and need not be installed.
    return importlib.import_module("jmp")


def _size(gradients: list[Any]) -> str:
    return f"{len(gradients)} x {gradients[0].size >> 20} Mi float32"


def _unscalers() -> dict[str, Callable[[list[Any], Any], tuple[list[Any], Any]]]:
    """Return functions of gradients and a float32 scale, which return unscaled gradients and a verdict."""
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    import gradscale_jax

    jmp = _jmp()

    def ours(gradients: list[Any], scale: Any) -> tuple[list[Any], Any]:
        trackers = [jnp.zeros((), jnp.int32) for _ in gradscale.ScaleState._fields[1:]]
        return gradscale_jax.unscale(gradients, gradscale.ScaleState(scale, *trackers))

    def flax(gradients: list[Any], scale: Any) -> tuple[list[Any], Any]:
        # Its code is one piece with the differentiation: so differentiate what has these gradients, at no cost.
        @jax.custom_vjp
        def loss(parameters: list[Any]) -> Any:  # noqa: ARG001
            return jnp.zeros((), jnp.float32)

        loss.defvjp(lambda parameters: (loss(parameters), None), lambda _saved, _cotangent: (gradients,))
        result = DynamicScale(scale=scale).value_and_grad(loss)(gradients)
        return result.grad, result.finite

    def their_jmp(gradients: list[Any], scale: Any) -> tuple[list[Any], Any]:
        unscaled = jmp.DynamicLossScale(scale).unscale(gradients)
        return unscaled, jmp.all_finite(unscaled)

    def multiplication(gradients: list[Any], scale: Any) -> tuple[list[Any], Any]:
        return [gradient * (1 / scale) for gradient in gradients], scale

    return {"ours": ours, "flax": flax, "jmp": their_jmp, "multiplication": multiplication}


def unscaling(quick: bool) -> list[Row]:
    """Unscale and judge under jit: into new arrays, and over donated ones."""
    import jax
    import jax.numpy as jnp

    gradients = _gradients(quick)
    # Donated gradients are unscaled again and again.
    scale = jnp.ones((), jnp.float32)

    def into_new_arrays(compiled: Any) -> Call:
        return Call(lambda: jax.block_until_ready(compiled(gradients, scale)))

    def over_donated_ones(compiled: Any) -> Call:
        held = [jax.tree.map(jnp.copy, gradients)]

        def run() -> None:
            held[:] = [jax.block_until_ready(compiled(held.pop(), scale))[0]]

        return Call(run)

    calls = {}
    for name, function in _unscalers().items():
        calls[name] = into_new_arrays(jax.jit(function))
        calls[f"{name}, donated"] = over_donated_ones(jax.jit(function, donate_argnums=0))
    times = interleaved(calls, 9 if quick else 25)
    case = f"jax unscale and verdict, {_size(gradients)}, {{}}"
    lines = (
        ("new arrays / flax's", "ours", "flax", 0.85),
        ("new arrays / jmp's", "ours", "jmp", 0.85),
        ("new arrays / a bare multiplication", "ours", "multiplication", 1.1),
        ("donated / flax's donated", "ours, donated", "flax, donated", 0.4),
        ("donated / flax's into new arrays", "ours, donated", "flax", 0.4),
        ("donated / jmp's donated", "ours, donated", "jmp, donated", 0.4),
        ("donated / jmp's into new arrays", "ours, donated", "jmp", 0.4),
        ("donated / a bare multiplication, donated", "ours, donated", "multiplication, donated", None),
    )
    return [Row(case.format(line), times[mine], times[other], "s", target) for line, mine, other, target in lines]


def verdict(quick: bool) -> list[Row]:
    """Judge gradients under jit, and do nothing else."""
    import jax
    import jax.numpy as jnp

    from gradscale_jax.arrays import count_nonfinite

    jmp = _jmp()

    gradients = _gradients(quick)

    def flax(gradients: list[Any]) -> Any:
        # As in its value_and_grad, where nothing can be had alone.
        finite = jnp.array(True)
        for gradient in gradients:
            finite &= jnp.all(jax.lax.is_finite(gradient))
        return finite

    functions = {"ours": count_nonfinite, "jmp": jmp.all_finite, "flax": flax}
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    calls = {
        name: Call(partial(lambda function: jax.block_until_ready(function(gradients)), function))
        for name, function in compiled.items()
    }
    times = interleaved(calls, 21 if quick else 61)
    case = f"jax verdict alone, {_size(gradients)} / {{}}'s all(isfinite)"
    return [Row(case.format(peer), times["ours"], times[peer], "s", 0.4) for peer in ("flax", "jmp")]


def _transformer(width: int, layers: int) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return the float32 loss of a transformer that predicts the next token in float16, and its float32 parameters."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    base: Any = nn.Module
    half: Any = {"dtype": jnp.float16}

    class Transformer(base):  # type: ignore[misc]
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embedding = nn.Embed(256, width, **half)
            x = embedding(tokens)
            for _ in range(layers):
                attention = nn.MultiHeadDotProductAttention(4, **half)
                x = x + attention(nn.RMSNorm(**half)(x), mask=nn.make_causal_mask(tokens))
                x = x + nn.Dense(width, **half)(nn.gelu(nn.Dense(4 * width, **half)(nn.RMSNorm(**half)(x))))
            return embedding.attend(nn.RMSNorm(**half)(x)).astype(jnp.float32)

    model = Transformer()

    def loss(parameters: Any, tokens: Any) -> Any:
        predicted = model.apply(parameters, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()

    return loss, model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))


def _updated(parameters: Any, momentum: Any, gradients: Any) -> tuple[Any, Any]:
    """Return parameters and momentum after a step of gradient descent."""
    import jax

    momentum = jax.tree.map(lambda held, gradient: 0.9 * held + gradient, momentum, gradients)
    return jax.tree.map(lambda each, held: each - 1e-3 * held, parameters, momentum), momentum


def _train_steps(loss: Callable[[Any, Any], Any]) -> dict[str, tuple[Any, Any]]:
    """Return compiled steps ``(held, tokens) -> (held, loss)``, and states that each holds at first; it is donated."""
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    import gradscale_jax

    # No growth while it is measured, and no overflow.
    policy = gradscale.DynamicScale(init_scale=1024.0, growth_interval=1 << 30)

    def ours(held: Any, tokens: Any) -> tuple[Any, Any]:
        state, *old = held
        scaled = gradscale_jax.value_and_grad(loss, policy)(state, old[0], tokens)
        new = _updated(old[0], old[1], scaled.grads)
        return (scaled.state, *gradscale_jax.select(scaled.verdict.finite, new, tuple(old))), scaled.value

    def flax(held: Any, tokens: Any) -> tuple[Any, Any]:
        state, *old = held
        state, finite, value, gradients = state.value_and_grad(loss)(old[0], tokens)
        new = _updated(old[0], old[1], gradients)
        # As its examples do.
        return (state, *jax.tree.map(partial(jnp.where, finite), new, tuple(old))), value

    def unscaled(held: Any, tokens: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(held[0], tokens)
        return _updated(held[0], held[1], gradients), value

    clean_steps: Any = jnp.zeros((), jnp.int32)
    theirs = DynamicScale(growth_interval=1 << 30, fin_steps=clean_steps, scale=jnp.float32(1024.0))
    first = {"ours": (ours, (policy.init(jnp.zeros(())),)), "flax": (flax, (theirs,)), "no scaling": (unscaled, ())}
    return {name: (jax.jit(step, donate_argnums=0), states) for name, (step, states) in first.items()}


def train_step(quick: bool) -> list[Row]:
    """Take whole steps of a small transformer: ours, flax's, and without scaling."""
    import jax
    import jax.numpy as jnp

    loss, parameters = _transformer(*((64, 2) if quick else (256, 4)))
    tokens = jax.random.randint(jax.random.key(1), (4, 33), 0, 256)

    def call(step: Any, states: Any) -> Call:
        box = [(*states, jax.tree.map(jnp.copy, parameters), jax.tree.map(jnp.zeros_like, parameters))]

        def run() -> None:
            box[:] = [jax.block_until_ready(step(box.pop(), tokens))[0]]

        return Call(run)

    times = interleaved({name: call(*step) for name, step in _train_steps(loss).items()}, 31 if quick else 151)
    count = sum(each.size for each in jax.tree.leaves(parameters))
    case = f"jax train step, transformer of {count / 1e6:.1f} M, float16 / {{}}"
    return [
        Row(case.format("flax's DynamicScale"), times["ours"], times["flax"], "s", 1.0),
        Row(case.format("no scaling"), times["ours"], times["no scaling"], "s", None),
    ]


CASES = {
    "jax unscaling": unscaling,
    "jax verdict": verdict,
    "jax train step": train_step,
}
"""By name, what measures some rows of the table; called with whether to be quick."""
