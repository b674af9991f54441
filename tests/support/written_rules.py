"""What CuPy's adapter computes by CuPy's own functions, held to the same arithmetic over NumPy, from any state."""

from __future__ import annotations

import numpy as np

from gradscale import Backend, ScaleState
from gradscale.core import arithmetic
from gradscale.core.validation import LARGEST_INT32

__all__ = ["assert_clipping_is_written", "assert_rule_is_written"]

_STATES = 60


def _numbers(rng: np.random.Generator, interval: int):
    """Return a scale, trackers and a count: many of them at the edges of what rules compare with."""
    exponent = int(rng.integers(-126, 128))
    scale = np.float32(2.0**exponent) * np.float32(rng.choice([1.0, 1.0 + rng.random()]))
    edges = [0, 0, 1, 2, interval - 1, interval, 2**30, LARGEST_INT32, int(rng.integers(0, 5000))]
    trackers = [int(rng.choice(edges)) for _ in range(3)]
    return scale, trackers, int(rng.choice([0, 0, 1, 7, LARGEST_INT32]))


def _state(xp, scale, trackers: list[int]) -> ScaleState:
    return ScaleState(xp.asarray(scale), *(xp.asarray(tracker, dtype=np.int32) for tracker in trackers))


def assert_rule_is_written(cupy, backend: Backend, policy):
    """Compare the states after a step."""
    rng = np.random.default_rng(0)
    for _ in range(_STATES):
        scale, trackers, count = _numbers(rng, getattr(policy, "growth_interval", 1))
        case = f"{policy} of {scale!r}, {trackers}, {count}"
        states = [_state(xp, scale, trackers) for xp in (cupy, np)]
        counts = [xp.asarray(count, dtype=np.int32) for xp in (cupy, np)]
        with np.errstate(all="ignore"):
            expected = policy.update(states[1], nonfinite=counts[1])
        updated = backend.update(policy, states[0], counts[0])
        for got, want in zip(updated, expected, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            # Of two zeros, libraries choose the greater as they like.
            np.testing.assert_array_equal(got.get(), want, err_msg=case)


def assert_clipping_is_written(cupy, backend: Backend):
    """Compare the norm, the factor and the overflow; CuPy's own kernels take subnormal float32 for 0."""
    least = np.finfo(np.float32).smallest_normal
    rng = np.random.default_rng(0)
    drawn = (10.0 ** rng.uniform(-90, 90, _STATES)).tolist()
    for squares in (0.0, 25.0, 1e-300, 1e80, np.inf, np.nan, *drawn):
        for max_norm in (0.0, 1e-30, 5.0, float(rng.random()), 1e300, np.inf):
            with np.errstate(all="ignore"):
                expected = arithmetic.clip_factor(np.asarray(squares), max_norm)
            found = backend.clip_factor(cupy.asarray(squares), max_norm)
            for got, want in zip(found, expected, strict=True):
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                is_taken_for_0 = want.dtype == np.float32 and abs(want) < least
                kept = np.zeros_like(want) if is_taken_for_0 else want
                np.testing.assert_array_equal(got.get(), kept, err_msg=f"{squares!r}, {max_norm!r}")
