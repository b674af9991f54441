"""The JAX adapter on an accelerator: the pure core's bits, the CPU's run, and no transfer in a compiled step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes import leave_out_gpu
from axes_jax import gradscale_jax, jax, jnp

import gradscale
from gradscale import DynamicScale, registry

pytestmark = [pytest.mark.jax, pytest.mark.gpu]

POLICY = DynamicScale(init_scale=2.0**10, growth_interval=2)


@pytest.fixture
def device():
    """Return JAX's first device that is no CPU."""
    found = jax.devices()[0]
    if found.platform == "cpu":
        leave_out_gpu("JAX finds no accelerator")
    return found


def loss(weights, x):
    return jnp.mean((x * weights.astype(jnp.float16)).astype(jnp.float32))


@jax.jit
def step(weights, state, x):
    _, grads, verdict, state = gradscale_jax.value_and_grad(loss, POLICY)(state, weights, x)
    return gradscale_jax.select(verdict.finite, weights - 0.5 * grads, weights), state, verdict.nonfinite


def train(device, steps: int):
    """Return the scale, the verdict and the weights after each compiled step, every third of which overflows."""
    with jax.default_device(device):
        weights = jax.device_put(jnp.arange(8, dtype=jnp.float32), device)
        state = POLICY.init(weights)
        data = [jnp.full(8, jnp.inf if k % 3 == 2 else 0.25, jnp.float16) for k in range(steps)]
        made = []
        for k, x in enumerate(data):
            with jax.transfer_guard("allow" if k < 2 else "disallow"):
                weights, state, nonfinite = step(weights, state, x)
            made.append((state.scale, nonfinite, weights))
    return [(float(scale), int(nonfinite), np.asarray(weights).tolist()) for scale, nonfinite, weights in made]


def test_the_adapter_conforms_on_the_device(device):
    like = jnp.zeros((), device=device)
    dtypes = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64]
    gradscale.testing.check_backend(registry.get("jax"), like, dtypes=[jnp.dtype(dtype) for dtype in dtypes])


@pytest.mark.parametrize("scale", [2.0**-100, 0.3, 3.0, 65521.0, 65536.0, 2.0**127])
def test_a_scale_is_divided_out_exactly_or_to_two_units_if_it_is_no_power_of_two(device, scale: float):
    host = np.linspace(1.0, 2.0, 1001, dtype=np.float32) * np.float32(2.0**10)
    state = DynamicScale(init_scale=scale).init(jnp.zeros((), device=device))
    (made,), _ = gradscale.unscale([jnp.asarray(host, device=device)], state)
    expected = host * np.float32(1.0 / float(np.float32(scale)))
    # Two units of the reciprocal may be four of a product, which is rounded once more.
    units = 0 if math.log2(scale).is_integer() else 5
    assert np.abs(np.asarray(made).view(np.int32) - expected.view(np.int32)).max() <= units


def test_a_compiled_run_is_the_cpus_bit_for_bit_and_transfers_nothing(device):
    run = train(device, 12)
    assert run == train(jax.devices("cpu")[0], 12)
    assert [nonfinite > 0 for _, nonfinite, _ in run] == [False, False, True] * 4
