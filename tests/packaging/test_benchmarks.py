"""``python -m gradscale_bench``: what its runner promises; the numbers themselves are not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from axes import require

from gradscale_bench.cases import Outcome, run_cases
from gradscale_bench.measure import Row

LIMIT = 120


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradscale_bench", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_libraries_get_one_thread_and_the_setting_comes_before_their_import() -> None:
    require("numpy")
    program = (
        "import sys\nimport gradscale_bench.cases, gradscale_bench.__main__, os\n"
        "assert 'numpy' not in sys.modules\n"
        "gradscale_bench.__main__.main(['--list'])\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['OPENBLAS_NUM_THREADS'])\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "7", "OPENBLAS_NUM_THREADS": "7"}
    completed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines()[-1] == "1 1"


@pytest.mark.mpi
def test_the_case_that_starts_ranks_of_its_own_runs() -> None:
    require("mpi")
    completed = bench("--quick", "--only", "agreement", "--lines")
    assert completed.returncode == 0, completed.stderr
    begun, ended = (json.loads(line) for line in completed.stdout.splitlines())
    assert begun == {"begun": "agreement"}
    assert ended["ended"]["reason"] == "", ended
    assert len(ended["ended"]["rows"]) == 2


def test_a_case_that_raises_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    require("numpy")
    import gradscale_bench.unscaling

    def broken(_quick: bool) -> list[Row]:
        msg = "out of order"
        raise RuntimeError(msg)

    def absent(_quick: bool) -> list[Row]:
        msg = "No module named 'torch'"
        raise ModuleNotFoundError(msg, name="torch")

    good = Row("a case", 1.0, 2.0, "s", 0.4)
    cases = {"mine-broken": broken, "mine-absent": absent, "mine-good": lambda _quick: [good]}
    monkeypatch.setattr(gradscale_bench.unscaling, "CASES", cases)
    outcomes = list(run_cases("mine-", quick=True))
    reason = "No module named 'torch'; from a clone of gradscale: python -m pip install '.[torch]'"
    assert outcomes == [
        Outcome("mine-broken", [], "RuntimeError: out of order", failed=True),
        Outcome("mine-absent", [], reason),
        Outcome("mine-good", [good]),
    ]
    # 0.5 is above the target, 0.4.
    assert [outcome.met for outcome in outcomes] == [False, False, False]
