"""examples/adapter_mlx.py as a user runs it: MLX and its adapter pass the suite, and a training skips and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from axes import require

PROGRAM = Path(__file__).parents[2] / "examples" / "adapter_mlx.py"


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python; MLX is completed for the process that it runs in."""
    require("mlx")
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.tier("all")
def test_the_adapter_passes_the_suite_and_trains() -> None:
    completed = launch(str(PROGRAM))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [
        "MLX and its adapter pass the suite",
        "step 2: skipped, norm inf",
        "weights [1.0, 1.0, 1.0], scale 512",
    ]


@pytest.mark.tier("all")
def test_what_mlx_lacks_by_itself_is_named() -> None:
    completed = launch("-c", "import gradscale, mlx.core as mx; gradscale.testing.check_library(mx.zeros(1))")
    assert completed.returncode == 1
    last = completed.stderr.splitlines()
    assert any("BackendNotAvailableError: mlx lacks what gradscale needs" in line for line in last), completed.stderr
    assert any("members of arrays device missing" in line for line in last)
