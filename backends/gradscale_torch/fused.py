"""FusedStepper: optimizers that unscale and skip in their own kernels, by torch's ``grad_scale`` and ``found_inf``."""

from __future__ import annotations

from typing import Any, cast

import torch

from gradscale.scaler.iteration import Iteration, Stage, Turn
from gradscale.scaler.stepper import Outcome
from gradscale_torch.state import TensorState
from gradscale_torch.transfers import moved
from gradscale_torch.unscaler import Request
from gradscale_torch.verdicts import TensorVerdict

__all__ = ["FusedStepper", "steps_by_itself"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")


def steps_by_itself(optimizer: Any) -> bool:
    """Tell whether an optimizer skips by itself, as torch's do with ``fused=True``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class FusedStepper:
    """Steps an optimizer always, which skips in its kernel. On a device the host need not know about it."""

    def takes(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG002
        """Tell whether an optimizer skips by itself."""
        return steps_by_itself(optimizer)

    def step(
        self, iteration: Iteration, turn: Turn, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outcome:
        """Step an optimizer with its scale and verdict. No host read where the verdict may come later."""
        live = cast(TensorState, iteration.live)
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
        if pending.is_scaled:
            scale, _ = live.scale_and_inverse(state)
            optimizer.grad_scale = moved(scale.clone() if preset is None else scale * preset, home)
        else:
            optimizer.grad_scale = preset
        # Copies: what an optimizer does to them is its own affair.
        optimizer.found_inf = found.clone()
        fresh = _without_momentum(optimizer)
        try:
            returned = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        _mend_momentum(optimizer, fresh, found)
        if pending.is_read_later:
            pending.start_reading()
        return returned, verdict, 0


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
