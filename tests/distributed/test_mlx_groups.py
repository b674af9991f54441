"""Agreement over MLX's groups: real ranks under mlx.launch."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import difference_scenarios
import lives
import pytest
import scenarios
from axes import require
from tiers import later
from worlds import MlxWorld, agree

import gradscale
from gradscale import registry

mx = require("mlx")
require("numpy")
import gradscale_mlx  # noqa: E402

pytestmark = [pytest.mark.mlx, pytest.mark.tier("ranks")]

LIBRARIES = ["mlx", "numpy"]


def of_all(group, scenario: Callable[..., Any], *case):
    """Run one of many scenarios: starting the ranks takes longer than most."""
    return scenario(group, *case)


def cases(size: int) -> Iterator[tuple[Any, ...]]:
    """Yield what all agree on, with each rank in turn as the odd one, but of differences one, which take long."""
    for library in LIBRARIES:
        yield scenarios.collectives_conform, library, 100
        for rank in range(size):
            for value, is_explicit in itertools.product((math.inf, -math.inf, math.nan), (False, True)):
                yield scenarios.overflow_on, [rank], value, library, is_explicit
            yield scenarios.pure_loop, rank, math.nan, library
    for rank in range(size):
        yield difference_scenarios.legal, rank, "mlx"
        for bad in (None, (rank + 1) % size):
            yield scenarios.empty_on, rank, bad, "no backend", "mlx"
    for number, what in enumerate(difference_scenarios.DIFFERENCES):
        keys, library = (None, 5)[number // size % 2], LIBRARIES[number // (2 * size) % 2]
        yield difference_scenarios.differ, number % size, what, keys, library
    yield lives.live, 400, 7, "numpy"


@pytest.mark.parametrize("size", [2, *later("all", 3)])
def test_the_groups_conform_and_what_each_rank_in_turn_does_is_skipped_told_or_right_on_all(size: int):
    agree(MlxWorld(size), of_all, cases(size))


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
