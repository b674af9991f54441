"""The parts of an iteration: turns, what they share, and steps; none keeps another, an optimizer or gradients."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from optimizers import Tree

from gradscale import CallOrderError, DynamicScale, GradScaler, StaticScale
from gradscale.reports.recorder import Reports
from gradscale.scaler import stepper
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.iteration import Iteration, Parts, Stage
from gradscale.scaler.live_state import ArrayState
from gradscale.scaler.scaling import ArrayScaling
from gradscale.scaler.unscaler import ArrayUnscaler
from gradscale.scaler.verdict import PendingVerdict

pytestmark = pytest.mark.numpy


class Gradient(np.ndarray):  # type: ignore[type-arg]
    """An array that can be referenced weakly."""


def gradient(*values: float) -> Any:
    return np.array(values, np.float32).view(Gradient)


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def made(policy: Any = None, number: int = 1, unscaler: Any = None) -> Iteration:
    live = ArrayState(policy or DynamicScale(init_scale=4.0))
    live.current(np.zeros((), np.float32))
    live.is_scaled_unseen = True
    return unmade(live, number, unscaler)


def unmade(live: ArrayState, number: int = 1, unscaler: Any = None) -> Iteration:
    parts = Parts(live, ArrayScaling(), unscaler or ArrayUnscaler(), Agreement(), Reports(), PendingVerdict)
    return Iteration(number, parts)


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("steps", [False, True], ids=["unscaled", "stepped"])
def test_a_turn_keeps_neither_its_iteration_nor_its_optimizer_nor_gradients(steps: bool) -> None:
    iteration, optimizer = made(), Tree([gradient(4.0, 8.0)])
    turn = iteration.turn_of(optimizer)
    held = [weakref.ref(one) for one in (iteration, optimizer, optimizer.grads[0])]
    if steps:
        stepper.step(iteration, turn, optimizer, (), {})
        optimizer.seen.clear()
    else:
        iteration.unscale(turn, optimizer)
    assert optimizer.grads[0].tolist() == [1.0, 2.0]
    del iteration, optimizer
    assert [reference() for reference in held] == [None] * 3
    assert turn.pending is not None
    assert turn.pending.verdict().nonfinite == 0


@pytest.mark.usefixtures("_no_collector")
def test_an_iteration_goes_with_its_last_reference_and_its_turns_with_it() -> None:
    iteration, optimizer = made(), Tree([gradient(4.0)])
    turn = iteration.turn_of(optimizer)
    iteration.unscale(turn, optimizer)
    held = [weakref.ref(one) for one in (iteration, turn)]
    del iteration, turn
    assert [reference() for reference in held] == [None] * 2
    assert optimizer.grads


@pytest.mark.usefixtures("_no_collector")
def test_a_scaler_keeps_no_gradients_from_one_iteration_to_the_next() -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), Tree()
    scaler.scale(np.float32(1.0))
    optimizer.grads = [gradient(4.0)]
    held = weakref.ref(optimizer.grads[0])
    scaler.unscale_(optimizer, max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.grads = []
    optimizer.seen.clear()
    assert held() is None


@pytest.mark.usefixtures("_no_collector")
def test_a_scaler_is_in_no_cycle() -> None:
    scaler, optimizer = GradScaler(init_scale=4.0), Tree([gradient(4.0)])
    scaler.scale(np.float32(1.0))
    scaler.step(optimizer)
    held = weakref.ref(scaler)
    del scaler
    assert held() is None


def test_a_refusal_leaves_a_turn_ready_and_a_failure_does_not() -> None:
    class Interrupted(ArrayUnscaler):
        def __init__(self, touches: bool) -> None:
            super().__init__()
            self.touches = touches

        def unscale(self, gradients: Any, *_: Any) -> Any:
            gradients.is_touched = self.touches
            raise KeyboardInterrupt

    for touches, stage in ((False, Stage.READY), (True, Stage.UNSCALED)):
        optimizer = Tree([gradient(4.0)])
        iteration = made(unscaler=Interrupted(touches))
        turn = iteration.turn_of(optimizer)
        with pytest.raises(KeyboardInterrupt):
            iteration.unscale(turn, optimizer)
        assert turn.stage is stage
        with pytest.raises(CallOrderError, match="could not be unscaled completely"):
            iteration.verdict(turn)


def test_the_state_in_force_is_the_closures_then_the_iterations_then_the_live_one() -> None:
    frame = made()
    live = frame.live
    first = live.current()
    assert frame.in_force() is first
    live.replace_scale(64.0)
    assert frame.in_force() is live.current() is not first
    frame.note_scaled(first)
    assert frame.in_force() is first
    frame.lowered = live.lowered(first)
    assert frame.in_force() is first
    with contextlib.suppress(KeyError), frame.inside_closure():
        assert frame.in_force() is frame.lowered
        frame.note_scaled(frame.lowered)
        raise KeyError
    assert frame.in_force() is first
    with pytest.raises(CallOrderError, match=r"no array has been seen yet.*\(iteration 7\)"):
        unmade(ArrayState(DynamicScale()), 7).in_force()


def test_a_turn_is_lowered_as_long_as_the_policy_lowers() -> None:
    iteration = made(DynamicScale(init_scale=4.0, min_scale=1.0))
    assert [iteration.lower(), iteration.lower()] == [True, True]
    assert iteration.lowered is not None
    assert iteration.lowered.scale == 1.0
    assert not made(StaticScale(4.0)).lower()


def test_a_closure_is_the_first_argument_or_given_by_name() -> None:
    def closure() -> None:
        """Do nothing."""

    for args, kwargs, has_closure in (
        ((), {}, False),
        ((closure,), {}, True),
        ((None,), {}, False),
        ((0.1,), {"closure": closure}, True),
        ((closure,), {"closure": None}, False),
    ):
        assert (stepper.find_closure(args, kwargs) is closure) is has_closure


@pytest.mark.parametrize("value", [4.0, np.inf])
def test_a_plain_stepper_says_what_has_become_of_a_step(value: float) -> None:
    optimizer = Tree([gradient(value)])
    iteration = made()
    turn = iteration.turn_of(optimizer)
    returned, verdict, retries = stepper.step(iteration, turn, optimizer, (1,), {"two": 2})
    assert verdict is not None
    assert (returned, verdict.nonfinite, retries) == (("stepped", 0, 0) if value == 4.0 else (None, 1, 0))
    assert optimizer.calls == ([((1,), {"two": 2})] if value == 4.0 else [])


def test_a_closure_stepper_counts_what_it_evaluates_again() -> None:
    class Evaluating(Tree):
        def step(self, closure: Any) -> Any:
            return closure()

    optimizer = Evaluating()
    iteration = made()
    turn = iteration.turn_of(optimizer)
    scales = []

    def closure() -> str:
        scales.append(float(iteration.in_force().scale))
        optimizer.grads = [gradient(np.inf if len(scales) < 3 else 8.0)]
        return "loss"

    returned, _, retries = stepper.step(iteration, turn, optimizer, (closure,), {})
    assert (returned, retries, scales) == ("loss", 2, [4.0, 2.0, 1.0])
    assert optimizer.grads[0].tolist() == [8.0]
