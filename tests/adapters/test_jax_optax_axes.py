"""scaled over devices of a named axis, and the adapter without optax."""

from __future__ import annotations

import numpy as np
import pytest
from axes_jax import COUNT, P, gradscale_jax, jax, jnp, mesh
from commands import python
from optax_runs import assert_same_bits, optax
from tiers import later

import gradscale
from gradscale.extras import remedy

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("drifted", [0, *later("ranks", *range(1, COUNT))])
def test_a_device_that_has_drifted_stops_all_and_the_host_learns_of_it(drifted: int):
    tx = gradscale_jax.scaled(optax.sgd(lambda count: 1.0 / (1.0 + count)), POLICY, axis_name="data")
    # Each device has a state of its own, along axis 0; of the inner one only the count is one for all devices.
    before = jax.tree.map(lambda leaf: jnp.stack([leaf] * COUNT), tx.init({"weight": jnp.zeros(2)}))
    scales = before.scale_state.scale.at[drifted].set(2.0)
    before = before._replace(scale_state=before.scale_state._replace(scale=scales))

    def step(params, states, grads):
        updates, state = tx.update(grads, jax.tree.map(lambda leaf: leaf[0], states), params)
        return optax.apply_updates(params, updates), jax.tree.map(lambda leaf: leaf[None], state)

    mapped = jax.shard_map(step, mesh=mesh("data"), in_specs=P("data"), out_specs=P("data"))
    params, after = jax.jit(mapped)({"weight": jnp.arange(8.0)}, before, {"weight": np.full(8, 1024.0, np.float32)})
    # As a checkpoint has it.
    after = jax.tree.map(np.asarray, after)
    np.testing.assert_array_equal(params["weight"], np.arange(8.0))
    assert_same_bits(after.scale_state, before.scale_state)
    np.testing.assert_array_equal(after.skipped, [1] * COUNT)
    with pytest.raises(gradscale.ScaleDesyncError, match=r"scale.*1024"):
        gradscale_jax.verdict_of(jax.tree.map(lambda leaf: leaf[0], after)).check(POLICY)


def test_a_replicated_state_stays_so_in_the_eyes_of_shard_map():
    tx = gradscale_jax.scaled(optax.sgd(0.5, momentum=0.5), POLICY, axis_name="data")

    def step(params, state, rows):
        def loss(params):
            return gradscale_jax.scale(jnp.mean(rows @ params["weight"]), gradscale_jax.scale_state(state)) / COUNT

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data"), **specs))
    rows, params = np.ones((8, 2), np.float32), {"weight": jnp.ones(2)}
    params, state = mapped(params, tx.init(params), rows)
    np.testing.assert_array_equal(params["weight"], [0.5, 0.5])
    rows[5, 0] = np.nan
    after, state = mapped(params, state, rows)
    assert_same_bits(after, params)
    np.testing.assert_array_equal(state.inner_state[0].trace["weight"], [1.0, 1.0])
    assert int(state.skipped) == 1


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


def test_optax_is_imported_when_it_is_asked_for_and_the_error_names_the_extra():
    found = python("-c", WITHOUT_OPTAX)
    assert found.returncode == 0, found.stderr
    for name in ("scaled", "scale_state", "verdict_of", "ScaledOptimizerState"):
        assert f"gradscale_jax.{name} needs optax" in found.stdout
    assert found.stdout.count(remedy("optax")) == 4
