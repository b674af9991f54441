"""scaled: what it takes and refuses, and where its state is made."""

from __future__ import annotations

import numpy as np
import pytest
from axes import require
from axes_jax import assert_same_bits, gradscale_jax, jax, jnp, mesh, on_mesh

import gradscale

optax = require("optax")
pytestmark = pytest.mark.jax

POLICY = gradscale.DynamicScale(init_scale=1024.0, growth_interval=2)
ADAM = optax.adam(0.1)


def scaled(tx=ADAM, **options):
    return gradscale_jax.scaled(tx, POLICY, **options)


def test_state_in_which_an_epsilon_is_zero_is_refused_unless_a_dtype_is_given():
    refused = pytest.raises(
        gradscale.InvalidTypeError, match=r"got float\d.* in tx.init\(params\)\[0\].mu\['w'\].*dtype=jnp.float32\)"
    )
    for dtype in ("float16", "float8_e4m3fn", "float8_e5m2"):
        narrow = {"w": jnp.ones(2, dtype)}
        for make in (jnp.asarray, np.asarray):
            with refused:
                scaled().init({"w": make(narrow["w"])})
        with refused:
            jax.eval_shape(scaled().init, narrow)
    for dtype in ("bfloat16", "float32", "complex64", "int32"):
        scaled().init({"w": jnp.ones(2, dtype)})
    scaled(dtype=jnp.float16).init({"w": jnp.ones(2, jnp.float16)})
    # Not of the parameters.
    scaled(optax.adam(0.1, mu_dtype="float16")).init({"w": jnp.ones(2)})

    # An unused row, whose gradient is 0.
    params, tx = {"w": jnp.ones(2, jnp.float16)}, scaled(dtype=jnp.float32)
    updates, _ = tx.update({"w": jnp.asarray([1024.0, 0.0], jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=1e-4)


def test_a_state_that_is_wide_takes_gradients_that_are_narrow():
    tx, params = scaled(), {"w": jnp.ones(2)}
    updates, _ = jax.jit(tx.update)({"w": jnp.asarray([1024.0, 0.0], jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=1e-3)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("where", ["anywhere", "device", "replicated", "sharded"])
def test_the_state_is_made_beside_the_parameters_and_compiled_for_at_most_twice(where: str):
    first = {"weight": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    chosen = {"anywhere": lambda x: x, "device": lambda x: jax.device_put(x, mesh("data").devices[1])}
    params = {name: chosen.get(where, on_mesh)(x) for name, x in first.items()}
    if where == "sharded":
        params["bias"] = on_mesh(params["bias"], "data")
    tx = scaled()
    update, state = jax.jit(tx.update), tx.init(params)
    for leaf in jax.tree.leaves((state.scale_state, state.verdict, state.skipped)):
        assert leaf.committed == (where != "anywhere")
        assert leaf.devices() == params["bias"].sharding.device_set
        assert leaf.is_fully_replicated
    sizes = []
    for factor in (np.inf, 1.0, np.nan, 1.0):
        updates, state = update(jax.tree.map(lambda leaf, factor=factor: leaf * factor, params), state, params)
        params = optax.apply_updates(params, updates)
        sizes.append(update._cache_size())
    assert sizes[1:] == [sizes[1]] * 3
    assert sizes[1] <= 2


def test_the_state_is_made_where_somebody_has_put_a_parameter_and_traced_without_a_place():
    tx = scaled(optax.sgd(0.5))
    free = {"anywhere": jnp.ones(2)}
    chosen = {**free, "chosen": jax.device_put(jnp.ones(2), jax.devices()[2])}
    made = tx.init(chosen)
    assert made.scale_state.scale.devices() == {jax.devices()[2]}
    # Of several places, where the most devices are.
    assert tx.init({**chosen, "spread": on_mesh(jnp.ones(2))}).scale_state.scale.devices() == {*jax.devices()}
    assert_same_bits(jax.jit(tx.init)(free).scale_state, made.scale_state)
    shapes = jax.eval_shape(tx.init, free).scale_state
    assert [(leaf.shape, leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in made.scale_state]


@pytest.mark.parametrize("params", [{}, None, {"weight": None}], ids=["dict", "None", "leaf-None"])
def test_trees_without_arrays_are_clean_steps(params):
    tx = scaled()
    updates, state = tx.update(params, tx.init(params))
    assert updates == params
    assert (int(state.scale_state.growth_tracker), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("value", [1024.0, np.inf], ids=["clean", "overflow"])
def test_gradients_of_integers_pass_by_an_inner_mask(value: float):
    tx = scaled(optax.masked(optax.sgd(1.0), {"weight": True, "ids": False}), skip=gradscale.SkipSpikes(of="norm"))
    params = {"weight": jnp.ones(2), "ids": jnp.arange(3)}
    grads = {"weight": jnp.full(2, value), "ids": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["ids"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["weight"], [-1.0, -1.0] if np.isfinite(value) else [0.0, 0.0])
    assert int(state.skipped) == int(not np.isfinite(value))
    # An integer has no norm.
    assert float(state.windows.values[0, -1]) == (np.float32(2.0) ** 0.5 if np.isfinite(value) else 0.0)
    updates, _ = tx.update({**grads, "ids": jnp.arange(3)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["ids"], [0, 1, 2] if np.isfinite(value) else [0, 0, 0])
