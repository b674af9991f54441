"""The verdict on an optimizer's gradients: what one rank has found, and the agreed one on its way to the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradscale.core import vector
from gradscale.core.protocols import Collectives, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError
from gradscale.scaler.agreement import Ballot, take_lists
from gradscale.scaler.iteration import Iteration
from gradscale_torch.gradients import GradientGroups
from gradscale_torch.kernels import Found, combined
from gradscale_torch.transfers import integers, is_capturing, moved, refuse_capture, start_reading

__all__ = ["NO_READS", "TensorFound", "TensorVerdict", "count_nonfinite", "would_wait"]

Tensor = torch.Tensor

_CPU = torch.device("cpu")

NO_READS = (
    "step an optimizer in it that skips by itself (fused=True, capturable=True), without on_skip=, on_update=, "
    'diagnose= and at_min="raise", or step after it'
)
"""What to do where a graph is captured and the host would have to read a verdict."""


@dataclasses.dataclass(slots=True)
class TensorFound:
    """What one rank has found in an optimizer's gradients.

    Attributes
    ----------
    flags : dict or None
        By device, a 0-d float32: 1 where something is not finite, else 0. None for the host alone, where the count
        says it as well.
    home : torch.device
        Where the scale is.
    count : int or None
        How many gradients are not finite, where the host knows; None on a device that it would have to wait for.
    is_scaled : bool
        Whether the gradients were only judged, and are left to the optimizer to unscale.
    norm : tensor or None
        Their norm before clipping.
    """

    flags: Found | None
    home: torch.device
    count: int | None = None
    is_scaled: bool = False
    norm: Tensor | None = None

    @property
    def found(self) -> Found:
        """The flags, made now if there are none."""
        if self.flags is None:
            self.flags = {_CPU: torch.full((), float(self.count != 0), dtype=torch.float32, device=_CPU)}
        return self.flags

    @property
    def flag(self) -> Tensor:
        """Return a 0-d float32 on the scale's device, exactly 0 or 1."""
        return combined(self.found, self.home)

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
        live = iteration.live
        self.groups = groups
        self.version = live.version
        self.is_scaled = found.is_scaled
        self._found, self._live, self._state = found, live, state
        if not groups:
            count = found.count
            if count is not None and isinstance(state.scale, float) and not would_wait(found.home):
                self.known = vector.verdict((count, count, bool(live.at_min_scale(state)), state.scale))
        else:
            number, agreement = iteration.number, iteration.agreement
            position = agreement.position(number, iteration.next_message(), groups, optimizer, max_norm)
            self._ballot = Ballot(agreement, groups, self._message(agreement.vector, position), number)

    @classmethod
    def unjudged(cls, iteration: Iteration) -> TensorVerdict:
        """Return the verdict of an optimizer that has not been judged, and may tell its own (``override``)."""
        state = iteration.live.current()
        home = torch.device("cpu") if isinstance(state.scale, float) else state.scale.device
        made = cls(iteration, TensorFound({}, home), state, ())
        made.is_begun = False
        return made

    def _message(self, packer: vector.AgreementVector, position: vector.Position) -> Any:
        """Return what this rank sends: a list where the groups take one and the host knows the numbers."""
        found, live, state = self._found, self._live, self._state
        count = found.count
        if isinstance(state.scale, float) and count is not None:
            at_min_scale = bool(live.at_min_scale(state))
            sent = packer.pack_plain(live.policy, state, count, position, at_min_scale=at_min_scale)
            return integers(sent, _CPU) if self._needs_tensors() else sent
        known = found.nonfinite if count is None or self._needs_tensors() else count
        arrays = live.arrays(state)
        return packer.pack(live.backend_for(arrays.scale), live.policy, arrays, known, position)

    @property
    def may_be_late(self) -> bool:
        """Whether the host would have to wait to know it, and nobody has looked at it yet."""
        return would_wait(self._found.home) and self._shown is None

    @property
    def is_for_host(self) -> bool:
        """Whether some of the gradients are the host's, which has to know the scale and the verdict to step by them."""
        return any(device.type == "cpu" for device in self._found.found)

    @property
    def is_read_by_host(self) -> bool:
        """Whether the ranks agree through the host, so that looking at the verdict reads it."""
        return len(self.groups) > 0 and self._found.home.type == "cpu" and not self.is_read_later

    def verdict(self) -> Verdict:
        """Return the verdict, read by the host if it is not yet, or what a host has written in its place."""
        found = self._read_once() if self.known is None else self.known
        if self._shown is None:
            return found
        is_bad = any(flag.item() for flag in self._shown.values())
        return found if is_bad == (found.nonfinite > 0) else found._replace(nonfinite=int(is_bad))

    def _read_once(self) -> Verdict:
        """Read the verdict and keep it in mind; but for one that each replay of a graph writes anew."""
        if self._late is None:
            refuse_capture(self._found.home, NO_READS)
            self.known = found = self._read()
            self._live.observe(found.scale, self._live.version)
            return found
        found = self._read_late(self._late)
        if not self.is_captured:
            self.known = found
        return found

    def count(self) -> Tensor | int:
        """Return the agreed verdict for the live state: a number where the host has read it, else a flag."""
        is_known = isinstance(self._state.scale, float) or (self._ballot is not None and isinstance(self._ballot.sent, list))
        if is_known and self._shown is None:
            return self.verdict().nonfinite
        return self.flag()

    def flag(self) -> Tensor:
        """Return the agreed verdict as a 0-d float32 on the scale's device, exactly 0 or 1; no host read there."""
        home = self._found.home
        if self._shown is not None:
            return (combined(self._shown, home) != 0).to(torch.float32)
        if not self.groups:
            return self._found.flag
        if self.is_read_by_host:
            return torch.tensor(float(self.verdict().nonfinite > 0), dtype=torch.float32, device=_CPU)
        assert self._ballot is not None
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
                devices = self._found.found or [self._found.home]
                self._shown = {device: moved(flag, device).clone() for device in devices}
            else:
                self._shown = self._found.found
        return self._shown

    def override(self, shown: Found) -> None:
        """Take over what a host says instead, by device."""
        self._shown = shown

    def accept(self) -> None:
        """Let what an optimizer has told of gradients that nobody else has judged be the verdict."""
        self.is_begun = self.is_begun or bool(self._shown)

    def start_reading(self) -> None:
        """Send the verdict on its way to the host, which does not wait for it."""
        if self._ballot is not None:
            values = torch.cat([self._ballot.agreed(), self._ballot.sent])
        else:
            values = torch.stack([self._found.flag, self._live.arrays(self._state).scale])
        self._late = start_reading(values)
        self.is_captured = is_capturing(values.device)

    def has_arrived(self) -> bool:
        """Tell whether it can be read without waiting."""
        return self._late is None or self._late(False) is not None

    def _needs_tensors(self) -> bool:
        """Tell whether the groups must agree on a tensor, and not on ints, though the host knows the count."""
        return would_wait(self._found.home) or not take_lists(self.groups)

    def _read(self) -> Verdict:
        """Read the verdict: one host read, on a device for all of it."""
        if self._ballot is None:
            return self._read_alone()
        return self._decoded(*self._ballot.read(self._live.backend_for))

    def _read_alone(self) -> Verdict:
        found, state = self._found, self._state
        at_min_scale: Any = self._live.at_min_scale(state)
        if isinstance(state.scale, float):
            count = int(found.flag.item()) if found.count is None else found.count
            return Verdict(count, count, bool(at_min_scale), state.scale)
        if found.count is not None and found.home.type == "cpu":
            is_at_min_scale = at_min_scale is not None and bool(at_min_scale.item())
            return Verdict(found.count, found.count, is_at_min_scale, _possible(state.scale.item()))
        flags = [found.flag, state.scale] + ([] if at_min_scale is None else [at_min_scale.float()])
        nonfinite, scale, *rest = torch.stack(flags).tolist()
        count = int(nonfinite) if found.count is None else found.count
        return Verdict(count, count, any(rest), _possible(scale))

    def _read_late(self, read: Callable[[bool], list[float] | None]) -> Verdict:
        values = read(True)
        assert values is not None
        if not self.groups:
            found, scale = values
            return Verdict(int(found), int(found), False, _possible(scale))
        whole = [int(value) for value in values]
        return self._decoded(whole[: vector.LENGTH], whole[vector.LENGTH :])

    def _decoded(self, agreed: Sequence[int], sent: Sequence[int]) -> Verdict:
        assert self._ballot is not None
        verdict = self._ballot.verdict(agreed, sent, self._live.policy)
        _possible(verdict.scale)
        return verdict


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


def would_wait(device: torch.device) -> bool:
    """Tell whether the host would have to wait for a device to know what is on it."""
    return device.type != "cpu"


def count_nonfinite(found: Found, gradients: GradientGroups) -> int | None:
    """Return how many gradients are not finite; None unless all of them are the host's own."""
    is_bad = False
    for device, flag in found.items():
        if device.type != "cpu":
            return None
        is_bad = is_bad or flag.item() != 0
    if not is_bad:
        return 0
    tensors = [tensor for tensors in gradients.groups.values() for tensor in tensors]
    # Duplicates of a sparse gradient may be finite one by one.
    return max(1, sum(not torch.isfinite(tensor).all().item() for tensor in tensors))
