"""Plans of the CuPy adapter: which arrays go into one launch, what their rows say, and which may not be written.

And the source of the kernels that they name, under nvcc. Nothing here needs CuPy or a device.
"""

from __future__ import annotations

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
from hypothesis import given
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


def test_thousands_of_arrays_are_one_launch_for_each_pair_of_dtypes():
    sources = [dense(1000, 4096 * k) for k in range(3000)] + [dense(10, 4096 * k, "float16") for k in range(50)]
    targets = sources[:3000] + [dense(10, 4096 * k, "float32") for k in range(50)]
    launches, others = plan(sources, targets)
    found = [(one.pair, len(one.table), len(one.chunks)) for one in launches]
    assert (found, others) == ([("float32_float32", 3000, 3000), ("float16_float32", 50, 50)], [])


def test_a_long_array_is_cut_into_chunks_and_an_empty_one_has_no_row():
    sizes = [plans.CHUNK, plans.CHUNK + 1, 0, 1, 5 * plans.CHUNK]
    launches, _ = plan(*[[dense(size) for size in sizes]] * 2)
    assert launches[0].chunks.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], *([3, k] for k in range(5))]
    assert launches[0].table["size"].tolist() == [size for size in sizes if size]
    assert plan([dense(0)], [dense(0)]) == plan([], []) == ([], [])


DENSE = {
    "C": ((3, 4, 5), (20, 5, 1)),
    "Fortran": ((3, 4, 5), (1, 3, 12)),
    "transposed": ((4, 3, 5), (5, 20, 1)),
    "one row": ((1, 60), (7, 1)),
    "ones": ((60, 1, 1), (1, 99, -3)),
    "0-d": ((), ()),
}


@pytest.mark.parametrize(("shape", "strides"), DENSE.values(), ids=DENSE)
def test_memory_without_gaps_is_read_in_its_own_order(shape: tuple[int, ...], strides: tuple[int, ...]):
    for dtype, parts in (("float32", 1), ("complex64", 2)):
        layouts = [Layout(4096, shape, strides, dtype)]
        (one,), others = plan(layouts, layouts)
        assert (one.table["size"].tolist(), others) == ([math.prod(shape) * parts], [])


LEFT = {
    "narrowed": (dense(4, dtype="float64"), dense(4, dtype="float16")),
    "widened": (dense(4, dtype="complex64"), dense(4, dtype="complex128")),
    "rows apart": (Layout(4096, (3, 4), (8, 1)),) * 2,
    "every second": (Layout(4096, (5,), (2,), "complex64"),) * 2,
    "reversed": (Layout(4096, (5,), (-1,)),) * 2,
    "two orders": (Layout(4096, (3, 4), (4, 1), "float16"), Layout(8192, (3, 4), (1, 3))),
    "target": (dense(5), Layout(8192, (5,), (2,))),
    "broadcast": (Layout(4096, (5,), (0,)), dense(5, 8192)),
}


@pytest.mark.parametrize(("source", "target"), LEFT.values(), ids=LEFT)
def test_other_dtypes_memory_with_gaps_and_two_orders_are_left_to_the_pure_core(source: Layout, target: Layout):
    launches, others = plan([dense(4), source], [dense(4), target])
    assert ([len(one.table) for one in launches], others) == ([1], [1])


# Few places, so that many meet.
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


def is_disjoint(sources: list[Layout], targets: list[Layout]) -> bool:
    """Look at every element that is written: it must be there once, and be read in its own place alone."""
    written = [element for target in targets for element in elements(target)]
    read = [
        element
        for source, target in zip(sources, targets, strict=True)
        if source != target
        for element in elements(source)
    ]
    return len(set(written)) == len(written) and not set(read) & set(written)


def covered(one: Layout) -> set[int]:
    """Return the addresses from the first element to the last."""
    return set(range(min(elements(one)), max(elements(one)) + 4, 4)) if elements(one) else set()


def is_surely_disjoint(sources: list[Layout], targets: list[Layout]) -> bool:
    """Look at all memory between the elements, too."""
    read = [covered(source) for source, target in zip(sources, targets, strict=True) if source != target]
    written = [covered(target) for target in targets]
    places = [place for one in written for place in one]
    return len(set(places)) == len(places) and set().union(*read).isdisjoint(places)


@given(st.lists(pairs(), max_size=4))
def test_memory_that_would_be_divided_twice_is_forbidden_and_no_other_that_is_apart(given: list[tuple[Layout, Layout]]):
    sources, targets = [source for source, _ in given], [target for _, target in given]
    if is_disjoint(sources, targets) and is_surely_disjoint(sources, targets):
        require_disjoint(sources, targets)
        return
    with pytest.raises(InvalidValueError, match=r"share memory|overlaps itself"):
        require_disjoint(sources, targets)


def test_elements_in_the_gaps_of_another_array_are_forbidden_and_the_rule_is_told():
    columns = [Layout(4096, (3, 2), (4, 1)), Layout(4104, (3, 2), (4, 1))]
    assert is_disjoint(columns, columns)
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
