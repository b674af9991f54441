"""A scaler's random life on every rank, held to a plain model in each iteration; see ``lives.py`` for longer ones."""

from __future__ import annotations

from typing import Any

import lives
import pytest
from worlds import Failure, ProcessWorld, ThreadWorld

pytestmark = pytest.mark.numpy


def test_a_random_life_is_the_models_on_every_rank(world: ThreadWorld | ProcessWorld) -> None:
    iterations = 500 if isinstance(world, ThreadWorld) else 5000
    if isinstance(world, ThreadWorld):
        results = world.run(lives.live, iterations, 7)
    else:
        # Seconds on a quiet machine, and minutes on one that is shared by many.
        (results,) = world.run_each(lives.live, [(iterations, 7)], limit=280.0)
    assert not [result for result in results if isinstance(result, Failure)], results
    assert all(result == results[0] for result in results), results
    assert results[0]["skipped"] > 0
    assert min(results[0]["steps"]) > iterations // 5


@pytest.mark.parametrize("field", ["scale", "run", "interval", "growth", "backoff", "iteration"])
def test_a_model_that_is_wrong_is_found(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = lives.Model.update

    def wrong(model: Any, verdicts: list[bool]) -> None:
        update(model, verdicts)
        if model.iteration == 40:
            setattr(model, field, getattr(model, field) * 2 + 1)

    monkeypatch.setattr(lives.Model, "update", wrong)
    results = ThreadWorld(2).run(lives.live, 60, 7)
    assert {result.kind for result in results if isinstance(result, Failure)} >= {"AssertionError"}
