"""scaled(skip=): an optax transformation that skips spikes, under jit, in scans and over the ranks of shard_map."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes_jax import COUNT, P, gradscale_jax, jax, jnp, mesh
from optax_runs import HOWS, assert_close, assert_same_bits, drive, first_params, gradients, optax, plain_step
from tiers import later

from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale

pytestmark = pytest.mark.jax

STEPS = 12
OVERFLOW, OF_NORM, OF_LOSS = 6, (7, 8), 10
RULE = SkipSpikes(window=8)
POLICY = DynamicScale(init_scale=4.0, growth_interval=5)
# Halved by the overflow; the fifth clean step in a row is the one after all spikes.
SCALES = [4.0] * 4 + [8.0] * 2 + [4.0] * 6


def run_of(how: str):
    """Return a run with an overflow and three spikes, the gradients of its steps, and its losses."""
    tx = gradscale_jax.scaled(optax.sgd(0.1, momentum=0.9), POLICY, skip=RULE)

    def step(params, state, given):
        scale = gradscale_jax.scale_state(state).scale
        grads = jax.tree.map(lambda grad: grad * scale, given["grads"])
        updates, state = tx.update(grads, state, params, value=given["loss"])
        return optax.apply_updates(params, updates), updates, state

    grads = gradients(STEPS, frozenset({OVERFLOW}))
    losses = np.linspace(3.0, 2.0, STEPS, dtype=np.float32)
    losses[OF_LOSS] = 50.0
    grads["weight"][list(OF_NORM)] *= 1e3
    params = first_params()
    return drive(step, params, tx.init(params), {"grads": grads, "loss": losses}, how), grads, losses


def windows_of(rule: SkipSpikes, values, skipped):
    """Return the window that NumPy's arrays come to, of values and whether their step was skipped for a spike."""
    state = rule.init(np.float32(0))
    for value, is_skipped in zip(np.float32(values), skipped, strict=True):
        state = rule.learn(state, value, skipped=np.bool_(is_skipped))
    return state


@pytest.mark.parametrize("how", ["jit", *later("ranks", *(how for how in HOWS if how != "jit"))])
def test_spikes_leave_the_scale_and_the_trajectory_of_the_other_steps(how: str):
    run, grads, losses = run_of(how)
    spikes = [step in (*OF_NORM, OF_LOSS) for step in range(STEPS)]
    taken = [not spike and step != OVERFLOW for step, spike in enumerate(spikes)]
    verdict = run.states.verdict
    assert verdict.spike.tolist() == spikes
    assert verdict.nonfinite.tolist() == [int(step == OVERFLOW) for step in range(STEPS)]
    assert run.states.scale_state.scale.tolist() == SCALES
    assert run.states.scale_state.growth_tracker.tolist() == [1, 2, 3, 4, 0, 1, 0, 0, 0, 1, 1, 2]
    assert run.states.skipped.tolist() == np.cumsum(np.logical_not(taken)).tolist()
    assert math.copysign(1.0, run.updates["bias"][OF_LOSS, 0]) == -1.0

    # The inner transformation by itself, on the steps that were taken.
    tx = optax.sgd(0.1, momentum=0.9)
    params = first_params()
    alone = drive(plain_step(tx), params, tx.init(params), {name: grad[taken] for name, grad in grads.items()}, "eager")
    left = jax.tree.map(lambda leaf: leaf[taken], (run.params, run.states.inner_state))
    (assert_same_bits if how == "eager" else assert_close)(left, (alone.params, alone.states))

    norms = [math.sqrt(sum(np.sum(np.float64(grad[step]) ** 2) for grad in grads.values())) for step in range(STEPS)]
    for row, values in enumerate((losses, norms)):
        values = [math.nan if step == OVERFLOW else value for step, value in enumerate(values)]
        expected = windows_of(RULE, values, spikes)
        np.testing.assert_allclose(run.states.windows.values[-1, row], expected.values, rtol=1e-6)
        assert run.states.windows.count[-1, row] == expected.count == RULE.window
        assert run.states.windows.skipped[-1, row] == expected.skipped == 0
    assert run.states.windows.skipped[:, 0].tolist() == [0] * 7 + [1, 2, 0, 1, 0]


def test_a_mean_loss_and_summed_gradients_keep_windows_that_are_whole_on_each_rank():
    tx = gradscale_jax.scaled(optax.sgd(0.1), StaticScale(1.0), axis_name="data", skip=SkipSpikes(window=4))
    whole, spread = P(), P("data")

    def step(params, state, inputs):
        def loss(params):
            return jax.lax.pmean(jnp.mean((params - inputs) ** 2), "data")

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh("data"), in_specs=(whole, whole, spread), out_specs=whole))
    params = jnp.zeros(())
    state = tx.init(params)
    inputs = np.linspace(0.5, 1.5, 2 * COUNT, dtype=np.float32)
    skipped = []
    for number in range(6):
        bad = inputs * np.where((np.arange(2 * COUNT) == 3) & (number == 4), np.float32(1e4), np.float32(1.0))
        before = params
        params, state = mapped(params, state, bad + np.float32(number % 2))
        skipped.append(bool(state.verdict.spike))
        assert (params == before) == (number == 4)
    assert skipped == [False] * 4 + [True, False]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_the_norm_is_that_of_the_unscaled_gradients_in_float32(dtype: str):
    # Their squares overflow float16. The gradient of an integer has no norm.
    grads = {"weight": jnp.asarray([300.0, -400.0], dtype) * (1j if dtype == "complex64" else 1), "ids": None}
    grads["ids"] = np.zeros(2, jax.dtypes.float0)
    rule, own = SkipSpikes(window=2, of="norm"), jnp.float16 if dtype == "float16" else None
    tx = gradscale_jax.scaled(optax.set_to_zero(), StaticScale(4.0), skip=rule, dtype=own)
    state = tx.init({"weight": grads["weight"], "ids": jnp.arange(2)})
    for update in (tx.update, jax.jit(lambda weight, state: tx.update({**grads, "weight": weight}, state))):
        given = {**grads, "weight": grads["weight"] * 4} if update is tx.update else grads["weight"] * 4
        _, state = update(given, state)
        assert state.windows.values.tolist() == [[500.0, 500.0]]


@pytest.mark.parametrize(
    "value",
    [7.5, 8, 10**400, np.float32(7.5), np.asarray([7.5], np.float16), "bfloat16"],
    ids=["float", "int", "large-int", "NumPy", "(1,)", "half"],
)
def test_a_loss_of_any_form_is_judged(value):
    tx = gradscale_jax.scaled(optax.sgd(0.1), POLICY, skip=SkipSpikes(above=7.0, of="loss"))
    value = jnp.asarray(7.5, value) if isinstance(value, str) else value
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=value)
    assert bool(gradscale_jax.verdict_of(state).spike)
    for fine in (7.0, 7):
        _, state = tx.update(jnp.ones(2), state, value=fine)
        assert bool(gradscale_jax.verdict_of(state).taken)


def test_without_a_loss_the_norm_alone_is_judged():
    tx = gradscale_jax.scaled(optax.sgd(0.1), StaticScale(1.0), skip=SkipSpikes(window=2))
    state = tx.init(jnp.ones(1))
    told = []
    for grad in (1.0, 2.0, 100.0, 1.0):
        _, state = tx.update(jnp.full(1, grad), state)
        told.append(bool(gradscale_jax.verdict_of(state).spike))
    assert told == [False, False, True, False]
    assert state.windows.count.tolist() == [0, 2]


def test_what_cannot_be_judged_is_refused():
    def transformation(skip):
        return gradscale_jax.scaled(optax.sgd(0.1), POLICY, skip=skip)

    grads = jnp.ones(2)
    with pytest.raises(InvalidTypeError, match="skip must be a SkipSpikes"):
        transformation(6.0)
    of_loss = transformation(SkipSpikes(of="loss"))
    with pytest.raises(InvalidValueError, match=r"judges losses alone, and got none: call update\(.* value=loss\)"):
        of_loss.update(grads, of_loss.init(grads))
    for wrong in (True, "7.5", grads, jnp.asarray(7), jnp.asarray(1j)):
        with pytest.raises(InvalidTypeError, match="value must be the loss, a number or a real floating array of one"):
            of_loss.update(grads, of_loss.init(grads), value=wrong)
    rules = [None, SkipSpikes(window=4), *(SkipSpikes(window=8, of=of) for of in (("loss", "norm"), "loss", "norm"))]
    for made, used in ((a, b) for a in rules for b in rules if a is not b):
        with pytest.raises(InvalidTypeError, match=r"got windows of shape .*: begin with init"):
            transformation(used).update(grads, transformation(made).init(grads), value=1.0)
    with pytest.raises(InvalidTypeError, match=r"made without skip=, got windows of shape .*norm': \(1, 8\)"):
        transformation(None).update(grads, transformation(rules[-1]).init(grads))


def test_losses_are_not_looked_at_unless_spikes_are_skipped():
    tx = gradscale_jax.scaled(optax.sgd(0.1), POLICY)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value="no loss")
    assert state.windows is None
    assert bool(state.verdict.taken)
    assert not bool(state.verdict.spike)
