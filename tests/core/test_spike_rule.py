"""SkipSpikes: which values are spikes, what the window learns, on every library."""

import collections
import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
from libraries import Library
from tiers import examples

from gradscale import InvalidTypeError, InvalidValueError, SkipSpikes
from gradscale.core.arithmetic import has_float64
from gradscale.core.validation import round_to_float32
from gradscale.policies.spikes import SpikeState, Window, judge_number, learn_number

# Pure functions, and many calls of them; see conftest.py.
TRACED = LONG = True

NAN, INF = math.nan, math.inf
FIELDS = ("float32", "int32", "int32")
UNIT = 64  # so that float32 holds each value, and no difference is too small to divide by
USUAL = (0.0, 1.0, 1.0, 1.0, 1.0, 3.0, 9.0, NAN, INF, -INF)


def draw_rule(chance: random.Random, size: float) -> SkipSpikes:
    window, deviations = chance.randint(2, 9), chance.choice([0.5, 2.0, 6.0])
    learns, patience = chance.random() < 0.4, chance.randint(0, 3)
    bound: dict[str, Any] = chance.choice([{}, {"sides": "both"}, {"min_values": 2}, {"above": 3.0 * size}])
    return SkipSpikes(window, deviations, of="loss", learns_from_skipped=learns, patience=patience, **bound)


class Exact:
    """The rule in exact numbers: the values in its window, and how many were skipped in a row."""

    def __init__(self, rule: SkipSpikes):
        self.rule, self.skipped, self.values = rule, 0, list[float]()

    def judge(self, x: float) -> bool | None:
        """Tell whether a value is a spike; None where float32 may judge otherwise."""
        rule, values = self.rule, self.values
        if rule.above is not None:
            return not -INF < x <= rule.above
        if len(values) < rule.min_values or not math.isfinite(x):  # type: ignore[operator]
            return len(values) >= rule.min_values  # type: ignore[operator]
        far = x - statistics.fmean(values)
        far = abs(far) if rule.sides == "both" else far
        bound = rule.deviations * statistics.stdev(values)
        return None if abs(far - bound) < 1e-4 * max(abs(value - x) for value in values) else far > bound

    def learn(self, x: float, is_spike: bool):
        is_taken = not is_spike or self.rule.learns_from_skipped or self.skipped == self.rule.patience
        if math.isfinite(x) and is_taken:
            self.values = [*self.values, x][-self.rule.window :]
        if is_spike:
            self.skipped = min(self.skipped + 1, self.rule.patience)
        elif math.isfinite(x):
            self.skipped = 0


def draw_value(chance: random.Random) -> float:
    number = chance.randint(-1000 * UNIT, 1000 * UNIT) / UNIT
    return chance.choice([*USUAL, number, 1.0 + number / 1024, 1.0 + number / 1024])


def test_any_run_of_one_or_several_quantities_is_that_of_exact_numbers(arrays: Library):
    counts: collections.Counter[bool] = collections.Counter()
    for seed in range(examples(500 if arrays.name == "numpy" else 30 if arrays.is_slow else 60)):
        chance = random.Random(seed)
        kinds = [(1.0, name) for name in arrays.reals] + [(2.0**k, "float32") for k in (100, -100)]
        size, dtype = chance.choice(kinds)
        rule, several = draw_rule(chance, size), chance.choice([1, 3])
        models, state = [Exact(rule) for _ in range(several)], rule.init(arrays.asarray(0.0))
        if several > 1:
            # They are judged at once, as each is alone.
            state = SpikeState(*(arrays.xp.stack([field] * several) for field in state))
        for _ in range(25):
            drawn = [draw_value(chance) * size for _ in range(several)]
            x = arrays.asarray(drawn if several > 1 else drawn[0], dtype)
            told = rule.judge(state, x)
            arrays.assert_is_mine(told)
            assert (told.shape, told.dtype) == (x.shape, arrays.dtype("bool"))
            values, spikes = (arrays.to_numpy(one).reshape(-1).tolist() for one in (x, told))
            counts.update(spikes)
            for model, value, is_spike in zip(models, values, spikes, strict=True):
                assert model.judge(value) in (is_spike, None), (seed, value)
            if chance.random() < 0.1:
                # As after an overflow, which neither counts nor begins the count of spikes again.
                x, told, values, spikes = x * NAN, told & ~told, [NAN] * several, [False] * several
            state = rule.learn(state, x, skipped=told)
            assert [field.dtype for field in state] == [arrays.dtype(name) for name in FIELDS]
            saved = [arrays.to_numpy(field).tolist() for field in state]
            for k, (model, value, is_spike) in enumerate(zip(models, values, spikes, strict=True)):
                model.learn(value, is_spike)
                window, count, skipped = (one[k] for one in saved) if several > 1 else saved
                assert (window[rule.window - count :], skipped) == (model.values, model.skipped), seed
            if chance.random() < 0.1:
                state = SpikeState(*map(arrays.asarray, saved, FIELDS))
    assert min(counts[True], counts[False]) > 100


def test_the_rule_for_numbers_is_that_for_arrays_bit_for_bit(arrays: Library):
    if not has_float64(arrays.xp, None):
        pytest.skip("the sums of a library without float64 are its own")
    counts: collections.Counter[bool] = collections.Counter()
    for seed in range(examples(400 if arrays.name == "numpy" else 40)):
        chance = random.Random(seed)
        # XLA takes subnormals for 0.
        size, choice = 2.0 ** chance.choice([0, 0, 100, -100, *[-140] * ("jax" not in arrays.name)]), chance.choice
        rule, kind = draw_rule(chance, size), choice(["any", "few", "normal"])
        state, window = rule.init(arrays.asarray(0.0)), Window()
        for _ in range(40):
            # Of few values, many lie exactly on the bound.
            drawn = {"any": draw_value(chance), "few": float(chance.randint(0, 3)), "normal": chance.gauss(3.0, 1.0)}
            value = round_to_float32(drawn[kind] * size)
            x = arrays.asarray(value)
            told, is_spike = rule.judge(state, x), judge_number(rule, window, value)
            assert arrays.item(told) == is_spike, (seed, rule, window, value)
            counts[is_spike] += 1
            is_skipped = choice([is_spike, is_spike, is_spike, False])
            state = rule.learn(state, x, skipped=arrays.asarray(is_skipped, "bool"))
            window = learn_number(rule, window, value, skipped=is_skipped)
            values, count, skipped = (arrays.to_numpy(one).tolist() for one in state)
            assert (tuple(values[rule.window - count :]), skipped) == window, (seed, rule)
    assert min(counts[True], counts[False]) > 20


@pytest.mark.parametrize("value", [0.0, 0.1, -0.1, 1e30, 1e-30])
def test_a_value_that_equals_all_before_it_is_no_spike_and_any_greater_one_is(arrays: Library, value: float):
    rule, both = SkipSpikes(window=8), SkipSpikes(window=8, sides="both")
    greater, smaller = (float(np.nextafter(np.float32(value), np.float32(end))) for end in (INF, -INF))
    if value == 0.0:
        # XLA takes smaller ones for 0.
        greater, smaller = 2.0**-126, -(2.0**-126)
    state, x = rule.init(arrays.asarray(0.0)), arrays.asarray(value)
    for count in range(1, 13):
        assert not arrays.item(rule.judge(state, x))
        state = rule.learn(state, x, skipped=arrays.asarray(False, "bool"))
        if count in (4, 7, 12):
            others = [arrays.asarray(other) for other in (value, greater, smaller)]
            told = [arrays.item(each.judge(state, other)) for each in (rule, both) for other in others]
            assert told == [False, True, False, False, True, True]


def test_a_state_of_another_window_and_a_value_that_is_no_array_are_refused(arrays: Library):
    rule, value = SkipSpikes(window=4), arrays.asarray(1.0)
    state = SkipSpikes(window=8).init(value)
    for call in (rule.judge, lambda *given: rule.learn(*given, skipped=False)):
        with pytest.raises(InvalidValueError, match="of a rule with window=4, got 8 values"):
            call(state, value)
        with pytest.raises(InvalidTypeError, match=r"a value must be an array, 0-d, .*, got 1\.0"):
            call(rule.init(value), 1.0)


def test_defaults_and_presets():
    assert SkipSpikes() == SkipSpikes(128, 6.0, 64, "above", ("loss", "norm"), False, 10, None)
    assert SkipSpikes(of="norm") == SkipSpikes(of=("norm",)) != SkipSpikes()
    assert SkipSpikes(of=("norm", "loss")) == SkipSpikes()
    assert SkipSpikes(window=3).min_values == 2
    assert SkipSpikes.olmo_core() == SkipSpikes(128, 6.0, 63, "both", learns_from_skipped=True)
    assert SkipSpikes.maxtext() == SkipSpikes(128, 6.0, 63, learns_from_skipped=True)
    assert SkipSpikes.maxtext(window=4, deviations=2.5) == SkipSpikes(4, 2.5, 2, learns_from_skipped=True)
