"""Summaries of tensors from their bits, and where the values of a gradient are: sparse tensors, DTensors, meta."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradscale.core.summaries import summarize_arrays, words
from gradscale_torch.gradients import kernel_view, local_tensor

__all__ = ["summarize", "values_of"]

Tensor = torch.Tensor

# Bytes of one block: few enough to stay in a cache, and elements to be counted in int16, and many enough to hide what a
# call costs. A whole number of complex ones.
_BLOCK = (1 << 18) - 512
_MOST_HALVES = (1 << 15) - 64
_WORDS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def values_of(gradient: Tensor) -> Tensor | None:
    """Return the dense tensor that holds a gradient's values on this rank; None on the meta device.

    Of a DTensor it is the local part, complete; of a sparse tensor the stored values, duplicates summed up as the
    optimizer will see them. The gradient is left as it is.
    """
    if gradient.device.type == "meta":
        return None
    with torch.no_grad():
        local = local_tensor(gradient.detach())
        if local.layout == torch.sparse_coo and not local.is_coalesced():
            # float16 is summed in float32, as it is when it is unscaled.
            wide = local.to(torch.float32) if local.dtype is torch.float16 else local
            local = wide.coalesce().to(local.dtype)
        if local.layout == torch.strided:
            return local
        return local.values()


def summarize(tensors: Sequence[Tensor]) -> Tensor:
    """Return what :func:`gradscale.core.summaries.summarize_arrays` does: 1-d int32 on the device of the first.

    Parameters
    ----------
    tensors : sequence of tensors
        Floating or complex, dense, on any devices. Those of the host are gone through block by block; those of a
        device wait for nothing.
    """
    with torch.no_grad():
        home = tensors[0].device
        found = [_summarize_one(tensor.detach()) for tensor in tensors]
        whole = [torch.tensor(row, dtype=torch.int32) if isinstance(row, list) else row for row in found]
        return torch.cat([row.to(home) for row in whole])


def _summarize_one(tensor: Tensor) -> Tensor | list[int]:
    part = torch.empty(0, dtype=tensor.dtype).real.dtype if tensor.dtype.is_complex else tensor.dtype
    if tensor.device.type != "cpu" or part not in _WORDS:
        found: Tensor = summarize_arrays([tensor])
        return found
    # Of a lazily conjugated tensor the memory holds other signs, and those are left out. A lazily negated one has no
    # view of another type.
    whole = tensor.resolve_neg()
    dense = kernel_view(whole) if tensor.dtype.is_complex else whole
    bits = _dense_memory(dense).view(_WORDS[part])
    inf, nan, zeros, subnormals, largest = _count_pairs(bits, part) if tensor.dtype.is_complex else _count(bits, part)
    return words(inf, nan, zeros, subnormals, largest)


def _dense_memory(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a 1-d tensor, in the order of its memory where that has no gaps."""
    if tensor.is_contiguous() or tensor.dim() < 2:
        return tensor.reshape(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def _thresholds(part: torch.dtype) -> tuple[int, int, int]:
    """Return the bits of a magnitude: all of them, those of infinity, and those of the smallest normal number."""
    info = torch.finfo(part)
    magnitude = torch.iinfo(_WORDS[part]).max
    fraction = round(1 / info.eps) - 1
    return magnitude, magnitude - fraction, fraction + 1


def _count(bits: Tensor, part: torch.dtype) -> tuple[int, int, int, int, float]:
    magnitude, infinity, smallest_normal = _thresholds(part)
    mask = torch.tensor(magnitude, dtype=bits.dtype)
    step = _MOST_HALVES if bits.element_size() == 2 else _BLOCK // bits.element_size()
    room, flags = torch.empty((2, min(step, bits.numel())), dtype=bits.dtype)
    inf = nan = zeros = small = largest = 0
    for block in _blocks(bits, step):
        size = block.numel()
        magnitudes = torch.bitwise_and(block, mask, out=room[:size])
        bottom, top = map(int, torch.aminmax(magnitudes))
        flag = flags[:size]
        if bottom < smallest_normal:
            small += _number(torch.lt(magnitudes, smallest_normal, out=flag))
            if bottom == 0:
                zeros += size - int(torch.count_nonzero(magnitudes))
        if top < infinity:
            largest = max(largest, top)
        elif bottom > infinity:
            nan += size
        else:
            of_nan = _number(torch.gt(magnitudes, infinity, out=flag))
            finite = _number(torch.lt(magnitudes, infinity, out=flag))
            nan += of_nan
            inf += size - finite - of_nan
            largest = max(largest, int(magnitudes.mul_(flag).amax()))
    return inf, nan, zeros, small - zeros, _as_float(largest, part)


def _count_pairs(bits: Tensor, part: torch.dtype) -> tuple[int, int, int, int, float]:
    """Count complex elements, given by the words of their parts."""
    magnitude, infinity, smallest_normal = _thresholds(part)
    inf = nan = zeros = subnormals = largest = 0
    for block in _blocks(bits, _MOST_HALVES):
        parts = (block & magnitude).reshape(-1, 2)
        worst = parts.amax(1)
        is_small = ((parts > 0) & (parts < smallest_normal)).any(1) & (worst < infinity)
        inf += int((worst == infinity).sum())
        nan += int((worst > infinity).sum())
        zeros += int((worst == 0).sum())
        subnormals += int(is_small.sum())
        largest = max(largest, int(parts.masked_fill(parts >= infinity, 0).amax()))
    return inf, nan, zeros, subnormals, _as_float(largest, part)


def _blocks(bits: Tensor, step: int) -> Sequence[Tensor]:
    return torch.split(bits, step) if bits.numel() else ()


def _number(flags: Tensor) -> int:
    """Return how many flags, 1 or 0 in the type of the words, are set; torch adds numbers of one type the fastest."""
    return int(flags.sum(dtype=flags.dtype))


def _as_float(bits: int, part: torch.dtype) -> float:
    value: Any = torch.tensor([bits], dtype=_WORDS[part]).view(part)
    return float(value.item())
