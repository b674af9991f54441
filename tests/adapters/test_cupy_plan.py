"""Plans of the CuPy adapter: which arrays go into one launch, what their rows say, and which may not be written.

And the source of the kernels that they name, under nvcc. Nothing here needs CuPy or a device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from axes import require_program
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import later

from gradscale import InvalidValueError

# Not by an import of its package, which wants CuPy.
FOLDER = Path(str(importlib.util.find_spec("gradscale_cupy").origin)).parent  # type: ignore[union-attr]
plans = SimpleNamespace(**runpy.run_path(str(FOLDER / "plan.py")))

pytestmark = pytest.mark.numpy


class Layout(NamedTuple):
    """Where an array lies and how: strides are in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "float32"

    @property
    def place(self):
        """As CuPy's arrays have it, with strides in bytes."""
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        return self.address, (self.shape, tuple(stride * dtype.itemsize for stride in self.strides), dtype)


def dense(size: int, address: int = 4096, dtype: str = "float32") -> Layout:
    return Layout(address, (size,), (1,), dtype)


def plan(sources: list[Layout], targets: list[Layout]):
    return plans.plan([one.place for one in sources], [one.place for one in targets])


def require_disjoint(sources: list[Layout], targets: list[Layout]):
    plans.require_disjoint([one.place for one in sources], [one.place for one in targets])


def test_arrays_of_a_pair_of_dtypes_are_one_launch_of_chunks_and_an_empty_one_has_no_row():
    halves = [dense(10, 4096 * k, "float16") for k in range(50)]
    sizes = [plans.CHUNK, plans.CHUNK + 1, 0, 1, 5 * plans.CHUNK]
    sources = [*map(dense, sizes), *halves]
    launches, others = plan(sources, [*sources[:5], *(dense(10, 4096 * k) for k in range(50))])
    assert [(one.pair, len(one.table)) for one in launches] == [("float32_float32", 4), ("float16_float32", 50)]
    assert others == []
    assert launches[0].chunks.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], *([3, k] for k in range(5))]
    assert launches[0].table["size"].tolist() == [size for size in sizes if size]
    assert plan([dense(0)], [dense(0)]) == plan([], []) == ([], [])


# Few places, so that many meet, and many without gaps.
FORMS = st.sampled_from([(), (0,), (1,), (3,), (2, 2), (2, 3)]).flatmap(
    lambda shape: st.tuples(st.just(shape), st.tuples(*[st.sampled_from([-2, 0, 1, 1, 2, 3])] * len(shape)))
)
PLACES = st.integers(0, 24).map(lambda place: 4096 + 4 * place)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Return a gradient and what it is written to, often itself."""
    source = Layout(draw(PLACES), *draw(FORMS))
    return source, draw(
        st.just(source) | st.builds(Layout, PLACES, st.just(source.shape), st.just(source.strides), st.just("float32"))
    )


def elements(one: Layout) -> list[int]:
    """Return the address of every element."""
    places = itertools.product(*(range(length) for length in one.shape))
    return [one.address + 4 * sum(k * stride for k, stride in zip(place, one.strides, strict=True)) for place in places]


KNOWN = [(source, target) for source, targets in plans.KERNELS.items() for target in targets]
# As often as all others.
KNOWN += len(KNOWN) // 2 * [("complex64", "complex64"), ("complex128", "complex128")]
OTHERS = [("float64", "float16"), ("complex64", "complex128"), ("float32", "complex64"), ("float8_e5m2", "float32")]


@st.composite
def strides_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of axes that follow each other in memory in any order, often without gaps."""
    step, strides = draw(st.sampled_from([1, 1, 1, 1, 2, -1, 0])), [0] * len(shape)
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = step
        step *= shape[axis] + draw(st.sampled_from([0, 0, 0, 1]))
    return tuple(strides)


@settings(max_examples=100)
@given(st.data())
def test_a_kernel_takes_memory_without_gaps_in_its_own_order_and_the_pure_core_all_else(data: st.DataObject):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple) | st.just((2, 0)))
    first = data.draw(strides_of(shape))
    dtypes = data.draw(st.sampled_from(KNOWN) | st.sampled_from(OTHERS))
    second = data.draw(st.just(first) | strides_of(shape))
    # The stride of an axis of one element says nothing.
    second = tuple(99 if length == 1 else stride for length, stride in zip(shape, second, strict=True))
    source, target = map(Layout, (4096, 4096), (shape, shape), (first, second), dtypes)
    size, places = math.prod(shape), elements(source)
    is_dense = sorted(places) == list(range(4096, 4096 + 4 * size, 4)) and elements(target) == places
    launches, left = plan([dense(4), source], [dense(4), target])
    sizes = sorted(n for one in launches for n in one.table["size"].tolist())
    if dtypes not in OTHERS and (is_dense or not size):
        assert (sizes, left) == (sorted([4, *[size * (1 + ("complex" in source.dtype))] * (size > 0)]), [])
    else:
        assert (sizes, left) == ([4], [1])


def covered(one: Layout) -> list[int]:
    """Return the addresses from the first element to the last, and one of them twice if several elements have it."""
    places = elements(one)
    return [*range(min(places), max(places) + 4, 4), *places[: len(places) - len({*places})]] if places else []


@settings(max_examples=100)
@given(st.lists(pairs(), max_size=4))
def test_memory_that_would_be_divided_twice_is_forbidden_and_no_other_that_is_apart(given: list[tuple[Layout, Layout]]):
    written = [place for _, target in given for place in covered(target)]
    read = [place for source, target in given if source != target for place in covered(source)]
    is_apart = len({*written}) == len(written) and {*read}.isdisjoint(written)
    refused = pytest.raises(InvalidValueError, match=r"share memory|overlaps itself")
    with contextlib.nullcontext() if is_apart else refused:
        require_disjoint([source for source, _ in given], [target for _, target in given])


def test_elements_in_the_gaps_of_another_array_are_forbidden_and_the_rule_is_told():
    columns = [Layout(4096, (3, 2), (4, 1)), Layout(4104, (3, 2), (4, 1))]
    with pytest.raises(InvalidValueError, match="gradients 0 and 1") as raised:
        require_disjoint(columns, columns)
    assert raised.value.__notes__ == [
        "A CuPy array counts as all memory from its first element to its last, with its gaps."
    ]
    # What is only read may be.
    require_disjoint(columns, [dense(6, 8192), dense(6, 12288)])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(
    "architecture", ["sm_90", *later("all", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")]
)
def test_nvcc_compiles_the_kernels_without_a_warning_and_keeps_subnormal_numbers(architecture: str, tmp_path: Path):
    made = tmp_path / "unscale.ptx"
    pairs = [f"{source}_{target}" for source, targets in plans.KERNELS.items() for target in targets]
    # As CuPy does, which asks for subnormal numbers to be flushed.
    options = "-std=c++17", f"-arch={architecture}", "-ftz=true", "-Werror", "all-warnings"
    subprocess.run([require_program("nvcc"), *options, "-ptx", FOLDER / "unscale.cu", "-o", made], check=True)
    names = [f"{kind}_{pair}" for kind in ("unscale", "square") for pair in pairs]
    names += ["add_squares", *(f"clip_{name}" for name in plans.KERNELS)]
    instructions = made.read_text()
    assert sorted(re.findall(r"\.entry (\w+)", instructions)) == sorted(names)
    assert "mul.rn.f32" in instructions
    assert re.findall(r"\b(?:mul|cvt|add|sub|fma|div|rcp)\.[\w.]*ftz.*", instructions) == []
