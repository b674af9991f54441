"""How an optimizer is stepped: plainly, or with a closure that is evaluated again at a lower scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gradscale.core.protocols import Optimizer
from gradscale.core.vector import Verdict
from gradscale.errors import CallOrderError, ClosureOverflowError, GradscaleError
from gradscale.scaler.iteration import Iteration, Stage, Turn

__all__ = ["evaluating", "find_closure", "step"]

# From the default scale, 65536, down to 1.
_LARGEST_RETRIES = 16


def step(
    iteration: Iteration, turn: Turn, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[object, Verdict | None, int]:
    """Step an optimizer unless the verdict is to skip it. One host read, or one for each evaluation of a closure.

    Returns the result of ``optimizer.step`` (None for a skipped step), the verdict, and how often a closure was
    evaluated again.

    Raises
    ------
    CallOrderError
        If there is a closure, and the gradients were unscaled before or the optimizer does not call it.
    ClosureOverflowError
        If the closure overflows at every scale after its first evaluation was fine.
    """
    if (args or kwargs) and find_closure(args, kwargs) is not None:
        with evaluating(iteration, turn, optimizer, args, kwargs) as evaluation:
            evaluation.returned = optimizer.step(*evaluation.args, **evaluation.kwargs)
        return evaluation.returned, evaluation.verdict, evaluation.retries
    verdict = iteration.verdict_for_step(turn, optimizer)
    return None if verdict.nonfinite or verdict.code else optimizer.step(*args, **kwargs), verdict, 0


@contextlib.contextmanager
def evaluating(
    iteration: Iteration,
    turn: Turn,
    optimizer: Optimizer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    unscale: Callable[[Any], object] | None = None,
) -> Iterator[Evaluation]:
    """Give the arguments for ``optimizer.step`` with its closure wrapped, and catch the exception that skips the step.

    ``unscale`` is called with the optimizer after each evaluation, if the scaler's class may have overridden it.

    LBFGS and SAM call the closure several times in one step, so the scaler cannot skip the step from outside. After
    each evaluation the ranks agree on the gradients; if one is not finite the scale is backed off and the closure
    called again, until the scale cannot fall or enough has been tried. Then the step is skipped.
    """
    if turn.stage is Stage.UNSCALED and not turn.by_closure:
        iteration.wrong_order("step() with a closure unscales by itself, and unscale_() was called before")
    closure = find_closure(args, kwargs)
    assert closure is not None
    # A step that failed may have begun.
    turn.has_begun_to_step, turn.judged = False, None
    evaluation = Evaluation(iteration, turn, optimizer, closure)
    evaluation.unscale = unscale
    by_name = "closure" in kwargs
    evaluation.args = args if by_name else (evaluation, *args[1:])
    evaluation.kwargs = {**kwargs, "closure": evaluation} if by_name else kwargs
    try:
        with contextlib.suppress(_SkippedStepError):
            yield evaluation
    finally:
        # It is held by what it is called with.
        evaluation.args, evaluation.kwargs = (), {}
    if evaluation.verdict is None:
        msg = (
            f"{type(optimizer).__name__}.step() did not call its closure, so its gradients were neither unscaled "
            f"nor judged: step it without a closure"
        )
        raise CallOrderError(msg)


def find_closure(args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[..., object] | None:
    """Return the closure among the arguments of a step: ``closure=``, or else the first positional one if callable."""
    candidate = kwargs["closure"] if "closure" in kwargs else next(iter(args), None)
    return candidate if callable(candidate) else None


class _SkippedStepError(GradscaleError):
    """Leaves ``optimizer.step`` when its first evaluation overflows at every scale; never reaches the user."""


class Evaluation:
    """The closure as the optimizer sees it: its gradients are unscaled and finite when it returns."""

    unscale: Callable[[Any], object] | None = None

    def __init__(self, iteration: Iteration, turn: Turn, optimizer: Optimizer, closure: Callable[..., object]) -> None:
        self._closure = closure
        self._iteration = iteration
        self._turn = turn
        self._optimizer = optimizer
        self._completed = 0
        self.verdict: Verdict | None = None
        self.retries = 0
        self.args: tuple[object, ...] = ()
        self.kwargs: dict[str, object] = {}
        self.returned: object = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        iteration, turn = self._iteration, self._turn
        turn.by_closure = True
        before = iteration.lowered
        previous_scale = None
        for attempt in range(_LARGEST_RETRIES + 1):
            self.retries += attempt > 0
            turn.stage = Stage.READY
            with iteration.inside_closure():
                loss = self._closure(*args, **kwargs)
                if self.unscale is not None and turn.stage is Stage.READY:
                    self.unscale(self._optimizer)
                    turn.stage = Stage.UNSCALED
                verdict = self.verdict = iteration.verdict_for_step(turn, self._optimizer)
            if verdict.is_held and self._completed:
                by = "" if iteration.agreement.is_alone else f" on rank {verdict.by}"
                iteration.wrong_order(
                    f"refuse() was called{by} in evaluation {self._completed + 1} of a closure, and the optimizer has "
                    f"begun its step: restore its parameters from a copy or a checkpoint, and refuse a step in the "
                    f"closure's first evaluation"
                )
            if verdict.is_held:
                raise _SkippedStepError
            if not verdict.nonfinite:
                self._completed += 1
                turn.has_begun_to_step = True
                return loss
            if verdict.scale == previous_scale or not iteration.lower():
                break
            previous_scale = verdict.scale
        # The scale is not to blame, so update() backs it off once, as for any overflow.
        iteration.lowered = before
        if self._completed == 0:
            raise _SkippedStepError
        msg = (
            f"evaluation {self._completed + 1} of the closure gives {verdict.nonfinite} non-finite gradients down to "
            f"the scale {verdict.scale!r}, so the cause is not the scale. The optimizer has begun its step: restore "
            f"its parameters from a copy or a checkpoint before going on"
        )
        raise ClosureOverflowError(msg)
