"""unscale_(max_norm=): the global norm and the factor, on every library, alone and over a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from libraries import Library
from numpy.typing import NDArray
from optimizers import Tree

import gradscale
from gradscale import GradScaler, ShardedGradScaler
from gradscale.core import arithmetic
from gradscale.testing import run_ranks

BAD = (math.inf, -math.inf, math.nan)


def expected_clip(stored: Sequence[NDArray[Any]], max_norm: float):
    """Return the norm of unscaled arrays and the clipped arrays: the norm in float64, each product rounded once."""
    norm = math.sqrt(sum(float(np.sum(np.square(np.abs(x.astype(np.complex128))))) for x in stored))
    factor = np.float32(min(1.0, max_norm / (norm + 1e-6)))
    return norm, [(x.astype(np.result_type(x, np.float32)) * factor).astype(x.dtype) for x in stored]


def ready(arrays: Library, scale: float = 8.0, **options) -> GradScaler:
    """Return a scaler that has scaled a loss."""
    scaler = GradScaler(init_scale=scale, **options)
    scaler.scale(arrays.asarray(1.0))
    return scaler


def test_gradients_of_each_dtype_are_clipped_to_the_norm_of_all_together(arrays: Library):
    for dtype in (*arrays.reals, "complex64"):
        parts = 1j if dtype == "complex64" else 1
        values = [np.array([3.0, -4.0, 0.5]) * parts, np.array(12.0), np.zeros((0, 2)), np.array([[1.0], [-0.0]])]
        optimizer = Tree([arrays.asarray(8 * x if x.size == 0 else (8 * x).tolist(), dtype) for x in values])
        wanted, clipped = expected_clip([arrays.to_numpy(x) / 8 for x in optimizer.grads], 2.0)
        scaler = ready(arrays)
        norm = scaler.unscale_(optimizer, max_norm=2.0)
        arrays.assert_is_mine(norm)
        assert arrays.item(norm) == pytest.approx(wanted, rel=1e-6)
        if "bfloat16" not in dtype:
            for got, want in zip(optimizer.grads, clipped, strict=True):
                arrays.assert_array(got, want, dtype)
        scaler.step(optimizer)
        assert optimizer.steps == 1


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_skips_the_step_and_clips_nothing(arrays: Library, value: float, place: int):
    optimizer = Tree([arrays.asarray([8.0]), arrays.asarray([8.0])])
    optimizer.grads[place] = arrays.asarray([value])
    scaler = ready(arrays)
    norm = scaler.unscale_(optimizer, max_norm=1e-3)
    assert not math.isfinite(arrays.item(norm))
    arrays.assert_array(optimizer.grads[1 - place], [1.0])
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.steps, scaler.get_scale()) == (0, 4.0)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_norm_that_overflows_and_a_factor_that_loses_bits_are_overflows_of_finite_gradients(arrays: Library):
    for huge in (1e200, 1e40):
        optimizer = Tree([arrays.asarray([huge], "float64")])
        scaler = ready(arrays)
        assert arrays.item(scaler.unscale_(optimizer, max_norm=1.0)) == math.inf
        arrays.assert_array(optimizer.grads[0], [huge / 8], "float64")
        scaler.step(optimizer)
        assert (optimizer.steps, scaler.last_step(optimizer).nonfinite) == (0, 1)
    optimizer = Tree([arrays.asarray([8e37])])
    scaler = ready(arrays)
    scaler.unscale_(optimizer, max_norm=1e-2)
    scaler.step(optimizer)
    assert optimizer.steps == 0


def test_masters_are_clipped_in_their_own_dtype(arrays: Library):
    for half in arrays.halves:
        optimizer = Tree([arrays.asarray([24.0, 32.0], half)])
        optimizer.master_dtype = arrays.dtype("float32")  # type: ignore[attr-defined]
        arrays.assert_array(ready(arrays).unscale_(optimizer, max_norm=1.0), 5.0)
        factor = np.float32(1.0 / (5.0 + 1e-6))
        arrays.assert_array(optimizer.grads[0], np.array([3.0, 4.0], np.float32) * factor)


def test_a_disabled_scaler_clips_and_divides_by_nothing(arrays: Library):
    optimizer = Tree([arrays.asarray([3.0, 4.0]) * arrays.asarray(1.0)])
    scaler = GradScaler(enabled=False)
    assert scaler.unscale_(optimizer) is None
    arrays.assert_array(scaler.unscale_(optimizer, max_norm=1.0), 5.0)
    arrays.assert_array(optimizer.grads[0], np.array([3.0, 4.0], np.float32) * np.float32(1 / (5 + 1e-6)))
    assert scaler.unscale_(Tree([]), max_norm=1.0) is None
    for half in arrays.halves:
        optimizer = Tree([arrays.asarray([3.0, 4.0], half)])
        optimizer.master_dtype = arrays.dtype("float32")  # type: ignore[attr-defined]
        arrays.assert_array(scaler.unscale_(optimizer, max_norm=1.0), 5.0)
        assert optimizer.grads[0].dtype == arrays.dtype(half)


@pytest.mark.numpy
@pytest.mark.parametrize("enabled", [True, False])
def test_ranks_that_clip_say_whose_norm_it_is_with_a_disabled_scaler_too(enabled: bool):
    def rank(group):
        scaler, optimizer = gradscale.ShardedGradScaler(group=group, enabled=enabled), Tree()
        optimizer.grads = [scaler.scale(np.float32([3.0, 4.0]))]
        with pytest.raises(gradscale.InvalidValueError, match="needs norm_over="):
            scaler.unscale_(optimizer, max_norm=1.0)
        return float(scaler.unscale_(optimizer, max_norm=1.0, norm_over="rank"))

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


def test_the_sum_of_no_arrays_is_zero_and_that_of_subnormals_is_not(arrays: Library):
    like = arrays.asarray(1.0)
    assert arrays.item(gradscale.core.arithmetic.sum_of_squares([], like)) == 0.0
    tiny = gradscale.core.arithmetic.sum_of_squares([arrays.asarray([2.0**-500], "float64")], like)
    assert arrays.item(tiny) == 2.0**-1000


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
