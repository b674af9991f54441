"""Collecting an optimizer's gradients in one pass: the dense tensors a kernel may overwrite, by device and dtype."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscale.core import gradients
from gradscale.core.aliasing import overlaps_itself
from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "GradientGroups",
    "Groups",
    "Parameters",
    "collect",
    "group_tensors",
    "kernel_view",
    "local_tensor",
    "parameters_of",
    "require_values",
]

Tensor = torch.Tensor
Groups: TypeAlias = "dict[tuple[torch.device, torch.dtype], list[Tensor]]"

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_PLAIN = {Tensor}
_STRIDED = {torch.strided}
_FLOAT32_OF_HOST = torch.device("cpu"), torch.float32
_is_float32_of_host: Callable[[Tensor], bool] = torch.FloatTensor.__instancecheck__
_layout: Callable[[Tensor], torch.layout] = operator.attrgetter("layout")


@dataclasses.dataclass(frozen=True, slots=True)
class Parameters:
    """An optimizer's parameters, and the meshes of those that are DTensors.

    Attributes
    ----------
    listed : gradients.ListedParameters
        As the groups list them; tied ones once.
    meshes : tuple of DeviceMesh
        Over which gradients are sharded.
    shares_gradients : bool
        Whether one tensor was the gradient of two of them when they were met first.
    """

    listed: gradients.ListedParameters
    meshes: tuple[DeviceMesh, ...]
    shares_gradients: bool = False

    @property
    def unique(self) -> list[Tensor]:
        """Each parameter once."""
        return self.listed.unique


@dataclasses.dataclass(slots=True)
class GradientGroups:
    """What one pass has found.

    Attributes
    ----------
    groups : dict
        By device and dtype, the dense tensors that hold the gradients' values, to be overwritten.
    uncoalesced : list of tensors
        Sparse gradients with duplicate indices, whose sums must be judged once they are unscaled.
    """

    groups: Groups
    uncoalesced: list[Tensor]


def parameters_of(optimizer: Any) -> Parameters:
    """Return an optimizer's parameters.

    Raises
    ------
    InvalidTypeError
        When it has no ``param_groups``, or a parameter is no tensor.
    """
    try:
        listed = gradients.ListedParameters(group["params"] for group in optimizer.param_groups)
    except Exception as error:
        msg = (
            f"an optimizer must have param_groups, dicts with a list of 'params', got {shown(optimizer)} of type "
            f"{type(optimizer).__name__}"
        )
        raise InvalidTypeError(msg) from error
    for parameter in listed.unique:
        if not isinstance(parameter, Tensor):
            msg = (
                f"expected param to be torch.Tensor, got {type(parameter).__name__}: {shown(parameter)} in the "
                f"param_groups of {type(optimizer).__name__}; pass it model.parameters() or other tensors"
            )
            raise InvalidTypeError(msg)
    meshes = {
        parameter.device_mesh: None
        for parameter in listed.unique
        if type(parameter) not in (Tensor, torch.nn.Parameter) and hasattr(parameter, "device_mesh")
    }
    found = [parameter.grad for parameter in listed.unique if parameter.grad is not None]
    for index, gradient in enumerate(found):
        _require_apart(index, gradient)
    shares_gradients = len(set(map(id, found))) < len(found)
    return Parameters(listed, tuple(meshes), shares_gradients)


def _require_apart(index: int, gradient: Tensor) -> None:
    """Refuse a gradient in which elements share memory; looked for once."""
    if gradient.layout != torch.strided or gradient.is_contiguous():
        return
    local = local_tensor(gradient)
    if overlaps_itself(local.shape, local.stride()):
        msg = (
            f"gradient {index}, shape {tuple(local.shape)}, strides {local.stride()}, overlaps itself and cannot "
            f"be unscaled in place: assign a copy (grad.clone(memory_format=torch.contiguous_format))"
        )
        raise InvalidValueError(msg)


def require_values(groups: Groups) -> None:
    """Refuse tensors of the meta device, which have no values to judge.

    Raises
    ------
    InvalidTypeError
        When there is one.
    """
    for (device, dtype), tensors in groups.items():
        if device.type == "meta":
            msg = (
                f"gradients must have values, got {len(tensors)} of {dtype} on torch's meta device: materialize the "
                f"model (model.to_empty(device=...)) and load its weights first"
            )
            raise InvalidTypeError(msg)


def collect(parameters: Parameters, *, allow_fp16: bool) -> GradientGroups:
    """Return the tensors that hold the gradients of parameters.

    Parameters
    ----------
    parameters : Parameters
        Up to date.
    allow_fp16 : bool
        Whether gradients may be float16. Sparse ones are then coalesced, which replaces ``.grad``.

    Returns
    -------
    GradientGroups
        Integer gradients are left out. No host read, but for sparse gradients on a device.

    Raises
    ------
    InvalidValueError
        For float16 gradients that are not allowed; nothing has been modified.
    """
    tensors = [gradient for parameter in parameters.listed.unique if (gradient := parameter.grad) is not None]
    if parameters.shares_gradients:
        tensors = list({id(gradient): gradient for gradient in tensors}.values())
    # Thousands of plain gradients are told by their few types and layouts; dense float32 ones of the host at once.
    if set(map(type, tensors)) <= _PLAIN:
        if tensors and all(map(_is_float32_of_host, tensors)):
            return GradientGroups({_FLOAT32_OF_HOST: tensors}, [])
        if set(map(_layout, tensors)) <= _STRIDED:
            groups = group_tensors(tensors)
            if all(dtype.is_floating_point for _, dtype in groups):
                _check_dtypes((dtype for _, dtype in groups), allow_fp16)
                require_values(groups)
                return GradientGroups(groups, [])
    tensors = [gradient for gradient in tensors if gradient.dtype.is_floating_point or gradient.dtype.is_complex]
    _check_dtypes((gradient.dtype for gradient in tensors), allow_fp16)
    chosen, uncoalesced = [], []
    met: set[int] = set()
    for parameter in parameters.unique:
        gradient = parameter.grad
        if gradient is None or id(gradient) in met:
            continue
        met.add(id(gradient))
        if not (gradient.dtype.is_floating_point or gradient.dtype.is_complex):
            continue
        if gradient.layout == torch.sparse_coo and not gradient.is_coalesced():
            if gradient.dtype is torch.float16:
                # The optimizer would sum the duplicates in float16, where they overflow easily.
                gradient = parameter.grad = gradient.to(torch.float32).coalesce().to(torch.float16)
            else:
                uncoalesced.append(gradient)
        chosen.append(kernel_view(gradient))
    groups = group_tensors(chosen)
    require_values(groups)
    return GradientGroups(groups, uncoalesced)


def _check_dtypes(dtypes: Any, allow_fp16: bool) -> None:
    if not allow_fp16 and torch.float16 in dtypes:
        msg = (
            "Attempting to unscale FP16 gradients. Keep the weights in float32 and let autocast choose float16 "
            "(torch's advice), or construct the scaler with allow_fp16_grads=True"
        )
        raise InvalidValueError(msg)


def group_tensors(tensors: Sequence[Tensor]) -> Groups:
    """Return tensors by device and dtype."""
    if not tensors:
        return {}
    grouped = _group_tensors_by_device_and_dtype([list(tensors)])
    return {key: lists[0] for key, (lists, _) in grouped.items()}  # type: ignore[misc]


def kernel_view(gradient: Tensor) -> Tensor:
    """Return a dense real tensor that shares its memory with the values of a gradient."""
    tensor = local_tensor(gradient)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    if tensor.dtype.is_complex:
        # The conjugate of a lazily conjugated tensor is its memory as it stands, and a real factor commutes with it.
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, complete; any other tensor as it is."""
    if type(tensor) is Tensor or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local
