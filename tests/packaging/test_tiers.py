"""Which tests a tier runs, read off pytest's own collection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier("all")

TESTS = Path(__file__).parents[1]


def collected(tier: str | None, *paths: str) -> set[str]:
    """Return the ids of the tests that a tier collects in some files."""
    option = [] if tier is None else ["--tier", tier]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *option]
    completed = subprocess.run(
        [*command, *(str(TESTS / path) for path in paths)], capture_output=True, text=True, timeout=120, check=True
    )
    return {line.partition("::")[2] for line in completed.stdout.splitlines() if "::" in line}


@pytest.fixture(scope="module")
def tiers() -> dict[str | None, set[str]]:
    """Return what each tier, and a run without the option, collects in three files."""
    paths = ("distributed/test_faults.py", "core/test_scaler.py", "core/test_select.py")
    return {tier: collected(tier, *paths) for tier in (None, "quick", "ranks", "all")}


def test_each_tier_takes_what_those_before_take(tiers: dict[str | None, set[str]]) -> None:
    assert tiers[None] == tiers["quick"] < tiers["ranks"] < tiers["all"]


def test_one_fault_of_each_kind_meets_real_ranks_in_quick_two_ranks_in_ranks_and_three_in_all(
    tiers: dict[str | None, set[str]],
) -> None:
    def worlds(tier: str, how: str) -> set[str]:
        start = "test_a_rank_that_does_not_come_is_a_timeout_on_the_others["
        names = (name.removeprefix(start).rstrip("]") for name in tiers[tier] if name.startswith(start))
        return {name.removesuffix(f"-{how}") for name in names if name.endswith(how)}

    threads = {"threads-2", "threads-3"}
    assert worlds("quick", "is late") == threads | {"mpi-2", "gloo-2"}
    assert worlds("quick", "raises") == threads
    assert worlds("ranks", "raises") == threads | {"mpi-2", "gloo-2"}
    assert worlds("all", "raises") == threads | {"mpi-2", "gloo-2", "mpi-3", "gloo-3"}


def test_the_shell_runs_on_two_libraries_in_quick_and_the_pure_core_on_all(tiers: dict[str | None, set[str]]) -> None:
    def rows(tier: str, test: str) -> set[str]:
        return {name.partition("[")[2].rstrip("]") for name in tiers[tier] if name.startswith(f"{test}[")}

    first, others = {"numpy", "strict"}, {"numpy-readonly", "torch", "torch-core", "dask", "jax"}
    shell, pure = "test_a_clean_iteration_steps_with_the_unscaled_gradients", "test_0d_and_empty_arrays_stay_arrays"
    assert rows("quick", shell) == first
    assert rows("ranks", shell) == first | others
    assert rows("quick", pure) == first | others | {"jax-jit"}


def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text('import pytest\n\n\n@pytest.mark.tier("slow")\ndef test_it() -> None: ...\n')
    command = [sys.executable, "-m", "pytest", "-n", "0", "-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest"]
    completed = subprocess.run(
        [*command, "--rootdir", str(TESTS.parent), str(wrong)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert completed.returncode == pytest.ExitCode.USAGE_ERROR
    assert "there is no tier 'slow'; known are quick, ranks, all" in completed.stdout + completed.stderr
