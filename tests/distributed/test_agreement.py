"""All ranks skip together, back off together, and end with bit-identical states, wherever the bad value is."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scenarios
from axes import require
from libraries import Library
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld, agree, each

import gradscale
from gradscale import GroupAgreement

World = ThreadWorld | ProcessWorld
Cases = Callable[[int], list[tuple[Any, ...]]]
MARKS = {"jax": [pytest.mark.jax, pytest.mark.tier("ranks")]} | {
    key: [pytest.mark.torch] for key in ("torch", "torch fused", "torch plain")
}


def test_a_rank_that_differs_raises_or_dies_is_found(world: World):
    agree(world, scenarios.behaving, [("well",)])
    for how in ("differs", "raises", "raises everywhere", *["dies"] * isinstance(world, MPIWorld)):
        with pytest.raises((AssertionError, RuntimeError)):
            agree(world, scenarios.behaving, [(how,)])
    agree(world, scenarios.behaving, [("well",)])


def turns(*others: Any) -> Cases:
    """Return what gives each rank in turn, beside each of the others."""
    each = [other if isinstance(other, tuple) else (other,) for other in others]
    return lambda size: [(rank, *other) for other in each for rank in range(size)]


def empty(kind: str, library: str = "numpy") -> Cases:
    return lambda size: [(rank, bad, kind, library) for rank in range(size) for bad in (None, (rank + 1) % size)]


KINDS = ("list", "none", "zero-size")
# The scenario, its cases, and the library.
ROWS: list[tuple[str, Any, Cases, str]] = [
    ("empty", scenarios.empty_on, lambda size: [case for kind in KINDS for case in empty(kind)(size)], "numpy"),
    ("pure-differing", scenarios.differing, turns("scale", "policy", "call", "spike"), "numpy"),
    ("pure-underflow", scenarios.exhaustion, lambda size: [(rank,) for rank in range(size)], "numpy"),
    ("conform-numpy", scenarios.collectives_conform, lambda _: [("numpy", 200)], "numpy"),
]
for name in ("strict", "torch", "torch fused", "torch plain", "jax"):
    # On the last rank, and on all.
    steps = lambda size, name=name: [([size - 1], math.nan, name, True), ([*range(size)], math.nan, name, False)]  # noqa: E731
    ROWS.append((f"step-{name}", scenarios.overflow_on, steps, name))
    if name in ("strict", "torch"):
        ROWS.append((f"conform-{name}", scenarios.collectives_conform, lambda _, name=name: [(name, 10)], name))
for name in ("numpy", "strict", "torch", "jax"):
    values = [(value, name) for value in ((math.inf, -math.inf, math.nan) if name == "numpy" else (math.nan,))]
    ROWS.append((f"pure-{name}", scenarios.pure_loop, turns(*values), name))


@pytest.mark.parametrize(
    ("scenario", "cases", "library"),
    [
        pytest.param(scenario, cases, library, id=name, marks=MARKS.get(library, []))
        for name, scenario, cases, library in ROWS
    ],
)
def test_ranks_agree(world: World, scenario, cases: Cases, library: str):
    require(library.split()[0])
    agree(world, scenario, cases(world.size))


@pytest.mark.tier("ranks")
def test_a_rank_that_never_has_an_array_needs_no_backend(processes: ProcessWorld):
    cases = empty("no backend", "torch" if isinstance(processes, GlooWorld) else "numpy")
    agree(processes, scenarios.empty_on, cases(processes.size))


@pytest.mark.tier("ranks")
@pytest.mark.torch
def test_replicated_ranks_that_decide_alone_tell_once():
    each(GlooWorld(2), scenarios.callbacks_without_a_group, [()])


def test_a_count_of_another_dtype_or_library_and_a_spike_that_is_no_flag_are_refused(strict: Library):
    policy = gradscale.DynamicScale()
    agree, state = GroupAgreement(scenarios.Alone(), policy), policy.init(like=np.zeros((), np.float32))
    for dtype in ("uint32", "int64", "int16", "float32", "bool"):
        with pytest.raises(gradscale.InvalidTypeError, match="nonfinite must be a 0-d int32 array"):
            agree(np.zeros((), dtype), state)
    for spike in (True, np.zeros(1, bool), np.zeros((), np.int32), 0):
        with pytest.raises(gradscale.InvalidTypeError, match="spike must be a 0-d bool array"):
            agree(np.zeros((), np.int32), state, spike)
    xp = strict.xp
    for wrong in ((xp.asarray(0, dtype=xp.int32),), (np.zeros((), np.int32), xp.asarray(False))):
        with pytest.raises(gradscale.InvalidTypeError, match=r"array of the state's library, numpy, such as .* got Ar"):
            agree(wrong[0], state, *wrong[1:])
