"""scaler.diagnose: random ones are the model's; one read; what is refused; and what a scaler searches by itself."""

import math
from typing import Any

import diagnoses
import numpy as np
import pytest
from libraries import Library
from optimizers import Grouped, Momentum, Parameter, Tree, iterate, iterate_plainly, scaled
from tiers import examples

from gradscale import CallOrderError, GradScaler, InvalidTypeError, InvalidValueError
from gradscale.core.backend import Backend
from gradscale.tools.callbacks import row_of

LONG = True


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_random_diagnoses_of_any_optimizer_are_the_models_and_change_nothing(arrays: Library):
    for seed in range(examples({"numpy": 500, "torch": 500}.get(arrays.name, 25))):
        diagnoses.check([diagnoses.diagnosed(None, seed, arrays)])


SEARCHED = "must be arrays in nested containers, got"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"loss": [math.nan, "nan"]}, "loss must hold arrays and numbers, got 'nan' of type str"),
    "count": ({"names": ["a"]}, r"one for each of the optimizer's 3 parameters, got 1;"),
    "text": ({"names": "abc"}, r"a mapping or strings in the parameters' order, got 'abc'"),
    "set": ({"names": {"a", "b", "c"}}, r"a mapping or strings in the parameters' order, got \{"),
    "string and number": ({"names": ["a", 3, "c"]}, r"got 3 among them"),
    "number": ({"names": 3}, r"got 3; pass names=model\.named_parameters\(\)"),
    "others": ({"names": [("a", Parameter())]}, r"got 1 names, and none for .*\[0\]\['params'\]\[0\], .*\[1\];"),
    "no parameter": ({"names": {"a": 3.0}}, r"a string and a parameter with \.grad, got \('a', 3\.0\)"),
    "state=True": ({"state": True}, r"got .*Grouped.*: pass params= and state=, the weights and the optimizer's state"),
    "and params": ({"state": True, "params": np.ones(1)}, "state=True searches .* a mapping named state"),
    "state": ({"state": "exp_avg"}, f"state {SEARCHED} 'exp_avg' of str"),
    "iterator": ({"state": iter([1.0])}, f"state {SEARCHED} <list_iterator"),
    "params=True": ({"params": True}, f"params {SEARCHED} True of bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_and_nothing_is_touched(arrays: Library, name: str):
    given, said = REFUSED[name]
    scaler, optimizer = GradScaler(), Grouped([arrays.asarray([1.0])], [arrays.asarray([2.0]), None])
    with pytest.raises(InvalidValueError if "names" in given else InvalidTypeError, match=said):
        scaler.diagnose(optimizer, **given)
    with pytest.raises(CallOrderError, match="nothing was scaled"):
        scaler.update()


def test_what_has_no_gradients_of_one_library_is_refused(strict: Library):
    without_weights = Grouped([np.ones(1, np.float32)])
    without_weights.state = {}  # type: ignore[attr-defined]
    for optimizer, message in (
        (object(), "must have param_groups"),
        (Tree([1.5]), "must be an array"),
        (Tree(np.array(["x"])), "floating array"),
        (Tree([np.ones(1), strict.asarray([1.0])]), "of one library"),
        (without_weights, "pass params= and state="),
    ):
        with pytest.raises(InvalidTypeError, match=message):
            GradScaler().diagnose(optimizer, state=optimizer is without_weights)  # type: ignore[arg-type]


def test_a_limit_of_rows_that_is_no_whole_number_is_refused():
    for wrong, error in ((-1, InvalidValueError), (1.5, InvalidTypeError)):
        with pytest.raises(error, match="limit must be"):
            GradScaler().diagnose(Tree([])).table(wrong)  # type: ignore[arg-type]


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
    loss = [arrays.asarray(1.0), arrays.asarray(2.0)]
    report = scaler.diagnose(optimizer, loss=loss, params=[arrays.asarray([[1.0]])], state=state)
    assert (report.cause, len(reads)) == ("optimizer state", 1)


def test_iterators_in_a_state_are_left_to_their_owner(arrays: Library):
    iterator = iter([1])
    scaler = GradScaler()
    scaler.diagnose(Tree(scaled(arrays, scaler, 1.0)), state={"data": iterator, object(): {"more": [iterator]}})
    assert list(iterator) == [1]


def test_the_overflows_in_a_row_of_each_optimizer_are_counted_by_themselves():
    optimizer, other, scaler = Momentum(), Momentum(), GradScaler(diagnose="on_overflow")
    optimizer.of(1)["exp_avg"][2] = math.nan
    causes = []
    for _ in range(3):
        report = iterate_plainly(scaler, optimizer, math.inf)
        causes.append(report.overflow.cause)
        iterate_plainly(scaler, other)
    assert causes == ["scale", "scale", "optimizer state"]
    assert (row_of(report)["parameter"], row_of(report)["cause"]) == ("exp_avg of layer.1", "optimizer state")


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
