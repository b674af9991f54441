"""NumPy's kernels, held to a slow oracle bit for bit, and what the adapter counts in arrays, to a plain model."""

from __future__ import annotations

import importlib
import math
import random
import tracemalloc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import diagnoses
import ml_dtypes
import numpy as np
import pytest
from axes import require
from exactness import BFLOAT, DOUBLE, HALF, LAYOUTS, SINGLE, Array, assert_same, bit_patterns, isfinite, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import Tree
from tiers import examples

from gradscale import GradScaler, StaticScale
from gradscale.core.backend import Backend
from gradscale.core.summaries import Summary
from gradscale_numpy import NumpyBackend, kernels

pytestmark = pytest.mark.numpy

INVERSES = [2.0**-16, 2.0**-24, 1 / 3, 0.75, 1.0, 2.0**10, 2.0**15, 2.0**16, 2.0**126, 2.0**-127]

# Block and row as small as this put block ends and tails into arrays of a few thousand elements.
BLOCK, ROW = 512, 64
LARGE = 3 * BLOCK + ROW + 5

# Every kind of source, and the types that it is unscaled to.
PAIRS = [
    (source, out)
    for source, outs in {
        HALF: [HALF, SINGLE, DOUBLE, BFLOAT],
        BFLOAT: [BFLOAT, SINGLE, HALF],
        SINGLE: [SINGLE, HALF, BFLOAT, DOUBLE],
        DOUBLE: [DOUBLE, SINGLE],
        np.dtype(np.longdouble): [np.longdouble, DOUBLE],
        np.dtype(np.complex64): [np.complex64, np.complex128],
        np.dtype(np.complex128): [np.complex128, np.complex64],
        np.dtype(np.clongdouble): [np.clongdouble],
        np.dtype(ml_dtypes.float8_e4m3fn): [ml_dtypes.float8_e4m3fn, SINGLE],
        np.dtype(ml_dtypes.float8_e5m2): [ml_dtypes.float8_e5m2, SINGLE],
        BFLOAT.newbyteorder(">"): [BFLOAT.newbyteorder(">"), SINGLE],
        np.dtype(">f4"): [">f4", SINGLE],
        np.dtype(">f2"): [">f2", SINGLE],
        np.dtype(">c8"): [">c8"],
    }.items()
    for out in map(np.dtype, outs)
]
PAIR_IDS = [f"{source.name}-{out.name}" + "-swapped" * (not source.isnative) for source, out in PAIRS]


@pytest.fixture(params=["kernels", "fast"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    """Return each module that has ``unscale_all``."""
    if request.param == "fast":
        require("fast")
    return importlib.import_module(f"gradscale_numpy.{request.param}")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Shrink the blocks, so that arrays of a few thousand elements have several of them and a tail."""
    monkeypatch.setattr(kernels, "_BLOCK", BLOCK)
    monkeypatch.setattr(kernels, "_ROW", ROW)
    monkeypatch.setattr(kernels, "SMALL", 32)


def check_all(module: ModuleType, sources: list[Array], outs: list[Array], inverse: float):
    """Unscale arrays at once, silently, and require the oracle's answer for each."""
    expected = [oracle(source, out.dtype, inverse) for source, out in zip(sources, outs, strict=True)]
    before = [source.copy() for source in sources]
    with np.errstate(all="raise"):
        state = np.geterr()
        assert module.unscale_all(sources, outs, np.float32(inverse)) == sum(nonfinite for _, nonfinite in expected)
        assert np.geterr() == state
    for source, out, (result, _), old in zip(sources, outs, expected, before, strict=True):
        assert_same(out, result)
        if out is not source:
            assert_same(source, old)


def drawn_array(data: st.DataObject, dtype: np.dtype[Any]) -> Array:
    """Return an array of any bits, of one of few shapes; of finite numbers where bits may be padding."""
    shape = data.draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (33, 40), (BLOCK + 1,), (LARGE, 1)]))
    size = math.prod(shape)
    if dtype.char in "gG":
        return np.asarray(np.random.default_rng(size).standard_normal(shape)).astype(dtype)
    bits = data.draw(bit_patterns(dtype.newbyteorder("="), [size]))
    swapped = bits if dtype.isnative else bits.view(f"u{bits.real.itemsize}").byteswap().view(dtype)
    return np.array(swapped.reshape(shape))


def placed(data: st.DataObject, array: Array) -> Array:
    """Return an array with the same elements in another layout of memory."""
    return data.draw(st.sampled_from(LAYOUTS))(array) if array.ndim == 2 else array


@pytest.mark.parametrize("pairs", [*([pair] for pair in PAIRS), PAIRS], ids=[*PAIR_IDS, "mixed"])
@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=examples(60))
@given(data=st.data())
def test_arrays_of_any_bits_types_and_layouts_are_the_oracles(
    module: ModuleType, pairs: list[tuple[np.dtype[Any], np.dtype[Any]]], data: st.DataObject
):
    drawn = [
        (drawn_array(data, source_type), out_type)
        for source_type, out_type in data.draw(st.lists(st.sampled_from(pairs), max_size=5))
    ]
    # Compiled loops and arrays of float32 that are overwritten have ways of their own, for up to so many in one call.
    many = data.draw(st.sampled_from([0, 70])) if (SINGLE, SINGLE) in pairs else 0
    drawn += [(np.full(30, data.draw(st.sampled_from([3.0, np.inf])), SINGLE), SINGLE) for _ in range(many)]
    sources, outs = [placed(data, source) for source, _ in drawn], []
    are_overwritten = data.draw(st.booleans())
    for source, out_type in drawn:
        outs.append(placed(data, np.empty(source.shape, out_type)))
    if are_overwritten:
        outs = [x if x.dtype == y.dtype else y for x, y in zip(sources, outs, strict=True)]
        # That both are one list says that all are contiguous.
        is_one = all(x is y and x.flags.c_contiguous for x, y in zip(sources, outs, strict=True))
        outs = sources if is_one else outs
    any_inverse = st.floats(0, width=32, exclude_min=True, allow_infinity=False)
    check_all(module, sources, outs, data.draw(any_inverse | st.sampled_from(INVERSES)))


@pytest.mark.parametrize("size", [6, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE, DOUBLE, np.dtype(np.complex64)], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_a_scale_of_1_multiplies_nothing_and_leaves_every_bit(
    monkeypatch: pytest.MonkeyPatch, backend: NumpyBackend, dtype: np.dtype[Any], size: int
):
    nan = np.resize(np.asarray([np.nan, -0.0, 1.0, np.inf, 0.0, 3.0]).astype(dtype), size)
    # A payload, which a multiplication makes quiet.
    word = nan.view(f"u{nan.real.itemsize}")
    word[0] = np.asarray(np.inf).astype(nan.real.dtype).view(word.dtype) + 5
    clean = np.asfortranarray(np.resize(np.asarray([-0.0, 1.0, 1e-7]).astype(dtype), (size, 2)))
    before = nan.tobytes(), clean.tobytes(), clean.T.copy().tobytes()

    def refuse(*_, **__):
        raise AssertionError("nothing is to be multiplied")

    optimizer = Tree([nan, clean, clean.T.copy()])
    scaler = GradScaler(policy=StaticScale(1.0), backend=backend)
    scaler.scale(np.float32(1.0))
    monkeypatch.setattr(np, "multiply", refuse)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).nonfinite == 1
    assert (nan.tobytes(), clean.tobytes(), optimizer.grads[2].tobytes()) == before


@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE], ids=str)
def test_subnormal_halves_are_scaled_and_divided_where_a_processor_flushes_those_of_float32_to_0(
    backend: NumpyBackend, dtype: np.dtype[Any]
):
    torch = require("torch")
    halves = np.arange(0x7C00, dtype=np.uint16).view(HALF)
    state = StaticScale(1024.0).init(np.float32(0.0))
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor has no such mode")
    try:
        (divided,), (scaled,) = backend.unscale([halves], state, dtype=dtype)[0], backend.scale([halves[:999]], state)
    finally:
        torch.set_flush_denormal(False)
    assert_same(divided, oracle(halves, dtype, 2.0**-10)[0])
    assert_same(scaled, oracle(halves[:999], HALF, 2.0**10)[0])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("inverse", INVERSES, ids=str)
@pytest.mark.parametrize(("dtype", "other"), [(HALF, BFLOAT), (BFLOAT, HALF)], ids=lambda dtype: dtype.name)
def test_every_half(module: ModuleType, dtype: np.dtype[Any], other: np.dtype[Any], inverse: float):
    """All 65536 bit patterns, the finite ones alone, and each on its own verdict give the oracle's answer."""
    patterns = np.arange(65536, dtype=np.uint16).view(dtype)
    for source in (patterns, patterns[isfinite(patterns)]):
        in_place = source.copy()
        for out in (in_place, *(np.empty(source.shape, out_type) for out_type in (dtype, SINGLE, other))):
            check_all(module, [in_place if out is in_place else source], [out], inverse)
    for out_type in (dtype, SINGLE):
        expected, _ = oracle(patterns, out_type, inverse)
        singles, outs = list(patterns.reshape(-1, 1)), list(np.empty((65536, 1), out_type))
        assert module.unscale_all(singles, outs, np.float32(inverse)) == np.sum(~isfinite(expected))


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("dtype", [HALF, SINGLE, DOUBLE, np.dtype(np.complex64)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory(module: ModuleType, dtype: np.dtype[Any], layout: Callable[[Array], Array]):
    """Work in place takes a small part of the arrays' memory, which is not gathered."""
    array = layout(np.ones((1024, 4096), dtype))
    module.unscale_all([array[:40]], [array[:40]], np.float32(1))
    # Of contiguous arrays the kernels are told by identity that all are overwritten.
    arrays = [array[:512], array[512:]]
    outs = arrays if layout is LAYOUTS[0] else [*arrays]
    tracemalloc.start()
    try:
        assert module.unscale_all(arrays, outs, np.float32(0.5)) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


# Summaries.


KINDS = ("float16", "float32", "float64", "complex64", "complex128", "bfloat16")
KINDS += ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz")


def summaries(*arrays):
    return NumpyBackend().read_summaries(arrays)[0]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_the_numbers_are_the_models_in_any_layout_and_byte_order():
    chance = random.Random(0)
    for _ in range(examples(3000)):
        x = diagnoses.draw(chance, chance.choice(KINDS), chance.choice(diagnoses.SHAPES), chance.random() < 0.4)
        views = [x, x.astype(x.dtype.newbyteorder(">")), *(layout(x) for layout in LAYOUTS if x.ndim == 2)]
        assert summaries(*views) == [diagnoses.summary_of(x)] * len(views), (x, x.dtype)


def test_long_doubles_and_arrays_of_several_blocks_are_counted_whole():
    array = np.array([0, -0.0, np.inf, np.nan, 1.5, np.finfo(np.longdouble).smallest_subnormal], np.longdouble)
    assert summaries(array) == Backend().read_summaries([array])[0] == [Summary(6, 1, 1, 2, 1, 1.5)]
    for dtype in (np.float16, np.float32, np.complex64):
        x = np.ones((3, 50_000), dtype)
        x[0, 0], x[1, 5], x[2, -1], x[2, :9] = np.nan, np.inf, -7, 0
        assert summaries(x, x.T, x[:, ::-1], np.asfortranarray(x)) == [Summary(150_000, 1, 1, 9, 0, 7.0)] * 4
    nan = np.full(100_000, np.nan, np.float32)
    assert summaries(nan, np.float32(2)) == [Summary(100_000, 0, 100_000), Summary(1, largest=2.0)]
