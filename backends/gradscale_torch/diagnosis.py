"""Summaries of tensors from their bits, and where the values of a gradient are: sparse tensors, DTensors, meta."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradscale.core.summaries import count_block, layout_of, summarize_arrays, summary_of, words
from gradscale_torch.gradients import local_tensor

__all__ = ["bits", "summarize", "values_of"]

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
        return torch.cat([_summarize_one(tensor.detach()).to(home) for tensor in tensors])


def bits(x: Tensor) -> Tensor | None:
    """Return the bits of real values as signed integers; None for float8."""
    # A lazily negated tensor has no view of another type.
    return x.resolve_neg().view(_WORDS[x.dtype]) if x.dtype in _WORDS else None


def _summarize_one(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        on_device: Tensor = summarize_arrays([tensor], bits)
        return on_device
    memory = _dense_memory(tensor)
    layout, integers = layout_of(tensor.dtype), bits(memory)
    step = _MOST_HALVES if tensor.element_size() == 2 else _BLOCK // tensor.element_size()
    if layout is None or integers is None:
        blocks = torch.split(memory, step) if memory.numel() else ()
        found = [summary_of(block.numel(), summarize_arrays([block], bits).tolist()) for block in blocks]
    else:
        counting = _Counting(integers, step, layout.mask)
        blocks = torch.split(integers, step) if integers.numel() else ()
        found = [count_block(block, layout, counting) for block in blocks]
    return torch.tensor(words(found), dtype=torch.int32, device="cpu")


def _dense_memory(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as a 1-d tensor, in the order of its memory where that has no gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


class _Counting:
    """Counts by flags in the type of the words: torch adds numbers of one type the fastest. Its memory is kept."""

    def __init__(self, integers: Tensor, step: int, mask: int) -> None:
        self._mask = torch.tensor(mask, dtype=integers.dtype, device="cpu")
        size = min(step, integers.numel())
        self._magnitudes, self._flags = torch.empty((2, size), dtype=integers.dtype, device="cpu")

    def magnitudes(self, bits: Tensor) -> Tensor:
        return torch.bitwise_and(bits, self._mask, out=self._magnitudes[: bits.numel()])

    def extent(self, x: Tensor, limit: int) -> tuple[int, int, int]:
        least, greatest = map(int, torch.aminmax(x))
        small = _number(torch.lt(x, limit, out=self._flags[: x.numel()])) if least < limit else 0
        zeros = x.numel() - int(torch.count_nonzero(x)) if least == 0 else 0
        return zeros, small, greatest

    def around(self, x: Tensor, limit: int) -> tuple[int, int, int]:
        flags = self._flags[: x.numel()]
        equal = _number(torch.eq(x, limit, out=flags))
        below = _number(torch.lt(x, limit, out=flags))
        return below, equal, int(x.mul_(flags).amax())


def _number(flags: Tensor) -> int:
    return int(flags.sum(dtype=flags.dtype))
