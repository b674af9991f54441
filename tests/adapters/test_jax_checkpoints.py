"""The state of a scaled transformation: every field survives what JAX users save states with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axes import require
from axes_jax import gradscale_jax, jax, jnp
from optax_runs import assert_same_bits, first_params, gradients, optax, scaled_step

from gradscale import DynamicScale, SkipSpikes

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

# Every tracker counts.
POLICY = DynamicScale(init_scale=1024.0, growth_interval=7, tolerance=0.9)
# With a window for spikes, and without.
RULES = {"overflows": None, "spikes": SkipSpikes(window=3, deviations=1e3)}
STEPS: dict[str, Any] = {
    name: (tx, jax.jit(scaled_step(tx)))
    for name, skip in RULES.items()
    for tx in [gradscale_jax.scaled(optax.adam(0.1), POLICY, skip=skip)]
}


def trained(steps: range, params, state, rule: str):
    """Return parameters and state after some steps, of which 1 and 6 overflow; after five no tracker is zero."""
    for index in steps:
        grads = jax.tree.map(lambda leaf, index=index: leaf[index], gradients(8, frozenset({1, 6})))
        params, _, state = STEPS[rule][1](params, state, grads)
    return params, state


def through_flax_bytes(state, fresh, folder: Path):  # noqa: ARG001
    serialization = require("flax").serialization
    return jax.tree.map(jnp.asarray, serialization.from_bytes(fresh, serialization.to_bytes(state)))


def through_orbax(state, fresh, folder: Path):
    with require("orbax").StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scaler": state})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", {"scaler": fresh})["scaler"]


WAYS: dict[str, Callable[..., Any]] = {
    "device_get": lambda state, *_: jax.device_put(jax.device_get(state)),
    "pickle": lambda state, *_: pickle.loads(pickle.dumps(state)),
    "flax-bytes": through_flax_bytes,
    "orbax": through_orbax,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_a_run_continues_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path, way: Callable[..., Any], rule: str):
    fresh = first_params(), STEPS[rule][0].init(first_params())
    params, state = trained(range(5), *fresh, rule)
    assert (state.windows is None) if rule == "overflows" else state.windows.count.tolist() == [0, 3]
    assert [int(tracker) for tracker in state.scale_state[1:]] == [3, 1, 5]
    assert int(state.skipped) == 1
    restored = way(state, fresh[1], tmp_path)
    assert type(restored) is type(state)
    assert type(restored.scale_state) is type(state.scale_state)
    assert_same_bits(restored, state)
    resumed, straight = (trained(range(5, 7), params, each, rule) for each in (restored, state))
    assert_same_bits(resumed, straight)


@pytest.mark.parametrize("way", ["flax-bytes", "orbax"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_windows_of_losses_are_not_loaded_as_windows_of_norms(tmp_path: Path, way: str):
    rules = [SkipSpikes(window=3, of=of) for of in ("loss", "norm")]
    of_loss, of_norm = (gradscale_jax.scaled(optax.sgd(0.1), POLICY, skip=rule).init(first_params()) for rule in rules)
    WAYS[way](of_loss, of_loss, tmp_path / "same")
    with pytest.raises(ValueError, match="gradscale_norm"):
        WAYS[way](of_loss, of_norm, tmp_path / "other")
