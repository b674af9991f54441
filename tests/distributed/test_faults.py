"""Ranks that drift, fail or come late: an error on every rank that can still be told, never a hang."""

from pathlib import Path

import fault_scenarios
import pytest
import scenarios
from fault_scenarios import CLEAN
from worlds import Failure, GlooWorld, MPIWorld, ProcessWorld, ThreadWorld

World = ThreadWorld | ProcessWorld

EXPECTED = {
    "scale": ("scale from 32768.0 to 65536.0", "here {}"),
    "tracker": ("growth_tracker from 0 to 3", "here {}"),
    "policy": ("policy (here DynamicScale(", "growth_interval={}"),
    "call": ("iteration from 1 to 2", "here {}"),
}
OWN = {"scale": ("32768.0", "65536.0"), "tracker": ("3", "0"), "policy": ("7", "5"), "call": ("1", "2")}


@pytest.mark.tier("quick")
@pytest.mark.parametrize("what", list(EXPECTED))
def test_a_rank_that_has_drifted_is_an_error_on_every_rank(world: World, what: str) -> None:
    cases = [(drifting_rank, what, {"timeout": 60.0}) for drifting_rank in range(world.size)]
    for drifting_rank, results in enumerate(world.run_each(scenarios.drift, cases)):
        for rank, result in enumerate(results):
            assert not isinstance(result, Failure), result
            failure = result["failure"]
            assert failure is not None, f"rank {rank} did not notice"
            assert failure.kind == "ScaleDesyncError"
            assert "RuntimeError" in failure.bases
            values, own = EXPECTED[what]
            assert values in failure.message
            if what != "call":
                assert own.format(OWN[what][rank != drifting_rank]) in failure.message
            assert f"rank {rank} of {world.size}" in failure.message
            assert result["steps"] == 0


# What a rank that does not come leaves the others in, what they wait for, and what they are told the next time.
STEP = "the agreement on a step"
AGAIN = ("CollectiveTimeoutError", "rank {} of {} waited")
WAITING = {
    "numpy": (2, STEP, AGAIN),
    "torch": (2, STEP, AGAIN),
    "torch fused": (2, STEP, AGAIN),
    "norm": (2, STEP, ("BackendError", "needs set_group() with another one")),
    "diagnosis": (2, STEP, ("BackendError", "needs set_group() with another one")),
    "agreement": (1, STEP, ("BackendError", "construct a new GroupAgreement on all of them")),
    "construction": (None, "the construction of a ShardedGradScaler", AGAIN),
}


def assert_times_out(world: World, operation: str, how: str, folder: Path) -> None:
    """Assert that a rank that does not come, each in turn, is a timeout on the others, who cannot go on."""
    iteration, waited_for, (kind, then) = WAITING[operation]
    timeout = world.short_timeout
    for absent_rank in range(world.size):
        (own := folder / str(absent_rank)).mkdir()
        settings = {"timeout": timeout, "folder": str(own)}
        results = world.run(fault_scenarios.absence, operation, absent_rank, how, settings)
        if how == "raises":
            assert results[absent_rank].kind == "ValueError"
        for rank, result in enumerate(results):
            if rank == absent_rank:
                continue
            first, second = result["failures"]
            assert first.kind == "CollectiveTimeoutError", first
            assert {"TimeoutError", "GradscaleError"} <= set(first.bases)
            told = {"rank": rank, "size": world.size, "seconds": timeout}
            assert first.attributes == told | {"iteration": iteration, "operation": waited_for}
            where = "" if iteration is None else f" in iteration {iteration}"
            assert f"rank {rank} of {world.size} waited {timeout:g} s for {waited_for}{where}" in first.message
            assert second.kind == kind
            assert then.format(rank, world.size) in second.message
            assert 0.9 * timeout <= result["seconds"] < 30.0
            assert result["steps"] in (1, None)


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
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others(
    world: World, operation: str, how: str, tmp_path: Path
) -> None:
    assert_times_out(world, operation, how, tmp_path)


@pytest.mark.tier("ranks")
@pytest.mark.parametrize(("operation", "how"), [("torch", "raises"), ("torch", "is late"), ("torch fused", "is late")])
def test_a_rank_that_does_not_come_is_a_timeout_on_the_others_of_torchs_scaler(
    gloo: GlooWorld, operation: str, how: str, tmp_path: Path
) -> None:
    assert_times_out(gloo, operation, how, tmp_path)


@pytest.mark.tier("ranks")
def test_a_rank_that_constructs_no_scaler_is_a_timeout_on_the_others(mpi: MPIWorld, tmp_path: Path) -> None:
    assert_times_out(mpi, "construction", "is late", tmp_path)


@pytest.mark.tier("ranks")
def test_all_ranks_suspended_for_longer_than_the_timeout_go_on(processes: ProcessWorld) -> None:
    """The whole table of faults is in test_fault_table.py."""
    for answer in processes.run(fault_scenarios.suspended, "all suspended for longer than the timeout", 1, "numpy"):
        assert not isinstance(answer, Failure), answer
        assert answer.pop("with the fault") > fault_scenarios.LONGER - 1.0, "the ranks were not suspended"
        del answer["seconds"]
        assert answer == CLEAN


@pytest.mark.tier("ranks")
def test_a_child_after_fork_is_refused_and_its_parents_go_on(processes: ProcessWorld) -> None:
    for kind in ["numpy", "torch"] if isinstance(processes, GlooWorld) else ["numpy"]:
        for rank, answer in enumerate(processes.run(fault_scenarios.forked, 1, kind)):
            assert not isinstance(answer, Failure), answer
            said = answer.pop("said")
            assert answer == {"steps": 2, "scale": 32768.0}
            if rank != 1:
                continue
            child, parent, stepped, constructed = said
            for message in (stepped, constructed):
                assert message.startswith("BackendError: "), message
                assert f"process {parent}, got process {child}, a child after fork" in message
            assert f"rank 1 of {processes.size} is process {parent}" in stepped
