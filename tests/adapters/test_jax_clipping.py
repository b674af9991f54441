"""unscale_(max_norm=) on JAX arrays over a mesh: explicit and automatic axes, split and whole, the loss anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from axes_jax import COUNT, P, devices, jax, jnp
from optimizers import Tree
from tiers import later

from gradscale import GradScaler, ShardedGradScaler
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.jax

SCALE = 1024.0
# The row in which a loss and gradients are furthest from each other is for each change.
QUICK = ("Explicit", "split", "device")

# Sums of their squares are exact in any order.
NORM = 13.0 * 8.0
EXACT = [np.full((8, 2), 13.0, np.float32), np.full((4, 12), 13.0, np.float16), np.zeros((), np.float32)]
RANDOM = [np.asarray(np.random.default_rng(0).normal(size=x.shape)).astype(x.dtype) for x in EXACT]


class Beside:
    """A group of ranks with devices of their own: what they send passes through the host, as MPI's does."""

    def __init__(self, collectives: ThreadCollectives):
        self.rank, self.size = collectives.rank, collectives.size
        self._collectives = collectives

    def start_max(self, x, /):
        """Begin the all-reduce of a JAX array; its answer is where the array is."""
        finish = self._collectives.start_max(np.asarray(x))
        return lambda: jax.device_put(finish(), x.sharding)


def step(scaler, grads: Sequence[Any], loss=None, **clip):
    """Make one iteration; return the norm, the clipped gradients and how many steps were made."""
    optimizer = Tree(list(grads))
    scaler.scale(jnp.ones(()) if loss is None else loss)
    norm = scaler.unscale_(optimizer, max_norm=1.0, **clip)
    found = [np.asarray(grad) for grad in optimizer.grads]
    for before, after in zip(grads, optimizer.grads, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
    scaler.step(optimizer)
    scaler.update()
    return float(norm), found, optimizer.steps


def train(scaler, row: tuple[str, str, str], among: Sequence[Any], values: Sequence[Any], **clip):
    """Make a clean iteration and one that overflows, on a row of the table; return what the first one found."""
    kind, spec, loss = row
    over = jax.sharding.Mesh(np.asarray(among), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))

    def placed(x, is_split: bool):
        return jax.device_put(x, jax.sharding.NamedSharding(over, P(*["d"] * (is_split and x.ndim > 0))))

    one = placed(jnp.ones(()), False) if loss == "mesh" else jax.device_put(jnp.ones(()), among[0])
    found = step(scaler, [placed(x * SCALE, spec == "split") for x in values], one, **clip)
    assert found[2] == 1
    _, _, steps = step(scaler, [placed(x * math.nan, spec == "split") for x in values], one, **clip)
    assert (steps, scaler.get_scale()) == (0, SCALE / 2)
    return found[:2]


@pytest.mark.parametrize("norm_over", [None, *later("ranks", "group"), *later("all", "rank")])
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id="-".join(row), marks=[] if row == QUICK else pytest.mark.tier("ranks"))
        for row in itertools.product(("Explicit", "Auto"), ("split", "whole"), ("mesh", "device"))
    ],
)
def test_gradients_over_a_mesh_are_clipped_as_on_one_device_and_by_ranks_alike(
    row: tuple[str, str, str], norm_over: str | None
):
    if jax.__version_info__ < (0, 8) and (row[0], row[2]) == ("Explicit", "device"):
        pytest.skip("JAX 0.7 computes with explicit shardings in a mesh context only")
    if norm_over is None:
        for values, units in ((EXACT, 0), (RANDOM, 0 if row[1] == "whole" else 2)):
            norm, clipped = train(GradScaler(init_scale=SCALE), row, devices(), values)
            expected, wanted, _ = step(GradScaler(init_scale=SCALE), [jnp.asarray(x * SCALE) for x in values])
            assert (values is EXACT) is (expected == NORM)
            # The elements of a mesh are summed in another order.
            assert norm == (pytest.approx(expected, rel=1e-6) if units else expected)
            for mine, other in zip(clipped, wanted, strict=True):
                assert mine.dtype == other.dtype
                np.testing.assert_allclose(mine, other, rtol=units * np.finfo(other.dtype).eps)
        return
    share = COUNT // 2
    # Of norms 3 and 4 times as large, which is 5 times together.
    times, norm = ((3, 4), 5 * NORM) if norm_over == "group" else ((1, 1), NORM)

    def train_rank(collectives: ThreadCollectives):
        scaler, begin = ShardedGradScaler(group=Beside(collectives), init_scale=SCALE), collectives.rank * share
        values = [x * times[collectives.rank] for x in EXACT]
        return values, train(scaler, row, devices()[begin : begin + share], values, norm_over=norm_over)

    for values, (found, clipped) in run_ranks(2, train_rank):
        assert found == norm
        for got, x in zip(clipped, values, strict=True):
            expected = (x.astype(np.float32) * np.float32(1 / (norm + 1e-6))).astype(x.dtype)
            np.testing.assert_allclose(got, expected, rtol=np.finfo(x.dtype).eps)
