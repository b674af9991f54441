"""The table of faults x worlds: an error on every living rank, or the right result, within the timeout and 5 s."""

import pickle
import subprocess
from pathlib import Path

import fault_scenarios
import pytest
from fault_scenarios import FAULTS
from worlds import Failure, GlooWorld, MPIWorld, ProcessWorld, mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

KINDS = {"MPIWorld": ["numpy"], "GlooWorld": ["numpy", "torch"]}
WORLDS = [
    pytest.param(world, kind, id=f"{name}-{size}-{kind}", marks=mark)
    for size in (2, 3)
    for world, name, mark in ((MPIWorld(size), "mpi", pytest.mark.mpi), (GlooWorld(size), "gloo", pytest.mark.torch))
    for kind in KINDS[type(world).__name__]
]


def answers_of(world: ProcessWorld, name: str, faulty_rank: int, kind: str, folder: Path):
    """Return what each rank answers, for a list of one case; None of one that was killed."""
    if name != "killed":
        return [[answer] for answer in world.run(fault_scenarios.suspended, name, faulty_rank, kind)]
    if isinstance(world, GlooWorld):
        answers, _ = world.launch(fault_scenarios.fault, [(name, faulty_rank, kind)], 90.0)
        return list(answers)
    command = mpi_command(world.size, fault_scenarios.__file__, str(world.size), folder, name, str(faulty_rank), kind)
    subprocess.run(command, env=mpi_environment(), timeout=90, check=False)
    files = [folder / f"{rank}.pickle" for rank in range(world.size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("world", "kind"), WORLDS)
def test_a_fault_is_an_error_on_every_living_rank_or_harmless(
    world: ProcessWorld, kind: str, name: str, tmp_path: Path
):
    for faulty_rank in range(world.size):
        (folder := tmp_path / str(faulty_rank)).mkdir()
        answers = answers_of(world, name, faulty_rank, kind, folder)
        faulty = answers.pop(faulty_rank)
        # The scenario has asserted what a fault comes to.
        assert answers == [[None]] * (world.size - 1), (faulty_rank, answers)
        if name == "raises":
            assert isinstance(faulty[0], Failure)
            assert faulty[0].kind == "ValueError"
        else:
            assert faulty == (None if name == "killed" else [None]), faulty_rank
