"""The kernels of gradscale_cupy on a device, by chunks of any size, against NumPy."""

from __future__ import annotations

import importlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from axes import require
from commands import python
from cupy_devices import launch_counter, require_cupy
from exactness import assert_same, isfinite, oracle
from hypothesis import given
from hypothesis import strategies as st

from gradscale import StaticScale

# For its package, which cannot be imported without.
require("cupy")
plans, adapter = (importlib.import_module(f"gradscale_cupy.{name}") for name in ("plan", "arrays"))

pytestmark = [pytest.mark.cupy, pytest.mark.gpu]

SOURCE = Path(adapter.__file__).with_name("unscale.cu")
NAMES = (*plans.KERNELS, "complex64", "complex128")
TYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES}
PAIRS = [(source, target) for source, targets in plans.KERNELS.items() for target in targets]
# CuPy has bfloat16 from 14 on.
HERE = PAIRS if adapter.cupy.__version__ >= "14" else [pair for pair in PAIRS if "bfloat16" not in pair]
ALL_PAIRS = [*HERE, ("complex64", "complex64"), ("complex128", "complex128")]
SCALES = [1.0, 65536.0, 2.0**-10, 3.0, 1e-3, 2.0**127, 2.0**-126]


def product(x, factor, target: str):
    """Return what NumPy makes of it."""
    return oracle(x, TYPES[target], factor)[0]


def state_of(cupy, scale: float):
    return StaticScale(scale).init(cupy.zeros((), np.float32))


@pytest.fixture
def chunked(cupy_backend, monkeypatch: pytest.MonkeyPatch):
    """Return what makes kernels take so many elements for each block; they must take all arrays."""

    def choose(chunk: int):
        def plan(sources, targets):
            launches, others = plans.plan(sources, targets, chunk)
            assert not others
            return launches, others

        monkeypatch.setattr(adapter, "CHUNK", chunk)
        monkeypatch.setattr(adapter, "plan", plan)
        return cupy_backend

    return choose


def test_the_comparison_sees_each_wrong_answer():
    right = np.array([0.0, 1.0, np.nan], np.float32)
    wrong = [[-0.0, 1.0, np.nan], [0.0, 1.0000001, np.nan], [0.0, 1.0, np.inf], [np.nan, 1.0, np.nan]]
    for got in (*(np.array(values, np.float32) for values in wrong), right.astype(np.float64)):
        with pytest.raises(AssertionError):
            assert_same(got, right)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), HERE, ids=lambda name: name)
def test_any_bits_become_what_numpy_makes_of_them(cupy, chunked, source: str, target: str, scale: float):
    rng = np.random.default_rng(0)
    width = TYPES[source].itemsize
    # Half precision has few enough numbers to take them all; of the others some lie close to where rounding changes.
    bits = np.arange(2**16) if width == 2 else rng.integers(0, 2 ** (8 * width), 20_000, dtype=f"u{width}")
    x = bits.astype(f"u{width}").view(TYPES[source])
    if width == 4:
        halves = np.arange(2**16).astype(np.uint16).view(np.float16).astype(np.float32)
        with np.errstate(all="ignore"):
            # Those between neighbours in half precision, and next to these.
            between = (halves + np.roll(halves, 1)) / 2 * np.float32(scale)
            beside = np.nextafter(between, np.float32(0))
        x = np.concatenate([x, halves, between, beside])
    made = cupy.zeros(x.shape, TYPES[target])
    assert chunked(1000).unscale([cupy.asarray(x)], state_of(cupy, scale), out=[made])[1] == 1
    assert_same(made.get(), product(x, np.float32(1.0 / np.float64(np.float32(scale))), target))


@pytest.mark.parametrize(("source", "target"), ALL_PAIRS, ids=lambda name: name)
@given(data=st.data())
def test_arrays_of_any_place_and_shape_are_unscaled_and_judged_and_nothing_beside_them(
    cupy, chunked, source: str, target: str, data: st.DataObject
):
    backend = chunked(data.draw(st.integers(1, 70), label="chunk"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    sources, targets, rooms, expected = [], [], [], []
    in_place = source == target and data.draw(st.booleans(), label="in place")
    for _ in range(data.draw(st.integers(1, 5), label="arrays")):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4), label="shape"))
        offsets = [data.draw(st.integers(0, 9), label="offset") for _ in range(2)]
        order = list(range(len(shape)))
        if data.draw(st.booleans(), label="turned"):
            order = data.draw(st.permutations(order), label="order")
        values = np.asarray(rng.standard_normal(shape) * 100).astype(TYPES[source])
        if values.size and data.draw(st.booleans(), label="bad"):
            place = data.draw(st.integers(0, values.size - 1), label="place")
            values.reshape(-1)[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]), label="value")
        x = _placed(cupy, values, offsets[0])[1].transpose(order)
        room, y = _placed(cupy, np.full(shape, 7, TYPES[target]), offsets[1])
        sources.append(x)
        targets.append(x if in_place else y.transpose(order))
        rooms.append((room, y))
        expected.append(product(values, np.float32(1 / 3), target).transpose(order))
    state = state_of(cupy, 3.0)
    if data.draw(st.booleans(), label="squares"):
        _, verdict, squares = backend.unscale_with_squares(sources, state, out=targets)
        parts = [part.astype(np.float64) for x in expected for part in (x.real, x.imag)]
        assert float(squares) == pytest.approx(sum(float(np.sum(part * part)) for part in parts), 1e-12, nan_ok=True)
    else:
        verdict = backend.unscale(sources, state, out=targets)[1]
    assert bool(verdict > 0) is not all(isfinite(x).all() for x in expected)
    for got, answer, (room, written) in zip(targets, expected, rooms, strict=True):
        assert_same(np.ascontiguousarray(got.get()), np.ascontiguousarray(answer))
        written[...] = 7
        assert (room.get() == 7).all()


def _placed(cupy, values, offset: int):
    """Return memory of sevens on a device, and an array in it that begins so many elements into it."""
    room = cupy.asarray(np.full(values.size + offset + 10, 7, values.dtype))
    made = room[offset : offset + values.size].reshape(values.shape)
    made.set(np.array(values, order="C"))
    return room, made


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3, 0.0, 1.5, np.nan])
@pytest.mark.parametrize("dtype", dict(ALL_PAIRS))
def test_clipping_multiplies_by_a_factor_below_one_and_by_no_other(cupy, chunked, dtype: str, factor: float):
    rng, by = np.random.default_rng(0), np.array(factor, np.float32)
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (9, 8), (700,)]
    before = [np.asarray(100 * rng.standard_normal(shape)).astype(TYPES[dtype]) for shape in shapes]
    before.append(np.array([np.inf, -np.inf, np.nan, -0.0, 0.0], TYPES[dtype]))
    arrays = chunked(64).multiply_in_place([*map(cupy.asarray, before)], cupy.asarray(by))
    for got, x in zip(arrays, before, strict=True):
        assert_same(got.get(), product(x, by, dtype) if factor < 1.0 else x)


# Small integers have exact sums. The second array has a NaN in its second chunk.
ANSWERS = f"0 0 {sum(k * k for k in range(5000))}.0\n1 1 nan\n"
ANSWERING = """
import pathlib, sys, types, cupy
from gradscale import DynamicScale
from gradscale_cupy import arrays, plan
arrays.CHUNK, arrays.plan = 2048, lambda *places: plan.plan(*places, 2048)
arrays.resources = types.SimpleNamespace(files=lambda _: pathlib.Path(sys.argv[1]))
state = DynamicScale(init_scale=1.0).init(cupy.zeros((), "float32"))
for bad in (0.0, float("nan")):
    x = cupy.arange(5000, dtype="float32")
    x[3000] += bad
    _, verdict, squares = arrays.backend.unscale_with_squares([x], state)
    print(arrays.backend.unscale([x], state)[1], verdict, squares)
"""


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("", ""),
        ("__syncthreads();\n    if (threadIdx.x == 0) {", "if (threadIdx.x == 0) {"),
        ("const double sum = sum_of_block(", "double sum = 0; if (!found.bad) sum = sum_of_block("),
        ("distance = 16;", "distance = 8;"),
        ("bad = __syncthreads_or(found.bad)", "bad = found.bad"),
    ],
    ids=["none", "barrier", "branch", "shuffle", "vote"],
)
def test_threads_that_do_not_work_together_are_seen(line: str, changed: str, tmp_path: Path):
    require_cupy()
    # A device need not show it.
    launch_counter()
    source = SOURCE.read_text()
    assert source.count(line) == 1 or not line
    (tmp_path / "unscale.cu").write_text(source.replace(line, changed) if line else source)
    completed = python("-c", ANSWERING, tmp_path)
    assert (completed.stdout == ANSWERS) is (not line), completed.stdout + completed.stderr
