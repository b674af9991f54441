"""Compiled steps: no read, no second compilation, one message to agree, and no product by a scale of 1."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from axes import require
from axes_jax import COUNT, P, gradscale_jax, jax, jnp, mesh, on_mesh
from optimizers import Tree

import gradscale
from gradscale import DynamicScale, SkipSpikes, StaticScale

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


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count compilations, traces, and reads of arrays by the host.

    ``transfer_guard_device_to_host`` sees no reads of the CPU's own arrays, so they are counted where the arrays'
    conversions meet; on other devices the guard raises.
    """
    found = {"compilations": 0, "traces": 0, "reads": 0}

    def happened(event: str, _seconds: float, **_details):
        found["compilations"] += event.endswith("backend_compile_duration")
        found["traces"] += event.endswith("jaxpr_trace_duration")

    array_type = type(jnp.zeros(()))
    value = array_type._value

    def read(array):
        found["reads"] += 1
        return value.fget(array)

    jax.monitoring.register_event_duration_secs_listener(happened)
    try:
        with mock.patch.object(array_type, "_value", property(read)), jax.transfer_guard_device_to_host("disallow"):
            yield found
    finally:
        # JAX 0.7 cannot take a listener back.
        getattr(jax.monitoring, "unregister_event_duration_listener", lambda _: None)(happened)


@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
def test_a_compiled_step_reads_nothing_and_is_compiled_once(donated: bool):
    state, weights = POLICY.init(jnp.zeros(())), {"first": jnp.ones((4, 3)), "second": jnp.ones((3, 2))}
    data = [jnp.asarray(x) for x in DATA]

    def telling(*given):
        jax.debug.print("{}", (made := step(*given))[2].nonfinite)
        return made

    # A way to the host is seen, and none is there.
    ways = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(", re.IGNORECASE)
    assert [bool(ways.search(text_of(each, state, weights, data[0]))) for each in (telling, step)] == [True, False]
    # So are compilations and reads.
    compiled, verdicts = jax.jit(lambda *given: step(*given), donate_argnums=(0, 1) if donated else ()), []
    with counted() as found:
        state, weights, verdict = compiled(state, weights, data[0])
        if jax.default_backend() == "cpu":
            assert bool(verdict.finite)
            assert (found["reads"], min(found["compilations"], found["traces"]) > 0) == (1, True)
        else:
            with pytest.raises(RuntimeError, match="transfer"):
                bool(verdict.finite)
    state, weights, _ = compiled(state, weights, data[1])
    with counted() as found:
        for x in data[2:]:
            state, weights, verdict = compiled(state, weights, x)
            verdicts.append(verdict.nonfinite)
        jax.block_until_ready((state, weights))
    assert found == {"compilations": 0, "traces": 0, "reads": 0}
    # It did overflow and grow in between.
    assert [int(count) > 0 for count in verdicts] == [x > 1.0 for x in DATA[2:]]
    # Growth after two clean steps, then an overflow, four times over.
    assert float(state.scale) == 64.0


# Agreement over named axes.


@pytest.mark.parametrize("options", [{}, {"skip": SkipSpikes(), "give_up_after": 20}], ids=["", "guarded"])
def test_agreement_is_one_reduction_of_84_bytes(options):
    run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), POLICY, axis_name="data", **options)
    # Parameters of one's own, so that shard_map has nothing to sum.
    mapped = jax.shard_map(
        lambda state, w: run(state, w).verdict.nonfinite, mesh=mesh("data"), in_specs=(P(), P("data")), out_specs=P()
    )
    lines = text_of(mapped, run.init(jnp.ones(())), jnp.ones(COUNT)).splitlines()
    (found,) = (line for line in lines if " all-reduce(" in line or " all-reduce-start(" in line)
    assert "s32[21]" in found


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("is_spread", [False, True], ids=["anywhere", "over the mesh"])
@pytest.mark.parametrize("policy", [POLICY, StaticScale(4.0)], ids=["dynamic", "static"])
def test_a_state_that_is_closed_over_serves(policy, is_spread: bool):
    state = policy.init(on_mesh(jnp.zeros(COUNT), "data") if is_spread else jnp.zeros(()))
    run = gradscale_jax.value_and_grad(lambda w: (w * w).sum(), policy, axis_name="data")
    mapped = jax.jit(
        jax.shard_map(lambda w: run(state, w).verdict.nonfinite, mesh=mesh("data"), in_specs=P("data"), out_specs=P())
    )
    assert (int(mapped(jnp.ones(COUNT))), int(mapped(jnp.ones(COUNT).at[2].set(math.nan)))) == (0, 1)


def test_a_verdict_says_in_words_what_happened():
    state = POLICY.init(jnp.zeros(()))._replace(scale=jnp.float32(2.0**24))
    traced = []

    def verdict(nonfinite, spike):
        made = gradscale_jax.agree(nonfinite, state, POLICY, spike=spike)
        traced.append(str(made))
        return made

    for count, spike, words in (
        (0, False, "taken, scale 16777216"),
        (2, False, "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        (2, jnp.asarray(True), "skipped, gradient arrays that are not finite: 2, scale 16777216"),
        *((0, spike, "skipped, a spike, scale 16777216") for spike in (True, np.True_, np.asarray(True))),
    ):
        for made in (verdict(jnp.int32(count), spike), jax.jit(verdict)(count, spike)):
            assert str(made) == repr(made) == repr(jax.device_get(made)) == f"Verdict({words})"
    assert str(jax.tree.map(lambda x: x.dtype, made)) == (
        "Verdict(nonfinite=dtype('int32'), desynced=dtype('bool'), spike=dtype('bool'))"
    )
    assert any("Tracer" in text for text in traced)

    def held(scale):
        return gradscale_jax.agree(jnp.int32(0), state._replace(scale=scale), POLICY, "ranks")

    several = jax.vmap(held, axis_name="ranks")(jnp.asarray([2.0, 4.0]))
    assert str(several).startswith("Verdict(nonfinite=Array([0, 0], dtype=int32), desynced=Array([ True,  True]")
    one = str(jax.tree.map(lambda x: x[0], several))
    assert one == "Verdict(skipped, ranks hold different states; scale from 2.0 to 4.0)"


@pytest.mark.tier("ranks")
def test_nan_debugging_lets_a_compiled_skip_pass():
    @jax.jit
    def run(state, w, x):
        scaled = gradscale_jax.value_and_grad(lambda w: jnp.sum(w * x), POLICY)(state, w)
        return scaled.state, gradscale_jax.select(scaled.verdict.finite, w - scaled.grads, w)

    with jax.debug_nans(True):
        state, w = run(POLICY.init(jnp.zeros(())), jnp.ones(2), jnp.asarray([jnp.inf, 1.0]))
    assert (float(state.scale), w.tolist()) == (32.0, [1.0, 1.0])


# A scale of 1, which the policy keeps.


ONE, TWO = StaticScale(1.0), StaticScale(2.0)
# A negative zero, a subnormal, and NaNs whose payload a multiplication makes quiet or keeps.
WORDS = [[0x80000000, 0x3F800000, 0x00000001] + [0x7F7FFFFF] * 4, [0x7F800001, 0xFFC12345] + [0x80000000] * 5]


def from_words(words: list[int]):
    return jax.lax.bitcast_convert_type(jnp.asarray(words, jnp.uint32), jnp.float32)


def words_of(x) -> list[int]:
    return list(jax.lax.bitcast_convert_type(x, jnp.uint32).tolist())


@jax.custom_vjp
def linear(w, _gradient):
    return w


linear.defvjp(lambda w, gradient: (w, gradient), lambda gradient, seed: (jnp.where(seed > 0, gradient, 0.0), None))


def judged(policy, dtype=None):
    """Return a step that differentiates a sum whose gradient is given."""
    differentiate = gradscale_jax.value_and_grad(lambda w, gradient: jnp.sum(linear(w, gradient)), policy, dtype=dtype)
    return lambda gradient, state: differentiate(state, jnp.zeros_like(gradient), gradient)


@pytest.mark.parametrize("words", WORDS, ids=["finite", "nan"])
def test_a_scale_of_1_leaves_every_bit_of_a_gradient(words: list[int]):
    gradient = from_words(words)
    scaled = jax.jit(judged(ONE))(gradient, ONE.init(gradient))
    assert words_of(scaled.grads) == words
    assert bool(scaled.verdict.finite) is (words is WORDS[0])
    optimizer, scaler = Tree([gradient]), gradscale.GradScaler(policy=ONE)
    scaler.scale(jnp.ones(()))
    scaler.unscale_(optimizer)
    assert words_of(optimizer.grads[0]) == words
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped is (words is WORDS[1])


@pytest.mark.parametrize("dtype", [None, jnp.float16], ids=["kept", "cast"])
def test_no_gradient_is_multiplied_in_a_compiled_step_whose_policy_keeps_a_scale_of_1(dtype):
    optax, gradient = require("optax"), from_words(WORDS[0])
    product = re.compile(r"= f(?:16|32)\[7\]\S* (?:multiply|divide)\(")
    for policy in (ONE, TWO):
        tx = gradscale_jax.scaled(optax.identity(), policy, dtype=dtype)
        for run, state in ((judged(policy, dtype), policy.init(gradient)), (tx.update, tx.init(gradient))):
            assert bool(product.search(text_of(run, gradient, state))) is (policy is TWO)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_policy_that_keeps_a_scale_of_1_goes_on_with_the_state_of_another_one(compiled: bool):
    tx = gradscale_jax.scaled(require("optax").sgd(1.0), ONE)
    update = jax.jit(tx.update) if compiled else tx.update
    state, seen = tx.init(jnp.zeros(7))._replace(scale_state=TWO.init(jnp.zeros(()))), []
    for _ in range(3):
        made, state = update(gradscale_jax.scale(jnp.ones(7), gradscale_jax.scale_state(state)), state)
        seen.append((float(made[0]), float(gradscale_jax.scale_state(state).scale)))
    assert seen == [(0.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)]
    scaled = gradscale_jax.value_and_grad(lambda w: 3.0 * w, ONE)(TWO.init(jnp.zeros(())), jnp.ones(()))
    assert (float(scaled.grads), bool(scaled.verdict.taken)) == (3.0, True)
