"""Torch's fused kernels, to unscale, to judge and to sum up a norm; and the core's functions without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch._utils import _flatten_dense_tensors
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscale.core import arithmetic
from gradscale.errors import SharedMemoryError
from gradscale_torch.devices import Flags, moved

__all__ = [
    "Groups",
    "clip_factor",
    "count_nonfinite",
    "group_tensors",
    "inverse_of",
    "judge",
    "judge_quotients",
    "overlap",
    "sum_of_squares",
    "unscale_in_place",
]

Tensor = torch.Tensor
Groups: TypeAlias = "dict[tuple[torch.device, torch.dtype], list[Tensor]]"
"""Dense tensors by device and dtype."""

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
# Elements; smaller tensors are joined before their squares are summed, which costs less than a call for each.
_SMALL = 1 << 14


def group_tensors(tensors: Sequence[Tensor]) -> Groups:
    """Return tensors by device and dtype."""
    if not tensors:
        return {}
    grouped = _group_tensors_by_device_and_dtype([list(tensors)])
    return {key: lists[0] for key, (lists, _) in grouped.items()}  # type: ignore[misc]


def inverse_of(scale: Tensor) -> Tensor:
    """Return the reciprocal of a 0-d float32 scale, rounded once; in float64 if the device has it. No host read."""
    if scale.device.type not in ("cpu", "mps"):
        try:
            return scale.double().reciprocal().float()
        except (RuntimeError, TypeError):
            pass
    # Where IEEE division is rounded once, too, or there is no float64.
    return scale.reciprocal()


def unscale_in_place(groups: Groups, factor: Tensor, flags: Flags, *, judge_again: bool) -> None:
    """Multiply dense real tensors by the reciprocal of the scale, 0-d float32 on any device, and note bad ones.

    The products must be judged again if the reciprocal may be above 1, so that they may overflow.
    """
    for (device, dtype), tensors in groups.items():
        _apply(device, tensors, flags, moved(factor, device))
        if judge_again:
            # To read them is half of what the kernel does; on the CPU it is slower, and not there for float8.
            is_read = device.type != "cpu" and dtype.itemsize > 1
            _apply(device, _largest(tensors) if is_read else tensors, flags, torch.ones_like(flags[device]))


def judge(groups: Groups, flags: Flags) -> None:
    """Set the flags of devices with a tensor that is not finite; the tensors keep their values."""
    for (device, _), tensors in groups.items():
        _apply(device, tensors, flags, torch.ones((), dtype=torch.float32, device=device))


def judge_quotients(groups: Groups, scale: Tensor, flags: Flags) -> None:
    """Set the flags of devices with a finite tensor that overflows when it is divided by the scale."""
    for (device, dtype), tensors in groups.items():
        for largest in _largest(tensors):
            wide = largest.to(torch.promote_types(dtype, torch.float32))
            _apply(device, [(wide / moved(scale, device)).to(dtype)], flags, torch.ones_like(flags[device]))


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor, NaN if one is, as one 1-d tensor; none if all tensors are empty."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    return [torch.stack(torch._foreach_norm(filled, math.inf))] if filled else []


def _apply(device: torch.device, tensors: list[Tensor], flags: Flags, factor: Tensor) -> None:
    flag = flags.get(device)
    if flag is None:
        flag = flags[device] = torch.zeros_like(factor)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "not implemented for" not in str(error):
            for index, tensor in enumerate(tensors):
                if torch._debug_has_internal_overlap(tensor) == 1:
                    raise overlap(index, tensor) from error
            raise
        _apply_without_kernel(tensors, flag, factor)


def _apply_without_kernel(tensors: list[Tensor], flag: Tensor, factor: Tensor) -> None:
    for tensor in tensors:
        is_narrow = arithmetic.kind_of(tensor) is arithmetic.Kind.HALF
        wide = tensor.float() if is_narrow else tensor
        tensor.copy_(wide * factor.to(wide.dtype))
        finite = torch.isfinite(tensor.float() if is_narrow else tensor).all()
        flag.copy_(torch.where(finite, flag, torch.ones_like(flag)))


def overlap(index: int, tensor: Tensor) -> SharedMemoryError:
    """Return the error for a gradient whose elements share memory."""
    return SharedMemoryError(
        f"gradient {index}, shape {tuple(tensor.shape)}, strides {tensor.stride()}, overlaps itself and cannot "
        f"be unscaled in place: assign a copy (grad.clone(memory_format=torch.contiguous_format))"
    )


def count_nonfinite(flags: Flags, groups: Groups) -> int | None:
    """Return how many gradients are not finite; None unless all of them are the CPU's."""
    is_bad = False
    for device, flag in flags.items():
        if device.type != "cpu":
            return None
        is_bad = is_bad or flag.item() != 0
    if not is_bad:
        return 0
    # Duplicates of a sparse gradient may be finite one by one.
    return max(1, sum(not torch.isfinite(one).all().item() for tensors in groups.values() for one in tensors))


def sum_of_squares(groups: Groups, home: torch.device) -> Tensor:
    """Return the square of the 2-norm of all tensors together, 0-d, float32 or, where that could overflow, float64."""
    parts = [_sum_of_one_device(device, tensors) for (device, _), tensors in groups.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=home)
    return torch.stack([moved(part, home, dtype=_widest(home)) for part in parts]).sum()


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sum_of_one_device(device: torch.device, tensors: list[Tensor]) -> Tensor:
    if device.type == "cpu":
        small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
        joined = [_flatten_dense_tensors(small)] if small else []  # type: ignore[no-untyped-call]
        joined += [tensor for tensor in tensors if tensor.numel() > _SMALL]
        total = torch.stack([_square(tensor).double() for tensor in joined]).sum()
        if torch.isfinite(total).item():
            return total
        # Float32 overflows at tensors whose norm is above 1.8e19.
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=_widest(device))).square().sum()


def _square(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        # More exact than torch's norm in float32.
        flat = tensor.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of this norm, at most 1; no host read."""
    factor: Tensor = max_norm / (norm + _EPSILON)
    return factor.clamp(max=1.0)
