"""scaler.diagnose: random ones are the model's; one read; what is refused; and what a scaler searches by itself."""

import dataclasses
import math
from typing import Any

import diagnoses
import numpy as np
import pytest
from axes import require
from libraries import Library
from optimizers import Grouped, Momentum, Parameter, Tree, iterate, iterate_plainly, scaled
from tiers import examples

import gradscale
from gradscale import CallOrderError, GradScaler, InvalidTypeError, InvalidValueError
from gradscale.core import summaries
from gradscale.core.backend import Backend
from gradscale.tools.callbacks import row_of

LONG = True


@pytest.mark.filterwarnings("ignore:gradients of .* are divided by the scale in .*float16:UserWarning")
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_random_diagnoses_of_any_optimizer_are_the_models_and_change_nothing(arrays: Library):
    for seed in range(examples({"numpy": 500, "torch": 500}.get(arrays.name, 25))):
        diagnoses.check([diagnoses.diagnosed(None, seed, arrays)])


def told(name: str, *rank: int, **fields) -> gradscale.ParameterReport:
    return gradscale.ParameterReport(name, rank, **{"dtype": "float32", "shape": (2, 3), "size": 6} | fields)


WEIGHT = told("head.weight", 1, 0, inf=3, zeros=3, largest=0.0, kind="weight")
LISTED = (
    told("head.weight", 1, 0, inf=1, nan=2, zeros=1, largest=65504.0),
    told("long." * 10, 0, 0, shape=(2,), nan=2),
    told("two\nlines", 0, 1, shape=(), size=1, subnormals=1, largest=0.25),
    gradscale.ParameterReport("frozen", (0, 0), missing=True),
    told("rest", 0, 0),
)
BROKEN = (WEIGHT, dataclasses.replace(WEIGHT, kind="state", key="exp_avg"), told("state", 0, 0, nan=1, key="['m'][0]"))
TABLE = """\
6 of 11 gradients with inf or NaN, iteration 7, scale 1024
cause: weights. Weights hold NaN.

weights and optimizer state with inf or NaN
parameter               rank  shape  dtype    inf  nan  largest   zeros  subnormal
head.weight             1/0   2x3    float32    3    0        0  50.0 %      0.0 %
exp_avg of head.weight  1/0   2x3    float32    3    0        0  50.0 %      0.0 %
state['m'][0]           0/0   2x3    float32    0    1     none   0.0 %      0.0 %
... and 3 more

parameter                                         rank  shape        dtype    inf  nan   largest   zeros  subnormal
head.weight                                       1/0   2x3          float32    1    2  6.55e+04  16.7 %      0.0 %
...long.long.long.long.long.long.long.long.long.  0/0   2            float32    0    2      none   0.0 %      0.0 %
two\\nlines                                        0/1   0-d          float32    0    0      0.25   0.0 %    100.0 %
frozen                                            0/0   no gradient
... and 4 more with inf or NaN and 3 more finite parameters"""


def test_a_report_is_a_table_of_so_many_rows_and_plain_values():
    report = gradscale.OverflowReport(LISTED, 1024.0, 7, "weights", "Weights hold NaN.", 4, 2, None, BROKEN, 3)
    assert report.table(4) == TABLE
    assert report.table(1).endswith("... and 5 more with inf or NaN and 5 more finite parameters")
    alone = gradscale.OverflowReport((told("w", largest=2.0),), 1.0, 1, "none", "Fine.")
    assert str(alone).splitlines()[::4] == [
        "0 of 1 gradients with inf or NaN, iteration 1",
        "w          2x3    float32    0    0        2  0.0 %      0.0 %",
    ]
    assert alone.table(0).endswith("... and 1 more finite parameter")
    plain = report.to_dict()
    assert (plain["cause"], plain["broken"]) == ("weights", [one.to_dict() for one in BROKEN])
    worst = [plain["entries"][0][name] for name in ("name", "inf", "rank", "shape", "zero_fraction")]
    assert worst == ["head.weight", 1, [1, 0], [2, 3], 1 / 6]
    for wrong, error in ((-1, InvalidValueError), (1.5, InvalidTypeError)):
        with pytest.raises(error, match="limit must be"):
            report.table(wrong)  # type: ignore[arg-type]


SEARCHED = "must be arrays in nested containers, got"
# A tree to be diagnosed, or what is told of an optimizer of three parameters.
REFUSED: dict[str, tuple[Any, str]] = {
    "no optimizer": (object(), "must have param_groups"),
    "a number among gradients": (Tree([1.5]), "must be an array"),
    "loss": ({"loss": [math.nan, "nan"]}, "loss must hold arrays and numbers, got 'nan' of type str"),
    "count": ({"names": ["a"]}, r"one for each of the optimizer's 3 parameters, got 1;"),
    "set": ({"names": {"a", "b", "c"}}, r"a mapping or strings in the parameters' order, got \{"),
    "others": ({"names": [("a", Parameter())]}, r"got 1 names, and none for .*\[0\]\['params'\]\[0\], .*\[1\];"),
    "no parameter": ({"names": {"a": 3.0}}, r"a string and a parameter with \.grad, got \('a', 3\.0\)"),
    "state=True": ({"state": True}, r"got .*Grouped.*: pass params= and state=, the weights and the optimizer's state"),
    "and params": ({"state": True, "params": np.ones(1)}, "state=True searches .* a mapping named state"),
    "iterator": ({"state": iter([1.0])}, f"state {SEARCHED} <list_iterator"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused_and_nothing_is_touched(arrays: Library, name: str):
    given, said = REFUSED[name]
    scaler, optimizer = GradScaler(), Grouped([arrays.asarray([1.0])], [arrays.asarray([2.0]), None])
    optimizer, given = (optimizer, given) if isinstance(given, dict) else (given, {})
    with pytest.raises(InvalidValueError if "names" in given else InvalidTypeError, match=said):
        scaler.diagnose(optimizer, **given)
    with pytest.raises(CallOrderError, match="nothing was scaled"):
        scaler.update()


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


def test_the_history_keeps_the_worst_rows_of_a_table_and_the_last_step_all():
    optimizer, scaler = Tree(), GradScaler(diagnose="on_overflow")
    for _ in range(3):
        scaler.scale(np.float32(1.0))
        optimizer.grads = [np.float32([value]) for value in (*[1.0] * 4, 400.0, *[math.nan] * 25)]
        scaler.step(optimizer)
        scaler.update()
    whole, kept = scaler.last_step(optimizer).overflow, scaler.history[-1].overflow
    largest = next(entry for entry in whole.entries if entry.largest)
    assert (len(whole.entries), kept.entries) == (30, (*whole.entries[:19], largest))
    assert (kept.omitted_nonfinite, kept.omitted_finite) == (6, 4)
    assert row_of(scaler.history[-1])["magnitude"] == row_of(scaler.last_step(optimizer))["magnitude"] > 0


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


# What is counted.


def test_counts_beyond_one_word_do_not_wrap(monkeypatch: pytest.MonkeyPatch, arrays: Library):
    monkeypatch.setattr(summaries, "_PIECE", 8)
    x = arrays.asarray([0.0] * 70 + [math.nan] * 9 + [math.inf] * 8)
    assert Backend().read_summaries([x])[0] == [summaries.Summary(87, 8, 9, 70, 0, 0.0)]


NARROW = ["bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"]
NARROW += [f"float8_{kind}" for kind in ("e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]


@pytest.mark.parametrize("kind", NARROW)
def test_the_smallest_normal_numbers_of_narrow_types_are_those_of_ml_dtypes(kind: str):
    import array_api_compat.numpy as xp

    ml_dtypes = require("ml_dtypes")
    if not hasattr(ml_dtypes, kind):
        pytest.skip(f"this ml_dtypes has no {kind}")
    dtype = np.dtype(getattr(ml_dtypes, kind))
    assert summaries.smallest_normal(dtype, xp) == float(ml_dtypes.finfo(dtype).smallest_normal)


# Where it begins.


def begun(*values: float) -> str:
    """Return what is said of gradients of layers with these values, of which the last is next to the loss."""
    optimizer = Tree({f"layer{index}": np.float32([value]) for index, value in enumerate(values)})
    return gradscale.StepGuard().diagnose(optimizer).explanation.partition(" It begins at ")[2]


def test_it_begins_at_the_last_parameter_that_is_not_finite():
    there = "from the loss down to there"
    assert (
        begun(math.nan, math.nan, 1.0, 2.0) == f"['layer1']: {there}, ['layer2'] to ['layer3'], gradients are finite."
    )
    assert begun(math.nan, 1.0, math.inf, 2.0) == f"['layer2']: {there}, ['layer3'], gradients are finite."
    # All are bad down from the loss, or none is.
    assert begun(1.0, math.nan) == begun(math.nan) == begun(1.0, 2.0) == ""
    # Of a bad loss whose gradients are finite nothing begins.
    report = gradscale.StepGuard().diagnose(Tree([np.float32([1.0]), np.float32([2.0])]), loss=math.nan)
    assert (report.cause, "begins" in report.explanation) == ("model", False)
    # An overflow of the scale has no beginning.
    optimizer, scaler = Tree({"a": np.float32([np.inf]), "b": np.float32([1.0])}), gradscale.GradScaler()
    optimizer.grads = scaler.scale(optimizer.grads)
    report = scaler.diagnose(optimizer)
    assert (report.cause, "begins" in report.explanation) == ("scale", False)
