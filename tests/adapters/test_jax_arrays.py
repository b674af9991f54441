"""JaxBackend: the pure core's bits, placement on devices and meshes, float64 on and off, and clipping over meshes."""

from __future__ import annotations

import functools
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from axes_jax import COUNT, P, assert_same_bits, gradscale_jax, jax, jnp, on_mesh, x64_mode
from libraries import opened
from optimizers import Tree
from scenarios import Around
from tiers import later

import gradscale
from gradscale import DynamicScale, GradScaler, InvalidTypeError, ShardedGradScaler, registry
from gradscale.core.summaries import Summary
from gradscale.testing import ThreadCollectives, run_ranks

pytestmark = pytest.mark.jax

BACKEND = registry.get("jax")
WIDTHS = ["float16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64", "float64", "complex128"]


def bits(x):
    """Return an array's bytes, so that NaNs and signed zeros compare."""
    return np.asarray(x).tobytes()


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("name", ["bfloat16", *later("all", *WIDTHS)])
def test_the_adapter_gives_the_pure_cores_bits(name: str):
    with x64_mode(name in ("float64", "complex128")):
        gradscale.testing.check_backend(BACKEND, jnp.zeros(()), dtypes=[jnp.dtype(name)])


# XLA's own maximum drops a NaN of large arrays, and that over devices does, too.
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20, *later("all", 16 << 20)])
@pytest.mark.parametrize("kind", ["alone", *later("ranks", "Auto", "Explicit")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_bad_value_is_found_wherever_it_is(dtype: str, kind: str, size: int):
    # Finite numbers, nothing that a sum of them could hold.
    numbers = np.full(size * (1 if kind == "alone" else COUNT), jnp.finfo(dtype).max, jnp.dtype(dtype))
    numbers[::2] = -numbers[::2]
    place = jnp.asarray if kind == "alone" else functools.partial(on_mesh, kind=kind)
    spread = place if kind == "alone" else lambda x: on_mesh(x, "data", kind=kind)
    clean = place(np.ones(COUNT, dtype))
    state = DynamicScale(init_scale=2.0).init(clean)
    judge = jax.jit(gradscale.unscale)
    assert int(judge([spread(numbers), clean], state)[1]) == 0
    starts = range(0, len(numbers), size)
    for position in {start + offset for start in starts for offset in (0, size // 3, size // 2, size - 1)}:
        for bad in (math.nan, math.inf, -math.inf):
            spoilt = numbers.copy()
            spoilt[position] = bad
            given = spread(spoilt)
            unscaled, nonfinite = judge([given, clean], state)
            assert int(nonfinite) == 1, (position, bad)
            assert unscaled[0].sharding.is_equivalent_to(given.sharding, 1)
            if size <= 1000:
                assert bits(unscaled[0]) == bits(spoilt / spoilt.dtype.type(2.0))


def test_a_state_is_made_where_it_can_meet_the_array():
    spread, last = on_mesh(jnp.ones(COUNT), "data"), jax.device_put(jnp.ones(3).at[1].set(math.nan), jax.devices()[-1])
    free = DynamicScale().init(jnp.ones(()))
    assert not any(field.committed for field in free)
    for like in (spread, last):
        state = DynamicScale().init(like)
        assert all(field.committed and field.devices() == like.devices() for field in state)
        assert all(field.is_fully_replicated for field in state)
        # Nothing is refused for being elsewhere: states, gradients and counts of any placement.
        grads = [spread, last, jnp.full(2, math.inf)]
        for used in (free, state):
            unscaled, nonfinite = gradscale.unscale(grads, used)
            scaled = gradscale.scale(grads, used)
            selected = gradscale.select(nonfinite == 0, unscaled, grads)
            # What is on no chosen device goes where the state is.
            expected = [(grad if grad.committed else used.scale).devices() for grad in grads]
            for arrays in (unscaled, scaled):
                assert [array.devices() for array in arrays] == expected
            for grad, array in zip(grads, selected, strict=True):
                assert array.devices() == grad.devices() or not grad.committed
            new = jax.jit(DynamicScale().update)(used, nonfinite=nonfinite)
            assert int(gradscale.unscale(grads, new)[1]) == int(nonfinite) == 2


@pytest.mark.parametrize("scale", [2.0**127, *later("ranks", 2.0**-126, 1e-37, 3.0, 2.0**16, 2.0**126, 1e38, 3.3e38)])
def test_no_scale_makes_gradients_vanish(scale: float):
    state = gradscale.StaticScale(scale).init(jnp.zeros(()))
    stored = float(state.scale)
    # Numbers that are normal before and after the division.
    values = np.asarray([1.0, -1.5, 1.25, 1.9], dtype=np.float64) * min(stored, 2.0**126)
    grads = [jnp.asarray(values.astype(dtype)) for dtype in (np.float32, np.complex64)]
    expected = values.astype(np.float32).astype(np.float64) / stored
    closed = functools.partial(gradscale.unscale, state=state)
    for run in (closed, jax.jit(closed), lambda grads: jax.jit(gradscale.unscale)(grads, state)):
        unscaled, nonfinite = run(grads)
        assert int(nonfinite) == 0
        for got in unscaled:
            np.testing.assert_allclose(np.asarray(got).real, expected, rtol=2e-7)
            assert np.frexp(stored)[0] != 0.5 or np.asarray(got).real.tolist() == expected.tolist()


def test_float64_is_used_for_factors_exactly_while_it_is_switched_on_and_reports_say_the_scale_of_the_device():
    # float32(1.1) differs from 1.1, and the products from each other.
    policy = DynamicScale(init_scale=7.0, growth_factor=1.1, growth_interval=1)
    expected = {True: float(np.float32(np.float64(7.0) * 1.1)), False: float(np.float32(7.0) * np.float32(1.1))}
    for x64 in (False, True, False, True):
        with x64_mode(x64):
            told: list[float | None] = []
            scaler = GradScaler(policy=policy, on_update=lambda report, told=told: told.append(report.new_scale))
            for bad in (0.0, jnp.inf, 0.0):
                scaler.scale(jnp.ones(()))
                scaler.step(Tree([jnp.ones(3) + bad]))
                scaler.update()
                assert told[-1] == scaler.get_scale()
            assert told[0] == expected[x64]


def test_integers_and_float0_pass_through():
    state = DynamicScale(init_scale=2.0).init(jnp.zeros(()))
    none = np.zeros((3,), dtype=jax.dtypes.float0)
    tree = {"count": jnp.asarray([3]), "none": none, "weights": jnp.asarray([4.0]), "nothing": None}
    for function in (gradscale.unscale, gradscale_jax.unscale):
        unscaled, nonfinite = function(tree, state)
        assert (unscaled["none"] is none, unscaled["nothing"], int(nonfinite)) == (True, None, 0)
        assert (unscaled["count"].tolist(), unscaled["weights"].tolist()) == ([3], [2.0])
    scaler, optimizer = GradScaler(init_scale=2.0), Tree([none, jnp.asarray([4.0])])
    scaler.scale(jnp.ones(()))
    scaler.step(optimizer)
    assert (optimizer.grads[0] is none, optimizer.grads[1].tolist()) == (True, [2.0])
    assert gradscale_jax.select(jnp.asarray(True), [none], [none])[0] is none
    # What a checkpoint brings.
    assert gradscale_jax.scale(2.0, state).item() == 4.0
    for function in (gradscale_jax.unscale, jax.jit(gradscale_jax.unscale)):
        assert float(function({"a": np.ones(1, np.float32), "b": jnp.ones(1)}, state)[0]["a"][0]) == 0.5
    assert isinstance(gradscale_jax.select(jnp.asarray(False), jnp.ones(1), np.zeros(1, np.float32)), jax.Array)


# Summaries: XLA takes subnormals for 0.


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "bfloat16", *WIDTHS[:-2]])
def test_narrow_types_have_their_own_subnormals(name: str):
    with opened("jax"):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        info = ml_dtypes.finfo(dtype)
        values = [float(info.smallest_subnormal), float(info.smallest_normal), float(info.max), 0.0, np.nan]
        found, _ = BACKEND.read_summaries([jnp.asarray(np.array(values).astype(dtype))])
        assert found == [Summary(5, 0, 1, 1, 1, float(info.max))]


def test_arrays_on_several_devices_and_spread_over_them_are_summarized_at_once():
    values = np.array([1.0, np.inf, 0.0, -3.0], np.float32)
    given = [*(jax.device_put(values, where) for where in jax.devices()[:2]), on_mesh(values, "data")]
    found, _ = BACKEND.read_summaries(given)
    assert found == [Summary(4, 1, 0, 1, 0, 3.0)] * 3


def test_a_loss_is_judged_where_grad_differentiates_what_a_scaler_has_scaled():
    scaler, tree = GradScaler(skip=gradscale.SkipSpikes(above=7.0, of="loss")), Tree()
    for target, reason in ((1.0, "stepped"), (3.0, "spike"), (math.inf, "overflow"), (1.0, "stepped")):
        tree.grads = jax.grad(lambda w, target=target: scaler.scale(jnp.sum((w - target) ** 2)))(jnp.zeros(1))
        scaler.step(tree)
        scaler.update()
        assert scaler.last_step(tree).reason == reason
    # By the scale of each moment.
    assert [seen.tolist() for seen in tree.seen] == [[-2.0], [-2.0]]
    with pytest.raises(InvalidTypeError, match=r"needs a value, got .*loss=False"):
        jax.vmap(jax.grad(lambda w: scaler.scale(w)))(jnp.zeros(2))


def test_a_spike_leaves_a_scale_that_a_narrow_loss_cannot_hold():
    options = {"policy": DynamicScale(init_scale=2.0**20), "skip": gradscale.SkipSpikes(above=1.0, of="loss")}
    find = gradscale_jax.value_and_grad(lambda w: jnp.sum(w), **options)
    for value, spikes in ((2.0, True), (0.5, False)):
        weights = jnp.full(1, value, jnp.float16)
        found = find(find.init(weights), weights)
        assert (bool(found.verdict.spike), found.state.scale_state.scale == 2.0**20) == (spikes, spikes)


# unscale_(max_norm=) over a mesh: explicit and automatic axes, split and whole, the loss anywhere.


SCALE = 1024.0
# The row in which a loss and gradients are furthest from each other is for each change.
QUICK = ("Explicit", "split", "device")
# Integers, whose squares have the same sum in any order.
DRAWN = np.random.default_rng(0).integers(-13, 14, 64).astype(np.float32)
VALUES = [DRAWN[:16].reshape(8, 2), DRAWN[16:].reshape(4, 12).astype(np.float16), DRAWN[0]]


class Beside(Around):
    """A group of ranks with devices of their own: what they send passes through the host, as MPI's does."""

    def start_max(self, x, /):
        finish = super().start_max(np.asarray(x))
        return lambda: jax.device_put(finish(), x.sharding)


def clip_once(scaler, grads, loss, **clip):
    """Make one iteration; return the norm, the clipped gradients and how many steps were made."""
    tree = Tree(list(grads))
    scaler.scale(loss)
    norm = scaler.unscale_(tree, max_norm=1.0, **clip)
    found = [np.asarray(grad) for grad in tree.grads]
    for before, after in zip(grads, tree.grads, strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)
    scaler.step(tree)
    scaler.update()
    return float(norm), found, tree.steps


@pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning")
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
    kind, spec, where = row
    if jax.__version_info__ < (0, 8) and (kind, where) == ("Explicit", "device"):
        pytest.skip("JAX 0.7 computes with explicit shardings in a mesh context only")
    # Parts of a group differ, and gradients that each rank holds are the same.
    factors = np.float16({None: [1], "group": [3, 4], "rank": [3, 3]}[norm_over])
    of_ranks = [[x * times for x in VALUES] for times in factors]

    def train(rank: int, scaler, **clip):
        share = COUNT // len(of_ranks)
        among = np.asarray(jax.devices()[rank * share : (rank + 1) * share])
        over = jax.sharding.Mesh(among, ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))

        def placed(x, is_split: bool):
            return jax.device_put(x, jax.sharding.NamedSharding(over, P(*["d"] * (is_split and x.ndim > 0))))

        loss = placed(jnp.ones(()), False) if where == "mesh" else jax.device_put(jnp.ones(()), among[0])
        values = of_ranks[rank]
        grads, bad = ([placed(x * x.dtype.type(by), spec == "split") for x in values] for by in (SCALE, math.nan))
        *found, steps = clip_once(scaler, grads, loss, **clip)
        together = [x for each in of_ranks for x in each] if norm_over == "group" else values
        norm = np.float32(math.sqrt(sum(float((x.astype(float) ** 2).sum()) for x in together)))
        clipped = [np.asarray(x * (np.float32(1.0) / norm), x.dtype) for x in values]
        assert_same_bits(found, [float(norm), clipped])
        assert (steps, clip_once(scaler, bad, loss, **clip)[2], scaler.get_scale()) == (1, 0, SCALE / 2)

    def train_rank(group: ThreadCollectives):
        train(group.rank, ShardedGradScaler(group=Beside(group), init_scale=SCALE), norm_over=norm_over)

    if norm_over is None:
        train(0, GradScaler(init_scale=SCALE))
    else:
        run_ranks(2, train_rank)
