"""Processes of jax.distributed agree inside the compiled step, wherever the bad value is, and find one that drifted."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import python
from tiers import later
from worlds import free_port

pytestmark = [pytest.mark.jax, pytest.mark.tier("ranks")]

RUNNER = Path(__file__).parents[1] / "support" / "jax_runner.py"


@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_processes_skip_together_and_find_one_that_has_drifted(size: int):
    port = free_port(1)
    # Each has one device.
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    with ThreadPoolExecutor(size) as pool:
        ended = list(pool.map(lambda rank: python(RUNNER, rank, size, port, **environment), range(size)))
    assert [process.returncode for process in ended] == [0] * size, "\n".join(process.stderr for process in ended)
