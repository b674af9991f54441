"""scaled over devices of a named axis, and the adapter without optax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from axes_jax import COUNT, P, gradscale_jax, jax, jnp, mesh
from commands import python
from optax_runs import assert_same_bits, optax

import gradscale
from gradscale.extras import remedy

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


@pytest.mark.parametrize("drifted", range(COUNT))
def test_a_device_that_has_drifted_stops_all_and_the_host_learns_of_it(drifted: int) -> None:
    tx = gradscale_jax.scaled(optax.sgd(1.0), POLICY, axis_name="data")
    # Of each device its own, along axis 0.
    before = jax.tree.map(lambda leaf: jnp.stack([leaf] * COUNT), tx.init({"weight": jnp.zeros(2)}))
    scales = before.scale_state.scale.at[drifted].set(2.0)
    before = before._replace(scale_state=before.scale_state._replace(scale=scales))

    def step(params: Any, states: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, jax.tree.map(lambda leaf: leaf[0], states), params)
        return optax.apply_updates(params, updates), jax.tree.map(lambda leaf: leaf[None], state)

    mapped = jax.shard_map(step, mesh=mesh("data"), in_specs=P("data"), out_specs=P("data"))
    params, after = jax.jit(mapped)({"weight": jnp.arange(8.0)}, before, {"weight": jnp.full(8, 1024.0)})
    np.testing.assert_array_equal(params["weight"], np.arange(8.0))
    assert_same_bits(after.scale_state, before.scale_state)
    np.testing.assert_array_equal(after.skipped, [1] * COUNT)
    with pytest.raises(gradscale.ScaleDesyncError, match=r"scale.*1024"):
        gradscale_jax.verdict_of(jax.tree.map(lambda leaf: leaf[0], after)).check(POLICY)


WITHOUT_OPTAX = """
import sys
import gradscale, gradscale_jax
assert "optax" not in sys.modules
sys.modules["optax"] = None
for name in ("scaled", "scale_state", "verdict_of", "ScaledOptimizerState"):
    try:
        getattr(gradscale_jax, name)
    except gradscale.BackendNotAvailableError as error:
        print(error)
assert (hasattr(gradscale_jax, "scale"), hasattr(gradscale_jax, "nothing")) == (True, False)
del sys.modules["optax"]
assert gradscale_jax.scaled.__module__ == "gradscale_jax.transformation"
"""


def test_optax_is_imported_when_it_is_asked_for_and_the_error_names_the_extra() -> None:
    found = python("-c", WITHOUT_OPTAX)
    assert found.returncode == 0, found.stderr
    for name in ("scaled", "scale_state", "verdict_of", "ScaledOptimizerState"):
        assert f"gradscale_jax.{name} needs optax" in found.stdout
    assert found.stdout.count(remedy("optax")) == 4
