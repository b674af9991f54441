"""The states that check_trainer compares: parts by their names, bit for bit, of every library."""

from __future__ import annotations

import collections
import dataclasses
import math
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from libraries import Library

from gradscale import InvalidTypeError
from gradscale.tools.state_parts import differences, parts_of


def unequal(ours: Any, theirs: Any, rtol: float = 0.0, exempt: tuple[str, ...] = ()):
    """Return in which parts two states differ, which must be the same both ways."""
    found = differences(parts_of(ours), parts_of(theirs), rtol, exempt)
    back = differences(parts_of(theirs), parts_of(ours), rtol, exempt)
    assert {part for part, *_ in found} == {part for part, *_ in back}
    return found


class Moments(NamedTuple):
    mu: Any
    nu: Any


@dataclasses.dataclass
class TrainState:
    params: Any
    apply: Any


class Optimizer:
    def __init__(self, step: int):
        self.step = step

    def state_dict(self):
        return {"state": {0: {"step": self.step}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}


def test_parts_have_the_names_by_which_one_reaches_them():
    state = {
        "train": TrainState({"w": np.zeros(2)}, len),
        "opt": [Moments(1.0, None), Optimizer(3)],
        "queue": collections.deque([1, "text"]),
    }
    assert list(parts_of(state)) == [
        *("train.params.w", "opt[0].mu", "opt[0].nu", "opt[1].state[0].step", "opt[1].groups[0].lr"),
        *("opt[1].groups[0].betas[0]", "opt[1].groups[0].betas[1]", "queue[0]", "queue[1]"),
    ]


def test_numbers_and_text_differ_by_value_and_type():
    assert unequal({"lr": 0.1, "n": 1}, {"lr": 0.1, "n": 1}) == []
    assert unequal({"lr": 0.025}, {"lr": 0.05}) == [("lr", "0.025", "0.05")]
    assert unequal({"n": 1}, {"n": 1.0}) == [("n", "int", "float")]
    assert unequal({"n": 1}, {}) == [("n", "int", "absent")]
    assert unequal([math.nan, Optimizer(1)], [math.nan, Optimizer(2)]) == [("[1].state[0].step", "1", "2")]
    assert unequal({"scaler": {"Scale": 1}}, {"scaler": {"Scale": 2}}, exempt=("scale",)) == []


def test_sets_and_objects_are_those_of_the_moment():
    tags, counts = {"a"}, types.SimpleNamespace(seen=1)
    before = parts_of({"tags": tags, "counts": counts})
    tags.add("b")
    counts.seen = 2
    rows = differences(parts_of({"tags": tags, "counts": counts}), before, 0.0, ())
    assert rows == [
        ("tags", "\"'a', 'b'\"", "\"'a'\""),
        ("counts", "'namespace(seen=2)'", "'namespace(seen=1)'"),
    ]


def test_the_order_of_a_set_is_no_difference():
    # In a table of eight places these are in the order in which they came.
    ours, theirs = {0, 8}, {8, 0}
    assert repr(ours) != repr(theirs)
    assert unequal({"seen": ours, "frozen": frozenset(ours)}, {"seen": theirs, "frozen": frozenset(theirs)}) == []
    assert [name for name, *_ in unequal({"seen": {1}}, {"seen": {2}})] == ["seen"]


def test_a_long_text_is_cut_in_what_is_said_of_it():
    ((_, ours, theirs),) = unequal({"log": "x" * 10**4}, {"log": "y" * 10**4})
    assert len(ours) == len(theirs) < 1100


def test_classes_are_left_out_as_functions_are():
    assert parts_of({"dtype": np.float32, "optimizer": Optimizer, "clip": len}) == {}


def test_an_optimizer_that_ours_is_around_is_not_exempt():
    def state(count: int, skipped: int):
        return {"opt": {"gradscale_inner_state": {"count": count}, "gradscale_skipped": skipped}}

    assert unequal(state(1, 0), state(1, 1), exempt=("scale",)) == []
    assert unequal(state(1, 0), state(2, 0), exempt=("scale",)) == [("opt.gradscale_inner_state.count", "1", "2")]
    assert unequal(state(1, 0), state(2, 0), exempt=("opt",)) == []


def test_arrays_of_every_library_differ_by_bits_dtype_and_shape(arrays: Library):
    def array(values, dtype="float32"):
        return arrays.xp.asarray(values, dtype=getattr(arrays.xp, dtype))

    same = array([1.0, math.nan, -math.inf])
    assert unequal({"w": same}, {"w": array([1.0, math.nan, -math.inf])}) == []
    ((part, ours, theirs),) = unequal({"w": same}, {"w": array([1.0, 2.0, -math.inf])})
    assert part == "w"
    assert "nan" in ours
    assert ours.endswith(" at element 1")
    assert "2" in theirs
    assert unequal({"w": array([0.0])}, {"w": array([-0.0])}) != []
    assert unequal({"w": array([[1.0]])}, {"w": array([1.0])}) != []
    assert unequal({"w": array([1], "int32")}, {"w": array([1.0])}) != []
    assert unequal({"n": array(3, "int32")}, {"n": array(3, "int32")}) == []
    assert unequal({"n": array(3, "int32")}, {"n": array(4, "int32")}) != []


def test_a_part_that_is_spread_over_ranks_in_another_way_is_named():
    half, whole = ("2 values of float32 and shape (4,)", [1.0, 2.0]), ("4 values of float32 and shape (4,)", [1.0] * 4)
    assert differences({"w": half}, {"w": whole}, 0.0, ()) == [("w", half[0], whole[0])]
    assert parts_of({"w": np.zeros((2, 3), np.float32)})["w"][0] == "6 values of float32 and shape (2, 3)"


def test_rtol_is_of_the_largest_number_of_an_array():
    ours, theirs = np.float32([1000.0, 1e-3, math.inf]), np.float32([1000.0, 0.0, math.inf])
    assert unequal({"w": ours}, {"w": theirs}, rtol=1e-5) == []
    assert unequal({"w": ours}, {"w": theirs}, rtol=1e-7) != []
    assert unequal({"w": np.float32([math.nan, 1.0])}, {"w": np.float32([1.0, 1.0])}, rtol=0.5) != []
    assert unequal({"w": np.float32([math.inf, 1.0])}, {"w": np.float32([1.0, 1.0])}, rtol=0.5) != []


def test_a_state_that_holds_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested containers of arrays must have an end"):
        parts_of(endless)

    class Raises(dict):
        def items(self):
            raise KeyError("x")

        values = keys = __iter__ = items

    with pytest.raises(InvalidTypeError):
        parts_of(Raises(a=1))
