"""The kernels of gradscale_cupy: compiled for the host, thread by thread, against NumPy; and their source under nvcc.

Nothing here runs on a device.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from axes import require_program
from exactness import assert_same, oracle
from host_cupy import installed
from host_kernels import SOURCE, ThreadsDoNotMeetError, add_squares, compiled, launch
from hypothesis import given
from hypothesis import strategies as st
from tiers import later

with installed():
    from gradscale_cupy import plan as plans

pytestmark = [pytest.mark.numpy, pytest.mark.tier("ranks")]

TYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
PAIRS = [(source, target) for source, targets in plans.KERNELS.items() for target in targets]
ALL_PAIRS = [*PAIRS, ("complex64", "complex64"), ("complex128", "complex128")]
SCALES = [1.0, 65536.0, 2.0**-10, 3.0, 1e-3, 2.0**127, 2.0**-126]


def inverse(scale: float):
    return np.float32(1.0 / np.float64(np.float32(scale)))


def product(x, factor, target: str):
    """Return what NumPy makes of it."""
    return oracle(x, np.dtype(TYPES[target]), factor)[0]


def planned(sources: list[Any], targets: list[Any], chunk: int) -> list[plans.Launch]:
    """Return the launches for NumPy arrays, by the attributes that CuPy's have; a kernel takes each of them."""
    read, written = ([(x.ctypes.data, (x.shape, x.strides, x.dtype)) for x in arrays] for arrays in (sources, targets))
    launches, others = plans.plan(read, written, chunk)
    assert not others
    return launches


def unscale(sources: list[Any], targets: list[Any], scale: float, chunk: int = 64) -> int:
    """Plan and run launches over NumPy arrays; return how many found something that is not finite."""
    launches = planned(sources, targets, chunk)
    verdicts = [np.zeros((), np.int32) for _ in launches]
    for one, verdict in zip(launches, verdicts, strict=True):
        factor = np.array(scale, np.float32)
        launch(f"unscale_{one.pair}", one, chunk, factor, verdict)
    return sum(map(int, verdicts))


def unscale_and_square(sources: list[Any], targets: list[Any], scale: float, chunk: int) -> tuple[int, float]:
    """Do the same with the kernels that sum squares; return the verdicts' sum and that of the squares."""
    launches = planned(sources, targets, chunk)
    verdict, sums = np.zeros((), np.int32), []
    for one in launches:
        # A chunk that is left out is seen.
        sums.append(np.full(len(one.chunks), np.nan))
        arguments = np.array(scale, np.float32), verdict, sums[-1]
        launch(f"square_{one.pair}", one, chunk, *arguments)
    return int(verdict), add_squares(np.concatenate([np.zeros(0), *sums]))


def test_the_comparison_sees_each_wrong_answer():
    right = np.array([0.0, 1.0, np.nan], np.float32)
    wrong = [[-0.0, 1.0, np.nan], [0.0, 1.0000001, np.nan], [0.0, 1.0, np.inf], [np.nan, 1.0, np.nan]]
    for got in (*(np.array(values, np.float32) for values in wrong), right.astype(np.float64)):
        with pytest.raises(AssertionError):
            assert_same(got, right)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_any_bits_become_what_numpy_makes_of_them(source: str, target: str, scale: float):
    rng = np.random.default_rng(0)
    width = np.dtype(TYPES[source]).itemsize
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
    made = np.zeros(x.shape, TYPES[target])
    assert unscale([x], [made], scale, chunk=1000) == 1
    assert_same(made, product(x, inverse(scale), target))


@pytest.mark.parametrize(("source", "target"), ALL_PAIRS, ids=lambda name: name)
@given(data=st.data())
def test_arrays_of_any_place_and_shape_are_unscaled_and_nothing_beside_them(
    source: str, target: str, data: st.DataObject
):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    sources, targets, rooms, expected = [], [], [], []
    in_place = source == target and data.draw(st.booleans(), label="in place")
    for _ in range(data.draw(st.integers(1, 5), label="arrays")):
        shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4), label="shape"))
        offsets = [data.draw(st.integers(0, 9), label="offset") for _ in range(2)]
        x = _placed(rng.standard_normal(shape) * 100, TYPES[source], offsets[0])
        room = np.full(x.size + 20, 7, TYPES[target])
        y = x if in_place else room[offsets[1] : offsets[1] + x.size].reshape(shape)
        if data.draw(st.booleans(), label="turned"):
            order = data.draw(st.permutations(range(x.ndim)), label="order")
            x, y = x.transpose(order), y.transpose(order)
        sources.append(x)
        targets.append(y)
        rooms.append((room, room.copy(), y))
        expected.append(product(x, inverse(3.0), target))
    chunk = data.draw(st.integers(1, 70), label="chunk")
    if data.draw(st.booleans(), label="squares"):
        verdict, squares = unscale_and_square(sources, targets, 3.0, chunk)
        parts = [part.astype(np.float64) for x in expected for part in (x.real, x.imag)]
        assert squares == pytest.approx(sum(float(np.sum(part * part)) for part in parts), rel=1e-12)
        assert verdict == 0
    else:
        assert unscale(sources, targets, 3.0, chunk) == 0
    for y, answer, (room, untouched, written) in zip(targets, expected, rooms, strict=True):
        assert_same(np.ascontiguousarray(y), np.ascontiguousarray(answer))
        if not in_place:
            written[...] = 7
            np.testing.assert_array_equal(room, untouched)


def _placed(values, dtype, offset: int):
    """Return values as an array that begins so many elements into its memory."""
    room = np.zeros(values.size + offset, dtype)
    room[offset:] = values.ravel().astype(dtype)
    return room[offset:].reshape(values.shape)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("source", "target"), ALL_PAIRS, ids=lambda name: name)
def test_a_bad_value_is_found_wherever_it_is(source: str, target: str, bad: float):
    arrays = [np.ones(size, TYPES[source]) for size in (1, 0, 37, 16)]
    for index, array in enumerate(arrays):
        for place in range(array.size):
            given = [x.copy() for x in arrays]
            # Of a complex number the part that comes second.
            given[index][np.unravel_index(place, array.shape)] = bad if array.dtype.kind != "c" else complex(1.0, bad)
            made = [np.zeros(x.shape, TYPES[target]) for x in given]
            assert unscale([x.copy() for x in given], made, 2.0, chunk=8) == 1, (index, place)
            verdict, squares = unscale_and_square(given, made, 2.0, chunk=8)
            assert (verdict, np.isfinite(squares)) == (1, False), (index, place)


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3, 0.0, 1.5, np.nan])
@pytest.mark.parametrize("dtype", [*plans.KERNELS, "complex64", "complex128"])
def test_clipping_multiplies_by_a_factor_below_one_and_by_no_other(dtype: str, factor: float):
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (9, 8), (700,)]
    arrays = [np.asarray(100 * rng.standard_normal(shape)).astype(TYPES[dtype]) for shape in shapes]
    arrays.append(np.array([np.inf, -np.inf, np.nan, -0.0, 0.0], TYPES[dtype]))
    before = [x.copy() for x in arrays]
    (one,) = planned(arrays, arrays, 64)
    by = np.array(factor, np.float32)
    launch(f"clip_{one.pair.partition('_')[0]}", one, 64, by)
    for got, x in zip(arrays, before, strict=True):
        assert_same(got, product(x, by, dtype) if factor < 1.0 else x)


FLOAT32 = "-DGRADSCALE_SOURCE=float32", "-DGRADSCALE_TARGET=float32"


def answers(kernels):
    """Return the verdicts and sums of kernels of float32: of an array, and of one with a NaN in its second chunk."""
    x, scale, chunk = np.arange(5000, dtype=np.float32), np.array(1.0, np.float32), 2048
    found: list[Any] = []
    for array in (x, np.where(x == 3000, np.nan, x).astype(np.float32)):
        (one,) = planned([array], [array], chunk)
        verdicts, sums = np.zeros(2, np.int32), np.zeros(len(one.chunks))
        for kind, results in (("unscale", [verdicts[:1]]), ("square", [verdicts[1:], sums])):
            name = f"{kind}_float32_float32"
            launch(name, one, chunk, scale, *results, kernels=kernels, threads=256)
        found += [verdicts.tolist(), sums.tolist()]
    return found


# Of small integers, so that each sum is exact.
WHOLE = [float(sum(k * k for k in range(begin, min(begin + 2048, 5000)))) for begin in (0, 2048, 4096)]
ANSWERS = [[0, 0], WHOLE, [1, 1], [WHOLE[0], pytest.approx(np.nan, nan_ok=True), WHOLE[2]]]


def test_a_whole_block_judges_and_adds_up():
    assert answers(compiled(SOURCE, *FLOAT32)) == ANSWERS


@pytest.mark.parametrize(
    "change",
    [
        ("__syncthreads();\n    if (threadIdx.x == 0) {", "if (threadIdx.x == 0) {"),
        ("const double sum = sum_of_block(", "double sum = 0; if (!found.bad) sum = sum_of_block("),
        *later("all", ("distance = 16;", "distance = 8;"), ("bad = __syncthreads_or(found.bad)", "bad = found.bad")),
    ],
    ids=["barrier", "branch", "shuffle", "vote"],
)
def test_threads_that_do_not_work_together_are_seen(change: tuple[str, str], tmp_path: Path):
    source = SOURCE.read_text()
    line, changed = change
    assert source.count(line) == 1
    wrong = tmp_path / "wrong.cu"
    wrong.write_text(source.replace(line, changed))
    kernels = compiled(wrong, *FLOAT32)
    with contextlib.suppress(ThreadsDoNotMeetError):
        assert answers(kernels) != ANSWERS


def test_a_cast_that_overflows_is_found():
    for source, target, value in (("float32", "float16", 65520.0), ("float64", "float32", 1e39)):
        x, made = np.array([value], TYPES[source]), np.zeros(1, TYPES[target])
        assert unscale([x], [made], 1.0) == 1
        assert unscale([x * x.dtype.type(0.25)], [made], 1.0) == 0
    tiny = np.array([2.0], np.float32)
    assert unscale([tiny], [tiny], 2.0**-126) == 0
    tiny[0] = 8.0
    assert unscale([tiny], [tiny], 2.0**-126) == 1


@pytest.mark.parametrize(
    "architecture", ["sm_90", *later("all", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")]
)
def test_nvcc_compiles_the_kernels_without_a_warning_keeps_subnormal_numbers_and_loads_rows_before_it_divides(
    architecture: str, tmp_path: Path
):
    made = tmp_path / "unscale.ptx"
    # As CuPy does, which asks for subnormal numbers to be flushed.
    options = "-std=c++17", f"-arch={architecture}", "-ftz=true", "-Werror", "all-warnings"
    subprocess.run([require_program("nvcc"), *options, "-ptx", SOURCE, "-o", made], check=True)
    names = [f"{kind}_{source}_{target}" for kind in ("unscale", "square") for source, target in PAIRS]
    names += ["add_squares", *(f"clip_{name}" for name in plans.KERNELS)]
    instructions = made.read_text()
    assert sorted(re.findall(r"\.entry (\w+)", instructions)) == sorted(names)
    assert "mul.rn.f32" in instructions
    assert re.findall(r"\b(?:mul|cvt|add|sub|fma|div|rcp)\.[\w.]*ftz.*", instructions) == []
    for name, _, body in (entry.partition("(") for entry in instructions.split(".entry ")[1:]):
        if name.startswith(("unscale", "square")):
            before, reciprocal, _ = body.partition("rcp.rn.f32")
            # The scale, a chunk's row and number, and the source, target and size of the row.
            assert (reciprocal, before.count("ld.global")) == ("rcp.rn.f32", 6), name
