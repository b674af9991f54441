"""scaler.diagnose(params=, state=): weights and an optimizer's state that are broken already, and when by itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from libraries import Library
from momentum import Momentum, of, overflow
from optimizers import Grouped, Tree, iterate, scaled

from gradscale import GradScaler, InvalidTypeError
from gradscale.core.backend import Backend
from gradscale.tools.callbacks import row_of


class Moments(NamedTuple):
    """A state as optax keeps it."""

    count: Any
    mu: Any


@dataclasses.dataclass
class Slots:
    """A state in a dataclass."""

    velocity: Any
    rate: float = 0.1


# Where the bad array is: the arguments, the cause, the name and the key.
PLACES: dict[str, tuple[Callable[[Any, Any], dict[str, Any]], str, str, str]] = {
    "weight": (lambda bad, _: {"params": bad}, "weights", "params", ""),
    "weight of a dict": (lambda bad, good: {"params": {"w": good, "b": bad}}, "weights", "['b']", ""),
    "weight deep down": (lambda bad, good: {"params": iter([good, {"b": (bad,)}])}, "weights", "[1]['b'][0]", ""),
    "state": (lambda bad, _: {"state": bad}, "optimizer state", "state", ""),
    "momentum": (
        lambda bad, good: {"params": [good], "state": {"momentum": [good, bad]}},
        "optimizer state",
        "state",
        "['momentum'][1]",
    ),
    "state of optax": (
        lambda bad, _: {"state": (Moments(3, {"w": bad}), ())},
        "optimizer state",
        "state",
        "[0].mu['w']",
    ),
    "state in a dataclass": (lambda bad, _: {"state": [Slots(bad)]}, "optimizer state", "state", "[0].velocity"),
    "both": (lambda bad, _: {"params": {"w": bad}, "state": {"m": bad}}, "weights", "['w']", ""),
}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", PLACES)
def test_a_broken_array_is_named_in_any_place(arrays: Library, place: str, value: float):
    given, cause, name, key = PLACES[place]
    scaler = GradScaler(init_scale=8.0)
    # Gradients are finite, missing, or bad themselves, and the loss is.
    for grads in (scaled(arrays, scaler, 1.0), [None], scaled(arrays, scaler, math.nan)):
        # Half of a big array, so that no other is as bad.
        bad, good = arrays.asarray([1.0, value, value]), arrays.asarray([[2.0], [0.0]])
        report = scaler.diagnose(Tree(grads), loss=math.nan, **given(bad, good))
        assert report.cause == cause
        assert report.broken is not None
        worst = report.broken[0]
        assert (worst.name, worst.key, worst.kind) == (name, key, "weight" if cause == "weights" else "state")
        assert (worst.inf, worst.nan, worst.size, worst.largest) == ((0, 2) if value != value else (2, 0)) + (3, 1.0)
        assert {entry.kind for entry in report.broken} == ({"weight", "state"} if place == "both" else {worst.kind})
        assert f"the most in {name + key!r}: load a checkpoint" in report.explanation
        assert "a lower scale will not help" in report.explanation
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["broken"][0]["key"] == key
        assert f"{name}{key} " in str(report).partition("with inf or NaN\n")[2]


def test_finite_arrays_integers_empty_ones_and_what_is_no_array_are_left_out(arrays: Library):
    scaler = GradScaler(init_scale=8.0)
    big = [arrays.asarray([3.0e38, -1.0e-40, 0.0]), arrays.asarray(1.0e300, "float64"), arrays.asarray([])]
    big += [arrays.asarray([65504.0], half) for half in arrays.halves if half == "float16"]
    others = [
        arrays.asarray([2**31 - 1], "int32"),
        None,
        3,
        math.nan,
        "inf",
        object(),
        Slots,
        np.array(["inf"]),
        {"a": iter([math.inf])},
    ]
    for params, state in (([*big, *others], False), (big, [*others, big]), ([], {}), (None, None), (big[0], ())):
        report = scaler.diagnose(Tree(scaled(arrays, scaler, 1.0)), params=params, state=state)
        assert report.cause == "none"
        assert report.broken == (None if params is None else ())
    iterator = iter([1])
    scaler.diagnose(Tree(scaled(arrays, scaler, 1.0)), state={"data": iterator})
    assert list(iterator) == [1]


def test_weights_are_called_what_the_user_calls_their_gradients(arrays: Library):
    bad = arrays.asarray([math.nan])
    optimizer = Tree({"b": arrays.asarray([1.0]), "w": arrays.asarray([1.0])})
    report = GradScaler().diagnose(optimizer, ["bias", "weight"], params={"w": bad, "b": bad, "more": bad})
    assert report.broken is not None
    assert sorted(entry.name for entry in report.broken) == ["['more']", "bias", "weight"]


def test_gradients_weights_and_state_are_read_at_once(arrays: Library):
    reads: list[Any] = []

    class Counting(Backend):
        def read(self, x, /) -> list[int]:
            reads.append(x)
            return super().read(x)

    scaler = GradScaler(backend=Counting())
    optimizer = Tree(scaled(arrays, scaler, 1.0, 2.0))
    state = {"m": [arrays.asarray([1.0, math.inf], "float64")], "v": arrays.asarray(2.0)}
    reads.clear()
    assert scaler.diagnose(optimizer, params=[arrays.asarray([[1.0]])], state=state).cause == "optimizer state"
    assert len(reads) == 1


def test_arrays_of_other_libraries_are_searched_too(strict: Library):
    def look(*values: float) -> list[str]:
        state = [np.float32(values[0]), strict.asarray([values[1]]), np.array([values[2], 0.0], np.float16)]
        report = GradScaler().diagnose(Tree(np.ones(2, np.float32)), params=[strict.asarray([1.0])], state=state)
        assert report.broken is not None
        return [entry.key for entry in report.broken]

    assert look(1.0, 1.0, 1.0) == []
    assert [look(*(math.nan if place == k else 1.0 for place in range(3))) for k in range(3)] == [
        ["[0]"],
        ["[1]"],
        ["[2]"],
    ]


@pytest.mark.parametrize("asked", ["True", "itself", "and params"])
def test_an_optimizer_of_torchs_kind_is_searched_as_it_is(asked: str):
    optimizer, scaler = Momentum(), GradScaler()
    overflow(scaler, optimizer, 1.0)

    def look():
        given: dict[str, Any] = {"state": optimizer.state if asked == "itself" else True}
        if asked == "and params":
            given["params"] = {"mine": optimizer.weights[0]}
        report = scaler.diagnose(optimizer, **given)
        return report.cause, [(entry.name, entry.key, entry.place) for entry in report.broken or ()]

    assert look() == ("none", [])
    of(optimizer, 1)["shampoo"] = {"L": [np.array([math.nan], np.float32)]}
    nested = ("layer.1", "shampoo['L'][0]", "shampoo['L'][0] of layer.1")
    assert look() == ("optimizer state", [nested])
    of(optimizer, 0)["exp_avg"][:] = math.inf
    exp_avg = ("layer.0", "exp_avg", "exp_avg of layer.0")
    assert look() == ("optimizer state", [exp_avg, nested])
    optimizer.weights[0][0] = math.nan
    name = "['mine']" if asked == "and params" else "layer.0"
    assert look() == ("weights", [(name, "", name), exp_avg, nested])
    # A part of it that no parameter has.
    optimizer.state |= {"all": np.array([math.nan], np.float32), object(): [np.float32(math.nan)]}
    assert look()[1][-2:] == [("all", "", "all"), ("object", "[0]", "object[0]")]


def test_an_optimizer_without_weights_and_one_of_others_are_searched_for_what_they_have():
    assert GradScaler().diagnose(Momentum(0), state=True).broken == ()
    # Parameters that are no arrays.
    report = GradScaler().diagnose(Grouped([np.ones(1, np.float32)]), state=[np.float32(math.nan)])
    assert [entry.place for entry in report.broken or ()] == ["state[0]"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": True}, r"got .*Tree.* of type Tree: pass params= and state=, the weights and the optimizer's state"),
        ({"state": True, "params": np.ones(1)}, "state=True searches .* a mapping named state"),
        ({"state": "exp_avg"}, "state must be arrays in nested containers, got 'exp_avg' of str"),
        ({"state": 1}, "state must be arrays in nested containers, got 1 of int"),
        ({"state": iter([1.0])}, "state must be arrays in nested containers, got <list_iterator"),
        ({"params": True}, "params must be arrays in nested containers, got True of bool"),
        ({"params": object()}, "params must be arrays in nested containers, got <object"),
    ],
    ids=["state=True", "and params", "text", "number", "iterator", "params=True", "object"],
)
def test_what_cannot_be_searched_is_refused_and_says_what_to_pass(given: dict[str, Any], said: str):
    scaler = GradScaler()
    with pytest.raises(InvalidTypeError, match=said):
        scaler.diagnose(Tree([np.ones(1, np.float32)]), **given)
    # The very same gradients are unscaled by themselves.
    assert iterate(Library("numpy", np), scaler, Tree()).reason == "stepped"


@pytest.mark.parametrize(
    "state", [None, "running", 3, {}, print, [math.nan]], ids=["none", "text", "number", "empty", "function", "list"]
)
def test_state_true_needs_weights_and_a_mapping(state):
    optimizer = Grouped([np.ones(1, np.float32)])
    optimizer.state = state  # type: ignore[attr-defined]
    with pytest.raises(InvalidTypeError, match="pass params= and state="):
        GradScaler().diagnose(optimizer, state=True)


def test_the_third_overflow_in_a_row_is_searched_by_itself_and_a_clean_step_begins_anew():
    optimizer, other = Momentum(), Momentum()
    scaler = GradScaler(diagnose="on_overflow")
    of(optimizer, 1)["exp_avg"][2] = math.nan

    def causes(steps: str) -> list[str | None]:
        found = []
        for step in steps:
            report = overflow(scaler, optimizer, math.inf if step == "o" else 1.0).overflow
            found.append(None if report is None else report.cause)
            # Another optimizer's overflows are its own.
            overflow(scaler, other, math.inf if step == "c" else 1.0)
        return found

    found = "scale", "scale", "optimizer state", "optimizer state", None, "scale", "scale", None, "scale", "scale"
    assert causes("oooocoocoo") == list(found)
    assert causes("o") == ["optimizer state"]
    row = row_of(scaler.last_step(optimizer))
    assert (row["parameter"], row["cause"]) == ("exp_avg of layer.1", "optimizer state")
    # Of a scaler that does not diagnose nothing is looked at.
    scaler = GradScaler()
    assert causes("ooo") == [None] * 3


def test_an_optimizer_that_cannot_be_searched_is_diagnosed_as_before(arrays: Library):
    class Odd(Tree):
        @property
        def state(self):
            raise RuntimeError

    for optimizer in (Tree(), Odd()):
        scaler = GradScaler(diagnose="on_overflow")
        for _ in range(4):
            report = iterate(arrays, scaler, optimizer, (math.inf,)).overflow
            assert (report.cause, report.broken) == ("scale", None)


def test_a_long_report_lists_the_worst_weights_and_counts_the_others():
    params = [np.full(30, math.nan if k % 2 else k, np.float32)[: k + 1] for k in range(30)]
    report = GradScaler().diagnose(Tree(np.ones(1, np.float32)), params=params, state=[np.full(99, math.inf)])
    assert report.broken is not None
    assert [entry.name for entry in report.broken[:2]] == ["[29]", "[27]"]
    assert [len(report.broken), report.broken[-1].place] == [16, "state[0]"]
    assert "... and 13 more" in report.table(3).splitlines()
    assert "... and" not in report.table()
    assert copy.deepcopy(report) == report
