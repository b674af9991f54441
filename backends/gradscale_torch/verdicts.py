"""The findings in an optimizer's gradients, the agreed verdict on them, and how either gets from a device to the CPU.

The CPU would compute with whatever its memory held if a copy from a device that it does not wait for were not done. And
while a graph is captured nothing is done: no event may be asked for, no memory pinned, and numbers of the CPU would
stay the same in every replay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch

from gradscale.core import vector
from gradscale.core.protocols import Collectives, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError, CallOrderError
from gradscale.scaler.agreement import Ballot, take_lists
from gradscale.scaler.iteration import Iteration

__all__ = [
    "MOST_COUNTED",
    "NO_READS",
    "Flags",
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
Flags: TypeAlias = dict[torch.device, Tensor]
"""By device, a 0-d float32: 1 if a value that is not finite was found, else 0."""
# Called with whether it may wait; returns None if it may not and the values have not arrived.
_Reader: TypeAlias = Callable[[bool], list[float] | None]

_CPU = torch.device("cpu")
MOST_COUNTED = (1 << 15) - 3
"""Bad gradients that one message counts: more of them are as bad."""

_READ_AFTER = "ask for the verdict of a step after the capture"

NO_READS = (
    "step an optimizer in it that skips by itself (fused=True, capturable=True), without on_skip=, on_update=, "
    'diagnose= and at_min="raise", or step after it'
)
"""Advice for a capture in which the CPU would have to read a verdict."""


def moved(tensor: Tensor, device: torch.device, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a small tensor on another device, or itself if it is there; the CPU waits only for its own copies."""
    if tensor.device == device:
        return tensor if dtype is None else tensor.to(dtype)
    if "cpu" in (tensor.device.type, device.type):
        refuse_capture(tensor.device if device.type == "cpu" else device, "gradients, losses and scale must be on it")
    return tensor.to(device, tensor.dtype if dtype is None else dtype, non_blocking=device.type != "cpu")


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers as a 1-d int32 tensor on a device; nothing is waited for."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=torch.int32, device=device)
    # The CPU would wait for a copy, but not for the arguments of a kernel.
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
    """Tell whether the CPU would have to wait for a device to know what is on it."""
    return device.type != "cpu"


def _start_reading(values: Tensor) -> _Reader:
    """Begin to copy a small 1-d tensor to the CPU, and return a function that asks for it."""
    device = values.device
    if device.type == "cpu":
        known: list[float] = values.tolist()
        return lambda _: known
    if is_capturing(device):

        def replayed(may_wait: bool) -> list[float] | None:
            if not may_wait:
                return None
            # Replays of the graph have written to it.
            refuse_capture(device, _READ_AFTER)
            found: list[float] = values.tolist()
            return found

        return replayed
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


def combined(found: Mapping[torch.device, Tensor], home: torch.device) -> Tensor:
    """Return the flags of all devices as one 0-d float32, exactly 0 or 1, on one of them. No host read."""
    if len(found) == 1 and home in found:
        return found[home]
    flags = [moved(flag, home) for flag in found.values()]
    return torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=home)


@dataclasses.dataclass(slots=True)
class TensorFound:
    """The findings of one rank in an optimizer's gradients.

    ``home`` is the scale's device. ``count`` (of gradients that are not finite) and ``scale`` are None if the CPU would
    have to wait for them. ``is_scaled``: they were only judged, and the optimizer unscales them.
    A norm has a flag, too.
    """

    flags: Flags
    home: torch.device
    count: int | None = None
    scale: float | None = None
    is_scaled: bool = False
    norm: Tensor | None = None
    has_gradients: bool = False

    @property
    def nonfinite(self) -> Tensor:
        """A 0-d int32 on the scale's device: the count if it is known, else 0 or 1."""
        if self.count is None:
            return combined(self.flags, self.home).to(torch.int32)
        return torch.full((), self.count, dtype=torch.int32, device=self.home)


class TensorVerdict:
    """The agreed verdict on an optimizer's gradients, which the CPU reads in the step or when somebody asks.

    See :class:`gradscale.scaler.parts.Pending`. Frameworks may look at it by device (``show``), and the values
    that they write there take its place, as in torch's scalers.
    """

    known: Verdict | None = None
    numbers: ScaleState | None = None
    is_read_later = is_captured = False
    _shown: Flags | None = None
    _ballot: Ballot | None = None
    _late: _Reader | None = None
    _is_judged = True

    def __init__(
        self,
        iteration: Iteration,
        found: TensorFound,
        state: ScaleState,
        groups: Sequence[Collectives],
        optimizer: object = None,
        max_norm: float | None = None,
        code: Tensor | int = 0,
    ) -> None:
        live = iteration.live
        self.groups, self.version, self.is_scaled = groups, live.version, found.is_scaled
        self.state = state
        self._found, self._live, self._rank = found, live, iteration.agreement.rank
        if not isinstance(code, int) and not would_wait(found.home):
            code = int(code.item())
        # Why this rank skips the step, other than for an overflow.
        self._code = code
        if found.count:
            code = vector.reason_code(vector.Reason.OVERFLOW, self._rank())
        if groups:
            agreement = iteration.agreement
            about = (agreement.identify(live.policy), *iteration.position(groups, optimizer, max_norm))
            self._ballot = Ballot(agreement, groups, self._message(about, code), iteration.number)
        elif found.count is None or found.scale is None or would_wait(found.home):
            return
        elif 0.0 < found.scale < math.inf:
            self.known = Verdict(
                *(found.count, found.count, bool(live.policy.at_min_scale(state)), found.scale, found.has_gradients),
                cast(int, code),
            )

    def _message(self, about: Sequence[int], code: Tensor | int) -> Tensor | list[int]:
        """Return this rank's vector: ints if the groups take them and the CPU knows the numbers."""
        found, state, policy = self._found, self.state, self._live.policy
        if found.count is None or would_wait(found.home) or not take_lists(self.groups):
            backend = self._live.backend_for(state.scale)
            sent: Tensor = backend.pack(
                policy, state, found.nonfinite, about, has_gradients=found.has_gradients, code=code
            )
            return sent
        numbers = ScaleState(*map(Tensor.item, state))
        count = min(found.count, MOST_COUNTED)
        at_min_scale = policy.at_min_scale(state)
        return vector.pack_plain(
            numbers, count, bool(at_min_scale), about, has_gradients=found.has_gradients, code=cast(int, code)
        )

    @classmethod
    def unjudged(cls, iteration: Iteration) -> TensorVerdict:
        """Return the verdict of an optimizer that has not been judged, and may bring its own (``override``)."""
        state = iteration.live.current()
        made = cls(iteration, TensorFound({}, state.scale.device), state, ())
        made._is_judged = False
        return made

    @property
    def is_begun(self) -> bool:
        """Whether the gradients have been judged, by a framework at least."""
        return self._is_judged or bool(self._shown)

    @property
    def may_be_late(self) -> bool:
        """Whether the CPU would have to wait for it, and nobody has looked at it yet."""
        return would_wait(self._found.home) and self._shown is None

    @property
    def has_nothing(self) -> bool:
        """Whether this process decides alone, and has no gradient to decide on."""
        is_refused = isinstance(self._code, int) and self._code > 0
        return self._ballot is None and not self._found.has_gradients and not self._shown and not is_refused

    @property
    def is_for_cpu(self) -> bool:
        """Whether some gradients are the CPU's, which then has to know the scale and the verdict to step by them."""
        return _CPU in self._found.flags

    @property
    def is_read_by_cpu(self) -> bool:
        """Whether the ranks agree through the CPU, so that looking at the verdict reads it."""
        return len(self.groups) > 0 and self._found.home.type == "cpu" and not self.is_read_later

    def verdict(self) -> Verdict:
        """Return the verdict, read now if it is not yet, or the one that a framework has written in its place."""
        found = self.known or (self._read() if self._late is None else self._read_late(self._late))
        if self._shown is None:
            return found
        is_bad = any(flag.item() for flag in self._shown.values())
        if is_bad != found.is_skipped:
            found = found._replace(nonfinite=int(is_bad), code=0)
        return found if found.has_gradients else found._replace(has_gradients=len(self._shown) > 0)

    def _read(self) -> Verdict:
        """Read the verdict now, and keep it: one host read."""
        refuse_capture(self._found.home, NO_READS)
        if self._ballot is not None and isinstance(agreed := self._ballot.agreed(is_read=True), list):
            values: Sequence[float] = [*agreed, *self._ballot.sent]
        else:
            values = self._tensor().tolist()
        found = self.known = self._decoded(values)
        self._live.observe(found.scale, self._live.version)
        return found

    def _read_late(self, read: _Reader) -> Verdict:
        """Read a verdict that was sent on its way, and keep it unless each replay of a graph writes another."""
        if self._ballot is not None and not self.is_captured and not self.has_arrived():
            self._ballot.agreed(is_read=True)
        found = self._decoded(read(True) or ())
        if not self.is_captured:
            self.known = found
        return found

    def _decoded(self, values: Sequence[float]) -> Verdict:
        """Return the verdict from a ballot's answer and this rank's vector, or from flag, scale and at_min_scale."""
        if self._ballot is None:
            nonfinite, scale, *rest = values
            code = self._code if isinstance(self._code, int) else int(rest.pop(0))
            count = int(nonfinite) if self._found.count is None else self._found.count
            if count:
                code = vector.reason_code(vector.Reason.OVERFLOW, self._rank())
            found = Verdict(count, count, any(rest), scale, self._found.has_gradients, code)
        else:
            whole = list(map(int, values))
            found = self._ballot.verdict(whole[: vector.LENGTH], whole[vector.LENGTH :], self._live.policy)
        if not 0.0 < found.scale < math.inf:
            msg = (
                f"gradients were divided by a scale that no policy makes, got scale={found.scale!r}: something else "
                f"has written to the scaler's tensor _scale, or torch gives wrong values. Nothing is stepped; load a "
                f"checkpoint with load_state_dict(), which begins the iteration anew"
            )
            raise BackendError(msg)
        return found

    def _tensor(self) -> Tensor:
        if self._ballot is not None:
            return torch.cat([self._ballot.agreed(), self._ballot.sent])
        flags = [combined(self._found.flags, self._found.home), self.state.scale]
        if not isinstance(self._code, int):
            # Exact in float32: it has 23 bits.
            flags.append(self._code.float())
        at_min_scale: Tensor | None = self._live.policy.at_min_scale(self.state)
        return torch.stack(flags if at_min_scale is None else [*flags, at_min_scale.float()])

    def start_reading(self) -> None:
        """Send the verdict on its way to the CPU, which does not wait for it."""
        values = self._tensor()
        self._late = _start_reading(values)
        self.is_captured = is_capturing(values.device)

    def has_arrived(self) -> bool:
        """Tell whether it can be read without waiting."""
        return self._late is None or self._late(False) is not None

    def count(self) -> Tensor | None:
        """Return the agreed overflow as a 0-d float32 on the scale's device, exactly 0 or 1; no host read there.

        None for a known spike or refusal, which moves no scale.
        """
        known = self.known
        if known is None and self.is_read_by_cpu:
            known = self.verdict()
        if known is not None and known.code and self.verdict().is_held:
            return None
        if self._shown is None:
            return self._overflow()
        shown = (combined(self._shown, self._found.home) != 0).to(torch.float32)
        code = self._code if self._ballot is None or known is not None else self._ballot.agreed()[3]
        return shown if isinstance(code, int) else torch.where(code != 0, self._overflow(), shown)

    def _overflow(self) -> Tensor:
        """Return whether any rank has an overflow, or the ranks differ, as ``count`` does."""
        if self._ballot is None:
            return combined(self._found.flags, self._found.home)
        if self.is_read_by_cpu:
            return torch.tensor(float(self.verdict().nonfinite > 0), dtype=torch.float32, device=_CPU)
        agreed = self._ballot.agreed()
        fields = agreed[vector.FLAGS :].reshape(2, -1)
        # If ranks differ no rank steps, until the CPU sees it.
        flag: Tensor = ((agreed[0] != 0) | (fields.sum(0) != 0).any()).to(torch.float32)
        return flag

    def _agreed_code(self) -> Tensor | int:
        """Return why a rank skips the step, other than for an overflow that the CPU does not know."""
        return self._code if self._ballot is None else self._ballot.agreed()[3]

    def flag(self) -> Tensor:
        """Return whether to skip the step, 0-d float32 on the scale's device, exactly 0 or 1; no host read there."""
        if self._shown is not None:
            return (combined(self._shown, self._found.home) != 0).to(torch.float32)
        if self.is_read_by_cpu:
            return torch.tensor(float(self.verdict().is_skipped), dtype=torch.float32, device=_CPU)
        own, code = self._overflow(), self._agreed_code()
        if isinstance(code, int):
            return torch.ones_like(own) if code else own
        return torch.maximum(own, (code != 0).to(torch.float32))

    def held(self) -> Tensor | bool:
        """Return whether the scale stays as it is; a 0-d bool on the scale's device if the CPU does not know."""
        code = self._agreed_code()
        if self._ballot is None and isinstance(code, int) and code == 0:
            return False
        is_clean = self._overflow() == 0
        return is_clean if isinstance(code, int) else is_clean & (code != 0)

    def reason(self) -> vector.Reason | Tensor:
        """Return why the ranks skip the step; its number as a 0-d int32 if the CPU does not know."""
        if self.known is not None or not self.is_read_later:
            return self.verdict().reason
        own, code = self._overflow(), self._agreed_code()
        given = vector.reason_number(code)
        number = torch.full_like(own, given, dtype=torch.int32) if isinstance(given, int) else given
        return torch.where(own != 0, torch.full_like(number, vector.Reason.OVERFLOW), number)

    def refuse(self, code: int) -> None:
        """Skip the step of a process that decides alone."""
        self._code = code
        if self.known is not None and not self.known.nonfinite:
            self.known = self.known._replace(code=code)
        if self._shown is not None:
            self._shown = {device: torch.ones_like(flag) for device, flag in self._shown.items()}

    def show(self) -> Flags:
        """Return the agreed verdict for each device of the gradients, and for the scale's without any."""
        if self._shown is None:
            if self.groups or not isinstance(self._code, int) or self._code:
                flag = self.flag()
                devices = self._found.flags or [self._found.home]
                self._shown = {device: moved(flag, device).clone() for device in devices}
            else:
                self._shown = self._found.flags
        return self._shown

    def override(self, shown: Flags) -> None:
        """Take over a framework's verdict instead, by device."""
        self._shown = shown
