"""scaled: the inner transformation's own trajectory with the overflowing steps left out, in every nesting inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import require_jax, x64_mode
from optax_runs import (
    HOWS,
    Run,
    assert_close,
    assert_same_bits,
    drive,
    first_params,
    gradients,
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


@pytest.fixture(autouse=True)
def _libraries() -> None:
    require_jax()
    require("optax")


INNER: dict[str, Callable[[Any], Any]] = {
    "sgd with momentum": lambda optax: optax.sgd(0.1, momentum=0.9),
    "adam": lambda optax: optax.adam(0.1),
    "adamw with a schedule": lambda optax: optax.adamw(optax.cosine_decay_schedule(0.1, 8)),
    "clipped": lambda optax: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "injected": lambda optax: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 6)),
    "several steps": lambda optax: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "masked": lambda optax: optax.masked(optax.adam(0.1), {"weight": True, "bias": False}),
    "partitioned": lambda optax: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"weight": "a", "bias": "b"}
    ),
    "noisy": lambda optax: optax.chain(optax.add_noise(0.01, 0.55, 0), optax.adam(0.1)),
}


def inner(name: str = "adam") -> Any:
    """Return a transformation."""
    return INNER[name](require("optax"))


@functools.cache
def run_inner(name: str) -> Run:
    """Return the run of the inner transformation alone, operation by operation."""
    return run_clean_steps(plain_step(inner(name)), inner(name), "eager", STEPS, BAD)


@pytest.mark.parametrize("how", [*later("ranks", "jit"), *later("all", *(how for how in HOWS if how != "jit"))])
@pytest.mark.parametrize("name", INNER)
def test_an_overflow_leaves_the_trajectory_of_the_clean_steps(gradscale_jax: Any, name: str, how: str) -> None:
    tx = gradscale_jax.scaled(inner(name), POLICY)
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


def test_a_transformation_that_sees_overflows_fails_the_comparison() -> None:
    step = plain_step(inner())
    run = run_all_steps(step, inner(), "jit", STEPS, BAD)
    alone = run_clean_steps(step, inner(), "jit", STEPS, BAD)
    with pytest.raises(AssertionError):
        assert_same_bits(run.params, alone.params)
    with pytest.raises(AssertionError):
        assert_close(run.params, alone.params)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("how", HOWS)
def test_momentum_in_binary_fractions_is_exact_against_numpy(
    jax: Any, optax: Any, gradscale_jax: Any, how: str
) -> None:
    tx = gradscale_jax.scaled(optax.sgd(0.25, momentum=0.5), POLICY)
    params = {"weight": np.float32([1.0, -2.0]), "bias": np.float32(-0.0)}
    grads = {"weight": np.float32([[step, 1 - step] for step in range(STEPS)]), "bias": np.ones(STEPS, np.float32)}
    grads["weight"][sorted(BAD), 0] = np.inf
    started = jax.tree.map(jax.numpy.asarray, params)
    run = drive(scaled_step(tx), started, tx.init(started), grads, how)
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    for step in range(STEPS):
        for name in params:
            if step not in BAD:
                momentum[name] = grads[name][step] + np.float32(0.5) * momentum[name]
                params[name] = params[name] - np.float32(0.25) * momentum[name]
            np.testing.assert_array_equal(run.params[name][step], params[name])
            np.testing.assert_array_equal(run.states.inner_state[0].trace[name][step], momentum[name])


@pytest.mark.parametrize("how", HOWS)
def test_a_skipped_step_changes_no_bit_of_a_parameter(gradscale_jax: Any, how: str) -> None:
    tx = gradscale_jax.scaled(inner(), POLICY)
    run = run_all_steps(scaled_step(tx), tx, how, 1, frozenset({0}))
    assert_same_bits(run.params, {name: np.asarray(leaf)[None] for name, leaf in first_params().items()})
    assert np.signbit(run.params["bias"][0, 0])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("how", HOWS)
def test_a_chain_around_it_scales_the_updates_of_the_steps_that_are_taken(
    optax: Any, gradscale_jax: Any, how: str
) -> None:
    tx = optax.chain(gradscale_jax.scaled(optax.scale_by_adam(), POLICY), optax.scale(-0.125))
    step = scaled_step(tx)
    run = run_all_steps(step, tx, how, STEPS, BAD)
    alone = run_clean_steps(step, tx, how, STEPS, BAD)
    assert_same_bits(run.states[0].inner_state, alone.states[0].inner_state)
    np.testing.assert_array_equal(run.updates["weight"], alone.updates["weight"])
    np.testing.assert_array_equal(run.params["weight"], alone.params["weight"])
    np.testing.assert_array_equal(run.states[0].scale_state.scale, np.float32(SCALES))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("how", HOWS)
def test_half_gradients_are_unscaled_to_float32_for_the_inner_transformation(
    optax: Any, gradscale_jax: Any, how: str
) -> None:
    # Adam's epsilon is 0 in float16, and a gradient of 2**-26 too.
    tx = gradscale_jax.scaled(optax.inject_hyperparams(optax.adam)(0.5), POLICY, dtype=np.float32)
    params = {"weight": first_params(np.float16)["weight"]}
    grads = {"weight": np.full((1, 3, 4), 2.0**-26, np.float32)}
    run = drive(scaled_step(tx), params, tx.init(params), grads, how)
    assert run.updates["weight"].dtype == run.states.inner_state.inner_state[0].mu["weight"].dtype == np.float32
    assert run.states.inner_state.hyperparams["eps"] == np.float32(1e-8)
    np.testing.assert_allclose(run.updates["weight"], -0.5 * 2.0**-26 / (2.0**-26 + 1e-8), rtol=1e-4)
    assert run.params["weight"].dtype == np.float16
    assert not np.array_equal(run.params["weight"][0], np.asarray(params["weight"]))
    own = gradscale_jax.scaled(optax.adam(0.5), POLICY)
    assert drive(scaled_step(own), params, own.init(params), grads, how).updates["weight"].dtype == np.float16


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", INNER)
def test_the_state_of_a_step_has_the_types_of_the_first_one_and_is_compiled_for_once(
    jax: Any, gradscale_jax: Any, name: str
) -> None:
    tx = gradscale_jax.scaled(inner(name), POLICY)
    params = first_params()
    step = jax.jit(scaled_step(tx))
    state = tx.init(params)

    def types(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)), tree)

    first = types(state)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state))
    sizes = []
    for index in range(5):
        grads = jax.tree.map(lambda leaf, index=index: leaf[index], gradients(STEPS, BAD))
        params, _, state = step(params, state, grads)
        assert types(state) == first
        sizes.append(step._cache_size())
    assert sizes[1:] == sizes[1:2] * 4
    assert sizes[1] <= 2


@pytest.mark.parametrize("bad", [0.0, np.inf], ids=["clean", "overflow"])
def test_a_branch_may_update_or_leave_the_state(jax: Any, gradscale_jax: Any, bad: float) -> None:
    tx = gradscale_jax.scaled(inner(), POLICY)
    params = first_params()
    grads = jax.tree.map(lambda leaf: leaf + bad, params)

    @jax.jit
    def branch(wanted: Any, state: Any) -> Any:
        return jax.lax.cond(wanted, lambda: tx.update(grads, state, params)[1], lambda: state)

    state = tx.init(params)
    assert_same_bits(branch(False, state), state)
    assert int(branch(True, state).skipped) == (bad != 0)


def test_batch_statistics_and_logs_use_the_last_verdict(jnp: Any, gradscale_jax: Any) -> None:
    policy = gradscale.DynamicScale(init_scale=2.0, min_scale=1.0, at_min="raise")
    tx = gradscale_jax.scaled(inner(), policy)
    params = {"weight": jnp.ones(2)}
    state = tx.init(params)
    assert bool(gradscale_jax.verdict_of(state).finite)
    gradscale_jax.verdict_of(state).check(policy)
    means = {"mean": jnp.zeros(2)}
    for _ in range(2):
        _, state = tx.update({"weight": jnp.full(2, jnp.nan)}, state, params)
        means = gradscale_jax.select(gradscale_jax.verdict_of(state).finite, {"mean": jnp.full(2, jnp.nan)}, means)
    assert_same_bits(means, {"mean": np.zeros(2, np.float32)})
    with pytest.raises(gradscale.ScaleUnderflowError, match="minimum"):
        gradscale_jax.verdict_of(state).check(policy)


def test_the_count_of_skipped_steps_stays_at_the_largest_int32(jnp: Any, gradscale_jax: Any) -> None:
    tx = gradscale_jax.scaled(inner(), POLICY)
    params = {"weight": jnp.ones(2)}
    state = tx.init(params)._replace(skipped=jnp.asarray(2**31 - 2, jnp.int32))
    for _ in range(3):
        _, state = tx.update({"weight": jnp.full(2, jnp.inf)}, state, params)
    assert int(state.skipped) == 2**31 - 1


@pytest.mark.parametrize("around", ["transformation", "MultiSteps"])
def test_extra_arguments_reach_the_inner_transformation(
    jax: Any, jnp: Any, optax: Any, gradscale_jax: Any, around: str
) -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any, **_: Any) -> Any:
        assert params is not None
        return jax.tree.map(lambda leaf: leaf * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = gradscale_jax.scaled(inner if around == "transformation" else optax.MultiSteps(inner, 1), POLICY)
    params = {"weight": jnp.ones(2)}
    updates, _ = tx.update({"weight": jnp.full(2, 1024.0)}, tx.init(params), params, factor=3.0)
    np.testing.assert_array_equal(updates["weight"], [3.0, 3.0])
    without = gradscale_jax.scaled(optax.sgd(1.0), POLICY)
    updates, _ = without.update({"weight": jnp.full(2, 1024.0)}, without.init(params), params, factor=3.0)
    np.testing.assert_array_equal(updates["weight"], [-1.0, -1.0])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("how", HOWS)
def test_double_precision_stays_so_in_x64_mode(jnp: Any, optax: Any, gradscale_jax: Any, how: str) -> None:
    tx = gradscale_jax.scaled(optax.sgd(0.1, momentum=0.9), POLICY)
    with x64_mode(True):
        # Differentiated as they are: the helper's loss is float32.
        params = {"weight": jnp.asarray([1.0 + 2.0**-40, 2.0])}
        grads = {"weight": 1024.0 * np.asarray([[1.0 + 2.0**-45, 3.0], [np.inf, 1.0], [512.0, 1.0]])}
        run = drive(plain_step(tx), params, tx.init(params), grads, how)
    assert run.states.inner_state[0].trace["weight"].dtype == np.float64
    assert [leaf.dtype for leaf in run.states.scale_state] == [np.float32, np.int32, np.int32, np.int32]
    assert run.states.skipped.dtype == run.states.verdict.nonfinite.dtype == np.int32
    np.testing.assert_array_equal(run.states.inner_state[0].trace["weight"][:2, 0], [1.0 + 2.0**-45] * 2)
    np.testing.assert_array_equal(run.states.skipped, [0, 1, 1])


@pytest.mark.parametrize("params", [{}, (), None, {"weight": None}], ids=["dict", "tuple", "None", "leaf-None"])
def test_trees_without_arrays_are_clean_steps(gradscale_jax: Any, params: Any) -> None:
    tx = gradscale_jax.scaled(inner(), POLICY)
    updates, state = tx.update(params, tx.init(params))
    assert updates == params
    assert int(state.scale_state.growth_tracker) == 1
    assert int(state.skipped) == 0


@pytest.mark.parametrize("value", [1024.0, np.inf], ids=["clean", "overflow"])
def test_gradients_of_integers_pass_by_an_inner_mask(
    jax: Any, jnp: Any, optax: Any, gradscale_jax: Any, value: float
) -> None:
    tx = gradscale_jax.scaled(optax.masked(optax.sgd(1.0), {"weight": True, "ids": False}), POLICY)
    params = {"weight": jnp.ones(2), "ids": jnp.arange(3)}
    grads = {"weight": jnp.full(2, value), "ids": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["ids"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["weight"], [-1.0, -1.0] if np.isfinite(value) else [0.0, 0.0])
    assert int(state.skipped) == int(not np.isfinite(value))
    counts = {**grads, "ids": jnp.arange(3)}
    updates, _ = tx.update(counts, tx.init(params), params)
    np.testing.assert_array_equal(updates["ids"], [0, 1, 2] if np.isfinite(value) else [0, 0, 0])
