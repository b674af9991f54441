"""How an optimizer is stepped: what comes before and after the call of ``optimizer.step``, which a compiler has to see.

Each kind of step is a generator that yields where the optimizer is to be stepped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch

import gradscale
from gradscale.core.identity import IdentityMap
from gradscale.core.vector import Verdict
from gradscale.scaler.iteration import Stage, Turn
from gradscale.scaler.stepper import evaluating, find_closure
from gradscale_torch.hosts import untraced, warn_caller
from gradscale_torch.state import TensorState
from gradscale_torch.unscaler import Request
from gradscale_torch.verdicts import NO_READS, TensorVerdict, moved

__all__ = ["Step"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")


class Step:
    """A step that is under way, to be entered before the optimizer is stepped, and left after it.

    Parameters
    ----------
    replacement : GradScaler
        For optimizers that ask it, and that holds the scaler.
    optimizer : torch.optim.Optimizer
        Which is stepped.
    args, kwargs : tuple, dict
        Of the user.

    Attributes
    ----------
    is_made : bool
        Whether the optimizer is to be stepped.
    args, kwargs : tuple, dict
        What it is stepped with.
    returned : object
        What it has returned, to be set.
    """

    __slots__ = ("_way", "args", "is_made", "kwargs", "returned")

    @untraced
    def __init__(
        self,
        replacement: Any,
        scaler: gradscale.GradScaler,
        optimizer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.is_made, self.returned = True, None
        if not scaler.is_enabled():
            self._way = _without_scaling(scaler, optimizer)
        elif (args or kwargs) and find_closure(args, kwargs) is not None:
            self._way = _with_closure(self, scaler, optimizer)
        elif not getattr(optimizer, "_step_supports_amp_scaling", False):
            self._way = _plainly(self, scaler, optimizer)
        elif _takes_the_scaler(optimizer):
            self._way = _with_the_scaler(self, replacement, scaler, optimizer)
        else:
            self._way = _by_kernel(scaler, optimizer)

    @untraced
    def __enter__(self) -> Step:
        next(self._way)
        return self

    @untraced
    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        try:
            if error is None:
                next(self._way)
            else:
                self._way.throw(error)
        except StopIteration:
            return True
        return False


@untraced
def _without_scaling(scaler: gradscale.GradScaler, optimizer: Any) -> Iterator[None]:
    scaler.end_step(optimizer)
    yield


@untraced
def _plainly(step: Step, scaler: gradscale.GradScaler, optimizer: Any) -> Iterator[None]:
    """Leave the step out where a gradient is not finite. One host read."""
    iteration = scaler.iteration
    cast(TensorState, iteration.live).refuse_capture(NO_READS)
    turn = iteration.begin_step(optimizer)
    verdict = iteration.verdict_for_step(turn, optimizer)
    step.is_made = not verdict.nonfinite
    yield
    scaler.end_step(optimizer, turn, verdict)


@untraced
def _with_closure(step: Step, scaler: gradscale.GradScaler, optimizer: Any) -> Iterator[None]:
    """Wrap the closure. One host read for each evaluation."""
    turn = scaler.iteration.begin_step(optimizer)
    with evaluating(scaler.iteration, turn, optimizer, step.args, step.kwargs) as evaluation:
        step.args, step.kwargs = evaluation.args, evaluation.kwargs
        yield
    scaler.end_step(optimizer, turn, evaluation.verdict, evaluation.retries)


@untraced
def _by_kernel(scaler: gradscale.GradScaler, optimizer: Any) -> Iterator[None]:
    """Step an optimizer always, which skips in its kernel by ``found_inf``. No host read where it may come later."""
    iteration = scaler.iteration
    live = cast(TensorState, iteration.live)
    turn = iteration.begin_step(optimizer)
    if turn.stage is Stage.READY:
        # The optimizer's kernel would divide by a scale below 1 without a look at the result.
        unscales = live.may_be_below_one(iteration.in_force()) if live.is_made else True
        iteration.unscale(turn, optimizer, Request(unscales=unscales, takes_fp16=True))
    if turn.pending is None:
        # They could not be unscaled before.
        iteration.verdict(turn)
    pending = cast(TensorVerdict, turn.pending)
    state = iteration.in_force()
    # A policy that raises at its minimum needs the host, and so does a verdict that may have been replaced.
    may_be_late = pending.may_be_late and not turn.reads_at_once
    pending.is_read_later = may_be_late and live.at_min_scale(state) is None
    verdict = None if pending.is_read_later else iteration.verdict(turn)
    preset = getattr(optimizer, "grad_scale", None)
    found = pending.flag()
    # torch's optimizers do not wait for what they bring to the host.
    home = _CPU if pending.is_for_host else found.device
    found = moved(found, home)
    scale = preset
    if pending.is_scaled:
        scale = moved(state.scale.clone() if preset is None else state.scale * preset, home)
    # Copies: what an optimizer does to them is its own affair.
    optimizer.grad_scale, optimizer.found_inf = scale, found.clone()
    fresh = _without_momentum(optimizer)
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    _mend_momentum(optimizer, fresh, found)
    if pending.is_read_later:
        pending.start_reading()
    scaler.end_step(optimizer, turn, verdict)


# Whether an optimizer's step takes grad_scaler=.
_asking: IdentityMap[bool] = IdentityMap()


def _takes_the_scaler(optimizer: Any) -> bool:
    if optimizer not in _asking:
        _asking.put(optimizer, "grad_scaler" in inspect.signature(optimizer.step).parameters)
    return _asking[optimizer]


@untraced
def _with_the_scaler(
    step: Step, replacement: Any, scaler: gradscale.GradScaler, optimizer: Any
) -> Iterator[None]:
    """Pass the scaler on to an optimizer that judges and unscales by asking it."""
    iteration = scaler.iteration
    turn: Turn = iteration.begin_step(optimizer)
    warn_caller(
        f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: have it read the "
        f"attributes grad_scale and found_inf, which scalers set, instead",
        FutureWarning,
    )
    step.kwargs = {**step.kwargs, "grad_scaler": replacement}
    yield
    if turn.pending is not None:
        # It may have told its own verdict.
        cast(TensorVerdict, turn.pending).accept()
    verdict = iteration.verdict(turn) if turn.is_judged else Verdict(0, 0, False, scaler.get_scale())
    scaler.end_step(optimizer, turn, verdict)


# torch's fused SGD leaves momentum uninitialized when its first step is skipped, and takes it for filled later.


def _without_momentum(optimizer: Any) -> list[Tensor]:
    """Return the parameters whose momentum the coming step will allocate."""
    groups = optimizer.param_groups
    if not any(group.get("momentum") for group in groups):
        return []
    if len(optimizer.state) == sum(len(group["params"]) for group in groups):
        return []
    listed = (parameter for group in groups if group.get("momentum") for parameter in group["params"])
    return [one for one in listed if one.grad is not None and _momentum(optimizer, one) is None]


def _mend_momentum(optimizer: Any, fresh: list[Tensor], found: Tensor) -> None:
    """Set momentum that a skipped step has allocated to zero, of which the next step makes what a first one would.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        After its step.
    fresh : list of tensors
        The parameters that had none before.
    found : tensor
        0-d float32, 1 if the step was skipped; no host read.
    """
    for parameter in fresh:
        momentum = _momentum(optimizer, parameter)
        if momentum is not None:
            skipped = moved(found, momentum.device) != 0
            momentum.copy_(torch.where(skipped, torch.zeros_like(momentum), momentum))


def _momentum(optimizer: Any, parameter: Tensor) -> Tensor | None:
    momentum: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return momentum
