"""A ScaleState, and the state of a scaled transformation: every field survives what JAX users save states with."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import require_jax
from optax_runs import assert_same_bits, first_params, gradients, scaled_step

from gradscale import DynamicScale, GradScaler, ScaleState

pytestmark = pytest.mark.jax

# Every tracker counts.
POLICY = DynamicScale(init_scale=1024.0, growth_interval=7, tolerance=0.9)


def trained(steps: range, params: Any = None, state: Any = None) -> tuple[Any, Any]:
    """Return parameters and state after some steps, of which 1 and 6 overflow; after five no tracker is zero."""
    jax, optax = require_jax(), require("optax")
    import gradscale_jax

    tx = gradscale_jax.scaled(optax.adam(0.1), POLICY)
    params = first_params() if params is None else params
    state = tx.init(params) if state is None else state
    step = scaled_step(tx)
    for index in steps:
        grads = jax.tree.map(lambda leaf, index=index: leaf[index], gradients(8, frozenset({1, 6})))
        params, _, state = step(params, state, grads)
    return params, state


def through_tree_map(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    return jax.tree.map(lambda leaf: leaf, state)


def through_flatten(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    return jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(state))


def through_device_get(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    return jax.device_put(jax.device_get(state))


def through_deepcopy(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    return copy.deepcopy(state)


def through_pickle(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    return pickle.loads(pickle.dumps(state))


def through_npz(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:
    np.savez(folder / "state.npz", *map(np.asarray, jax.tree.leaves(state)))
    with np.load(folder / "state.npz") as loaded:
        return jax.tree.unflatten(jax.tree.structure(fresh), list(map(jax.numpy.asarray, loaded.values())))


def through_flax_bytes(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    serialization = require("flax").serialization
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    return jax.tree.map(jax.numpy.asarray, restored)


def through_flax_state_dict(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    serialization = require("flax").serialization
    return serialization.from_state_dict(fresh, serialization.to_state_dict(state))


def through_orbax(jax: Any, state: Any, fresh: Any, folder: Path) -> Any:  # noqa: ARG001
    checkpoint = require("orbax")
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", {"scaler": state})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", {"scaler": fresh})["scaler"]


WAYS: list[Callable[..., Any]] = [
    through_tree_map,
    through_flatten,
    through_device_get,
    through_deepcopy,
    through_pickle,
    through_npz,
    through_flax_bytes,
    through_flax_state_dict,
    through_orbax,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("through_"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_every_field_of_a_scale_state_survives(jax: Any, tmp_path: Path, way: Callable[..., Any]) -> None:
    jnp = jax.numpy
    state = ScaleState(jnp.asarray(2.0**9, jnp.float32), *(jnp.asarray(n, jnp.int32) for n in (3, 2, 7)))
    got = way(jax, state, POLICY.init(state.scale), tmp_path)
    assert type(got) is ScaleState
    assert all(isinstance(field, jax.Array) and not field.weak_type for field in got)
    assert_same_bits(got, state)
    nonfinite = jnp.zeros((), dtype="int32")
    assert_same_bits(POLICY.update(got, nonfinite=nonfinite), POLICY.update(state, nonfinite=nonfinite))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("through_"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_a_run_continues_from_a_checkpoint_as_if_it_had_not_stopped(jax: Any, tmp_path: Path, way: Any) -> None:
    params, state = trained(range(5))
    assert [int(tracker) for tracker in state.scale_state[1:]] == [3, 1, 5]
    assert int(state.skipped) == 1
    restored = way(jax, state, trained(range(0))[1], tmp_path)
    assert type(restored) is type(state)
    assert_same_bits(restored, state)
    assert_same_bits(trained(range(5, 7), params, restored), trained(range(5, 7), params, state))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("field", ["scale_state", "inner_state", "skipped"])
def test_a_field_that_a_checkpoint_loses_fails_the_comparison(field: str) -> None:
    state, fresh = trained(range(5))[1], trained(range(0))[1]
    with pytest.raises(AssertionError):
        assert_same_bits(state._replace(**{field: getattr(fresh, field)}), state)


def test_a_scalers_state_dict_goes_between_jax_and_others(jnp: Any) -> None:
    scalers = {"jax": GradScaler(init_scale=2.0**7), "numpy": GradScaler(init_scale=2.0**7)}
    for scaler, like in zip(scalers.values(), (jnp.ones(()), np.ones((), dtype=np.float32)), strict=True):
        scaler.scale(like)
    assert scalers["jax"].state_dict() == scalers["numpy"].state_dict()
    saved = scalers["numpy"].state_dict() | {"scale": 32.0, "_growth_tracker": 5}
    resumed = GradScaler()
    resumed.load_state_dict(saved)
    assert resumed.scale(jnp.ones(())).item() == 32.0
    assert resumed.state_dict() == saved
