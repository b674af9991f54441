"""unscale_(max_norm=): the global norm and the factor, on every library, alone and over a group."""

import collections
import math
import random

import numpy as np
import pytest
from libraries import REALS, Library
from optimizers import Tree
from tiers import examples

import gradscale
from gradscale import GradScaler, ShardedGradScaler
from gradscale.core import arithmetic
from gradscale.testing import run_ranks

VALUES = (3.0, -4.0, 0.5, 12.0, -0.0)
UNUSUAL = (1e200, 1e39, 4e37, math.inf, -math.inf, math.nan)


@pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_any_gradients_are_clipped_to_the_norm_of_all_together_and_an_overflow_clips_nothing(arrays: Library):
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(examples(100 if arrays.is_slow else 250)):
        chance = random.Random(seed)
        is_enabled, max_norm = chance.random() < 0.8, chance.choice([2.0, 2.0, 100.0, 1e-2, 0.0])
        optimizer, master, stored = Tree([]), chance.choice([None, None, *REALS]), []
        for _ in range(chance.randint(1, 4)):
            dtype, shape = chance.choice([*arrays.reals, "complex64"]), chance.choice([(3,), (), (0, 2), (2, 1)])
            values = [chance.choice(VALUES) for _ in range(math.prod(shape))]
            if values and chance.random() < 0.2:
                values[-1] = chance.choice(UNUSUAL)
            parts = 1j if dtype == "complex64" else 1.0
            x = arrays.asarray((np.reshape(values, shape) * parts * (8.0 if is_enabled else 1.0)).tolist(), dtype)
            optimizer.grads.append(arrays.xp.reshape(x, shape))
            kept = master if is_enabled and master and dtype in arrays.reals else dtype
            wide = kept if kept in (*REALS, "complex64") else "float32"
            x = arrays.to_numpy(optimizer.grads[-1])
            stored.append((kept, wide, (x / x.dtype.type(8.0) if is_enabled else x).astype(wide)))
        optimizer.master_dtype = arrays.dtype(master) if master else None  # type: ignore[attr-defined]
        scaler = GradScaler(init_scale=8.0, enabled=is_enabled)
        scaler.scale(arrays.asarray(1.0))
        found = scaler.unscale_(optimizer, max_norm=max_norm)
        norm = math.sqrt(sum(float(np.sum(np.abs(x.astype(np.complex128)) ** 2)) for _, _, x in stored))
        is_finite = bool(np.isfinite(np.float32(norm)))
        factor = min(1.0, max_norm / (norm + 1e-6)) if is_finite else 1.0
        is_lost = 0.0 < factor < 2.0**-126
        arrays.assert_is_mine(found)
        assert found.dtype == arrays.dtype("float32")
        if is_finite:
            assert arrays.item(found) == pytest.approx(norm, rel=1e-6)
        else:
            assert not math.isfinite(arrays.item(found))
        for grad, (kept, wide, x) in zip(optimizer.grads, stored, strict=True) if not is_lost else ():
            clipped = arrays.xp.astype(arrays.asarray(x * np.float32(factor), wide), arrays.dtype(kept))
            if np.isfinite(x).all():
                arrays.assert_array(grad, arrays.to_numpy(clipped), kept)
        assert scaler.step(optimizer) == ("stepped" if (is_finite and not is_lost) or not is_enabled else None)
        counts["lost" if is_lost else "clipped" if factor < 1.0 else "finite" if is_finite else "overflow"] += 1
    assert len(counts) == 4


@pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("is_enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("max_norm", [2.0, 1e6], ids=["clips", "is above"])
def test_a_step_clips_as_unscale_does_and_says_the_norm(arrays: Library, max_norm: float, is_enabled: bool):
    for dtype in arrays.reals:
        for bad in (1.0, math.inf):
            ended = []
            for own, given in (({}, {"max_norm": max_norm}), ({"max_norm": max_norm}, {})):
                scaler = GradScaler(init_scale=8.0, enabled=is_enabled, **own)
                scaler.scale(arrays.asarray(1.0))
                optimizer = Tree([arrays.asarray(x, dtype) for x in ([24.0, -32.0], [4.0 * bad])])
                if given:
                    norm = scaler.unscale_(optimizer, **given)
                made = scaler.step(optimizer)
                ended.append((made, [arrays.to_numpy(x).tobytes() for x in optimizer.grads]))
            report = scaler.last_step(optimizer)
            assert ended[0] == ended[1] or not math.isfinite(bad)
            assert report.skipped is (is_enabled and not math.isfinite(bad))
            if is_enabled:
                assert report.norm == (arrays.item(norm) if bad == 1.0 else math.inf)


@pytest.mark.numpy
def test_a_disabled_scaler_that_clips_refuses_a_closure():
    optimizer, scaler = Tree([np.float32([3.0, 4.0])]), GradScaler(enabled=False, max_norm=1.0)
    for call in (lambda: scaler.step(optimizer, lambda: None), lambda: scaler.step(optimizer, closure=lambda: None)):
        with pytest.raises(gradscale.InvalidValueError, match="got a closure: clip in the closure itself"):
            call()
    assert (optimizer.grads[0].tolist(), optimizer.steps) == ([3.0, 4.0], 0)


@pytest.mark.numpy
@pytest.mark.parametrize("enabled", [True, False])
def test_ranks_that_do_not_say_otherwise_clip_by_their_own_norm_with_a_disabled_scaler_too(enabled: bool):
    def rank(group):
        scaler, optimizer = gradscale.ShardedGradScaler(group=group, enabled=enabled), Tree()
        optimizer.grads = [scaler.scale(np.float32([3.0, 4.0]))]
        return float(scaler.unscale_(optimizer, max_norm=1.0))

    assert run_ranks(2, rank) == [5.0, 5.0]


@pytest.mark.numpy
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("bad_ranks", [[0], [1], [0, 1]], ids=str)
def test_a_norm_that_overflows_alone_is_an_overflow_of_the_ranks_whose_parts_do(bad_ranks: list[int]):
    def train(group) -> tuple[int, int, int | None]:
        scaler = ShardedGradScaler(group=group, init_scale=1.0)
        scaler.scale(np.float32(1.0))
        # The norm of a part is too large if one rank has it, and only that of both if each has one.
        part = [3e38] * (3 - len(bad_ranks)) if group.rank in bad_ranks else [1.0]
        optimizer = Tree([np.float32(part)])
        scaler.unscale_(optimizer, max_norm=1.0, norm_over="group")
        scaler.step(optimizer)
        report = scaler.last_step(optimizer)
        return report.nonfinite, report.local_nonfinite, report.by

    assert run_ranks(2, train) == [(1, int(rank in bad_ranks), bad_ranks[0]) for rank in range(2)]


# What clips or is judged, of a scaler and in which call, by the value of each rank; one rank alone may give it.
@pytest.mark.numpy
@pytest.mark.parametrize("how", ["constructor", "unscale_", "norm", "loss", "lone norm", "lone loss"])
@pytest.mark.parametrize("bad_rank", range(3))
def test_an_overflow_of_one_rank_beside_norms_that_differ_is_one_of_all_and_no_difference(bad_rank: int, how: str):
    def train(group) -> tuple[str, int | None, float]:
        clip = {"max_norm": 9.0, "norm_over": "rank"}
        scaler = ShardedGradScaler(group=group, init_scale=1.0, **clip if how == "constructor" else {})
        value = math.inf if group.rank == bad_rank else 1.0 + group.rank
        scaler.scale(np.float32(1.0))
        optimizer = Tree([np.float32([value])])
        if how == "unscale_":
            scaler.unscale_(optimizer, **clip)
        elif "norm" in how:
            scaler.unscale_(optimizer)
        is_given = how in ("norm", "loss") or ("lone" in how and group.rank == (bad_rank + 1) % 3)
        # The loss of the rank that overflows is fine.
        inputs = {"norm": value} if "norm" in how else {"loss": 1.0 + group.rank}
        scaler.step(optimizer, **inputs if is_given else {})
        scaler.update()
        report = scaler.last_step(optimizer)
        return report.reason, report.by, scaler.get_scale()

    assert run_ranks(3, train) == [("overflow", bad_rank, 0.5)] * 3


@pytest.mark.parametrize("total", [0.0, 1e-30, 1.0, 1.7, 3e20, 3.4e38, 1e40, math.inf, math.nan])
def test_a_norm_that_the_host_has_clips_alike_in_every_library(arrays: Library, total: float):
    like, flag = arrays.asarray(1.0), arrays.asarray(0, "int32")
    norm, factor, overflows = arithmetic.clip_factor_of(total, 1.5, like, flag)
    wanted = np.float32(min(1.0, 1.5 / (total + 1e-6))) if total <= 3.4e38 else np.float32(1.0)
    is_lost = 0.0 < wanted < 2.0**-126
    # JAX 0.7 makes no subnormal constants.
    if not is_lost or arrays.item(arrays.xp.full_like(like, 2.0**-130)):
        arrays.assert_array(factor, wanted)
    arrays.assert_array(norm, np.float32(min(total, math.inf)) if total < 1e39 or math.isnan(total) else math.inf)
    arrays.assert_array(overflows, int(is_lost or not total <= 3.4e38), "int32")
