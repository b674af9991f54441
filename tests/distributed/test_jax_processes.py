"""Processes of jax.distributed agree inside the compiled step, wherever the bad value is, and find one that drifted."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axes import require
from tiers import later

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

RUNNER = Path(__file__).parents[1] / "support" / "jax_runner.py"
LIMIT = 120  # seconds


def run_processes(size: int) -> list[dict[str, Any]]:
    """Run the processes, each with one device, and return what each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RUNNER), str(rank), str(size), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors for _, errors in outputs)
    return [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]


@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_processes_skip_together_and_find_one_that_has_drifted(size: int) -> None:
    require("jax")
    results = run_processes(size)
    for rank, found in enumerate(results):
        clean = found.pop("clean")
        # 2 - 0.25 * (2 * 2): the gradient of each process's own parameter.
        assert (clean["nonfinite"], clean["scale"], clean["w"], clean["automatic"]) == (0, 1024.0, 1.0, 0)
        assert len(found) == 3 * size
        for case, seen in found.items():
            bad = int(case.rpartition(" ")[2])
            if case.startswith("drift"):
                assert seen["desynced"]
                assert "scale from 512.0 to 1024.0" in seen["error"]
                assert (seen["scale"], seen["w"]) == (512.0 if rank == bad else 1024.0, 2.0)
            else:
                assert (seen["nonfinite"], seen["automatic"], seen["scale"]) == (1, 1, 512.0)
                assert not seen["desynced"]
                assert seen["w"] == 2.0 if rank != bad else not math.isfinite(seen["w"])
