"""TorchBackend: torch tensors on any device, for the scalers and functions of gradscale itself; their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradscale import Backend, ScaleState
from gradscale.core import arithmetic
from gradscale.core.aliasing import Span, numbered, overlaps_itself, require_disjoint, span
from gradscale.core.backend import DoneRead, HostRead
from gradscale.core.protocols import Collectives
from gradscale.core.summaries import Layout, Summary, join, layout_of
from gradscale.errors import InvalidTypeError
from gradscale_torch import devices
from gradscale_torch.devices import Flags, TensorRead, combined, integers, moved, refuse_capture
from gradscale_torch.gradients import kernel_view, require_values
from gradscale_torch.kernels import count_nonfinite, group_tensors, inverse_of, overlap, unscale_in_place

__all__ = ["TorchBackend"]

Tensor = torch.Tensor

_PLAIN = {Tensor, torch.nn.Parameter}
_NARROW = (torch.float16, torch.bfloat16)

# Bytes of one block: few enough to stay in a cache, and many enough to hide what a call costs.
_BLOCK = 1 << 18
_WORDS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


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

    def collectives(self, group: Any, /, *, timeout: float) -> Collectives:
        """Wrap a ProcessGroup or DeviceMesh; ``timeout`` in seconds. No communication."""
        from gradscale_torch.collectives import TorchCollectives

        return TorchCollectives(group, timeout)

    def read(self, x: Tensor, /) -> list[int]:
        """Return a 1-d int32 tensor as Python ints."""
        # A loss may be of another library.
        if isinstance(x, torch.Tensor):
            refuse_capture(x.device, "step once before the capture, since the CPU reads the first message over a group")
        values: list[int] = x.tolist()
        return values

    def peek(self, arrays: Sequence[Tensor], /) -> list[Any] | None:
        """Return the numbers in 0-d tensors of the CPU; None if one is on a device."""
        return None if any(devices.would_wait(x.device) for x in arrays) else [x.item() for x in arrays]

    def start_read(self, x: Tensor, /) -> HostRead:
        """Begin to copy a 1-d int32 tensor to the CPU, which does not wait."""
        return DoneRead(x.tolist()) if x.device.type == "cpu" else TensorRead(x)

    def placement(self, like: Tensor, /) -> torch.device | None:
        """Return the device of a tensor; a loss may be of another library."""
        return like.device if isinstance(like, Tensor) else None

    def move(self, x: Tensor, like: Tensor, /) -> Tensor:
        """Return a 0-d tensor on the device of another one; the CPU waits only for those that come to it."""
        return moved(x, like.device)

    def integers(self, values: Sequence[int], like: Tensor, /) -> Tensor:
        """Return numbers as a 1-d int32 tensor on the device of another one; nothing is waited for."""
        return integers(values, like.device)

    def example(self) -> Tensor:
        """Return a 0-d float32 tensor on the default device."""
        return torch.zeros((), dtype=torch.float32)

    def bits(self, x: Tensor, /) -> Tensor | None:
        """Return the bits of real values as signed integers; None for float8."""
        # A lazily negated tensor has no view of another type.
        return x.resolve_neg().view(_WORDS[x.dtype]) if x.dtype in _WORDS else None

    def read_summaries(
        self, arrays: Sequence[Tensor], others: Sequence[Tensor] = ()
    ) -> tuple[list[Summary], list[list[int]]]:
        """Summarize dense tensors and read others: one host read, and none for IEEE numbers of the CPU."""
        with torch.no_grad():
            counted = [_counted(array.detach()) for array in arrays]
            uncounted = [array.detach() for array, one in zip(arrays, counted, strict=True) if one is None]
            found, values = super().read_summaries(uncounted, others)
        remaining = iter(found)
        return [next(remaining) if one is None else one for one in counted], values

    def unscale(
        self, grads: Sequence[Tensor], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Tensor] | None = None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Divide tensors by the scale and judge them.

        Parameters
        ----------
        grads : sequence of tensors
            Floating or complex; dense, sparse or DTensors. Those that are part of an autograd graph stay part of it
            if new tensors are made.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new tensors.
        out : sequence of tensors, optional
            Tensors to write to instead; the gradients themselves for unscaling in place, outside of autograd's sight.

        Returns
        -------
        tensors : sequence of tensors
            ``out``, or new ones.
        nonfinite : tensor
            0-d int32 on the state's device. No host read.

        Raises
        ------
        InvalidTypeError
            For DTensors, whose verdict is not this rank's alone.
        InvalidValueError
            For a tensor to be written whose elements share memory; with each other, or with another of the tensors
            (SharedMemoryError).
        """
        if any(hasattr(grad, "device_mesh") for grad in grads):
            msg = (
                "the verdict on DTensor gradients must be agreed over their mesh: use gradscale_torch.GradScaler, or "
                "pass their to_local() to gradscale.unscale"
            )
            raise InvalidTypeError(msg)
        if out is None or torch.compiler.is_compiling():
            return arithmetic.unscale_arrays(grads, state, dtype=dtype, out=out)
        with torch.no_grad():
            _require_disjoint(grads, out)
            if not all(map(_fits, grads, out)):
                made, nonfinite = arithmetic.unscale_arrays(grads, state, out=out)
                for target, new in zip(out, made, strict=True):
                    target.copy_(new)
                return out, nonfinite
            for grad, target in zip(grads, out, strict=True):
                if grad is not target:
                    target.copy_(grad)
            flags: Flags = {}
            tensors = group_tensors([kernel_view(target) for target in out])
            require_values(tensors)
            # Reading the scale of a device would be a host read; a second look is none.
            judge_again = state.scale.device.type != "cpu" or state.scale.item() < 1.0
            unscale_in_place(tensors, inverse_of(state.scale), flags, judge_again=judge_again)
            count, home = count_nonfinite(flags, tensors), state.scale.device
            if count is None:
                return out, combined(flags, home).to(torch.int32)
            return out, torch.full((), count, dtype=torch.int32, device=home)


def _fits(grad: Tensor, target: Tensor) -> bool:
    """Tell whether copying a gradient first and unscaling the copy gives the same bits."""
    return grad is target or grad.dtype == target.dtype or (target.dtype == torch.float32 and grad.dtype in _NARROW)


def _require_disjoint(grads: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Refuse strided tensors to be written that share memory: in themselves, or with other tensors."""
    plain = {number: one for number, one in numbered(grads, out).items() if type(one) in _PLAIN and _has_memory(one)}
    spans: dict[int | None, list[tuple[Span, int]]] = {}
    for number, one in plain.items():
        if number < len(out) and not one.is_contiguous() and overlaps_itself(one.shape, one.stride()):
            raise overlap(number, one)
        # Pointers of other devices say where in its storage a tensor begins, and are no addresses.
        memory = None if one.is_cpu or one.is_cuda else one.untyped_storage().data_ptr()
        spans.setdefault(memory, []).append((_span(one), number))
    for found in spans.values():
        require_disjoint(found, lambda one, other: _share_memory(plain[one], plain[other]), len(out))


def _has_memory(x: Tensor) -> bool:
    return x.layout == torch.strided and x.device.type != "meta" and x.numel() > 0


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
    found = torch.full((), x.data_ptr(), dtype=torch.int64, device="cpu")
    for length, stride in zip(x.shape, x.stride(), strict=True):
        found = found[..., None] + torch.arange(length, device="cpu") * (stride * x.element_size())
    return found.reshape(-1)


def _counted(tensor: Tensor) -> Summary | None:
    """Return what a tensor of IEEE numbers of the CPU holds, counted block by block; None for any other."""
    layout = layout_of(tensor.dtype)
    if layout is None or tensor.device.type != "cpu":
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
