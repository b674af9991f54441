"""What was found in an optimizer's gradients, the agreed verdict on it, and how either gets from a device to the host.

A copy from a device that is not waited for returns before it is done, so that the host would compute with whatever its
memory held. And while a graph is captured nothing is done: no event may be asked for, no memory of the host be pinned,
and what the host computes would stay as it is in every replay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradscale.core import vector
from gradscale.core.protocols import Collectives, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError, CallOrderError
from gradscale.scaler.agreement import Ballot, take_lists
from gradscale.scaler.iteration import Iteration

__all__ = [
    "NO_READS",
    "Found",
    "TensorFound",
    "TensorVerdict",
    "combined",
    "integers",
    "is_capturing",
    "moved",
    "refuse_capture",
    "would_wait",
]

Tensor = torch.Tensor
Found = dict[torch.device, Tensor]
"""By device, a 0-d float32: 1 where a value that is not finite was found, else 0."""

_CPU = torch.device("cpu")
_READ_AFTER = "ask for the verdict of a step after the capture"

NO_READS = (
    "step an optimizer in it that skips by itself (fused=True, capturable=True), without on_skip=, on_update=, "
    'diagnose= and at_min="raise", or step after it'
)
"""What to do where a graph is captured and the host would have to read a verdict."""


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


def would_wait(device: torch.device) -> bool:
    """Tell whether the host would have to wait for a device to know what is on it."""
    return device.type != "cpu"


def _start_reading(values: Tensor) -> Callable[[bool], list[float] | None]:
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


def combined(found: Mapping[torch.device, Tensor], home: torch.device) -> Tensor:
    """Return what was found on all devices as one 0-d float32, exactly 0 or 1, on one of them. No host read."""
    flags = [moved(flag, home) for flag in found.values()]
    if not flags:
        return torch.zeros((), dtype=torch.float32, device=home)
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


@dataclasses.dataclass(slots=True)
class TensorFound:
    """What one rank has found in an optimizer's gradients.

    Attributes
    ----------
    flags : dict
        By device, a 0-d float32: 1 where something is not finite, else 0.
    home : torch.device
        Where the scale is.
    count : int or None
        How many gradients are not finite, where the host knows; None on a device that it would have to wait for.
    scale : float or None
        What they were divided by, where the host knows.
    is_scaled : bool
        Whether the gradients were only judged, and are left to the optimizer to unscale.
    norm : tensor or None
        Their norm before clipping.
    """

    flags: Found
    home: torch.device
    count: int | None = None
    scale: float | None = None
    is_scaled: bool = False
    norm: Tensor | None = None

    @property
    def flag(self) -> Tensor:
        """Return a 0-d float32 on the scale's device, exactly 0 or 1."""
        return combined(self.flags, self.home)

    @property
    def nonfinite(self) -> Tensor:
        """Return a 0-d int32 on the scale's device: the count where it is known, else 0 or 1."""
        if self.count is None:
            return self.flag.to(torch.int32)
        return torch.full((), self.count, dtype=torch.int32, device=self.home)


class TensorVerdict:
    """The agreed verdict on an optimizer's gradients, which the host reads in the step or when somebody asks.

    Hosts may look at it by device (``show``). What they write there takes its place, as in torch's scalers.

    Parameters
    ----------
    iteration, found, state, groups, optimizer, max_norm
        As for :class:`gradscale.scaler.verdict.PendingVerdict`. Without groups nothing is sent.

    Attributes
    ----------
    groups, known, numbers, is_begun, is_read_later, is_scaled, is_captured, version
        As in :class:`gradscale.scaler.parts.Pending`.
    """

    known: Verdict | None = None
    numbers: ScaleState | None = None
    is_begun = True
    is_read_later = is_captured = False
    _shown: Found | None = None
    _ballot: Ballot | None = None
    _late: Callable[[bool], list[float] | None] | None = None

    def __init__(
        self,
        iteration: Iteration,
        found: TensorFound,
        state: ScaleState,
        groups: Sequence[Collectives],
        optimizer: Any = None,
        max_norm: float | None = None,
    ) -> None:
        live: Any = iteration.live
        self.groups, self.version, self.is_scaled = groups, live.version, found.is_scaled
        self._found, self._live, self._state = found, live, state
        if not groups:
            count, scale = found.count, found.scale
            if count is not None and scale is not None and 0.0 < scale < math.inf:
                at_min_scale = live.policy.at_min_scale(state)
                self.known = Verdict(count, count, at_min_scale is not None and bool(at_min_scale.item()), scale)
        else:
            number, agreement = iteration.number, iteration.agreement
            position = agreement.position(number, iteration.next_message(), groups, optimizer, max_norm)
            self._ballot = Ballot(agreement, groups, self._message(agreement.vector, position), number)

    def _message(self, packer: vector.AgreementVector, position: vector.Position) -> Any:
        """Return what this rank sends: ints where the groups take them and the host knows the numbers."""
        found, state, policy = self._found, self._state, self._live.policy
        if found.count is None or would_wait(found.home) or not take_lists(self.groups):
            return packer.pack(self._live.backend_for(state.scale), policy, state, found.nonfinite, position)
        at_min_scale = policy.at_min_scale(state)
        is_at_min_scale = at_min_scale is not None and bool(at_min_scale.item())
        numbers = ScaleState(*(field.item() for field in state))
        return packer.pack_plain(policy, numbers, found.count, position, at_min_scale=is_at_min_scale)

    @classmethod
    def unjudged(cls, iteration: Iteration) -> TensorVerdict:
        """Return the verdict of an optimizer that has not been judged, and may tell its own (``override``)."""
        state: Any = iteration.live.current()
        made = cls(iteration, TensorFound({}, state.scale.device), state, ())
        made.is_begun = False
        return made

    @property
    def may_be_late(self) -> bool:
        """Whether the host would have to wait to know it, and nobody has looked at it yet."""
        return would_wait(self._found.home) and self._shown is None

    @property
    def is_for_host(self) -> bool:
        """Whether some of the gradients are the host's, which has to know the scale and the verdict to step by them."""
        return _CPU in self._found.flags

    @property
    def is_read_by_host(self) -> bool:
        """Whether the ranks agree through the host, so that looking at the verdict reads it."""
        return len(self.groups) > 0 and self._found.home.type == "cpu" and not self.is_read_later

    def verdict(self) -> Verdict:
        """Return the verdict, read by the host if it is not yet, or what a host has written in its place."""
        found = self._read() if self.known is None else self.known
        if self._shown is None:
            return found
        is_bad = any(flag.item() for flag in self._shown.values())
        return found if is_bad == (found.nonfinite > 0) else found._replace(nonfinite=int(is_bad))

    def _read(self) -> Verdict:
        """Read the verdict, and keep it in mind but for one that each replay of a graph writes anew: one host read."""
        if self._late is not None:
            values: Any = self._late(True)
            if self._ballot is None:
                found = Verdict(int(values[0]), int(values[0]), False, _possible(values[1]))
            else:
                whole = list(map(int, values))
                found = self._decoded(whole[: vector.LENGTH], whole[vector.LENGTH :])
            if not self.is_captured:
                self.known = found
            return found
        refuse_capture(self._found.home, NO_READS)
        if self._ballot is None:
            found = self._read_alone()
        else:
            found = self._decoded(*self._ballot.read(self._live.backend_for))
        self.known = found
        self._live.observe(found.scale, self._live.version)
        return found

    def _read_alone(self) -> Verdict:
        found, state = self._found, self._state
        at_min_scale: Any = self._live.policy.at_min_scale(state)
        flags = [found.flag, state.scale] + ([] if at_min_scale is None else [at_min_scale.float()])
        nonfinite, scale, *rest = torch.stack(flags).tolist()
        count = int(nonfinite) if found.count is None else found.count
        return Verdict(count, count, any(rest), _possible(scale))

    def _decoded(self, agreed: Sequence[int], sent: Sequence[int]) -> Verdict:
        assert self._ballot is not None
        verdict = self._ballot.verdict(agreed, sent, self._live.policy)
        _possible(verdict.scale)
        return verdict

    def start_reading(self) -> None:
        """Send the verdict on its way to the host, which does not wait for it."""
        if self._ballot is not None:
            values = torch.cat([self._ballot.agreed(), self._ballot.sent])
        else:
            values = torch.stack([self._found.flag, self._state.scale])
        self._late = _start_reading(values)
        self.is_captured = is_capturing(values.device)

    def has_arrived(self) -> bool:
        """Tell whether it can be read without waiting."""
        return self._late is None or self._late(False) is not None

    def count(self) -> Tensor | int:
        """Return the agreed verdict for the live state: a number where the host has read it, else a flag."""
        if self.known is not None and self._shown is None and self._found.home.type == "cpu":
            return self.known.nonfinite
        return self.flag()

    def flag(self) -> Tensor:
        """Return the agreed verdict as a 0-d float32 on the scale's device, exactly 0 or 1; no host read there."""
        home = self._found.home
        if self._shown is not None:
            return (combined(self._shown, home) != 0).to(torch.float32)
        if self._ballot is None:
            return self._found.flag
        if self.is_read_by_host:
            return torch.tensor(float(self.verdict().nonfinite > 0), dtype=torch.float32, device=_CPU)
        agreed = self._ballot.agreed()
        fields = agreed[2:].reshape(2, -1)
        # Where ranks differ no rank steps, until the host sees it.
        flag: Tensor = ((agreed[0] != 0) | (fields.sum(0) != 0).any()).to(torch.float32)
        return flag

    def show(self) -> Found:
        """Return the agreed verdict for each device of the gradients, and for the scale's without any."""
        if self._shown is None:
            if self.groups:
                flag = self.flag()
                devices = self._found.flags or [self._found.home]
                self._shown = {device: moved(flag, device).clone() for device in devices}
            else:
                self._shown = self._found.flags
        return self._shown

    def override(self, shown: Found) -> None:
        """Take over what a host says instead, by device."""
        self._shown = shown

    def accept(self) -> None:
        """Let what an optimizer has told of gradients that nobody else has judged be the verdict."""
        self.is_begun = self.is_begun or bool(self._shown)


def _possible(scale: float) -> float:
    """Return a scale that the host has read from a tensor, having checked that a policy can have made it.

    Raises
    ------
    BackendError
        For one that is not finite and above 0, which torch's scalers would skip steps or lose gradients with for good.
    """
    if not 0.0 < scale < math.inf:
        msg = (
            f"gradients were divided by a scale that no policy makes, got scale={scale!r}: something else has written "
            f"to the scaler's tensor _scale, or torch gives wrong values. Nothing is stepped; load a checkpoint with "
            f"load_state_dict(), which begins the iteration anew"
        )
        raise BackendError(msg)
    return scale
