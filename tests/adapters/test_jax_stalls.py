"""Rows of skipped steps in compiled loops: what is told of them, states that do not count, and the loop on the page."""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np
import pytest
from axes import require
from axes_jax import assert_same_bits, gradscale_jax, jax, jnp
from recipe_blocks import JAX_PAGE, run_on

import gradscale
from gradscale import DynamicScale, SkipSpikes, StaticScale, TrainingStalledError, TrainingStalledWarning

optax = require("optax")
pytestmark = pytest.mark.jax

RULE = SkipSpikes(above=5.0, of="loss")
POLICY = DynamicScale(init_scale=2.0**8, growth_interval=2)
GOOD, BAD = np.float32(2.0), np.float32(np.nan)


def with_optax(policy, **options):
    """Return a first state, and a step of ``scaled``: (verdict, state) of a state and a loss that is its gradient."""
    tx = gradscale_jax.scaled(optax.set_to_zero(), policy, **options)

    def step(state, x):
        grads = jax.grad(lambda w: gradscale_jax.scale(w * x, gradscale_jax.scale_state(state)))(jnp.ones(()))
        _, state = tx.update(grads, state, value=x)
        return gradscale_jax.verdict_of(state), state

    return tx.init(jnp.ones(())), step


def without_optax(policy, **options):
    """Return the same of ``value_and_grad``."""
    differentiate = gradscale_jax.value_and_grad(lambda w, x: w * x, policy, **options)

    def step(state, x):
        scaled = differentiate(state, jnp.ones(()), x)
        return scaled.verdict, scaled.state

    return differentiate.init(jnp.ones(())), step


BOTH = pytest.mark.parametrize("loop", [with_optax, without_optax], ids=["scaled", "value_and_grad"])


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
    params = {"head": [jnp.ones(2), jnp.asarray([1.0, jnp.nan])], "step": jnp.int32(1), "f": len}
    words = "each step of the last 4 iterations was skipped: 4 for non-finite gradients (inf or NaN); "
    for _ in range(4):
        verdict, state = step(state, BAD)
    for given, cause in (
        (params, "Cause: weights. Weights hold inf or NaN, the most in \"['head'][1]\""),
        (None, ""),
        ({"w": jnp.ones(2)}, ""),
    ):
        (told,) = warned(lambda given=given: verdict.check(policy, given))
        assert told.partition(". ")[0] == f"{words}no weight has changed since"
        # Nothing was scaled.
        assert "scale" not in told
        assert told.partition(". ")[2].startswith(cause)
        assert bool(cause) is ("Weights" in told)


@BOTH
def test_nothing_is_counted_unless_it_is_asked_for(loop):
    programs, states = [], []
    for options in ({}, {"give_up_after": 20}):
        state, step = loop(POLICY, **options)
        programs.append(str(jax.make_jaxpr(step)(state, GOOD)))
        states.append(state)
    assert ["i32[11]" in program for program in programs] == [False, True]
    assert len(jax.tree.leaves(states[1])) == len(jax.tree.leaves(states[0])) + 1
    for state in states if loop is with_optax else ():
        # A field is stored as in versions that counted nothing.
        assert jax.tree.structure(state._replace(verdict=state.verdict)) == jax.tree.structure(state)
    assert loop is without_optax or len(states[0][2]) == 6
    verdict, _ = loop(POLICY)[1](states[0], GOOD)
    with pytest.raises(gradscale.CallOrderError, match="counted with warn_after= or give_up_after="):
        verdict.counts()
    for given, options in ((0, {"give_up_after": 20}), (1, {"skip": RULE}), (0, {"skip": RULE})):
        with pytest.raises(gradscale.InvalidTypeError, match=r"begin with init|must be a ScaleState"):
            loop(POLICY, **options)[1](states[given], GOOD)
    for name, value in (("warn_after", 0), ("give_up_after", 2.5)):
        with pytest.raises(gradscale.GradscaleError, match=name):
            loop(POLICY, **{name: value})


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
