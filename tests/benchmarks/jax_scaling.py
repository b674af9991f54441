"""Scaling under jax.jit against flax's and jmp's own code: unscale, the verdict, a train step, host work.

XLA has its own threads, the same ones for every call here. Where a call returns new arrays, the time that the system
takes to hand out their pages is most of it, and is everyone's: the rows against a bare multiplication show how much.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import gradscale
from benchmarks.measure import Call, Row, interleaved

__all__ = ["CASES"]

_NO_TARGET = None
"""Of rows that only inform."""

_STEPS = 50


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
        ("donated / a bare multiplication, donated", "ours, donated", "multiplication, donated", _NO_TARGET),
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


class _Sizes(NamedTuple):
    """A transformer's."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    tokens: int
    batch: int


def _parameters(sizes: _Sizes) -> dict[str, Any]:
    """Return float32 parameters of a transformer that predicts the next token."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / math.sqrt(shape[0]))

    width = sizes.width
    layers = [
        {
            "qkv": weights(width, 3 * width),
            "out": weights(width, width),
            "up": weights(width, 4 * width),
            "down": weights(4 * width, width),
            "gains": jnp.ones((2, width)),
        }
        for _ in range(sizes.layers)
    ]
    return {"embedding": weights(sizes.vocabulary, width), "layers": layers, "gain": jnp.ones(width)}


def _loss(sizes: _Sizes, parameters: Any, tokens: Any) -> Any:
    """Return the float32 cross-entropy of a forward pass in float16."""
    import jax
    import jax.numpy as jnp

    half: Any = jax.tree.map(lambda each: each.astype(jnp.float16), parameters)

    def normalised(x: Any, gain: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * gain

    def attention(layer: Any, x: Any) -> Any:
        shape = (*x.shape[:2], 3, sizes.heads, sizes.width // sizes.heads)
        query, key, value = jnp.moveaxis((x @ layer["qkv"]).reshape(shape), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / math.sqrt(shape[-1])
        weights = jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf)).astype(x.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape) @ layer["out"]

    earlier = jnp.tri(sizes.tokens, dtype=bool)
    x = half["embedding"][tokens[:, :-1]]
    for layer in half["layers"]:
        x = x + attention(layer, normalised(x, layer["gains"][0]))
        x = x + jax.nn.gelu(normalised(x, layer["gains"][1]) @ layer["up"]) @ layer["down"]
    logits = (normalised(x, half["gain"]) @ half["embedding"].T).astype(jnp.float32)
    taken = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(taken)


def _updated(parameters: Any, momentum: Any, gradients: Any) -> tuple[Any, Any]:
    """Return parameters and momentum after a step of gradient descent."""
    import jax

    momentum = jax.tree.map(lambda held, gradient: 0.9 * held + gradient, momentum, gradients)
    return jax.tree.map(lambda each, held: each - 1e-3 * held, parameters, momentum), momentum


def _train_steps(sizes: _Sizes) -> dict[str, tuple[Any, Any]]:
    """Return compiled steps ``(held, tokens) -> (held, loss)``, and what each holds at first; it is donated."""
    import jax
    import jax.numpy as jnp
    from flax.training.dynamic_scale import DynamicScale

    import gradscale_jax

    loss = partial(_loss, sizes)
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

    state = policy.init(jnp.zeros(()))
    clean_steps: Any = jnp.zeros((), jnp.int32)
    theirs = DynamicScale(growth_interval=1 << 30, fin_steps=clean_steps, scale=jnp.float32(1024.0))
    first = {"ours": (ours, (state,)), "flax": (flax, (theirs,)), "no scaling": (unscaled, ())}
    steps = {}
    for name, (step, states) in first.items():
        parameters = _parameters(sizes)
        momentum = jax.tree.map(jnp.zeros_like, parameters)
        steps[name] = (jax.jit(step, donate_argnums=0), (*states, parameters, momentum))
    return steps


def _tokens(sizes: _Sizes) -> Any:
    import jax.numpy as jnp
    import numpy as np

    drawn = np.random.default_rng(1).integers(0, sizes.vocabulary, (sizes.batch, sizes.tokens + 1))
    return jnp.asarray(drawn, jnp.int32)


def train_step(quick: bool) -> list[Row]:
    """Take whole steps of a small transformer: ours, flax's, and without scaling."""
    import jax

    width = 64 if quick else 256
    sizes = _Sizes(vocabulary=256, width=width, heads=4, layers=2 if quick else 4, tokens=32, batch=4)
    tokens = _tokens(sizes)

    def call(step: Any, held: Any) -> Call:
        box = [held]

        def run() -> None:
            box[:] = [jax.block_until_ready(step(box.pop(), tokens))[0]]

        return Call(run)

    steps = _train_steps(sizes)
    times = interleaved({name: call(*step) for name, step in steps.items()}, 31 if quick else 151)
    count = sum(each.size for each in jax.tree.leaves(_parameters(sizes)))
    case = f"jax train step, transformer of {count / 1e6:.1f} M, float16 / {{}}"
    return [
        Row(case.format("flax's DynamicScale"), times["ours"], times["flax"], "s", 1.0),
        Row(case.format("no scaling"), times["ours"], times["no scaling"], "s", _NO_TARGET),
    ]


def host_work(quick: bool) -> list[Row]:
    """Count what steps after the first two make the host do: reads of device memory, and compilations."""
    import jax

    sizes = _Sizes(vocabulary=64, width=32, heads=2, layers=1, tokens=16, batch=2)
    tokens = _tokens(sizes)
    step, held = _train_steps(sizes)["ours"]
    steps = _STEPS // (5 if quick else 1)
    compilations: list[str] = []
    reads: list[int] = []

    def compiled(event: str, duration_secs: float, **details: str | int) -> None:  # noqa: ARG001
        if event.endswith("backend_compile_duration"):
            compilations.append(event)

    array_type = type(tokens)
    value = array_type._value

    def read(array: Any) -> Any:
        reads.append(array.size)
        return value.fget(array)

    for _ in range(2):
        held, loss = jax.block_until_ready(step(held, tokens))
    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        # The guard raises on other devices than the CPU, whose memory the host has already.
        with mock.patch.object(array_type, "_value", property(read)), jax.transfer_guard_device_to_host("disallow"):
            for _ in range(steps):
                held, loss = step(held, tokens)
            jax.block_until_ready(loss)
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    case = f"jax compiled train step, {{}} in {steps} steps after the first two / steps"
    return [
        Row(case.format("device-to-host reads"), float(len(reads)), float(steps), "", 0.0),
        Row(case.format("compilations"), float(len(compilations)), float(steps), "", 0.0),
    ]


CASES = {
    "jax unscaling": unscaling,
    "jax verdict": verdict,
    "jax train step": train_step,
    "jax host work": host_work,
}
"""By name, what measures some rows of the table; called with whether to be quick."""
