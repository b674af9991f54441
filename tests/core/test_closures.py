"""Steps with a closure: an overflow is tried again at a lower scale, and what happens when that does not help."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from libraries import Library
from optimizers import Evaluating, Tree, iterate, scaled

import gradscale
from gradscale import ClosureOverflowError, DynamicScale, GradscaleError, GradScaler, ScaleUnderflowError, StaticScale

Overflows = Callable[[int, float], bool]


def closure_of(
    arrays: Library, scaler: GradScaler, optimizer, overflows: Overflows
) -> tuple[Callable[[], str], list[float]]:
    """Return a closure whose true gradient is 3 and which overflows as told, and the scales that it was called at."""
    called_at: list[float] = []

    def closure() -> str:
        factor = scaler.scale(arrays.asarray(1.0))
        called_at.append(arrays.item(factor))
        bad = overflows(len(called_at), called_at[-1])
        optimizer.grads = [arrays.asarray([math.inf if bad else 3.0 * called_at[-1]])]
        return f"loss {len(called_at)}"

    return closure, called_at


ABOVE: Overflows = lambda _index, scale: scale > 16384.0  # noqa: E731
ALWAYS: Overflows = lambda _index, _scale: True  # noqa: E731


# The policy, evaluations in a step, which overflow, the scales that the closure is called at, and the scale afterwards:
# that of the last evaluation, or where the cause is not the scale, backed off once as for any overflow.
RETRIES: dict[str, tuple[Any, int, Overflows, list[float], float]] = {
    "none": (DynamicScale(), 3, lambda *_: False, [65536.0] * 3, 65536.0),
    "first evaluation": (DynamicScale(), 2, ABOVE, [65536.0, 32768.0, 16384.0, 16384.0], 16384.0),
    "later one": (DynamicScale(), 3, lambda index, _: index == 2, [65536.0, 65536.0, 32768.0, 32768.0], 32768.0),
    "always": (DynamicScale(), 2, ALWAYS, [2.0**exponent for exponent in range(16, -1, -1)], 32768.0),
    "minimum": (DynamicScale(init_scale=8.0, min_scale=2.0), 1, ALWAYS, [8.0, 4.0, 2.0, 2.0], 4.0),
    "static": (StaticScale(8.0), 1, ALWAYS, [8.0], 8.0),
}


def check_seen(arrays: Library, optimizer: Evaluating):
    """Assert that the optimizer has been shown true gradients only."""
    assert optimizer.seen
    for grads in optimizer.seen:
        arrays.assert_array(grads[0], [3.0])


@pytest.mark.parametrize(("policy", "evaluations", "overflows", "scales", "after"), RETRIES.values(), ids=RETRIES)
def test_an_overflow_is_evaluated_again_at_lower_scales(
    arrays: Library, policy, evaluations: int, overflows: Overflows, scales: list[float], after: float
):
    seen: list[Any] = []
    scaler, optimizer = GradScaler(policy=policy, on_update=seen.append), Evaluating(evaluations)
    closure, called_at = closure_of(arrays, scaler, optimizer, overflows)
    is_skipped = overflows is ALWAYS
    assert scaler.step(optimizer, closure) == (None if is_skipped else "minimised")
    assert called_at == scales
    # The lower scale is the scaler's from the update on.
    assert scaler.get_scale() == policy.init_scale
    if is_skipped:
        assert (optimizer.steps, optimizer.seen) == (0, [])
    else:
        check_seen(arrays, optimizer)
        assert optimizer.losses[-1] == f"loss {len(scales)}"
    scaler.update()
    report = scaler.last_step(optimizer)
    retries = len(scales) - (1 if is_skipped else evaluations)
    assert (report.skipped, report.nonfinite, report.retries) == (is_skipped, int(is_skipped), retries)
    assert report.reason == ("overflow" if is_skipped else "stepped")
    assert report.scale == scales[-1]
    assert scaler.get_scale() == after
    assert (seen[0].scale, seen[0].new_scale) == (scales[-1], after)
    assert scaler.state_dict()["_growth_tracker"] == (len(scales) == evaluations and not is_skipped)


def test_an_overflow_at_the_minimum_is_raised_by_an_update_without_a_new_scale(arrays: Library):
    policy = DynamicScale(init_scale=4.0, min_scale=2.0, at_min="raise")
    for new_scale in (None, 1024.0):
        scaler, optimizer = GradScaler(policy=policy), Evaluating()
        # One that is fine, at the scale from before.
        scaler.step(Tree(scaled(arrays, scaler, 1.0)))
        closure, _ = closure_of(arrays, scaler, optimizer, ALWAYS)
        scaler.step(optimizer, closure)
        if new_scale is None:
            with pytest.raises(ScaleUnderflowError, match=r"at its minimum, 2\.0"):
                scaler.update()
        else:
            scaler.update(new_scale)
            assert scaler.get_scale() == new_scale


def test_an_optimizer_that_has_begun_to_move_cannot_be_skipped(arrays: Library):
    scaler, optimizer = GradScaler(), Evaluating(3)
    closure, _ = closure_of(arrays, scaler, optimizer, lambda index, _: index > 1)
    with pytest.raises(ClosureOverflowError, match=r"evaluation 2 of the closure gives 1 non-finite .*down to.* 1\.0"):
        scaler.step(optimizer, closure)
    assert issubclass(ClosureOverflowError, FloatingPointError)
    assert optimizer.steps == 0
    # After restoring the parameters, the scaler can be used on.
    scaler.update()
    assert not iterate(arrays, scaler, Tree()).skipped


def test_other_optimizers_of_the_iteration_unscale_with_the_scale_of_their_loss(arrays: Library):
    scaler, optimizer = GradScaler(), Evaluating()
    before, after = Tree(), Tree()
    factor = scaler.scale(arrays.asarray(1.0))
    before.grads, after.grads = ([arrays.asarray([5.0]) * factor] for _ in range(2))
    # One that fails before it scales does not hide that their loss is scaled.
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, lambda: 1 / 0)
    scaler.unscale_(before)
    closure, _ = closure_of(arrays, scaler, optimizer, ABOVE)
    scaler.step(optimizer, closure)
    scaler.step(before)
    scaler.step(after)
    # So does a loss that is scaled now, outside of a closure.
    arrays.assert_array(scaler.scale(arrays.asarray(1.0)), 65536.0)
    scaler.update()
    arrays.assert_array(before.seen[0][0], [5.0])
    arrays.assert_array(after.seen[0][0], [5.0])
    assert scaler.last_step(after).scale == 65536.0
    assert scaler.get_scale() == 16384.0


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


@pytest.mark.parametrize("place", ["closure", "optimizer"])
def test_an_exception_passes_through_and_the_step_can_be_called_again(arrays: Library, place: str):
    class Failing(Evaluating):
        fails = place == "optimizer"

        def step(self, closure: Callable[[], Any]) -> str:
            returned = super().step(closure)
            if self.fails:
                self.fails = False
                raise MemoryError
            return returned

    scaler, optimizer = GradScaler(), Failing()
    inner, called_at = closure_of(arrays, scaler, optimizer, lambda index, _: index == 2)

    def closure() -> str:
        loss = inner()
        if place == "closure" and len(called_at) == 1:
            raise MemoryError
        return loss

    with pytest.raises(MemoryError):
        scaler.step(optimizer, closure)
    assert scaler.step(optimizer, closure) == "minimised"
    assert called_at == [65536.0, 65536.0, 32768.0]
    check_seen(arrays, optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0


def test_a_loss_in_place_of_a_closure_is_an_error_and_other_arguments_are_passed_on(arrays: Library):
    class Rated(Tree):
        def step(self, rate: float) -> float:
            return rate

    scaler, optimizer = GradScaler(init_scale=4.0), Evaluating()
    loss = scaler.scale(arrays.asarray(1.0))
    optimizer.grads = [arrays.asarray([8.0])]
    for args, kwargs in (((loss,), {}), ((), {"closure": loss}), ((1.0,), {})):
        with pytest.raises(
            gradscale.InvalidTypeError, match=r"a closure must be a function, got .*a loss goes to scale\(\)$"
        ):
            scaler.step(optimizer, *args, **kwargs)
    arrays.assert_array(optimizer.grads[0], [8.0])
    assert scaler.step(Rated([arrays.asarray([8.0])]), 0.5) == 0.5


def test_a_closure_that_never_scales_and_one_that_is_not_called_are_errors(arrays: Library):
    class Deaf(Tree):
        def step(self, *_, **__) -> str:
            return "deaf"

    scaler, optimizer = GradScaler(), Evaluating()
    optimizer.grads = [arrays.asarray([1.0])]
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
