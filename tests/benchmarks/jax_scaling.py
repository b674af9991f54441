"""Scaling under jax.jit against flax's and jmp's own code.

XLA has its own threads, the same ones for every call here. Where a call returns new arrays, the time that the system
takes to hand out their pages is most of it, and is everyone's: the rows against a bare multiplication show how much.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.dynamic_scale import DynamicScale

import gradscale
import gradscale_jax
from benchmarks.measure import Row, interleaved

# By name, for it has no types.
jmp = importlib.import_module("jmp")

# What is compared with what, and the target.
_LINES = (
    ("new arrays / flax's", "ours", "flax", 0.85),
    ("new arrays / jmp's", "ours", "jmp", 0.85),
    ("new arrays / a bare multiplication", "ours", "multiplication", 1.1),
    ("donated / flax's donated", "ours, donated", "flax, donated", 0.4),
    ("donated / flax's into new arrays", "ours, donated", "flax", 0.4),
    ("donated / jmp's donated", "ours, donated", "jmp, donated", 0.4),
    ("donated / jmp's into new arrays", "ours, donated", "jmp", 0.4),
)


# Functions of gradients and a float32 scale, which return unscaled gradients and a verdict.


def _ours(gradients: list[Any], scale):
    trackers = [jnp.zeros((), jnp.int32) for _ in gradscale.ScaleState._fields[1:]]
    return gradscale_jax.unscale(gradients, gradscale.ScaleState(scale, *trackers))


def _flax(gradients: list[Any], scale):
    # Its code is one piece with the differentiation: so differentiate what has these gradients, at no cost.
    @jax.custom_vjp
    def loss(parameters: list[Any]):  # noqa: ARG001
        return jnp.zeros((), jnp.float32)

    loss.defvjp(lambda parameters: (loss(parameters), None), lambda _saved, _cotangent: (gradients,))
    result = DynamicScale(scale=scale).value_and_grad(loss)(gradients)
    return result.grad, result.finite


def _jmp(gradients: list[Any], scale):
    unscaled = jmp.DynamicLossScale(scale).unscale(gradients)
    return unscaled, jmp.all_finite(unscaled)


def _multiplication(gradients: list[Any], scale):
    return [gradient * (1 / scale) for gradient in gradients], scale


def unscaling(quick: bool) -> list[Row]:
    """Unscale two arrays and judge them under jit: into new arrays, and over donated ones."""
    rng, size = np.random.default_rng(0), 8 if quick else 16
    gradients = [jnp.asarray(rng.standard_normal(size << 20, np.float32)) for _ in range(2)]
    # Donated gradients are unscaled again and again.
    scale = jnp.ones((), jnp.float32)

    def over_donated_ones(compiled):
        held = [jax.tree.map(jnp.copy, gradients)]

        def run():
            held[:] = [jax.block_until_ready(compiled(held.pop(), scale))[0]]

        return run

    calls: dict[str, Any] = {}
    for function in (_ours, _flax, _jmp, _multiplication):
        name, compiled = function.__name__[1:], jax.jit(function)
        calls[name] = lambda compiled=compiled: jax.block_until_ready(compiled(gradients, scale))
        calls[f"{name}, donated"] = over_donated_ones(jax.jit(function, donate_argnums=0))
    times = interleaved(calls, 9 if quick else 25)
    case = f"jax unscale and verdict, 2 x {size} Mi float32, {{}}"
    return [Row(case.format(line), times[mine], times[other], target) for line, mine, other, target in _LINES]
