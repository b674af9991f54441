"""A scaler's random life, alone and on every rank, held to a plain model in each call."""

from __future__ import annotations

import lives
import pytest
from tiers import examples
from worlds import ProcessWorld, ThreadWorld, agree

# Some iterations do not call scale().
pytestmark = [pytest.mark.numpy, pytest.mark.filterwarnings(r"ignore:scale\(\) was not called:UserWarning")]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_alone_is_the_models(seed: int):
    counts = lives.live(None, examples(5_000), seed)["counts"]
    assert min(counts[name] for name in (*lives.CALLS, "skipped", "stepped")) > 0
    assert min(counts[f"{name} refused"] for name in ("unscale", "step", "update", "resume")) > 0


def test_a_random_life_is_the_models_on_every_rank(world: ThreadWorld | ProcessWorld):
    agree(world, lives.live, [(2_000 if isinstance(world, ThreadWorld) else 4_000, 7)])
