"""What is counted in an array, against a plain model in NumPy; on every library, adapter and pure form."""

import math
import random

import numpy as np
import pytest
from axes import require
from diagnoses import SHAPES, draw, into, summary_of
from libraries import Library
from tiers import examples

from gradscale import registry
from gradscale.core import summaries
from gradscale.core.backend import Backend
from gradscale.core.summaries import Summary

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def summarize(backend, *arrays) -> list[Summary]:
    return backend.read_summaries(arrays)[0]


def test_the_adapter_and_the_pure_form_count_what_the_model_counts(arrays: Library):
    chance = random.Random(0)
    for _ in range(30 if arrays.is_slow else examples(1500 if arrays.name == "numpy" else 300)):
        kind = chance.choice([*arrays.reals, "complex64", "complex128"])
        drawn = draw(chance, kind, chance.choice(SHAPES), chance.random() < 0.4)
        # XLA takes subnormals for 0: that is why the adapter has a form of its own.
        backends = [*([] if arrays.flushes_subnormals else [Backend()]), registry.backend_for(arrays.asarray(1.0))]
        for backend in backends:
            assert summarize(backend, into(arrays, drawn)) == [summary_of(drawn)], (kind, drawn, backend)


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
