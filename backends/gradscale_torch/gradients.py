"""An optimizer's gradients, collected, unscaled, clipped and judged by torch's fused kernels; DTensors, sparse ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradscale.core import aliasing, gradients
from gradscale.core.arithmetic import clip_numbers
from gradscale.core.gradients import Findings, Request, ScaleView
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import ScaleState
from gradscale.core.validation import bits_of_float32, float32_from_bits
from gradscale.errors import InvalidTypeError, InvalidValueError, SharedMemoryError, reading, short_repr
from gradscale_torch.devices import CPU, Flags, combine_flags, is_capturing, is_on_cpu, to_device
from gradscale_torch.groups import TorchCollectives

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer
Groups: TypeAlias = "dict[tuple[torch.device, torch.dtype], list[Tensor]]"
"""Dense tensors by device and dtype."""

_PLAIN = frozenset([Tensor])
# Types of devices whose compilers need not divide in float32 as IEEE does.
_INEXACT = ("xla", "xpu", "hpu")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
# Elements; smaller tensors are joined before their squares are summed, which costs less than a call for each.
_SMALL = 1 << 14
# A sum of squares above it has lost nothing to those that float32 has no number for.
_SMALLEST_SQUARE = 1e-20
# The same limit on a device, whose memory must hold joined ones twice.
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


class Parameters:
    """The lists of parameters in an optimizer's groups, kept from call to call to notice when they change."""

    __slots__ = ("_lists", "left_scaled", "meshes", "unique")

    def __init__(self, lists: Iterable[list[Any]]) -> None:
        self._lists = [list(params) for params in lists]
        # Each once.
        self.unique = list({id(one): one for params in self._lists for one in params}.values())
        self.meshes = meshes_of(self.unique)
        # Whether the optimizer's last step was left to unscale by itself.
        self.left_scaled = False

    def are_those_of(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer lists the same ones now; always False if it does not list them in lists."""
        groups = optimizer.param_groups
        if type(groups) is not list or len(groups) != len(self._lists):
            return False
        for group, before in zip(groups, self._lists, strict=True):
            params = group["params"]
            if type(params) is not list or len(params) != len(before) or not all(map(operator.is_, params, before)):
                return False
        return True


ParameterCache: TypeAlias = IdentityMap[Parameters]
"""The parameters of optimizers, kept from call to call."""


@dataclasses.dataclass(slots=True)
class DeferredClip:
    """Gradients that are divided and clipped in one pass, once the host has read their norm."""

    _norm: Tensor | None
    """Of the gradients as they are, 0-d; None if the host has it."""
    _tensors: Groups
    _request: Request
    _parameters: Parameters
    _factor: float = 1.0

    @property
    def words(self) -> Tensor:
        """The bits of the norm as one or two int32, 1-d, without a copy."""
        norm = self._norm
        assert norm is not None
        # By way of complex numbers, as not every device has views of elements of another size.
        is_wide = norm.dtype is torch.float64
        return (torch.view_as_real(norm.view(torch.complex64)) if is_wide else norm.reshape(1)).view(torch.int32)

    def judge(self, words: Sequence[int], scale: float) -> tuple[int, float]:
        """Return 1 if the norm overflows, or the factor that it gives, else 0; and the unscaled norm."""
        (norm,) = struct.unpack("d" if len(words) == 2 else "f", struct.pack(f"{len(words)}i", *words))
        return self.judge_norm(norm, scale)

    def judge_norm(self, norm: float, scale: float) -> tuple[int, float]:
        """Judge by the norm of the gradients as they are."""
        assert self._request.max_norm is not None
        is_judged = self._request.are_scaled
        unscaled, self._factor, overflows = clip_numbers(norm, self._request.max_norm, scale, is_judged=is_judged)
        return int(overflows), unscaled

    @torch.no_grad()
    def finish(self) -> None:
        """Divide and clip them, unless they are to stay as they are."""
        self._parameters.left_scaled = False
        if self._factor != 1.0:
            # A number to a device; a float32 is the same wherever it is computed.
            factor = torch.tensor(self._factor, dtype=torch.float64, device=CPU)
            for tensors in self._tensors.values():
                _multiply(tensors, factor.float() if self._request.are_scaled else factor)


class TensorGradients:
    """An optimizer's gradients on their way. Collecting coalesces sparse ones if it must, and modifies no others."""

    is_touched = False

    def __init__(
        self, settings: Settings, optimizer: Optimizer, cache: ParameterCache, request: Request, *, is_replayed: bool
    ) -> None:
        parameters = _parameters_of(optimizer, cache)
        self._settings, self._optimizer, self._parameters, self._request = settings, optimizer, parameters, request
        self._is_replayed = is_replayed
        # The tensors of values, to be overwritten; and the sparse gradients with duplicate indices, whose sums must be
        # judged once they are unscaled. Optimizers that unscale by themselves, and clipping alone, allow float16.
        takes_fp16 = settings.allows_fp16 or not (request.divides and request.are_scaled)
        has_norm = request.max_norm is not None
        self._tensors, self._uncoalesced = _collect(parameters, allow_fp16=takes_fp16, has_norm=has_norm)
        # The meshes of DTensor parameters.
        self.groups = groups_over(parameters.meshes, settings.timeout) if parameters.meshes else ()

    @property
    def like(self) -> Tensor:
        """A gradient, on whose device the state belongs; one of the device that is trained on if they are elsewhere.

        The loss of other ranks is there, also if all gradients are on the CPU, so that messages go the same way.
        """
        first, target = next(iter(self._tensors.values()), None), self._settings.device
        trains_on_cpu = target is None or (not isinstance(target, int) and torch.device(target).type == "cpu")
        if first is not None and (trains_on_cpu or not first[0].is_cpu):
            return first[0]
        parameters = self._parameters.unique
        return torch.zeros((), device=parameters[0].device if target is None and parameters else target)

    def unscale(self, current: ScaleView, state: ScaleState) -> Findings:
        """Divide them by the scale of a state, clip and judge them; or judge them alone."""
        request, tensors, scale = self._request, self._tensors, state.scale
        flags: Flags = {}
        norm, divisor = None, scale
        (number,) = current.state_adapter.peek((scale,)) or (None,)
        is_one, may_be_below_one = number == 1.0, number is None or number < 1.0
        if number is None and not self._is_replayed and not is_capturing(scale.device):
            is_one, may_be_below_one = current.is_one(state), current.scale_lower_bound(state) < 1.0
        # As torch.no_grad(), which takes twice as long.
        with torch.set_grad_enabled(False):
            if request.max_norm is not None:
                self._require_whole()
                findings = self._clip_by_number(scale, number, may_be_below_one)
                if findings is not None:
                    return findings
                divisor, norm = self._clip_divisor(scale, request.max_norm, flags)
            if not request.divides:
                self._judge_scaled(divisor, flags, norm is not None, may_be_below_one)
            else:
                self.is_touched, self._parameters.left_scaled = True, False
                if is_one and norm is None:
                    flag_nonfinite(tensors, flags)
                else:
                    self._divide(divisor, number, flags, norm is not None, may_be_below_one)
            if self._uncoalesced:
                flag_sums(self._uncoalesced, flags)
            nonfinite = count_nonfinite(flags, tensors, scale.device)
        # A fused optimizer must not divide again what is unscaled.
        is_scaled = request.are_scaled and not request.divides
        return Findings(nonfinite, norm, bool(tensors), is_scaled, flags, number, None if divisor is scale else divisor)

    def _clip_by_number(self, scale: Tensor, number: float | None, may_be_below_one: bool) -> Findings | None:
        """Divide and clip by a norm that the host has, or reads with the verdict; None if a device has to use it."""
        request, tensors, parameters = self._request, self._tensors, self._parameters
        if not request.divides or request.exchange is not None or parameters.meshes:
            return None
        if number is not None:
            return self._unscale_on_cpu(number) if all(device == CPU for device, _ in tensors) else None
        if may_be_below_one or not request.is_read:
            return None
        parameters.left_scaled = request.are_scaled
        deferred = DeferredClip(self._norm(scale.device)[0], tensors, request, parameters)
        # The devices, whose flags are the verdict's.
        devices = {device: constant(0.0, device) for device, _ in tensors}
        return Findings(0, None, len(tensors) > 0, request.are_scaled, devices, deferred=deferred)

    def _judge_scaled(self, divisor: Tensor, flags: Flags, has_norm: bool, may_be_below_one: bool) -> None:
        """Set the flags for gradients that the optimizer divides, whose kernel does not judge the quotients."""
        if not has_norm or self._parameters.meshes:
            flag_nonfinite(self._tensors, flags)
        if may_be_below_one and self._request.are_scaled:
            flag_quotients(self._tensors, divisor, flags)

    def _divide(
        self, divisor: Tensor, number: float | None, flags: Flags, has_norm: bool, may_be_below_one: bool
    ) -> None:
        """Divide gradients, by a number if there is no norm and the host has the scale, and set the flags."""
        factor = inverse_of(divisor) if has_norm or number is None else _inverse_of_number(number)
        if has_norm and self._request.are_scaled:
            factor = factor.float()
        # The norm has judged them, none of which grows; but on a mesh copies count on one of their ranks alone.
        flagged = has_norm and not may_be_below_one and not self._parameters.meshes
        unscale_in_place(self._tensors, factor, flags, again=may_be_below_one, flagged=flagged)

    def _unscale_on_cpu(self, scale: float) -> Findings:
        """Judge them by numbers, and unscale and clip them, at once or in a step that is not skipped."""
        tensors, request = self._tensors, self._request
        clip = DeferredClip(None, tensors, request, self._parameters)
        overflows, norm = clip.judge_norm(norm_on_cpu(tensors), scale)
        flags: Flags = {CPU: torch.full((), float(overflows), device=CPU)}
        is_later = request.is_read and scale >= 1.0
        if is_later:
            self._parameters.left_scaled = request.are_scaled
        else:
            self.is_touched = True
            clip.finish()
        if scale < 1.0:
            flag_nonfinite(tensors, flags)
        count, returned = count_nonfinite(flags, tensors, CPU), norm if request.is_read else torch.tensor(norm)
        is_scaled, deferred = is_later and request.are_scaled, clip if is_later else None
        return Findings(count, returned, len(tensors) > 0, is_scaled, flags, scale, deferred=deferred)

    def _clip_divisor(self, scale: Tensor, max_norm: float, flags: Flags) -> tuple[Tensor, Tensor]:
        """Return by what to divide to unscale and clip at once, and the unscaled norm, 0-d float32; set the flag.

        For an optimizer that divides by itself the first is float32, and else float64, if there is that.
        """
        exchange, target, divides = self._request.exchange, scale.device, self._request.divides
        # On a device the CPU waits for nobody, so that the norm is not announced.
        if exchange is not None and is_on_cpu(scale) and self._parameters.meshes:
            exchange.announce(scale)
        norm, own = self._norm(target)
        unscaled = torch.div(norm, scale, out=torch.empty_like(scale))
        norm_check = unscaled
        if exchange is not None:
            # If another rank's part makes the norm inf or NaN, that rank reports it: it overflows only if some part is
            # above its share of the largest number.
            share = own * math.sqrt(2 * exchange.size) / scale
            norm_check = torch.where(share.float() < math.inf, 0.0, unscaled)
        clipping = torch.add(norm, scale, alpha=_EPSILON).div_(max_norm)
        if divides:
            # A norm that is not finite clips nothing: gradients that are finite stay so, and the others are named.
            clipping = torch.where((unscaled if self._request.are_scaled else norm) < math.inf, clipping, 0.0)
        divisor = torch.maximum(scale, clipping, out=None if divides else torch.empty_like(scale))
        # A divisor is an overflow, too, that float32 cannot hold, or whose reciprocal is no normal number.
        divisor_checks = [(4 * divisor).float() if divides else divisor] if max_norm > 0 else []
        flag_nonfinite({(target, torch.float32): [norm_check, *divisor_checks]}, flags)
        return divisor, unscaled

    def _norm(self, target: torch.device) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients, by an all-reduce for DTensors, and that of this rank's; 0-d, in float64."""
        mesh, exchange = groups_over(self._parameters.meshes, self._settings.timeout), self._request.exchange
        if not mesh:
            own = norm_of(self._tensors, target)
            if exchange is None:
                return own, own
            # The CPU computes the same norm of all ranks' parts on every rank.
            norms = exchange.numbers(bits_of_float32(own.item()), torch.zeros((), device=target))
            return torch.full_like(own, math.hypot(*map(float32_from_bits, norms))), own
        parts = [
            kernel_view(one.grad)
            for one in self._parameters.unique
            if one.grad is not None and _is_counted_here(one.grad)
        ]
        own = norm_of(group_tensors(parts), target).double()
        return mesh[0].sum(own.square()).sqrt(), own

    def _require_whole(self) -> None:
        """Raise InvalidValueError for gradients that are not reduced yet, before anything is modified."""
        sharded: list[Any] = [one for one in self._parameters.unique if hasattr(one, "device_mesh")]
        if any(placement.is_partial() for one in sharded if one.grad is not None for placement in one.grad.placements):
            name = type(self._optimizer).__name__
            msg = f"unscale_(max_norm=) needs reduced gradients, got DTensors with Partial placements in {name}"
            raise InvalidValueError(msg)


def require_norm(optimizer: Optimizer, cache: ParameterCache) -> tuple[DeviceMesh, ...]:
    """Return the mesh of DTensor parameters, or none; InvalidValueError for several norms, on every rank alike."""
    parameters = _parameters_of(optimizer, cache)
    name, meshes = type(optimizer).__name__, parameters.meshes
    is_mixed = meshes and not all(hasattr(one, "device_mesh") for one in parameters.unique)
    if is_mixed or len(meshes) > 1:
        what = "DTensors beside plain tensors" if is_mixed else f"DTensors of {meshes}"
        msg = (
            f"unscale_(max_norm=) needs parameters that are spread over the same ranks, got {what} in {name}: call "
            f"unscale_(optimizer), and clip each kind with torch.nn.utils.clip_grad_norm_"
        )
        raise InvalidValueError(msg)
    return meshes


def _parameters_of(optimizer: Optimizer, cache: ParameterCache) -> Parameters:
    """Return an optimizer's parameters, from the cache if they are the same."""
    cached = cache.get(id(optimizer))
    if cached is not None and cached.are_those_of(optimizer):
        return cached
    if not hasattr(optimizer, "param_groups"):
        raise gradients.no_optimizer(optimizer, "param_groups, dicts with a list of 'params'")
    parameters = Parameters(params for _, params in gradients.parameter_lists(optimizer))
    for parameter in parameters.unique:
        if not isinstance(parameter, Tensor):
            msg = (
                f"expected param to be torch.Tensor, got {type(parameter).__name__}: {short_repr(parameter)} in the "
                f"param_groups of {type(optimizer).__name__}; pass it model.parameters() or other tensors"
            )
            raise InvalidTypeError(msg)
    grads = [parameter.grad for parameter in parameters.unique if parameter.grad is not None]
    for index, gradient in enumerate(grads):
        if gradient.layout == torch.strided and not gradient.is_contiguous():
            local = local_tensor(gradient)
            if aliasing.overlaps_itself(local.shape, local.stride()):
                raise overlap(index, local)
    cache.set(optimizer, parameters)
    return parameters


def meshes_of(parameters: Iterable[object]) -> tuple[DeviceMesh, ...]:
    """Return the meshes of DTensors, the largest first, one mesh for all that are over the same ranks.

    So ranks come to one that they share in the same place, also if some hold parameters of smaller ones besides.
    """
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in dict.fromkeys(one.device_mesh for one in parameters if hasattr(one, "device_mesh")):
        by_ranks.setdefault(frozenset(mesh.mesh.flatten().tolist()), mesh)
    return tuple(by_ranks[ranks] for ranks in sorted(by_ranks, key=len, reverse=True))


def meshes_without_gradients(optimizer: Any, cache: ParameterCache) -> tuple[DeviceMesh, ...]:
    """Return the meshes of an optimizer's parameters, also on a rank whose gradients raise an error."""
    cached = cache.get(id(optimizer))
    with reading("an optimizer"):
        if cached is not None and cached.are_those_of(optimizer):
            return cached.meshes
        lists = gradients.parameter_lists(optimizer) if hasattr(optimizer, "param_groups") else ()
    return meshes_of(itertools.chain.from_iterable(params for _, params in lists))


def groups_over(meshes: Sequence[DeviceMesh], timeout: float) -> Sequence[TorchCollectives]:
    """Return meshes as groups."""
    return [TorchCollectives(mesh, timeout) for mesh in meshes]


def _collect(parameters: Parameters, *, allow_fp16: bool, has_norm: bool) -> tuple[Groups, Sequence[Tensor]]:
    """Return the tensors of floating gradients, and sparse ones with duplicate indices: a host read on a device."""
    tensors = [gradient for parameter in parameters.unique if (gradient := parameter.grad) is not None]
    if len(set(map(id, tensors))) < len(tensors):
        # One tensor may be the gradient of two parameters.
        tensors = list({id(gradient): gradient for gradient in tensors}.values())
    # Thousands of plain gradients are recognised by their few types and layouts; dense float32 ones of the CPU at once.
    if _PLAIN.issuperset(map(type, tensors)):
        if tensors and all(map(torch.FloatTensor.__instancecheck__, tensors)):
            return {(CPU, torch.float32): tensors}, ()
        if {one.layout for one in tensors} <= {torch.strided}:
            groups = group_tensors(tensors)
            dtypes = {dtype for _, dtype in groups}
            if all(dtype.is_floating_point for dtype in dtypes):
                _check_dtypes(dtypes, allow_fp16)
                return groups, ()
    _check_dtypes({one.dtype for one in tensors}, allow_fp16)
    return _sparse_or_wrapped(tensors, parameters, has_norm)


def _sparse_or_wrapped(
    tensors: list[Tensor], parameters: Parameters, has_norm: bool
) -> tuple[Groups, Sequence[Tensor]]:
    """Return the tensors of gradients that may be sparse, complex, or parts of DTensors; and those with duplicates."""
    # The optimizer sums duplicates in their own dtype: float16 overflows easily. And only sums have a norm.
    summed = [_summed(one, parameters) if has_norm or one.dtype is torch.float16 else one for one in tensors]
    return group_tensors(map(kernel_view, summed)), list(filter(has_duplicates, summed))


def has_duplicates(gradient: Tensor) -> bool:
    """Tell whether a sparse gradient may hold several values for one index."""
    return gradient.layout == torch.sparse_coo and not gradient.is_coalesced()


def _summed(gradient: Tensor, parameters: Parameters) -> Tensor:
    """Return a gradient without duplicate indices, which its parameters then have; float16 is summed in float32."""
    if not has_duplicates(gradient):
        return gradient
    total = _coalesced(gradient)
    for one in parameters.unique:
        if one.grad is gradient:
            one.grad = total
    return total


def _coalesced(tensor: Tensor) -> Tensor:
    """Return a sparse tensor without duplicate indices; float16 is summed in float32."""
    wide = tensor.float() if tensor.dtype is torch.float16 else tensor
    return wide.coalesce().to(tensor.dtype)


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
            return _inner_values(local)
        if has_duplicates(local):
            local = _coalesced(local)
        return local if local.layout == torch.strided else local.values()


def places_of(gradient: Tensor) -> Tensor | None:
    """Return the indices of the values of a sparse gradient, duplicates left out, as float64; None of a dense one."""
    local = local_tensor(gradient.detach())
    return _coalesced(local).indices().double() if local.layout == torch.sparse_coo else None


def _inner_values(tensor: Any) -> Tensor | None:
    """Return the floating values of a subclass that wraps other tensors, such as the scales of an 8-bit state."""
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


def group_tensors(tensors: Iterable[Tensor]) -> Groups:
    """Return tensors by device and dtype; InvalidTypeError for those of the meta device, which have no values."""
    listed: list[Tensor | None] = list(tensors)
    grouped = _group_tensors_by_device_and_dtype([listed]) if listed else {}
    groups: Groups = {key: lists[0] for key, (lists, _) in grouped.items()}  # type: ignore[misc]
    for (device, dtype), same in groups.items():
        if device.type == "meta":
            msg = (
                f"gradients must have values, got {len(same)} of {dtype} on torch's meta device: materialize the "
                f"model (model.to_empty(device=...)) and load its weights first"
            )
            raise InvalidTypeError(msg)
    return groups


def inverse_of(divisor: Tensor) -> Tensor:
    """Return the reciprocal of a 0-d tensor, rounded once to its dtype. No host read."""
    if divisor.device.type in _INEXACT:
        return divisor.double().reciprocal().to(divisor.dtype)
    return divisor.reciprocal()


@functools.lru_cache(maxsize=64)
def _inverse_of_number(scale: float) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32, device=CPU).reciprocal()


def unscale_in_place(groups: Groups, factor: Tensor, flags: Flags, *, again: bool, flagged: bool = False) -> None:
    """Multiply dense real tensors by the reciprocal of the scale, 0-d float32 on any device, and note bad ones.

    The products must be flagged again if the reciprocal may be above 1, so that they may overflow. Tensors that are
    ``flagged`` already are judged only by a kernel that does both.
    """
    for (device, dtype), tensors in groups.items():
        if not _apply(device, tensors, flags, to_device(factor, device), flagged=flagged) and again:
            # To read them is half of what the kernel does; on the CPU it is slower, and not there for float8.
            is_read = device.type != "cpu" and dtype.itemsize > 1
            _apply(device, _largest(tensors) if is_read else tensors, flags)


def flag_nonfinite(groups: Groups, flags: Flags) -> None:
    """Set the flags of devices with a tensor that is not finite; the tensors keep their values."""
    for (device, _), tensors in groups.items():
        _apply(device, tensors, flags)


def flag_sums(uncoalesced: Iterable[Tensor], flags: Flags) -> None:
    """Set the flags of devices with a sparse tensor whose duplicates, as an optimizer sums them, are not finite."""
    flag_nonfinite(group_tensors([kernel_view(one.coalesce()) for one in uncoalesced]), flags)


def flag_quotients(groups: Groups, scale: Tensor, flags: Flags) -> None:
    """Set the flags of devices with a finite tensor that overflows when it is divided by the scale."""
    for (device, dtype), tensors in groups.items():
        for largest in _largest(tensors):
            wide = largest.to(torch.promote_types(dtype, torch.float32))
            _apply(device, [(wide / to_device(scale, device)).to(dtype)], flags)


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor, NaN if one is, as one 1-d tensor; none if all tensors are empty."""
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    # The maximum is exact in any dtype that holds it.
    wide = None if filled and filled[0].itemsize > 4 else torch.float32
    return [torch.stack(torch._foreach_norm(filled, math.inf, dtype=wide))] if filled else []


def _apply(
    device: torch.device, tensors: list[Tensor], flags: Flags, factor: Tensor | None = None, *, flagged: bool = False
) -> bool:
    """Multiply tensors by a factor, if there is one, and set their device's flag if they are not finite.

    Return whether the products were judged; a kernel judges what it multiplies.
    """
    by = constant(1.0, device) if factor is None else factor if factor.dtype is torch.float32 else factor.float()
    flag = flags.get(device)
    if flag is None:
        flag = flags[device] = torch.zeros_like(by)
    if _apply_by_kernel(tensors, flag, by):
        return False
    if factor is not None:
        _multiply(tensors, factor)
    if not flagged:
        for largest in _largest(_computable(tensors)):
            # Of float64, which float32 need not hold, 0 or NaN.
            narrow = (largest - largest).float() if largest.dtype is torch.float64 else largest
            if not _apply_by_kernel([narrow], flag, constant(1.0, device)):
                flag.masked_fill_(torch.logical_not((narrow < math.inf).all()), 1.0)
    return not flagged


def constant(value: float, device: torch.device) -> Tensor:
    """Return 0 or 1 as a 0-d float32 on a device, not to be written; a captured graph makes its own."""
    return _cached_fill(value, device) if device == CPU or not is_capturing(device) else _fill(value, device)


def _fill(value: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.float32, device=device)


_cached_fill = functools.lru_cache(maxsize=64)(_fill)


# Types of devices and dtypes for which torch has no kernel.
_unsupported: set[tuple[str, torch.dtype] | None] = set()


def _apply_by_kernel(tensors: list[Tensor], flag: Tensor, factor: Tensor) -> bool:
    """Multiply tensors and set a flag by torch's kernel; False if it has none for them on this device."""
    is_usual = not tensors or (tensors[0].dtype is torch.float32 and flag.is_cpu)
    kind = None if is_usual else (flag.device.type, tensors[0].dtype)
    # A device's kernel takes what float32 cannot hold for infinite.
    if kind in _unsupported or (kind is not None and kind[1] is torch.float64 and kind[0] != "cpu"):
        return False
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, factor)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
            # To be refused again costs as much as to multiply.
            _unsupported.update([] if kind is None else [kind])
            return False
        _raise_overlap(tensors, error)
        raise
    return True


def _multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one dtype by a 0-d factor of their device, in float32 or wider, and round once."""
    wide = _computable(tensors)
    by = factor.to(torch.float32 if wide[0].itemsize == 2 else wide[0].dtype)
    if wide[0].itemsize > 2 or by.is_cpu:
        try:
            torch._foreach_mul_(wide, by)
        except RuntimeError as error:
            _raise_overlap(wide, error)
            raise
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


def _raise_overlap(tensors: Sequence[Tensor], error: RuntimeError) -> None:
    """Raise SharedMemoryError if that is why torch cannot write to a tensor."""
    for index, tensor in enumerate(tensors):
        if torch._debug_has_internal_overlap(tensor) == 1:
            raise overlap(index, tensor) from error


def overlap(index: int, tensor: Tensor) -> SharedMemoryError:
    """Return the error for a gradient whose elements share memory."""
    copy = "grad.clone(memory_format=torch.contiguous_format)"
    return aliasing.overlap(index, tuple(tensor.shape), tensor.stride(), copy)


def count_nonfinite(flags: Flags, groups: Groups, target: torch.device) -> Tensor | int:
    """Return how many gradients are not finite; of those on a device, 1 for any number, 0-d float32 on ``target``."""
    if not all(map(is_on_cpu, flags.values())):
        return combine_flags(flags, target)
    if not any(map(Tensor.item, flags.values())):
        return 0
    # Duplicates of a sparse gradient may be finite one by one.
    every = [one for tensors in groups.values() for one in _computable(tensors)]
    return max(1, sum(not torch.isfinite(one).all().item() for one in every))


def norm_of(groups: Groups, target: torch.device) -> Tensor:
    """Return the 2-norm of all tensors together, 0-d, in float64 where there is that."""
    norms = []
    for (device, dtype), tensors in groups.items():
        if device == CPU:
            norm = torch.tensor(norm_on_cpu({(CPU, dtype): tensors}), dtype=torch.float64, device=CPU)
        else:
            each = torch._foreach_norm(_computable(tensors), 2, dtype=_widest(device))
            norm = torch.linalg.vector_norm(torch.stack(each))
        norms.append(to_device(norm, target, dtype=_widest(target)))
    if not norms:
        return torch.zeros((), dtype=_widest(target), device=target)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def norm_on_cpu(groups: Groups) -> float:
    """Return the 2-norm of all tensors together, where all are the CPU's."""
    total, groups = 0.0, {key: _computable(tensors) for key, tensors in groups.items()}
    for tensors in groups.values():
        small = [tensor for tensor in tensors if tensor.numel() <= _SMALL]
        joined = [_flatten_dense_tensors(small)] if len(small) > 1 else small  # type: ignore[no-untyped-call]
        total += sum(_square(tensor).item() for tensor in (*joined, *(one for one in tensors if one.numel() > _SMALL)))
    # Float32 overflows at norms above 1.8e19, and has no numbers for some squares at scales below 1.
    if _SMALLEST_SQUARE < total < math.inf or math.isnan(total):
        return math.sqrt(total)
    norms = [torch._foreach_norm(tensors, 2, dtype=torch.float64) for tensors in groups.values()]
    return math.hypot(*(norm.item() for one in norms for norm in one))


def _square(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous():
        # More exact than torch's norm in float32.
        flat = tensor.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.itemsize < 4 else None)
    return norm.square()
