"""Steps of fused optimizers, which unscale and skip by themselves: by attributes, or by asking the scaler."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from gradscale.errors import InvalidValueError, warn_caller
from gradscale.scaler.claim import Reason, Verdict
from gradscale.scaler.progress import Stage
from gradscale.scaler.stepper import Step, within_the_step
from gradscale.scaler.verdict import PendingVerdict
from gradscale_torch import devices
from gradscale_torch.devices import CPU, NO_READS, forbid_capture, is_capturing, to_device

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer


def stepping(step: Step) -> contextlib.AbstractContextManager[None] | None:
    """Return a context to step an optimizer in that skips by itself; None for another one."""
    optimizer = step.optimizer
    current = step.iteration.current
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not _is_around_another(optimizer):
        if step.closure is not None:
            # When the closure returns its gradients are unscaled and finite.
            target = _device_of_flags(optimizer, current.adapter.example().device)
            zero = torch.zeros((), dtype=torch.float32, device=target)
            return _fused_attributes(optimizer, getattr(optimizer, "grad_scale", None), zero)
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:
            if step.iteration.parts.clipping.max_norm is not None:
                msg = (
                    f"max_norm= cannot clip for {type(optimizer).__name__}, whose step takes grad_scaler= to unscale "
                    f"by itself: have it read the attributes grad_scale and found_inf, or clip in its own step"
                )
                raise InvalidValueError(msg)
            warn_caller(
                f"{type(optimizer).__name__}.step takes grad_scaler=, which torch has deprecated: have it read the "
                f"attributes grad_scale and found_inf, which scalers set, instead",
                FutureWarning,
            )
            if step.iteration.progress_of(optimizer).refused and not step.iteration.messages.groups_for(optimizer):
                # It may judge by itself, and must not be called.
                return None
            return _grad_scaler_step(step)
        return _fused_step(step)
    if current.state is not None and step.closure is None and not devices.is_on_cpu(current.state.scale):
        forbid_capture(current.state.scale.device, NO_READS)
    return None


def _is_around_another(optimizer: Any) -> bool:
    """Tell whether the attributes that a fused optimizer reads would be set on a wrapper, such as Fabric's."""
    owner = getattr(optimizer.step, "__self__", optimizer)
    return owner is not optimizer or getattr(getattr(optimizer, "optimizer", None), "_step_supports_amp_scaling", False)


def flag_of(pending: PendingVerdict, target: torch.device) -> Tensor:
    """Return whether to skip the step, 0-d float32, exactly 0 or 1; no host read if it is on a device."""
    skips: Tensor | bool = pending.skips()
    if isinstance(skips, bool):
        return torch.full((), float(skips), dtype=torch.float32, device=target)
    if skips.dtype in (torch.float32, torch.bool):
        return skips.float()
    return (skips != 0).float()


@contextlib.contextmanager
def _fused_step(step: Step) -> Iterator[None]:
    """Step an optimizer that skips in its kernel by ``found_inf``. No host read if the verdict may come later."""
    optimizer: Any = step.optimizer
    iteration, progress = step.iteration, step.progress
    pending = _pending_verdict(step)
    findings, state = pending.findings, pending.state
    target = state.scale.device
    fresh = _without_momentum(optimizer)
    is_late = _may_be_late(step, pending, has_fresh_momentum=len(fresh) > 0)
    if not is_late or not (pending.groups or findings.has_gradients or progress.refused):
        if not devices.is_on_cpu(state.scale):
            forbid_capture(target, NO_READS)
        step.verdict = iteration.verdict_for_step(progress, optimizer)
    flag, scale = flag_of(pending, target), getattr(optimizer, "grad_scale", None)
    if findings.is_scaled:
        # Copies, which the optimizer may change.
        divisor = state.scale.clone() if findings.divisor is None else findings.divisor
        scale = divisor if scale is None else divisor * scale
    if _device_of_flags(optimizer, target) != target:
        flag, scale = to_device(flag, CPU), scale if scale is None else to_device(scale, CPU)
    with _fused_attributes(optimizer, scale, flag.clone()):
        try:
            yield
        except BaseException:
            # The kernel may have overwritten some gradients by unscaled ones.
            if findings.is_scaled:
                progress.divide()
            raise
    for parameter in fresh:
        _mend_momentum(optimizer, parameter, step.verdict, flag)
    if is_late:
        pending.start_reading()
    _note_left_scaled(step)


def _pending_verdict(step: Step) -> PendingVerdict:
    """Return the verdict on gradients, which are judged now if they are not yet, and divided by the optimizer."""
    iteration, progress = step.iteration, step.progress
    if progress.stage.is_ready:
        iteration.unscale(progress, step.optimizer, divides=False, then=Stage.STEPPING)
    if progress.pending is None:
        # The gradients could not be unscaled before: this raises.
        iteration.verdict(progress)
    assert progress.pending is not None
    return progress.pending


def _may_be_late(step: Step, pending: PendingVerdict, *, has_fresh_momentum: bool) -> bool:
    """Tell whether the host may read a verdict when it has arrived, since the optimizer acts on it by itself."""
    state, iteration = pending.state, step.iteration
    if pending.override is not None or devices.is_on_cpu(state.scale) or iteration.reports.wants_each_step:
        # A framework may have replaced the verdict.
        return False
    # A policy that raises at its minimum needs the CPU, and so does momentum that is not to be damped if this step is
    # skipped.
    optimizer: Any = step.optimizer
    groups = optimizer.param_groups if has_fresh_momentum else ()
    is_damped = any(group.get("dampening") for group in groups) and not is_capturing(state.scale.device)
    return not is_damped and iteration.current.at_min_scale(state) is None


def _mend_momentum(optimizer: Any, parameter: Tensor, verdict: Verdict | None, flag: Tensor) -> None:
    """Forget the momentum of a first step that was skipped, which torch's fused SGD leaves as it was allocated."""
    momentum = _momentum(optimizer, parameter)
    if verdict is None and momentum is not None:
        momentum.copy_(torch.where(to_device(flag, momentum.device) != 0, torch.zeros_like(momentum), momentum))
    elif verdict is not None and verdict.reason:
        getattr(optimizer, "state", {}).get(parameter, {}).pop("momentum_buffer", None)


def _device_of_flags(optimizer: Any, target: torch.device) -> torch.device:
    """Return where an optimizer's flags belong: on the CPU for parameters there, as nobody waits for copies to it."""
    if target != CPU and True in {one.is_cpu for group in optimizer.param_groups for one in group["params"]}:
        return CPU
    return target


@contextlib.contextmanager
def _grad_scaler_step(step: Step) -> Iterator[None]:
    """Pass the scaler on to an optimizer that judges and unscales by asking it."""
    iteration, progress = step.iteration, step.progress
    step.kwargs = {**step.kwargs, "grad_scaler": step.owner}
    with within_the_step(iteration):
        yield
    if progress.refused:
        iteration.messages.forbid_untold_refusal(progress, step.optimizer)
    if progress.pending is not None and progress.pending.is_begun:
        step.verdict = iteration.verdict(progress)
    else:
        step.verdict = Verdict(Reason.STEPPED, None, 0, 0, iteration.current.scale())
    _note_left_scaled(step)


def _note_left_scaled(step: Step) -> None:
    """Record that the optimizer has unscaled by itself, if so, until its gradients are unscaled by the scaler."""
    adapter: Any = step.iteration.current.adapter
    parameters = adapter.parameters.get(id(step.optimizer))
    pending = step.progress.pending
    if parameters is not None and pending is not None and pending.findings.is_scaled:
        parameters.left_scaled = True


@contextlib.contextmanager
def _fused_attributes(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Set the attributes by which an optimizer unscales and skips by itself."""
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _without_momentum(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters whose momentum the coming step will allocate."""
    return [
        one
        for group in optimizer.param_groups
        if group.get("momentum")
        for one in group["params"]
        if one.grad is not None and _momentum(optimizer, one) is None
    ]


def _momentum(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    # A wrapper need not have a state.
    momentum: Tensor | None = getattr(optimizer, "state", {}).get(parameter, {}).get("momentum_buffer")
    return momentum
