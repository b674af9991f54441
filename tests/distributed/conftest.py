"""The worlds that distributed tests run in: threads of this process, and real processes under mpiexec."""

import pytest
from axes import require
from worlds import MPIWorld, ThreadWorld

WORLDS = [
    pytest.param(ThreadWorld(2), id="threads-2"),
    pytest.param(ThreadWorld(3), id="threads-3"),
    pytest.param(MPIWorld(2), id="mpi-2", marks=pytest.mark.mpi),
    pytest.param(MPIWorld(3), id="mpi-3", marks=pytest.mark.mpi),
]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> ThreadWorld | MPIWorld:
    """Return a world of 2 or 3 ranks."""
    if isinstance(request.param, MPIWorld):
        require("mpi")
    return request.param
