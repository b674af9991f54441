"""Step: the work around the call of ``optimizer.step``, plainly, by the optimizer itself, or with a closure."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from gradscale.core.protocols import NOT_STEPPED, Optimizer
from gradscale.errors import CallOrderError, ClosureOverflowError, GradscaleError, InvalidTypeError, short_repr
from gradscale.scaler.claim import KEEPS_SCALE, PROGRAM_CALLS, Reason, Verdict
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.order import forbid_step, require_step, wrong_order
from gradscale.scaler.progress import Progress, Stage

# From the default scale, 65536, down to 1.
_LARGEST_RETRIES = 16


@dataclasses.dataclass(eq=False)
class Step:
    """A context in which to call ``optimizer.step(*args, **kwargs)``, from a frame that a compiler sees.

    If ``calls_optimizer`` is false the step is skipped; fused optimizers are called, and skip in their kernel.
    LBFGS and SAM call a closure several times in one step, so the scaler cannot skip the step from outside. After each
    evaluation the ranks agree on the gradients; if one is not finite the scale is backed off and the closure called
    again, until the scale cannot fall or enough has been tried. Then the step is skipped, by an exception that this
    context ends. ``unscale`` is called in place of the scaler's ``unscale_``, which a class may have overridden.
    """

    iteration: Iteration
    optimizer: Optimizer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    record: Callable[[Step], None]
    inputs: StepInputs | None = None
    owner: object = None
    unscale: Callable[[Optimizer], object] | None = None
    calls_optimizer: bool = True
    returned: Any = None
    verdict: Verdict | None = None
    retries: int = 0
    closure: Callable[..., object] | None = None
    around: contextlib.AbstractContextManager[None] | None = None
    progress: Progress = dataclasses.field(init=False)
    # How many evaluations were fine.
    _completed = 0

    def __enter__(self) -> Step:
        iteration, optimizer = self.iteration, self.optimizer
        if self.args or self.kwargs:
            self.closure = self._find_closure()
        stepping = iteration.current.adapter.stepping
        own = None if stepping is None else stepping(self)
        require_step(optimizer)
        progress = self.progress = iteration.progress_of(optimizer)
        if progress.stage.is_ready:
            progress.is_judged_in_step = True
            if progress.pending is None:
                # A call before, which failed before it judged anything, has left its own.
                progress.inputs = None
        else:
            self._resume(progress)
        if self.inputs is not None:
            iteration.set_inputs(progress, self.inputs, has_closure=self.closure is not None)
        if self.closure is not None:
            self._begin_closure(progress)
        elif progress.stage.is_unscaled:
            progress.begin_step()
        try:
            if own is not None:
                self.around = own
                own.__enter__()
            elif self.closure is None:
                if self.unscale is not None and progress.stage.is_ready:
                    with within_the_step(iteration):
                        self._call_unscale(self.unscale)
                    progress.begin_step()
                self.verdict = iteration.verdict_for_step(progress, optimizer)
                self.calls_optimizer = not self.verdict.reason
        except BaseException:
            if self.closure is None:
                progress.fail_step()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_over = error is None
        if self.around is not None:
            # Break the cycle step -> context -> step, or the optimizer lives until the collector runs.
            around, self.around = self.around, None
            around.__exit__(kind, error, trace)
        if self.closure is not None:
            # The closure in them is such a cycle, too.
            self.args, self.kwargs = (), {}
            is_over = is_over or isinstance(error, _SkippedStepError)
            if is_over and self.verdict is None:
                msg = (
                    f"{type(self.optimizer).__name__}.step() did not call its closure, so its gradients were neither "
                    f"unscaled nor judged: step it without a closure"
                )
                raise CallOrderError(msg)
        elif isinstance(error, TypeError):
            self._require_arguments(error)
        if is_over:
            returned = self.returned
            # As Megatron's optimizers say it.
            if returned is NOT_STEPPED or (isinstance(returned, tuple) and len(returned) > 0 and returned[0] is False):
                self.verdict = self._decline()
            self.record(self)
        elif self.verdict and self.verdict.reason:
            self.progress.leave_skipped()
        else:
            self.progress.fail_step()
        return is_over

    def _resume(self, progress: Progress) -> None:
        """Go on with an optimizer that was unscaled before, or whose step has failed; CallOrderError if it was made."""
        iteration, by_closure = self.iteration, self.closure is not None
        if progress.stage.has_ended or (progress.stage is Stage.OVERTAKEN and not by_closure):
            forbid_step(progress, iteration.number)
        has_failed = progress.stage is Stage.STEPPING and not by_closure and not progress.is_incomplete
        is_one_call = iteration.parts.is_guard and progress.is_judged_in_step
        if has_failed and is_one_call and not (self.inputs and self.inputs.are_those_of(progress.inputs)):
            # No other call tells the gradients of another batch from those of the step that has failed.
            progress.judge_again()
            progress.inputs = None

    def _begin_closure(self, progress: Progress) -> None:
        """Pass the optimizer a function that evaluates the closure and judges its gradients."""
        if progress.stage.is_unscaled and not progress.closure.was_evaluated:
            what = "step() with a closure unscales by itself, and unscale_() was called before"
            wrong_order(what, self.iteration.number)
        progress.begin_closure()
        if "closure" in self.kwargs:
            self.kwargs = {**self.kwargs, "closure": self._evaluate}
        else:
            self.args = (self._evaluate, *self.args[1:])

    def _call_unscale(self, unscale: Callable[[Optimizer], object]) -> None:
        """Call an ``unscale_`` that a class has overridden, perhaps without a call of ours."""
        unscale(self.optimizer)
        if self.progress.stage.is_ready:
            self.progress.take_for_unscaled()

    def _require_arguments(self, error: TypeError) -> None:
        """Raise InvalidTypeError if the optimizer's step needs other arguments."""
        try:
            # Some functions do not name their arguments.
            with contextlib.suppress(ValueError):
                inspect.signature(self.optimizer.step).bind(*self.args, **self.kwargs)
        except TypeError as mismatch:
            msg = (
                f"{type(self.optimizer).__name__}.step() is called without arguments, but for those that follow the "
                f"optimizer in step(optimizer, ...), got {str(mismatch).removeprefix('got ')}: let it read the "
                f"gradients from .grads; step() itself takes loss=, norm= and batch="
            )
            raise InvalidTypeError(msg) from error

    def _find_closure(self) -> Callable[..., object] | None:
        """Return the closure among the arguments: ``closure=``, or else the first positional one if callable."""
        candidate = self.kwargs["closure"] if "closure" in self.kwargs else next(iter(self.args), None)
        if candidate is None or callable(candidate):
            return candidate
        is_closure = "closure" in self.kwargs
        # Some optimizers have other arguments, and some functions do not name theirs.
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            is_closure |= "closure" in [*inspect.signature(self.optimizer.step).parameters][:2]
        if is_closure:
            msg = (
                f"a closure must be a function, got {short_repr(candidate)}: call step(optimizer); a loss goes to "
                f"scale(), or is given by name, as loss="
            )
            raise InvalidTypeError(msg)
        return None

    def _evaluate(self, *args: object, **kwargs: object) -> object:
        """Evaluate the closure, and unscale and judge its gradients; again at lower scales while they overflow."""
        iteration, progress, closure = self.iteration, self.progress, self.closure
        assert closure is not None
        before = iteration.scaling.lowered
        previous_scale = None
        for attempt in range(_LARGEST_RETRIES + 1):
            self.retries += attempt > 0
            progress.evaluate()
            with self._inside_closure():
                loss = closure(*args, **kwargs)
                if self.unscale is not None and progress.stage.is_ready:
                    self._call_unscale(self.unscale)
                verdict = self.verdict = iteration.verdict_for_step(progress, self.optimizer, Stage.JUDGED)
            keeps_scale = verdict.reason in KEEPS_SCALE
            if keeps_scale and self._completed:
                by = "" if iteration.agreement.is_alone else f" on rank {verdict.by}"
                call = PROGRAM_CALLS[max(verdict.reason, Reason.REFUSED)]
                wrong_order(
                    f"{call} was called{by} in evaluation {self._completed + 1} of a closure, and the optimizer has "
                    f"begun its step: restore its parameters and state from a copy or a checkpoint, and refuse a step "
                    f"in the closure's first evaluation",
                    iteration.number,
                )
            if keeps_scale:
                raise _SkippedStepError
            if not verdict.reason:
                self._completed += 1
                progress.end_evaluation()
                return loss
            if verdict.scale == previous_scale or not iteration.scaling.lower():
                break
            previous_scale = verdict.scale
        # The scale is not to blame, so update() backs it off once, as for any overflow.
        iteration.scaling.lowered = before
        if self._completed == 0:
            raise _SkippedStepError
        scales = f" down to the scale {verdict.scale!r}, so the cause is not the scale"
        msg = (
            f"evaluation {self._completed + 1} of the closure gives {verdict.nonfinite} non-finite gradients"
            f"{'' if iteration.current.never_scales else scales}. The optimizer has begun its step: restore its "
            f"parameters and state from a copy or a checkpoint before going on"
        )
        raise ClosureOverflowError(msg)

    @contextlib.contextmanager
    def _inside_closure(self) -> Iterator[None]:
        """Scale and unscale with the state that closures have lowered; forget the losses of one that fails."""
        iteration, losses = self.iteration, self.iteration.judge.losses
        try:
            with iteration.scaling.inside_closure():
                yield
        except BaseException:
            # The closure is evaluated again, or never.
            iteration.judge.losses = losses
            raise

    def _decline(self) -> Verdict:
        """Return the verdict on a step that the optimizer itself has declined; the scale stays as it is."""
        progress, verdict = self.progress, self.verdict or self.iteration.verdict(self.progress)
        if not verdict.reason and progress.pending is not None:
            rank = self.iteration.agreement.rank()
            verdict = verdict._replace(reason=Reason.REFUSED, by=rank, by_loss=False, saw=True)
            progress.decline()
            progress.pending.replace(verdict)
        return verdict


@contextlib.contextmanager
def within_the_step(iteration: Iteration) -> Iterator[None]:
    """Let ``optimizer.step`` call the scaler (``grad_scaler=``, an overridden ``unscale_``), an error otherwise."""
    iteration.scaling.is_inside_closure = True
    try:
        yield
    finally:
        iteration.scaling.is_inside_closure = False


class _SkippedStepError(GradscaleError):
    """Leaves ``optimizer.step`` when its first evaluation overflows at every scale; never reaches the user."""
