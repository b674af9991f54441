"""Why no verdict here is a maximum: XLA's drops NaNs of large arrays and between devices; ours finds each, anywhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from axes import require
from jax_devices import require_mesh

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

SIZE = 16 << 20
POSITIONS = {"first": 0, "odd": 7654321, "middle": SIZE // 2, "last": SIZE - 1}
BAD = [math.nan, math.inf, -math.inf]


@pytest.fixture
def jax() -> Any:
    return require("jax")


@pytest.fixture
def judge(jax: Any) -> Any:
    from gradscale_jax.arrays import count_nonfinite

    return jax.jit(lambda x: count_nonfinite([x]))


def skip_where_kept(jax: Any, largest: float) -> None:
    """Skip with the version where XLA's maximum keeps a NaN."""
    if not math.isfinite(largest):
        pytest.skip(f"jaxlib {jax.lib.__version__} on {jax.default_backend()} keeps a NaN in this maximum")


def test_a_maximum_drops_the_nan_of_a_large_array(jax: Any) -> None:
    x = np.ones(SIZE, np.float32)
    x[POSITIONS["odd"]] = math.nan
    largest = float(jax.jit(lambda x: jax.numpy.max(jax.numpy.abs(x)))(x))
    skip_where_kept(jax, largest)
    assert largest == 1.0


def test_a_maximum_over_devices_drops_nans(jax: Any) -> None:
    mesh = require_mesh("data")
    spec = jax.sharding.PartitionSpec("data")
    pmax = jax.shard_map(lambda x: jax.lax.pmax(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    largest = jax.jit(pmax)(np.asarray([1.0, math.nan, 2.0, 0.0], np.float32))
    skip_where_kept(jax, float(largest[0]))
    assert largest.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ours_finds_a_bad_value_at_any_position(jax: Any, judge: Any, dtype: str) -> None:
    numbers = np.ones(SIZE, jax.numpy.dtype(dtype))
    # Finite, and nothing that a sum of them could hold.
    numbers[1::2] = -jax.numpy.finfo(dtype).max
    numbers[2::2] = jax.numpy.finfo(dtype).max
    assert int(judge(numbers)) == 0
    for name, position in POSITIONS.items():
        for bad in BAD:
            before = numbers[position]
            numbers[position] = bad
            assert int(judge(numbers.copy())) == 1, (name, bad)
            numbers[position] = before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ours_finds_a_bad_value_on_any_device(jax: Any, judge: Any, dtype: str) -> None:
    mesh = require_mesh("data")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    numbers = np.ones(SIZE // 4, jax.numpy.dtype(dtype))
    share = numbers.size // 4
    assert int(judge(jax.device_put(numbers.copy(), sharding))) == 0
    for device in range(4):
        for offset in (0, share // 3, share - 1):
            for bad in BAD:
                numbers[device * share + offset] = bad
                given = jax.device_put(numbers.copy(), sharding)
                assert len(given.sharding.device_set) == 4
                assert int(judge(given)) == 1, (device, offset, bad)
                numbers[device * share + offset] = 1.0
