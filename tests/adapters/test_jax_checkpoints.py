"""ScaleState as a pytree: every field survives what JAX users save and transform their states with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import require_jax

from gradscale import DynamicScale, GradScaler, ScaleState

pytestmark = pytest.mark.jax

NUMBERS = (2.0**9, 3, 2, 7)


@pytest.fixture
def state() -> Any:
    """Return a state with no field at its default."""
    jnp = require_jax().numpy
    return ScaleState(
        jnp.asarray(NUMBERS[0], dtype=jnp.float32), *(jnp.asarray(n, dtype=jnp.int32) for n in NUMBERS[1:])
    )


def through_tree_map(state: Any, _folder: Path) -> Any:
    return require_jax().tree.map(lambda x: x, state)


def through_leaves(state: Any, _folder: Path) -> Any:
    jax = require_jax()
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, leaves)


def through_jit(state: Any, _folder: Path) -> Any:
    return require_jax().jit(lambda state: state)(state)


def through_scan(state: Any, _folder: Path) -> Any:
    return require_jax().lax.scan(lambda state, _: (state, None), state, length=3)[0]


def through_vmap(state: Any, _folder: Path) -> Any:
    jax = require_jax()
    stacked = jax.tree.map(lambda x: jax.numpy.stack([x, x]), state)
    return jax.tree.map(lambda x: x[1], jax.vmap(lambda state: state)(stacked))


def through_cond(state: Any, _folder: Path) -> Any:
    jax = require_jax()
    return jax.jit(lambda state: jax.lax.cond(state.scale > 1, lambda s: s, lambda s: s, state))(state)


def through_device_get(state: Any, _folder: Path) -> Any:
    jax = require_jax()
    return jax.device_put(jax.device_get(state))


def through_pickle(state: Any, _folder: Path) -> Any:
    return pickle.loads(pickle.dumps(state))


def through_npz(state: Any, folder: Path) -> Any:
    np.savez(folder / "state.npz", **state._asdict())
    with np.load(folder / "state.npz") as loaded:
        return ScaleState(**{name: require_jax().numpy.asarray(loaded[name]) for name in ScaleState._fields})


def through_msgpack(state: Any, _folder: Path) -> Any:
    require("flax")
    import msgpack

    packed = msgpack.packb({name: np.asarray(field).tobytes() for name, field in state._asdict().items()})
    fields = msgpack.unpackb(packed)
    dtypes = dict.fromkeys(ScaleState._fields, np.int32) | {"scale": np.float32}
    jnp = require_jax().numpy
    return ScaleState(
        **{name: jnp.asarray(np.frombuffer(fields[name], dtypes[name])[0]) for name in ScaleState._fields}
    )


def through_flax_bytes(state: Any, _folder: Path) -> Any:
    serialization = require("flax").serialization
    restored = serialization.from_bytes(DynamicScale().init(state.scale), serialization.to_bytes(state))
    return require_jax().tree.map(require_jax().numpy.asarray, restored)


def through_flax_state_dict(state: Any, _folder: Path) -> Any:
    serialization = require("flax").serialization
    return serialization.from_state_dict(DynamicScale().init(state.scale), serialization.to_state_dict(state))


def through_orbax(state: Any, folder: Path) -> Any:
    checkpoint = require("orbax")
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"scaler": state})
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", {"scaler": DynamicScale().init(state.scale)})["scaler"]


WAYS: list[Callable[[Any, Path], Any]] = [
    through_tree_map,
    through_leaves,
    through_jit,
    through_scan,
    through_vmap,
    through_cond,
    through_device_get,
    through_pickle,
    through_npz,
    through_msgpack,
    through_flax_bytes,
    through_flax_state_dict,
    through_orbax,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("through_"))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sharding info not provided:UserWarning")
def test_every_field_survives(state: Any, tmp_path: Path, way: Callable[[Any, Path], Any]) -> None:
    got = way(state, tmp_path)
    assert type(got) is ScaleState
    for name, field, expected in zip(ScaleState._fields, got, NUMBERS, strict=True):
        assert isinstance(field, require_jax().Array), name
        assert (field.shape, str(field.dtype)) == ((), "float32" if name == "scale" else "int32"), name
        assert not field.weak_type, name
        assert field.item() == expected, name
    # And it goes on as if nothing had happened.
    policy = DynamicScale(hysteresis=4, growth_interval=4, hysteresis_refill=("backoff",))
    nonfinite = require_jax().numpy.zeros((), dtype="int32")
    assert [x.item() for x in policy.update(got, nonfinite=nonfinite)] == [
        x.item() for x in policy.update(state, nonfinite=nonfinite)
    ]


def test_a_scalers_state_dict_goes_between_jax_and_others() -> None:
    jnp = require_jax().numpy
    scalers = {"jax": GradScaler(init_scale=2.0**7), "numpy": GradScaler(init_scale=2.0**7)}
    for scaler, like in zip(scalers.values(), (jnp.ones(()), np.ones((), dtype=np.float32)), strict=True):
        scaler.scale(like)
    assert scalers["jax"].state_dict() == scalers["numpy"].state_dict()
    saved = scalers["numpy"].state_dict() | {"scale": 32.0, "_growth_tracker": 5}
    resumed = GradScaler()
    resumed.load_state_dict(saved)
    assert resumed.scale(jnp.ones(())).item() == 32.0
    assert resumed.state_dict() == saved
    assert pickle.loads(pickle.dumps(GradScaler(init_scale=4.0))).scale(jnp.ones(())).item() == 4.0
