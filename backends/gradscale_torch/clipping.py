"""Clipping by the global norm, in the pass that unscales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

from gradscale import validation
from gradscale.errors import InvalidValueError
from gradscale_torch.gradients import Gathered, Groups, Parameters, group_tensors, local_tensor

__all__ = ["checked_norm", "clip_factor", "clip_unscaled", "require_alone", "scaled_norm"]

Tensor = torch.Tensor

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
# Elements; smaller tensors are joined before their squares are summed, which costs less than a call for each.
_SMALL = 1 << 14


def checked_norm(max_norm: Any) -> float:
    """Return a largest norm as a float: a number that is not negative, infinity included."""
    if isinstance(max_norm, float) and max_norm == float("inf"):
        return max_norm
    return validation.number("max_norm", max_norm, at_least=0.0)


def require_alone(optimizer: Any, groups: Sequence[Any], gathered: Gathered) -> None:
    """Refuse to clip what has no norm here: plain tensors of a group, and duplicates of sparse gradients.

    Raises
    ------
    InvalidValueError
        Saying what to call instead.
    """
    if groups:
        msg = (
            f"unscale_(max_norm=) over a group needs DTensor gradients, whose norm over the ranks is defined; those of "
            f"{type(optimizer).__name__} are plain tensors. Call unscale_(optimizer), and then "
            f"model.clip_grad_norm_(max_norm) for FSDP1, or torch.nn.utils.clip_grad_norm_ where every rank holds the "
            f"same gradients"
        )
        raise InvalidValueError(msg)
    if gathered.judged:
        msg = (
            f"unscale_(max_norm=) needs coalesced sparse gradients, got {len(gathered.judged)} with duplicate indices "
            f"in {type(optimizer).__name__}: assign grad.coalesce() first"
        )
        raise InvalidValueError(msg)


def scaled_norm(groups: Groups, home: torch.device) -> Tensor:
    """Return the 2-norm of all tensors together as a 0-d float32.

    Float32 overflows at tensors whose norm is above 1.8e19; on the host that is noticed, and computed in float64.
    """
    parts = [part for (device, _), tensors in groups.items() for part in _squares(device, tensors)]
    if not parts:
        return torch.zeros((), device=home)
    total = torch.stack([part.to(home, non_blocking=True) for part in parts]).sum()
    if home.type == "cpu" and not torch.isfinite(total).item():
        total = sum(
            (torch.linalg.vector_norm(t, dtype=torch.float64) ** 2 for ts in groups.values() for t in ts),
            total.double() * 0,
        )
    return total.sqrt().float()


def _squares(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    """Return sums of squares that add up to that of all tensors."""
    if device.type != "cpu":
        norms = torch._foreach_norm(
            tensors, 2, dtype=torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        )
        return [torch.stack(norms).square().sum()]
    small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
    large = [tensor for tensor in tensors if tensor.numel() > _SMALL] if len(small) < len(tensors) else []
    joined = [_flatten_dense_tensors(small)] if small else []  # type: ignore[no-untyped-call]
    return [_square(tensor) for tensor in (*joined, *large)]


def _square(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this norm are multiplied by, at most 1; no host read."""
    factor: Tensor = max_norm / (norm + _EPSILON)
    return factor.clamp(max=1.0)


def clip_unscaled(parameters: Parameters, max_norm: float) -> Tensor:
    """Clip gradients that are unscaled already, and return their norm; that of DTensors costs an all-reduce."""
    gradients = [parameter.grad for parameter in parameters.unique if parameter.grad is not None]
    total: Any = torch.nn.utils.get_total_norm(gradients)
    norm: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    if gradients:
        factor = clip_factor(norm, max_norm)
        for (device, _), tensors in group_tensors([local_tensor(gradient) for gradient in gradients]).items():
            torch._foreach_mul_(tensors, factor.to(device))
    return norm
