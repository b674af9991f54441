"""Clipping by the global norm, in the pass that unscales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import _flatten_dense_tensors

from gradscale.errors import InvalidValueError
from gradscale_torch.gradients import GradientGroups, Groups, Parameters, group_tensors, kernel_view, local_tensor
from gradscale_torch.transfers import moved

if TYPE_CHECKING:
    from gradscale_torch.collectives import TorchCollectives

__all__ = ["clip_factor", "clip_unscaled", "global_norm", "require_norm"]

Tensor = torch.Tensor

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
# Elements; smaller tensors are joined before their squares are summed, which costs less than a call for each.
_SMALL = 1 << 14


def require_norm(optimizer: Any, parameters: Parameters, gradients: GradientGroups, *, is_shared: bool) -> None:
    """Refuse gradients whose norm is not defined here, before anything is modified.

    ``is_shared`` says that the scaler was given groups.

    Raises
    ------
    InvalidValueError
        For plain tensors over a group, which may be parts or copies; DTensors beside plain tensors, of two meshes or
        not yet reduced; and sparse gradients with duplicate indices. It says what to call instead.
    """
    name = type(optimizer).__name__
    if is_shared and not parameters.meshes:
        msg = (
            f"unscale_(max_norm=) over a group needs DTensor gradients, whose norm over the ranks is defined; those of "
            f"{name} are plain tensors. Call unscale_(optimizer), and then model.clip_grad_norm_(max_norm) for FSDP1, "
            f"or torch.nn.utils.clip_grad_norm_ where every rank holds the same gradients"
        )
        raise InvalidValueError(msg)
    sharded = [parameter for parameter in parameters.unique if hasattr(parameter, "device_mesh")]
    is_mixed = parameters.meshes and len(sharded) < len(parameters.unique)
    if is_mixed or len(parameters.meshes) > 1:
        what = "DTensors beside plain tensors" if is_mixed else f"DTensors of {len(parameters.meshes)} meshes"
        msg = (
            f"unscale_(max_norm=) needs the parameters of one mesh, got {what} in {name}: call unscale_(optimizer), "
            f"and clip each kind with torch.nn.utils.clip_grad_norm_"
        )
        raise InvalidValueError(msg)
    if any(placement.is_partial() for one in sharded if one.grad is not None for placement in _placements(one.grad)):
        msg = f"unscale_(max_norm=) needs reduced gradients, got DTensors with Partial placements in {name}"
        raise InvalidValueError(msg)
    if gradients.uncoalesced:
        msg = (
            f"unscale_(max_norm=) needs coalesced sparse gradients, got {len(gradients.uncoalesced)} with duplicate "
            f"indices in {name}: assign grad.coalesce() first"
        )
        raise InvalidValueError(msg)


def _placements(tensor: Any) -> Sequence[Any]:
    placements: Sequence[Any] = tensor.placements
    return placements


def global_norm(
    parameters: Parameters, tensors: Groups, home: torch.device, collectives: TorchCollectives | None
) -> Tensor:
    """Return the 2-norm of all gradients together, over the mesh of DTensors.

    Parameters
    ----------
    parameters : Parameters
        Whose gradients they are.
    tensors : dict
        This rank's dense tensors, by device and dtype.
    home : torch.device
        Where the norm is wanted.
    collectives : TorchCollectives or None
        Of the mesh: one all-reduce of a float, on every rank, also on one without gradients. Waited for.

    Returns
    -------
    tensor
        0-d, float32 or, where float32 could overflow, float64.
    """
    if collectives is None:
        return _sum_of_squares(tensors, home).sqrt()
    counted = [
        kernel_view(one.grad) for one in parameters.unique if one.grad is not None and _is_counted_here(one.grad)
    ]
    return collectives.sum(_sum_of_squares(group_tensors(counted), home).double()).sqrt()


def _is_counted_here(gradient: Any) -> bool:
    """Tell whether this rank's part counts: of copies, that of the first rank of each replicated dimension does."""
    coordinate = gradient.device_mesh.get_coordinate()
    return all(
        place == 0 for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate()
    )


def _sum_of_squares(groups: Groups, home: torch.device) -> Tensor:
    parts = [_sum_of_one_device(device, tensors) for (device, _), tensors in groups.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=home)
    return torch.stack([moved(part, home, dtype=_widest(home)) for part in parts]).sum()


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sum_of_one_device(device: torch.device, tensors: list[Tensor]) -> Tensor:
    if device.type != "cpu":
        # The kernel waits for memory, so that float64 costs nothing where there is float64.
        norms = torch._foreach_norm(tensors, 2, dtype=_widest(device))
        return torch.stack(norms).square().sum()
    total = torch.stack([square.double() for square in _squares(tensors)]).sum()
    if torch.isfinite(total).item():
        return total
    # Float32 overflows at tensors whose norm is above 1.8e19.
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in tensors]).sum()


def _squares(tensors: list[Tensor]) -> list[Tensor]:
    """Return sums of squares that add up to that of all tensors of the host."""
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


def clip_unscaled(
    parameters: Parameters, gradients: GradientGroups, max_norm: float, collectives: TorchCollectives | None
) -> Tensor:
    """Clip gradients that need no unscaling, in place, and return their norm as a 0-d float32."""
    home = next((device for device, _ in gradients.groups), torch.device("cpu"))
    norm = global_norm(parameters, gradients.groups, home, collectives)
    factor = clip_factor(norm, max_norm)
    for (device, dtype), tensors in gradients.groups.items():
        wide = torch.promote_types(dtype, torch.float32)
        torch._foreach_mul_([local_tensor(tensor) for tensor in tensors], moved(factor, device, dtype=wide))
    return norm.float()
