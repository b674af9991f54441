"""A run whose every step is skipped says so, with the cause, and gives up if it may; healthy runs say nothing."""

import warnings

import numpy as np
import pytest
from optimizers import Momentum, Tree, iterate_plainly
from tiers import later

import gradscale
from gradscale import GradScaler, StaticScale, TrainingStalledWarning

pytestmark = pytest.mark.numpy


def told(scaler: GradScaler, optimizer, value: float, count: int = 60) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            iterate_plainly(scaler, optimizer, value)
    assert all(one.category is TrainingStalledWarning for one in caught)
    return [str(one.message) for one in caught]


def test_the_warning_says_how_long_why_and_what_holds_nan():
    scaler, optimizer = GradScaler(init_scale=1024.0), Momentum(1)
    (weight,) = optimizer.weights
    weight[:] = np.nan
    (words,) = told(scaler, optimizer, np.nan)
    assert "Cause: weights. Weights hold inf or NaN, the most in 'layer.0': load a checkpoint" in words
    assert words.startswith("each step of the last 50 iterations was skipped: 50 for non-finite gradients (inf or NaN)")
    assert "first seen by rank 0; the scale went from 1024 to 1.8" in words
    weight[:] = 1.0
    optimizer.of(0)["exp_avg"][0] = np.inf
    (words,) = told(GradScaler(policy=StaticScale(8.0)), optimizer, np.nan)
    assert "Cause: optimizer state. The optimizer's state holds inf or NaN" in words


@pytest.mark.parametrize("runs", [8, *later("ranks", 50), *later("all", 10_000)])
def test_no_healthy_run_is_taken_for_a_stalled_one(runs: int):
    random = np.random.default_rng(runs)
    optimizer = Tree()
    for _ in range(runs):
        scaler = GradScaler(
            policy=gradscale.DynamicScale(
                init_scale=2.0 ** random.choice([0, 10, 16, 24, 32, 60]),
                growth_factor=random.choice([1.1, 2.0, 4.0]),
                backoff_factor=random.choice([0.5, 0.8]),
                growth_interval=int(random.choice([1, 5, 20])),
                hysteresis=int(random.choice([1, 2])),
            )
        )
        # The largest scale at which float16 holds the gradients wanders, and jumps now and then.
        limit = random.uniform(1.0, 24.0)
        for _ in range(120):
            limit = max(0.5, limit + random.normal(0.0, 0.5) + random.choice([0.0, -6.0, 6.0], p=[0.98, 0.01, 0.01]))
            iterate_plainly(scaler, optimizer, np.inf if scaler.get_scale() > 2.0**limit else 1.0)
        counts = scaler.counts()
        assert counts["taken"] + counts["overflow"] == 120
