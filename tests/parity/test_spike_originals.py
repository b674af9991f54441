"""SkipSpikes beside the rules of OLMo-core and MaxText in random runs of 10,000 steps, and where these are at fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from tiers import later

from gradscale import SkipSpikes

pytestmark = pytest.mark.jax

STEPS = 10_000

Original = Callable[..., tuple[Any, Any]]
"""Of values, beside the means and the deviations of those before: which are taken, and which are skipped by a fault."""


def trace(seed: int) -> NDArray[np.float32]:
    """Return a loss that jumps to other levels, with spikes, zeros, equal values and a few NaN and inf."""
    rng = np.random.default_rng(seed)
    level = np.repeat(np.exp(rng.normal(scale=2.0, size=STEPS // 500)), 500)
    values = level * np.exp(rng.normal(scale=0.05, size=STEPS))
    values *= np.where(rng.random(STEPS) < 0.01, rng.choice([0.0, 0.6, 0.8, 1.2, 1.5, 10.0, 1e6], STEPS), 1.0)
    for start in rng.integers(0, STEPS - 300, 6):
        values[start : start + 300] = rng.choice([0.0, 0.1, values[start]])
        values[start + 250] *= 1.5
    # On both sides of the first value that is judged, of windows of 128 and of 20.
    values[[9, 63] if seed % 2 else [8, 62]] *= (1e2, 1e5)
    values[rng.integers(0, STEPS, 12)] = rng.choice([math.nan, math.inf], 12)
    return values.astype(np.float32)


def olmo_core(value: Any, mean: Any, deviation: Any, most: float):
    """Take a value whose z-score is at most so large; it is a fault to skip one that equals all before it."""
    return abs(value - mean) / deviation <= most, (deviation == 0) & (value == mean)


def maxtext(value: Any, mean: Any, deviation: Any, most: float):
    """Take a value that lies at most so many deviations above the mean."""
    return value - mean <= most * deviation, False


def decided(values: NDArray[np.float32], original: Original, most: float, size: int, least: int):
    """Return which steps an original skips, from so many values on, and which of these decisions are its faults."""
    before = sliding_window_view(np.concatenate([np.zeros(size), values[:-1]]), size)[least - 1 :]
    known = np.arange(size) >= size - np.arange(least - 1, len(values))[:, None]
    with np.errstate(all="ignore"):
        mean, deviation = before.mean(axis=1, where=known), before.std(axis=1, ddof=1, where=known)
        is_taken, is_fault = original(values[least - 1 :], mean, deviation, most)
    return np.pad([~is_taken, is_fault | ~np.isfinite(mean)], ((0, 0), (least - 1, 0)))


def ours(rule, values: NDArray[np.float32]):
    """Return which steps a rule skips for a loss or a norm, the two columns, compiled as one loop."""
    import jax

    def step(states, row):
        spike = rule.judge(states, row).any()
        return rule.learn(states, row, skipped=jax.numpy.broadcast_to(spike, row.shape)), spike

    first = jax.tree.map(lambda leaf: jax.numpy.stack([leaf] * 2), rule.init(jax.numpy.zeros(())))
    return np.asarray(jax.lax.scan(step, first, jax.numpy.asarray(values))[1])


# The rule; the original, how many deviations it allows, its window, and from which value on it judges.
ORIGINALS: dict[str, tuple[SkipSpikes, Original, float, int, int]] = {
    "OLMo-core": (SkipSpikes.olmo_core(), olmo_core, 6.0, 128, 64),
    "MaxText": (SkipSpikes.maxtext(), maxtext, 6.0, 128, 64),
    "MaxText, 20 values": (SkipSpikes.maxtext(window=20, deviations=2.5), maxtext, 2.5, 20, 10),
}


@pytest.mark.parametrize("seed", [1, *later("ranks", 2, 3)])
@pytest.mark.parametrize("name", ["OLMo-core", *later("ranks", "MaxText"), "MaxText, 20 values"])
def test_a_preset_decides_as_its_original_but_for_the_originals_faults(name: str, seed: int):
    rule, *original = ORIGINALS[name]
    values = np.stack([trace(seed), trace(seed + 100)], axis=1)
    theirs, faults = np.any([decided(column, *original) for column in values.T], axis=0)
    found = ours(rule, values)
    np.testing.assert_array_equal(found[~faults], theirs[~faults])
    assert faults.mean() < 0.5
    assert theirs[~faults].sum() > 50
    # In a fault they skip, and hardly ever do we.
    assert theirs[faults].all()
    assert found[faults].mean() < 0.1
