"""TorchBackend: the pure functions on tensors; ScalerBackend: the adapter of the scalers that replace torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from gradscale import Backend, DynamicScale, ScaleState
from gradscale.core import arithmetic, tree
from gradscale.core.aliasing import Span, numbered, overlaps_itself, require_disjoint, span
from gradscale.core.backend import UNKNOWN, HostRead, require_values
from gradscale.core.gradients import Collected, Request
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Collectives, Optimizer, Policy
from gradscale.core.summaries import Layout, Summary, join, layout_of
from gradscale.core.validation import round_to_float32, wrong_value
from gradscale.errors import InvalidTypeError
from gradscale_torch import devices, gradients
from gradscale_torch.devices import CPU, Flags, TensorRead, forbid_capture, is_capturing, to_device
from gradscale_torch.groups import TorchCollectives
from gradscale_torch.snapshot import TensorSnapshot
from gradscale_torch.stepping import stepping

Tensor = torch.Tensor

_PLAIN = {Tensor, torch.nn.Parameter}
_item = torch.Tensor.item
_rounded = functools.lru_cache(maxsize=64)(round_to_float32)

# Bytes of one block: few enough to stay in a cache, and many enough to hide what a call costs.
_BLOCK = 1 << 18
_WORDS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

_State = TypeVar("_State", bound=tuple[Any, ...])
_Multiply = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class TorchBackend(Backend):
    """Tensors through torch's fused kernels, and its process groups and device meshes.

    The count of a verdict is exact for tensors of the CPU; of those on a device it says 1 for any number.

    Examples
    --------
    >>> import gradscale, gradscale_torch, torch
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(like=torch.zeros(()))
    >>> gradscale_torch.TorchBackend().unscale([torch.tensor([2.0, 4.0])], state)
    ([tensor([0.5000, 1.0000])], tensor(0, dtype=torch.int32))
    """

    name = "torch"
    snapshot = TensorSnapshot
    _device: torch.device | str | int | None = None

    def collectives(self, group: Any, /, *, timeout: float) -> Collectives:
        """Wrap a ProcessGroup or DeviceMesh; ``timeout`` in seconds. A mesh may need a group, made collectively."""
        return TorchCollectives(group, timeout)

    def read(self, x: Tensor, /) -> list[int]:
        """Return a 1-d int32 tensor as Python ints."""
        # A loss may be of another library.
        if not isinstance(x, torch.Tensor):
            return super().read(x)
        if not x.is_cpu:
            forbid_capture(x.device, "step once before the capture, since the CPU reads the first message over a group")
        values: list[int] = x.tolist()
        return values

    def peek(self, arrays: Sequence[Tensor], /) -> list[Any] | None:
        """Return the numbers in 0-d tensors of one device; None if that is not the CPU."""
        return list(map(_item, arrays)) if devices.is_on_cpu(arrays[0]) else None

    def start_read(self, x: Tensor, /) -> HostRead:
        """Begin to copy a 1-d int32 tensor to the CPU, which does not wait."""
        return TensorRead(x)

    def placement(self, like: Tensor, /) -> torch.device | None:
        """Return the device of a tensor; a loss may be of another library."""
        return like.device if isinstance(like, Tensor) else None

    def move(self, x: Tensor, like: Tensor, /) -> Tensor:
        """Return a 0-d tensor on the device of another one; the CPU waits only for those that come to it."""
        return to_device(x, like.device)

    def integers(self, values: Sequence[int], like: Tensor, /) -> Tensor:
        """Return numbers as a 1-d int32 tensor on the device of another one; nothing is waited for."""
        if like.device == CPU:
            return torch.tensor(values, dtype=torch.int32, device=CPU)
        # The CPU would wait for a copy, but not for the arguments of a kernel.
        tensor = torch.zeros(len(values), dtype=torch.int32, device=like.device)
        torch._foreach_add_(tensor.unbind(), list(values))
        return tensor

    def example(self) -> Tensor:
        """Return a 0-d float32 tensor on the device that is trained on, or the default one."""
        return torch.zeros((), dtype=torch.float32, device=self._device)

    def bits(self, x: Tensor, /) -> Tensor | None:
        """Return the bits of real values as signed integers; None for float8."""
        # A lazily negated tensor has no view of another type.
        return x.resolve_neg().view(_WORDS[x.dtype]) if x.dtype in _WORDS else None

    def read_summaries(
        self, arrays: Sequence[Tensor], others: Sequence[Tensor] = ()
    ) -> tuple[list[Summary], list[list[int]]]:
        """Summarize dense tensors and read others: one host read, and none for IEEE numbers of the CPU."""
        with torch.no_grad():
            summaries = [_summary_on_cpu(array.detach()) for array in arrays]
            rest = [array.detach() for array, one in zip(arrays, summaries, strict=True) if one is None]
            rest_summaries, values = super().read_summaries(rest, others)
        remaining = iter(rest_summaries)
        return [next(remaining) if one is None else one for one in summaries], values

    def unscale(
        self, grads: Sequence[Tensor], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Divide tensors by the scale and judge them, as :meth:`gradscale.Backend.unscale`.

        They may be sparse. New ones stay part of an autograd graph, and ``out`` is written without it. InvalidTypeError
        for DTensors, whose verdict is not this rank's alone. InvalidValueError if elements of a tensor to be written
        share memory, and SharedMemoryError if it shares memory with another tensor.
        """
        if any(hasattr(grad, "device_mesh") for grad in grads):
            msg = (
                "the verdict on DTensor gradients must be agreed over their mesh: use gradscale_torch.GradScaler, or "
                "pass their to_local() to gradscale.unscale"
            )
            raise InvalidTypeError(msg)
        if out is None and any(grad.layout != torch.strided for grad in grads):
            # The standard's functions are for dense ones alone.
            grads = out = [grad.detach().to(dtype or grad.dtype, copy=True) for grad in grads]
        if out is None or torch.compiler.is_compiling():
            return arithmetic.unscale_arrays(grads, state, dtype=dtype, out=out)
        with torch.no_grad():
            _require_disjoint(grads, out)
            if any(grad.dtype != target.dtype for grad, target in zip(grads, out, strict=True)):
                quotients, nonfinite = arithmetic.unscale_arrays(grads, state, out=out)
                for target, quotient in zip(out, quotients, strict=True):
                    target.copy_(quotient)
                return out, nonfinite
            for grad, target in zip(grads, out, strict=True):
                if grad is not target:
                    target.copy_(grad)
            return out, _unscale_in_place(out, state)

    def values_of(self, x: Array) -> Array | None:
        """Return the dense tensor of a gradient's values on this rank. A loss may be of another library."""
        return gradients.values_of(x) if isinstance(x, Tensor) else x

    def places_of(self, x: Tensor) -> Tensor | None:
        """Return as floats at which indices a sparse gradient has its values."""
        return gradients.places_of(x)

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank: of a DTensor, that of its local part."""
        return tuple(gradients.local_tensor(x).shape)


class ScalerBackend(TorchBackend):
    """The adapter of the scalers that replace torch's.

    The state stays in its tensors, so that frameworks and captured graphs see the scale, gradients may be DTensors, and
    fused optimizers skip by themselves.
    """

    is_shared = True
    stepping = staticmethod(stepping)

    def __init__(self, settings: gradients.Settings) -> None:
        self._settings, self._device, self.is_replayed = settings, settings.device, False
        self.parameters: gradients.ParameterCache = IdentityMap()
        # A policy, and a tracker that is below its interval.
        self._fitting: tuple[Policy | None, Tensor | None] = None, None
        # torch's ShardedGradScaler multiplies by factors that are rounded to float32.
        self.takes_numbers = not settings.is_sharded

    def first_state(self, policy: Policy, numbers: Mapping[str, float], like: Array) -> ScaleState:
        """Return a policy's first state on the device of a tensor."""
        require_values(like)
        target = like.device if isinstance(like, Tensor) else CPU
        forbid_capture(target, "call scale() once before, or every replay would begin with the first state again")
        with torch.inference_mode(False):
            state = super().first_state(policy, numbers, torch.zeros((), device=CPU))
            # Filled by kernels, for which nobody waits as for copies of the CPU's memory.
            return ScaleState(*(torch.full((), one.item(), dtype=one.dtype, device=target) for one in state))

    def with_numbers(
        self, state: ScaleState, numbers: Sequence[float | None], before: Sequence[float | None] = UNKNOWN
    ) -> ScaleState:
        """Return a state with some fields replaced by numbers, in the same tensors if others read them."""
        if state.scale.is_inference():
            return super().with_numbers(state, numbers, before)
        for tensor, number, old in zip(state, numbers, before, strict=True):
            if number != old:
                tensor.fill_(number)
        return ScaleState(*state)

    def adapt(
        self, policy: Policy, state: ScaleState, nonfinite: Tensor | int, keeps_scale: Tensor | None, least: float = 0.0
    ) -> ScaleState:
        """Return the state after a step, by torch's kernel if that has the rule."""
        scale, tracker = state[:2]
        self.is_replayed |= not scale.is_cpu and is_capturing(scale.device)
        if keeps_scale is not None or type(policy) is not DynamicScale or not is_torchs(policy, "min_scale"):
            return self.write_into(state, super().adapt(policy, state, nonfinite, keeps_scale))
        fits = self._fitting[0] is policy and self._fitting[1] is tracker
        if scale.is_cpu or self.is_replayed or not fits:
            # The kernel grows at the interval alone, which a setting or a load may have left behind.
            tracker.clamp_(max=policy.growth_interval - 1)
            self._fitting = policy, tracker
        if isinstance(nonfinite, int):
            nonfinite = gradients.constant(float(nonfinite > 0), scale.device)
        growth, backoff = policy.growth_factor, policy.backoff_factor
        if scale.is_cpu and self._settings.is_sharded:
            # torch's ShardedGradScaler multiplies a tensor by them there, in float32.
            growth, backoff = _rounded(growth), _rounded(backoff)
        torch._amp_update_scale_(scale, tracker, nonfinite.float(), growth, backoff, policy.growth_interval)
        # Replays lower it without the host's knowledge.
        if scale.is_cpu or self.is_replayed or least < policy.min_scale:
            # The kernel goes on into the subnormals, and to 0.
            scale.clamp_(min=policy.min_scale)
        return ScaleState(*state)

    def write_into(self, old: _State, new: _State) -> _State:
        """Write a named tuple of tensors into those of another, if others read them, and return these in a new one.

        Values that are kept for the old tuple are out of date.
        """
        if old[0].is_inference():
            # Tensors of torch's inference mode cannot be written outside of it.
            return type(old)(*map(torch.clone, new))
        self._fitting = None, None
        for tensor, value in zip(old, new, strict=True):
            if tensor is not value:
                tensor.copy_(value)
        return type(old)(*old)

    def scale(self, outputs: Sequence[Tensor], state: ScaleState, /) -> list[Tensor]:
        """Multiply tensors by the scale; with torch's promotion in place of torch's scalers."""
        scaled = []
        for tensor in outputs:
            if not tensor.is_cpu and is_capturing(tensor.device):
                self.is_replayed = True
            scale = state.scale if tensor.device == state.scale.device else to_device(state.scale, tensor.device)
            product = tensor * scale
            scaled.append(product.to(tensor.dtype) if self._settings.is_sharded else product)
        return scaled

    def map_outputs(self, outputs: object, namespace_for: object, multiply: _Multiply) -> object:
        """Return outputs with every tensor multiplied; in place of torch's scalers one by one.

        Lists, tuples, named tuples and dicts keep their kinds; any other iterable as an iterator, as torch has it, so
        that an unconsumed one scales nothing.
        """

        def mapped(node: object) -> object:
            return self.map_outputs(node, namespace_for, multiply)

        if isinstance(outputs, Tensor):
            return multiply((outputs,))[0]
        if not _is_leaf(outputs):
            leaves, rebuild = tree.flatten(outputs, _is_leaf)
            return rebuild(list(map(mapped, leaves)))
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            return map(mapped, outputs)
        raise wrong_value(outputs, "outputs", "a Tensor or an iterable of Tensors")

    def collect(self, optimizer: Any, request: Request) -> Collected:
        """Return an optimizer's gradients."""
        cache, is_replayed = self.parameters, self.is_replayed
        return gradients.TensorGradients(self._settings, optimizer, cache, request, is_replayed=is_replayed)

    def reads_verdict(self, optimizer: Optimizer) -> bool:
        """Tell whether the host reads the verdict in each step: not of a fused optimizer."""
        return not getattr(optimizer, "_step_supports_amp_scaling", False)

    def was_left_scaled(self, optimizer: object) -> bool:
        """Tell whether an optimizer's last step was left to unscale its gradients by itself."""
        parameters = self.parameters.get(id(optimizer))
        return parameters is not None and parameters.left_scaled

    def groups_of(self, optimizer: Any) -> Sequence[Collectives]:
        """Return the meshes of an optimizer's DTensor parameters."""
        meshes = gradients.meshes_without_gradients(optimizer, self.parameters)
        return gradients.groups_over(meshes, self._settings.timeout)

    def norm_groups(self, optimizer: Any) -> Sequence[Collectives]:
        """Return the mesh over which the norm of DTensor gradients is summed up."""
        return gradients.groups_over(gradients.require_norm(optimizer, self.parameters), self._settings.timeout)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"is_replayed": False, "parameters": IdentityMap(), "_fitting": (None, None)}


@functools.lru_cache(maxsize=64)
def is_torchs(policy: DynamicScale, *others: str) -> bool:
    """Tell whether torch's four factors, and some settings more, are all that a policy has."""
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", *others)
    return policy == DynamicScale(**{name: getattr(policy, name) for name in names})


def _is_leaf(node: object) -> bool:
    return isinstance(node, Tensor) or not isinstance(node, (list, tuple, Mapping))


def _unscale_in_place(tensors: Sequence[Tensor], state: ScaleState) -> Tensor:
    """Divide tensors and return how many are not finite, 0-d int32; on a device 1 for any number."""
    flags: Flags = {}
    groups, scale = gradients.group_tensors(map(gradients.kernel_view, tensors)), state.scale
    # Reading the scale of a device would be a host read; judging twice is none. 0 is its lower bound.
    least = scale.item() if scale.is_cpu else float(isinstance(state, arithmetic.UnitState))
    if least == 1.0:
        gradients.flag_nonfinite(groups, flags)
    else:
        gradients.unscale_in_place(groups, gradients.inverse_of(scale), flags, again=least < 1.0)
    gradients.flag_sums(filter(gradients.has_duplicates, tensors), flags)
    count = gradients.count_nonfinite(flags, groups, scale.device)
    if isinstance(count, int):
        return torch.full((), count, dtype=torch.int32, device=scale.device)
    return count.to(torch.int32)


def _require_disjoint(grads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Raise SharedMemoryError for strided tensors to be written that share memory, in themselves or with others."""
    plain = {
        number: one
        for number, one in numbered(grads, out).items()
        if type(one) in _PLAIN and one.layout == torch.strided and one.device.type != "meta" and one.numel() > 0
    }
    spans: dict[int | None, list[tuple[Span, int]]] = {}
    for number, one in plain.items():
        if number < len(out) and not one.is_contiguous() and overlaps_itself(one.shape, one.stride()):
            raise gradients.overlap(number, one)
        # Pointers of other devices say where in its storage a tensor begins, and are no addresses.
        memory = None if one.is_cpu or one.is_cuda else one.untyped_storage().data_ptr()
        spans.setdefault(memory, []).append((_span(one), number))
    for entries in spans.values():
        require_disjoint(entries, lambda one, other: _share_memory(plain[one], plain[other]), len(out))


def _span(x: Tensor) -> Span:
    start, size = x.data_ptr(), x.element_size()
    if x.is_contiguous():
        return start, start + x.nbytes
    return span(start, tuple(x.shape), tuple(stride * size for stride in x.stride()), size)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors whose spans overlap share an element; True for elements of two sizes."""
    is_one_size = one.element_size() == other.element_size()
    return not is_one_size or bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(x: Tensor) -> Tensor:
    addresses = torch.full((), x.data_ptr(), dtype=torch.int64, device="cpu")
    for length, stride in zip(x.shape, x.stride(), strict=True):
        addresses = addresses[..., None] + torch.arange(length, device="cpu") * (stride * x.element_size())
    return addresses.reshape(-1)


def _summary_on_cpu(tensor: Tensor) -> Summary | None:
    """Summarize a tensor of IEEE numbers of the CPU, block by block; None for any other."""
    layout = layout_of(tensor.dtype)
    if layout is None or not tensor.is_cpu:
        return None
    # In the order of the memory, which needs no copy if that has no gaps.
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    integers = tensor.permute(order).reshape(-1).resolve_neg().view(_WORDS[tensor.dtype])
    blocks = torch.split(integers, _BLOCK // tensor.element_size()) if tensor.numel() else ()
    return join(_block(block, layout) for block in blocks)


def _block(bits: Tensor, layout: Layout) -> Summary:
    """Count in integers, above all by ``count_nonzero``, torch's fastest way."""
    x, size, infinity = bits & layout.mask, bits.numel(), layout.infinity
    least, greatest = map(int, torch.aminmax(x))
    small = int(torch.count_nonzero(x < layout.smallest_normal)) if least < layout.smallest_normal else 0
    zeros = size - int(torch.count_nonzero(x)) if least == 0 else 0
    finite, inf = size, 0
    if greatest >= infinity:
        # As numbers of the same type, which torch multiplies the fastest.
        below = torch.lt(x, infinity, out=torch.empty_like(x))
        finite, inf = int(torch.count_nonzero(below)), size - int(torch.count_nonzero(x - infinity))
        greatest = int(x.mul_(below).amax())
    return Summary(size, inf, size - finite - inf, zeros, small - zeros, layout.value(greatest))
