"""A scaler's random life, alone and on every rank, held to a plain model in each call."""

from __future__ import annotations

import lives
import pytest
from tiers import examples
from worlds import Failure, ProcessWorld, ThreadWorld, agree

# Some iterations do not call scale().
pytestmark = [pytest.mark.numpy, pytest.mark.filterwarnings(r"ignore:scale\(\) was not called:UserWarning")]

MODEL = lives.Model


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_alone_is_the_models(seed: int) -> None:
    counts = lives.live(None, examples(5_000), seed)["counts"]
    assert min(counts[name] for name in (*lives.CALLS, "skipped", "stepped")) > 0
    assert min(counts[f"{name} refused"] for name in ("unscale", "step", "update", "resume")) > 0


def test_a_random_life_is_the_models_on_every_rank(world: ThreadWorld | ProcessWorld) -> None:
    agree(world, lives.live, [(2_000 if isinstance(world, ThreadWorld) else 4_000, 7)])


@pytest.mark.parametrize("field", ["scale", "run", "interval", "growth", "backoff", "iteration"])
def test_a_model_that_is_wrong_is_found(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(MODEL):
        def update(self) -> None:
            super().update()
            if self.iteration == 40:
                setattr(self, field, getattr(self, field) * 2 + 1)

    monkeypatch.setattr(lives, "Model", Wrong)
    results = ThreadWorld(2).run(lives.live, 600, 7)
    assert {result.kind for result in results if isinstance(result, Failure)} >= {"AssertionError"}
