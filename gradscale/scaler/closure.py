"""Steps with a closure: the gradients of each evaluation are unscaled, and computed again at a lower scale if bad.

LBFGS and SAM call the closure several times in one step, so the scaler cannot skip the step from outside. It wraps the
closure instead: after each evaluation the ranks agree on the gradients, and when one is not finite the scale is backed
off and the closure called again, until the scale cannot fall or enough has been tried. Then the step is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gradscale.errors import CallOrderError, ClosureOverflowError, GradscaleError
from gradscale.scaler.iteration import Progress, Stage

__all__ = ["find_closure", "step_with_closure"]

# From the default scale, 65536, down to 1.
_LARGEST_RETRIES = 16


class _SkippedStepError(GradscaleError):
    """Leaves ``optimizer.step`` when its first evaluation overflows at every scale; never reaches the user."""


def find_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the closure among the arguments of a step: ``closure=``, or else the first positional one if callable."""
    candidate = kwargs["closure"] if "closure" in kwargs else next(iter(args), None)
    return candidate if callable(candidate) else None


def step_with_closure(
    scaler: Any,
    optimizer: Any,
    progress: Progress,
    closure: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``optimizer.step`` with its closure wrapped; return its value, or None for a skipped step."""
    evaluation = _Evaluation(scaler, optimizer, progress, closure)
    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": evaluation}
    else:
        args = (evaluation, *args[1:])
    progress.verdict = None
    returned = None
    with contextlib.suppress(_SkippedStepError):
        returned = optimizer.step(*args, **kwargs)
    if progress.verdict is None:
        msg = (
            f"{type(optimizer).__name__}.step() did not call its closure, so its gradients were neither unscaled nor "
            f"judged: step it without a closure"
        )
        raise CallOrderError(msg)
    scaler._conclude(optimizer, progress, progress.verdict, retries=evaluation.retries)
    return returned


class _Evaluation:
    """The closure as the optimizer sees it: its gradients are unscaled and finite when it returns."""

    def __init__(self, scaler: Any, optimizer: Any, progress: Progress, closure: Callable[..., Any]) -> None:
        self._closure = closure
        self._scaler = scaler
        self._optimizer = optimizer
        self._progress = progress
        self._completed = 0
        self.retries = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._progress.by_closure = True
        begin = self._scaler._iteration.lowered
        previous_scale = None
        for attempt in range(_LARGEST_RETRIES + 1):
            self.retries += attempt > 0
            self._progress.stage = Stage.READY
            with _inside(self._scaler):
                loss = self._closure(*args, **kwargs)
                if self._progress.stage is Stage.READY:
                    self._scaler._unscale(self._optimizer, self._progress)
                verdict = self._scaler._judge(self._progress)
            if not verdict.nonfinite:
                self._completed += 1
                return loss
            if verdict.scale == previous_scale or not _lower(self._scaler):
                break
            previous_scale = verdict.scale
        # The scale is not to blame, so update() backs it off once, as for any overflow.
        self._scaler._iteration.lowered = begin
        if self._completed == 0:
            raise _SkippedStepError
        msg = (
            f"evaluation {self._completed + 1} of the closure gives {verdict.nonfinite} non-finite gradients down to "
            f"the scale {verdict.scale!r}, so the cause is not the scale. The optimizer has begun its step: restore "
            f"its parameters from a copy or a checkpoint before going on"
        )
        raise ClosureOverflowError(msg)


@contextlib.contextmanager
def _inside(scaler: Any) -> Iterator[None]:
    """Scale and unscale with the scale that closures have been lowered to in this iteration, if they have."""
    scaler._closure_state = scaler._iteration.lowered
    try:
        yield
    finally:
        scaler._closure_state = None


def _lower(scaler: Any) -> bool:
    """Back the scale off for the rest of this iteration's closures, and tell whether the policy does.

    ``update`` makes it the scale.
    """
    state = scaler._iteration.lowered or scaler._iteration.state or scaler._current(None)
    scaler._iteration.lowered = scaler._policy.backoff(state)
    return scaler._iteration.lowered is not state
