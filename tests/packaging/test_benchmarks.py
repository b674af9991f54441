"""``python -m benchmarks``: what its runner promises; the numbers themselves are not tested."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import python

from benchmarks.cases import Outcome, run_cases
from benchmarks.measure import Row

pytestmark = pytest.mark.tier("all")

ON_PATH = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "benchmarks", *arguments, **(ON_PATH | environment))


def test_libraries_get_one_thread_and_the_setting_comes_before_their_import() -> None:
    require("numpy")
    program = (
        "import sys\nimport benchmarks.cases, benchmarks.__main__, os\n"
        "assert 'numpy' not in sys.modules\n"
        "benchmarks.__main__.main(['--list'])\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    completed = python("-c", program, OMP_NUM_THREADS="7", OPENBLAS_NUM_THREADS="7", **ON_PATH)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1] == "1 1"


def test_a_case_that_raises_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    require("numpy")
    import benchmarks.unscaling

    def broken(_quick: bool) -> list[Row]:
        msg = "out of order"
        raise RuntimeError(msg)

    def absent(_quick: bool) -> list[Row]:
        msg = "No module named 'torch'"
        raise ModuleNotFoundError(msg, name="torch")

    good = Row("a case", 1.0, 2.0, "s", 0.4)
    cases = {"mine-broken": broken, "mine-absent": absent, "mine-good": lambda _quick: [good]}
    monkeypatch.setattr(benchmarks.unscaling, "CASES", cases)
    outcomes = list(run_cases("mine-", quick=True))
    reason = "No module named 'torch'; from a clone of gradscale: python -m pip install '.[torch]'"
    assert outcomes == [
        Outcome("mine-broken", [], "RuntimeError: out of order", failed=True),
        Outcome("mine-absent", [], reason),
        Outcome("mine-good", [good]),
    ]
    # 0.5 is above the target, 0.4.
    assert [outcome.met for outcome in outcomes] == [False, False, False]


def test_a_case_is_measured_printed_as_a_table_and_written_as_json(tmp_path: Path) -> None:
    require("numpy")
    file = tmp_path / "numbers.json"
    completed = bench("--quick", "--only", "memory", "--json", str(file))
    assert completed.returncode == 0, completed.stderr
    assert "peak extra memory" in completed.stdout
    written: dict[str, Any] = json.loads(file.read_text())
    assert written["rows"]
    assert written["not_run"] == {}
    assert all(row["unit"] == "MiB" and row["ours"] > 0 for row in written["rows"])


def test_what_cannot_be_run_is_listed_with_the_pip_command(tmp_path: Path) -> None:
    require("numpy")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    hidden = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ON_PATH["PYTHONPATH"]])}
    completed = bench("--quick", "--only", "torch-unscale", **hidden)
    assert completed.returncode == 0, completed.stderr
    assert "not run: torch-unscale, because No module named 'torch'" in completed.stdout
    assert "python -m pip install '.[torch]'" in completed.stdout
    assert bench("--quick", "--only", "torch-unscale", "--check", **hidden).returncode == 1


def test_what_cannot_be_done_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    require("numpy")
    completed = bench("--only", "nothing of this name", "--json", str(tmp_path / "numbers.json"))
    assert completed.returncode == 2
    assert not list(tmp_path.iterdir())
    assert "no case has 'nothing of this name' in its name" in completed.stderr
    completed = bench("--json", "no/such/folder/numbers.json")
    assert completed.returncode == 2
    assert "cannot write --json" in completed.stderr
