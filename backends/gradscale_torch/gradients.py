"""An optimizer's gradients, collected, unscaled, clipped and judged by torch's fused kernels; DTensors, sparse ones."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscale.core import aliasing, gradients
from gradscale.core.gradients import Found, Home, Listed, Request
from gradscale.core.protocols import Collectives, ScaleState
from gradscale.core.validation import SMALLEST_NORMAL
from gradscale.errors import InvalidTypeError, InvalidValueError, SharedMemoryError, shown
from gradscale_torch.devices import CPU, Flags, combined, is_capturing, is_on_cpu, moved
from gradscale_torch.groups import TorchCollectives

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer
Groups: TypeAlias = "dict[tuple[torch.device, torch.dtype], list[Tensor]]"
"""Dense tensors by device and dtype."""

_ONE = torch.ones((), dtype=torch.float32, device=CPU)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
# Elements; smaller tensors are joined before their squares are summed, which costs less than a call for each.
_SMALL = 1 << 14
# A sum of squares above it has lost nothing to those that float32 has no number for.
_SMALLEST_SQUARE = 1e-20
# As many on a device, whose memory joined ones take once more.
_JOINED = 1 << 16


class Settings(NamedTuple):
    """The arguments of one of torch's scalers."""

    device: torch.device | str | int | None
    """The one that is trained on."""
    allows_fp16: bool
    """Whether gradients may be float16."""
    is_sharded: bool
    """Whether to compute as torch's ShardedGradScaler; a half-precision loss then comes back in its dtype, too."""
    timeout: float
    """Seconds to wait for the ranks of a mesh."""


@dataclasses.dataclass(slots=True)
class Parameters:
    """An optimizer's parameters, kept from call to call; whether its last step was left to unscale by itself."""

    listed: gradients.ListedParameters
    meshes: tuple[DeviceMesh, ...]
    left_scaled: bool = False


class TensorGradients:
    """An optimizer's gradients on their way. Collecting coalesces sparse float16 ones, and modifies no others."""

    is_touched = False

    def __init__(
        self, settings: Settings, optimizer: Optimizer, listed: Listed, request: Request, *, is_replayed: bool
    ) -> None:
        parameters: Parameters | None = listed.get(id(optimizer))
        if parameters is None or not parameters.listed.are_those_of(optimizer):
            parameters = _parameters_of(optimizer)
            listed.put(optimizer, parameters)
        self._settings, self._optimizer, self._parameters, self._request = settings, optimizer, parameters, request
        self._is_replayed = is_replayed
        # The tensors of values, to be overwritten; and the sparse gradients with duplicate indices, whose sums must be
        # judged once they are unscaled. Optimizers that unscale by themselves, and clipping alone, take float16.
        takes_fp16 = settings.allows_fp16 or not (request.divides and request.are_scaled)
        self._tensors, self._uncoalesced = _collect(parameters, allow_fp16=takes_fp16)

    @property
    def like(self) -> Tensor:
        """A gradient, on whose device the state belongs; one of the device that is trained on if they are elsewhere.

        The loss of other ranks is there, also if all gradients are on the CPU, so that messages go the same way.
        """
        first, home = next(iter(self._tensors.values()), None), self._settings.device
        trains_on_cpu = home is None or (not isinstance(home, int) and torch.device(home).type == "cpu")
        if first is not None and (trains_on_cpu or not first[0].is_cpu):
            return first[0]
        parameters = self._parameters.listed.unique
        return torch.zeros((), device=parameters[0].device if home is None and parameters else home)

    @property
    def groups(self) -> Sequence[Collectives]:
        """The meshes of DTensor parameters."""
        meshes = self._parameters.meshes
        return groups_over(meshes, self._settings.timeout) if meshes else ()

    def unscale(self, live: Home, state: ScaleState) -> Found:
        """Divide them by the scale of a state, clip and judge them; or judge them alone."""
        request, tensors, scale = self._request, self._tensors, state.scale
        if request.max_norm is not None:
            self._require_whole()
        if request.divides:
            self.is_touched, self._parameters.left_scaled = True, False
        flags: Flags = {}
        norm = None
        (number,) = live.backend.peek((scale,)) or (None,)
        is_one, may_be_below_one = number == 1.0, number is None or number < 1.0
        if number is None and not self._is_replayed and not is_capturing(scale.device):
            is_one, may_be_below_one = live.is_one(state), live.floor(state) < 1.0
        with torch.no_grad():
            if not request.divides:
                flag_nonfinite(tensors, flags)
                if may_be_below_one and request.are_scaled:
                    # An optimizer's kernel divides without a look at the result.
                    flag_quotients(tensors, scale, flags)
            elif is_one and request.max_norm is None:
                flag_nonfinite(tensors, flags, scale)
            else:
                factor = inverse_of(scale) if number is None else _inverse_of_number(number)
                if request.max_norm is not None:
                    factor, norm = self._clipped(factor, request.max_norm, flags)
                # The norm has judged them, none of which grows; but on a mesh copies count on one of their ranks alone.
                flagged = norm is not None and not may_be_below_one and not self._parameters.meshes
                unscale_in_place(tensors, factor, flags, again=may_be_below_one, flagged=flagged)
            if self._uncoalesced:
                flag_sums(self._uncoalesced, flags)
            count = count_nonfinite(flags, tensors)
        # A fused optimizer must not divide again what is unscaled.
        found = combined(flags, scale.device) if count is None else count
        return Found(found, norm, len(tensors) > 0, request.are_scaled and not request.divides, flags, number)

    @torch.no_grad()
    def clip(self, one: object) -> Tensor:  # noqa: ARG002
        """Clip gradients that are not scaled, and return their norm, 0-d float32."""
        max_norm = self._request.max_norm
        assert max_norm is not None
        self._require_whole()
        norm = self._squares(next((device for device, _ in self._tensors), CPU))[0].sqrt()
        factor = clip_factor(norm, max_norm)
        for (device, _), tensors in self._tensors.items():
            _multiply(tensors, moved(factor, device))
        return norm.float()

    def _clipped(self, inverse: Tensor, max_norm: float, flags: Flags) -> tuple[Tensor, Tensor]:
        """Return the factor that unscales and clips at once, and the norm."""
        exchange = self._request.exchange
        # On a device the CPU waits for nobody, so that the norm is not announced.
        if exchange is not None and is_on_cpu(inverse):
            exchange.announce(inverse)
        squares, own = self._squares(inverse.device)
        norm = squares.sqrt() * inverse
        # As it is returned, in float32.
        is_finite = norm.float() < math.inf
        # A norm that is not finite clips nothing: gradients that are finite stay so, and those that are not are named.
        wanted = torch.where(is_finite, inverse * clip_factor(norm, max_norm), inverse)
        # A norm that overflows, or a factor that loses bits, is an overflow, too. If another rank's part makes the norm
        # inf or NaN, that rank reports it: it overflows only if some part is above its share of the largest number.
        is_bad = torch.logical_not(is_finite)
        if exchange is not None:
            share = own.sqrt() * inverse * math.sqrt(2 * exchange.size)
            is_bad &= torch.logical_not(share.float() < math.inf)
        if max_norm > 0:
            is_bad |= wanted < SMALLEST_NORMAL
        flags[inverse.device] = is_bad.float()
        return wanted.float(), norm.float()

    def _squares(self, home: torch.device) -> tuple[Tensor, Tensor]:
        """Return the squared norm of all gradients, by an all-reduce for DTensors, and that of this rank's."""
        mesh = groups_over(self._parameters.meshes, self._settings.timeout)
        if not mesh:
            own = sum_of_squares(self._tensors, home)
            return own, own
        counted = [
            kernel_view(one.grad)
            for one in self._parameters.listed.unique
            if one.grad is not None and _is_counted_here(one.grad)
        ]
        own = sum_of_squares(group_tensors(counted), home).double()
        return mesh[0].sum(own), own

    def _require_whole(self) -> None:
        """Raise InvalidValueError for gradients that are sums still to be made, before anything is modified."""
        name = type(self._optimizer).__name__
        sharded: list[Any] = [one for one in self._parameters.listed.unique if hasattr(one, "device_mesh")]
        if any(placement.is_partial() for one in sharded if one.grad is not None for placement in one.grad.placements):
            msg = f"unscale_(max_norm=) needs reduced gradients, got DTensors with Partial placements in {name}"
            raise InvalidValueError(msg)
        if self._uncoalesced:
            msg = (
                f"unscale_(max_norm=) needs coalesced sparse gradients, got {len(self._uncoalesced)} with duplicate "
                f"indices in {name}: assign grad.coalesce() first"
            )
            raise InvalidValueError(msg)


def require_norm(optimizer: Optimizer, *, is_alone: bool) -> tuple[DeviceMesh, ...]:
    """Return the mesh over the parameters' ranks; InvalidValueError without one such, on every rank alike."""
    parameters = _listed(optimizer).unique
    name, meshes = type(optimizer).__name__, meshes_of(parameters)
    if not is_alone and not meshes:
        msg = (
            f"unscale_(max_norm=) over a group needs DTensor gradients, whose norm over ranks is defined; those of "
            f"{name} are plain tensors. Call unscale_(optimizer), and then model.clip_grad_norm_(max_norm) for "
            f"FSDP1, or torch.nn.utils.clip_grad_norm_ where every rank holds the same gradients"
        )
        raise InvalidValueError(msg)
    is_mixed = meshes and not all(hasattr(one, "device_mesh") for one in parameters)
    if is_mixed or len(meshes) > 1:
        what = "DTensors beside plain tensors" if is_mixed else f"DTensors of {meshes}"
        msg = (
            f"unscale_(max_norm=) needs parameters that are spread over the same ranks, got {what} in {name}: call "
            f"unscale_(optimizer), and clip each kind with torch.nn.utils.clip_grad_norm_"
        )
        raise InvalidValueError(msg)
    return meshes


def _listed(optimizer: Optimizer) -> gradients.ListedParameters:
    if not hasattr(optimizer, "param_groups"):
        raise gradients.no_optimizer(optimizer, "param_groups, dicts with a list of 'params'")
    return gradients.ListedParameters(listed for _, listed in gradients.parameter_lists(optimizer))


def _parameters_of(optimizer: Optimizer) -> Parameters:
    listed = _listed(optimizer)
    for parameter in listed.unique:
        if not isinstance(parameter, Tensor):
            msg = (
                f"expected param to be torch.Tensor, got {type(parameter).__name__}: {shown(parameter)} in the "
                f"param_groups of {type(optimizer).__name__}; pass it model.parameters() or other tensors"
            )
            raise InvalidTypeError(msg)
    found = [parameter.grad for parameter in listed.unique if parameter.grad is not None]
    for index, gradient in enumerate(found):
        if gradient.layout == torch.strided and not gradient.is_contiguous():
            local = local_tensor(gradient)
            if aliasing.overlaps_itself(local.shape, local.stride()):
                raise overlap(index, local)
    return Parameters(listed, meshes_of(listed.unique))


def meshes_of(parameters: Iterable[object]) -> tuple[DeviceMesh, ...]:
    """Return the meshes of DTensors, the largest first, one mesh for all that are over the same ranks.

    So ranks come to one that they share in the same place, also if some hold parameters of smaller ones besides.
    """
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in dict.fromkeys(one.device_mesh for one in parameters if hasattr(one, "device_mesh")):
        by_ranks.setdefault(frozenset(mesh.mesh.flatten().tolist()), mesh)
    return tuple(by_ranks[ranks] for ranks in sorted(by_ranks, key=len, reverse=True))


def groups_over(meshes: Sequence[DeviceMesh], timeout: float) -> Sequence[TorchCollectives]:
    """Return meshes as groups."""
    return [TorchCollectives(mesh, timeout) for mesh in meshes]


def forbid_meta(groups: Groups) -> None:
    """Raise InvalidTypeError for tensors of the meta device, which have no values to judge."""
    for (device, dtype), tensors in groups.items():
        if device.type == "meta":
            msg = (
                f"gradients must have values, got {len(tensors)} of {dtype} on torch's meta device: materialize the "
                f"model (model.to_empty(device=...)) and load its weights first"
            )
            raise InvalidTypeError(msg)


def _collect(parameters: Parameters, *, allow_fp16: bool) -> tuple[Groups, Sequence[Tensor]]:
    """Return the tensors of floating gradients, and sparse ones with duplicate indices: a host read on a device."""
    tensors = [gradient for parameter in parameters.listed.unique if (gradient := parameter.grad) is not None]
    if len(set(map(id, tensors))) < len(tensors):
        # One tensor may be the gradient of two parameters.
        tensors = list({id(gradient): gradient for gradient in tensors}.values())
    # Thousands of plain gradients are recognised by their few types and layouts; dense float32 ones of the CPU at once.
    is_plain = set(map(type, tensors)) <= {Tensor}
    if is_plain and tensors and all(map(torch.FloatTensor.__instancecheck__, tensors)):
        return {(CPU, torch.float32): tensors}, ()
    if is_plain and {one.layout for one in tensors} <= {torch.strided}:
        groups = group_tensors(tensors)
        dtypes = {dtype for _, dtype in groups}
        if all(dtype.is_floating_point for dtype in dtypes):
            _check_dtypes(dtypes, allow_fp16)
            forbid_meta(groups)
            return groups, ()
    owned = {id(one.grad): one for one in reversed(parameters.listed.unique) if one.grad is not None}
    _check_dtypes({one.grad.dtype for one in owned.values() if one.grad is not None}, allow_fp16)
    chosen, uncoalesced = [], []
    for parameter in reversed(owned.values()):
        grad = parameter.grad
        if grad.layout == torch.sparse_coo and not grad.is_coalesced():
            if grad.dtype is torch.float16:
                # The optimizer would sum the duplicates in float16, where they overflow easily.
                summed = grad.to(torch.float32).coalesce().to(torch.float16)
                for one in parameters.listed.unique:
                    if one.grad is grad:
                        one.grad = summed
            else:
                uncoalesced.append(grad)
        chosen.append(kernel_view(parameter.grad))
    groups = group_tensors(chosen)
    forbid_meta(groups)
    return groups, uncoalesced


def _check_dtypes(dtypes: set[torch.dtype], allow_fp16: bool) -> None:
    integral = [dtype for dtype in dtypes if not dtype.is_floating_point and not dtype.is_complex]
    if integral:
        msg = f"gradients must have a floating or complex dtype, got {integral[0]}"
        raise InvalidTypeError(msg)
    if not allow_fp16 and torch.float16 in dtypes:
        msg = (
            "Attempting to unscale FP16 gradients. Keep the weights in float32 and let autocast choose float16 "
            "(torch's advice), or construct the scaler with allow_fp16_grads=True"
        )
        raise InvalidValueError(msg)


def kernel_view(gradient: Tensor) -> Tensor:
    """Return a dense real tensor that shares its memory with the values of a gradient."""
    tensor = local_tensor(gradient)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        # As views of these complex values have no real ones.
        tensor = tensor.values().detach()
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


def values_of(gradient: Tensor) -> Tensor | None:
    """Return the dense tensor of a gradient's values on this rank, duplicates summed up; None if it has none."""
    if gradient.device.type == "meta":
        return None
    with torch.no_grad():
        local = local_tensor(gradient.detach())
        if hasattr(local, "__tensor_flatten__"):
            return _parts_of(local)
        if local.layout == torch.sparse_coo and not local.is_coalesced():
            # float16 is summed in float32, as it is when it is unscaled.
            wide = local.to(torch.float32) if local.dtype is torch.float16 else local
            local = wide.coalesce().to(local.dtype)
        if local.layout == torch.strided:
            return local
        return local.values()


def _parts_of(tensor: Any) -> Tensor | None:
    """Return the floating values that a subclass made of other tensors holds, such as the scales of an 8-bit state."""
    parts = [values_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    floating = [one.reshape(-1) for one in parts if one is not None and (one.is_floating_point() or one.is_complex())]
    # torch promotes no 8-bit types.
    return torch.cat([one.float() if one.itemsize < 4 else one for one in floating]) if floating else None


def _is_counted_here(gradient: Any) -> bool:
    """Tell whether this rank's part counts: of copies, that of the first rank of each replicated dimension does."""
    coordinate = gradient.device_mesh.get_coordinate()
    return all(
        place == 0 for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate()
    )


# The kernels.


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


@functools.lru_cache(maxsize=64)
def _inverse_of_number(scale: float) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32, device=CPU).reciprocal()


def unscale_in_place(groups: Groups, factor: Tensor, flags: Flags, *, again: bool, flagged: bool = False) -> None:
    """Multiply dense real tensors by the reciprocal of the scale, 0-d float32 on any device, and note bad ones.

    The products must be flagged again if the reciprocal may be above 1, so that they may overflow. Tensors that are
    ``flagged`` already are looked at only by a kernel that does both.
    """
    for (device, dtype), tensors in groups.items():
        if not _apply(device, tensors, flags, moved(factor, device), flagged=flagged) and again:
            # To read them is half of what the kernel does; on the CPU it is slower, and not there for float8.
            is_read = device.type != "cpu" and dtype.itemsize > 1
            _apply(device, _largest(tensors) if is_read else tensors, flags)


def flag_nonfinite(groups: Groups, flags: Flags, one: Tensor | None = None) -> None:
    """Set the flags of devices with a tensor that is not finite; the tensors keep their values."""
    if one is not None and groups and not one.is_cpu:
        # The scale that is taken for 1, to which others can write.
        flags[one.device] = (one != 1.0).float()
    for (device, _), tensors in groups.items():
        _apply(device, tensors, flags)


def flag_sums(uncoalesced: Sequence[Tensor], flags: Flags) -> None:
    """Set the flags of devices with a sparse tensor whose duplicates, as an optimizer sums them, are not finite."""
    flag_nonfinite(group_tensors([kernel_view(one.coalesce()) for one in uncoalesced]), flags)


def flag_quotients(groups: Groups, scale: Tensor, flags: Flags) -> None:
    """Set the flags of devices with a finite tensor that overflows when it is divided by the scale."""
    for (device, dtype), tensors in groups.items():
        for largest in _largest(tensors):
            wide = largest.to(torch.promote_types(dtype, torch.float32))
            _apply(device, [(wide / moved(scale, device)).to(dtype)], flags)


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor, NaN if one is, as one 1-d tensor; none if all tensors are empty."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    return [torch.stack(torch._foreach_norm(filled, math.inf))] if filled else []


def _apply(
    device: torch.device, tensors: list[Tensor], flags: Flags, factor: Tensor | None = None, *, flagged: bool = False
) -> bool:
    """Multiply tensors by a factor, if there is one, and set their device's flag if they are not finite.

    Return whether the products were judged; a kernel judges what it multiplies.
    """
    by = factor
    if by is None:
        by = _ONE if device == CPU else torch.ones((), dtype=torch.float32, device=device)
    flag = flags.get(device)
    if flag is None:
        flag = flags[device] = torch.zeros_like(by)
    if _apply_by_kernel(tensors, flag, by):
        return False
    if factor is not None:
        _multiply(tensors, factor)
    if not flagged:
        for largest in _largest(_computable(tensors)):
            is_finite = (largest <= torch.finfo(largest.dtype).max).all()
            flag.masked_fill_(torch.logical_not(is_finite), 1.0)
    return not flagged


def _apply_by_kernel(tensors: list[Tensor], flag: Tensor, factor: Tensor) -> bool:
    """Multiply tensors and set a flag by torch's kernel; False if it has none for them on this device."""
    if tensors and tensors[0].dtype is torch.float64 and not tensors[0].is_cpu:
        # A device's kernel takes what float32 cannot hold for infinite.
        return False
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
            return False
        for index, tensor in enumerate(tensors):
            if torch._debug_has_internal_overlap(tensor) == 1:
                raise overlap(index, tensor) from error
        raise
    return True


def _multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype by a 0-d factor of their device, in float32 or wider, and round once."""
    wide = _computable(tensors)
    by = factor.to(torch.float32 if wide[0].itemsize == 2 else wide[0].dtype)
    if wide[0].itemsize > 2 or wide[0].is_cpu:
        torch._foreach_mul_(wide, by)
    else:
        # A device first rounds a factor without dimensions to the dtype of what has some, and calls a kernel for each
        # tensor if the factor has one: small ones are joined.
        small = [one for one in wide if one.numel() <= _JOINED]
        if small:
            joined = _flatten_dense_tensors(small)  # type: ignore[no-untyped-call]
            torch._foreach_copy_(small, _unflatten_dense_tensors(joined.mul_(by.view(1)), small))  # type: ignore[no-untyped-call]
        for one in wide:
            if one.numel() > _JOINED:
                one.mul_(by.view(1))
    if wide is not tensors:
        torch._foreach_copy_(tensors, wide)


def _computable(tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype, those of 8 bits, which torch does not compute with, as float32."""
    return [one.float() for one in tensors] if tensors and tensors[0].itemsize == 1 else tensors


def overlap(index: int, tensor: Tensor) -> SharedMemoryError:
    """Return the error for a gradient whose elements share memory."""
    copy = "grad.clone(memory_format=torch.contiguous_format)"
    return aliasing.overlap(index, tuple(tensor.shape), tensor.stride(), copy)


def count_nonfinite(flags: Flags, groups: Groups) -> int | None:
    """Return how many gradients are not finite; None unless all of them are the CPU's."""
    is_bad = False
    for flag in flags.values():
        if not flag.is_cpu:
            return None
        is_bad = is_bad or flag.item() != 0
    if not is_bad:
        return 0
    # Duplicates of a sparse gradient may be finite one by one.
    every = [one for tensors in groups.values() for one in _computable(tensors)]
    return max(1, sum(not torch.isfinite(one).all().item() for one in every))


def sum_of_squares(groups: Groups, home: torch.device) -> Tensor:
    """Return the square of the 2-norm of all tensors together, 0-d, float32 or, where that could overflow, float64."""
    parts = [_sum_of_one_device(device, tensors) for (device, _), tensors in groups.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=home)
    return functools.reduce(torch.add, [moved(part, home, dtype=_widest(home)) for part in parts])


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _sum_of_one_device(device: torch.device, tensors: list[Tensor]) -> Tensor:
    if device.type == "cpu":
        small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
        joined = [_flatten_dense_tensors(small)] if small else []  # type: ignore[no-untyped-call]
        joined += [tensor for tensor in tensors if tensor.numel() > _SMALL]
        total = functools.reduce(torch.add, [_square(tensor).double() for tensor in joined])
        # Float32 overflows at norms above 1.8e19, and has no numbers for some squares at scales below 1.
        if _SMALLEST_SQUARE < total.item() < math.inf:
            return total
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=_widest(device))).square().sum()


def _square(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        # More exact than torch's norm in float32.
        flat = tensor.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.itemsize < 4 else None)
    return norm.square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips gradients of this norm, at most 1; no host read."""
    factor: Tensor = max_norm / (norm + _EPSILON)
    return factor.clamp(max=1.0)
