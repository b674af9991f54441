"""The state of scaled: over devices, in flax, and without optax."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import COUNT, require_jax, require_mesh
from optax_runs import assert_same_bits, first_params, gradients, scaled_step

import gradscale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


@pytest.fixture(autouse=True)
def _libraries() -> None:
    require_jax()
    require("optax")


def on_each_device(tx: Any, states: Any, bad: int | None) -> tuple[Any, Any, Any]:
    """Take a step with parameters that are sharded over 4 devices; the state is each device's own, along axis 0."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import PartitionSpec

    params = {"weight": jnp.arange(8.0)}
    grads = np.full(8, 1024.0, np.float32)
    if bad is not None:
        grads[2 * bad] = np.inf

    def step(params: Any, states: Any, grads: Any) -> Any:
        state = jax.tree.map(lambda leaf: leaf[0], states)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), updates, jax.tree.map(lambda leaf: leaf[None], state)

    sharded = PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=require_mesh("data"), in_specs=sharded, out_specs=sharded)
    left = jax.jit(mapped)(params, states, {"weight": jnp.asarray(grads)})
    return jax.tree.map(np.asarray, left)


def states_of(tx: Any) -> Any:
    """Return the first state of each of 4 devices, stacked."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.stack([leaf] * COUNT), tx.init({"weight": jnp.zeros(2)}))


def make(axis_name: str | None = "data", policy: Any = POLICY) -> Any:
    import optax

    import gradscale_jax

    # Of the inner state only the count is one for all devices.
    return gradscale_jax.scaled(optax.sgd(lambda count: 1.0 / (1.0 + count)), policy, axis_name=axis_name)


@pytest.mark.parametrize("bad", range(COUNT))
def test_all_devices_skip_whichever_holds_the_overflow(jax: Any, bad: int) -> None:
    tx = make()
    first = states_of(tx)
    params, updates, states = on_each_device(tx, first, bad)
    np.testing.assert_array_equal(params["weight"], np.arange(8.0))
    np.testing.assert_array_equal(updates["weight"], np.zeros(8))
    assert_same_bits(states.inner_state, first.inner_state)
    np.testing.assert_array_equal(states.scale_state.scale, [512.0] * COUNT)
    np.testing.assert_array_equal(states.skipped, [1] * COUNT)
    for leaf in jax.tree.leaves(states):
        assert_same_bits(leaf, np.stack([leaf[0]] * COUNT))


def test_all_devices_step_when_none_holds_an_overflow() -> None:
    tx = make()
    params, _, states = on_each_device(tx, states_of(tx), None)
    np.testing.assert_array_equal(params["weight"], np.arange(8.0) - 1.0)
    np.testing.assert_array_equal(states.inner_state[1].count, [1] * COUNT)
    np.testing.assert_array_equal(states.skipped, [0] * COUNT)


def test_without_the_axis_the_devices_come_apart() -> None:
    tx = make(axis_name=None)
    _, _, states = on_each_device(tx, states_of(tx), 2)
    np.testing.assert_array_equal(states.inner_state[1].count, [1, 1, 0, 1])
    np.testing.assert_array_equal(states.scale_state.scale, [1024.0, 1024.0, 512.0, 1024.0])


@pytest.mark.parametrize("drifted", range(COUNT))
def test_a_device_that_has_drifted_stops_all_and_the_host_learns_of_it(
    jax: Any, gradscale_jax: Any, drifted: int
) -> None:
    tx = make()
    first = states_of(tx)
    scales = first.scale_state.scale.at[drifted].set(2.0)
    first = first._replace(scale_state=first.scale_state._replace(scale=scales))
    params, _, states = on_each_device(tx, first, None)
    np.testing.assert_array_equal(params["weight"], np.arange(8.0))
    assert_same_bits(states.scale_state, first.scale_state)
    np.testing.assert_array_equal(states.skipped, [1] * COUNT)
    with pytest.raises(gradscale.ScaleDesyncError, match=r"scale.*1024"):
        gradscale_jax.verdict_of(jax.tree.map(lambda leaf: leaf[0], states)).check(POLICY)


def test_a_replicated_state_stays_so_in_the_eyes_of_shard_map(
    jax: Any, jnp: Any, optax: Any, gradscale_jax: Any
) -> None:
    from jax.sharding import PartitionSpec

    tx = gradscale_jax.scaled(optax.sgd(0.5, momentum=0.5), POLICY, axis_name="data")
    params = {"weight": jnp.ones(2)}

    def step(params: Any, state: Any, rows: Any) -> Any:
        def loss(params: Any) -> Any:
            return gradscale_jax.scale(jnp.mean(rows @ params["weight"]), gradscale_jax.scale_state(state)) / COUNT

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    one = PartitionSpec()
    mapped = jax.jit(
        jax.shard_map(step, mesh=require_mesh("data"), in_specs=(one, one, PartitionSpec("data")), out_specs=(one, one))
    )
    rows = np.ones((8, 2), np.float32)
    state = tx.init(params)
    params, state = mapped(params, state, rows)
    np.testing.assert_array_equal(params["weight"], [0.5, 0.5])
    rows[5, 0] = np.nan
    after, state = mapped(params, state, rows)
    assert_same_bits(after, params)
    np.testing.assert_array_equal(state.inner_state[0].trace["weight"], [1.0, 1.0])
    assert int(state.skipped) == 1


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("where", ["uncommitted", "device", "replicated", "sharded"])
def test_the_state_is_made_beside_the_parameters_and_compiled_for_at_most_twice(
    jax: Any, optax: Any, gradscale_jax: Any, where: str
) -> None:
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = require_mesh("data")
    replicated = NamedSharding(mesh, PartitionSpec())
    params = first_params()
    if where == "device":
        params = jax.device_put(params, mesh.devices[1])
    elif where == "replicated":
        params = jax.device_put(params, replicated)
    elif where == "sharded":
        params["bias"] = jax.device_put(params["bias"], NamedSharding(mesh, PartitionSpec("data")))
    tx = gradscale_jax.scaled(optax.adam(0.5), POLICY)
    state = tx.init(params)
    placed = [leaf for part in (state.scale_state, state.verdict, state.skipped) for leaf in jax.tree.leaves(part)]
    expected = {"uncommitted": None, "device": jax.sharding.SingleDeviceSharding(mesh.devices[1])}
    sharding = expected.get(where, replicated)
    for leaf in placed:
        assert leaf.committed == (where != "uncommitted")
        assert sharding is None or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    step = jax.jit(scaled_step(tx))
    sizes = []
    for index in range(4):
        grads = jax.tree.map(lambda leaf, index=index: leaf[index], gradients(4, frozenset({1})))
        params, _, state = step(params, state, grads)
        sizes.append(step._cache_size())
    assert sizes[1:] == [sizes[1]] * 3
    assert sizes[1] <= 2
    assert int(state.skipped) == 1


def test_the_state_is_made_where_somebody_has_put_a_parameter_and_traced_without_a_place(
    jax: Any, jnp: Any, optax: Any, gradscale_jax: Any
) -> None:
    require_mesh("data")
    tx = gradscale_jax.scaled(optax.sgd(0.5), POLICY)
    params = {"anywhere": jnp.ones(2), "chosen": jax.device_put(jnp.ones(2), jax.devices()[2])}
    made = tx.init(params)
    assert made.scale_state.scale.devices() == {jax.devices()[2]}
    free = {"anywhere": jnp.ones(2)}
    assert_same_bits(jax.jit(tx.init)(free).scale_state, made.scale_state)
    shapes = jax.eval_shape(tx.init, free).scale_state
    assert [(leaf.shape, leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in made.scale_state]


def test_the_variables_of_nnx_are_taken_off(jnp: Any, optax: Any, gradscale_jax: Any) -> None:
    require("flax")
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(2))

    model = Model()
    optimizer = nnx.Optimizer(model, gradscale_jax.scaled(optax.sgd(0.5), POLICY), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, factor: Any) -> None:
        state = gradscale_jax.scale_state(optimizer.opt_state)
        grads = nnx.grad(lambda model: gradscale_jax.scale(jnp.sum(model.weight[...]) * factor, state))(model)
        optimizer.update(model, grads)

    for factor, weight, scale in ((1.0, 0.5, 1024.0), (np.inf, 0.5, 512.0), (0.5, 0.25, 512.0)):
        step(model, optimizer, factor)
        np.testing.assert_array_equal(model.weight[...], [weight] * 2)
        found = gradscale_jax.scale_state(optimizer.opt_state).scale
        assert isinstance(found, require_jax().Array)
        assert float(found) == scale
        assert bool(gradscale_jax.verdict_of(optimizer.opt_state).finite) == np.isfinite(factor)


def test_the_state_in_a_flax_train_state_is_found(jnp: Any, optax: Any, gradscale_jax: Any) -> None:
    require("flax")
    from flax.training.train_state import TrainState

    tx = optax.chain(gradscale_jax.scaled(optax.sgd(0.5), POLICY), optax.identity())
    train_state = TrainState.create(apply_fn=print, params={"weight": jnp.ones(2)}, tx=tx)
    train_state = train_state.apply_gradients(grads={"weight": jnp.full(2, jnp.inf)})
    assert float(gradscale_jax.scale_state(train_state).scale) == 512.0
    np.testing.assert_array_equal(train_state.params["weight"], [1.0, 1.0])


def test_the_parameters_in_the_state_can_be_told_from_the_rest(jnp: Any, optax: Any, gradscale_jax: Any) -> None:
    tx = gradscale_jax.scaled(optax.adam(0.5), POLICY)
    state = tx.init({"weight": jnp.ones(2)})
    marked = optax.tree_map_params(tx, lambda _: "sharded", state, transform_non_params=lambda _: "replicated")
    assert marked.inner_state[0].mu == {"weight": "sharded"}
    assert set(marked.scale_state) == set(marked.verdict) == {marked.skipped} == {"replicated"}


def run_python(*lines: str) -> str:
    """Return what a new process prints."""
    program = "\n".join(lines)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


@pytest.mark.tier("ranks")
def test_optax_is_imported_when_it_is_asked_for() -> None:
    printed = run_python(
        "import sys, gradscale_jax",
        "print('optax' in sys.modules)",
        "from gradscale_jax import scaled",
        "print('optax' in sys.modules, scaled.__module__)",
    )
    assert printed.splitlines() == ["False", "True gradscale_jax.transformation"]


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", ["scaled", "scale_state", "verdict_of", "ScaledOptimizerState"])
def test_without_optax_the_error_names_the_extra(name: str) -> None:
    printed = run_python(
        "import sys",
        "sys.modules['optax'] = None",
        "import gradscale, gradscale_jax",
        f"try: gradscale_jax.{name}",
        "except gradscale.BackendNotAvailableError as error: print(error)",
        "print(hasattr(gradscale_jax, 'scale'), hasattr(gradscale_jax, 'nothing'))",
    )
    assert f"gradscale_jax.{name} needs optax" in printed
    assert "from a clone of gradscale: python -m pip install '.[optax]'" in printed
    assert printed.endswith("True False")
