"""How small tensors get from one device to another and to the CPU, and what a capture of a graph forbids.

The CPU would compute with stale memory if a copy from a device that it does not wait for were not done. And while a
graph is captured nothing is done: no event may be queried, no memory pinned, and numbers of the CPU would stay the same
in every replay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from gradscale.errors import CallOrderError

Tensor = torch.Tensor
Flags: TypeAlias = dict[torch.device, Tensor]
"""By device, a 0-d float32: 1 if a value is not finite, else 0."""

CPU = torch.device("cpu")

_READ_AFTER = "ask for the verdict of a step after the capture"

NO_READS = (
    "step an optimizer in it that skips by itself (fused=True, capturable=True), without on_skip=, on_update=, "
    'diagnose= and at_min="raise", or step after it'
)
"""Advice for a capture in which the CPU would have to read a verdict."""


def to_device(tensor: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a small tensor on another device, or itself if it is there; the CPU waits only for its own copies."""
    if tensor.device == device:
        return tensor if dtype is None else tensor.to(dtype)
    if "cpu" in (tensor.device.type, device.type):
        forbid_capture(tensor.device if device.type == "cpu" else device, "gradients, losses and state must be on it")
    return tensor.to(device, tensor.dtype if dtype is None else dtype, non_blocking=device.type != "cpu")


def is_capturing(device: torch.device) -> bool:
    """Tell whether a graph of a device is being captured, in which nothing may be waited for or queried."""
    if device == CPU:
        return False
    module = getattr(torch, device.type, None)
    ask: Callable[[], bool] | None = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and ask()


def forbid_capture(device: torch.device, what: str) -> None:
    """Raise CallOrderError while a graph of a device is being captured; ``what`` says what to do instead."""
    if is_capturing(device):
        msg = f"a graph of {device} is being captured, in which the host takes no part: {what}"
        raise CallOrderError(msg)


is_on_cpu: Callable[[Tensor], bool] = operator.attrgetter("is_cpu")
"""Tells whether the CPU knows a tensor's values without waiting for a device."""


class TensorRead:
    """A 1-d int32 tensor on its way from a device to the CPU; one of the CPU is there already."""

    def __init__(self, values: Tensor) -> None:
        device = self._device = values.device
        self.is_replayed = is_capturing(device)
        self._event: torch.Event | None = None
        self._values = values
        if not values.is_cpu and not self.is_replayed:
            self._values = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.Event(device=device, enable_timing=False)
            # By itself it would be recorded on the stream of the current device, whatever its own is.
            self._event.record(torch.accelerator.current_stream(device))

    def is_done(self) -> bool:
        """Tell whether the CPU has it; of a captured graph each replay writes other values."""
        if self._event is None:
            return not self.is_replayed
        return not is_capturing(self._device) and self._event.query()

    def __call__(self) -> list[int]:
        """Return the values; of a captured graph, those of the last replay."""
        forbid_capture(self._device, _READ_AFTER)
        if self._event is not None:
            self._event.synchronize()
        values: list[int] = self._values.tolist()
        return values


def combine_flags(flags: Mapping[torch.device, Tensor], target: torch.device) -> Tensor:
    """Return the flags of all devices as one 0-d float32, exactly 0 or 1, on one of them. No host read."""
    if len(flags) == 1 and target in flags:
        return flags[target]
    copies = [to_device(flag, target) for flag in flags.values()]
    return torch.stack(copies).amax() if copies else torch.zeros((), dtype=torch.float32, device=target)
