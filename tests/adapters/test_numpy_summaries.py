"""What NumPy's adapter counts: any layout, byte order and type, as a plain model does."""

from __future__ import annotations

import random

import numpy as np
import pytest
from diagnoses import SHAPES, draw, summary_of
from exactness import LAYOUTS
from tiers import examples

from gradscale.core.backend import Backend
from gradscale.core.summaries import Summary
from gradscale_numpy import NumpyBackend

pytestmark = [
    pytest.mark.numpy,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
KINDS = ("float16", "float32", "float64", "complex64", "complex128", "bfloat16")
KINDS += ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz")


def summaries(*arrays):
    return NumpyBackend().read_summaries(arrays)[0]


def test_the_numbers_are_the_models_in_any_layout_and_byte_order():
    chance = random.Random(0)
    for _ in range(examples(3000)):
        x = draw(chance, chance.choice(KINDS), chance.choice(SHAPES), chance.random() < 0.4)
        views = [x, x.astype(x.dtype.newbyteorder(">")), *(layout(x) for layout in LAYOUTS if x.ndim == 2)]
        assert summaries(*views) == [summary_of(x)] * len(views), (x, x.dtype)


def test_long_doubles_are_counted():
    array = np.array([0, -0.0, np.inf, np.nan, 1.5, np.finfo(np.longdouble).smallest_subnormal], np.longdouble)
    assert summaries(array) == Backend().read_summaries([array])[0] == [Summary(6, 1, 1, 2, 1, 1.5)]


def test_arrays_of_several_blocks_are_counted_whole():
    for dtype in (np.float16, np.float32, np.complex64):
        x = np.ones((3, 50_000), dtype)
        x[0, 0], x[1, 5], x[2, -1], x[2, :9] = np.nan, np.inf, -7, 0
        expected = Summary(150_000, 1, 1, 9, 0, 7.0)
        assert summaries(x, x.T, x[:, ::-1], np.asfortranarray(x)) == [expected] * 4
    nan = np.full(100_000, np.nan, np.float32)
    assert summaries(nan, np.float32(2)) == [Summary(100_000, 0, 100_000), Summary(1, largest=2.0)]
