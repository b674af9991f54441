"""A compiled train step: nothing comes to the host, and nothing is compiled again after the first two steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from axes_jax import gradscale_jax, jax, jnp

import gradscale
from gradscale import DynamicScale

pytestmark = pytest.mark.jax

POLICY = DynamicScale(init_scale=64.0, growth_interval=2)
HOST_OPERATIONS = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(", re.IGNORECASE)
# Of which every third batch overflows.
DATA = [1e6 if index % 3 == 2 else 0.125 for index in range(12)]


def loss(weights: Any, x: Any) -> Any:
    half = jnp.full((5, 4), x, jnp.float16) @ weights["first"].astype("float16")
    return ((half.astype("float32") @ weights["second"]) ** 2).mean()


def step(state: Any, weights: Any, x: Any) -> tuple[Any, Any, Any]:
    scaled = gradscale_jax.value_and_grad(loss, POLICY)(state, weights, x)
    new = jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, scaled.grads)
    return scaled.state, gradscale_jax.select(scaled.verdict.finite, new, weights), scaled.verdict


def begin() -> tuple[Any, Any]:
    """Return a state and weights."""
    return POLICY.init(jnp.zeros(())), {"first": jnp.ones((4, 3)), "second": jnp.ones((3, 2))}


def reaches_the_host(function: Any) -> bool:
    return bool(HOST_OPERATIONS.search(jax.jit(function).lower(*begin(), DATA[0]).compile().as_text()))


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count compilations, traces, and reads of arrays by the host.

    ``transfer_guard_device_to_host`` sees no reads of the CPU's own arrays, so they are counted where the arrays'
    conversions meet; on other devices the guard raises.
    """
    found = {"compilations": 0, "traces": 0, "reads": 0}

    def happened(event: str, _seconds: float, **_details: Any) -> None:
        found["compilations"] += event.endswith("backend_compile_duration")
        found["traces"] += event.endswith("jaxpr_trace_duration")

    array_type = type(jnp.zeros(()))
    value = array_type._value

    def read(array: Any) -> Any:
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
def test_a_compiled_step_reads_nothing_and_is_compiled_once(donated: bool) -> None:
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


def test_unscaling_outside_jit_is_compiled_once_for_each_set_of_shapes() -> None:
    grads = [jnp.ones((3,)), jnp.ones((5, 7))]
    states = [DynamicScale(init_scale=scale).init(jnp.zeros(())) for scale in (2.0, 4.0, 3.0)]
    gradscale.unscale(grads, states[0])
    with counted() as found:
        for state in states:
            gradscale.unscale(grads, state)
    assert found["compilations"] == 0


def test_a_way_to_the_host_and_a_read_are_seen() -> None:
    def telling(*given: Any) -> Any:
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
