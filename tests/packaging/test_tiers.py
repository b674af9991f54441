"""Which tests a tier runs, read off pytest's own collection of a file that has one of each kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import python

pytestmark = pytest.mark.tier("all")

TESTS = Path(__file__).parents[1]
FILE = """
import pytest
from worlds import GlooWorld, MPIWorld, ThreadWorld

PURE = {is_pure}
WORLDS = [
    pytest.param(ThreadWorld(2), id="threads"),
    pytest.param(MPIWorld(2), id="mpi"),
    pytest.param(MPIWorld(3), id="mpi-late", marks=pytest.mark.tier("all")),
    pytest.param(GlooWorld(2), id="gloo-early", marks=pytest.mark.tier("quick")),
]

@pytest.mark.parametrize("world", WORLDS)
def test_world(world): ...

def test_shell(arrays): ...

@pytest.mark.tier("{marked}")
def test_marked(): ...
"""
FIRST = {"shell[numpy]", "shell[strict]"}
OTHERS = {f"shell[{name}]" for name in ("numpy-readonly", "torch", "torch-core", "dask", "jax")}
QUICK = {"world[threads]", "world[gloo-early]", *FIRST}
RANKS = QUICK | OTHERS | {"world[mpi]", "marked"}


def collected(folder: Path, *options: str, is_pure: bool = False, marked: str = "ranks") -> tuple[int, str]:
    """Return the status and the output of a collection of the file."""
    file = folder / "test_kinds.py"
    file.write_text(FILE.format(is_pure=is_pure, marked=marked))
    command = ["-m", "pytest", "-n", "0", "--collect-only", "-q", "-p", "conftest", *options]
    places = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", TESTS.parent, file]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    completed = python(*command, *places, PYTHONPATH=path)
    return completed.returncode, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("options", "is_pure", "expected"),
    [
        pytest.param([], False, QUICK, id="default"),
        pytest.param(["--tier", "quick"], False, QUICK, id="quick"),
        pytest.param(["--tier", "ranks"], False, RANKS, id="ranks"),
        pytest.param(["--tier", "all"], False, RANKS | {"world[mpi-late]"}, id="all"),
        pytest.param([], True, QUICK | OTHERS, id="pure"),
    ],
)
def test_a_tier_takes_its_tests_and_those_before(
    tmp_path: Path, options: list[str], is_pure: bool, expected: set[str]
) -> None:
    _, output = collected(tmp_path, *options, is_pure=is_pure)
    assert {line.partition("::test_")[2] for line in output.splitlines() if "::" in line} == expected


def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    status, output = collected(tmp_path, marked="slow")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "there is no tier 'slow'; known are quick, ranks, all" in output
