"""scaled: the inner transformation's own trajectory with the overflowing steps left out, in every nesting inside."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from axes_jax import gradscale_jax, jax, jnp, mesh, on_mesh, x64_mode
from optax_runs import (
    HOWS,
    Run,
    assert_close,
    assert_same_bits,
    drive,
    first_params,
    gradients,
    optax,
    plain_step,
    run_all_steps,
    run_clean_steps,
    scaled_step,
)
from tiers import later

import gradscale

pytestmark = pytest.mark.jax

STEPS = 7
BAD = frozenset({0, 2, 3})
POLICY = gradscale.DynamicScale(init_scale=1024.0, growth_interval=2)
# Halved after steps 0, 2 and 3, doubled after the second clean one in a row.
SCALES = [512.0, 512.0, 256.0, 128.0, 128.0, 256.0, 256.0]

INNER: dict[str, Any] = {
    "sgd with momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 8)),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 6)),
    "several steps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "masked": optax.masked(optax.adam(0.1), {"weight": True, "bias": False}),
    "partitioned": optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"weight": "a", "bias": "b"}),
    "noisy": optax.chain(optax.add_noise(0.01, 0.55, 0), optax.adam(0.1)),
}
ADAM = INNER["adam"]


def scaled(tx=ADAM, **options):
    return gradscale_jax.scaled(tx, POLICY, **options)


@functools.cache
def run_inner(name: str) -> Run:
    """Return the run of the inner transformation alone, operation by operation."""
    return run_clean_steps(plain_step(INNER[name]), INNER[name], "eager", STEPS, BAD)


@pytest.mark.parametrize("how", [*later("ranks", "jit"), *later("all", *(how for how in HOWS if how != "jit"))])
@pytest.mark.parametrize("name", INNER)
def test_an_overflow_leaves_the_trajectory_of_the_clean_steps(name: str, how: str):
    tx = scaled(INNER[name])
    step = scaled_step(tx)
    run = run_all_steps(step, tx, how, STEPS, BAD)
    alone = run_inner(name)
    if how == "eager":
        assert_same_bits(run.updates, alone.updates)
        assert_same_bits(run.params, alone.params)
        assert_same_bits(run.states.inner_state, alone.states)
    else:
        # A compiler fuses the division into what follows it: the same program shows that nothing else differs.
        clean = run_clean_steps(step, tx, how, STEPS, BAD)
        assert_same_bits(run.updates, clean.updates)
        assert_same_bits(run.params, clean.params)
        assert_same_bits(run.states.inner_state, clean.states.inner_state)
        assert_close(run.params, alone.params)
        assert_close(run.states.inner_state, alone.states)
    np.testing.assert_array_equal(run.states.scale_state.scale, np.float32(SCALES))
    np.testing.assert_array_equal(run.states.skipped, np.cumsum([step in BAD for step in range(STEPS)]))
    np.testing.assert_array_equal(run.states.verdict.nonfinite, [int(step in BAD) for step in range(STEPS)])


def test_a_transformation_that_sees_overflows_fails_the_comparison():
    step = plain_step(ADAM)
    run = run_all_steps(step, ADAM, "jit", STEPS, BAD)
    alone = run_clean_steps(step, ADAM, "jit", STEPS, BAD)
    for compare in (assert_same_bits, assert_close):
        with pytest.raises(AssertionError):
            compare(run.params, alone.params)


@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("kind", ["NumPy", "number"])
def test_updates_that_are_no_arrays_of_jax_are_not_applied_in_a_skipped_step(kind: str, how: str):
    update = {"NumPy": np.asarray([-0.1, 0.1], np.float32), "number": -0.1}[kind]
    tx = scaled(optax.stateless(lambda updates, _: jax.tree.map(lambda _: update, updates)))
    run = jax.jit(tx.update) if how == "jit" else tx.update
    params = jnp.ones(2)
    for value, expected in ((np.inf, 0.0), (1.0, update)):
        updates, state = run(jnp.asarray([value, 1.0]), tx.init(params), params)
        assert_same_bits(jnp.abs(updates), np.broadcast_to(np.abs(np.float32(expected)), np.shape(update)))
        assert int(state.skipped) == int(not np.isfinite(value))


def test_an_update_that_is_no_number_is_refused():
    tx = scaled(optax.stateless(lambda updates, _: jax.tree.map(lambda _: "0.1", updates)))
    with pytest.raises(gradscale.InvalidTypeError, match="an update of tx cannot be read, got TypeError"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("how", HOWS)
def test_a_skipped_step_changes_no_bit_of_a_parameter(how: str):
    tx = scaled()
    run = run_all_steps(scaled_step(tx), tx, how, 1, frozenset({0}))
    assert_same_bits(run.params, {name: np.asarray(leaf)[None] for name, leaf in first_params().items()})


@pytest.mark.tier("ranks")
def test_half_gradients_are_unscaled_to_float32_for_the_inner_transformation():
    # Adam's epsilon is 0 in float16, and a gradient of 2**-26 too.
    tx = scaled(optax.inject_hyperparams(optax.adam)(0.5), dtype=np.float32)
    params = {"weight": first_params(np.float16)["weight"]}
    grads = {"weight": np.full((1, 3, 4), 2.0**-26, np.float32)}
    run = drive(scaled_step(tx), params, tx.init(params), grads, "jit")
    assert run.updates["weight"].dtype == run.states.inner_state.inner_state[0].mu["weight"].dtype == np.float32
    assert run.states.inner_state.hyperparams["eps"] == np.float32(1e-8)
    np.testing.assert_allclose(run.updates["weight"], -0.5 * 2.0**-26 / (2.0**-26 + 1e-8), rtol=1e-4)
    assert run.params["weight"].dtype == np.float16
    assert not np.array_equal(run.params["weight"][0], np.asarray(params["weight"]))
    own = scaled(optax.adam(0.5), dtype=np.float16)
    assert drive(scaled_step(own), params, own.init(params), grads, "jit").updates["weight"].dtype == np.float16


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

    # An unused row, whose gradient is 0.
    params, tx = {"w": jnp.ones(2, jnp.float16)}, scaled(dtype=jnp.float32)
    updates, _ = tx.update({"w": jnp.asarray([1024.0, 0.0], jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=1e-4)


def test_the_inner_transformation_sees_the_parameters_in_the_dtype_of_its_gradients():
    params, tx = {"w": jnp.ones(2, jnp.float16)}, scaled(optax.stateless(lambda _, seen: seen), dtype=jnp.float32)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32


FROZEN = optax.partition({"train": optax.adam(0.125), "freeze": optax.set_to_zero()}, {"w": "train", "base": "freeze"})
HALF_MU = optax.adam(0.125, mu_dtype="float16")


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2"])
@pytest.mark.parametrize(
    ("tx", "narrow"), [(optax.sgd(0.125), "w"), (FROZEN, "base"), (HALF_MU, None)], ids=["sgd", "frozen", "half mu"]
)
def test_parameters_that_are_narrow_train_where_the_state_is_not(tx, narrow: str | None, dtype: str):
    tx = scaled(tx)
    params = {name: jnp.ones(2, dtype if name == narrow else "float32") for name in ("w", "base")}
    grads = {name: (1024.0 * jnp.asarray([1.0, 0.0])).astype(leaf.dtype) for name, leaf in params.items()}
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert bool(state.verdict.taken)
    np.testing.assert_allclose(np.asarray(updates["w"], np.float32), [-0.125, 0.0], rtol=1e-3)
    assert updates["base"].dtype == params["base"].dtype


def test_a_state_that_is_wide_takes_gradients_that_are_narrow():
    tx, params = scaled(), {"w": jnp.ones(2)}
    updates, _ = jax.jit(tx.update)({"w": jnp.asarray([1024.0, 0.0], jnp.float16)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=1e-3)


@pytest.mark.tier("ranks")
def test_double_precision_stays_so_in_x64_mode():
    tx = scaled(optax.sgd(0.1, momentum=0.9))
    with x64_mode(True):
        # Differentiated as they are: the helper's loss is float32.
        params = {"weight": jnp.asarray([1.0 + 2.0**-40, 2.0])}
        grads = {"weight": 1024.0 * np.asarray([[1.0 + 2.0**-45, 3.0], [np.inf, 1.0], [512.0, 1.0]])}
        run = drive(plain_step(tx), params, tx.init(params), grads, "jit")
    assert run.states.inner_state[0].trace["weight"].dtype == np.float64
    assert [leaf.dtype for leaf in run.states.scale_state] == [np.float32, np.int32, np.int32, np.int32]
    assert run.states.skipped.dtype == run.states.verdict.nonfinite.dtype == np.int32
    np.testing.assert_array_equal(run.states.inner_state[0].trace["weight"][:2, 0], [1.0 + 2.0**-45] * 2)
    np.testing.assert_array_equal(run.states.skipped, [0, 1, 1])


PLACES = ["anywhere", "device", "replicated", "sharded"]


def placed(where: str):
    """Return the first parameters somewhere."""
    params = first_params()
    if where == "sharded":
        return params | {"bias": on_mesh(params["bias"], "data")}
    chosen = {"anywhere": lambda x: x, "device": lambda x: jax.device_put(x, mesh("data").devices[1])}
    return {name: chosen.get(where, on_mesh)(x) for name, x in params.items()}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(
    ("name", "where"), [*((name, PLACES[0]) for name in INNER), *(("adam", x) for x in PLACES[1:])]
)
def test_the_state_is_made_beside_the_parameters_keeps_its_types_and_is_compiled_for_at_most_twice(
    name: str, where: str
):
    tx, params = scaled(INNER[name]), placed(where)
    step, state = jax.jit(scaled_step(tx)), tx.init(params)
    one = params["bias"].sharding
    for leaf in jax.tree.leaves((state.scale_state, state.verdict, state.skipped)):
        assert leaf.committed == (where != "anywhere")
        assert leaf.devices() == one.device_set
        assert leaf.is_fully_replicated

    def types(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)), tree)

    first = types(state)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    sizes = []
    for index in range(4):
        grads = jax.tree.map(lambda leaf, index=index: leaf[index], gradients(STEPS, BAD))
        params, _, state = step(params, state, grads)
        assert types(state) == first
        sizes.append(step._cache_size())
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


def test_the_count_of_skipped_steps_stays_at_the_largest_int32():
    tx, params = scaled(), {"weight": jnp.ones(2)}
    state = tx.init(params)._replace(skipped=jnp.asarray(2**31 - 2, jnp.int32))
    for _ in range(3):
        _, state = tx.update({"weight": jnp.full(2, jnp.inf)}, state, params)
    assert int(state.skipped) == 2**31 - 1


@pytest.mark.parametrize("around", ["transformation", "MultiSteps", "none"])
def test_extra_arguments_reach_the_inner_transformation_that_takes_them(around: str):
    def update(updates, state, params=None, *, factor, **_):
        assert params is not None
        return jax.tree.map(lambda leaf: leaf * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = scaled({"transformation": inner, "MultiSteps": optax.MultiSteps(inner, 1), "none": optax.sgd(1.0)}[around])
    params = {"weight": jnp.ones(2)}
    updates, _ = tx.update({"weight": jnp.full(2, 1024.0)}, tx.init(params), params, factor=3.0)
    np.testing.assert_array_equal(updates["weight"], [-1.0 if around == "none" else 3.0] * 2)


@pytest.mark.parametrize("params", [{}, None, {"weight": None}], ids=["dict", "None", "leaf-None"])
def test_trees_without_arrays_are_clean_steps(params):
    tx = scaled()
    updates, state = tx.update(params, tx.init(params))
    assert updates == params
    assert (int(state.scale_state.growth_tracker), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("value", [1024.0, np.inf], ids=["clean", "overflow"])
def test_gradients_of_integers_pass_by_an_inner_mask(value: float):
    tx = scaled(optax.masked(optax.sgd(1.0), {"weight": True, "ids": False}))
    params = {"weight": jnp.ones(2), "ids": jnp.arange(3)}
    grads = {"weight": jnp.full(2, value), "ids": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["ids"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["weight"], [-1.0, -1.0] if np.isfinite(value) else [0.0, 0.0])
    assert int(state.skipped) == int(not np.isfinite(value))
    updates, _ = tx.update({**grads, "ids": jnp.arange(3)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["ids"], [0, 1, 2] if np.isfinite(value) else [0, 0, 0])
