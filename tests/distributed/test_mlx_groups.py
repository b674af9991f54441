"""Agreement over MLX's groups: real ranks under mlx.launch."""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import difference_scenarios
import lives
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


def cases_of(size: int) -> Iterator[tuple[Any, ...]]:
    """Yield what all agree on: a scenario, and its arguments, most of them for each rank in turn."""
    ranks, libraries = range(size), ["mlx", "numpy"]
    yield from itertools.product([scenarios.collectives_conform], libraries, [100])
    values, explicit = (math.inf, -math.inf, math.nan), (False, True)
    yield from itertools.product([scenarios.overflow_on], [[rank] for rank in ranks], values, libraries, explicit)
    yield from itertools.product([scenarios.pure_loop], ranks, [math.nan], libraries)
    yield from itertools.product([difference_scenarios.legal], ranks, ["mlx"])
    yield lives.live, 400, 7, "numpy"
    for rank in ranks:
        yield from ((scenarios.empty_on, rank, bad, "no backend", "mlx") for bad in (None, (rank + 1) % size))
        for number, what in enumerate(difference_scenarios.DIFFERENCES):
            yield difference_scenarios.differ, rank, what, (None, 5)[number % 2], "mlx"


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.tier("all"))])
def test_an_overflow_on_each_rank_is_skipped_and_a_difference_told_on_all(size: int):
    agree(MlxWorld(size), scenarios.play, cases_of(size))


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


@pytest.mark.tier("quick")
def test_each_group_of_a_part_of_the_ranks_is_one_of_its_own():
    # What MLX has for some of all ranks, of which there are more here than processes.
    parts = [SimpleNamespace(rank=lambda: 1, size=lambda: 3) for _ in range(2)]
    first, again, other = (gradscale_mlx.MlxCollectives(part, 1.0).identity for part in (parts[0], parts[0], parts[1]))
    world = gradscale_mlx.MlxCollectives(mx.distributed.init(), 1.0).identity
    assert (first is again, len({first, other, world})) == (True, 3)
