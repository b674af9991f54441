"""Agreement over MLX's groups: real ranks under mlx.launch."""

import itertools
import math
from collections.abc import Callable
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

LIBRARIES = ["mlx", "numpy"]


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.tier("all"))], ids=["mlx-2", "mlx-3"])
def mlx(request: pytest.FixtureRequest) -> MlxWorld:
    """Return a world of MLX's ranks."""
    return MlxWorld(request.param)


# What all agree on: the scenario, the cases beside each rank in turn, or all of them, and for which libraries.
EXPLICIT = (False, True)
DIFFERENCES = [(what, (None, 5)[number % 2]) for number, what in enumerate(difference_scenarios.DIFFERENCES)]
TURNS: list[tuple[Callable[..., Any], list[tuple[Any, ...]]]] = [
    (scenarios.pure_loop, [(math.nan, library) for library in LIBRARIES]),
    (difference_scenarios.differ, [(*what, library) for library in LIBRARIES for what in DIFFERENCES]),
    (difference_scenarios.legal, [("mlx",)]),
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_groups_conform_and_an_overflow_on_each_rank_in_turn_is_skipped_by_all(mlx: MlxWorld, library: str):
    agree(mlx, scenarios.collectives_conform, [(library, 100)])
    values = itertools.product(
        [[rank] for rank in range(mlx.size)], (math.inf, -math.inf, math.nan), [library], EXPLICIT
    )
    agree(mlx, scenarios.overflow_on, values)


@pytest.mark.parametrize(("scenario", "others"), TURNS, ids=[scenario.__name__ for scenario, _ in TURNS])
def test_what_each_rank_in_turn_does_is_skipped_told_or_right_on_all(mlx: MlxWorld, scenario, others):
    agree(mlx, scenario, [(rank, *other) for other in others for rank in range(mlx.size)])


def test_a_random_life_is_the_models_on_every_rank(mlx: MlxWorld):
    agree(mlx, lives.live, [(400, 7, "numpy")])


def test_a_rank_without_gradients_takes_part(mlx: MlxWorld):
    cases = [(rank, bad, "no backend", "mlx") for rank in range(mlx.size) for bad in (None, (rank + 1) % mlx.size)]
    agree(mlx, scenarios.empty_on, cases)


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
