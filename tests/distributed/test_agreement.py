"""All ranks skip together, back off together, and end with bit-identical states, wherever the bad value is."""

import math
from typing import Any

import numpy as np
import pytest
import scenarios
from axes import require
from libraries import Library
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld, agree

import gradscale
from gradscale import GroupAgreement
from gradscale.testing import run_ranks

World = ThreadWorld | ProcessWorld
Case = tuple[Any, ...]


def test_a_rank_that_differs_raises_or_dies_is_found(world: World):
    agree(world, scenarios.behaving, [("well",)])
    for how in ("differs", "raises", "raises everywhere", *["dies"] * isinstance(world, MPIWorld)):
        with pytest.raises((AssertionError, RuntimeError)):
            agree(world, scenarios.behaving, [(how,)])
    agree(world, scenarios.behaving, [("well",)])


def turns(size: int, scenario, *others: tuple[Any, ...]) -> list[Case]:
    """Return what gives each rank in turn, beside each of the others."""
    return [(scenario, rank, *other) for other in others for rank in range(size)]


def empty(size: int, kind: str, library: str = "numpy") -> list[Case]:
    return [(scenarios.empty_on, rank, bad, kind, library) for rank in range(size) for bad in (None, (rank + 1) % size)]


def cases_of(library: str, size: int) -> list[Case]:
    """Return what ranks agree on, of a library; what is of none is of NumPy."""
    if library == "numpy":
        values = [(value, "numpy") for value in (math.inf, -math.inf, math.nan)]
        return [
            *[case for kind in ("list", "none", "zero-size") for case in empty(size, kind)],
            *turns(size, scenarios.differing, ("scale",), ("policy",), ("call",), ("spike",)),
            *turns(size, scenarios.exhaustion, ()),
            (scenarios.collectives_conform, "numpy", 200),
            *turns(size, scenarios.pure_loop, *values),
        ]
    # On the last rank, and on all.
    bad = [([size - 1], True), ([*range(size)], False)]
    kinds = ("torch", "torch fused", "torch plain") if library == "torch" else (library,)
    return [
        *[(scenarios.collectives_conform, library, 10)] * (library != "jax"),
        *[(scenarios.overflow_on, ranks, math.nan, kind, explicit) for kind in kinds for ranks, explicit in bad],
        *turns(size, scenarios.pure_loop, (math.nan, library)),
    ]


@pytest.mark.parametrize(
    "library",
    [
        *("numpy", "strict", pytest.param("torch", marks=pytest.mark.torch)),
        pytest.param("jax", marks=[pytest.mark.jax, pytest.mark.tier("ranks")]),
    ],
)
def test_ranks_agree(world: World, library: str):
    require(library)
    cases = cases_of(library, world.size)
    if isinstance(world, {"numpy": MPIWorld, "torch": GlooWorld}.get(library, ())):
        # What such a group sends is of this library.
        cases += empty(world.size, "no backend", library)
        cases += [(scenarios.callbacks_without_a_group,)] * (library == "torch")
    agree(world, scenarios.play, cases)


@pytest.mark.parametrize("size", [2, 3, 4], ids=["2 ranks", "3 ranks", "grid"])
@pytest.mark.parametrize("way", scenarios.WAYS_IN_A_GRID)
def test_messages_over_a_list_of_groups_keep_the_order_in_which_they_were_sent(way: str, size: int):
    for odd_rank in range(size):
        worlds = [run_ranks(size, lambda group: group, timeout=60.0) for _ in range(2)]
        grid = scenarios.grid_of_threads()

        def rank(group, odd_rank: int = odd_rank, worlds: Any = worlds, grid: Any = grid) -> Any:
            groups = grid(group.rank) if size == 4 else [world[group.rank] for world in worlds]
            return scenarios.alone_in_a_grid(groups, group.rank, odd_rank, way)

        results = run_ranks(size, rank)
        assert results == results[:1] * size


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
