"""Step: the work before and after the call of ``optimizer.step``, which a compiler has to see."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch

import gradscale
from gradscale.core.messages import warn_caller
from gradscale.core.vector import Verdict
from gradscale.scaler.iteration import Iteration, Stage, Turn
from gradscale.scaler.scaler import end_step, iteration_of
from gradscale.scaler.stepper import evaluating, find_closure
from gradscale_torch.hosts import untraced
from gradscale_torch.state import TensorState
from gradscale_torch.unscaler import Request
from gradscale_torch.verdicts import NO_READS, TensorVerdict, is_capturing, moved

if TYPE_CHECKING:
    from gradscale_torch.amp import GradScaler

__all__ = ["Step"]

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

_CPU = torch.device("cpu")


class Step:
    """A context in which to call ``optimizer.step(*args, **kwargs)`` if ``is_made``.

    ``verdict`` is None if it is read later. ``around`` is what is open during the call.
    """

    is_made = True
    returned: Any = None
    verdict: Verdict | None = None
    retries = 0
    _turn: Turn | None = None
    around: contextlib.AbstractContextManager[None] | None = None

    def __init__(
        self,
        replacement: GradScaler,
        scaler: gradscale.GradScaler,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unscale: Callable[[Optimizer], object] | None,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.replacement, self.optimizer = replacement, optimizer
        self._scaler, self._unscale = scaler, unscale

    @untraced
    def __enter__(self) -> Step:
        if not self._scaler.is_enabled():
            return self
        iteration, optimizer = iteration_of(self._scaler), self.optimizer
        skips_by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        has_closure = (self.args or self.kwargs) and find_closure(self.args, self.kwargs) is not None
        if not skips_by_itself and not has_closure:
            cast(TensorState, iteration.live).refuse_capture(NO_READS)
        turn = self._turn = iteration.begin_step(optimizer)
        if has_closure:
            self.around = _with_closure(self, iteration, turn)
        elif not skips_by_itself:
            if turn.stage is Stage.READY and self._unscale is not None:
                with _within_the_step(iteration):
                    self._unscale(optimizer)
                turn.stage = Stage.UNSCALED
            self.verdict = iteration.verdict_for_step(turn, optimizer)
            self.is_made = not self.verdict.nonfinite and not self.verdict.code
        elif "grad_scaler" in inspect.signature(optimizer.step).parameters:
            warn_caller(
                f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: have it read the "
                f"attributes grad_scale and found_inf, which scalers set, instead",
                FutureWarning,
            )
            self.around = _asking_the_scaler(self, iteration, turn)
        else:
            self.around = _by_kernel(self, iteration, turn)
        if self.around is not None:
            self.around.__enter__()
        return self

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_over = error is None
        # It holds this step.
        around, self.around = self.around, None
        if around is not None:
            is_over = bool(around.__exit__(kind, error, trace)) or is_over
        if is_over:
            end_step(self._scaler, self.optimizer, self._turn, self.verdict, self.retries)
        return is_over


@contextlib.contextmanager
def _with_closure(step: Step, iteration: Iteration, turn: Turn) -> Iterator[None]:
    """Wrap the closure. One host read for each evaluation."""
    optimizer, unscale = step.optimizer, step.replacement.unscale_
    told: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # When the closure returns its gradients are unscaled and finite.
        found = cast(TensorState, iteration.live).example()
        told = _told(optimizer, getattr(optimizer, "grad_scale", None), found)
    with evaluating(iteration, turn, optimizer, step.args, step.kwargs, unscale) as evaluation, told:
        step.args, step.kwargs = evaluation.args, evaluation.kwargs
        try:
            yield
        finally:
            step.args, step.kwargs = (), {}
    step.verdict, step.retries = evaluation.verdict, evaluation.retries


@contextlib.contextmanager
def _within_the_step(iteration: Iteration) -> Iterator[None]:
    """Take calls of the scaler for calls of the step that is under way."""
    iteration.is_inside_closure = True
    try:
        yield
    finally:
        iteration.is_inside_closure = False


@contextlib.contextmanager
def _by_kernel(step: Step, iteration: Iteration, turn: Turn) -> Iterator[None]:
    """Step an optimizer that skips in its kernel by ``found_inf``. No host read if the verdict may come later."""
    optimizer: Any = step.optimizer
    if turn.stage is Stage.READY:
        iteration.unscale(turn, optimizer, Request(judges_only=True, takes_fp16=True))
    if turn.pending is None:
        # They could not be unscaled before.
        iteration.verdict(turn)
    pending = cast(TensorVerdict, turn.pending)
    fresh = _without_momentum(optimizer)
    # A policy that raises at its minimum needs the CPU, and so does a verdict that may have been replaced, and momentum
    # that is not to be damped if this step is skipped.
    may_be_late = pending.may_be_late and not iteration.reports.wants_each_step
    if fresh and any(group.get("dampening") for group in optimizer.param_groups):
        may_be_late = may_be_late and is_capturing(pending.state.scale.device)
    pending.is_read_later = may_be_late and iteration.live.at_min_scale(pending.state) is None
    if not pending.is_read_later or pending.has_nothing:
        step.verdict = iteration.verdict_for_step(turn, optimizer)
    found, preset = pending.flag(), getattr(optimizer, "grad_scale", None)
    # torch's optimizers do not wait for copies to the CPU.
    home = _CPU if pending.is_for_cpu else found.device
    scale = preset
    if pending.is_scaled:
        scale = moved(pending.state.scale.clone() if preset is None else pending.state.scale * preset, home)
    # Copies, which the optimizer may change.
    with _told(optimizer, scale, moved(found, home).clone()):
        yield
    for parameter in fresh:
        # torch's fused SGD leaves momentum uninitialized if its first step is skipped, and takes it for filled later.
        momentum = _momentum(optimizer, parameter)
        if step.verdict is not None:
            if step.verdict.is_skipped:
                getattr(optimizer, "state", {}).get(parameter, {}).pop("momentum_buffer", None)
        elif momentum is not None:
            momentum.copy_(torch.where(moved(found, momentum.device) != 0, torch.zeros_like(momentum), momentum))
    if pending.is_read_later:
        pending.start_reading()


@contextlib.contextmanager
def _asking_the_scaler(step: Step, iteration: Iteration, turn: Turn) -> Iterator[None]:
    """Pass the scaler on to an optimizer that judges and unscales by asking it."""
    step.kwargs = {**step.kwargs, "grad_scaler": step.replacement}
    with _within_the_step(iteration):
        yield
    step.verdict = iteration.verdict(turn) if turn.is_judged else Verdict(0, 0, False, iteration.live.scale())


@contextlib.contextmanager
def _told(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor) -> Iterator[None]:
    """Set the attributes by which an optimizer unscales and skips by itself."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose momentum the coming step will allocate."""
    groups = [group["params"] for group in optimizer.param_groups if group.get("momentum")]
    return [one for group in groups for one in group if one.grad is not None and _momentum(optimizer, one) is None]


def _momentum(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    # A wrapper need not have a state.
    momentum: Tensor | None = getattr(optimizer, "state", {}).get(parameter, {}).get("momentum_buffer")
    return momentum
