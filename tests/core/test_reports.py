"""Callbacks that raise, and what reports are refused; lives.py has what a scaler tells of its steps, and when."""

from __future__ import annotations

import contextlib
import math

import pytest
from libraries import Library
from optimizers import Tree, iterate, scaled

from gradscale import DynamicScale, GradScaler, InvalidTypeError, InvalidValueError, ScaleUnderflowError
from gradscale.scaler.reports import Reports

RUN = [1.0, math.inf, 2.0, math.nan, 3.0]


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


def test_whoever_wants_reports_has_each_step_read_in_that_step():
    for options in ({"on_skip": print}, {"on_update": print}, {"diagnose": "on_overflow"}, {"give_up_after": 2}):
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
