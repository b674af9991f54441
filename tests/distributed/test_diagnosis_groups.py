"""diagnose(gather=True): the same report on every rank, naming the bad one, over threads, MPI and gloo."""

from __future__ import annotations

import functools
from typing import Any

import diagnosis_scenarios as scenarios
import numpy as np
import pytest
from axes import require
from scenarios import grid_of_threads
from worlds import ProcessWorld, ThreadWorld, assert_all_equal, each

import gradscale
from gradscale.testing import ThreadCollectives, run_ranks

World = ThreadWorld | ProcessWorld


@pytest.mark.parametrize("when", ["before", "after step", "after update"])
def test_a_bad_value_on_each_rank_in_turn_is_named_on_every_rank(world: World, when: str) -> None:
    cases = [(rank, "numpy", when) for rank in range(world.size)]
    for (bad_rank, *_), results in each(world, scenarios.bad_on, cases):
        assert_all_equal(results)
        report = results[0]["report"]
        assert [(one["name"], one["rank"], one["nan"]) for one in report["entries"] if one["nan"]] == [
            ("b", [bad_rank], 10)
        ]
        assert len(report["entries"]) == 3 * world.size
        assert {one["largest"] for one in report["entries"]} == {None, 1.0}
        assert (report["scale"], report["iteration"], report["cause"]) == (65536.0, 1, "scale")
        assert f"b on rank {bad_rank} overflows" in report["explanation"]
        assert results[0]["text"].splitlines()[4].split()[:2] == ["b", str(bad_rank)]
        assert (results[0]["skipped"], results[0]["local"]) == (True, 3)


@pytest.mark.parametrize(
    "library", ["strict", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_arrays_of_any_library_are_gathered_over_any_group(world: World, library: str) -> None:
    require(library)
    results = world.run(scenarios.bad_on, world.size - 1, library, "after step")
    assert_all_equal(results)
    assert [one["rank"] for one in results[0]["report"]["entries"] if one["nan"]] == [[world.size - 1]]


def test_a_skipped_step_is_diagnosed_over_the_group_by_itself(world: World) -> None:
    cases = [(rank, bad_loss) for rank in range(world.size) for bad_loss in (False, True)]
    for (bad_rank, bad_loss), results in each(world, scenarios.on_overflow, cases):
        assert_all_equal(results)
        assert results[0]["cause"] == ("model" if bad_loss else "scale")
        assert results[0]["loss_nonfinite"] == int(bad_loss)
        assert {tuple(one["rank"]) for one in results[0]["entries"] if one["inf"]} == {(bad_rank,)}


def test_a_rank_without_gradients_takes_part(world: World) -> None:
    for results in world.run_each(scenarios.nothing_on, [(rank,) for rank in range(world.size)]):
        assert_all_equal(results)
        assert len(results[0]["entries"]) == 3 * (world.size - 1)
        assert {one["largest"] for one in results[0]["entries"]} == {1.0}


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("too few", "InvalidValueError", "one for each of the optimizer's 3 parameters, got 1"),
        ("failing", "InvalidTypeError", ""),
        ("gradient", "InvalidTypeError", ""),
    ],
)
def test_whatever_one_rank_raises_is_an_error_on_all_and_the_group_goes_on(
    world: World, kind: str, error: str, said: str
) -> None:
    cases = [(rank, kind) for rank in range(world.size)]
    for (bad_rank, _), results in zip(cases, world.run_each(scenarios.refused_on, cases), strict=True):
        for rank, failure in enumerate(results):
            assert said in failure.message
            assert failure.kind == (error if rank == bad_rank else "BackendError")
            assert rank == bad_rank or f"failed on rank {bad_rank}, and so on all: {error}" in failure.message


def test_a_report_of_many_parameters_is_bounded_and_keeps_the_worst(world: World) -> None:
    results = world.run(scenarios.many, 3000)
    assert_all_equal(results)
    listed = 4096 // world.size * world.size
    assert results[0]["entries"] == listed
    assert results[0]["omitted"] == (0, 3000 * world.size - listed)
    assert results[0]["worst"] == [((0,), k) for k in range(5)]
    assert results[0]["head"].startswith(f"5 of {3000 * world.size} gradients")


@pytest.mark.parametrize("bad_rank", range(4))
def test_groups_of_a_grid_are_gathered_in_turn(bad_rank: int) -> None:
    groups = grid_of_threads()

    def train(collectives: ThreadCollectives) -> Any:
        scaler = gradscale.ShardedGradScaler(group=groups(collectives.rank))
        scaler.scale(np.float32(1.0))
        value = np.inf if collectives.rank == bad_rank else collectives.rank + 1.0
        return scaler.diagnose(scenarios.SGD([np.full(2, value, np.float32)]), gather=True)

    reports = run_ranks(4, train)
    assert all(report == reports[0] for report in reports)
    coordinates = [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert sorted(entry.rank for entry in reports[0].entries) == sorted(coordinates)
    assert reports[0].entries[0].rank == coordinates[bad_rank]
    assert "/".join(map(str, coordinates[bad_rank])) in str(reports[0])


def test_the_report_has_the_scale_and_iteration_of_a_rank_that_has_called_scale() -> None:
    for scaling_rank in range(3):
        results = run_ranks(3, functools.partial(scenarios.scaled_on, scaling_rank=scaling_rank))
        assert_all_equal(results)
        assert [(one["scale"], one["iteration"]) for one in results[0]] == [(65536.0, 1), (32768.0, 2), (32768.0, 2)]


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["no tensor", "overlapping"])
def test_torchs_replacement_gathers_where_one_rank_holds_what_cannot_be_unscaled(kind: str) -> None:
    require("torch")
    for bad_rank in range(2):
        results = run_ranks(2, functools.partial(scenarios.unusual_on, bad_rank=bad_rank, kind=kind))
        if kind == "overlapping":
            assert_all_equal(results)
            assert [one["largest"] for one in results[0]["entries"]] == [1.0, 1.0]
            continue
        assert results[bad_rank].kind == "InvalidTypeError"
        assert results[1 - bad_rank].kind == "BackendError"
        assert f"failed on rank {bad_rank}" in results[1 - bad_rank].message
