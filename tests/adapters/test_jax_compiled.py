"""A compiled train step: nothing comes to the host, and nothing is compiled again after the first two steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from gradscale import DynamicScale

pytestmark = pytest.mark.jax

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any]]
HOST_OPERATIONS = re.compile(r"callback|outfeed|infeed|\bsend\(|\brecv\(", re.IGNORECASE)


def make_step(policy: DynamicScale) -> Step:
    """Return a step ``(state, weights, x) -> (state, weights, loss, verdict)``, not compiled."""
    import gradscale_jax

    def loss(weights: Any, x: Any) -> Any:
        half = x.astype("float16") @ weights["first"].astype("float16")
        return ((half.astype("float32") @ weights["second"]) ** 2).mean()

    def step(state: Any, weights: Any, x: Any) -> tuple[Any, Any, Any, Any]:
        import jax

        scaled = gradscale_jax.value_and_grad(loss, policy)(state, weights, x)
        new = jax.tree.map(lambda weight, gradient: weight - 0.01 * gradient, weights, scaled.grads)
        return scaled.state, gradscale_jax.select(scaled.verdict.finite, new, weights), scaled.value, scaled.verdict

    return step


def begin(jax: Any, policy: DynamicScale) -> tuple[Any, Any, list[Any]]:
    """Return a state, weights, and data of which every third batch overflows."""
    jnp = jax.numpy
    weights = {"first": jnp.ones((4, 3)), "second": jnp.ones((3, 2))}
    data = [jnp.full((5, 4), 1e6 if index % 3 == 2 else 0.125) for index in range(12)]
    return policy.init(jnp.zeros(())), weights, data


@contextlib.contextmanager
def counted(jax: Any) -> Iterator[dict[str, int]]:
    """Count compilations, traces, and reads of arrays by the host.

    ``transfer_guard_device_to_host`` sees no reads of the CPU's own arrays, so they are counted where the arrays'
    conversions meet; on other devices the guard raises.
    """
    found = {"compilations": 0, "traces": 0, "reads": 0}

    def happened(event: str, _seconds: float, **_details: Any) -> None:
        found["compilations"] += event.endswith("backend_compile_duration")
        found["traces"] += event.endswith("jaxpr_trace_duration")

    array_type = type(jax.numpy.zeros(()))
    value = array_type._value

    def read(array: Any) -> Any:
        found["reads"] += 1
        return value.fget(array)

    jax.monitoring.register_event_duration_secs_listener(happened)
    try:
        with mock.patch.object(array_type, "_value", property(read)), jax.transfer_guard_device_to_host("disallow"):
            yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(happened)


@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
def test_a_compiled_step_reads_nothing_and_is_compiled_once(jax: Any, donated: bool) -> None:
    policy = DynamicScale(init_scale=64.0, growth_interval=2)
    step = jax.jit(make_step(policy), donate_argnums=(0, 1) if donated else ())
    state, weights, data = begin(jax, policy)
    verdicts = []
    for x in data[:2]:
        state, weights, _, _ = step(state, weights, x)
    with counted(jax) as found:
        for x in data[2:]:
            state, weights, _, verdict = step(state, weights, x)
            verdicts.append(verdict.nonfinite)
        jax.block_until_ready((state, weights))
    assert found == {"compilations": 0, "traces": 0, "reads": 0}
    assert step._cache_size() == 1
    # It did overflow and grow in between.
    assert [int(count) > 0 for count in verdicts] == [index % 3 == 2 for index in range(2, 12)]
    # Growth after two clean steps, then an overflow, four times over.
    assert float(state.scale) == 64.0


def test_a_compiled_step_holds_no_way_to_the_host(jax: Any) -> None:
    policy = DynamicScale()
    state, weights, data = begin(jax, policy)
    compiled = jax.jit(make_step(policy)).lower(state, weights, data[0]).compile()
    assert not HOST_OPERATIONS.search(compiled.as_text())


@pytest.mark.parametrize("kind", ["callback", "print"])
def test_a_step_with_a_way_to_the_host_is_found(jax: Any, kind: str) -> None:
    policy = DynamicScale()
    step = make_step(policy)
    state, weights, data = begin(jax, policy)

    def telling(*given: Any) -> Any:
        result = step(*given)
        if kind == "print":
            jax.debug.print("{}", result[3].nonfinite)
        else:
            jax.debug.callback(lambda count: None, result[3].nonfinite)  # noqa: ARG005
        return result

    assert HOST_OPERATIONS.search(jax.jit(telling).lower(state, weights, data[0]).compile().as_text())


def test_a_read_of_the_verdict_is_counted(jax: Any) -> None:
    policy = DynamicScale()
    state, weights, data = begin(jax, policy)
    step = jax.jit(make_step(policy))
    with counted(jax) as found:
        verdict = step(state, weights, data[0])[3]
        if jax.default_backend() != "cpu":
            with pytest.raises(RuntimeError, match="transfer"):
                bool(verdict.finite)
            return
        assert bool(verdict.finite)
    assert found["reads"] == 1
    assert found["compilations"] > 0
    assert found["traces"] > 0
