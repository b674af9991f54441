"""A scaler's random life, alone and on every rank, held to a plain model in each call."""

import lives
import pytest
from axes import require
from tiers import examples, later
from worlds import ThreadWorld, agree

pytestmark = pytest.mark.numpy
LIBRARIES = ["numpy", "strict", pytest.param("torch", marks=[pytest.mark.torch, pytest.mark.tier("ranks")])]


@pytest.mark.parametrize("library", LIBRARIES)
# The life of the first seed has all that is drawn within few calls; that of 8 never overflows at the minimum.
@pytest.mark.parametrize("seed", [3, *later("all", 0, 1, 2, 4, 5, 6, 7, 9, 10)])
def test_a_random_life_alone_is_the_models(seed: int, library: str):
    require(library)
    counts = lives.live(None, examples(10_000 if library == "numpy" else 1_500), seed, library)["counts"]
    if library == "numpy":
        raised = ("unscale", "refuse", "step", "minimise", "update", "resume")
        reasons = ("stepped", "overflow", "spike", "refused", "closure steps", "closure skips", "closure has begun")
        named = (*lives.CALLS, *lives.ENDS, *reasons, *(f"{name} raises" for name in raised))
        assert min((counts[name], name) for name in named) > (0, "")


# A warning that ranks have not scaled may come in any thread.
@pytest.mark.filterwarnings("ignore:scale.. was not called in iteration:UserWarning")
@pytest.mark.parametrize("library", ["numpy", *later("ranks", "torch")])
def test_a_random_life_is_the_models_on_every_rank(world, library: str):
    require(library)
    agree(world, lives.live, [(examples(2_000) if isinstance(world, ThreadWorld) else 2_000, 7, library)])
