"""SkipSpikes: which values are spikes, what the window learns, on every library; settings that are refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library

from gradscale import InvalidTypeError, InvalidValueError, SkipSpikes
from gradscale.policies.spikes import SpikeState

# Pure functions, and many calls of them; see conftest.py.
PURE = TRACED = LONG = True

NAN, INF = math.nan, math.inf


class Reference:
    """The rule in exact fractions: what a window of Python's numbers says of a value, and learns of it."""

    def __init__(self, rule: SkipSpikes):
        self.rule, self.window, self.skipped = rule, list[float](), 0

    def distance(self, x: float) -> tuple[float, float]:
        """Return how far a value lies from the mean, and how far it may."""
        exact = [Fraction(value) for value in self.window]
        mean = sum(exact) / len(exact)
        far = float(Fraction(x) - mean) if math.isfinite(x) else x
        variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
        return abs(far) if self.rule.sides == "both" else far, self.rule.deviations * math.sqrt(variance)

    def judge(self, x: float) -> bool:
        rule = self.rule
        if rule.above is not None:
            return not (math.isfinite(x) and x <= rule.above)
        if len(self.window) < (rule.min_values or 0):
            return False
        far, bound = self.distance(x)
        return not (math.isfinite(x) and far <= bound)

    def is_near(self, x: float) -> bool:
        """Tell whether float32 may say otherwise."""
        if not math.isfinite(x) or len(self.window) < 2:
            return False
        far, bound = self.distance(x)
        return abs(far - bound) < 1e-4 * max(abs(value - x) for value in self.window)

    def learn(self, x: float, skipped: bool):
        rule = self.rule
        if math.isfinite(x) and (not skipped or rule.learns_from_skipped or self.skipped >= rule.patience):
            self.window = [*self.window, x][-rule.window :]
        if skipped:
            self.skipped = min(self.skipped + 1, rule.patience)
        elif math.isfinite(x):
            self.skipped = 0


def follow(arrays: Library, rule: SkipSpikes, values: Iterable[float], state=None):
    """Yield whether each value is a spike, and the state that has learned of it."""
    state = rule.init(arrays.asarray(0.0)) if state is None else state
    for value in values:
        x = arrays.asarray(value)
        is_spike = rule.judge(state, x)
        arrays.assert_is_mine(is_spike)
        assert (is_spike.shape, is_spike.dtype) == ((), arrays.dtype("bool"))
        state = rule.learn(state, x, skipped=is_spike)
        yield arrays.item(is_spike), state


def spikes(arrays: Library, rule: SkipSpikes, values: Iterable[float], state=None) -> list[bool]:
    """Return which values are spikes."""
    return [is_spike for is_spike, _ in follow(arrays, rule, values, state)]


def plain(arrays: Library, state: SpikeState) -> tuple[list[float], int, int]:
    """Return a window as Python's numbers: its values, and how many steps in a row were skipped."""
    assert [field.dtype for field in state] == [arrays.dtype(name) for name in ("float32", "int32", "int32")]
    count = arrays.item(state.count)
    return arrays.to_numpy(state.values).tolist()[state.values.shape[0] - count :], count, arrays.item(state.skipped)


RULES = {
    "above": SkipSpikes(window=4, deviations=2.0),
    "both": SkipSpikes(window=4, deviations=2.0, sides="both", min_values=3),
    "learns": SkipSpikes(window=4, deviations=2.0, learns_from_skipped=True),
    "patient": SkipSpikes(window=4, deviations=2.0, patience=2),
    "bound": SkipSpikes(window=4, above=3.0, patience=2),
}
# Equal values, one above and one below, a spike, another level, zeros, NaN and inf, and a bound itself.
VALUES = [*[1.0] * 4, 1.5, 0.5, 9.0, 1.0, NAN, 1.5, *[0.0] * 4, INF, 0.0, 7.0, 8.0, 7.0, 8.0, 7.5, -INF, 3.0]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_decisions_and_windows_are_those_of_exact_numbers(arrays: Library, rule: SkipSpikes):
    reference, found = Reference(rule), []
    for x, (is_spike, state) in zip(VALUES, follow(arrays, rule, VALUES), strict=True):
        assert is_spike == reference.judge(x), x
        reference.learn(x, is_spike)
        assert plain(arrays, state) == (reference.window, len(reference.window), reference.skipped), x
        found.append(is_spike)
    assert 2 <= sum(found) <= len(found) - 2


UNIT = 64  # so that float32 holds each value, and no difference is too small to divide by
NUMBERS = st.integers(-1000 * UNIT, 1000 * UNIT).map(lambda number: number / UNIT)
TRACES = st.lists(
    st.one_of(NUMBERS, NUMBERS.map(lambda x: 1 + x / 1024), st.sampled_from([0.0, 1.0, 1.0, 1.0, NAN, INF, -INF])),
    max_size=30,
)


@given(
    trace=TRACES,
    window=st.integers(2, 9),
    deviations=st.sampled_from([0.5, 2.0, 6.0]),
    sides=st.sampled_from(["above", "both"]),
    learns=st.booleans(),
    patience=st.integers(0, 3),
)
def test_any_run_is_that_of_exact_numbers(
    trace: list[float], window: int, deviations: float, sides, learns: bool, patience: int
):
    rule = SkipSpikes(window, deviations, sides=sides, learns_from_skipped=learns, patience=patience)
    reference, state = Reference(rule), rule.init(np.float32(0))
    for x in np.float32(trace):
        is_spike = bool(rule.judge(state, x))
        if not reference.is_near(float(x)):
            assert is_spike == reference.judge(float(x))
        state = rule.learn(state, x, skipped=np.bool_(is_spike))
        reference.learn(float(x), is_spike)
        assert state.values.tolist()[window - int(state.count) :] == reference.window
        assert int(state.skipped) == reference.skipped


@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100], ids=["1e30", "1e-30"])
def test_values_of_any_size_are_judged_alike(arrays: Library, scale: float):
    rule = SkipSpikes(window=8, deviations=3.0, sides="both")
    values = [1.0 + (number * 7 % 5) / 16 for number in range(12)] + [2.5, 1.25, 0.0, 1.25, 1.5, 3.0]
    expected = spikes(arrays, rule, values)
    assert 3 <= sum(expected) <= 6
    assert spikes(arrays, rule, [value * scale for value in values]) == expected


@pytest.mark.parametrize("value", [0.0, 0.1, -0.1, 1e30, 1e-30])
def test_a_value_that_equals_all_before_it_is_no_spike_and_any_greater_one_is(arrays: Library, value: float):
    rule, both = SkipSpikes(window=8), SkipSpikes(window=8, sides="both")
    greater, smaller = (float(np.nextafter(np.float32(value), np.float32(end))) for end in (INF, -INF))
    if value == 0.0:
        # XLA takes smaller ones for 0.
        greater, smaller = 2.0**-126, -(2.0**-126)
    for count in (4, 7, 12):
        *_, (is_spike, state) = follow(arrays, rule, [value] * count)
        assert not is_spike
        told = [spikes(arrays, each, [x], state)[0] for each in (rule, both) for x in (value, greater, smaller)]
        assert told == [False, True, False, False, True, True]


def test_an_overflow_between_spikes_neither_counts_nor_begins_the_count_again(arrays: Library):
    rule = SkipSpikes(window=4, patience=2)
    *_, (_, state) = follow(arrays, rule, [1.0, 1.25, 1.0, 1.25, 10.0])
    overflowed = rule.learn(state, arrays.asarray(NAN), skipped=arrays.asarray(False, "bool"))
    assert plain(arrays, overflowed) == plain(arrays, state) == ([1.0, 1.25, 1.0, 1.25], 4, 1)


def test_a_state_restored_from_lists_goes_on_to_the_same_bits(arrays: Library):
    rule = RULES["patient"]
    straight = list(follow(arrays, rule, VALUES))
    for stop in (0, 3, 17):
        state = rule.init(arrays.asarray(0.0)) if stop == 0 else straight[stop - 1][1]
        saved = [arrays.to_numpy(field).tolist() for field in state]
        restored = SpikeState(*map(arrays.asarray, saved, ("float32", "int32", "int32")))
        for (is_spike, after), (expected, state) in zip(
            follow(arrays, rule, VALUES[stop:], restored), straight[stop:], strict=True
        ):
            assert is_spike == expected
            for field, wanted in zip(after, state, strict=True):
                arrays.assert_array(field, arrays.to_numpy(wanted), str(arrays.to_numpy(wanted).dtype))


def test_several_quantities_are_judged_at_once_as_each_alone(arrays: Library):
    rule = RULES["both"]
    rows = [VALUES[:9], VALUES[8:17], [x / 3 for x in VALUES[5:14]]]
    alone = [list(follow(arrays, rule, row)) for row in rows]
    states = SpikeState(*(arrays.xp.stack([field] * 3) for field in rule.init(arrays.asarray(0.0))))
    for step, column in enumerate(zip(*rows, strict=True)):
        x = arrays.asarray(column)
        told = rule.judge(states, x)
        assert arrays.to_numpy(told).tolist() == [row[step][0] for row in alone]
        states = rule.learn(states, x, skipped=told)
        for field, *wanted in zip(states, *(row[step][1] for row in alone), strict=True):
            np.testing.assert_array_equal(arrays.to_numpy(field), [arrays.to_numpy(each) for each in wanted])


def test_values_of_other_dtypes_are_judged_as_float32_and_the_state_is_left_alone(arrays: Library):
    rule = SkipSpikes(window=4)
    *_, (_, state) = follow(arrays, rule, [1.0, 1.25, 1.0, 1.25])
    before = plain(arrays, state)
    for dtype, value in itertools.product(arrays.reals, (1.5, 10.0)):
        x = arrays.asarray(value, dtype)
        is_spike = rule.judge(state, x)
        assert arrays.item(is_spike) == (value == 10.0)
        assert plain(arrays, rule.learn(state, x, skipped=is_spike))[0][-1] == (1.25 if value == 10.0 else 1.5)
        assert plain(arrays, state) == before


Settings = dict[str, Any]
BAD: Sequence[tuple[Settings, str]] = [
    ({"window": 1}, "window must be an integer from 2"),
    ({"window": 2**16 + 1}, "window must be an integer from 2"),
    ({"window": 8.0}, "window must be an integer"),
    ({"window": True}, "window must be an integer"),
    ({"deviations": 0.0}, "deviations must be a finite number above 0"),
    ({"deviations": -1.0}, "deviations must be a finite number above 0"),
    ({"deviations": NAN}, "deviations must be a finite number"),
    ({"deviations": INF}, "deviations must be a finite number"),
    ({"deviations": "6"}, "deviations must be a finite number"),
    ({"min_values": 1}, "min_values must be an integer from 2"),
    ({"window": 8, "min_values": 9}, "min_values must be an integer from 2 to 8"),
    ({"sides": "below"}, "sides must be one of 'above', 'both'"),
    ({"sides": None}, "sides must be one of"),
    ({"of": "weights"}, "of must be one of 'loss', 'norm'"),
    ({"of": ()}, "of must hold at least one of 'loss', 'norm'"),
    ({"of": ("loss", 3)}, "of must be one of"),
    ({"learns_from_skipped": 1}, "learns_from_skipped must be"),
    ({"patience": -1}, "patience must be an integer from 0"),
    ({"patience": 2**31}, "patience must be an integer from 0"),
    ({"above": NAN}, "above must be a finite number"),
    ({"above": 1e39}, "above must be a finite number"),
    ({"above": 3.0, "sides": "both"}, "above= is a bound on one side"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[repr(settings) for settings, _ in BAD])
def test_a_setting_out_of_range_is_refused(settings: Settings, message: str):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        SkipSpikes(**settings)


def test_a_state_of_another_window_and_a_value_that_is_no_array_are_refused(arrays: Library):
    rule, value = SkipSpikes(window=4), arrays.asarray(1.0)
    state = SkipSpikes(window=8).init(value)
    for call in (rule.judge, lambda *given: rule.learn(*given, skipped=False)):
        with pytest.raises(InvalidValueError, match="of a rule with window=4, got 8 values"):
            call(state, value)
        with pytest.raises(InvalidTypeError, match=r"a value must be an array, 0-d, .*, got 1\.0"):
            call(rule.init(value), 1.0)


def test_settings_are_plain_values():
    rule = SkipSpikes(deviations=np.float32(2.0), learns_from_skipped=np.True_, window=np.int64(8))  # type: ignore[arg-type]
    assert [type(value) for value in (rule.deviations, rule.learns_from_skipped, rule.window)] == [float, bool, int]


def test_defaults_and_presets():
    assert SkipSpikes() == SkipSpikes(128, 6.0, 64, "above", ("loss", "norm"), False, 10, None)
    assert SkipSpikes(of="norm") == SkipSpikes(of=("norm",)) != SkipSpikes()
    assert SkipSpikes(of=("norm", "loss")) == SkipSpikes()
    assert SkipSpikes(window=3).min_values == 2
    assert SkipSpikes.olmo_core() == SkipSpikes(128, 6.0, 63, "both", learns_from_skipped=True)
    assert SkipSpikes.maxtext() == SkipSpikes(128, 6.0, 63, learns_from_skipped=True)
    assert SkipSpikes.maxtext(window=4, deviations=2.5) == SkipSpikes(4, 2.5, 2, learns_from_skipped=True)
