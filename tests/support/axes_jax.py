"""JAX with four host devices, and its adapter, for modules of tests that are about nothing else."""

from __future__ import annotations

import importlib
import math
from contextlib import AbstractContextManager

import numpy as np
import pytest
from axes import require

COUNT = 4
"""Host devices, which conftest.py asks for before JAX starts."""

jax = require("jax")
jnp = jax.numpy
gradscale_jax = importlib.import_module("gradscale_jax")
P = jax.sharding.PartitionSpec


def mesh(*names: str, shape: tuple[int, ...] = (COUNT,), kind: str = "Auto"):
    """Return a mesh of host devices with named axes, for ``jax.shard_map`` and ``NamedSharding``."""
    found, count = jax.devices("cpu"), math.prod(shape)
    if len(found) < count:
        pytest.fail(f"{count} host devices are needed, got {len(found)}: JAX was started before tests/conftest.py")
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(names)
    return jax.sharding.Mesh(np.asarray(found[:count]).reshape(shape), names, axis_types=kinds)


def on_mesh(x, *spec, kind: str = "Auto"):
    """Return an array on the devices of the axis ``data``: replicated, or split as a specification says."""
    return jax.device_put(x, jax.sharding.NamedSharding(mesh("data", kind=kind), P(*spec)))


def assert_same_bits(left, right):
    """Compare trees leaf by leaf: structure, dtype, shape, and every bit but the payload of a NaN."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        where = jax.tree_util.keystr(path)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        if a.dtype == jnp.bfloat16:
            a, b = a.astype(np.float32), b.astype(np.float32)
        if a.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(a), np.signbit(b), err_msg=where)
        np.testing.assert_array_equal(a, b, err_msg=where)


def x64_mode(enabled: bool) -> AbstractContextManager[None]:
    """Return a context with or without float64; older JAX has it elsewhere."""
    mode = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    made: AbstractContextManager[None] = mode(enabled)
    return made
