"""Which nestings of scaled are refused, what accumulation around it does, and where its state is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from optax_runs import optax

import gradscale

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


def scaled(tx: Any, **arguments: Any) -> Any:
    return gradscale_jax.scaled(tx, POLICY, **arguments)


def scale_of(state: Any) -> float:
    return float(gradscale_jax.scale_state(state).scale)


SGD = optax.sgd(1.0)
ONE = scaled(SGD)


def test_accumulation_outside_keeps_an_overflow_for_good() -> None:
    # optax empties its accumulator by a multiplication by 0.
    tx, params, after = optax.MultiSteps(ONE, 2), {"weight": jnp.zeros(())}, []
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in (1.0, 3.0, 5.0, np.inf, 7.0, 9.0, 11.0, 13.0):
        updates, state = update({"weight": jnp.float32(grad) * scale_of(state)}, state, params)
        params = optax.apply_updates(params, updates)
        after.append(float(params["weight"]))
    assert (after, scale_of(state)) == ([0.0] + [-2.0] * 7, 128.0)


PARAMS = {"a": jnp.ones(()), "b": jnp.ones(())}
MASKED = {"a": True, "b": False}
BY_NAME = {"a": "x", "b": "y"}


def test_masks_and_partitions_outside_are_refused_also_of_a_restored_state() -> None:
    for tx in (optax.masked(ONE, MASKED), optax.partition({"x": ONE, "y": SGD}, BY_NAME)):
        with pytest.raises(gradscale.InvalidValueError, match=r"still scaled.*scaled\(optax.masked"):
            tx.init(PARAMS)
    restored = optax.MaskedState(inner_state=ONE.init(PARAMS))
    with pytest.raises(gradscale.InvalidValueError, match="MaskedNode"):
        optax.masked(ONE, MASKED).update(PARAMS, restored, PARAMS)


@pytest.mark.parametrize(
    "inner",
    [ONE, optax.chain(optax.identity(), ONE), optax.MultiSteps(ONE, 2)],
    ids=["scaled", "chain", "MultiSteps"],
)
def test_one_in_another_is_refused(inner: Any) -> None:
    with pytest.raises(gradscale.InvalidValueError, match="twice"):
        scaled(inner).init(PARAMS)


NESTS = {
    "chain": optax.chain(optax.identity(), optax.chain(ONE, optax.scale(1.0))),
    "MultiSteps": optax.MultiSteps(ONE, 3),
    "injected": optax.inject_hyperparams(lambda by: optax.chain(ONE, optax.scale(by)))(by=1.0),
    "guarded": optax.apply_if_finite(ONE, 3),
    "masked": optax.MaskedState,
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_the_scale_state_is_found_in_any_nesting(nest: Any) -> None:
    state = nest(ONE.init(PARAMS)) if nest is optax.MaskedState else nest.init(PARAMS)
    found = gradscale_jax.scale_state(state)
    assert isinstance(found, gradscale.ScaleState)
    assert float(found.scale) == 1024.0
    assert bool(gradscale_jax.verdict_of({"train": state, "step": 3}).finite)
    # And of what describes such a state.
    for part in (lambda leaf: leaf.sharding, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        described = jax.tree.map(part, ONE.init(PARAMS))
        assert gradscale_jax.scale_state(described) == jax.tree.map(part, found)


def test_no_state_and_several_states_are_errors_that_name_the_number() -> None:
    one = ONE.init(PARAMS)
    for read in (gradscale_jax.scale_state, gradscale_jax.verdict_of):
        for wrong, got in (
            (optax.scale_by_adam().init(PARAMS), "got ScaleByAdamState without one"),
            (None, "got None"),
            ({"generator": one, "discriminator": one}, "got 2: one loss has one scale"),
            (one._replace(inner_state=(one,)), "got 2"),
        ):
            with pytest.raises(gradscale.InvalidValueError, match=got):
                read(wrong)


@pytest.mark.parametrize("tx", [None, "adam", 0.1, POLICY], ids=["None", "name", "rate", "policy"])
def test_something_else_than_a_transformation_is_refused(tx: Any) -> None:
    with pytest.raises(gradscale.InvalidTypeError, match=r"tx must be an optax.GradientTransformation.*got"):
        scaled(tx)


def test_a_dtype_or_state_or_gradient_that_does_not_fit_is_refused() -> None:
    params = {"a": jnp.ones((), jnp.float16)}
    tx = scaled(optax.adam(1.0))
    with pytest.raises(gradscale.InvalidValueError, match="dtype must be a real floating dtype"):
        scaled(SGD, dtype=jnp.int32).init(params)
    with pytest.raises(gradscale.InvalidTypeError, match="the state must be the one"):
        tx.update(params, optax.EmptyState(), params)
    with pytest.raises(gradscale.InvalidTypeError, match="array"):
        tx.update({"a": "text"}, tx.init(params), params)
    with pytest.raises(gradscale.InvalidTypeError, match=r"got float32 .* float16 .*dtype=jnp.float32"):
        tx.update({"a": jnp.ones((), jnp.float32)}, tx.init(params), params)
    with pytest.raises(gradscale.CallOrderError, match="not bound"):
        scaled(SGD, axis_name="data").update(params, tx.init(params), params)


def test_the_variables_of_nnx_are_taken_off() -> None:
    require("flax")
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.ones(2))

    model = Model()
    optimizer = nnx.Optimizer(model, scaled(optax.sgd(0.5)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, factor: Any) -> None:
        state = gradscale_jax.scale_state(optimizer.opt_state)
        grads = nnx.grad(lambda model: gradscale_jax.scale(jnp.sum(model.weight[...]) * factor, state))(model)
        optimizer.update(model, grads)

    for factor, weight, scale in ((1.0, 0.5, 1024.0), (np.inf, 0.5, 512.0), (0.5, 0.25, 512.0)):
        step(model, optimizer, factor)
        np.testing.assert_array_equal(model.weight[...], [weight] * 2)
        found = gradscale_jax.scale_state(optimizer.opt_state).scale
        assert isinstance(found, jax.Array)
        assert float(found) == scale
        assert bool(gradscale_jax.verdict_of(optimizer.opt_state).finite) == np.isfinite(factor)


def test_the_parameters_in_the_state_can_be_told_from_the_rest() -> None:
    tx = scaled(optax.adam(0.5))
    state = tx.init({"weight": jnp.ones(2)})
    marked = optax.tree_map_params(tx, lambda _: "sharded", state, transform_non_params=lambda _: "replicated")
    assert marked.inner_state[0].mu == {"weight": "sharded"}
    assert set(marked.scale_state) == set(marked.verdict) == {marked.skipped} == {"replicated"}
