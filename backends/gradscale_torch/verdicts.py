"""What one rank has found in an optimizer's gradients, and how it is read without making the host wait for nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from gradscale_torch.gradients import Gathered
from gradscale_torch.kernels import Found, combined

__all__ = ["LocalVerdict", "count_nonfinite", "finish_alone", "is_capturing", "start_reading"]

Tensor = torch.Tensor


@dataclasses.dataclass(slots=True)
class LocalVerdict:
    """The verdict of one rank on an optimizer's gradients.

    Attributes
    ----------
    found : dict
        By device, a 0-d float32: 1 where something is not finite, else 0.
    home : torch.device
        Where the scale is.
    count : int or None
        How many gradients are not finite, where the host knows; None on a device that it would have to wait for.
    has_scaled_gradients : bool
        Whether the gradients were only judged, and are left to the optimizer to unscale.
    is_read_later : bool
        Whether the optimizer skips by itself, so that the host reads the verdict only when somebody asks.
    shown : dict or None
        The agreed verdict by device, once somebody has looked at it: what they write there takes its place, as in
        torch's scalers.
    """

    found: Found
    home: torch.device
    count: int | None = None
    has_scaled_gradients: bool = False
    is_read_later: bool = False
    shown: Found | None = None

    @property
    def flag(self) -> Tensor:
        """Return a 0-d float32 on the scale's device, exactly 0 or 1."""
        return combined(self.found, self.home)

    @property
    def nonfinite(self) -> Tensor:
        """Return a 0-d int32 on the scale's device: the count where it is known, else 0 or 1."""
        if self.count is None:
            return self.flag.to(torch.int32)
        return torch.tensor(self.count, dtype=torch.int32, device=self.home)


def count_nonfinite(found: Found, gathered: Gathered) -> int | None:
    """Return how many gradients are not finite; None unless all of them are the host's own."""
    if not all(device.type == "cpu" for device in found):
        return None
    if not any(flag.item() for flag in found.values()):
        return 0
    tensors = [tensor for tensors in gathered.groups.values() for tensor in tensors]
    # Duplicates of a sparse gradient may be finite one by one.
    return max(1, sum(not torch.isfinite(tensor).all().item() for tensor in tensors))


def finish_alone() -> None:
    """Finish an agreement that nobody else takes part in."""


def is_capturing(device: torch.device) -> bool:
    """Tell whether a CUDA graph is being captured, in which nothing may be waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def start_reading(values: Tensor) -> Callable[[bool], list[float] | None]:
    """Begin to copy a small tensor to the host, and return what asks for it.

    Parameters
    ----------
    values : tensor
        1-d.

    Returns
    -------
    callable
        Called with whether it may wait. Returns the values, or None if they are not there yet and it may not wait.
    """
    if values.device.type == "cpu":
        known: list[float] = values.tolist()
        return lambda _: known
    if is_capturing(values.device):
        # What replays of the graph write is read when it is asked for.
        return lambda may_wait: values.tolist() if may_wait else None
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    event = torch.Event(device=values.device)
    event.record()

    def read(may_wait: bool) -> list[float] | None:
        if may_wait:
            event.synchronize()
        elif not event.query():
            return None
        return copy.tolist()

    return read
