"""scaled: where its state is made and found, which losses it judges, what it counts, and the loop on the page."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import re
from typing import Any

import numpy as np
import pytest
from axes import require
from axes_jax import assert_same_bits, gradscale_jax, jax, jnp, mesh, on_mesh
from recipe_blocks import JAX_PAGE, run_on
from tiers import later

import gradscale
from gradscale import InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale, TrainingStalledError

optax = require("optax")
pytestmark = pytest.mark.jax

POLICY = gradscale.DynamicScale(init_scale=1024.0, growth_interval=2)
ADAM, SGD = optax.adam(0.1), optax.sgd(1.0)
RULES = [None, *(SkipSpikes(window=4, of=of) for of in ("loss", ("loss", "norm")))]


def scaled(tx=ADAM, **options):
    return gradscale_jax.scaled(tx, POLICY, **options)


ONE = scaled(SGD)
PARAMS, MASKED, GRADS = {"a": jnp.ones(()), "b": jnp.ones(())}, {"a": True, "b": False}, jnp.ones(2)


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
        assert (leaf.committed, leaf.is_fully_replicated) == (where != "anywhere", True)
        assert leaf.devices() == params["bias"].sharding.device_set
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
    updates, state = tx.update(params, made)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert (int(state.scale_state.growth_tracker), int(state.skipped)) == (1, 0)


def test_gradients_of_integers_pass_by_an_inner_mask_and_have_no_norm():
    tx = scaled(optax.masked(SGD, {"weight": True, "ids": False}), skip=SkipSpikes(of="norm"))
    params = {"weight": jnp.ones(2), "ids": jnp.arange(3)}
    state, update = tx.init(params), jax.jit(tx.update)
    for value, is_clean in ((1024.0, True), (np.inf, False)):
        grads = {"weight": jnp.full(2, value), "ids": np.zeros(3, jax.dtypes.float0)}
        updates, _ = tx.update(grads, state, params)
        assert updates["ids"].dtype == jax.dtypes.float0
        np.testing.assert_array_equal(updates["weight"], [-1.0 * is_clean] * 2)
        updates, state = update({**grads, "ids": jnp.arange(3)}, state, params)
        np.testing.assert_array_equal(updates["ids"], np.arange(3) * is_clean)
        assert int(state.skipped) == 1 - is_clean
    assert float(state.windows.values[0, -1]) == np.float32(2.0) ** 0.5


# Losses.


LOSSES = [7.5, 8, np.float32(8.5), np.asarray([9.0], np.float16), jnp.asarray(9.5, "bfloat16"), 10**400]


def test_a_loss_of_any_form_is_judged_and_makes_no_nan_that_jax_would_find_and_none_is_no_spike():
    tx = gradscale_jax.scaled(SGD, StaticScale(1.0), skip=SkipSpikes(window=5))
    state, taken = tx.init(GRADS), []
    with jax.debug_nans(True):
        for value in LOSSES:
            _, state = tx.update(GRADS, state, value=value)
            taken.append(bool(gradscale_jax.verdict_of(state).taken))
    assert taken == [True] * 5 + [False]
    assert state.windows.values[0].tolist() == [7.5, 8.0, 8.5, 9.0, 9.5]
    _, without = jax.jit(tx.update)(GRADS, state)
    assert bool(gradscale_jax.verdict_of(without).taken)


@pytest.mark.parametrize("rule", [*RULES, SkipSpikes(of="norm")], ids=["none", "loss", "both", "norm"])
def test_a_loss_that_is_not_finite_skips_the_step_with_finite_gradients_from_the_first_on(rule):
    tx = scaled(skip=rule, give_up_after=9)
    first = state = tx.init(GRADS)
    for loss in (math.nan, np.float32(np.inf), jnp.asarray([-jnp.inf], "bfloat16"), 10**400):
        updates, state = tx.update(GRADS, state, GRADS, value=loss)
        verdict = gradscale_jax.verdict_of(state)
        assert (bool(verdict.taken), bool(verdict.spike), int(verdict.nonfinite)) == (False, True, 0)
        assert_same_bits([state.scale_state, *state.inner_state], [first.scale_state, *first.inner_state])
        assert_same_bits(updates, -0.0 * GRADS)
    # With a gradient that is not finite it is an overflow; a loss that is makes a clean step.
    _, state = tx.update(GRADS.at[0].set(jnp.inf), state, GRADS, value=math.nan)
    _, state = tx.update(GRADS, state, GRADS, value=1.0)
    assert gradscale_jax.verdict_of(state).counts() == {"taken": 1, "overflow": 1, "spike": 4}
    assert float(state.scale_state.scale) == float(first.scale_state.scale) / 2


@pytest.mark.parametrize("bad", range(3))
def test_a_loss_of_one_rank_that_is_not_finite_skips_the_step_of_all(bad: int):
    tx = gradscale_jax.guarded(SGD, axis_name="data")
    losses = jnp.ones(3).at[bad].set(jnp.nan)

    def step(loss):
        return tx.update(GRADS, tx.init(GRADS), value=loss)[1].skipped

    assert jax.vmap(step, axis_name="data")(losses).tolist() == [1, 1, 1]


# Where the state is found, and what can stand in it.


@pytest.mark.tier("ranks")
def test_the_scale_state_is_found_in_any_nesting():
    for nest in (
        optax.chain(optax.identity(), optax.chain(ONE, optax.scale(1.0))),
        optax.MultiSteps(ONE, 3),
        optax.inject_hyperparams(lambda by: optax.chain(ONE, optax.scale(by)))(by=1.0),
        optax.apply_if_finite(ONE, 3),
    ):
        state = nest.init(PARAMS)
        found = gradscale_jax.scale_state({"train": state, "step": 3})
        assert (type(found), float(found.scale)) == (gradscale.ScaleState, 1024.0)
        assert bool(gradscale_jax.verdict_of(state).finite)
    # And of what describes such a state.
    for part in (lambda leaf: leaf.sharding, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)):
        assert gradscale_jax.scale_state(jax.tree.map(part, ONE.init(PARAMS))) == jax.tree.map(part, found)


@pytest.mark.parametrize("read", [gradscale_jax.scale_state, gradscale_jax.verdict_of])
def test_no_state_and_several_states_are_errors_that_name_the_number(read):
    one = ONE.init(PARAMS)
    for wrong, got in (
        (ADAM.init(PARAMS)[0], "got ScaleByAdamState without one"),
        ({"generator": one, "discriminator": one}, "got 2: one loss has one scale"),
        (one._replace(inner_state=(one,)), "got 2"),
    ):
        with pytest.raises(InvalidValueError, match=got):
            read(wrong)


ATTRIBUTES = ("scale_state", "inner_state", "verdict", "skipped", "windows")


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("rule", RULES, ids=["overflows", "loss", "both"])
def test_values_are_found_and_set_by_name_as_without_scaling_and_kept_in_place_of_arrays(rule):
    tree, bare = optax.tree_utils, optax.chain(optax.masked(ADAM, MASKED), optax.contrib.reduce_on_plateau())
    own, state = bare.init(PARAMS), scaled(bare, skip=rule).init(PARAMS)
    names = {str(getattr(key, "name", "")) for path, _ in jax.tree_util.tree_leaves_with_path(own) for key in path}
    assert {"count", "scale", "mu"} <= names
    names |= {*gradscale.ScaleState._fields, *gradscale_jax.Verdict._fields, *ATTRIBUTES, "values", "loss", "norm"}
    for name in names:
        found = [[value for _, value in tree.tree_get_all_with_path(each, name)] for each in (state, own)]
        assert jax.tree.structure(found[0]) == jax.tree.structure(found[1]), name
        assert jax.tree.leaves(found[0]) == jax.tree.leaves(found[1]), name
    changed = tree.tree_set(state, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert changed.inner_state == tree.tree_set(own, scale=jnp.float32(0.5), count=jnp.int32(7))
    assert repr(changed._replace(inner_state=None)) == repr(state._replace(inner_state=None))
    for other in (None, jax.sharding.PartitionSpec("data"), 0):
        for names in (*((name,) for name in ATTRIBUTES), ATTRIBUTES):
            changed = state._replace(**dict.fromkeys(names, other))
            assert [getattr(changed, name) for name in names] == [other] * len(names)
            back = changed._replace(**{name: getattr(state, name) for name in names})
            assert repr(back) == repr(state)
        everywhere = jax.tree.map(lambda _, other=other: other, state, is_leaf=lambda node: node is not state)
        assert repr(everywhere) == f"ScaledOptimizerState({', '.join(f'{name}={other!r}' for name in ATTRIBUTES)})"
    # A sharding in place of a field is that of all its arrays.
    everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:2], "data"), jax.sharding.PartitionSpec())
    placed = jax.jit(lambda state: state, out_shardings=state._replace(**dict.fromkeys(ATTRIBUTES, everywhere)))(state)
    assert {leaf.sharding for leaf in jax.tree.leaves(placed)} == {everywhere}
    assert str(placed.windows) == str(state.windows)


# Steps that are counted.


def test_a_warning_says_that_the_weights_hold_nan_and_only_what_it_can_see():
    policy = StaticScale(1.0)
    differentiate = gradscale_jax.value_and_grad(lambda w: w * jnp.nan, policy, warn_after=2)
    state = differentiate.init(GRADS)
    for _ in range(2):
        _, _, verdict, state = differentiate(state, jnp.ones(()))
    nan = jnp.full(2, jnp.nan)
    params = {"a": nan.at[0].set(1.0), "head": [jnp.ones(2), nan], "step": jnp.int32(1), "f": len}
    begin = "each of the last 2 steps of the optimizer was skipped: 2 for non-finite gradients (inf or NaN); no weight "
    for given, cause in (
        (params, "Cause: weights. Weights hold inf or NaN, the most in \"['head'][1]\""),
        ({"w": jnp.ones(2)}, ""),
    ):
        with pytest.warns(gradscale.TrainingStalledWarning) as told:
            verdict.check(policy, given)
        (said,) = (str(one.message) for one in told)
        assert {one.filename for one in told} == {__file__}
        assert said.startswith(begin)
        # Nothing was scaled.
        assert "scale" not in said
        assert said.partition(". ")[2].startswith(cause)
        assert bool(cause) is ("Weights" in said)


def begun(by_optax: bool, **options):
    """Return a first state, and what makes the verdict of a step from a state."""
    if by_optax:
        tx = scaled(SGD, **options)
        return tx.init(GRADS), lambda state: gradscale_jax.verdict_of(tx.update(GRADS, state, value=1.0)[1])
    differentiate = gradscale_jax.value_and_grad(jnp.sum, POLICY, **options)
    return differentiate.init(GRADS), lambda state: differentiate(state, GRADS).verdict


@pytest.mark.parametrize("by_optax", [True, False], ids=["scaled", "value_and_grad"])
def test_nothing_is_counted_unless_it_is_asked_for(by_optax: bool):
    (plain, step), (counting, _) = begun(by_optax), begun(by_optax, give_up_after=20)
    assert len(jax.tree.leaves(counting)) == len(jax.tree.leaves(plain)) + 1
    if by_optax:
        assert plain.windows is None
        # A field is stored as in versions that counted nothing.
        assert jax.tree.structure(plain._replace(verdict=plain.verdict)) == jax.tree.structure(plain)
    with pytest.raises(gradscale.CallOrderError, match="counted with warn_after= or give_up_after="):
        step(plain).counts()
    for state, options in ((plain, {"give_up_after": 20}), (counting, {"skip": RULES[1]}), (plain, {"skip": RULES[1]})):
        with pytest.raises(InvalidTypeError, match=r"begin with init|must be a ScaleState"):
            begun(by_optax, **options)[1](state)
    for name, value in (("warn_after", 0), ("give_up_after", 2.5)):
        with pytest.raises(gradscale.GradscaleError, match=name):
            begun(by_optax, **{name: value})


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "windows of losses": {"skip": RULES[1]},
    "windows of both": {"skip": RULES[2]},
    "counts": {"give_up_after": 5},
    "both": {"skip": RULES[1], "warn_after": 5},
}


@pytest.mark.parametrize("after", OPTIONS)
@pytest.mark.parametrize("before", OPTIONS)
def test_a_run_goes_on_with_other_options_and_its_moments_scale_and_windows(before: str, after: str):
    old, new = scaled(**OPTIONS[before]), scaled(**OPTIONS[after])
    state = old.init(GRADS)
    for grads in (GRADS, jnp.full(2, jnp.inf), GRADS):
        _, state = old.update(grads, state, GRADS, value=2.0)
    carried = gradscale_jax.carry_over({"optimizer": jax.device_get(state)}, new.init(GRADS))
    assert_same_bits([*carried.inner_state, carried.scale_state], [*state.inner_state, state.scale_state])
    assert carried.skipped == 1
    _, stepped = jax.jit(new.update)(GRADS, carried, GRADS, value=2.0)
    assert jax.tree.structure(stepped) == jax.tree.structure(carried) == jax.tree.structure(new.init(GRADS))
    are_same_windows = OPTIONS[before].get("skip") == OPTIONS[after].get("skip")
    if stepped.windows is not None:
        assert stepped.windows.count.tolist() == [3 if are_same_windows else 1] * len(stepped.windows.count)
    if stepped.verdict.tally is not None:
        taken = stepped.verdict.counts()["taken"]
        assert taken == (3 if state.verdict.tally is not None else 1)
    with pytest.raises(InvalidValueError, match="opt_state must hold one state"):
        gradscale_jax.carry_over(state.inner_state, new.init(GRADS))


@pytest.mark.parametrize(
    "first",
    [scaled(SGD).init(GRADS), scaled(optax.chain(ADAM, SGD)).init(GRADS), scaled().init(jnp.ones(3))],
    ids=["another tx", "a longer chain", "other parameters"],
)
def test_a_state_of_another_tx_or_of_other_parameters_is_not_carried_over(first):
    with pytest.raises(
        InvalidValueError, match=r"states of one tx .*, got .* in first: give tx.init\(params\) of a tr"
    ):
        gradscale_jax.carry_over(scaled().init(GRADS), first)


def test_a_state_of_nnx_is_carried_over_to_one_of_its_optimizer_and_to_one_of_the_parameters():
    nnx = importlib.import_module(require("flax").__name__ + ".nnx")
    model, tx = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), scaled(give_up_after=9)
    params = nnx.state(model, nnx.Param)
    old = nnx.Optimizer(model, scaled(), wrt=nnx.Param)
    old.update(model, params)
    for first in (nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state, tx.init(params)):
        carried = gradscale_jax.carry_over(old.opt_state, first)
        assert int(jax.tree.leaves(carried.inner_state)[0]) == 1


FP8 = "_overwrite_with_gradient"


def with_fp8(scale: float) -> dict[str, Any]:
    """Return gradients that were scaled, of norm 5 without that, beside a new value of fp8."""
    return {"params": jnp.asarray([3.0, 4.0]) * scale, FP8: {"dense": {"input_scale": jnp.full(1, 7.0, jnp.bfloat16)}}}


@pytest.mark.parametrize("by", ["value_and_grad", "scaled", "guarded", "unscale"])
@pytest.mark.parametrize("bad", [1.0, math.inf], ids=["finite", "inf"])
def test_new_values_of_flaxs_fp8_are_judged_and_neither_divided_nor_clipped_nor_cast(by: str, bad: float):
    grads = with_fp8(1.0 if by == "guarded" else 1024.0)
    grads[FP8] = jax.tree.map(lambda x: x * bad, grads[FP8])
    rule = SkipSpikes(window=4, of="norm")
    if by == "unscale":
        got, nonfinite = gradscale_jax.unscale(grads, POLICY.init(GRADS), dtype=jnp.float32)
        norm = 5.0
    elif by == "value_and_grad":
        differentiate = gradscale_jax.value_and_grad(
            lambda _: jnp.zeros(()), POLICY, reduce=lambda _: grads, dtype=jnp.float32, skip=rule
        )
        _, got, verdict, state = differentiate(differentiate.init(grads), grads)
        nonfinite, norm = verdict.nonfinite, float(next(iter(state.windows.values()))[0][0, -1])
    else:
        make = gradscale_jax.guarded if by == "guarded" else lambda tx, **options: scaled(tx, **options)
        tx = make(optax.identity(), max_norm=2.5, skip=rule)
        got, state = tx.update(grads, tx.init(grads), grads)
        nonfinite, norm = state.verdict.nonfinite, float(state.windows.values[0, -1])
    assert nonfinite == (bad == math.inf)
    if bad == 1.0:
        part = 1.0 if by in ("unscale", "value_and_grad") else 0.5
        np.testing.assert_allclose(got["params"], [3.0 * part, 4.0 * part], rtol=1e-6)
        assert norm == pytest.approx(5.0)
        assert_same_bits(got[FP8], grads[FP8])


def test_values_of_flaxs_own_dtype_for_fp8_pass_as_they_are():
    require("flax")
    from flax.linen import fp8_ops

    value = jax.lax.convert_element_type(jnp.ones(3), fp8_ops.fm32)
    (divided, kept), nonfinite = gradscale_jax.unscale([jnp.ones(2), value], POLICY.init(GRADS))
    assert (divided.tolist(), kept is value, int(nonfinite)) == ([2.0**-10] * 2, True, 0)


@pytest.mark.parametrize("by", ["value_and_grad", "scaled", "guarded", "unscale"])
@pytest.mark.parametrize("bad", [1.0, math.nan], ids=["finite", "nan"])
def test_values_of_flaxs_own_dtype_for_fp8_are_judged(by: str, bad: float):
    require("flax")
    from flax.linen import fp8_ops

    params = {"w": jnp.ones(2), FP8: jax.lax.convert_element_type(jnp.full(3, bad), fp8_ops.fm32)}

    @jax.jit
    def judged(params):
        if by == "unscale":
            return gradscale_jax.unscale(params, POLICY.init(GRADS))[1]
        if by == "value_and_grad":
            differentiate = gradscale_jax.value_and_grad(
                lambda one: jnp.sum(one["w"]), POLICY, allow_int=True, reduce=lambda _: params
            )
            return differentiate(differentiate.init(params), params).verdict.nonfinite
        make = gradscale_jax.guarded if by == "guarded" else scaled
        tx = make(optax.identity(), max_norm=2.5, skip=SkipSpikes(window=4, of="norm"))
        return tx.update(params, tx.init(params), params)[1].verdict.nonfinite

    assert int(judged(params)) == (not math.isfinite(bad))


# The loop on the page.


def batches(count: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(count, 8, 4)).astype(np.float32)
    return [(x, x @ np.float32([1, -2, 3, -4])) for x in inputs]


@pytest.fixture(scope="module")
def names():
    with contextlib.redirect_stdout(io.StringIO()):
        return run_on(JAX_PAGE, "bfloat16", batches=batches(30), more_batches=batches(200, 1))


def trained(names, given, *, weight: float = 0.0, log_every: int = 1000):
    """Train as the page does from a first weight."""
    first = jax.device_put({"w": jnp.full(4, weight, jnp.float32)}, names["whole"])
    return names["train"](first, names["tx"].init(first), given, log_every=log_every)


def test_the_page_trains_and_resumes_as_if_it_had_not_stopped(names):
    assert np.abs(np.asarray(names["params"]["w"]) - [1, -2, 3, -4]).max() < 0.1
    assert_same_bits(trained(names, batches(30) + batches(200, 1)), (names["params"], names["opt_state"]))
    assert names["step"]._cache_size() <= 2


@pytest.mark.parametrize("device", range(2))
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4], ids=["nan", "inf", "spike"])
def test_a_bad_batch_on_either_device_leaves_no_trace_in_the_weights(names, device: int, value: float):
    bad = batches(1, 2)[0]
    bad[0][4 * device, 1] = value
    ends = []
    for given in (batches(30), [*batches(30)[:20], bad, *batches(30)[20:]]):
        params, state = trained(names, given)
        ends.append((params, state.inner_state, state.gradscale_windows))
        assert int(optax.tree_utils.tree_get_all_with_path(state, "count")[-1][1]) == 30
    assert int(state.skipped) == 1
    assert bool(np.isfinite(value)) is (state.verdict.counts()["spike"] == 1)
    assert_same_bits(*ends)


def test_the_page_gives_up_after_exactly_20_with_the_state_of_before(names):
    left = iter(batches(40))
    words = r"the last 20 steps of the .* 20 for non-finite.*Weights hold inf or NaN, the most in \"\['w'\]\""
    with pytest.raises(TrainingStalledError, match=words):
        trained(names, left, weight=np.nan, log_every=1)
    assert len([*left]) == 20


# Clipping.


def clipping(max_norm: float, **options):
    return gradscale_jax.scaled(SGD, POLICY, max_norm=max_norm, **options)


@pytest.mark.parametrize("dtype", ["float32", *later("ranks", "float16", "bfloat16", "complex64")])
@pytest.mark.parametrize("max_norm", [1.0, *later("ranks", 0.0, 100.0)])
def test_a_step_clips_as_float64_does_and_one_that_is_not_finite_is_skipped(dtype: str, max_norm: float):
    tx, params = clipping(max_norm), {"w": jnp.zeros(3, dtype), "b": jnp.zeros(2)}
    state, update = tx.init(params), jax.jit(tx.update)
    values = {"w": np.asarray([3.0, -4.0, 0.5]), "b": np.asarray([12.0, -1.0])}
    factor = min(1.0, max_norm / (math.sqrt(sum(float(np.sum(x**2)) for x in values.values())) + 1e-6))
    scale = float(gradscale_jax.scale_state(state).scale)
    grads = {name: jnp.asarray(x * scale, params[name].dtype) for name, x in values.items()}
    updates, after = update(grads, state, params)
    for name, x in values.items():
        unit = jnp.finfo(params[name].dtype).eps
        np.testing.assert_allclose(np.asarray(updates[name], np.complex128).real, -x * factor, rtol=2 * unit)
    assert (int(after.skipped), int(after.verdict.nonfinite)) == (0, 0)
    for bad in (math.nan, math.inf):
        _, skipped = update(grads | {"w": grads["w"].at[1].set(bad)}, state, params)
        assert (int(skipped.skipped), int(skipped.verdict.nonfinite)) == (1, 1)


def test_clipping_takes_one_pass_and_a_rule_judges_the_norm_before():
    params = {str(index): jnp.ones(8) for index in range(20)}
    rule = SkipSpikes(window=4, min_values=2, of="norm")
    tx = gradscale_jax.guarded(SGD, max_norm=1.0, skip=rule)
    state = tx.init(params)
    text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    # One for each array; the chain of optax has two.
    inside = gradscale_jax.guarded(optax.chain(optax.clip_by_global_norm(1.0), SGD))
    other = jax.jit(inside.update).lower(params, inside.init(params), params).compile().as_text()
    reduces = [len(re.findall(r" = f32\[\S* reduce\(| = pred\[\S* reduce\(", one)) for one in (text, other)]
    assert reduces[0] < len(params) + 10 < 2 * len(params) <= reduces[1]
    spikes = []
    for factor in (1.0, 1.1, 0.9, 30.0, 1.0):
        _, state = tx.update(jax.tree.map(lambda x, factor=factor: x * factor, params), state, params)
        spikes.append(bool(state.verdict.spike))
    assert spikes == [False, False, False, True, False]
    assert float(state.windows.values.max()) == pytest.approx(1.1 * math.sqrt(160.0))


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_ranks_that_clip_by_other_norms_are_desynced_unless_one_overflows(bad: int | None):
    tx = clipping(1.0, axis_name="data")
    params = jnp.zeros(2)

    def step(grads):
        _, after = tx.update(grads, tx.init(params), params)
        return after.verdict.desynced, after.verdict.finite, after.skipped

    grads = jnp.asarray([[3.0, 4.0], [4.0, 3.0]])
    assert [one.tolist() for one in jax.vmap(step, axis_name="data")(grads)] == [[False] * 2, [True] * 2, [0, 0]]
    grads = grads.at[1].set(jnp.asarray([4.0, 3.1]))
    grads = grads if bad is None else grads.at[bad, 0].set(jnp.inf)
    desynced, finite, skipped = (one.tolist() for one in jax.vmap(step, axis_name="data")(grads))
    assert (desynced, finite, skipped) == ([bad is None] * 2, [False] * 2, [1, 1])


def test_a_negative_norm_is_refused():
    with pytest.raises(InvalidValueError, match=r"max_norm must be .*at least 0.*got -1\.0"):
        clipping(-1.0)
