"""The tests' own helpers: a wrong answer must fail them, and a missing library must not look like a pass."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import axes
import numpy as np
import pytest
from libraries import Library
from worlds import mpi_command, mpi_environment

TESTS = Path(__file__).parents[1]

DEADLOCK = """
import pytest
from mpi4py import MPI


def test_rank_0_fails_while_the_other_waits():
    assert MPI.COMM_WORLD.rank, "rank 0 fails on purpose"
    MPI.COMM_WORLD.Barrier()
"""

RANKS = """
import pool_scenarios
from worlds import Failure, MPIWorld


def test_a_rank_raises():
    results = MPIWorld(2).run(pool_scenarios.behave, "raises", 1)
    assert not any(isinstance(result, Failure) for result in results)


def test_a_rank_hangs():
    MPIWorld(2).run_each(pool_scenarios.behave, [("hangs", 1)], limit=2.0)


def test_the_next_one():
    assert len(MPIWorld(2).run(pool_scenarios.behave)) == 2
"""


def test_assert_array_accepts_the_right_answer(arrays: Library) -> None:
    arrays.assert_array(arrays.asarray([1.0, float("nan"), -0.0]), [1.0, float("nan"), -0.0])
    for dtype in arrays.reals:
        arrays.assert_array(arrays.asarray(2.0, dtype), 2.0, dtype)


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
    with pytest.raises(AssertionError):
        arrays.assert_array(arrays.asarray(got), expected, dtype)


def test_assert_array_fails_for_another_library(arrays: Library, strict: Library) -> None:
    stranger = np.float32(1.0) if arrays.name.startswith(("numpy", "strict")) else strict.asarray(1.0)
    with pytest.raises(AssertionError):
        arrays.assert_array(stranger, 1.0)


@pytest.mark.numpy
def test_arrays_of_the_readonly_row_refuse_to_be_written() -> None:
    from libraries import opened

    with opened("numpy-readonly") as library:
        x = library.asarray([1.0])
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 2.0


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
    finally:
        axes._missing.cache_clear()


def test_an_unknown_name_in_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(axes.VARIABLE, "nunpy")
    with pytest.raises(pytest.UsageError, match="nunpy"):
        axes.required()


@pytest.mark.tier("ranks")
def test_the_session_does_not_import_mpi4py(tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(
        "def test_it():\n    import sys\n    assert 'mpi4py' not in sys.modules\n"
    )
    completed = _pytest([sys.executable], tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "numpy " in completed.stdout


@pytest.mark.mpi
def test_a_failing_rank_ends_the_others_and_prints_its_failure(tmp_path: Path) -> None:
    axes.require("mpi")
    tmp_path.joinpath("test_deadlock.py").write_text(DEADLOCK)
    begin = time.monotonic()
    completed = _pytest(mpi_command(2), tmp_path)
    assert completed.returncode != 0
    assert "rank 0 fails on purpose" in completed.stdout
    assert time.monotonic() - begin < 50.0


@pytest.mark.tier("ranks")
@pytest.mark.mpi
def test_ranks_that_raise_or_hang_fail_their_own_tests_with_the_reason(tmp_path: Path) -> None:
    axes.require("mpi")
    tmp_path.joinpath("test_ranks.py").write_text(RANKS)
    completed = _pytest([sys.executable], tmp_path, "--maxfail=3")
    assert "2 failed, 1 passed" in completed.stdout, completed.stdout
    assert "rank 1 of 2 raised:\nTraceback" in completed.stdout
    assert "KeyError: 'this rank fails on purpose'" in completed.stdout
    assert "RuntimeError: ranks [1] gave no answer within 2 s" in completed.stdout
    assert "in _hang" in completed.stdout


def _pytest(command: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a folder with this conftest, in a process of its own."""
    plugin = ["-c", str(folder / "pytest.ini"), "-p", "conftest", "-p", "no:cacheprovider", "-x", str(folder)]
    folder.joinpath("pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    search = os.pathsep.join([str(TESTS), str(TESTS / "support")])
    environment = mpi_environment() | {"PYTHONPATH": search, axes.VARIABLE: ""}
    return subprocess.run(
        [*command, "-m", "pytest", *plugin, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
