"""history, on_skip and on_update: what a scaler tells of its steps, when, and that telling changes nothing."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
from axes import require
from libraries import Library, opened
from optimizers import Tree, iterate, scaled

from gradscale import (
    DynamicScale,
    GradScaler,
    InvalidTypeError,
    InvalidValueError,
    ScaleUnderflowError,
    StepReport,
    UpdateReport,
)
from gradscale.core.backend import Backend

RUN = [1.0, math.inf, 2.0, math.nan, 3.0]


def test_the_history_holds_the_report_of_every_step_oldest_first(arrays: Library) -> None:
    scaler, optimizer = GradScaler(), Tree()
    reports = []
    for value in RUN:
        iterate(arrays, scaler, optimizer, [value])
        reports.append(scaler.last_step(optimizer))
    assert scaler.history == reports
    assert [report.iteration for report in reports] == [1, 2, 3, 4, 5]
    assert [report.skipped for report in reports] == [False, True, False, True, False]
    assert [report.scale for report in reports] == [65536.0, 65536.0, 32768.0, 32768.0, 16384.0]


def test_the_history_keeps_the_last_steps_only(strict: Library) -> None:
    scaler, optimizer = GradScaler(history_size=2), Tree()
    for value in RUN:
        iterate(strict, scaler, optimizer, [value])
    assert [report.iteration for report in scaler.history] == [4, 5]
    none = GradScaler(history_size=0)
    iterate(strict, none, optimizer)
    assert none.history == []
    assert none.last_step(optimizer).reason == "stepped"


def test_changing_the_returned_history_changes_nothing(strict: Library) -> None:
    scaler, optimizer = GradScaler(), Tree()
    iterate(strict, scaler, optimizer)
    scaler.history.clear()
    assert len(scaler.history) == 1


def test_on_skip_is_called_in_each_skipped_step_and_no_other(arrays: Library) -> None:
    seen: list[tuple[StepReport, int]] = []
    scaler = GradScaler(on_skip=lambda report: seen.append((report, optimizer.steps)))
    optimizer = Tree()
    for value in RUN:
        iterate(arrays, scaler, optimizer, [value])
    assert [(report.iteration, report.scale, steps) for report, steps in seen] == [(2, 65536.0, 1), (4, 32768.0, 2)]
    assert all(report.skipped and report.reason == "overflow" and report.nonfinite == 1 for report, _ in seen)


def test_on_update_is_called_once_an_iteration_with_the_steps_of_all_optimizers(arrays: Library) -> None:
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


def test_an_update_after_unscale_without_a_step_is_told_with_its_verdict(strict: Library) -> None:
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
def test_on_update_says_what_the_update_has_made_of_the_scale(arrays: Library, policy: DynamicScale) -> None:
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
    assert [(report.scale, report.new_scale) for report in seen] == scales


def test_on_update_says_what_closures_have_made_of_the_scale(strict: Library) -> None:
    seen: list[UpdateReport] = []
    scaler = GradScaler(on_update=seen.append)

    class Evaluating(Tree):
        def step(self, closure: Any) -> None:
            closure()

    optimizer, values = Evaluating(), iter([math.inf, math.inf, 1.0])

    def closure() -> None:
        optimizer.grads = scaled(strict, scaler, next(values))

    scaler.step(optimizer, closure)
    scaler.update()
    assert [(report.scale, report.new_scale) for report in seen] == [(16384.0, 16384.0)]
    assert scaler.get_scale() == 16384.0


def test_callbacks_and_history_cost_no_host_read_of_their_own(strict: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read = Backend.read
    monkeypatch.setattr(Backend, "read", lambda self, x: reads.append(x) or read(self, x))
    scaler = GradScaler(on_skip=print, on_update=print)
    optimizer = Tree()
    for value in RUN:
        iterate(strict, scaler, optimizer, [value])
    assert len(scaler.history) == len(reads) == len(RUN)


def test_several_callbacks_are_called_in_order(strict: Library) -> None:
    calls: list[str] = []
    scaler = GradScaler(on_skip=[lambda _: calls.append("a"), lambda _: calls.append("b")])
    iterate(strict, scaler, Tree(), [math.inf])
    assert calls == ["a", "b"]


def test_a_callback_that_raises_is_seen_and_leaves_the_scaler_as_if_it_had_not(strict: Library) -> None:
    def fail(report: Any) -> None:
        msg = f"no space left, {type(report).__name__}"
        raise OSError(msg)

    plain, failing = GradScaler(), GradScaler(on_skip=fail, on_update=fail)
    for scaler in (plain, failing):
        optimizer = Tree()
        for value in RUN:
            optimizer.grads = scaled(strict, scaler, value)
            if scaler is plain:
                scaler.step(optimizer)
                scaler.update()
                continue
            if math.isfinite(value):
                scaler.step(optimizer)
            else:
                with pytest.raises(OSError, match="no space left, StepReport"):
                    scaler.step(optimizer)
            with pytest.raises(OSError, match="no space left, UpdateReport"):
                scaler.update()
        assert optimizer.steps == 3
    assert failing.state_dict() == plain.state_dict()
    assert failing.history == plain.history


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_callback_that_raises_does_not_hide_the_scale_at_its_minimum(strict: Library, error: BaseException) -> None:
    def fail(_: Any) -> None:
        raise error

    policy = DynamicScale(init_scale=1.0, min_scale=1.0, at_min="raise")
    scaler, optimizer = GradScaler(policy=policy, on_update=fail), Tree()
    if isinstance(error, Exception):
        with pytest.raises(ScaleUnderflowError, match="at its minimum") as caught:
            iterate(strict, scaler, optimizer, [math.inf])
        assert caught.value.__context__ is error
        assert not caught.value.__suppress_context__
        assert caught.value.__notes__ == ["A callback of on_update has failed, too: OSError('no space left')"]
    else:
        with pytest.raises(KeyboardInterrupt):
            iterate(strict, scaler, optimizer, [math.inf])
    assert scaler.state_dict()["iteration"] == 2


def test_copies_and_pickles_come_without_callbacks_and_history(strict: Library) -> None:
    scaler, optimizer = GradScaler(on_skip=print, on_update=print, history_size=3), Tree()
    for value in RUN:
        iterate(strict, scaler, optimizer, [value])
    for other in (copy.deepcopy(scaler), copy.copy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.on_skip is None
        assert other.on_update is None
        assert other.history == []
        for value in RUN:
            iterate(strict, other, Tree(), [value])
        assert len(other.history) == 3
    assert scaler.on_skip is not None


def test_callbacks_can_be_set_and_taken_away(strict: Library) -> None:
    seen: list[StepReport] = []
    scaler, optimizer = GradScaler(), Tree()
    scaler.on_skip = seen.append
    iterate(strict, scaler, optimizer, [math.inf])
    scaler.on_skip = None
    iterate(strict, scaler, optimizer, [math.inf])
    assert [report.iteration for report in seen] == [1]


def test_a_disabled_scaler_calls_nothing(strict: Library) -> None:
    def fail(report: Any) -> None:
        raise AssertionError(report)

    scaler, optimizer = GradScaler(enabled=False, on_skip=fail, on_update=fail), Tree([strict.asarray(math.inf)])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.history == []


@pytest.mark.parametrize("name", ["on_skip", "on_update"])
@pytest.mark.parametrize("bad", ["print", 3, [print, None], {"a": print}])
def test_what_cannot_be_called_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(InvalidTypeError, match=name):
        GradScaler(**{name: bad})
    scaler = GradScaler()
    with pytest.raises(InvalidTypeError, match=name):
        setattr(scaler, name, bad)
    assert getattr(scaler, name) is None


@pytest.mark.parametrize(("name", "bad"), [("history_size", -1), ("diagnose", "always"), ("diagnose", True)])
def test_bad_settings_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(InvalidValueError, match=name):
        GradScaler(**{name: bad})


@pytest.mark.torch
def test_torchs_replacements_report_in_the_same_way() -> None:
    torch = require("torch")
    from gradscale_torch import GradScaler as TorchGradScaler

    with opened("torch"):
        for fused in (False, True):
            skips: list[StepReport] = []
            updates: list[UpdateReport] = []
            weight = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([weight], lr=0.1, fused=fused)
            scaler = TorchGradScaler("cpu", on_skip=skips.append, on_update=updates.append, history_size=4)
            for value in RUN:
                weight.grad = scaler.scale(torch.tensor(value)) * torch.ones(2)
                scaler.step(optimizer)
                scaler.update()
            assert [report.iteration for report in skips] == [2, 4]
            assert [report.skipped for report in updates] == [False, True, False, True, False]
            assert [report.iteration for report in scaler.history] == [2, 3, 4, 5]
            assert updates[-1].steps == (scaler.last_step(optimizer),)
