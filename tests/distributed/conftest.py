"""The worlds that distributed tests run in: threads of this process, processes under mpiexec, processes over gloo."""

from typing import TypeVar

import pytest
from axes import require
from worlds import GlooWorld, MPIWorld, ProcessWorld, ThreadWorld

WORLDS = [
    pytest.param(ThreadWorld(2), id="threads-2"),
    pytest.param(ThreadWorld(3), id="threads-3"),
    pytest.param(MPIWorld(2), id="mpi-2", marks=pytest.mark.mpi),
    pytest.param(MPIWorld(3), id="mpi-3", marks=[pytest.mark.mpi, pytest.mark.tier("all")]),
    pytest.param(GlooWorld(2), id="gloo-2", marks=pytest.mark.torch),
    pytest.param(GlooWorld(3), id="gloo-3", marks=[pytest.mark.torch, pytest.mark.tier("all")]),
]


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> ThreadWorld | ProcessWorld:
    """Return a world of 2 or 3 ranks."""
    return _usable(request.param)


@pytest.fixture(params=[world for world in WORLDS if isinstance(world.values[0], ProcessWorld)])
def processes(request: pytest.FixtureRequest) -> ProcessWorld:
    """Return a world of 2 or 3 ranks that are processes."""
    return _usable(request.param)


@pytest.fixture(params=[world for world in WORLDS if isinstance(world.values[0], MPIWorld)])
def mpi(request: pytest.FixtureRequest) -> MPIWorld:
    """Return a world of 2 or 3 ranks under mpiexec."""
    return _usable(request.param)


@pytest.fixture(params=[world for world in WORLDS if isinstance(world.values[0], GlooWorld)])
def gloo(request: pytest.FixtureRequest) -> GlooWorld:
    """Return a world of 2 or 3 ranks over gloo."""
    return _usable(request.param)


World = TypeVar("World", bound=ThreadWorld | ProcessWorld)


def _usable(world: World) -> World:
    if isinstance(world, MPIWorld):
        require("mpi")
    if isinstance(world, GlooWorld):
        require("torch")
    return world
