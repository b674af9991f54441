"""GradScaler called in a wrong order: an error that names the right one, and nothing done to gradients or scale."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from libraries import Library
from optimizers import Evaluating, Tree, iterate

from gradscale import CallOrderError, GradScaler

ORDER = (
    r"The right order in each iteration: scale\(loss\) and the backward pass; then, for each optimizer, "
    r"unscale_\(optimizer\) if wanted, once, and step\(optimizer\), once; then update\(\)"
)


def begun(arrays: Library) -> tuple[GradScaler, Tree]:
    """Return a scaler in its second iteration, after scale(), and an optimizer with gradients."""
    scaler, optimizer = GradScaler(), Tree()
    iterate(arrays, scaler, optimizer)
    factor = scaler.scale(arrays.asarray(1.0))
    optimizer.grads = [arrays.asarray([4.0]) * factor]
    return scaler, optimizer


def again(scaler: GradScaler, optimizer: Any) -> None:
    scaler.step(optimizer, lambda: None)


# The calls in order, the last of which is wrong, and what is said.
WRONG: dict[str, tuple[list[Any], str]] = {
    "unscale_ twice": (
        [GradScaler.unscale_] * 2,
        r"unscale_\(\) has already been called on this optimizer since the last update\(\) \(iteration 2\)\. ",
    ),
    "unscale_ after step": ([GradScaler.step, GradScaler.unscale_], r"unscale_\(\) is being called after step\(\)"),
    "step twice": ([GradScaler.step] * 2, r"step\(\) has already been called.*since the last update\(\)"),
    "step, then a closure": ([GradScaler.step, again], r"step\(\) has already been called"),
    "unscale_, then a closure": (
        [GradScaler.unscale_, again],
        r"closure unscales by itself, and unscale_\(\) was called",
    ),
}


@pytest.mark.parametrize("value", [4.0, math.inf], ids=["clean", "overflow"])
@pytest.mark.parametrize(("calls", "message"), WRONG.values(), ids=WRONG)
def test_a_call_in_a_wrong_order_is_an_error_that_changes_nothing(
    arrays: Library, calls: list[Any], message: str, value: float
) -> None:
    scaler, optimizer = begun(arrays)
    optimizer.grads = [arrays.asarray([value * 65536.0])]
    *right, wrong = calls
    for call in right:
        call(scaler, optimizer)
    steps = optimizer.steps
    with pytest.raises(CallOrderError, match=f"{message}.*{ORDER}"):
        wrong(scaler, optimizer)
    arrays.assert_array(optimizer.grads[0], [value])
    assert optimizer.steps == steps
    if GradScaler.step not in right:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == (2 if value == 4.0 else 0)


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_unscale_before_any_scale_and_an_update_of_nothing(arrays: Library, method: str) -> None:
    scaler, optimizer = GradScaler(), Tree([arrays.asarray([1.0])])
    with pytest.raises(CallOrderError, match=rf"scale\(\) has never been called; .*ShardedGradScaler.*{ORDER}"):
        getattr(scaler, method)(optimizer)
    arrays.assert_array(optimizer.grads[0], [1.0])
    assert optimizer.steps == 0
    # It is not held against the optimizer afterwards.
    assert not iterate(arrays, scaler, optimizer).skipped
    told = rf"update\(\) was called, and nothing was scaled or unscaled.*\(iteration 2\).*{ORDER}"
    with pytest.raises(CallOrderError, match=told):
        scaler.update()
    assert scaler.state_dict()["iteration"] == 2


def test_last_step_of_an_optimizer_that_was_never_stepped(arrays: Library) -> None:
    scaler, optimizer = begun(arrays)
    with pytest.raises(CallOrderError, match=r"last_step\(\) needs a step\(\) of this optimizer first"):
        scaler.last_step(Tree())
    # The report of the iteration before is there until the next step.
    scaler.unscale_(optimizer)
    assert scaler.last_step(optimizer).iteration == 1
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).iteration == 2


MIDDLE: dict[str, Callable[[GradScaler], Any]] = {
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "load_state_dict": lambda scaler: scaler.load_state_dict(scaler.state_dict()),
}


@pytest.mark.parametrize("what", MIDDLE)
@pytest.mark.parametrize("after", ["unscale_", "step", "a closure"])
def test_no_copy_and_no_load_in_the_middle_of_an_iteration(arrays: Library, what: str, after: str) -> None:
    scaler, optimizer = begun(arrays)
    # After scale() it is fine.
    MIDDLE[what](scaler)
    before = scaler.state_dict()
    if after == "a closure":
        minimiser = Evaluating()
        minimiser.grads = optimizer.grads
        scaler.step(minimiser, lambda: None)
    else:
        getattr(scaler, after)(optimizer)
    # Also when the optimizer is gone.
    del optimizer
    with pytest.raises(CallOrderError, match=r"only at the beginning of an iteration, .* or at its end.*of it"):
        MIDDLE[what](scaler)
    assert scaler.state_dict() == before
    scaler.update()
    MIDDLE[what](scaler)
