"""Momentum that torch's fused SGD leaves uninitialized when its first step is skipped, and takes for filled later."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["mend_momentum", "without_momentum"]

Tensor = torch.Tensor


def without_momentum(optimizer: Any) -> list[Tensor]:
    """Return the parameters whose momentum the coming step will allocate."""
    groups = optimizer.param_groups
    if not any(group.get("momentum") for group in groups):
        return []
    if len(optimizer.state) == sum(len(group["params"]) for group in groups):
        return []
    listed = (parameter for group in groups if group.get("momentum") for parameter in group["params"])
    return [one for one in listed if one.grad is not None and _momentum(optimizer, one) is None]


def mend_momentum(optimizer: Any, fresh: list[Tensor], found: Tensor) -> None:
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
            skipped = found.to(momentum.device, non_blocking=True) != 0
            momentum.copy_(torch.where(skipped, torch.zeros_like(momentum), momentum))


def _momentum(optimizer: Any, parameter: Tensor) -> Tensor | None:
    momentum: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return momentum
