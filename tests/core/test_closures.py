"""Steps with a closure: how it is found and called, and what wrong ones are told; lives.py has what overflows."""

import math

import numpy as np
import pytest
from libraries import Library
from optimizers import Evaluating, Tree

import gradscale
from gradscale import GradscaleError, GradScaler, InvalidTypeError


def test_a_closure_is_found_among_arguments_which_reach_the_optimizer_as_its_own_do_the_closure(arrays: Library):
    class Passing(Evaluating):
        def step(self, *args, closure=None, **kwargs):
            closure, *args = [closure, *args] if closure is not None else args
            return closure(1, two=2), tuple(args), kwargs

    scaler, optimizer = GradScaler(), Passing()

    def closure(one: int, two: int) -> tuple[int, int]:
        optimizer.grads = [scaler.scale(arrays.asarray(1.0))]
        return one, two

    assert scaler.step(optimizer, closure, "more", lr=0.1) == ((1, 2), ("more",), {"lr": 0.1})
    scaler.update()
    assert scaler.step(optimizer, 0.1, closure=closure) == ((1, 2), (0.1,), {})


def test_a_loss_in_place_of_a_closure_is_an_error_and_other_arguments_are_passed_on(arrays: Library):
    class Rated(Tree):
        def step(self, rate: float) -> float:
            return rate

    scaler, optimizer = GradScaler(init_scale=4.0), Evaluating()
    loss = scaler.scale(arrays.asarray(1.0))
    optimizer.grads = [arrays.asarray([8.0])]
    for args, kwargs in (((loss,), {}), ((), {"closure": loss}), ((1.0,), {})):
        with pytest.raises(
            InvalidTypeError, match=r"a closure must be a function, got .*goes to scale\(\), or .* loss=$"
        ):
            scaler.step(optimizer, *args, **kwargs)
    arrays.assert_array(optimizer.grads[0], [8.0])
    # As torch's schedulers wrap it.
    optimizer.step = lambda self, closure: None  # type: ignore[assignment]  # noqa: ARG005
    with pytest.raises(InvalidTypeError, match=r"a closure must be a function, got "):
        scaler.step(optimizer, loss)
    assert scaler.step(Rated([arrays.asarray([8.0])]), 0.5) == 0.5


@pytest.mark.numpy
def test_what_a_closure_does_not_scale_at_a_scale_of_1_is_divided_by_no_lower_one():
    scaler, optimizer, values = GradScaler(init_scale=1.0), Evaluating(), iter((math.inf, 1.0))
    scaler.scale(np.ones(()))

    def closure():
        optimizer.grads = [np.full(1, next(values), np.float32)]

    said = pytest.raises(gradscale.CallOrderError, match=r"the closure of step\(\) has not called scale\(\)")
    with pytest.warns(UserWarning, match=r"scale\(\) was not called"), said:
        scaler.step(optimizer, closure)
    assert optimizer.grads[0].tolist() == [1.0]


def test_a_closure_that_never_scales_and_one_that_is_not_called_are_errors(arrays: Library):
    class Deaf(Tree):
        def step(self, *_, **__) -> str:
            return "deaf"

    for has_scaled in (False, True):
        scaler, optimizer = GradScaler(), Evaluating()
        optimizer.grads = [arrays.asarray([1.0])]
        if has_scaled:
            scaler.scale(arrays.asarray(1.0))
        with pytest.raises(GradscaleError, match=r"the closure of step\(\) has not called scale\(\)"):
            scaler.step(optimizer, lambda: None)
    scaler.scale(arrays.asarray(1.0))
    with pytest.raises(gradscale.CallOrderError, match=r"Deaf\.step\(\) did not call its closure"):
        scaler.step(Deaf([arrays.asarray([math.inf])]), lambda: 1.0)


def test_a_closure_need_not_scale_where_nothing_is_divided(arrays: Library):
    optimizer = Evaluating()
    for scaler, value in ((GradScaler(policy=gradscale.StaticScale(1.0)), 3.0), (GradScaler(), 0.0)):
        scaler.scale(arrays.asarray(1.0))
        optimizer.grads = [arrays.asarray([value])]
        scaler.step(optimizer, lambda: None)
        scaler.update()
        arrays.assert_array(optimizer.grads[0], [value])
        assert not scaler.last_step(optimizer).skipped


def test_after_a_later_evaluation_has_failed_the_error_names_the_state_of_the_optimizer_too():
    class Searching(Tree):
        """As LBFGS: its state has a count of a step that has not come to its end."""

        count, before = 0, None

        def step(self, closure):
            self.count += 1
            closure()
            assert (self.before is None) == (self.count == 1)
            closure()
            self.before = self.grads

    guard, optimizer, losses = gradscale.StepGuard(), Searching(), iter([1.0, math.nan, 1.0, 1.0])

    def closure() -> None:
        optimizer.grads = [guard.scale(np.float32([next(losses)]))]

    words = r"The optimizer has begun its step: restore its parameters and state from a copy or a checkpoint"
    with pytest.raises(gradscale.ClosureOverflowError, match=words):
        guard.step(optimizer, closure)
    optimizer.count = 0
    guard.update()
    guard.step(optimizer, closure)
    assert guard.counts()["taken"] == 1
