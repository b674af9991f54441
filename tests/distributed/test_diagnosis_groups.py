"""diagnose(gather=True): the same report on every rank, naming the bad one, over threads, MPI and gloo."""

from __future__ import annotations

import collections
from typing import Any

import diagnosis_scenarios as scenarios
import numpy as np
import pytest
from axes import require
from scenarios import SGD, grid_of_threads
from worlds import ProcessWorld, ThreadWorld, agree

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

ROWS = [
    *((f"named {when}", scenarios.bad_on, ("numpy", when)) for when in ("before", "after step", "after update")),
    ("named by the step", scenarios.on_overflow, (False,)),
    ("named by the step with a bad loss", scenarios.on_overflow, (True,)),
    ("without gradients", scenarios.nothing_on, ()),
    *((f"broken {place}, found by itself", scenarios.found_by_itself_on, (place,)) for place in ("weight", "state")),
    *((f"refused {kind}", scenarios.refused_on, (kind,)) for kind in ("too few", "failing", "gradient")),
]


@pytest.mark.parametrize(("scenario", "others"), [pytest.param(*row, id=name) for name, *row in ROWS])
def test_each_rank_in_turn_is_told_of_by_all(world: ThreadWorld | ProcessWorld, scenario, others: tuple[Any, ...]):
    agree(world, scenario, [(rank, *others) for rank in range(world.size)])


@pytest.mark.parametrize(
    "library", ["strict", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_arrays_of_any_library_are_gathered_over_any_group(world: ThreadWorld | ProcessWorld, library: str):
    require(library)
    agree(world, scenarios.bad_on, [(world.size - 1, library, "after step")])


def test_a_report_of_many_parameters_is_bounded_and_keeps_the_worst(world: ThreadWorld | ProcessWorld):
    agree(world, scenarios.many, [(3000,)])


def test_the_report_has_the_scale_and_iteration_of_a_rank_that_has_called_scale():
    agree(ThreadWorld(3), scenarios.scaled_on, [(rank,) for rank in range(3)])


@pytest.mark.parametrize("place", ["weight", "state", "both"])
@pytest.mark.parametrize(
    "library", ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_what_is_broken_on_each_rank_in_turn_is_named_on_every_rank(
    world: ThreadWorld | ProcessWorld, place: str, library: str
):
    require(library)
    agree(world, scenarios.broken_on, [(rank, place, library) for rank in (*range(world.size), -1)])


def test_a_report_of_many_broken_arrays_is_bounded_and_names_a_few_ranks():
    def look(collectives: ThreadCollectives):
        scaler = gradscale.ShardedGradScaler(group=collectives)
        scaler.scale(np.float32(1.0))
        values = [np.full(k % 7 + 1, np.nan, np.float32) for k in range(450)]
        optimizer = scenarios.SGD([np.ones(1, np.float32)])
        return scaler.diagnose(optimizer, params=values[:400], state=values[400:], gather=True)

    reports = run_ranks(10, look)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    listed = 4096 // 10
    assert (len(report.broken), report.omitted_broken) == (10 * listed, 10 * (450 - listed))
    # Of each rank all weights are listed, and of the state the worst.
    assert [entry.kind for entry in report.broken] == ["weight"] * 4000 + ["state"] * (10 * (listed - 400))
    assert {entry.nan for entry in report.broken[4000:]} == {7, 6}
    assert "on rank 0, 1, 2, 3, 4, 5, 6, 7 and others, " in report.explanation
    assert f"... and {4500 - 20} more" in str(report).splitlines()


@pytest.mark.parametrize("bad_rank", range(4))
def test_groups_of_a_grid_are_gathered_in_turn(bad_rank: int):
    groups = grid_of_threads()

    def train(collectives: ThreadCollectives):
        scaler = gradscale.ShardedGradScaler(group=groups(collectives.rank))
        scaler.scale(np.float32(1.0))
        value = np.inf if collectives.rank == bad_rank else collectives.rank + 1.0
        # One more than are listed of each rank.
        return scaler.diagnose(SGD([np.full(2, value, np.float32) for _ in range(1025)]), gather=True)

    reports = run_ranks(4, train)
    assert all(report == reports[0] for report in reports)
    coordinates = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert collections.Counter(entry.rank for entry in reports[0].entries) == dict.fromkeys(coordinates, 1024)
    assert (reports[0].omitted_nonfinite, reports[0].omitted_finite) == (1, 3)
    assert reports[0].entries[0].rank == coordinates[bad_rank]
    assert "/".join(map(str, coordinates[bad_rank])) in str(reports[0])
