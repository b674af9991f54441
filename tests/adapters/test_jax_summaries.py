"""What JAX's adapter counts: subnormals, which XLA takes for 0, narrow types, arrays spread over devices."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from jax_devices import require_jax
from libraries import opened

from gradscale import registry
from gradscale.core.summaries import Summary

pytestmark = pytest.mark.jax


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "bfloat16", "float16", "float32"])
def test_narrow_types_have_their_own_subnormals(name: str) -> None:
    with opened("jax") as arrays:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        info = ml_dtypes.finfo(dtype)
        values = [float(info.smallest_subnormal), float(info.smallest_normal), float(info.max), 0.0, np.nan]
        x = arrays.xp.asarray(np.array(values).astype(dtype))
        found, _ = registry.backend_for(x).read_summaries([x])
        assert found == [Summary(5, 0, 1, 1, 1, float(info.max))]


def test_arrays_on_several_devices_and_spread_over_them_are_read_at_once() -> None:
    jax = require_jax()
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = jax.devices()[:2]
    assert len(devices) == 2
    spread = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    values = np.array([1.0, np.inf, 0.0, -3.0], np.float32)
    given = [jax.device_put(values, where) for where in (*devices, spread)]
    found, _ = registry.backend_for(given[0]).read_summaries(given)
    assert found == [Summary(4, 1, 0, 1, 0, 3.0)] * 3
