"""PendingVerdict: the verdict on one optimizer's gradients, from the start of the agreement until the host has it."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.backend import HostRead
from gradscale.core.gradients import Findings, norm_bits
from gradscale.core.protocols import Array, Collectives, Numbers, ScaleState
from gradscale.core.validation import SMALLEST_NORMAL, float32_from_bits
from gradscale.scaler import claim as claims
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.claim import Claim, Flags, Presence, Reason, Verdict
from gradscale.scaler.scale import CurrentScale


class Reading(enum.Enum):
    """When the host reads a verdict that it does not have."""

    IN_STEP = "before the step, which needs it"
    LATE = "on demand, since the optimizer acts on it by itself"
    REPLAYED = "on demand, and anew each time, since a captured graph writes it at each replay"

    def __init__(self, _: str) -> None:
        self.is_late = self.name != "IN_STEP"


class JudgedLoss(NamedTuple):
    """The loss that a step is judged by on this rank."""

    loss: Array | float | None = None
    is_judged_late: bool = False
    """Whether it is left to when the host has read the verdict, and with it the loss and the norm."""


UNJUDGED = JudgedLoss()

# Types of what the host knows.
_NUMBERS = frozenset([int, float, type(None)])


class PendingVerdict:
    """The verdict on one optimizer's gradients. To construct one begins the agreement of the ranks.

    Where the verdict is:

    - Alone, with all numbers on the host: in ``verdict``, from the start.
    - Over a group, or on a device: in the answer to the message, and in ``verdict`` after the first ``read``, unless
      each replay writes another one. If an adapter lets it be read late, ``count``, ``skips``, ``keeps_scale`` and
      ``reason`` answer with arrays of the device until then.
    - ``override``, which an adapter sets if a framework judges by itself: it returns 0-d, 0 for finite gradients, or
      None, and takes the place of the count. It overrules no spike and no refusal. ``is_placeholder``: nobody else
      has judged.

    ``flags`` are what this rank says of the step, in which the code is the reason beside an overflow.
    ``is_judged_late``: once the verdict is read, ``loss`` and ``norm`` are still to be judged.
    """

    verdict: Verdict | None = None
    override: Callable[[], Array | None] | None = None
    is_placeholder = False
    reading = Reading.IN_STEP
    is_judged_late = False
    _copy: HostRead | None = None
    _norm: Array | float = 0.0
    _loss: Array | float | None = None
    # The norm and the loss as they were sent, which a read fetches again after each replay of a captured graph.
    _norm_sent: Array | float = 0.0
    _loss_sent: Array | float | None = None

    def __init__(
        self,
        current: CurrentScale,
        agreement: Agreement,
        findings: Findings,
        state: ScaleState,
        flags: Flags,
        groups: Sequence[Collectives] = (),
        claim: Claim | None = None,
        judged: JudgedLoss = UNJUDGED,
    ) -> None:
        self.findings, self.state, self.groups = findings, state, groups
        # Gradients of a state before a load say nothing of the one in force.
        self.rank, self._updates = agreement.rank, current.updates if state is current.state else -1
        self._current, self._count, code = current, flags.nonfinite, flags.code
        if not isinstance(code, int):
            code = host_value(current, code)
            flags = flags._replace(code=code)
        # ``_hidden`` is the reason that an overflow hides.
        self._code, self._hidden = code, code if isinstance(code, int) else 0
        if judged is not UNJUDGED:
            self._loss, self.is_judged_late = judged
            self._loss_sent = self._loss
        # By the norm that it reads, if the host judges the gradients.
        self._deferred = findings.deferred if findings.norm is None else None
        if findings.norm is not None:
            self._norm = self._norm_sent = host_value(current, findings.norm)
        self._has_values = findings.norm is not None or findings.deferred is not None or self._loss is not None
        # Whether the host has all numbers but those of the state.
        self._is_on_host = _NUMBERS.issuperset(map(type, (self._count, code, self._norm, self._loss)))
        has_overflow = isinstance(self._count, int) and self._count > 0
        if has_overflow or self._hidden:
            flags = self._with_reasons(flags, has_overflow=has_overflow)
        self._flags = flags
        if claim is not None:
            self._send(agreement, flags, claim)
        elif findings.scale is not None and self._is_on_host:
            self.verdict = self._decide(flags, findings.scale)
        else:
            self._sent = self._pack_alone(flags)

    @classmethod
    def of_framework(cls, current: CurrentScale, agreement: Agreement, state: ScaleState) -> PendingVerdict:
        """Return a verdict that a framework is to give: until then of finite gradients."""
        (scale,) = current.state_adapter.peek(state[:1]) or (None,)
        findings = Findings(0, has_gradients=False, flags={}, scale=scale)
        placeholder = cls(current, agreement, findings, state, Flags(presence=Presence.NONE))
        placeholder.is_placeholder = True
        return placeholder

    def _decide(self, flags: Flags, scale: float) -> Verdict:
        """Return the verdict of a process that decides alone, and whose host has all numbers."""
        current = self._current
        if current.state_adapter.is_shared and not 0.0 < scale < math.inf:
            current.require_possible(scale)
        if self._count and current.at_min_scale(self.state) is True:
            flags = flags._replace(limits=flags.limits + 1)
        verdict = claims.verdict_from(flags, self._count, scale)
        return self._with_values(verdict) if self._has_values else verdict

    def _with_reasons(self, flags: Flags, *, has_overflow: bool) -> Flags:
        """Return the flags with an overflow, which counts before any other reason, and beside it a refusal."""
        if self.groups and (reason := claims.reason_number(self._hidden)) in claims.PROGRAM_CALLS:
            flags = flags._replace(presence=Presence.REFUSED + reason - Reason.REFUSED)
        if has_overflow:
            # A refusal counts again if a framework overrules the overflow.
            fault = claims.fault_of(self._loss) or claims.fault_in(self._hidden)
            flags = flags._replace(code=claims.reason_code(Reason.OVERFLOW, self.rank(), fault))
        return flags

    def _send(self, agreement: Agreement, flags: Flags, claim: Claim) -> None:
        """Start the message to the other ranks."""
        current, adapter, state = self._current, self._current.state_adapter, self.state
        own_hash, numbers = claims.hash_of(claim), adapter.peek(state)
        values: list[int] | None = None
        if numbers is not None and self._is_on_host and isinstance(self._norm, float):
            flags = flags._replace(limits=flags.limits + (current.at_min_scale(state) is True))
            values = claims.pack_numbers(Numbers(*numbers), own_hash, flags, self._norm)
            sent = adapter.integers(values, state.scale)
        else:
            sent = claims.pack_arrays(adapter, current.policy, state, own_hash, self._with_array(flags), self._norm)
        self._ballot = agreement.send(self.groups, sent, claim)
        self._ballot.values = values

    def _with_array(self, flags: Flags) -> Flags:
        """Return the flags with the count as an array, unless the host is to judge."""
        if isinstance(self._count, int) and self._deferred is None:
            adapter = self._current.state_adapter
            self._count = self._current.xp.reshape(adapter.integers([self._count], self.state.scale), ())
        return flags._replace(nonfinite=self._count)

    def _pack_alone(self, flags: Flags) -> Array:
        """Return what the host reads of a process that decides alone."""
        adapter, state = self._current.state_adapter, self.state
        flags, at_min_scale = self._with_array(flags), self._current.policy.at_min_scale(state)
        self._flags = flags if at_min_scale is None else flags._replace(limits=at_min_scale)
        words = [] if self._deferred is None else [self._deferred.words]
        if not isinstance(self._norm, float):
            bits = adapter.bits(self._norm)
            words.append(norm_bits(adapter, self._norm) if bits is None else bits)
        if is_array_api_obj(self._loss):
            words.append(adapter.bits(self._loss))
        return claims.pack_alone(adapter, state, self._flags, words)

    @property
    def is_begun(self) -> bool:
        """Whether the gradients have been judged, by a framework at least."""
        return not self.is_placeholder or (self.override is not None and self.override() is not None)

    @property
    def is_judged_by_host(self) -> bool:
        """Whether the host judges the gradients, by the norm that it reads."""
        return self._deferred is not None

    @property
    def is_unread(self) -> bool:
        """Whether the host has still to read the answer of a group."""
        return self.verdict is None and len(self.groups) > 0 and not self.reading.is_late

    def read(self) -> Verdict:
        """Return the verdict, read now if it is not yet (one host read), or a framework's in its place."""
        verdict = self.verdict or self._read()
        count = None if self.override is None or verdict.reason in claims.KEEPS_SCALE else self.override()
        if count is None:
            return verdict
        xp = array_namespace(count)
        is_bad = self._current.state_adapter.read(xp.reshape(xp.astype(count, xp.int32), (1,)))[0] > 0
        if verdict.reason is Reason.NO_GRADIENTS or is_bad != (verdict.reason > 0):
            reason, by, by_loss = (Reason.OVERFLOW, None, False) if is_bad else self._otherwise()
            return verdict._replace(reason=reason, by=by, by_loss=by_loss, nonfinite=1 if is_bad else 0)
        return verdict

    def _otherwise(self) -> tuple[Reason, int | None, bool]:
        """Return the spike or the refusal that an overflow hides, whose it is, and whether by its loss, if any."""
        reason, by = claims.reason_and_rank(self._hidden)
        if not self._hidden or reason >= Reason.OVERFLOW:
            return Reason.STEPPED if self.verdict is None else self.verdict.refusal, None, False
        return reason, by, claims.fault_in(self._hidden) > 0

    def _by_hidden(self, verdict: Verdict) -> Verdict:
        """Return a verdict of finite gradients, or of none, by what else skips the step, or is seen."""
        reason, by, by_loss = self._otherwise()
        is_other = by is not None and (reason > 0 or verdict.reason is Reason.STEPPED)
        return verdict._replace(reason=reason, by=by, by_loss=by_loss) if is_other else verdict

    def _read(self) -> Verdict:
        current = self._current
        verdict, bits = self._read_answer() if self.groups else self._read_alone()
        if hasattr(self.state.scale, "compute"):
            # A lazy library would compute all that they depend on once more in the update.
            self._count = current.xp.asarray(verdict.nonfinite, dtype=current.xp.int32)
            current.set_read_values(self.state, bits)
        if current.state_adapter.is_shared and (current.is_static or not 0.0 < verdict.scale < math.inf):
            current.require_possible(verdict.scale, self.state)
        if self.reading is not Reading.REPLAYED:
            self.verdict = verdict
            if self.findings.scale is None:
                current.note_scale(verdict.scale, self._updates)
        return verdict

    def _read_answer(self) -> tuple[Verdict, Sequence[int]]:
        """Return the verdict of the ranks, and the bits of this rank's state."""
        ballot, copy, current = self._ballot, self._copy, self._current
        if copy is None:
            agreed, sent = ballot.read(current.state_adapter)
        else:
            if self.reading is not Reading.REPLAYED and not copy.is_done():
                # A device would wait for the ranks for ever.
                ballot.agreed(is_read=True)
            values = copy()
            agreed, sent = values[: claims.LENGTH], values[claims.LENGTH :]
        verdict = ballot.verdict(agreed, sent, current.policy, is_late=self.reading.is_late)
        self._hidden = claims.code_in(agreed) if verdict.reason else 0
        if not isinstance(self._norm_sent, float):
            self._norm = claims.norm_of(sent)
        if verdict.reason or verdict.by_loss:
            code = self._code if isinstance(self._code, int) else claims.code_in(sent)
            saw = claims.has_seen(verdict, claims.code_in(agreed), code, claims.fault_of(self.loss))
            verdict = verdict._replace(saw=saw)
        return self._with_values(verdict) if self._has_values else verdict, sent[claims.STATE]

    def _read_alone(self) -> tuple[Verdict, Sequence[int]]:
        """Return the verdict of a process that decides alone, and the bits of its state."""
        values = self._current.state_adapter.read(self._sent) if self._copy is None else self._copy()
        flags, bits, words = claims.unpack_alone(self._flags, values)
        # No other rank has contributed, so an impossible value is the array library's fault.
        scale = self._current.checked(bits).scale
        if is_array_api_obj(self._loss_sent):
            *words, bits_of_loss = words
            self._loss = float32_from_bits(bits_of_loss)
        if self._deferred is not None:
            self._count, self._norm = self._deferred.judge(words, scale)
            flags = flags._replace(nonfinite=self._count)
        elif not isinstance(self._norm_sent, float):
            self._norm = float32_from_bits(words[0])
        verdict = claims.verdict_from(flags, flags.nonfinite, scale)
        if self._has_values:
            verdict = self._with_values(verdict)
        # It may have been refused after the flags were packed.
        self._hidden = self._code if isinstance(self._code, int) else flags.code
        if verdict.nonfinite:
            fault = claims.fault_of(self.loss) or claims.fault_in(self._hidden)
            return verdict._replace(reason=Reason.OVERFLOW, by=self.rank(), by_loss=fault > 0), bits
        return self._by_hidden(verdict), bits

    def _with_values(self, verdict: Verdict) -> Verdict:
        """Return a verdict with the norm and the loss that this rank was judged by."""
        norm = self.norm
        if norm is not None and not SMALLEST_NORMAL <= norm < math.inf:
            # As it travels.
            norm = 0.0 if norm < 1.0 else math.inf
        return verdict._replace(norm=norm, loss=self.loss)

    @property
    def loss(self) -> float | None:
        """The loss of this rank, once the verdict is read; None if the host does not read it."""
        if self._loss is None or (self.groups and is_array_api_obj(self._loss)):
            return None
        loss = float(self._loss)
        # The same object, so that equal reports are equal.
        return math.nan if math.isnan(loss) else loss

    @property
    def norm(self) -> float | None:
        """The norm on this rank before clipping, once the verdict is read."""
        return None if self.findings.norm is None and self.findings.deferred is None else float(self._norm)

    def start_reading(self) -> None:
        """Send the verdict on its way to the host, which does not wait for it, and reads it on demand."""
        if self.groups:
            agreed, sent = self._ballot.agreed(), self._ballot.sent
            self._sent = array_namespace(agreed).concat([agreed, sent])
        self._copy = self._current.state_adapter.start_read(self._sent)
        self.reading = Reading.REPLAYED if self._copy.is_replayed else Reading.LATE

    def has_arrived(self) -> bool:
        """Tell whether it can be read without waiting."""
        return self._copy is None or self._copy.is_done()

    def count(self) -> Array | int | None:
        """Return the agreed count, 0-d if the host does not know it; None for a spike, a refusal or idle zeros."""
        verdict = self.verdict if self.override is None or self.verdict is None else self.read()
        flags = self._flags if verdict is None else verdict.flags
        # Zeros that nobody has scaled are those of a host that loads an optimizer.
        if not flags.scaled and flags.presence == Presence.ZEROS and (verdict is not None or not self.groups):
            return None
        if verdict is not None and verdict.reason and verdict.reason in claims.KEEPS_SCALE:
            return None
        if verdict is not None and self.override is None and isinstance(self._count, int):
            return verdict.nonfinite
        return self._deciding_count()

    def _deciding_count(self) -> Array | int:
        """Return the count that decides: a framework's, if it has one and no spike or refusal stands against it."""
        count = None if self.override is None else self.override()
        if count is None:
            return self._overflow()
        code = 0 if self.verdict is not None else self._agreed_code()
        if isinstance(code, int) and not claims.is_skip(code):
            return count
        own, xp = self._overflow(), array_namespace(count)
        return xp.where((own == 0) & claims.is_skip(code), xp.zeros_like(count), count)

    def _overflow(self) -> Array | int:
        """Return the agreed count, 0-d, or 1 for any number."""
        if isinstance(self._count, int):
            return self.verdict.nonfinite if self.verdict is not None else self._read().nonfinite
        if not self.groups or hasattr(self.state.scale, "compute"):
            return self._count
        agreed = self._ballot.agreed()
        count = claims.flags_in(agreed).nonfinite
        if self.verdict is not None:
            return count
        # If ranks differ no rank steps, until the host sees it.
        xp = array_namespace(agreed)
        return xp.astype(xp.logical_or(count != 0, claims.differ_in(agreed)), xp.int32)

    def _agreed_code(self) -> Array | int:
        """Return why a rank skips the step, other than for an overflow that the host does not know."""
        return claims.flags_in(self._ballot.agreed()).code if self.groups else self._code

    def skips(self) -> Array | bool:
        """Return whether the ranks skip the step, 0-d, 0 if they do not, if the host does not know; no host read."""
        if self.verdict is not None:
            return (self.verdict if self.override is None else self.read()).reason > 0
        own, code = self._deciding_count(), self._agreed_code()
        if isinstance(code, int):
            return array_namespace(own).ones_like(own) if claims.is_skip(code) else own
        return (own != 0) | claims.is_skip(code)

    def keeps_scale(self) -> Array | bool:
        """Return for a late verdict whether the scale stays as it is; 0-d if the host does not know."""
        code = self._agreed_code()
        if isinstance(code, int) and not claims.is_skip(code):
            return False
        is_clean = self._deciding_count() == 0
        return is_clean if isinstance(code, int) else is_clean & claims.is_skip(code)

    def reason(self) -> Reason | Array:
        """Return why the ranks skip the step; its number as a 0-d int32 if the host does not know."""
        if self.verdict is not None or self.reading is Reading.IN_STEP:
            return self.read().reason
        own, reason = self._deciding_count(), claims.reason_number(self._agreed_code())
        xp = array_namespace(own)
        number = xp.full_like(own, reason, dtype=xp.int32) if isinstance(reason, int) else reason
        return xp.where(own != 0, xp.full_like(number, Reason.OVERFLOW), number)

    def replace(self, verdict: Verdict) -> None:
        """Take another verdict, which nobody overrules."""
        self.verdict, self.override, self.reading = verdict, None, Reading.IN_STEP

    def refuse(self, code: int) -> None:
        """Skip the step of a process that decides alone."""
        self._code = self._hidden = code
        if self.verdict is not None and not self.verdict.nonfinite:
            self.verdict = self._by_hidden(self.verdict)


def host_value(current: CurrentScale, value: Any) -> Any:
    """Return a number or a 0-d array as a number, if the host has it."""
    if not isinstance(value, (int, float)):
        (value,) = current.state_adapter.peek((value,)) or (value,)
    return value
