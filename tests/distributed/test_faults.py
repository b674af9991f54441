"""Ranks that fail or come late: an error on every rank that can still be told, never a hang."""

from pathlib import Path

import fault_scenarios
import pytest
from worlds import Failure, GlooWorld, MPIWorld, ProcessWorld, ThreadWorld, agree

World = ThreadWorld | ProcessWorld


def assert_times_out(world: World, operation: str, how: str, folder: Path):
    """Assert that a rank that does not come, each in turn, is a timeout on the others, who cannot go on."""
    for absent_rank in range(world.size):
        (own := folder / str(absent_rank)).mkdir()
        settings = {"timeout": world.short_timeout, "folder": str(own)}
        results = world.run(fault_scenarios.absence, operation, absent_rank, how, settings)
        absent = results.pop(absent_rank)
        assert results == [None] * (world.size - 1)
        assert isinstance(absent, Failure) == (how == "raises")


LATER = pytest.mark.tier("ranks")


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        pytest.param("numpy", "is late", marks=pytest.mark.tier("quick")),
        ("numpy", "raises"),
        pytest.param("norm", "is late", marks=LATER),
        pytest.param("diagnosis", "is late", marks=LATER),
        pytest.param("agreement", "is late", marks=LATER),
    ],
)
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others(world: World, operation: str, how: str, tmp_path: Path):
    assert_times_out(world, operation, how, tmp_path)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(("operation", "how"), [("torch", "raises"), ("torch", "is late"), ("torch fused", "is late")])
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others_of_torchs_scaler(
    gloo: GlooWorld, operation: str, how: str, tmp_path: Path
):
    assert_times_out(gloo, operation, how, tmp_path)


@pytest.mark.tier("ranks")
def test_a_rank_that_constructs_no_scaler_is_a_timeout_on_the_others(mpi: MPIWorld, tmp_path: Path):
    assert_times_out(mpi, "construction", "is late", tmp_path)


@pytest.mark.tier("ranks")
def test_all_ranks_suspended_for_longer_than_the_timeout_go_on(processes: ProcessWorld):
    """The whole table of faults is in test_fault_table.py."""
    agree(processes, fault_scenarios.suspended, [("all suspended for longer than the timeout", 1, "numpy")])


@pytest.mark.tier("ranks")
@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_a_child_after_fork_is_refused_and_its_parents_go_on(processes: ProcessWorld, kind: str):
    agree(processes, fault_scenarios.forked, [(1, kind)])
