"""The kernels of gradscale_cupy: compiled for the host, thread by thread, against NumPy; and their source under nvcc.

Nothing here runs on a device.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from axes import require_program
from host_cupy import installed
from host_kernels import SOURCE, THREADS, ThreadsDoNotMeetError, add_squares, compiled, launch, library, options_of
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


def oracle(x: Any, scale: float, target: str) -> Any:
    """Return what NumPy makes of it: rounded once in float32 or wider, and once more to what is stored."""
    inverse = np.float32(1.0 / np.float64(np.float32(scale)))
    with np.errstate(all="ignore"):
        if x.dtype.kind == "c":
            parts = np.stack([x.real, x.imag], axis=-1)
            return np.ascontiguousarray(parts * parts.dtype.type(inverse)).view(x.dtype)[..., 0]
        wide = x.astype(np.float32) if x.dtype.itemsize < 4 else x
        return (wide * wide.dtype.type(inverse)).astype(TYPES[target])


def planned(sources: list[Any], targets: list[Any], chunk: int) -> list[plans.Launch]:
    """Return the launches for NumPy arrays, by the attributes that CuPy's have; a kernel takes each of them."""
    both = [*sources, *targets]
    kinds = [(x.shape, x.strides, x.dtype) for x in both]
    arrays = plans.Arrays.of([x.ctypes.data for x in both], kinds, len(both))
    launches, others = plans.plan(arrays[: len(sources)], arrays[len(sources) :], chunk)
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


def assert_same_bits(got: Any, expected: Any) -> None:
    """Assert that two arrays hold the same numbers, signed zeros and subnormals included; a NaN is a NaN."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    wide = [np.ascontiguousarray(x).view(x.real.dtype) for x in (got, expected)]
    nan = [np.isnan(x.astype(np.float64)) for x in wide]
    np.testing.assert_array_equal(nan[0], nan[1])
    bits = [np.where(isnan, 0, x.view(f"u{x.itemsize}")) for x, isnan in zip(wide, nan, strict=True)]
    np.testing.assert_array_equal(bits[0], bits[1])


def test_the_comparison_sees_each_wrong_answer() -> None:
    right = np.array([0.0, 1.0, np.nan], np.float32)
    for wrong in ([-0.0, 1.0, np.nan], [0.0, 1.0000001, np.nan], [0.0, 1.0, np.inf], [np.nan, 1.0, np.nan]):
        with pytest.raises(AssertionError):
            assert_same_bits(np.array(wrong, np.float32), right)
    with pytest.raises(AssertionError):
        assert_same_bits(right.astype(np.float64), right)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_any_bits_become_what_numpy_makes_of_them(source: str, target: str, scale: float) -> None:
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
    assert_same_bits(made, oracle(x, scale, target))


@pytest.mark.parametrize(("source", "target"), ALL_PAIRS, ids=lambda name: name)
@given(data=st.data())
def test_arrays_of_any_place_and_shape_are_unscaled_and_nothing_beside_them(
    source: str, target: str, data: st.DataObject
) -> None:
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
        expected.append(oracle(x, 3.0, target))
    chunk = data.draw(st.integers(1, 70), label="chunk")
    if data.draw(st.booleans(), label="squares"):
        verdict, squares = unscale_and_square(sources, targets, 3.0, chunk)
        parts = [part.astype(np.float64) for x in expected for part in (x.real, x.imag)]
        assert squares == pytest.approx(sum(float(np.sum(part * part)) for part in parts), rel=1e-12)
        assert verdict == 0
    else:
        assert unscale(sources, targets, 3.0, chunk) == 0
    for y, answer, (room, untouched, written) in zip(targets, expected, rooms, strict=True):
        assert_same_bits(np.ascontiguousarray(y), np.ascontiguousarray(answer))
        if not in_place:
            written[...] = 7
            np.testing.assert_array_equal(room, untouched)


def _placed(values: Any, dtype: Any, offset: int) -> Any:
    """Return values as an array that begins so many elements into its memory."""
    room = np.zeros(values.size + offset, dtype)
    room[offset:] = values.ravel().astype(dtype)
    return room[offset:].reshape(values.shape)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("source", "target"), ALL_PAIRS, ids=lambda name: name)
def test_a_bad_value_is_found_wherever_it_is(source: str, target: str, bad: float) -> None:
    arrays = [np.ones(size, TYPES[source]) for size in (1, 0, 37, 16)]
    for index, array in enumerate(arrays):
        for place in range(array.size):
            given = [x.copy() for x in arrays]
            given[index][np.unravel_index(place, array.shape)] = bad
            made = [np.zeros(x.shape, TYPES[target]) for x in given]
            assert unscale([x.copy() for x in given], made, 2.0, chunk=8) == 1, (index, place)
            verdict, squares = unscale_and_square(given, made, 2.0, chunk=8)
            assert (verdict, np.isfinite(squares)) == (1, False), (index, place)


@pytest.mark.parametrize("part", [1.0, 1j])
def test_either_part_of_a_complex_number_may_be_bad(part: complex) -> None:
    x = np.ones(5, np.complex64)
    x[3] = part * np.float32(np.inf) if part == 1.0 else complex(1.0, np.inf)
    assert unscale([x], [x], 2.0) == 1


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.3, 0.0, 1.5, np.nan])
@pytest.mark.parametrize("dtype", [*plans.KERNELS, "complex64", "complex128"])
def test_clipping_multiplies_by_a_factor_below_one_and_by_no_other(dtype: str, factor: float) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(), (3,), (0,), (9, 8), (700,)]
    arrays = [np.asarray(100 * rng.standard_normal(shape)).astype(TYPES[dtype]) for shape in shapes]
    arrays.append(np.array([np.inf, -np.inf, np.nan, -0.0, 0.0], TYPES[dtype]))
    before = [x.copy() for x in arrays]
    (one,) = planned(arrays, arrays, 64)
    by = np.array(factor, np.float32)
    launch(f"clip_{one.pair.partition('_')[0]}", one, 64, by)
    for got, x in zip(arrays, before, strict=True):
        # Dividing by the reciprocal is what the oracle does, where that is exact.
        if factor < 1.0:
            wide = x.astype(np.result_type(x.dtype, np.float32) if x.dtype != TYPES["bfloat16"] else np.float32)
            with np.errstate(all="ignore"):
                parts = np.stack([wide.real, wide.imag]) * wide.real.dtype.type(by)
            x = parts[0] if x.dtype.kind != "c" else np.stack(list(parts), axis=-1).view(x.dtype)[..., 0]
        assert_same_bits(np.ascontiguousarray(got), np.ascontiguousarray(x).astype(TYPES[dtype]))


def test_the_squares_of_nothing_are_zero() -> None:
    assert unscale_and_square([], [], 2.0, 64) == (0, 0.0)


FLOAT32 = "-DGRADSCALE_SOURCE=float32", "-DGRADSCALE_TARGET=float32"


@pytest.mark.parametrize("threads", [THREADS, 256])
@pytest.mark.parametrize("chunks", [1, 31, 257, 1000])
def test_a_block_adds_up_within_its_warps_and_then_warp_by_warp(chunks: int, threads: int) -> None:
    # On a device there are 256.
    kernels = library() if threads == THREADS else compiled(SOURCE, *FLOAT32)
    squares = np.random.default_rng(0).standard_normal(chunks)
    mine = np.zeros(threads)
    for begin in range(0, chunks, threads):
        part = squares[begin : begin + threads]
        mine[: len(part)] += part
    warps = mine.reshape(-1, 32)
    for distance in (16, 8, 4, 2, 1):
        warps = warps[:, :distance] + warps[:, distance : 2 * distance]
    assert add_squares(squares, kernels, threads) == functools.reduce(float.__add__, warps[:, 0].tolist())


def answers(kernels: Any) -> list[Any]:
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


def test_a_whole_block_judges_and_adds_up() -> None:
    assert answers(compiled(SOURCE, *FLOAT32)) == ANSWERS


@pytest.mark.parametrize(
    "change",
    [
        ("__syncthreads();\n    if (threadIdx.x == 0) {", "if (threadIdx.x == 0) {"),
        ("const double sum = sum_of_block(", "double sum = 0; if (!found.bad) sum = sum_of_block("),
        *later(
            "all",
            ("distance = 16;", "distance = 8;"),
            ("warp < kThreads / 32", "warp < kThreads / 64"),
            ("bad = __syncthreads_or(found.bad)", "bad = found.bad"),
            ("&& __syncthreads_or(found.bad)", "&& found.bad"),
            (
                "        squares[blockIdx.x] = sum;\n",
                "    }\n    squares[blockIdx.x] = sum;\n    if (threadIdx.x == 0) {\n",
            ),
        ),
    ],
    ids=["barrier", "branch", "shuffle", "warps", "vote of squares", "vote", "who stores"],
)
def test_threads_that_do_not_work_together_are_seen(change: tuple[str, str], tmp_path: Path) -> None:
    source = SOURCE.read_text()
    line, changed = change
    assert source.count(line) == 1
    wrong = tmp_path / "wrong.cu"
    wrong.write_text(source.replace(line, changed))
    kernels = compiled(wrong, *FLOAT32)
    with contextlib.suppress(ThreadsDoNotMeetError):
        assert answers(kernels) != ANSWERS


def test_a_cast_that_overflows_is_found() -> None:
    for source, target, value in (("float32", "float16", 65520.0), ("float64", "float32", 1e39)):
        x, made = np.array([value], TYPES[source]), np.zeros(1, TYPES[target])
        assert unscale([x], [made], 1.0) == 1
        assert unscale([x * x.dtype.type(0.25)], [made], 1.0) == 0
    tiny = np.array([2.0], np.float32)
    assert unscale([tiny], [tiny], 2.0**-126) == 0
    tiny[0] = 8.0
    assert unscale([tiny], [tiny], 2.0**-126) == 1


# In which sm_75 differs; of the newer two the compiler of CUDA 13.0 makes other choices. Of all others 40 and none.
MOST_REGISTERS = {"sm_75": 64, "sm_100": 44, "sm_120": 44}
MOST_SPILLED = {"sm_100": 16}


@pytest.mark.parametrize(
    "architecture", ["sm_90", *later("all", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")]
)
def test_nvcc_compiles_the_kernels_without_a_warning_and_into_few_registers(architecture: str, tmp_path: Path) -> None:
    nvcc = require_program("nvcc")
    # As CuPy does, where subnormal numbers are concerned.
    command = [nvcc, "-std=c++17", f"-arch={architecture}", "-ftz=true", "-Werror", "all-warnings", "-Xptxas", "-v"]
    made = tmp_path / "unscale.cubin"
    command += ["-cubin", str(SOURCE), "-o", str(made)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "warning" not in finished.stderr
    names = [f"{kind}_{source}_{target}" for kind in ("unscale", "square") for source, target in PAIRS]
    names += ["add_squares", *(f"clip_{name}" for name in plans.KERNELS)]
    numbers = r"(\d+) bytes spill stores, (\d+) bytes spill loads(?:.|\n)*?Used (\d+) registers"
    kernels = [part.partition("'") for part in finished.stderr.split("Compiling entry function '")[1:]]
    found = {name: tuple(map(int, re.findall(numbers, rest)[0])) for name, _, rest in kernels}
    assert set(found) == set(names)
    most = MOST_SPILLED.get(architecture, 0)
    assert {name: spilled for name, (*spilled, _) in found.items() if max(spilled) > most} == {}
    # Of 256 threads each, so many blocks fit: 65,536 registers are on a multiprocessor.
    registers = {name: count for name, (*_, count) in found.items()}
    assert max(registers.values()) <= MOST_REGISTERS.get(architecture, 40)
    if architecture == "sm_90":
        # 8 blocks, which are all the threads that there can be.
        assert max(registers[f"unscale_{a}_{b}"] for a, b in PAIRS if (a, b) != ("float64", "float64")) <= 32


@pytest.mark.parametrize("name", ["unscale_float16_float32", "square_bfloat16_bfloat16", "clip_float64", "add_squares"])
def test_the_launchers_options_compile_one_kernel_alone(name: str, tmp_path: Path) -> None:
    made = tmp_path / "kernel.ptx"
    subprocess.run([require_program("nvcc"), *options_of(name), "-arch=sm_75", "-ptx", SOURCE, "-o", made], check=True)
    assert re.findall(r"\.entry (\w+)", made.read_text()) == [name]


@functools.cache
def compiled_as_by_cupy() -> str:
    """Return the instructions of all kernels for a virtual machine, PTX, with CuPy's options."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "unscale.ptx"
        command = [require_program("nvcc"), "-std=c++17", "-arch=sm_75", "-ftz=true", "-ptx", str(SOURCE)]
        subprocess.run([*command, "-o", str(made)], check=True)
        return made.read_text()


@pytest.mark.parametrize("kernel", [f"{kind}_{a}_{b}" for kind in ("unscale", "square") for a, b in PAIRS])
def test_dense_arrays_are_read_and_written_in_packs(kernel: str) -> None:
    _, source, target = kernel.split("_")
    _, _, body = compiled_as_by_cupy().partition(f".entry {kernel}(")
    body = body.partition(".entry ")[0]
    moved = re.findall(r"\t(ld|st)\.(global\.)?(v\d\.)?([a-z]\d+) ", body)
    wide = max(np.dtype(TYPES[source]).itemsize, np.dtype(TYPES[target]).itemsize)
    for direction, dtype in (("ld", source), ("st", target)):
        size = np.dtype(TYPES[dtype]).itemsize
        found = [(where, vector, kind) for way, where, vector, kind in moved if way == direction]
        # All are known to be in global memory.
        assert [kind for where, _, kind in found if not where] == []
        # In front of the packs and behind them, a loop that nvcc unrolls by four and has once more for the rest. The
        # float32 factor is read, too, and a float64 sum written; what is read of tables are integers of 32 and 64 bits.
        single = [kind for _, vector, kind in found if not vector and kind in (f"f{8 * size}", "u16")]
        is_more = (direction, size) == ("ld", 4) or (kernel.startswith("square"), direction, size) == (True, "st", 8)
        assert len(single) == 5 + is_more
        # Four packs in flight, and those that are left: each of 16 bytes of the wider type, and known to be in global
        # memory.
        packs = [(where, int(vector[1:-1]) * int(kind[1:]) // 8) for where, vector, kind in found if vector]
        assert packs == [("global.", 16 * size // wide)] * 5


def test_subnormal_numbers_are_kept_although_cupy_asks_nvcc_to_flush_them() -> None:
    lines = compiled_as_by_cupy().splitlines()
    assert any("mul.rn.f32" in line for line in lines)
    assert [line for line in lines if re.search(r"\b(mul|cvt|add|sub|fma|div|rcp)\.[\w.]*ftz", line)] == []
