"""The tests' own helpers: a wrong answer must fail them, and a missing library must not look like a pass."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import axes
import numpy as np
import pytest
from libraries import Library
from worlds import mpi_command, mpi_environment

TESTS = Path(__file__).parents[1]

DEADLOCK = """
from mpi4py import MPI


def test_rank_0_fails_while_the_other_waits():
    assert MPI.COMM_WORLD.rank, "rank 0 fails on purpose"
    MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    ("got", "expected", "dtype"),
    [
        ([1.0, 2.0], [1.0, 2.0000002], "float32"),
        ([1.0], [1.0], "float64"),
        ([1.0], [[1.0]], "float32"),
        ([1.0], [float("nan")], "float32"),
        ([0.0], [-0.0], "float32"),
        ([float("inf")], [-float("inf")], "float32"),
        ([], [1.0], "float32"),
    ],
    ids=["last bit", "dtype", "shape", "nan", "sign of zero", "sign of inf", "length"],
)
def test_assert_array_fails_for_a_wrong_answer(arrays: Library, got: list[float], expected: object, dtype: str) -> None:
    arrays.assert_array(arrays.asarray(got), got)
    with pytest.raises(AssertionError):
        arrays.assert_array(arrays.asarray(got), expected, dtype)


def test_assert_array_fails_for_another_library(arrays: Library, strict: Library) -> None:
    stranger = np.float32(1.0) if arrays.name.startswith(("numpy", "strict")) else strict.asarray(1.0)
    with pytest.raises(AssertionError):
        arrays.assert_array(stranger, 1.0)
    if arrays.readonly:
        with pytest.raises(ValueError, match="read-only"):
            arrays.asarray([1.0])[0] = 2.0


def test_a_required_library_that_is_missing_fails_instead_of_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(axes.MODULES, "strict", ("no_such_module_at_all",))
    axes._missing.cache_clear()
    try:
        monkeypatch.setenv(axes.VARIABLE, "numpy")
        with pytest.raises(pytest.skip.Exception, match="no_such_module_at_all"):
            axes.require("strict")
        monkeypatch.setenv(axes.VARIABLE, "numpy, strict")
        with pytest.raises(pytest.fail.Exception, match="requires it"):
            axes.require("strict")
        monkeypatch.setenv(axes.VARIABLE, "nunpy")
        with pytest.raises(pytest.UsageError, match="nunpy"):
            axes.required()
    finally:
        axes._missing.cache_clear()


@pytest.mark.mpi
def test_a_failing_rank_ends_the_others_and_prints_its_failure(tmp_path: Path) -> None:
    axes.require("mpi")
    tmp_path.joinpath("test_deadlock.py").write_text(DEADLOCK)
    tmp_path.joinpath("pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    options = ["-c", str(tmp_path / "pytest.ini"), "-p", "conftest", "-p", "no:cacheprovider", "-x", str(tmp_path)]
    search = os.pathsep.join([str(TESTS), str(TESTS / "support")])
    begin = time.monotonic()
    completed = subprocess.run(
        [*mpi_command(2), "-m", "pytest", *options],
        env=mpi_environment() | {"PYTHONPATH": search, axes.VARIABLE: ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode != 0
    assert "rank 0 fails on purpose" in completed.stdout
    assert time.monotonic() - begin < 50.0
