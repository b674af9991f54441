"""What is counted in an array, against the bits of the same array in NumPy; on every library, adapter and pure form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from axes import require
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library
from tiers import examples

from gradscale import registry
from gradscale.core import summaries
from gradscale.core.backend import Backend
from gradscale.core.summaries import Summary

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3))


def numpy_dtype(name: str):
    return np.dtype(require("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def oracle(array) -> Summary:
    """Return what a NumPy array holds, element by element, judged by the fields of their bits."""
    part = np.zeros((), array.dtype).real.dtype
    fraction_bits = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[part.name]
    exponent_bits = 8 * part.itemsize - 1 - fraction_bits
    inf = nan = zeros = subnormals = 0
    largest = 0.0
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{part.itemsize}")
    for element in words.reshape(array.size, -1).tolist() if array.size else []:
        kinds = []
        for word in element:
            exponent = word >> fraction_bits & ((1 << exponent_bits) - 1)
            fraction = word & ((1 << fraction_bits) - 1)
            if exponent == (1 << exponent_bits) - 1:
                kinds.append("nan" if fraction else "inf")
                continue
            kinds.append("normal" if exponent else "subnormal" if fraction else "zero")
            bias = (1 << exponent_bits - 1) - 1 + fraction_bits
            mantissa = fraction + ((1 << fraction_bits) if exponent else 0)
            largest = max(largest, math.ldexp(mantissa, max(exponent, 1) - bias))
        worst = next(kind for kind in ("nan", "inf", "subnormal", "normal", "zero") if kind in kinds)
        inf += worst == "inf"
        nan += worst == "nan"
        subnormals += worst == "subnormal"
        zeros += worst == "zero"
    return Summary(array.size, inf, nan, zeros, subnormals, largest)


def patterns(name: str):
    """Return a strategy for arrays of any bits, with the special values of the type often among them."""
    dtype = numpy_dtype(name)
    part = np.zeros((), dtype).real.dtype
    info = (require("ml_dtypes") if name == "bfloat16" else np).finfo(part)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.0]
    special += [sign * float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal) for sign in (1, -1)]
    word = np.dtype(f"u{part.itemsize}")
    values = [int(bits) for bits in np.array(special).astype(part).view(word)]

    def build(shape: tuple[int, ...], words: list[int]):
        count = math.prod(shape) * (dtype.itemsize // part.itemsize)
        return np.resize(np.array(words, word), count).view(dtype).reshape(shape)

    any_word = st.one_of(st.sampled_from(values), st.integers(0, int(np.iinfo(word).max)))
    return st.builds(build, st.sampled_from(SHAPES), st.lists(any_word, min_size=1, max_size=15))


def summarize(backend, *arrays) -> list[Summary]:
    return backend.read_summaries(arrays)[0]


def into(arrays: Library, given):
    """Return a NumPy array in a library, every bit of it: some conversions of theirs take subnormals for 0."""
    if not arrays.name.startswith("torch"):
        return arrays.xp.asarray(given.copy())
    import torch

    if given.dtype.name == "bfloat16":
        return torch.tensor(given.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(given.copy())


@pytest.mark.parametrize("is_pure", [False, True], ids=["adapter", "pure form"])
@pytest.mark.parametrize("name", DTYPES)
def test_counts_and_magnitude_are_those_of_the_bits(arrays: Library, name: str, is_pure: bool):
    if name in ("float16", "bfloat16") and name not in arrays.halves:
        pytest.skip(f"{arrays.name} has no {name}")
    backend = Backend() if is_pure else registry.backend_for(arrays.asarray(1.0))

    @settings(max_examples=6 if arrays.is_slow else examples(60))
    @given(patterns(name))
    def check(drawn):
        if is_pure and arrays.flushes_subnormals:
            # XLA takes them for 0: that is why the adapter has a form of its own.
            drawn = np.where(np.abs(drawn) < 2.0**-100, np.zeros_like(drawn), drawn)
            if drawn.dtype.kind == "c":
                return
        assert summarize(backend, into(arrays, drawn)) == [oracle(drawn)]

    check()


def test_counts_beyond_one_word_do_not_wrap(monkeypatch: pytest.MonkeyPatch, arrays: Library):
    monkeypatch.setattr(summaries, "_PIECE", 8)
    x = arrays.asarray([0.0] * 70 + [math.nan] * 9 + [math.inf] * 8)
    assert summarize(Backend(), x) == [Summary(87, 8, 9, 70, 0, 0.0)]


NARROW = ["bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"]
NARROW += [f"float8_{kind}" for kind in ("e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]


@pytest.mark.parametrize("kind", NARROW)
def test_the_smallest_normal_numbers_of_narrow_types_are_those_of_ml_dtypes(kind: str):
    import array_api_compat.numpy as xp

    ml_dtypes = require("ml_dtypes")
    if not hasattr(ml_dtypes, kind):
        pytest.skip(f"this ml_dtypes has no {kind}")
    dtype = np.dtype(getattr(ml_dtypes, kind))
    assert summaries.smallest_normal(dtype, xp) == float(ml_dtypes.finfo(dtype).smallest_normal)


def test_words_say_what_was_counted():
    for largest in (65504.0, 2.0**-1074, 1.7976931348623157e308, 0.0):
        x = np.array([largest, 0.0, math.nan, math.inf, math.inf])
        words = summaries.summarize_arrays([x, x[:0], x[2:]], lambda part: part.view(np.int64)).tolist()
        is_small = largest == 2.0**-1074
        found = [Summary(5, 2, 1, 1 + (largest == 0.0), int(is_small), largest), Summary(), Summary(3, 2, 1)]
        assert summaries.summaries_of([x, x[:0], x[2:]], words) == found


def test_the_summary_of_an_array_is_that_of_its_parts():
    parts = [Summary(2**40, 2**30, 2**31 - 1, 3, 2**40, 0.5), Summary(2**40, 1, 1, 0, 0, 7.0)]
    assert summaries.join(parts) == Summary(2**41, 2**30 + 1, 2**31, 3, 2**40, 7.0)
    assert summaries.join([]) == Summary()
