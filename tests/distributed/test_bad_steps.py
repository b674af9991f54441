"""Spikes and refused steps: all ranks skip together, whichever of them has the reason, and the scale stays as it is."""

from __future__ import annotations

import bad_step_scenarios as scenarios
import pytest
from axes import require
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld, agree, each

LIBRARIES = ["numpy", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.tier("ranks")])]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale_-then-step"])
@pytest.mark.parametrize("reason", ["spike", "refused"])
def test_the_lowest_rank_with_a_reason_is_told_to_all(world, reason: str, explicit: bool, library: str):
    require(library)
    agree(world, scenarios.bad_on, [(rank, reason, library, explicit) for rank in range(world.size)])


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_overflow_comes_before_a_refusal_and_that_before_a_spike(world, library: str):
    require(library)
    agree(world, scenarios.gravest, [(library,)])


def test_every_rank_counts_what_any_rank_has_seen(world):
    agree(world, scenarios.counted, [(rank,) for rank in range(world.size)])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_without_a_loss_hears_of_a_spike(world, library: str):
    require(library)
    agree(world, scenarios.without_a_loss, [(library,)])


def test_another_rule_on_one_rank_is_named_on_all(world):
    for _, said in each(world, scenarios.another_rule, [(rank,) for rank in range(world.size)]):
        assert len(set(said)) == 1
        assert "window=9" in said[0]


def test_a_refusal_after_unscale_is_an_error_and_the_step_is_made(world):
    agree(world, scenarios.refused_too_late, [()])


ALSO_FUSED = [*LIBRARIES, pytest.param("torch fused", marks=LIBRARIES[-1].marks)]


@pytest.mark.parametrize("library", ALSO_FUSED)
@pytest.mark.parametrize("bad", ["nan", "inf", "spike", "refused"])
def test_a_guarded_run_is_to_the_bit_the_run_without_the_bad_batch_of_any_rank(world, bad: str, library: str):
    require(library.split()[0])
    agree(world, scenarios.guarded, [(rank, bad, library) for rank in range(world.size)])


@pytest.mark.parametrize("library", ALSO_FUSED)
def test_an_optimizer_refuses_on_all_ranks_or_the_next_message_says_on_which(world, library: str):
    require(library.split()[0])
    agree(world, scenarios.declined, [(rank, library) for rank in (None, *range(world.size))])


@pytest.mark.parametrize("reason", ["spike", "overflow"])
def test_a_step_that_all_skip_may_be_left_out_by_some(world, reason: str):
    agree(world, scenarios.left_out, [(rank, reason) for rank in range(world.size)])


def test_threads_decide_as_the_pure_rule_does():
    ((_, (found, other)),) = each(ThreadWorld(2), scenarios.decisions, [("numpy", 600)])
    assert found == other == scenarios.expected(2, 600)
    assert found.count(("spike", 0)) > 5 < found.count(("spike", 1))


@pytest.mark.tier("all")
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(MPIWorld, marks=pytest.mark.mpi), pytest.param(GlooWorld, marks=pytest.mark.torch)],
    ids=["mpi", "gloo"],
)
def test_three_processes_decide_as_the_pure_rule_does(kind: type[ProcessWorld], library: str):
    require("mpi" if kind is MPIWorld else "torch")
    require(library)
    ((_, found),) = each(kind(3), scenarios.decisions, [(library, 10_000)])
    assert found == [scenarios.expected(3, 10_000)] * 3
