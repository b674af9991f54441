"""Agreement over MLX's groups: real ranks under mlx.launch, and what becomes of those whose others never come."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bad_step_scenarios
import difference_scenarios
import pytest
import scenarios
from axes import require
from worlds import MlxWorld, agree

import gradscale
from gradscale import registry

mx = require("mlx")
require("numpy")
import gradscale_mlx  # noqa: E402

pytestmark = [pytest.mark.mlx, pytest.mark.tier("ranks")]

LOST = Path(__file__).parents[1] / "support" / "mlx_lost_rank.py"
LIBRARIES = ["mlx", "numpy"]


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.tier("all"))], ids=["mlx-2", "mlx-3"])
def mlx(request: pytest.FixtureRequest) -> MlxWorld:
    """Return a world of MLX's ranks."""
    return MlxWorld(request.param)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_groups_conform(mlx: MlxWorld, library: str):
    agree(mlx, scenarios.collectives_conform, [(library, 100)])


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_overflow_on_each_rank_in_turn_is_skipped_by_all(mlx: MlxWorld, library: str):
    values = (math.inf, -math.inf, math.nan)
    cases = [
        ([rank], value, library, explicit) for rank in range(mlx.size) for value in values for explicit in (False, True)
    ]
    agree(mlx, scenarios.overflow_on, cases)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_spike_or_a_refusal_on_each_rank_in_turn_is_skipped_by_all(mlx: MlxWorld, library: str):
    cases = [(rank, library, explicit) for rank in range(mlx.size) for explicit in (False, True)]
    agree(mlx, bad_step_scenarios.counted, cases)


@pytest.mark.parametrize("library", LIBRARIES)
def test_pure_loops_agree(mlx: MlxWorld, library: str):
    agree(mlx, scenarios.pure_loop, [(rank, math.nan, library) for rank in range(mlx.size)])
    agree(mlx, scenarios.spiking_loop, [(rank, library) for rank in range(mlx.size)])


def test_a_rank_without_gradients_takes_part(mlx: MlxWorld):
    cases = [(rank, bad, "no backend", "mlx") for rank in range(mlx.size) for bad in (None, (rank + 1) % mlx.size)]
    agree(mlx, scenarios.empty_on, cases)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_one_rank_does_differently_is_named_on_every_rank(mlx: MlxWorld, library: str):
    found = enumerate(difference_scenarios.DIFFERENCES)
    cases = [(rank, what, (number + rank) % 3, library) for number, what in found for rank in range(mlx.size)]
    agree(mlx, difference_scenarios.differ, cases)
    agree(mlx, difference_scenarios.swapped_scalers, [(rank, library) for rank in range(mlx.size)])


def test_what_ranks_may_do_is_no_error(mlx: MlxWorld):
    agree(mlx, difference_scenarios.legal, [(rank, "mlx") for rank in range(mlx.size)])


@pytest.mark.tier("quick")
def test_a_process_that_was_not_launched_is_a_group_of_one():
    group = mx.distributed.init()
    collectives = registry.collectives_for(group, 20.0)
    gradscale.testing.check_collectives(collectives, mx.zeros(1), repetitions=3)
    assert repr(collectives) == "MlxCollectives(rank=0, size=1, timeout=20.0)"
    assert collectives.identity is registry.collectives_for(mx.distributed.init(), 1.0).identity
    trainer = scenarios.Trainer(group, "mlx", 1)
    trainer.iterate((0,), value=math.nan)
    assert (trainer.steps, trainer.scaler.get_scale()) == (0, 2.0**15)


class Part:
    """What MLX has for some of all ranks, of which there are more here than processes."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


@pytest.mark.tier("quick")
def test_each_group_of_a_part_of_the_ranks_is_one_of_its_own():
    parts = [Part(), Part()]
    first, again, other = (gradscale_mlx.MlxCollectives(part, 1.0).identity for part in (parts[0], parts[0], parts[1]))
    world = gradscale_mlx.MlxCollectives(mx.distributed.init(), 1.0).identity
    assert (first is again, len({first, other, world})) == (True, 3)


def lost(tmp_path: Path, how: str) -> tuple[str, float]:
    """Return what rank 0 of two says of a rank that never comes, and after how many seconds."""
    from worlds import free_port

    first = free_port(2)
    hosts = tmp_path / "hosts.json"
    hosts.write_text(f'[["127.0.0.1:{first}"], ["127.0.0.1:{first + 1}"]]')
    started = [
        subprocess.Popen(
            [sys.executable, str(LOST), how],
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        begun = time.monotonic()
        said, _ = started[0].communicate(timeout=60)
        seconds = time.monotonic() - begun
        assert started[0].returncode == 0, said
    finally:
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    return said, seconds


def test_a_rank_that_never_comes_is_a_timeout_and_the_group_is_given_up(tmp_path: Path):
    said, seconds = lost(tmp_path, "late")
    assert "CollectiveTimeoutError: rank 0 of 2" in said
    assert "BackendError: an agreement over this group was given up on rank 0 of 2" in said
    assert "start all ranks again from a checkpoint. It was given up for: CollectiveTimeoutError" in said
    # The process ends, though MLX waits on.
    assert seconds < 40


def test_a_rank_that_is_killed_is_an_error_of_mlx(tmp_path: Path):
    said, _ = lost(tmp_path, "killed")
    assert (
        "BackendError: MLX failed on rank 0 of 2 while the ranks agreed on a step: [ring] connection to a peer" in said
    )
