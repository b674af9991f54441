"""``python -m benchmarks``: what its runner promises; the numbers themselves are not tested."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from axes import require
from commands import python

from gradscale.extras import remedy

pytestmark = pytest.mark.tier("all")

ON_PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])


def bench(*arguments: str, path: str = ON_PATH) -> subprocess.CompletedProcess[str]:
    require("numpy")
    return python("-m", "benchmarks", *arguments, PYTHONPATH=path, OMP_NUM_THREADS="7")


def test_a_case_is_measured_on_one_thread_printed_and_written(tmp_path: Path):
    file = tmp_path / "numbers.json"
    completed = bench("--quick", "--only", "masters", "--json", str(file))
    assert completed.returncode == 0, completed.stderr
    row, *_ = json.loads(file.read_text())["rows"]
    assert row["case"] in completed.stdout
    assert row["ratio"] == row["ours"] / row["other"] > 0
    assert json.loads(file.read_text())["threads"] == "1"


def test_a_case_that_raises_is_a_failure_and_one_whose_library_is_missing_is_listed(tmp_path: Path):
    for error, status, said in (
        ("ModuleNotFoundError(\"No module named 'torch'\", name='torch')", 0, "not run: torch-unscale, because No mod"),
        ("RuntimeError('out of order')", 1, "failed: torch-unscale, because RuntimeError: out of order"),
    ):
        (tmp_path / "torch.py").write_text(f"raise {error}\n")
        arguments = ("--quick", "--only", "torch-unscale"), os.pathsep.join([str(tmp_path), ON_PATH])
        completed = bench(*arguments[0], path=arguments[1])
        assert completed.returncode == status, completed.stderr
        assert said in completed.stdout
        assert status or remedy("torch") in completed.stdout
        assert bench(*arguments[0], "--check", path=arguments[1]).returncode == 1


def test_a_name_that_no_case_has_is_refused():
    completed = bench("--only", "nothing of this name")
    assert completed.returncode == 2
    assert "no case has 'nothing of this name' in its name" in completed.stderr
