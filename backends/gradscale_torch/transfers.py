"""What passes between the host and devices: values that have arrived, are on their way, or may not be asked for.

A copy from a device that is not waited for returns before it is done, so that the host would compute with whatever its
memory held. And while a graph is captured nothing is done: no event may be asked for, no memory of the host be pinned,
and what the host computes would stay as it is in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradscale.errors import CallOrderError

__all__ = ["integers", "is_capturing", "moved", "refuse_capture", "start_reading"]

Tensor = torch.Tensor

_READ_AFTER = "ask for the verdict of a step after the capture"


def moved(tensor: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a small tensor on another device, or itself where it is there.

    The host waits for what comes to it, and for nothing else: between devices the streams keep the order.

    Raises
    ------
    CallOrderError
        While a graph is captured, from the host to a device or back.
    """
    if tensor.device == device:
        return tensor if dtype is None else tensor.to(dtype)
    if "cpu" in (tensor.device.type, device.type):
        refuse_capture(tensor.device if device.type == "cpu" else device, "gradients, losses and scale must be on it")
    return tensor.to(device, tensor.dtype if dtype is None else dtype, non_blocking=device.type != "cpu")


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as a 1-d int32 tensor on a device; nothing is waited for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int32, device=device)
    # Copied from the host they would be waited for. As arguments of a kernel they are not.
    made = torch.zeros(len(values), dtype=torch.int32, device=device)
    torch._foreach_add_(made.unbind(), list(values))
    return made


def is_capturing(device: torch.device) -> bool:
    """Tell whether a graph of a device is being captured, in which nothing may be waited for or asked."""
    if device.type == "cpu":
        return False
    module = getattr(torch, device.type, None)
    ask: Callable[[], bool] | None = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and ask()


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise CallOrderError while a graph of a device is being captured; ``what`` says what to do instead."""
    if is_capturing(device):
        msg = f"a graph of {device} is being captured, in which the host takes no part: {what}"
        raise CallOrderError(msg)


def start_reading(values: Tensor) -> Callable[[bool], list[float] | None]:
    """Begin to copy a small tensor to the host, and return what asks for it.

    Parameters
    ----------
    values : tensor
        1-d.

    Returns
    -------
    callable
        Called with whether it may wait. Returns the values, or None if they are not there yet and it may not wait, or
        a graph is captured.
    """
    device = values.device
    if device.type == "cpu":
        known: list[float] = values.tolist()
        return lambda _: known
    if is_capturing(device):
        # What replays of the graph write is read when it is asked for.
        return lambda may_wait: _read(values) if may_wait else None
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    event = torch.Event(device=device, enable_timing=False)
    # By itself it would be recorded on the stream of the current device, whatever it was made for.
    event.record(torch.accelerator.current_stream(device))

    def read(may_wait: bool) -> list[float] | None:
        if may_wait:
            refuse_capture(device, _READ_AFTER)
            event.synchronize()
        elif is_capturing(device) or not event.query():
            return None
        return copy.tolist()

    return read


def _read(values: Tensor) -> list[float]:
    refuse_capture(values.device, _READ_AFTER)
    found: list[float] = values.tolist()
    return found
