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
AXES = ("Explicit", "Auto")
SPECS = ("split", "whole")
LOSSES = ("mesh", "device")
# The row in which a loss and gradients are furthest from each other is for each change.
QUICK = ("Explicit", "split", "device")
TABLE = [
    pytest.param(row, id="-".join(row), marks=[] if row == QUICK else pytest.mark.tier("ranks"))
    for row in itertools.product(AXES, SPECS, LOSSES)
]

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


def placed(x, over, spec: str):
    """Return an array split over the mesh by its first axis, or whole on each device."""
    axes = ("d",) if spec == "split" and x.ndim else ()
    return jax.device_put(x, jax.sharding.NamedSharding(over, P(*axes)))


def step(scaler, grads: Sequence[Any], loss, **clip):
    """Make one iteration; return the norm, the clipped gradients and how many steps were made."""
    optimizer = Tree(list(grads))
    scaler.scale(loss)
    norm = scaler.unscale_(optimizer, **clip)
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
    scaled = jnp.ones(())
    one = placed(scaled, over, "whole") if loss == "mesh" else jax.device_put(scaled, among[0])
    found = step(scaler, [placed(x * SCALE, over, spec) for x in values], one, max_norm=1.0, **clip)
    assert found[2] == 1
    _, _, steps = step(scaler, [placed(x * math.nan, over, spec) for x in values], one, max_norm=1.0, **clip)
    assert (steps, scaler.get_scale()) == (0, SCALE / 2)
    return found


def leave_out_explicit(row: tuple[str, str, str]):
    """Skip a row that JAX 0.7 refuses."""
    if jax.__version_info__ < (0, 8) and (row[0], row[2]) == ("Explicit", "device"):
        pytest.skip("JAX 0.7 computes with explicit shardings in a mesh context only")


def alone(values: Sequence[Any]):
    """Return what a scaler of one device finds."""
    grads = [jnp.asarray(x * SCALE) for x in values]
    return step(GradScaler(init_scale=SCALE), grads, jnp.ones(()), max_norm=1.0)


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    for mine, other in zip(got[1], wanted[1], strict=True):
        np.testing.assert_array_equal(mine, other, strict=True)


@pytest.mark.parametrize("row", TABLE)
def test_gradients_over_a_mesh_are_clipped_as_on_one_device(row: tuple[str, str, str]):
    leave_out_explicit(row)
    got = train(GradScaler(init_scale=SCALE), row, devices(), EXACT)
    assert got[0] == NORM
    assert_same(got, alone(EXACT))
    got, wanted = train(GradScaler(init_scale=SCALE), row, devices(), RANDOM), alone(RANDOM)
    if row[1] == "whole":
        assert_same(got, wanted)
    # The elements of a mesh are summed in another order.
    assert got[0] == pytest.approx(wanted[0], rel=1e-6)
    for mine, other in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(mine, other, rtol=2 * np.finfo(other.dtype).eps)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("norm_over", ["group", *later("all", "rank")])
@pytest.mark.parametrize("row", TABLE)
def test_ranks_clip_gradients_over_a_mesh_of_their_own_alike(row: tuple[str, str, str], norm_over: str):
    leave_out_explicit(row)
    share = COUNT // 2
    # Of norms 3 and 4 times as large, which is 5 times together.
    times, norm = ((3, 4), 5 * NORM) if norm_over == "group" else ((1, 1), NORM)

    def train_rank(collectives: ThreadCollectives):
        rank = collectives.rank
        values = [x * times[rank] for x in EXACT]
        scaler = ShardedGradScaler(group=Beside(collectives), init_scale=SCALE)
        found = train(scaler, row, devices()[rank * share : (rank + 1) * share], values, norm_over=norm_over)
        return values, found

    for values, (found, clipped, _) in run_ranks(2, train_rank):
        assert found == norm
        for got, x in zip(clipped, values, strict=True):
            expected = (x.astype(np.float32) * np.float32(1 / (norm + 1e-6))).astype(x.dtype)
            np.testing.assert_allclose(got, expected, rtol=np.finfo(x.dtype).eps)
