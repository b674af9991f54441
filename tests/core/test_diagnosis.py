"""scaler.diagnose: which parameter, in true units, under which name, why; and that it changes nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from libraries import Library
from optimizers import Grouped, Parameter, Tree, scaled

from gradscale import CallOrderError, DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, StaticScale
from gradscale.scaler.overflow import ParameterReport, find_cause

LONG = True

SCALE = 1024.0


def make(arrays: Library, *values: float, **options) -> tuple[GradScaler, Tree]:
    """Return a scaler and an optimizer whose gradients are these values, scaled."""
    scaler = GradScaler(init_scale=SCALE, **options)
    return scaler, Tree(scaled(arrays, scaler, *values))


def test_magnitudes_are_in_true_units_at_every_stage(arrays: Library):
    scaler, optimizer = make(arrays, 0.5, -3.0)
    stages = [lambda: None, lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer), scaler.update]
    for enter in stages:
        enter()
        report = scaler.diagnose(optimizer)
        assert [(entry.name, entry.largest, entry.size) for entry in report.entries] == [("[1]", 3, 1), ("[0]", 0.5, 1)]
        assert (report.scale, report.iteration, report.cause) == (SCALE, 1, "none")
        assert report.nonfinite == ()


@pytest.mark.parametrize("values", [(1.0, 2.0), (1.0, math.nan)], ids=["clean", "overflow"])
def test_nothing_is_changed_and_training_goes_on_identically(arrays: Library, values: tuple[float, ...]):
    def train(looks: bool):
        scaler, optimizer = make(arrays, *values)
        taken: list[list[bytes]] = []

        def look():
            if looks:
                before, history = [id(grad) for grad in optimizer.grads], scaler.history
                for options in ({}, {"loss": arrays.asarray(math.nan)}, {"gather": True}):
                    scaler.diagnose(optimizer, **options)
                    scaler.diagnose(Tree([arrays.asarray([1.0])]), **options)
                assert ([id(grad) for grad in optimizer.grads], scaler.history) == (before, history)
            taken.append([arrays.to_numpy(grad).tobytes() for grad in optimizer.grads])

        for _ in range(2):
            look()
            scaler.unscale_(optimizer)
            look()
            scaler.step(optimizer)
            look()
            scaler.update()
            look()
            optimizer.grads = scaled(arrays, scaler, *values)
        return taken, optimizer.steps, scaler.state_dict(), scaler.history

    assert train(True) == train(False)


def test_gradients_of_both_protocols_that_are_missing_or_integers(arrays: Library):
    scaler = GradScaler()
    gradients = [arrays.asarray([1.0]), None, arrays.asarray([3], "int32"), arrays.asarray([math.nan])]
    tree = scaler.diagnose(Tree({"w": gradients, "n": 4}))
    assert [entry.name for entry in tree.entries] == ["['w'][3]", "['w'][0]", "['w'][1]"]
    grouped = scaler.diagnose(Grouped(gradients[:2], gradients[2:]))
    names = [f"param_groups[{group}]['params'][{place}]" for group, place in ((1, 1), (0, 0), (0, 1))]
    assert [entry.name for entry in grouped.entries] == names
    assert [entry.missing for entry in grouped.entries] == [False, False, True]


def test_before_any_scale_without_gradients_and_disabled(arrays: Library):
    report = GradScaler(init_scale=8.0).diagnose(Tree([]))
    assert (report.entries, report.scale, report.cause) == ((), 8.0, "no gradients")
    report = GradScaler().diagnose(Tree([None, None]))
    assert (len(report.entries), report.cause) == (2, "no gradients")
    assert "None of the parameters has a gradient: they were zeroed after backward()" in str(report)
    plain = GradScaler(init_scale=8.0).diagnose(Tree([arrays.asarray([4.0])]))
    assert plain.entries[0].largest == 4.0
    report = GradScaler(enabled=False).diagnose(Tree([arrays.asarray([math.inf, 4.0])]), gather=True)
    assert (report.scale, report.entries[0].largest, report.entries[0].inf) == (1.0, 4.0, 1)
    assert report.cause == "model"


CAUSES: dict[str, tuple[Any, str]] = {
    "high": (DynamicScale(init_scale=SCALE), "scale"),
    "minimum": (DynamicScale(init_scale=SCALE, min_scale=SCALE), "model"),
    "one": (DynamicScale(init_scale=1.0), "model"),
    "below one": (DynamicScale(init_scale=0.5), "model"),
    "static": (StaticScale(SCALE), "scale"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_scale_is_told_from_the_model(arrays: Library, name: str):
    policy, cause = CAUSES[name]
    scaler = GradScaler(policy=policy)
    optimizer = Tree(scaled(arrays, scaler, math.nan))
    for loss in (None, 1.5):
        report = scaler.diagnose(optimizer, loss=loss)
        assert (report.cause, report.loss_nonfinite) == (cause, None if loss is None else 0)
    assert ("the unscaled loss is finite" in report.explanation) is (cause == "scale")


@pytest.mark.parametrize(
    ("loss", "lost"),
    [(math.inf, 1), (complex("nan"), 1), (1 + 2j, 0), (10**400, 0), ({"a": [-math.inf, 3], "b": None}, 1)],
    ids=["inf", "complex", "finite complex", "long", "nested"],
)
def test_a_loss_that_is_not_finite_is_the_models_fault_whatever_the_gradients(arrays: Library, loss, lost: int):
    scaler, optimizer = make(arrays, 1.0)
    given = [loss]
    if isinstance(loss, float):
        given += [arrays.asarray(loss), {"a": [arrays.asarray([loss], "float64")]}]
    for one in given:
        report = scaler.diagnose(optimizer, loss=one)
        assert (report.loss_nonfinite, report.cause) == (lost, "model" if lost else "none")
    with pytest.raises(InvalidTypeError, match=r"loss must hold arrays and numbers, got 'nan' of type str"):
        scaler.diagnose(optimizer, loss=[loss, "nan"])


def entry(**fields) -> ParameterReport:
    return ParameterReport(**({"name": "w", "size": 1000, "largest": 1.0} | fields))


@pytest.mark.parametrize(
    ("zeros", "subnormals", "is_scaled", "cause", "advice"),
    [
        (0, 100, True, "underflow", "raise the scale"),
        (0, 99, True, "none", "finite"),
        (900, 10, True, "underflow", "raise the scale"),
        (900, 9, True, "none", "finite"),
        (990, 0, True, "underflow", "raise the scale"),
        (989, 0, True, "none", "finite"),
        (0, 100, False, "underflow", "float32 gradients"),
        (1000, 0, False, "underflow", "raise the scale"),
    ],
)
def test_underflow_needs_many_subnormals_or_nearly_nothing_but_zeros(
    zeros: int, subnormals: int, is_scaled: bool, cause: str, advice: str
):
    entries = [entry(zeros=zeros, subnormals=subnormals)]
    found, sentence = find_cause(entries, SCALE, 1.0, None, is_scaled=is_scaled)
    assert found == cause
    assert advice in sentence


def test_float16_gradients_that_are_too_small_are_said_to_underflow():
    scaler = GradScaler(init_scale=2.0)
    scaler.scale(np.float32(1.0))
    report = scaler.diagnose(Tree([np.array([2.0**-20, 2.0**-16, 1.0, 0.0], np.float16)]))
    (small,) = report.entries
    assert (report.cause, small.subnormal_fraction, small.zero_fraction) == ("underflow", 0.5, 0.25)


def named_optimizer(arrays: Library) -> Grouped:
    return Grouped([arrays.asarray([1.0])], [arrays.asarray([2.0]), None])


@pytest.mark.parametrize("kind", ["pairs", "iterator", "mapping", "strings", "with others", "the optimizer's own"])
def test_names_come_from_the_user_or_the_optimizer(arrays: Library, kind: str):
    optimizer = named_optimizer(arrays)
    pairs = list(zip(("a", "b", "c"), optimizer.parameters, strict=True))
    names = {
        "pairs": pairs,
        "iterator": iter(pairs),
        "mapping": dict(reversed(pairs)),
        "strings": ("a", "b", "c"),
        "with others": [("frozen", Parameter()), *reversed(pairs)],
        "the optimizer's own": None,
    }[kind]
    if names is None:
        for group, own in zip(optimizer.param_groups, (["a"], ["b", "c"]), strict=True):
            group["param_names"] = own
    report = GradScaler().diagnose(optimizer, names)
    assert [entry.name for entry in report.entries] == ["b", "a", "c"]


def test_names_of_other_parameters_are_not_the_optimizers(arrays: Library):
    optimizer = named_optimizer(arrays)
    optimizer.param_groups[1]["param_names"] = ["b"]
    assert GradScaler().diagnose(optimizer).entries[0].name == "param_groups[1]['params'][0]"


REFUSED: dict[str, tuple[Any, str]] = {
    "count": (["a"], r"one for each of the optimizer's 3 parameters, got 1;"),
    "text": ("abc", r"a mapping or strings in the parameters' order, got 'abc'"),
    "string and number": (["a", 3, "c"], r"got 3 among them"),
    "number": (3, r"got 3; pass names=model\.named_parameters\(\)"),
    "others": ([("a", Parameter())], r"got 1 names, and none for param_groups\[0\]\['params'\]\[0\], .*\[1\];"),
    "no parameter": ({"a": 3.0}, r"a string and a parameter with \.grad, got \('a', 3\.0\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_do_not_match_are_refused_and_nothing_is_touched(arrays: Library, name: str):
    names, message = REFUSED[name]
    scaler = GradScaler()
    with pytest.raises(InvalidValueError, match=message):
        scaler.diagnose(named_optimizer(arrays), names)
    with pytest.raises(CallOrderError, match="nothing was scaled"):
        scaler.update()


def test_what_has_no_gradients_of_one_library_is_refused(strict: Library):
    for optimizer, message in (
        (object(), "must have param_groups"),
        (Tree([1.5]), "must be an array"),
        (Tree(np.array(["x"])), "floating array"),
        (Tree([np.ones(1), strict.asarray([1.0])]), "of one library"),
    ):
        with pytest.raises(InvalidTypeError, match=message):
            GradScaler().diagnose(optimizer)  # type: ignore[arg-type]


def test_a_skipped_step_is_diagnosed_after_the_update_and_the_table_begins_with_the_worst(arrays: Library):
    scaler, optimizer = make(arrays, 1.0, math.inf, 2.0)
    optimizer.grads.append(None)
    scaler.step(optimizer)
    scaler.update()
    report = scaler.diagnose(optimizer, ["layers.0.weight", "layers.1.weight", "bias", "unused"])
    assert [entry.name for entry in report.nonfinite] == ["layers.1.weight"]
    worst = report.entries[0]
    assert (worst.inf, worst.nan, worst.largest, worst.nonfinite) == (1, 0, None, 1)
    assert (report.scale, report.iteration, report.cause) == (SCALE, 1, "scale")
    head, cause, empty, *table = str(report).splitlines()
    assert head == "1 of 4 gradients with inf or NaN, iteration 1, scale 1024"
    assert cause.startswith("cause: scale. layers.1.weight overflows at scale 1024: the step is to be")
    assert not empty
    assert [line.split()[0] for line in table] == ["parameter", "layers.1.weight", "bias", "layers.0.weight", "unused"]
    assert len({len(line) for line in table[:-1]}) == 1
    assert table[1].split()[1:] == ["1", "float32", "1", "0", "none", "0.0", "%", "0.0", "%"]
    # Through JSON it goes with finite numbers alone.
    logged = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert logged == report.to_dict()
    assert (logged["cause"], logged["entries"][0]["inf"], logged["entries"][0]["largest"]) == ("scale", 1, None)
    assert logged["entries"][-1]["missing"] is True


def test_a_table_has_as_many_rows_as_are_asked_for_and_counts_the_others():
    optimizer = Tree([np.full(3, np.nan if k < 3 else k, np.float32) for k in range(300)])
    report = GradScaler().diagnose(optimizer)
    lines = report.table(10).splitlines()
    assert len(lines) == 3 + 1 + 10 + 1
    assert lines[-1] == "... and 290 more finite parameters"
    assert report.table(2).splitlines()[-1] == "... and 1 more with inf or NaN and 297 more finite parameters"
    assert report.table(299).splitlines()[-1] == "... and 1 more finite parameter"
    assert "..." not in report.table(300)
    assert len(str(report).splitlines()) == 3 + 1 + 20 + 1
    for wrong, error in ((-1, InvalidValueError), (1.5, InvalidTypeError)):
        with pytest.raises(error, match="limit must be"):
            report.table(wrong)  # type: ignore[arg-type]


def test_long_names_names_of_lines_and_missing_gradients_fit_the_table():
    report = GradScaler().diagnose(Tree([None, np.ones((2, 3), np.float32)]), ["x" * 80, "a\nb"])
    *_, matrix, missing = str(report).splitlines()
    assert missing == f"...{'x' * 45}  no gradient"
    assert matrix.startswith("a b ")
    assert "2x3" in matrix


def test_a_scaler_that_diagnoses_on_overflow_keeps_the_report_of_a_skipped_step(arrays: Library):
    scaler, optimizer = make(arrays, 1.0, math.inf, diagnose="on_overflow")
    scaler.step(optimizer)
    report = scaler.last_step(optimizer)
    assert report.overflow is not None
    assert [one.name for one in report.overflow.nonfinite] == ["[1]"]
    assert (report.overflow.scale, report.overflow.cause, report.overflow.loss_nonfinite) == (SCALE, "scale", 0)
    scaler.update()
    optimizer.grads = scaled(arrays, scaler, 1.0)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).overflow is None


def test_an_iteration_that_failed_can_be_diagnosed(arrays: Library):
    scaler, optimizer = make(arrays, 1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError):
        scaler.unscale_(optimizer)
    assert scaler.diagnose(optimizer).entries[0].largest == 1.0
