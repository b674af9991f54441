"""Scaling under jax.jit against flax's and jmp's own code.

XLA has its own threads, the same ones for every call here. Where a call returns new arrays, the time that the system
takes to hand out their pages is most of it, and is everyone's: the rows against a bare multiplication show how much.
"""

import importlib
from collections.abc import Callable
from typing import Any

import gradscale
from benchmarks.measure import Row, interleaved


def _gradients(quick: bool):
    """Return two float32 arrays, finite and not small, and what is said of them."""
    import jax
    import numpy as np

    rng, size = np.random.default_rng(0), 8 if quick else 16
    return [jax.numpy.asarray(rng.standard_normal(size << 20, np.float32)) for _ in range(2)], f"2 x {size} Mi float32"


def _unscalers():
    """Return functions of gradients and a float32 scale, which return unscaled gradients and a verdict."""
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    import gradscale_jax

    # By name, for it has no types.
    jmp = importlib.import_module("jmp")

    def ours(gradients: list[Any], scale):
        trackers = [jnp.zeros((), jnp.int32) for _ in gradscale.ScaleState._fields[1:]]
        return gradscale_jax.unscale(gradients, gradscale.ScaleState(scale, *trackers))

    def flax(gradients: list[Any], scale):
        # Its code is one piece with the differentiation: so differentiate what has these gradients, at no cost.
        @jax.custom_vjp
        def loss(parameters: list[Any]):  # noqa: ARG001
            return jnp.zeros((), jnp.float32)

        loss.defvjp(lambda parameters: (loss(parameters), None), lambda _saved, _cotangent: (gradients,))
        result = DynamicScale(scale=scale).value_and_grad(loss)(gradients)
        return result.grad, result.finite

    def their_jmp(gradients: list[Any], scale):
        unscaled = jmp.DynamicLossScale(scale).unscale(gradients)
        return unscaled, jmp.all_finite(unscaled)

    def multiplication(gradients: list[Any], scale):
        return [gradient * (1 / scale) for gradient in gradients], scale

    return {"ours": ours, "flax": flax, "jmp": their_jmp, "multiplication": multiplication}


def _compiled(function: Callable[..., Any], *given: Any) -> Callable[[], object]:
    """Return a call of a compiled function, which waits for the answer."""
    import jax

    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*given))


# What is compared with what, and the target.
_LINES = (
    ("new arrays / flax's", "ours", "flax", 0.85),
    ("new arrays / jmp's", "ours", "jmp", 0.85),
    ("new arrays / a bare multiplication", "ours", "multiplication", 1.1),
    ("donated / flax's donated", "ours, donated", "flax, donated", 0.4),
    ("donated / flax's into new arrays", "ours, donated", "flax", 0.4),
    ("donated / jmp's donated", "ours, donated", "jmp, donated", 0.4),
    ("donated / jmp's into new arrays", "ours, donated", "jmp", 0.4),
    ("donated / a bare multiplication, donated", "ours, donated", "multiplication, donated", None),
)


def unscaling(quick: bool) -> list[Row]:
    """Unscale and judge under jit: into new arrays, and over donated ones."""
    import jax
    import jax.numpy as jnp

    gradients, size = _gradients(quick)
    # Donated gradients are unscaled again and again.
    scale = jnp.ones((), jnp.float32)

    def over_donated_ones(compiled):
        held = [jax.tree.map(jnp.copy, gradients)]

        def run():
            held[:] = [jax.block_until_ready(compiled(held.pop(), scale))[0]]

        return run

    calls: dict[str, Any] = {}
    for name, function in _unscalers().items():
        calls[name] = _compiled(function, gradients, scale)
        calls[f"{name}, donated"] = over_donated_ones(jax.jit(function, donate_argnums=0))
    times = interleaved(calls, 9 if quick else 25)
    case = f"jax unscale and verdict, {size}, {{}}"
    return [Row(case.format(line), times[mine], times[other], "s", target) for line, mine, other, target in _LINES]


CASES = {"jax unscaling": unscaling}
