"""Judge: whether a step is bad for more than an overflow, by its loss and norm; the losses of its micro-batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from array_api_compat import is_array_api_obj

from gradscale.core.gradients import Findings
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.snapshot import Snapshot
from gradscale.core.validation import wrong_type
from gradscale.errors import InvalidValueError
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import Flags, LossFault, Purpose, Reason, Verdict
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.guard import Guard, Losses, beside, is_nonfinite, value_of
from gradscale.scaler.messages import Messages
from gradscale.scaler.mistakes import no_values
from gradscale.scaler.progress import Progress
from gradscale.scaler.scaling import Scaling
from gradscale.scaler.verdict import JudgedLoss, PendingVerdict, host_value


class MicroBatches(NamedTuple):
    """The micro-batches of a step, by the answers of ``keeps``."""

    kept: int = 0
    dropped: int = 0
    ends_dropped: bool = False
    """Whether the last one was dropped."""
    stepped: frozenset[int] = frozenset()
    """The ``id()`` of optimizers that were stepped by them in an iteration before."""


@dataclasses.dataclass(eq=False)
class Judge:
    """Judges each optimizer of an iteration by the losses up to it, and by its norm; and its micro-batches by theirs.

    Without a rule nothing is judged but the loss that ``step`` is given. The first step of a StepGuard that never has a
    value is an error.
    """

    parts: Collaborators
    messages: Messages
    scaling: Scaling
    losses: Losses = dataclasses.field(default=Losses())
    micro_batches: MicroBatches = dataclasses.field(default=MicroBatches())
    # Of what ``hold`` names, as the last micro-batch that was kept has left it.
    _marks: Sequence[Snapshot] = ()

    def keeps(self, owner: object, loss: Array | float) -> bool:
        """Tell whether the loss of a micro-batch is finite on all ranks, and count it: one message and one read."""
        snapshots, groups = self.parts.snapshots, self.parts.agreement.usable_groups()
        value = value_of(self._local(loss))
        is_kept = self._is_finite_on_all(groups, owner, loss, value) if groups else math.isfinite(float(value))
        kept, dropped, *_ = MicroBatches() if self.micro_batches.stepped else self.micro_batches
        self.micro_batches = MicroBatches(kept + is_kept, dropped + (not is_kept), not is_kept)
        if is_kept:
            self.add_losses([loss])
            self._marks = [snapshot.anew() for snapshot in snapshots]
        for snapshot in () if is_kept else self._marks or snapshots:
            snapshot.restore()
        return is_kept

    def _is_finite_on_all(
        self, groups: Sequence[Collectives], owner: object, loss: Array | float, value: Array | float
    ) -> bool:
        current, agreement = self.parts.current, self.parts.agreement
        state = self.scaling.in_force(lambda: loss if is_array_api_obj(loss) else None)
        claim = self.messages.next_claim(groups, owner, call=Purpose.MICRO_BATCH)
        fault = claims.reason_code(Reason.OVERFLOW, agreement.rank(), LossFault.NONFINITE)
        flags = Flags(0, code=is_nonfinite(value, state.scale) * fault)
        sent = claims.pack_arrays(current.state_adapter, current.policy, state, claims.hash_of(claim), flags)
        *_, verdict = agreement.ask(groups, sent, claim, current.state_adapter, current.policy)
        return not verdict.reason

    def forget_micro_batches(self) -> None:
        """Take the next micro-batch for the first of a step."""
        self.micro_batches, self._marks = MicroBatches(), ()

    def add_losses(self, losses: Iterable[Array | float]) -> None:
        """Add losses, by whose mean the next optimizer is judged."""
        for loss in losses:
            value = self._local(loss)
            # Of a DTensor another rank may have the one element.
            if isinstance(value, float) or math.prod(value.shape):
                self.losses = self.losses.plus(value)

    def _local(self, loss: Array | float) -> Array | float:
        """Return a loss as it is on this rank; InvalidTypeError if it has no value there."""
        value = loss if isinstance(loss, float) else self.parts.current.backend_for(loss).values_of(loss)
        if value is None:
            raise wrong_type(loss, "loss", "a number or an array that has a value")
        return value

    def check_values(
        self, guard: Guard, progress: Progress, optimizer: Optimizer, max_norm: float | None, *, is_alone: bool
    ) -> bool:
        """Tell whether the rule for spikes has a value to judge on this rank, or needs none; ``note_values`` if alone.

        Over a group another rank may have the loss.
        """
        is_own = id(optimizer) not in self.losses.judged
        has_norm = max_norm is not None or (progress.inputs is not None and progress.inputs.norm is not None)
        has_value = {"loss": self.losses.number > 0 and is_own, "norm": has_norm}
        needs_none = progress.refused > 0 or progress.closure.has_begun or (self.losses.is_used and is_own)
        has_values = needs_none or any(has_value[name] for name in guard.rule.of)
        if is_alone and not progress.refused:
            self.note_values(has_values=has_values)
        return has_values

    def note_values(self, *, has_values: bool) -> None:
        """Warn of a step of which no rank has a value to judge; of a guard that never had one, InvalidValueError."""
        if self.parts.guard is None:
            return
        self.parts.guard.has_judged |= has_values
        if self.parts.is_guard and not self.parts.guard.has_judged:
            raise InvalidValueError(no_values(self.parts.guard.rule.of))
        if not has_values:
            self.parts.mistakes.warn_of_no_values(self.parts.guard.rule.of)

    def judge(
        self, progress: Progress, optimizer: Optimizer, findings: Findings, state: ScaleState, *, is_read: bool
    ) -> JudgedLoss:
        """Judge the loss and the norm, or leave it to the host if it reads the verdict in the step."""
        # The losses are this optimizer's, whether it is judged by them or not.
        loss = None if id(optimizer) in self.losses.judged else self.losses.mean()
        self.losses = self.losses._replace(is_used=True)
        if loss is not None and self.parts.agreement.is_alone:
            self.parts.mistakes.warn_of_ranks_without_group()
        progress.code, number = 0, None if is_array_api_obj(loss) else loss
        if progress.closure.has_begun:
            return JudgedLoss(number)
        current = self.parts.current
        norm = None if findings.norm is None else host_value(current, findings.norm)
        is_unknown = any(map(is_array_api_obj, (loss, norm))) or (norm is None and findings.deferred is not None)
        if is_unknown and is_read and current.state_adapter.bits(state.scale) is not None:
            return JudgedLoss(beside(loss, state.scale) if is_array_api_obj(loss) else loss, True)
        self._observe(progress, optimizer, loss, norm, state)
        return JudgedLoss(number)

    def judge_late(self, progress: Progress, optimizer: Optimizer, pending: PendingVerdict) -> Verdict:
        """Judge by the loss and the norm that the host has read; return the verdict that follows."""
        self._observe(progress, optimizer, pending.loss, pending.norm, pending.state)
        if isinstance(progress.code, int) and progress.code:
            pending.refuse(progress.code)
        # Last, so that a step after Ctrl-C judges again.
        pending.is_judged_late = False
        return pending.read()

    def _observe(self, progress: Progress, optimizer: Optimizer, loss: Any, norm: Any, state: ScaleState) -> None:
        """Set the code of a spike that this rank sees, 0 of none; 0-d int32 if the host does not know."""
        guard = self.parts.guard
        # Also if the step is refused, so that windows are in one order in each run.
        seen = progress.observation = None if guard is None else guard.judge(optimizer, loss, norm, state.scale)
        if progress.refused:
            return
        rank = self.parts.agreement.rank()
        if seen is not None and guard is not None:
            # Its reason is 0 or Reason.SPIKE, which is 1.
            fault, reason = claims.fault_of(loss) or LossFault(seen.is_loss), Reason(guard.rule.act)
            progress.code = seen.reason * claims.reason_code(reason, rank, fault)
        if progress.inputs is not None and progress.inputs.loss is not None:
            bad: Any = is_nonfinite(loss, state.scale) * claims.reason_code(Reason.SPIKE, rank, LossFault.NONFINITE)
            # MLX has no operators with a number on the left.
            progress.code = bad | progress.code if is_array_api_obj(bad) else progress.code | bad
