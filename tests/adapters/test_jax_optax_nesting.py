"""Which nestings of scaled are refused, what accumulation around it does, and where its state is found."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp

import gradscale

optax = require("optax")
pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

POLICY = gradscale.DynamicScale(init_scale=1024.0)


def scaled(tx, **arguments):
    return gradscale_jax.scaled(tx, POLICY, **arguments)


def scale_of(state) -> float:
    return float(gradscale_jax.scale_state(state).scale)


SGD = optax.sgd(1.0)
ONE = scaled(SGD)


def test_accumulation_outside_keeps_an_overflow_for_good():
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


HALF, WIDE, RESTORED = {"a": jnp.ones((), jnp.bfloat16)}, {"a": jnp.ones(())}, optax.MaskedState(ONE.init(PARAMS))
TEXTS = scaled(optax.stateless(lambda updates, _: dict.fromkeys(updates, "0.1")))
IN_ADAM = scaled(optax.adam(1.0))
VALUE, TYPE, ORDER = gradscale.InvalidValueError, gradscale.InvalidTypeError, gradscale.CallOrderError
REFUSED = {
    "in masked": (VALUE, lambda: optax.masked(ONE, MASKED).init(PARAMS), r"still scaled.*scaled\(optax.masked"),
    "in a part": (VALUE, lambda: optax.partition({"x": ONE, "y": SGD}, BY_NAME).init(PARAMS), r"still scaled.*masked"),
    "restored": (VALUE, lambda: optax.masked(ONE, MASKED).update(PARAMS, RESTORED, PARAMS), "MaskedNode"),
    "in another": (VALUE, lambda: scaled(ONE).init(PARAMS), "twice"),
    "in a chain": (VALUE, lambda: scaled(optax.chain(optax.identity(), ONE)).init(PARAMS), "twice"),
    "in MultiSteps": (VALUE, lambda: scaled(optax.MultiSteps(ONE, 2)).init(PARAMS), "twice"),
    "integers": (VALUE, lambda: scaled(SGD, dtype=jnp.int32).init(HALF), "dtype must be a real floating dtype"),
    "no state": (TYPE, lambda: IN_ADAM.update(HALF, optax.EmptyState(), HALF), "the state must be the one"),
    "a text": (TYPE, lambda: IN_ADAM.update({"a": "text"}, IN_ADAM.init(HALF), HALF), "array"),
    "wide": (TYPE, lambda: IN_ADAM.update(WIDE, IN_ADAM.init(HALF), HALF), "got float32 .* bfloat16 .*=jnp.float32"),
    "texts": (TYPE, lambda: TEXTS.update(HALF, TEXTS.init(HALF)), "an update of tx cannot be read, got TypeError"),
    "no axis": (ORDER, lambda: scaled(SGD, axis_name="data").update(HALF, ONE.init(HALF), HALF), "not bound"),
} | {
    type(tx).__name__: (TYPE, lambda tx=tx: scaled(tx), r"tx must be an optax.GradientTransformation.*got")
    for tx in (None, "adam", 0.1, POLICY)
}


@pytest.mark.tier("quick")
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str):
    error, call, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


NESTS = {
    "chain": optax.chain(optax.identity(), optax.chain(ONE, optax.scale(1.0))),
    "MultiSteps": optax.MultiSteps(ONE, 3),
    "injected": optax.inject_hyperparams(lambda by: optax.chain(ONE, optax.scale(by)))(by=1.0),
    "guarded": optax.apply_if_finite(ONE, 3),
    "masked": optax.MaskedState,
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_the_scale_state_is_found_in_any_nesting(nest):
    state = nest(ONE.init(PARAMS)) if nest is optax.MaskedState else nest.init(PARAMS)
    found = gradscale_jax.scale_state(state)
    assert isinstance(found, gradscale.ScaleState)
    assert float(found.scale) == 1024.0
    assert bool(gradscale_jax.verdict_of({"train": state, "step": 3}).finite)
    # And of what describes such a state.
    for part in (lambda leaf: leaf.sharding, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        described = jax.tree.map(part, ONE.init(PARAMS))
        assert gradscale_jax.scale_state(described) == jax.tree.map(part, found)


def test_no_state_and_several_states_are_errors_that_name_the_number():
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


def test_the_variables_of_nnx_are_taken_off():
    require("flax")
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(2))

    model = Model()
    optimizer = nnx.Optimizer(model, scaled(optax.sgd(0.5)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, factor):
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


def test_the_parameters_in_the_state_can_be_told_from_the_rest():
    tx = scaled(optax.adam(0.5))
    state = tx.init({"weight": jnp.ones(2)})
    marked = optax.tree_map_params(tx, lambda _: "sharded", state, transform_non_params=lambda _: "replicated")
    assert marked.inner_state[0].mu == {"weight": "sharded"}
    assert set(marked.scale_state) == set(marked.verdict[:-1]) == {marked.skipped} == {"replicated"}


def names_of_states(module, seen: set[Any]) -> Iterator[str]:
    """Yield the names of the states that are public in optax, and of their fields."""
    seen.add(module)
    for value in (getattr(module, name) for name in dir(module) if not name.startswith("_")):
        if isinstance(value, types.ModuleType) and value.__name__.startswith("optax.") and value not in seen:
            yield from names_of_states(value, seen)
        elif isinstance(value, type) and hasattr(value, "_fields"):
            yield from (value.__name__, *value._fields)


OF_OPTAX = {*names_of_states(optax, set())}
RULES = [None, *(gradscale.SkipSpikes(window=4, of=of) for of in ("loss", "norm", ("loss", "norm")))]


ATTRIBUTES = ("scale_state", "inner_state", "verdict", "skipped", "windows")


@pytest.mark.parametrize("rule", RULES, ids=["overflows", "loss", "norm", "both"])
def test_values_are_found_and_set_by_name_as_without_scaling(rule):
    tree, bare = optax.tree_utils, optax.chain(optax.masked(optax.adam(0.1), MASKED), optax.contrib.reduce_on_plateau())
    own, state = bare.init(PARAMS), scaled(bare, skip=rule).init(PARAMS)
    for name in (
        *OF_OPTAX,
        *gradscale.ScaleState._fields,
        *gradscale_jax.Verdict._fields,
        *ATTRIBUTES,
        "values",
        "loss",
    ):
        found = [[value for _, value in tree.tree_get_all_with_path(each, name)] for each in (state, own)]
        assert jax.tree.structure(found[0]) == jax.tree.structure(found[1]), name
        assert jax.tree.leaves(found[0]) == jax.tree.leaves(found[1]), name
    assert (tree.tree_get(state, "scale"), tree.tree_get(state, "nu")["a"]) == (1.0, 0.0)
    changed = tree.tree_set(state, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert changed.inner_state == tree.tree_set(own, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert repr(changed._replace(inner_state=None)) == repr(state._replace(inner_state=None))
    with pytest.raises(KeyError):
        tree.tree_set(state, growth_tracker=jnp.int32(7))


@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=["overflows", "both"])
@pytest.mark.parametrize("other", [None, jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data"), 0])
def test_a_state_keeps_and_shows_what_stands_in_place_of_arrays(other, rule):
    state = scaled(SGD, skip=rule).init(PARAMS)
    for names in (*((name,) for name in ATTRIBUTES), ATTRIBUTES):
        changed = state._replace(**dict.fromkeys(names, other))
        assert [getattr(changed, name) for name in names] == [other] * len(names)
        assert all(f"{name}={other!r}" in repr(changed) for name in names)
        back = changed._replace(**{name: getattr(state, name) for name in names})
        assert [str(getattr(back, name)) for name in ATTRIBUTES] == [str(getattr(state, name)) for name in ATTRIBUTES]
    with pytest.raises(ValueError, match="unexpected field names"):
        state._replace(scale=1.0)
    everywhere = jax.tree.map(lambda _: other, state, is_leaf=lambda node: node is not state)
    assert repr(everywhere) == f"ScaledOptimizerState({', '.join(f'{name}={other!r}' for name in ATTRIBUTES)})"


def test_a_sharding_in_place_of_a_field_is_that_of_all_its_arrays():
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    for rule in RULES:
        state = scaled(SGD, skip=rule).init(PARAMS)
        placed = jax.jit(lambda state: state, out_shardings=state._replace(**dict.fromkeys(ATTRIBUTES, everywhere)))(
            state
        )
        assert {leaf.sharding for leaf in jax.tree.leaves(placed)} == {everywhere}
        assert str(placed.windows) == str(state.windows)


def test_windows_that_no_rule_has_named_are_kept_and_refused():
    windows = scaled(SGD, skip=RULES[-1]).init(PARAMS).windows
    state = scaled(SGD).init(PARAMS)._replace(windows=windows)
    assert str(state.windows) == str(windows)
    for rule in (None, RULES[-1]):
        with pytest.raises(gradscale.InvalidTypeError, match=r"got windows of shape .*unnamed': \(2, 4\)}: begin with"):
            scaled(SGD, skip=rule).update(PARAMS, state, value=1.0)
    restored = state._replace(windows=None)
    with pytest.raises(gradscale.InvalidTypeError, match="got windows of shape None: begin with"):
        scaled(SGD, skip=RULES[-1]).update(PARAMS, restored, value=1.0)
    assert restored.windows is None
