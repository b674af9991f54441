"""Compiled steps: no read, no second compilation, one message to agree, and no product by a scale of 1."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from axes import require
from axes_jax import COUNT, P, assert_same_bits, gradscale_jax, jax, jnp, mesh, on_mesh

from gradscale import DynamicScale, ScaleState, SkipSpikes, StaticScale

pytestmark = pytest.mark.jax

POLICY = DynamicScale(init_scale=64.0, growth_interval=2)
# Of which every third batch overflows.
DATA = [1e6 if index % 3 == 2 else 0.125 for index in range(12)]


def loss(weights, x):
    half = jnp.full((5, 4), x, jnp.float16) @ weights["first"].astype("float16")
    return ((half.astype("float32") @ weights["second"]) ** 2).mean()


def step(state, weights, x):
    scaled = gradscale_jax.value_and_grad(loss, POLICY)(state, weights, x)
    new = jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, scaled.grads)
    return scaled.state, gradscale_jax.select(scaled.verdict.finite, new, weights), scaled.verdict


def text_of(function, *given) -> str:
    """Return the program that a function is compiled to."""
    return str(jax.jit(function).lower(*given).compile().as_text())


def test_a_compiled_step_has_no_way_to_the_host_and_is_compiled_once():
    state, weights = POLICY.init(jnp.zeros(())), {"first": jnp.ones((4, 3)), "second": jnp.ones((3, 2))}
    data = [jnp.asarray(x) for x in DATA]

    def telling(*given):
        jax.debug.print("{}", (made := step(*given))[2].nonfinite)
        return made

    ways = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(", re.IGNORECASE)
    assert [bool(ways.search(text_of(each, state, weights, data[0]))) for each in (telling, step)] == [True, False]
    compiled, verdicts = jax.jit(step, donate_argnums=(0, 1)), []
    for x in data:
        state, weights, verdict = compiled(state, weights, x)
        verdicts.append(verdict.nonfinite)
    assert compiled._cache_size() == 1
    # It did overflow and grow in between.
    assert [int(count) > 0 for count in verdicts] == [x > 1.0 for x in DATA]
    # Growth after two clean steps, then an overflow, four times over.
    assert float(state.scale) == 64.0


@pytest.mark.parametrize("of", [float, np.float64], ids=["Python's", "NumPy's"])
def test_a_state_in_other_numbers_is_taken_in_its_dtypes(of):
    state = ScaleState(of(8.0), 1, 0, 0)  # type: ignore[arg-type]
    scaled = gradscale_jax.value_and_grad(jnp.sum, POLICY)(state, jnp.ones(2))
    expected = ScaleState(jnp.float32(16.0), *[jnp.int32(0)] * 3)
    assert_same_bits((scaled.state, gradscale_jax.scale(1.0, state)), (expected, jnp.float32(8.0)))
    assert not any(leaf.weak_type for leaf in scaled.state)


# Agreement over named axes.


@pytest.mark.parametrize("options", [{}, {"skip": SkipSpikes(), "give_up_after": 20}], ids=["", "guarded"])
def test_agreement_is_one_reduction_of_84_bytes_also_with_a_state_that_is_closed_over(options):
    run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), POLICY, axis_name="data", **options)
    # On no chosen device, and over the mesh.
    state = run.init(jnp.zeros(()) if options else on_mesh(jnp.zeros(COUNT), "data"))
    # Parameters of one's own, so that shard_map has nothing to sum.
    mapped = jax.shard_map(
        lambda w: run(state, w).verdict.nonfinite, mesh=mesh("data"), in_specs=P("data"), out_specs=P()
    )
    compiled = jax.jit(mapped).lower(jnp.ones(COUNT)).compile()
    lines = compiled.as_text().splitlines()
    (found,) = (line for line in lines if " all-reduce(" in line or " all-reduce-start(" in line)
    assert "s32[21]" in found
    assert (int(compiled(jnp.ones(COUNT))), int(compiled(jnp.ones(COUNT).at[2].set(math.nan)))) == (0, 1)


def test_a_verdict_says_in_words_what_happened():
    traced: list[str] = []

    def verdict(nonfinite, spike, scale=2.0**24, axis=None):
        state = POLICY.init(jnp.zeros(()))._replace(scale=jnp.float32(scale))
        made = gradscale_jax.agree(nonfinite, state, POLICY, axis, spike=spike)
        traced.append(str(made))
        return made

    compiled = jax.jit(verdict)
    for count, spike, words in (
        (0, False, "taken, scale 16777216"),
        (2, True, "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        (0, np.True_, "skipped, a spike, scale 16777216"),
    ):
        for made in (verdict(jnp.int32(count), spike), compiled(np.int32(count), spike)):
            assert str(made) == repr(made) == repr(jax.device_get(made)) == f"Verdict({words})"
    assert "Tracer" in traced[1]
    of_ranks = jax.vmap(lambda scale: verdict(jnp.int32(0), False, scale, "ranks"), axis_name="ranks")
    several = of_ranks(jnp.asarray([2.0, 4.0]))
    assert str(several).startswith("Verdict(nonfinite=Array([0, 0], dtype=int32), desynced=Array([ True,  True]")
    one = str(jax.tree.map(lambda x: x[0], several))
    assert one == "Verdict(skipped, ranks hold different states; scale from 2.0 to 4.0)"


# A scale of 1, which the policy keeps.


ONE, TWO = StaticScale(1.0), StaticScale(2.0)


def judged(policy, dtype=None):
    """Return a step that differentiates a sum whose gradient is given, and leaves out its value, which is a product."""
    differentiate = gradscale_jax.value_and_grad(lambda w, gradient: jnp.sum(w * gradient), policy, dtype=dtype)
    return lambda gradient, state: differentiate(state, jnp.zeros_like(gradient), gradient)[1:]


@pytest.mark.parametrize("dtype", [None, jnp.float16], ids=["kept", "cast"])
def test_no_gradient_is_multiplied_in_a_compiled_step_whose_policy_keeps_a_scale_of_1(dtype):
    optax, gradient = require("optax"), jnp.ones(7)
    product = re.compile(r"= f(?:16|32)\[7\]\S* (?:multiply|divide)\(")
    for policy in (ONE, TWO) if dtype is None else (ONE,):
        tx = gradscale_jax.scaled(optax.identity(), policy, dtype=dtype)
        for run, state in ((judged(policy, dtype), policy.init(gradient)), (tx.update, tx.init(gradient))):
            assert bool(product.search(text_of(run, gradient, state))) is (policy is TWO)


def test_a_policy_that_keeps_a_scale_of_1_goes_on_with_the_state_of_another_one():
    tx, other = gradscale_jax.scaled(require("optax").sgd(1.0), ONE), TWO.init(jnp.zeros(()))
    update, state, seen = jax.jit(tx.update), tx.init(jnp.zeros(7))._replace(scale_state=other), []
    for _ in range(3):
        made, state = update(gradscale_jax.scale(jnp.ones(7), gradscale_jax.scale_state(state)), state)
        seen.append((float(made[0]), float(gradscale_jax.scale_state(state).scale)))
    assert seen == [(0.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)]
    scaled = gradscale_jax.value_and_grad(lambda w: 3.0 * w, ONE)(other, jnp.ones(()))
    assert (float(scaled.grads), bool(scaled.verdict.taken)) == (3.0, True)
