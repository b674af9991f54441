"""Processes of jax.distributed agree inside the compiled step, wherever the bad value is, and find one that drifted."""

import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import python
from tiers import later

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

RUNNER = Path(__file__).parents[1] / "support" / "jax_runner.py"


def run_processes(size: int):
    """Run the processes, each with one device, and return what each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    with ThreadPoolExecutor(size) as pool:
        ended = list(pool.map(lambda rank: python(RUNNER, rank, size, port, **environment), range(size)))
    assert [process.returncode for process in ended] == [0] * size, "\n".join(process.stderr for process in ended)
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_processes_skip_together_and_find_one_that_has_drifted(size: int):
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
