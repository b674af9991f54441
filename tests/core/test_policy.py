"""DynamicScale and StaticScale: when the scale grows, when it backs off, and what it can never become."""

import math
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from libraries import Library
from runs import start
from tiers import examples

from gradscale import DynamicScale, ScaleState, StaticScale
from gradscale.policies.dynamic import next_numbers

# Pure functions, and many calls of them; see conftest.py.
TRACED = LONG = True

SMALLEST = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)
MOST = 2**31 - 1
# The rule a second time, for Python's numbers; ../parity holds when it grows and backs off to other systems.
plain: Callable[..., Any] = next_numbers


def draw_policy(chance: random.Random) -> DynamicScale:
    """Return a policy of any settings, many of them at the ends of what they may be."""
    after = chance.choice(["interval", "first_interval_plus_one", "interval_plus_one"])
    smallest, largest = chance.choice([SMALLEST, SMALLEST, 0.1, 3.0, 4.0]), chance.choice([None, None, 24.0, 3e38])
    drawn = float(np.float32(math.ldexp(chance.uniform(1.0, 2.0), chance.randint(-126, 127))))
    scale = chance.choice([smallest, largest or LARGEST, 8.0, drawn, 2.0**127])
    refill = tuple(chance.sample(("clean_step", "growth", "backoff"), chance.randint(1, 2)))
    patience: list[dict[str, Any]] = [
        {},
        {"tolerance": chance.choice([0.0, 0.25, 0.3, 0.5, 1.0, chance.random()])},
        {"hysteresis": chance.choice([2, 3, MOST]), "hysteresis_refill": refill},
    ]
    return DynamicScale(
        init_scale=min(max(scale, smallest), largest or LARGEST),
        growth_factor=chance.choice([2.0, 2.0, 1.1, 3.7, 1.0 + 2.0**-52, 2.0 - 2.0**-24, 2.0 - 2.0**-25, 1e30]),
        backoff_factor=chance.choice([0.5, 0.5, 0.3, 0.9]),
        growth_interval=chance.choice([1, 2, 3, 3, MOST - (after != "interval")]),
        growth_after=after,
        min_scale=smallest,
        max_scale=largest,
        at_min=chance.choice(["clamp", "hold", "raise"]),
        **chance.choice(patience),
    )


def test_any_run_of_any_policy_from_any_state_is_that_of_plain_numbers(arrays: Library):
    for seed in range(examples(1000 if arrays.name == "numpy" else 60 if arrays.is_slow else 120)):
        chance = random.Random(seed)
        policy = draw_policy(chance)
        is_fresh = chance.random() < 0.6
        edges = [0, 1, policy.growth_interval, 1500, MOST - 3, MOST]
        trackers = [0, 0, 0] if is_fresh else chance.choices(edges, k=3)
        state = start(arrays, policy, **dict(zip(ScaleState._fields[1:], trackers, strict=True)))
        numbers = (policy.init_scale, *trackers)
        for _ in range(6 if arrays.is_slow else 12):
            scale, _, overflows, steps = numbers
            with np.errstate(over="ignore"):
                down, up = (float(np.float32(scale * x)) for x in (policy.backoff_factor, policy.growth_factor))
            lowered = scale if down < policy.min_scale and policy.at_min == "hold" else max(down, policy.min_scale)
            assert arrays.state(policy.backoff(state)) == (lowered, 0, 0, 0)
            raised = min(up, policy.max_scale or (up if math.isfinite(up) else scale))
            assert arrays.item(policy.raised_scale(arrays.xp, state.scale)) == raised
            share = np.float32(min(overflows + 1, MOST)) / np.float32(min(steps + 1, MOST))
            is_due = share >= np.float32(policy.tolerance or 0.0) and overflows + 1 >= policy.hysteresis
            told, is_told = policy.at_min_scale(state), is_due and scale <= policy.min_scale
            assert (None if told is None else arrays.item(told)) == (is_told if policy.at_min == "raise" else None)
            dtype = chance.choice(["bool", "int8", "int32", "int32", "int64", "float32"])
            count = int(chance.random() < 0.4) * (chance.choice([1, 2, 7, MOST, -1]) if dtype == "int32" else 1)
            numbers = plain(policy, numbers, count)
            state = policy.update(state, nonfinite=arrays.asarray(count, dtype))
            assert arrays.state(state) == numbers, (seed, policy)
            assert [type(field) for field in numbers] == [float, int, int, int]
            assert not is_fresh or all(map(operator.le, numbers[1:], policy.largest_trackers)), (seed, policy)


def test_a_static_scale_never_changes(arrays: Library):
    policy = StaticScale(init_scale=128.0)
    state = start(arrays, policy)
    for found in (1, 0):
        assert arrays.state(policy.update(state, nonfinite=arrays.asarray(found, "int32"))) == (128.0, 0, 0, 0)
    assert policy.backoff(state) is state
    assert policy.at_min_scale(state) is None
    assert policy.clamp(3.0) == 3.0


def test_a_tolerated_share_of_overflows_is_one_too_many_once_it_is_reached():
    assert [plain(DynamicScale(tolerance=0.25), (8.0, 0, 0, steps), 1)[0] for steps in (3, 4)] == [4.0, 8.0]
