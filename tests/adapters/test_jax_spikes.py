"""scaled(skip=): losses in any form or in none, what cannot be judged, and windows that are loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from jax_programs import WAYS

from gradscale import DynamicScale, InvalidTypeError, InvalidValueError, SkipSpikes, StaticScale

optax = require("optax")
pytestmark = pytest.mark.jax

POLICY = DynamicScale(init_scale=4.0)


def test_a_step_without_a_loss_after_steps_with_one_is_no_spike():
    tx = gradscale_jax.scaled(optax.sgd(0.1), StaticScale(1.0), skip=SkipSpikes(window=2))
    state = tx.init(jnp.ones(1))
    for given in ({"value": 1.0}, {"value": 2.0}, {"value": 1.5}, {}):
        _, state = tx.update(jnp.ones(1), state, **given)
        assert bool(gradscale_jax.verdict_of(state).taken)


def test_a_clean_step_makes_no_nan_that_jax_would_find():
    tx = gradscale_jax.scaled(optax.sgd(0.1), StaticScale(1.0), skip=SkipSpikes(window=2))
    with jax.debug_nans(True):
        _, state = tx.update(jnp.ones(1), tx.init(jnp.ones(1)), value=1.0)
    assert bool(gradscale_jax.verdict_of(state).taken)


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


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("way", ["flax-bytes", "orbax"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_windows_of_losses_are_not_loaded_as_windows_of_norms(tmp_path: Path, way: str):
    rules = [SkipSpikes(window=3, of=of) for of in ("loss", "norm")]
    of_loss, of_norm = (gradscale_jax.scaled(optax.sgd(0.1), POLICY, skip=rule).init(jnp.ones(2)) for rule in rules)
    WAYS[way](of_loss, of_loss, tmp_path / "same")
    with pytest.raises(ValueError, match="gradscale_norm"):
        WAYS[way](of_loss, of_norm, tmp_path / "other")
