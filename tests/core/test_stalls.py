"""A run whose every step is skipped says so, with the cause, and gives up if it may; healthy runs say nothing."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from momentum import Momentum, of, overflow
from optimizers import Tree

import gradscale
from gradscale import GradScaler, StaticScale, TrainingStalledWarning
from gradscale.tools.callbacks import JSONLines, LogUpdates, read_log

pytestmark = pytest.mark.numpy


def iterate(scaler: GradScaler, optimizer, value: float, count: int = 1):
    for _ in range(count):
        scaler.scale(np.float32(1.0))
        optimizer.grads = [np.full(2, value, np.float32)]
        scaler.step(optimizer)
        scaler.update()


def told(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(one.category is TrainingStalledWarning for one in caught)
    return [str(one.message) for one in caught]


def test_the_warning_says_how_long_why_and_what_holds_nan():
    scaler, optimizer = GradScaler(init_scale=1024.0), Momentum(1)
    (weight,) = optimizer.weights
    weight[:] = np.nan

    def train():
        for _ in range(60):
            overflow(scaler, optimizer, np.nan)

    (words,) = told(train)
    assert "Cause: weights. Weights hold inf or NaN, the most in 'layer.0': load a checkpoint" in words
    assert words.startswith("each step of the last 50 iterations was skipped: 50 for non-finite gradients (inf or NaN)")
    assert "first seen by rank 0; the scale went from 1024 to 1.8" in words
    weight[:] = 1.0
    of(optimizer, 0)["exp_avg"][0] = np.inf
    scaler = GradScaler(policy=StaticScale(8.0))
    (words,) = told(train)
    assert "Cause: optimizer state. The optimizer's state holds inf or NaN" in words


def test_it_is_said_again_after_ten_times_as_many_and_after_a_step_that_was_made():
    scaler, optimizer = GradScaler(policy=StaticScale(8.0), warn_after=4), Tree()
    assert [re.findall(r"last (\d+) ", one) for one in told(lambda: iterate(scaler, optimizer, np.inf, 41))] == [
        ["4"],
        ["40"],
    ]
    assert told(lambda: iterate(scaler, optimizer, 8.0)) == []
    assert len(told(lambda: iterate(scaler, optimizer, np.inf, 5))) == 1
    assert scaler.counts() == {"taken": 1, "overflow": 46, "spike": 0, "refused": 0}


def test_healthy_runs_and_those_that_want_none_hear_nothing():
    # A first scale that is much too large, and one overflow for each growth.
    scaler, optimizer = GradScaler(init_scale=2.0**100), Tree()
    assert told(lambda: iterate(scaler, optimizer, np.inf, 90)) == []
    scaler = GradScaler(growth_interval=1, warn_after=2)

    def grow():
        for _ in range(20):
            iterate(scaler, optimizer, 1.0)
            iterate(scaler, optimizer, np.inf)

    assert told(grow) == []
    scaler = GradScaler(warn_after=None)
    assert told(lambda: iterate(scaler, optimizer, np.inf, 100)) == []
    # Another optimizer is stepped, before or after it.
    scaler, other = GradScaler(warn_after=1), Tree()

    def both(*order: Tree):
        scaler.scale(np.float32(1.0))
        optimizer.grads, other.grads = [np.full(2, np.inf, np.float32)], [np.ones(2, np.float32)]
        for one in order:
            scaler.step(one)
        scaler.update()

    assert told(lambda: [both(optimizer, other), both(other, optimizer), both(other, optimizer)]) == []


@pytest.mark.parametrize(
    "runs", [pytest.param(200, id="some"), pytest.param(10_000, marks=pytest.mark.tier("all"), id="many")]
)
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
            iterate(scaler, optimizer, np.inf if scaler.get_scale() > 2.0**limit else 1.0)
        counts = scaler.counts()
        assert counts["taken"] + counts["overflow"] == 120


@pytest.mark.parametrize(("name", "value"), [("warn_after", 0), ("give_up_after", -1), ("give_up_after", 2.5)])
def test_limits_are_whole_numbers_from_1(name: str, value):
    with pytest.raises(gradscale.GradscaleError, match=name):
        GradScaler(**{name: value})


def test_a_bad_count_in_a_state_dict_is_refused():
    with pytest.raises(gradscale.StateDictError, match=r"counts\['taken'\]"):
        GradScaler().load_state_dict(GradScaler().state_dict() | {"counts": {"taken": -1}})


def test_logs_have_counts_and_the_words_that_watchers_of_clusters_look_for(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    caplog.set_level(logging.INFO)
    with JSONLines(tmp_path / "log.jsonl") as lines:
        scaler = GradScaler(on_update=[LogUpdates(summary_every=3), lines])
        iterate(scaler, Tree(), 1.0, 2)
        iterate(scaler, Tree(), np.nan)
    assert read_log(tmp_path / "log.jsonl")[-1]["counts"] == {"taken": 2, "overflow": 1, "spike": 0, "refused": 0}
    text = "\n".join(caplog.messages)
    assert "in all 2 taken, 1 overflow, 0 spike, 0 refused" in text
    for pattern in (r"(?i)non-?finite grad", r"\bNaN\b", r"(?i)\bskipp(ed|ing)\b", r"(?i)\binf\b"):
        assert re.search(pattern, text), pattern
