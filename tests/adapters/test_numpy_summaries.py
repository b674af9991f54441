"""What NumPy's adapter counts: any layout, byte order and type, to the oracle's numbers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exactness import LAYOUTS, bit_patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples

from gradscale.core.backend import Backend
from gradscale.core.summaries import Summary
from gradscale_numpy import NumpyBackend

pytestmark = [
    pytest.mark.numpy,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]

KINDS = [np.dtype(name) for name in ("float16", "float32", "float64", "longdouble", "complex64", "complex128", ">f4")]
KINDS += [np.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn)]
KINDS += [np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(">c8"), np.dtype(ml_dtypes.bfloat16).newbyteorder(">")]


@pytest.fixture
def backend() -> NumpyBackend:
    return NumpyBackend()


def summaries(backend, *arrays):
    return backend.read_summaries(arrays)[0]


def native(array):
    return array.astype(array.dtype.newbyteorder("="))


@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: dtype.name + "-swapped" * (not dtype.isnative))
def test_the_numbers_are_those_of_the_pure_form(backend: NumpyBackend, dtype: np.dtype[Any]):
    if dtype.name == "longdouble" or (dtype.itemsize > 8 and dtype.kind == "f"):
        array = np.array([0, -0.0, np.inf, np.nan, 1.5, np.finfo(dtype).smallest_subnormal], dtype)
        assert summaries(backend, array) == summaries(Backend(), array)
        assert summaries(backend, array) == [Summary(6, 1, 1, 2, 1, 1.5)]
        return

    @settings(max_examples=examples(40))
    @given(bit_patterns(dtype.newbyteorder("="), (0, 1, 12, 24)), st.sampled_from(LAYOUTS))
    def check(drawn, layout):
        swapped = drawn if dtype.isnative else drawn.astype(dtype)
        array = layout(swapped.reshape(2, -1)) if drawn.size > 1 else swapped
        assert summaries(backend, array) == summaries(Backend(), native(array))

    check()


def test_arrays_of_several_blocks_are_counted_whole(backend: NumpyBackend):
    for dtype in (np.float16, np.float32, np.complex64):
        x = np.ones((3, 50_000), dtype)
        x[0, 0], x[1, 5], x[2, -1], x[2, :9] = np.nan, np.inf, -7, 0
        expected = [Summary(150_000, 1, 1, 9, 0, 7.0)]
        for given_array in (x, x.T, x[:, ::-1], np.asfortranarray(x)):
            assert summaries(backend, given_array) == expected


def test_whole_blocks_of_nan_and_scalars(backend: NumpyBackend):
    bad = np.full(100_000, np.nan, np.float32)
    assert summaries(backend, bad, np.float32(2), np.zeros((2, 0))) == [
        Summary(100_000, 0, 100_000, 0, 0, 0.0),
        Summary(1, 0, 0, 0, 0, 2.0),
        Summary(0, 0, 0, 0, 0, 0.0),
    ]
