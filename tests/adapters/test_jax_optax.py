"""scaled: what it takes and refuses, where its state is made, found and loaded, and which losses it judges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from axes import require
from axes_jax import assert_same_bits, gradscale_jax, jax, jnp, mesh, on_mesh
from jax_programs import WAYS

import gradscale
from gradscale import CallOrderError, InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale

optax = require("optax")
pytestmark = pytest.mark.jax

POLICY = gradscale.DynamicScale(init_scale=1024.0, growth_interval=2)
ADAM, SGD = optax.adam(0.1), optax.sgd(1.0)


def scaled(tx=ADAM, **options):
    return gradscale_jax.scaled(tx, POLICY, **options)


def test_state_in_which_an_epsilon_is_zero_is_refused_unless_a_dtype_is_given():
    refused = pytest.raises(InvalidTypeError, match=r"got float\d.* in tx.init\(params\)\[0\].mu\['w'\].*jnp.float32\)")
    for dtype in ("float16", "float8_e4m3fn", "float8_e5m2"):
        narrow = {"w": jnp.ones(2, dtype)}
        for init in (scaled().init, lambda given: scaled().init(jax.device_get(given))):
            with refused:
                init(narrow)
        with refused:
            jax.eval_shape(scaled().init, narrow)
    for dtype in ("bfloat16", "float32", "complex64", "int32"):
        scaled().init({"w": jnp.ones(2, dtype)})
    # Not of the parameters.
    scaled(optax.adam(0.1, mu_dtype="float16")).init({"w": jnp.ones(2)})
    scaled(dtype=jnp.float16).init({"w": jnp.ones(2, jnp.float16)})
    for tx, dtype, rtol in ((scaled(dtype=jnp.float32), jnp.float16, 1e-4), (scaled(), jnp.float32, 1e-3)):
        params, narrow = {"w": jnp.ones(2, dtype)}, {"w": jnp.asarray([1024.0, 0.0], jnp.float16)}
        updates, _ = jax.jit(tx.update)(narrow, tx.init(params), params)
        # The second is an unused row, whose gradient is 0.
        np.testing.assert_allclose(updates["w"], [-0.1, 0.0], rtol=rtol)


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
    # Of several places, where the most devices are, if somebody has put a parameter there.
    several = {"free": jnp.ones(2), **params, "chosen": jax.device_put(jnp.ones(2), jax.devices()[1])}
    most = {*jax.devices()} if where in ("replicated", "sharded") else {jax.devices()[1]}
    assert tx.init(several).scale_state.scale.devices() == most
    sizes = []
    for factor in (np.inf, 1.0, np.nan, 1.0):
        updates, state = update(jax.tree.map(lambda leaf, factor=factor: leaf * factor, params), state, params)
        params = optax.apply_updates(params, updates)
        sizes.append(update._cache_size())
    assert sizes[1:] == [sizes[1]] * 3
    assert sizes[1] <= 2


@pytest.mark.parametrize("params", [{}, None, {"weight": None}, jnp.ones(2)], ids=["dict", "None", "leaf-None", "leaf"])
def test_a_state_is_made_in_a_trace_as_outside_and_trees_without_arrays_are_clean_steps(params):
    tx = scaled(optax.identity())
    made = tx.init(params)
    assert_same_bits(jax.jit(tx.init)(params), made)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), [jax.eval_shape(tx.init, params), made])
    assert shapes[0] == shapes[1]
    updates, state = tx.update(params, made)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert (int(state.scale_state.growth_tracker), int(state.skipped)) == (1, 0)


@pytest.mark.parametrize("value", [1024.0, np.inf], ids=["clean", "overflow"])
def test_gradients_of_integers_pass_by_an_inner_mask(value: float):
    tx = scaled(optax.masked(SGD, {"weight": True, "ids": False}), skip=SkipSpikes(of="norm"))
    params = {"weight": jnp.ones(2), "ids": jnp.arange(3)}
    grads = {"weight": jnp.full(2, value), "ids": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    is_clean = bool(np.isfinite(value))
    assert updates["ids"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["weight"], [-1.0 * is_clean] * 2)
    assert int(state.skipped) == 1 - is_clean
    updates, state = tx.update({**grads, "ids": jnp.arange(3)}, state, params)
    # An integer has no norm.
    assert state.windows.values[0, -2:].tolist() == [np.float32(2.0) ** 0.5 if is_clean else 0.0] * 2
    np.testing.assert_array_equal(updates["ids"], np.arange(3) * is_clean)


# What is refused.


ONE = scaled(SGD)
PARAMS, MASKED = {"a": jnp.ones(()), "b": jnp.ones(())}, {"a": True, "b": False}
HALF, WIDE, RESTORED = {"a": jnp.ones((), jnp.bfloat16)}, {"a": jnp.ones(())}, optax.MaskedState(ONE.init(PARAMS))
TEXTS = scaled(optax.stateless(lambda updates, _: dict.fromkeys(updates, "0.1")))
OF_LOSS, GRADS = scaled(SGD, skip=SkipSpikes(of="loss")), jnp.ones(2)
PARTED = optax.partition({"x": ONE, "y": SGD}, {"a": "x", "b": "y"})
VALUE, TYPE = InvalidValueError, InvalidTypeError
REFUSED = {
    "in masked": (VALUE, lambda: optax.masked(ONE, MASKED).init(PARAMS), r"still scaled.*scaled\(optax.masked"),
    "in a part": (VALUE, lambda: PARTED.init(PARAMS), r"still scaled.*masked"),
    "restored": (VALUE, lambda: optax.masked(ONE, MASKED).update(PARAMS, RESTORED, PARAMS), "MaskedNode"),
    "in a chain": (VALUE, lambda: scaled(optax.chain(optax.identity(), ONE)).init(PARAMS), "twice"),
    "in MultiSteps": (VALUE, lambda: scaled(optax.MultiSteps(ONE, 2)).init(PARAMS), "twice"),
    "integers": (VALUE, lambda: scaled(SGD, dtype=jnp.int32).init(HALF), "dtype must be a real floating dtype"),
    "no state": (TYPE, lambda: scaled().update(HALF, optax.EmptyState(), HALF), "the state must be the one"),
    "a text": (TYPE, lambda: scaled().update({"a": "text"}, scaled().init(HALF), HALF), "array"),
    "wide": (TYPE, lambda: scaled().update(WIDE, scaled().init(HALF), HALF), "got float32 .* bfloat16 .*=jnp.float32"),
    "texts": (TYPE, lambda: TEXTS.update(HALF, TEXTS.init(HALF)), "an update of tx cannot be read, got TypeError"),
    "no axis": (CallOrderError, lambda: scaled(axis_name="x").update(HALF, scaled().init(HALF), HALF), "not bound"),
    "no rule": (TYPE, lambda: scaled(SGD, skip=6.0), "skip must be a SkipSpikes"),
    "no loss": (VALUE, lambda: OF_LOSS.update(GRADS, OF_LOSS.init(GRADS)), r"losses alone, and .*\(.* value=loss\)"),
}
REFUSED |= {
    type(tx).__name__: (TYPE, lambda tx=tx: scaled(tx), r"tx must be an optax.GradientTransformation.*got")
    for tx in (None, "adam", 0.1, POLICY)
}
REFUSED |= {
    f"loss of {wrong!r}": (
        TYPE,
        lambda wrong=wrong: OF_LOSS.update(GRADS, OF_LOSS.init(GRADS), value=wrong),
        "value must be the loss, a number or a real floating array of one",
    )
    for wrong in (True, "7.5", GRADS, jnp.asarray(7), jnp.asarray(1j))
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str):
    error, call, message = REFUSED[what]
    with pytest.raises(error, match=message):
        call()


RULES = [None, SkipSpikes(window=8), *(SkipSpikes(window=4, of=of) for of in ("loss", "norm", ("loss", "norm")))]


def test_windows_of_another_rule_or_of_none_are_kept_and_refused():
    for made, used in ((a, b) for a in RULES for b in RULES if a is not b):
        with pytest.raises(InvalidTypeError, match=r"got windows of shape .*: begin with init"):
            scaled(SGD, skip=used).update(GRADS, scaled(SGD, skip=made).init(GRADS), value=1.0)
    windows = scaled(SGD, skip=RULES[-1]).init(PARAMS).windows
    state = ONE.init(PARAMS)._replace(windows=windows)
    assert str(state.windows) == str(windows)
    restored = state._replace(windows=None)
    assert restored.windows is None
    for rule, given, shape in (
        *((rule, state, r".*unnamed': \(2, 4\)}") for rule in (None, RULES[-1])),
        (RULES[-1], restored, "None"),
    ):
        with pytest.raises(InvalidTypeError, match=rf"got windows of shape {shape}: begin with"):
            scaled(SGD, skip=rule).update(PARAMS, given, value=1.0)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("way", ["flax-bytes", "orbax"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_windows_of_losses_are_not_loaded_as_windows_of_norms(tmp_path: Path, way: str):
    of_loss, of_norm = (scaled(SGD, skip=rule).init(GRADS) for rule in RULES[2:4])
    WAYS[way](of_loss, of_loss, tmp_path / "same")
    with pytest.raises(ValueError, match="gradscale_norm"):
        WAYS[way](of_loss, of_norm, tmp_path / "other")


# Losses.


def test_a_step_without_a_loss_is_no_spike_and_makes_no_nan_that_jax_would_find():
    tx = gradscale_jax.scaled(SGD, StaticScale(1.0), skip=SkipSpikes(window=2))
    state = tx.init(GRADS)
    for given in ({"value": 1.0}, {"value": 2.0}, {"value": 1.5}, {}):
        with jax.debug_nans("value" in given):
            _, state = tx.update(GRADS, state, **given)
        assert bool(gradscale_jax.verdict_of(state).taken)


@pytest.mark.parametrize(
    "value",
    [7.5, 8, 10**400, np.float32(7.5), np.asarray([7.5], np.float16), jnp.asarray(7.5, "bfloat16")],
    ids=["float", "int", "large-int", "NumPy", "(1,)", "half"],
)
def test_a_loss_of_any_form_is_judged_where_spikes_are_skipped(value):
    for skip in (SkipSpikes(above=7.0, of="loss"), None):
        tx = scaled(SGD, skip=skip)
        _, state = tx.update(GRADS, tx.init(GRADS), value=value)
        assert bool(gradscale_jax.verdict_of(state).spike) is (skip is not None)
        for fine in (7.0, 7, *["no loss"] * (skip is None)):
            _, state = tx.update(GRADS, state, value=fine)
            assert bool(gradscale_jax.verdict_of(state).taken)
        assert (state.windows is None) is (skip is None)


# Where the state is found, and what can stand in it.


NESTS = {
    "chain": optax.chain(optax.identity(), optax.chain(ONE, optax.scale(1.0))),
    "MultiSteps": optax.MultiSteps(ONE, 3),
    "injected": optax.inject_hyperparams(lambda by: optax.chain(ONE, optax.scale(by)))(by=1.0),
    "guarded": optax.apply_if_finite(ONE, 3),
    "masked": optax.GradientTransformation(lambda params: optax.MaskedState(ONE.init(params)), ONE.update),
}


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_the_scale_state_is_found_in_any_nesting(nest):
    state = nest.init(PARAMS)
    found = gradscale_jax.scale_state(state)
    assert isinstance(found, gradscale.ScaleState)
    assert float(found.scale) == 1024.0
    assert bool(gradscale_jax.verdict_of({"train": state, "step": 3}).finite)
    # And of what describes such a state.
    for part in (lambda leaf: leaf.sharding, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        assert gradscale_jax.scale_state(jax.tree.map(part, ONE.init(PARAMS))) == jax.tree.map(part, found)


@pytest.mark.parametrize("read", [gradscale_jax.scale_state, gradscale_jax.verdict_of])
def test_no_state_and_several_states_are_errors_that_name_the_number(read):
    one = ONE.init(PARAMS)
    for wrong, got in (
        (ADAM.init(PARAMS)[0], "got ScaleByAdamState without one"),
        (None, "got None"),
        ({"generator": one, "discriminator": one}, "got 2: one loss has one scale"),
        (one._replace(inner_state=(one,)), "got 2"),
    ):
        with pytest.raises(InvalidValueError, match=got):
            read(wrong)


ATTRIBUTES = ("scale_state", "inner_state", "verdict", "skipped", "windows")
some_rules = pytest.mark.parametrize("rule", RULES[::2], ids=["overflows", "loss", "both"])


@pytest.mark.tier("ranks")
@some_rules
def test_values_are_found_and_set_by_name_as_without_scaling(rule):
    tree, bare = optax.tree_utils, optax.chain(optax.masked(ADAM, MASKED), optax.contrib.reduce_on_plateau())
    own, state = bare.init(PARAMS), scaled(bare, skip=rule).init(PARAMS)
    names = {str(getattr(key, "name", "")) for path, _ in jax.tree_util.tree_leaves_with_path(own) for key in path}
    assert {"count", "scale", "mu"} <= names
    names |= {*gradscale.ScaleState._fields, *gradscale_jax.Verdict._fields, *ATTRIBUTES, "values", "loss", "norm"}
    for name in names:
        found = [[value for _, value in tree.tree_get_all_with_path(each, name)] for each in (state, own)]
        assert jax.tree.structure(found[0]) == jax.tree.structure(found[1]), name
        assert jax.tree.leaves(found[0]) == jax.tree.leaves(found[1]), name
    assert (tree.tree_get(state, "scale"), tree.tree_get(state, "nu")["a"]) == (1.0, 0.0)
    changed = tree.tree_set(state, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert changed.inner_state == tree.tree_set(own, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert repr(changed._replace(inner_state=None)) == repr(state._replace(inner_state=None))
    with pytest.raises(KeyError):
        tree.tree_set(state, growth_tracker=jnp.int32(7))


@pytest.mark.tier("ranks")
@some_rules
def test_a_state_keeps_and_shows_what_stands_in_place_of_arrays(rule):
    state = scaled(SGD, skip=rule).init(PARAMS)
    for other in (None, jax.sharding.PartitionSpec("data"), 0):
        for names in (*((name,) for name in ATTRIBUTES), ATTRIBUTES):
            changed = state._replace(**dict.fromkeys(names, other))
            assert [getattr(changed, name) for name in names] == [other] * len(names)
            back = changed._replace(**{name: getattr(state, name) for name in names})
            assert repr(back) == repr(state)
        everywhere = jax.tree.map(lambda _, other=other: other, state, is_leaf=lambda node: node is not state)
        assert repr(everywhere) == f"ScaledOptimizerState({', '.join(f'{name}={other!r}' for name in ATTRIBUTES)})"
    with pytest.raises(ValueError, match="unexpected field names"):
        state._replace(scale=1.0)
    # A sharding in place of a field is that of all its arrays.
    everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:2], "data"), jax.sharding.PartitionSpec())
    placed = jax.jit(lambda state: state, out_shardings=state._replace(**dict.fromkeys(ATTRIBUTES, everywhere)))(state)
    assert {leaf.sharding for leaf in jax.tree.leaves(placed)} == {everywhere}
    assert str(placed.windows) == str(state.windows)
