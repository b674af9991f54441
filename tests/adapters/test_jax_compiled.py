"""A compiled train step: nothing comes to the host, and nothing is compiled again after the first two steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from unittest import mock

import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from optimizers import Tree

import gradscale
from gradscale import DynamicScale

pytestmark = pytest.mark.jax

POLICY = DynamicScale(init_scale=64.0, growth_interval=2)
HOST_OPERATIONS = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(", re.IGNORECASE)
# Of which every third batch overflows.
DATA = [1e6 if index % 3 == 2 else 0.125 for index in range(12)]


def loss(weights, x):
    half = jnp.full((5, 4), x, jnp.float16) @ weights["first"].astype("float16")
    return ((half.astype("float32") @ weights["second"]) ** 2).mean()


def step(state, weights, x):
    scaled = gradscale_jax.value_and_grad(loss, POLICY)(state, weights, x)
    new = jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, scaled.grads)
    return scaled.state, gradscale_jax.select(scaled.verdict.finite, new, weights), scaled.verdict


def begin():
    """Return a state and weights."""
    return POLICY.init(jnp.zeros(())), {"first": jnp.ones((4, 3)), "second": jnp.ones((3, 2))}


def reaches_the_host(function) -> bool:
    return bool(HOST_OPERATIONS.search(jax.jit(function).lower(*begin(), DATA[0]).compile().as_text()))


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
    compiled = jax.jit(step, donate_argnums=(0, 1) if donated else ())
    state, weights = begin()
    data = [jnp.asarray(x) for x in DATA]
    for x in data[:2]:
        state, weights, _ = compiled(state, weights, x)
    verdicts = []
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
    assert not reaches_the_host(step)


def test_counts_of_steps_and_lanes_are_in_the_order_of_the_verdicts():
    differentiate = gradscale_jax.value_and_grad(lambda w, x: w * x, POLICY, give_up_after=100)
    lanes = jax.vmap(lambda _: differentiate.init(jnp.zeros(())))(jnp.zeros(3))

    def train(states, x):
        made = jax.vmap(differentiate, (0, None, 0))(states, jnp.float32(1.0), x)
        return made.state, made.verdict

    # In each of two steps, the first of three lanes alone overflows.
    data = jnp.asarray([[jnp.inf, 1.0, 1.0]] * 2)
    counts = jax.lax.scan(train, lanes, data)[1].counts()
    assert counts == {"taken": [[0, 1, 1], [0, 2, 2]], "overflow": [[1, 0, 0], [2, 0, 0]], "spike": [[0] * 3] * 2}


# A scale of 1, which the policy keeps.


ONE, TWO = gradscale.StaticScale(1.0), gradscale.StaticScale(2.0)
PRODUCT = re.compile(r"= f(?:16|32)\[7\]\S* (?:multiply|divide)\(")
# A negative zero, a subnormal, and NaNs whose payload a multiplication makes quiet or keeps.
WORDS = [[0x80000000, 0x3F800000, 0x00000001] + [0x7F7FFFFF] * 4, [0x7F800001, 0xFFC12345] + [0x80000000] * 5]


def from_words(words: list[int]):
    return jax.lax.bitcast_convert_type(jnp.asarray(words, jnp.uint32), jnp.float32)


def words_of(x) -> list[int]:
    return jax.lax.bitcast_convert_type(x, jnp.uint32).tolist()


def judged(policy, dtype=None):
    """Return a step that differentiates a sum whose gradient is given."""

    def judge(state, gradient):
        return gradscale_jax.value_and_grad(lambda w: jnp.sum(linear(w, gradient)), policy, dtype=dtype)(
            state, jnp.zeros_like(gradient)
        )

    return jax.jit(judge)


@jax.custom_vjp
def linear(w, _gradient):
    return w


linear.defvjp(lambda w, gradient: (w, gradient), lambda gradient, seed: (jnp.where(seed > 0, gradient, 0.0), None))


@pytest.mark.parametrize("words", WORDS, ids=["finite", "nan"])
def test_a_scale_of_1_leaves_every_bit_of_a_gradient(words: list[int]):
    gradient = from_words(words)
    scaled = judged(ONE)(ONE.init(gradient), gradient)
    assert words_of(scaled.grads) == words
    assert bool(scaled.verdict.finite) is (words is WORDS[0])
    optimizer, scaler = Tree([gradient]), gradscale.GradScaler(policy=ONE)
    scaler.scale(jnp.ones(()))
    scaler.unscale_(optimizer)
    assert words_of(optimizer.grads[0]) == words
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped is (words is WORDS[1])


@pytest.mark.parametrize("dtype", [None, jnp.float16], ids=["kept", "cast"])
@pytest.mark.parametrize("how", ["value_and_grad", "scaled"])
def test_no_gradient_is_multiplied_in_a_compiled_step_whose_policy_keeps_a_scale_of_1(how: str, dtype):
    optax = require("optax")
    gradient, products = from_words(WORDS[0]), []
    for policy in (ONE, TWO):
        tx = gradscale_jax.scaled(optax.identity(), policy, dtype=dtype)
        state = policy.init(gradient) if how == "value_and_grad" else tx.init(gradient)
        compiled = (
            judged(policy, dtype).lower(state, gradient)
            if how == "value_and_grad"
            else jax.jit(tx.update).lower(gradient, state)
        )
        products.append(len(PRODUCT.findall(compiled.compile().as_text())))
    assert products[0] == 0 < products[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_policy_that_keeps_a_scale_of_1_goes_on_with_the_state_of_another_one(compiled: bool):
    optax = require("optax")
    tx = gradscale_jax.scaled(optax.sgd(1.0), ONE)
    update = jax.jit(tx.update) if compiled else tx.update
    state, seen = tx.init(jnp.zeros(7))._replace(scale_state=TWO.init(jnp.zeros(()))), []
    for _ in range(3):
        made, state = update(gradscale_jax.scale(jnp.ones(7), gradscale_jax.scale_state(state)), state)
        seen.append((float(made[0]), float(gradscale_jax.scale_state(state).scale)))
    assert seen == [(0.0, 1.0), (-1.0, 1.0), (-1.0, 1.0)]
    scaled = gradscale_jax.value_and_grad(lambda w: 3.0 * w, ONE)(TWO.init(jnp.zeros(())), jnp.ones(()))
    assert (float(scaled.grads), bool(scaled.verdict.taken)) == (3.0, True)


def test_a_way_to_the_host_and_a_read_are_seen():
    def telling(*given):
        result = step(*given)
        jax.debug.print("{}", result[2].nonfinite)
        return result

    assert reaches_the_host(telling)
    with counted() as found:
        verdict = jax.jit(lambda *given: step(*given)[2])(*begin(), DATA[0])
        if jax.default_backend() != "cpu":
            with pytest.raises(RuntimeError, match="transfer"):
                bool(verdict.finite)
            return
        assert bool(verdict.finite)
    assert found["reads"] == 1
    assert min(found["compilations"], found["traces"]) > 0
