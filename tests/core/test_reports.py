"""history, on_skip and on_update: what a scaler tells of its steps, when, and that telling changes nothing."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import pytest
from libraries import Library
from optimizers import Tree, iterate, scaled

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ScaleUnderflowError, UpdateReport
from gradscale.scaler.reports import Reports

RUN = [1.0, math.inf, 2.0, math.nan, 3.0]


def test_the_history_holds_the_report_of_every_step_oldest_first(arrays: Library):
    scaler, short, none = GradScaler(), GradScaler(history_size=2), GradScaler(history_size=0)
    optimizer = Tree()
    reports = []
    for value in RUN:
        for each in (short, none, scaler):
            iterate(arrays, each, optimizer, [value])
        reports.append(scaler.last_step(optimizer))
    # What is returned is a copy.
    scaler.history.clear()
    assert (scaler.history, short.history, none.history) == (reports, reports[-2:], [])
    assert [report.iteration for report in reports] == [1, 2, 3, 4, 5]
    assert [report.skipped for report in reports] == [False, True, False, True, False]
    assert [report.scale for report in reports] == [65536.0, 65536.0, 32768.0, 32768.0, 16384.0]


def test_each_on_skip_is_called_in_each_skipped_step_and_no_other_until_it_is_taken_away(arrays: Library):
    first, second = [], []
    scaler = GradScaler(on_skip=[lambda report: first.append((report, optimizer.steps)), second.append])
    optimizer = Tree()
    for value in RUN:
        iterate(arrays, scaler, optimizer, [value])
    assert [(report.iteration, report.scale, steps) for report, steps in first] == [(2, 65536.0, 1), (4, 32768.0, 2)]
    assert all(report.skipped and report.reason == "overflow" and report.nonfinite == 1 for report, _ in first)
    assert second == [report for report, _ in first]
    scaler.on_skip = None
    iterate(arrays, scaler, optimizer, [math.inf])
    assert len(second) == 2


def test_on_update_is_called_once_an_iteration_with_the_steps_of_all_optimizers(arrays: Library):
    seen: list[UpdateReport] = []
    scaler = GradScaler(on_update=seen.append)
    first, second = Tree(), Tree()
    for value in (1.0, math.inf):
        first.grads = scaled(arrays, scaler, 1.0)
        second.grads = scaled(arrays, scaler, value)
        scaler.step(first)
        scaler.step(second)
        assert len(seen) == (value == math.inf)
        scaler.update()
    assert [(report.iteration, report.scale, report.skipped, report.rank) for report in seen] == [
        (1, 65536.0, False, 0),
        (2, 65536.0, True, 0),
    ]
    assert seen[1].steps == (scaler.last_step(first), scaler.last_step(second))
    assert [step.skipped for step in seen[1].steps] == [False, True]


def test_an_update_after_unscale_without_a_step_is_told_with_its_verdict(strict: Library):
    seen: list[UpdateReport] = []
    scaler, optimizer = GradScaler(on_update=seen.append), Tree()
    optimizer.grads = scaled(strict, scaler, math.inf)
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(strict.asarray(1.0))
    scaler.update(32768.0)
    assert [(report.skipped, report.steps) for report in seen] == [(True, ()), (False, ())]
    assert [report.scale for report in seen] == [65536.0, 32768.0]


POLICIES = [
    DynamicScale(growth_interval=2, init_scale=3.0, backoff_factor=0.3, growth_factor=1.7),
    DynamicScale(hysteresis=2, growth_interval=1, max_scale=2.0**18),
]


@pytest.mark.parametrize("policy", POLICIES, ids=["odd factors", "hysteresis"])
def test_on_update_says_what_the_update_has_made_of_the_scale(arrays: Library, policy: DynamicScale):
    seen: list[UpdateReport] = []
    scaler, optimizer = GradScaler(policy=policy, on_update=seen.append), Tree()
    scales = []
    for value in (*RUN, *RUN):
        before = scaler.get_scale()
        iterate(arrays, scaler, optimizer, [value])
        scales.append((before, scaler.get_scale()))
    assert len(set(scales)) > 3
    scaler.scale(arrays.asarray(1.0))
    scaler.update(7.0)
    scales += [(scales[-1][1], 7.0)]
    # A state that is loaded after scale() is what the update begins with.
    optimizer.grads = scaled(arrays, scaler, math.inf)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    scaler.step(optimizer)
    scaler.update()
    scales += [(7.0, scaler.get_scale())]
    assert [(report.scale, report.new_scale) for report in seen] == scales


def test_a_callback_that_raises_is_seen_and_leaves_the_scaler_as_if_it_had_not(strict: Library):
    def fail(report):
        msg = f"no space left, {type(report).__name__}"
        raise OSError(msg)

    plain, failing = GradScaler(), GradScaler(on_skip=fail, on_update=fail)
    optimizer = Tree()
    for value in RUN:
        iterate(strict, plain, Tree(), [value])
        optimizer.grads = scaled(strict, failing, value)
        told = contextlib.nullcontext() if math.isfinite(value) else pytest.raises(OSError, match="left, StepReport")
        with told:
            failing.step(optimizer)
        with pytest.raises(OSError, match="no space left, UpdateReport"):
            failing.update()
    assert optimizer.steps == 3
    assert failing.state_dict() == plain.state_dict()
    assert failing.history == plain.history


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_callback_that_raises_does_not_hide_the_scale_at_its_minimum(strict: Library, error: BaseException):
    def fail(_):
        raise error

    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    scaler = GradScaler(policy=policy, on_update=fail)
    with pytest.raises(ScaleUnderflowError if isinstance(error, Exception) else KeyboardInterrupt) as caught:
        iterate(strict, scaler, Tree(), [math.inf])
    if isinstance(error, Exception):
        assert (caught.value.__context__, caught.value.__suppress_context__) == (error, False)
        assert caught.value.__notes__ == ["A callback of on_update has failed, too: OSError('no space left')"]
    assert scaler.state_dict()["iteration"] == 2


def test_copies_and_pickles_come_without_callbacks_and_history(strict: Library):
    scaler, optimizer = GradScaler(on_skip=print, on_update=print, history_size=3), Tree()
    for value in RUN:
        iterate(strict, scaler, optimizer, [value])
    for other in (copy.deepcopy(scaler), copy.copy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert (other.on_skip, other.on_update, other.history) == (None, None, [])
        for value in RUN:
            iterate(strict, other, Tree(), [value])
        assert len(other.history) == 3
    assert scaler.on_skip is not None


def test_whoever_wants_reports_has_each_step_read_in_that_step():
    for options in ({"on_skip": print}, {"on_update": print}, {"diagnose": "on_overflow"}):
        assert Reports(options).wants_each_step  # type: ignore[arg-type]
    assert not Reports({}).wants_each_step


@pytest.mark.parametrize("name", ["on_skip", "on_update"])
def test_what_cannot_be_called_is_refused(name: str):
    scaler = GradScaler()
    for bad in ("print", 3, [print, None], {"a": print}):
        with pytest.raises(InvalidTypeError, match=name):
            GradScaler(**{name: bad})
        with pytest.raises(InvalidTypeError, match=name):
            setattr(scaler, name, bad)
    assert getattr(scaler, name) is None


@pytest.mark.parametrize(("name", "bad"), [("history_size", -1), ("diagnose", "always"), ("diagnose", True)])
def test_bad_settings_are_refused(name: str, bad):
    with pytest.raises(InvalidValueError, match=name):
        GradScaler(**{name: bad})
