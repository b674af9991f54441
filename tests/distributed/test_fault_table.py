"""The table of faults x worlds: an error on every living rank, or the right result, within the timeout and 5 s."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import fault_scenarios
import pytest
from axes import require
from fault_scenarios import CLEAN, FAULTS, TIMEOUT
from worlds import Failure, GlooWorld, MPIWorld, ProcessWorld, mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

GRACE = 5.0  # seconds
# What a fault comes to: the right result on all ranks, or an error on all that live.
HARMLESS = {"one suspended for a while", "all suspended for longer than the timeout", "late"}
KINDS = {"MPIWorld": ["numpy"], "GlooWorld": ["numpy", "torch"]}
WORLDS = [
    pytest.param(world, kind, id=f"{name}-{size}-{kind}", marks=mark)
    for size in (2, 3)
    for world, name, mark in ((MPIWorld(size), "mpi", pytest.mark.mpi), (GlooWorld(size), "gloo", pytest.mark.torch))
    for kind in KINDS[type(world).__name__]
]


def answers_of(world: ProcessWorld, name: str, faulty_rank: int, kind: str, folder: Path) -> list[Any]:
    """Return what each rank answers; None of one that was killed."""
    if name != "killed":
        return world.run(fault_scenarios.suspended, name, faulty_rank, kind)
    if isinstance(world, MPIWorld):
        arguments = map(str, (world.size, folder, name, faulty_rank, kind))
        command = mpi_command(world.size, fault_scenarios.__file__, *arguments)
        printed = subprocess.run(
            command, env=mpi_environment(), capture_output=True, text=True, timeout=90, check=False
        )
        output = printed.stdout + printed.stderr
    else:
        assert isinstance(world, GlooWorld)
        task = folder / "task.pickle"
        task.write_bytes(pickle.dumps(("fault_scenarios", "fault", [(name, faulty_rank, kind)])))
        _, output = world.launch(task, 90.0)
    found = [folder / f"{rank}.pickle" for rank in range(world.size)]
    answers = [pickle.loads(answer.read_bytes()) if answer.exists() else None for answer in found]
    missing = [rank for rank, answer in enumerate(answers) if answer is None]
    assert missing == [faulty_rank], f"{answers}\n{output}"
    # A rank over gloo answers for a list of cases.
    return [answer[0] if isinstance(answer, list) else answer for answer in answers]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("world", "kind"), WORLDS)
def test_a_fault_is_an_error_on_every_living_rank_or_harmless(
    world: ProcessWorld, kind: str, name: str, tmp_path: Path
) -> None:
    require("mpi" if isinstance(world, MPIWorld) else "torch")
    for faulty_rank in range(world.size):
        (folder := tmp_path / str(faulty_rank)).mkdir()
        for rank, answer in enumerate(answers_of(world, name, faulty_rank, kind, folder)):
            where = f"rank {rank} of {world.size}, with rank {faulty_rank} {name}: {answer}"
            if name == "killed" and rank == faulty_rank:
                assert answer is None, where
                continue
            if name == "raises" and rank == faulty_rank:
                assert isinstance(answer, Failure), where
                assert answer.kind == "ValueError", where
                continue
            assert not isinstance(answer, Failure), where
            suspended = fault_scenarios.LONGER if name.startswith("all") else 0.0
            assert answer.pop("seconds") < suspended + TIMEOUT + GRACE, where
            del answer["with the fault"]
            if name in HARMLESS:
                assert answer == CLEAN, where
            else:
                assert answer["failure"] is not None, where
                assert "GradscaleError" in answer["failure"].bases, where
                assert answer["steps"] < CLEAN["steps"], where
