"""Rows of skipped steps in compiled loops: counted by reason, told with the cause, and ended on all ranks together."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings

import numpy as np
import pytest
from axes_jax import P, assert_one_reduction, gradscale_jax, jax, jnp, mesh
from optax_runs import assert_same_bits, optax
from recipe_blocks import JAX_PAGE, run_on

import gradscale
from gradscale import DynamicScale, SkipSpikes, StaticScale, TrainingStalledError, TrainingStalledWarning

pytestmark = pytest.mark.jax

RANKS = 3
RULE = SkipSpikes(above=5.0, of="loss")
POLICY = DynamicScale(init_scale=2.0**8, growth_interval=2)
# A step's loss of the weight 1 is its input, and so is its gradient.
GOOD, SPIKE, BAD = 2.0, 9.0, float("nan")


def one_beside(x):
    """Return the weight, each rank's own: shard_map sums the gradients of one that all have in common."""
    return jnp.ones_like(x, shape=())


def with_optax(policy, **options):
    """Return a first state, and a step of ``scaled``: (verdict, state) of a state and an input."""
    tx = gradscale_jax.scaled(optax.set_to_zero(), policy, **options)

    def step(state, x):
        grads = jax.grad(lambda w: gradscale_jax.scale(jnp.mean(w * x), gradscale_jax.scale_state(state)))(
            one_beside(x)
        )
        _, state = tx.update(grads, state, value=jnp.mean(x))
        return gradscale_jax.verdict_of(state), state

    return tx.init(jnp.ones(())), step


def without_optax(policy, **options):
    """Return the same of ``value_and_grad``."""
    differentiate = gradscale_jax.value_and_grad(lambda w, x: jnp.mean(w * x), policy, **options)

    def step(state, x):
        scaled = differentiate(state, one_beside(x), x)
        return scaled.verdict, scaled.state

    return differentiate.init(jnp.ones(())), step


BOTH = pytest.mark.parametrize("loop", [with_optax, without_optax], ids=["scaled", "value_and_grad"])


def run(state, step, inputs, policy=POLICY, params=None):
    """Take a step of each input, and check each verdict; return what each step left."""
    left = []
    for x in inputs:
        verdict, state = step(state, x if isinstance(x, np.ndarray) else jnp.float32(x))
        left.append((verdict, state))
        verdict.check(policy, params)
    return left


def leaves_of(state):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


@BOTH
def test_steps_are_counted_by_what_they_were_skipped_for(loop):
    state, step = loop(POLICY, skip=RULE, warn_after=50)
    step = jax.jit(step)
    inputs = [GOOD, BAD, SPIKE, SPIKE, GOOD, BAD]
    left = run(state, step, inputs)
    assert [int(verdict.tally[0]) for verdict, _ in left] == [0, 1, 2, 3, 0, 1]
    assert left[3][0].counts() == {"taken": 1, "overflow": 1, "spike": 2}
    assert left[5][0].counts() == {"taken": 2, "overflow": 2, "spike": 2}
    assert [bool(verdict.taken) for verdict, _ in left] == [x == GOOD for x in inputs]


@BOTH
def test_a_scan_counts_as_single_steps_do_and_the_longest_row_of_it_counts(loop):
    state, step = loop(POLICY, give_up_after=3)
    inputs = [GOOD, BAD, BAD, GOOD, BAD, BAD, BAD, GOOD]

    def carried(state, x):
        verdict, state = step(state, x)
        return state, verdict

    _, verdicts = jax.lax.scan(carried, state, jnp.asarray(inputs))
    assert verdicts.counts()["overflow"] == [0, 1, 2, 2, 3, 4, 5, 5]
    with pytest.raises(TrainingStalledError, match="of the last 3 iterations was skipped: 3 for non-finite"):
        verdicts.check(POLICY)
    jax.tree.map(lambda leaf: leaf[:6], verdicts).check(POLICY)


@BOTH
def test_a_run_ends_after_exactly_so_many_and_goes_on_from_what_was_saved(loop):
    state, step = loop(POLICY, skip=RULE, give_up_after=20)
    step = jax.jit(step)
    left = run(state, step, [GOOD, *[BAD] * 19, GOOD, *[BAD] * 10, *[SPIKE] * 9])
    last = left[-1][1]
    verdict, last = step(last, jnp.float32(BAD))
    words = (
        r"each step of the last 20 iterations was skipped: 11 for non-finite gradients \(inf or NaN\), 9 for a spike; "
        f"the scale went from {2.0**-11:g} to {2.0**-21:g}, and no weight has changed since. All is judged by skip="
    )
    with pytest.raises(TrainingStalledError, match=words):
        verdict.check(POLICY)
    saved = pickle.loads(pickle.dumps(jax.device_get(last)))
    verdict, after = step(saved, jnp.float32(GOOD))
    verdict.check(POLICY)
    assert verdict.counts() == {"taken": 3, "overflow": 30, "spike": 9}
    assert leaves_of(after) == leaves_of(state)


@BOTH
@pytest.mark.parametrize("bad", range(RANKS))
@pytest.mark.parametrize("value", [BAD, SPIKE], ids=["overflow", "spike"])
def test_all_ranks_give_up_in_the_same_step_whichever_is_bad(loop, bad: int, value: float):
    # Each rank judges its own loss, and holds a state of its own.
    state, one = loop(POLICY, skip=RULE, give_up_after=20, axis_name="data")

    def step(state, x):
        return jax.tree.map(lambda leaf: leaf[None], one(jax.tree.map(lambda leaf: leaf[0], state), x))

    spread = P("data")
    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data", shape=(RANKS,)), in_specs=spread, out_specs=spread))
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * RANKS), state)
    good = np.full(RANKS, GOOD, np.float32)
    one_bad = good.copy()
    one_bad[bad] = value
    left = run(state, mapped, [good, *[one_bad] * 19])
    assert_one_reduction(mapped, left[-1][1], one_bad)
    assert left[-1][0].tally[:, 0].tolist() == [19] * RANKS
    verdict, last = mapped(left[-1][1], one_bad)
    for rank in range(RANKS):
        own = jax.tree.map(lambda leaf, rank=rank: leaf[rank], verdict)
        with pytest.raises(TrainingStalledError, match="each step of the last 20 iterations was skipped: 20 for "):
            own.check(POLICY)
    assert verdict.tally.tolist() == [verdict.tally[0].tolist()] * RANKS
    verdict, _ = mapped(last, good)
    verdict.check(POLICY)
    assert verdict.counts()["taken"] == [2] * RANKS


def warned(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {one.category for one in caught} <= {TrainingStalledWarning}
    assert {one.filename for one in caught} <= {__file__}
    return [str(one.message) for one in caught]


@BOTH
def test_a_warning_says_that_the_weights_hold_nan_and_only_what_it_can_see(loop):
    policy = StaticScale(1.0)
    state, step = loop(policy, warn_after=4)
    step, params = jax.jit(step), {"head": [jnp.ones(2), jnp.asarray([1.0, jnp.nan])], "step": jnp.int32(1), "f": len}
    words = (
        "each step of the last 4 iterations was skipped: 4 for non-finite gradients (inf or NaN); no weight has changed"
    )
    for given, cause in (
        (params, ". Cause: weights. Weights hold inf or NaN, the most in \"['head'][1]\""),
        (None, ""),
    ):
        (told,) = warned(lambda given=given: run(state, step, [BAD] * 4, policy, given))
        assert told.startswith(f"{words} since{cause}")
        assert bool(cause) is ("Weights" in told)
        # Nothing was scaled.
        assert "scale" not in told
    (told,) = warned(lambda: run(state, step, [BAD] * 4, policy, {"w": jnp.ones(2)}))
    assert told == f"{words} since"


@BOTH
def test_nothing_is_counted_unless_it_is_asked_for(loop):
    programs, states = [], []
    for options in ({}, {"give_up_after": 20}):
        state, step = loop(POLICY, **options)
        programs.append(str(jax.make_jaxpr(step)(state, jnp.float32(GOOD))))
        states.append(state)
    assert ["i32[11]" in program for program in programs] == [False, True]
    assert len(jax.tree.leaves(states[1])) == len(jax.tree.leaves(states[0])) + 1
    verdict, _ = loop(POLICY)[1](states[0], jnp.float32(GOOD))
    with pytest.raises(gradscale.CallOrderError, match="counted with warn_after= or give_up_after="):
        verdict.counts()
    for given, options in ((0, {"give_up_after": 20}), (1, {"skip": RULE}), (0, {"skip": RULE})):
        with pytest.raises(gradscale.InvalidTypeError, match=r"begin with init|must be a ScaleState"):
            loop(POLICY, **options)[1](states[given], jnp.float32(GOOD))
    for name, value in (("warn_after", 0), ("give_up_after", 2.5)):
        with pytest.raises(gradscale.GradscaleError, match=name):
            loop(POLICY, **{name: value})


def test_a_state_of_scaled_has_the_fields_that_it_had_before_steps_were_counted():
    tx = gradscale_jax.scaled(optax.sgd(0.1), POLICY)
    for state in (tx.init(jnp.ones(2)), tx.update(jnp.ones(2), tx.init(jnp.ones(2)))[1]):
        stored = tuple(state)
        assert [len(stored[0]), len(stored[2]), stored[4]] == [4, 6, {}]
        back = state._replace(verdict=state.verdict)
        assert jax.tree.structure(back) == jax.tree.structure(state)
    counting = gradscale_jax.scaled(optax.sgd(0.1), POLICY, give_up_after=3).init(jnp.ones(2))
    assert jax.tree.structure(counting._replace(verdict=counting.verdict)) == jax.tree.structure(counting)


def test_a_loop_without_optax_skips_the_spikes_that_optax_skips():
    rule = SkipSpikes(window=4)
    losses = [2.0, 2.5, 2.0, 2.25, 50.0, 2.0, BAD, 2.5, 90.0, 2.0]
    runs = [
        run(state, jax.jit(step), losses)
        for state, step in (loop(POLICY, skip=rule, give_up_after=9) for loop in (with_optax, without_optax))
    ]
    for (a, with_it), (b, without) in zip(*runs, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(with_it.scale_state, without.scale_state)
        assert_same_bits(with_it.gradscale_windows, without.windows)
    assert [bool(verdict.spike) for verdict, _ in runs[1]] == [loss > 40 for loss in losses]


# The loop on the page.


def batches(count: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(count, 8, 4)).astype(np.float32)
    return [(x, x @ np.float32([1, -2, 3, -4])) for x in inputs]


def page():
    with contextlib.redirect_stdout(io.StringIO()):
        return run_on(JAX_PAGE, "bfloat16", batches=batches(30), more_batches=batches(200, 1))


@pytest.fixture(scope="module", name="names")
def _names():
    return page()


def test_the_page_trains_and_resumes_as_if_it_had_not_stopped(names):
    assert np.abs(np.asarray(names["params"]["w"]) - [1, -2, 3, -4]).max() < 0.1
    first = jax.device_put({"w": jnp.zeros(4)}, names["whole"])
    straight = names["train"](first, names["tx"].init(first), batches(30) + batches(200, 1), log_every=1000)
    assert_same_bits(straight, (names["params"], names["opt_state"]))
    assert names["step"]._cache_size() <= 2


@pytest.mark.parametrize("device", range(2))
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4], ids=["nan", "inf", "spike"])
def test_a_bad_batch_on_either_device_leaves_no_trace_in_the_weights(names, device: int, value: float):
    bad = batches(1, 2)[0]
    bad[0][4 * device, 1] = value
    first = jax.device_put({"w": jnp.zeros(4)}, names["whole"])
    ends = []
    for given in (batches(30), [*batches(30)[:20], bad, *batches(30)[20:]]):
        params, state = names["train"](first, names["tx"].init(first), given, log_every=1000)
        ends.append((params, state.inner_state, state.gradscale_windows))
        assert int(optax.tree_utils.tree_get_all_with_path(state, "count")[-1][1]) == 30
    assert int(state.skipped) == 1
    assert bool(np.isfinite(value)) is (state.verdict.counts()["spike"] == 1)
    assert_same_bits(*ends)


def test_the_page_gives_up_after_exactly_20_with_the_state_of_before(names):
    first = jax.device_put({"w": jnp.full(4, jnp.nan)}, names["whole"])
    seen = []

    def given():
        for batch in batches(40):
            seen.append(batch)
            yield batch

    words = r"the last 20 iterations was skipped: 20 for non-finite.*Weights hold inf or NaN, the most in \"\['w'\]\""
    with pytest.raises(TrainingStalledError, match=words):
        names["train"](first, names["tx"].init(first), given(), log_every=1)
    assert len(seen) == 20
