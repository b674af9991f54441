"""Torch's fused kernels for unscaling and for the scale's update, and the pure core where a device lacks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gradscale import DynamicScale, ScaleState
from gradscale.core import arithmetic
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidValueError
from gradscale_torch.gradients import Groups
from gradscale_torch.transfers import moved

__all__ = ["combined", "has_fused_update", "inverse_of", "judge", "unscale_in_place", "update_in_place"]

Tensor = torch.Tensor
Found = dict[torch.device, Tensor]
"""By device, a 0-d float32: 1 where a value that is not finite was found, else 0."""

# Device types and dtypes that the kernel has refused.
_without_kernel: set[tuple[str, torch.dtype]] = set()
_without_float64: set[torch.device] = set()
_WITH_FLOAT64 = ("cpu", "cuda")


def inverse_of(scale: Tensor) -> Tensor:
    """Return the reciprocal of a 0-d float32 scale, rounded once; in float64 where the device has it. No host read."""
    if scale.device.type in _WITH_FLOAT64:
        # What fails here is an error of the device, which has nothing to do with the dtype.
        return scale.double().reciprocal().float()
    if scale.device.type != "mps" and scale.device not in _without_float64:
        try:
            return scale.double().reciprocal().float()
        except (RuntimeError, TypeError):
            _without_float64.add(scale.device)
    return scale.reciprocal()


def unscale_in_place(
    groups: Groups, inverse: Tensor, found: Found, zeros: Found | None = None, *, judge_again: bool
) -> None:
    """Multiply tensors by the reciprocal of the scale and note where one is not finite.

    Parameters
    ----------
    groups : dict
        Dense real tensors by device and dtype; overwritten.
    inverse : tensor
        0-d float32 on any device; waited for where tensors are the host's.
    found : dict
        By device; entries are added, or set to 1.
    zeros : dict, optional
        By device, tensors that are 0 and that nobody else has, to be taken for these entries.
    judge_again : bool
        Whether the products must be judged, too: they overflow only if the reciprocal is above 1.

    Raises
    ------
    InvalidValueError
        For a tensor whose elements share memory; others may have been overwritten by then.
    """
    for (device, dtype), tensors in groups.items():
        factor = moved(inverse, device)
        flag = found.get(device)
        if flag is None:
            flag = zeros.pop(device, None) if zeros else None
            flag = found[device] = torch.zeros_like(factor) if flag is None else flag
        _apply(device, dtype, tensors, flag, factor)
        if judge_again:
            _apply(device, dtype, tensors, flag, torch.ones((), dtype=torch.float32, device=device))


def judge(groups: Groups, found: Found) -> None:
    """Note where one of the tensors is not finite; they keep their values."""
    for device, dtype in groups:
        tensors = groups[device, dtype]
        if device not in found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        _apply(device, dtype, tensors, found[device], torch.ones((), dtype=torch.float32, device=device))


def _apply(device: torch.device, dtype: torch.dtype, tensors: list[Tensor], flag: Tensor, factor: Tensor) -> None:
    kind = (device.type, dtype)
    if kind not in _without_kernel:
        try:
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
        except NotImplementedError:
            _without_kernel.add(kind)
        except RuntimeError as error:
            if "not implemented for" not in str(error):
                _explain(tensors, error)
                raise
            _without_kernel.add(kind)
        else:
            return
    _apply_without_kernel(tensors, flag, factor)


def _apply_without_kernel(tensors: list[Tensor], flag: Tensor, factor: Tensor) -> None:
    for tensor in tensors:
        is_narrow = arithmetic.kind_of(tensor) is arithmetic.Kind.HALF
        wide = tensor.float() if is_narrow else tensor
        tensor.copy_(wide * factor.to(wide.dtype))
        finite = torch.isfinite(tensor.float() if is_narrow else tensor).all()
        flag.copy_(torch.where(finite, flag, torch.ones_like(flag)))


def _explain(tensors: Iterable[Tensor], error: RuntimeError) -> None:
    """Raise an error that names the tensor whose elements share memory, if that is what the kernel refused."""
    for index, tensor in enumerate(tensors):
        if torch._debug_has_internal_overlap(tensor) == 1:
            msg = (
                f"gradient {index}, shape {tuple(tensor.shape)}, strides {tensor.stride()}, overlaps itself and cannot "
                f"be unscaled in place: assign a copy (grad.clone(memory_format=torch.contiguous_format))"
            )
            raise InvalidValueError(msg) from error


def combined(found: Mapping[torch.device, Tensor], home: torch.device) -> Tensor:
    """Return what was found on all devices as one 0-d float32, exactly 0 or 1, on one of them. No host read."""
    flags = [moved(flag, home) for flag in found.values()]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=home)
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def has_fused_update(policy: Policy) -> bool:
    """Tell whether torch's kernel and a lower bound are the whole of a policy's rule."""
    return (
        type(policy) is DynamicScale
        and policy.growth_after == "interval"
        and policy.hysteresis == 1
        and policy.tolerance is None
        and policy.max_scale is None
        and policy.at_min == "clamp"
    )


def update_in_place(policy: DynamicScale, state: ScaleState, found: Tensor) -> None:
    """Adapt the scale and the growth tracker in place, as ``policy.update`` does. No host read.

    Parameters
    ----------
    policy : DynamicScale
        One that ``has_fused_update``.
    state : ScaleState
        Overwritten. Its growth tracker is below the growth interval, beyond which the kernel would never grow.
    found : tensor
        0-d float32 on the state's device; anything but 0 is an overflow.
    """
    torch._amp_update_scale_(
        state.scale, state.growth_tracker, found, policy.growth_factor, policy.backoff_factor, policy.growth_interval
    )
    # The kernel goes on into the subnormals, and to 0.
    state.scale.clamp_(min=policy.min_scale)
