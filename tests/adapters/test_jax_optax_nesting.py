"""Which nestings of scaled are right, what the wrong ones do, and how optax's own guard differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import require_jax

import gradscale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


@pytest.fixture(autouse=True)
def _libraries() -> None:
    require_jax()
    require("optax")


def train(tx: Any, grads: list[float], *, scale: bool = True) -> tuple[np.ndarray, Any]:
    """Return the parameter after each step, from 0.0, and the last state."""
    import jax
    import jax.numpy as jnp
    import optax

    import gradscale_jax

    params = {"weight": jnp.zeros(())}
    state = tx.init(params)
    update = jax.jit(tx.update)
    after = []
    for grad in grads:
        factor = gradscale_jax.scale_state(state).scale if scale else 1.0
        updates, state = update({"weight": jnp.float32(grad) * factor}, state, params)
        params = optax.apply_updates(params, updates)
        after.append(float(params["weight"]))
    return np.asarray(after), state


def scaled(tx: Any, **arguments: Any) -> Any:
    import gradscale_jax

    return gradscale_jax.scaled(tx, POLICY, **arguments)


def scale_of(state: Any) -> float:
    import gradscale_jax

    return float(gradscale_jax.scale_state(state).scale)


INF = float("inf")


def test_accumulation_inside_leaves_an_overflow_out_and_goes_on_with_the_window(optax: Any) -> None:
    after, state = train(scaled(optax.MultiSteps(optax.sgd(1.0), 2)), [1.0, 3.0, 5.0, INF, 7.0, 9.0])
    np.testing.assert_array_equal(after, [0.0, -2.0, -2.0, -2.0, -8.0, -8.0])
    assert scale_of(state) == 512.0
    assert int(state.inner_state.mini_step) == 1
    np.testing.assert_array_equal(state.inner_state.acc_grads["weight"], 9.0)


def test_accumulation_outside_keeps_an_overflow_for_good(optax: Any) -> None:
    grads = [1.0, 3.0, 5.0, INF, 7.0, 9.0, 11.0, 13.0]
    outside = optax.MultiSteps(scaled(optax.sgd(1.0)), 2)
    after, state = train(outside, grads)
    # optax empties its accumulator by a multiplication by 0.
    assert np.isnan(state.acc_grads["weight"])
    np.testing.assert_array_equal(after[1:], [-2.0] * 7)
    assert scale_of(state) == 128.0
    assert int(state.inner_opt_state.skipped) == 3
    clean, _ = train(outside, [1.0, 3.0, 5.0, 7.0])
    np.testing.assert_array_equal(clean, [0.0, -2.0, -2.0, -8.0])


def test_accumulation_outside_that_skips_overflows_itself_never_lowers_the_scale(optax: Any) -> None:
    outside = optax.MultiSteps(scaled(optax.sgd(1.0)), 2, should_skip_update_fn=optax.skip_not_finite)
    after, state = train(outside, [INF] * 5)
    np.testing.assert_array_equal(after, [0.0] * 5)
    assert scale_of(state) == 1024.0


def test_schedules_inside_wait_while_steps_are_skipped_and_outside_do_not(optax: Any) -> None:
    def schedule(count: Any) -> Any:
        return 2.0 ** (-count)

    grads = [1.0, INF, INF, 1.0, 1.0]
    inside, state = train(scaled(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)), grads)
    np.testing.assert_array_equal(inside, [-1.0, -1.0, -1.0, -1.5, -1.75])
    assert int(state.inner_state.count) == 3
    make = optax.inject_hyperparams(lambda learning_rate: scaled(optax.sgd(learning_rate)))
    outside, state = train(make(learning_rate=schedule), grads)
    np.testing.assert_array_equal(outside, [-1.0, -1.0, -1.0, -1.125, -1.1875])
    assert int(state.count) == 5
    assert scale_of(state) == 256.0


def test_clipping_inside_sees_unscaled_gradients_and_in_front_does_not(optax: Any) -> None:
    clip = optax.clip_by_global_norm(2.0)
    inside, _ = train(scaled(optax.chain(clip, optax.sgd(1.0))), [1.0, 8.0, INF, 1.0])
    np.testing.assert_array_equal(inside, [-1.0, -3.0, -3.0, -4.0])
    in_front, _ = train(optax.chain(clip, scaled(optax.sgd(1.0))), [1.0, 8.0])
    np.testing.assert_array_equal(in_front, [-2.0 / 1024.0, -4.0 / 1024.0])


def test_what_follows_in_a_chain_counts_a_skipped_step(optax: Any) -> None:
    def schedule(count: Any) -> Any:
        return -(2.0 ** (-count))

    after, state = train(optax.chain(scaled(optax.identity()), optax.scale_by_schedule(schedule)), [1.0, INF, 1.0])
    np.testing.assert_array_equal(after, [-1.0, -1.0, -1.25])
    assert int(state[1].count) == 3


def test_masks_and_partitions_inside_leave_no_gradient_scaled(jnp: Any, optax: Any) -> None:
    params = {"a": jnp.ones(()), "b": jnp.ones(())}
    grads = {"a": jnp.float32(1024.0), "b": jnp.float32(2048.0)}
    frozen = optax.chain(optax.masked(optax.sgd(0.5), {"a": True, "b": False}))
    updates, _ = scaled(frozen).update(grads, scaled(frozen).init(params), params)
    np.testing.assert_array_equal([updates["a"], updates["b"]], [-0.5, 2.0])
    both = optax.partition({"x": optax.sgd(0.5), "y": optax.set_to_zero()}, {"a": "x", "b": "y"})
    updates, _ = scaled(both).update(grads, scaled(both).init(params), params)
    np.testing.assert_array_equal([updates["a"], updates["b"]], [-0.5, 0.0])


@pytest.mark.parametrize("outside", ["masked", "partition"])
def test_masks_and_partitions_outside_are_refused(jnp: Any, optax: Any, outside: str) -> None:
    one = scaled(optax.sgd(1.0))
    tx = {
        "masked": optax.masked(one, {"a": True, "b": False}),
        "partition": optax.partition({"x": one, "y": optax.sgd(1.0)}, {"a": "x", "b": "y"}),
    }[outside]
    with pytest.raises(gradscale.InvalidValueError, match=r"still scaled.*scaled\(optax.masked"):
        tx.init({"a": jnp.ones(()), "b": jnp.ones(())})


def test_a_mask_outside_that_hides_in_a_restored_state_is_refused_in_the_step(jnp: Any, optax: Any) -> None:
    params = {"a": jnp.ones(()), "b": jnp.ones(())}
    state = optax.MaskedState(inner_state=scaled(optax.sgd(1.0)).init(params))
    assert scale_of(state) == 1024.0
    with pytest.raises(gradscale.InvalidValueError, match="MaskedNode"):
        optax.masked(scaled(optax.sgd(1.0)), {"a": True, "b": False}).update(params, state, params)


def test_apply_if_finite_takes_the_overflow_that_scaled_still_skips(optax: Any) -> None:
    grads = [1.0, INF, INF, INF, 1.0]
    guarded, _ = train(optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=2), grads, scale=False)
    np.testing.assert_array_equal(guarded, [-1.0, -1.0, -1.0, -np.inf, -np.inf])
    ours, state = train(scaled(optax.sgd(1.0)), grads)
    np.testing.assert_array_equal(ours, [-1.0, -1.0, -1.0, -1.0, -2.0])
    assert scale_of(state) == 128.0


def test_apply_if_finite_outside_hides_overflows_from_the_scale(optax: Any) -> None:
    _, state = train(optax.apply_if_finite(scaled(optax.sgd(1.0)), max_consecutive_errors=9), [INF] * 5)
    assert scale_of(state) == 1024.0


@pytest.mark.parametrize("around", ["scaled", "chain", "MultiSteps"])
def test_one_in_another_is_refused(jnp: Any, optax: Any, around: str) -> None:
    one = scaled(optax.sgd(1.0))
    inner = {"scaled": one, "chain": optax.chain(optax.identity(), one), "MultiSteps": optax.MultiSteps(one, 2)}
    with pytest.raises(gradscale.InvalidValueError, match="twice"):
        scaled(inner[around]).init({"a": jnp.ones(())})


NESTS: dict[str, Callable[[Any, Any], Any]] = {
    "chain": lambda optax, one: optax.chain(optax.identity(), optax.chain(one, optax.scale(1.0))),
    "MultiSteps": lambda optax, one: optax.MultiSteps(one, 3),
    "injected": lambda optax, one: optax.inject_hyperparams(lambda by: optax.chain(one, optax.scale(by)))(by=1.0),
    "guarded": lambda optax, one: optax.apply_if_finite(one, 3),
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_the_scale_state_is_found_in_any_nesting(jnp: Any, optax: Any, gradscale_jax: Any, nest: Any) -> None:
    params = {"a": jnp.ones(())}
    state = nest(optax, scaled(optax.sgd(1.0))).init(params)
    found = gradscale_jax.scale_state(state)
    assert isinstance(found, gradscale.ScaleState)
    assert float(found.scale) == 1024.0
    assert bool(gradscale_jax.verdict_of({"train": state, "step": 3}).finite)


def test_the_shapes_and_shardings_of_a_state_are_found_as_the_state_is(
    jax: Any, jnp: Any, optax: Any, gradscale_jax: Any
) -> None:
    state = scaled(optax.sgd(1.0)).init({"a": jnp.ones(())})
    for part in (lambda leaf: leaf.sharding, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        found = gradscale_jax.scale_state(jax.tree.map(part, state))
        assert found == jax.tree.map(part, gradscale_jax.scale_state(state))


def test_no_state_and_several_states_are_errors_that_name_the_number(jnp: Any, optax: Any, gradscale_jax: Any) -> None:
    params = {"a": jnp.ones(())}
    one = scaled(optax.sgd(1.0)).init(params)
    for read in (gradscale_jax.scale_state, gradscale_jax.verdict_of):
        with pytest.raises(gradscale.InvalidValueError, match="got ScaleByAdamState without one"):
            read(optax.scale_by_adam().init(params))
        with pytest.raises(gradscale.InvalidValueError, match="got None"):
            read(None)
        with pytest.raises(gradscale.InvalidValueError, match="got 2: one loss has one scale"):
            read({"generator": one, "discriminator": one})
        with pytest.raises(gradscale.InvalidValueError, match="got 2"):
            read(one._replace(inner_state=(one,)))


@pytest.mark.parametrize("tx", [None, "adam", 0.1, POLICY], ids=["None", "name", "rate", "policy"])
def test_something_else_than_a_transformation_is_refused(tx: Any) -> None:
    with pytest.raises(gradscale.InvalidTypeError, match=r"tx must be an optax.GradientTransformation.*got"):
        scaled(tx)


@pytest.mark.parametrize("policy", [None, 1024.0, gradscale.DynamicScale], ids=["None", "number", "class"])
def test_something_else_than_a_policy_is_refused(optax: Any, gradscale_jax: Any, policy: Any) -> None:
    with pytest.raises(gradscale.InvalidTypeError, match=r"policy must be an instance.*DynamicScale\(\), got"):
        gradscale_jax.scaled(optax.sgd(1.0), policy)


def test_a_dtype_or_state_or_gradient_that_does_not_fit_is_refused(jnp: Any, optax: Any) -> None:
    params = {"a": jnp.ones((), jnp.float16)}
    tx = scaled(optax.adam(1.0))
    with pytest.raises(gradscale.InvalidValueError, match="dtype must be a real floating dtype"):
        scaled(optax.sgd(1.0), dtype=jnp.int32).init(params)
    with pytest.raises(gradscale.InvalidTypeError, match="the state must be the one"):
        tx.update(params, optax.EmptyState(), params)
    with pytest.raises(gradscale.InvalidTypeError, match="array"):
        tx.update({"a": "text"}, tx.init(params), params)
    with pytest.raises(gradscale.InvalidTypeError, match=r"got float32 .* float16 .*dtype=jnp.float32"):
        tx.update({"a": jnp.ones((), jnp.float32)}, tx.init(params), params)
    with pytest.raises(gradscale.CallOrderError, match="not bound"):
        scaled(optax.sgd(1.0), axis_name="data").update(params, tx.init(params), params)
