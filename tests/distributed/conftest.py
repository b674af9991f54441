"""The worlds that distributed tests run in: threads of this process, processes under mpiexec, processes over gloo."""

import pytest
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld

WORLDS = [
    pytest.param(ThreadWorld(2), id="threads-2"),
    pytest.param(ThreadWorld(3), id="threads-3"),
    pytest.param(MPIWorld(2), id="mpi-2", marks=pytest.mark.mpi),
    pytest.param(MPIWorld(3), id="mpi-3", marks=[pytest.mark.mpi, pytest.mark.tier("all")]),
    pytest.param(GlooWorld(2), id="gloo-2", marks=pytest.mark.torch),
    pytest.param(GlooWorld(3), id="gloo-3", marks=[pytest.mark.torch, pytest.mark.tier("all")]),
]


def _fixture(*kinds: type):
    """Return a fixture of the worlds of some kinds, each of 2 or 3 ranks."""

    @pytest.fixture(params=[world for world in WORLDS if isinstance(world.values[0], kinds)])
    def usable(request: pytest.FixtureRequest):
        return request.param

    return usable


world = _fixture(ThreadWorld, ProcessWorld)
processes = _fixture(ProcessWorld)
mpi = _fixture(MPIWorld)
gloo = _fixture(GlooWorld)
