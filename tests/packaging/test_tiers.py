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

@pytest.mark.tier("{marked}")
def test_marked(): ...
"""
FIRST = {"shell[numpy]", "shell[strict]"}
STANDARDS = "strict-2024.12", "strict-2023.12"
OTHERS = {f"shell[{name}]" for name in ("numpy-readonly", "torch", "torch-core", "dask", "jax", *STANDARDS)}
QUICK = {"world[threads]", "world[gloo-early]", *FIRST}
RANKS = QUICK | OTHERS | {"world[mpi]", "marked"}


@pytest.mark.parametrize(
    ("tier", "is_pure", "expected"),
    [
        ("quick", False, QUICK),
        ("ranks", False, RANKS),
        ("all", False, RANKS | {"world[mpi-late]"}),
        ("quick", True, QUICK | OTHERS),
    ],
)
def test_a_tier_takes_its_tests_and_those_before(tmp_path: Path, tier: str, is_pure: bool, expected: set[str]):
    output = collected(tmp_path, tier, is_pure)
    assert {line.partition("::test_")[2] for line in output.splitlines() if "::" in line} == expected


def test_a_test_that_is_named_by_its_id_is_run_in_any_tier(tmp_path: Path):
    for name in ("marked", "world[mpi-late]"):
        output = collected(tmp_path, "quick", False, named=f"::test_{name}")
        assert [line.partition("::test_")[2] for line in output.splitlines() if "::" in line] == [name]


def test_a_tier_that_is_not_there_is_refused(tmp_path: Path):
    assert "there is no tier 'slow'; known are quick, ranks, all" in collected(tmp_path, "quick", False, "slow")


def collected(folder: Path, tier: str, is_pure: bool, marked: str = "ranks", named: str = "") -> str:
    """Return the output of a collection of the file."""
    file = folder / "test_kinds.py"
    file.write_text(FILE.format(is_pure=is_pure, marked=marked))
    command = ["-m", "pytest", "-n", "0", "--collect-only", "-q", "-p", "conftest", "--tier", tier]
    places = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", TESTS.parent, f"{file}{named}"]
    completed = python(*command, *places, PYTHONPATH=os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return completed.stdout + completed.stderr
