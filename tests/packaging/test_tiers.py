"""Which tests a tier runs, read off pytest's own collection of a file that has one of each kind."""

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

@pytest.mark.parametrize("world", [
    pytest.param(ThreadWorld(2), id="threads"),
    pytest.param(MPIWorld(2), id="mpi"),
    pytest.param(MPIWorld(3), id="mpi-late", marks=pytest.mark.tier("all")),
    pytest.param(GlooWorld(2), id="gloo-early", marks=pytest.mark.tier("quick")),
])
def test_world(world): ...

def test_shell(arrays): ...

@pytest.mark.tier("ranks")
def test_marked(): ...
"""
FIRST = {"shell[numpy]", "shell[strict]"}
STANDARDS = "strict-2024.12", "strict-2023.12"
PURE = {f"shell[{name}]" for name in ("numpy-readonly", "torch", "jax")}
OTHERS = PURE | {f"shell[{name}]" for name in ("torch-core", "dask", *STANDARDS)}
QUICK = {"world[threads]", "world[gloo-early]", *FIRST}
RANKS = QUICK | OTHERS | {"world[mpi]", "marked"}


@pytest.mark.parametrize(
    ("tier", "is_pure", "named", "expected"),
    [
        ("quick", False, "", QUICK),
        ("ranks", False, "", RANKS),
        ("all", False, "", RANKS | {"world[mpi-late]"}),
        ("quick", True, "", QUICK | PURE),
        # A test that is named by its id is run in any tier.
        ("quick", False, "::test_world[mpi-late]", {"world[mpi-late]"}),
    ],
)
def test_a_tier_takes_its_tests_and_those_before(
    tmp_path: Path, tier: str, is_pure: bool, named: str, expected: set[str]
):
    file = tmp_path / "test_kinds.py"
    file.write_text(FILE.format(is_pure=is_pure))
    command = ["-m", "pytest", "-n", "0", "--collect-only", "-q", "-p", "conftest", "--tier", tier]
    places = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", TESTS.parent, f"{file}{named}"]
    completed = python(*command, *places, PYTHONPATH=os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    lines = completed.stdout.splitlines()
    assert {line.partition("::test_")[2] for line in lines if "::" in line} == expected, completed.stderr
