"""Messages: those that one iteration sends to the other ranks, and the order in which their answers are read."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from gradscale.core.gradients import UNSCALING
from gradscale.core.protocols import Array, Collectives, Optimizer
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import PROGRAM_CALLS, Claim, Purpose, Reason, Verdict
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.order import wrong_order
from gradscale.scaler.progress import Progress
from gradscale.scaler.scaling import Scaling
from gradscale.scaler.verdict import PendingVerdict


@dataclasses.dataclass(eq=False)
class Messages:
    """The messages of one iteration, in the order in which they are sent.

    ``steps`` counts those of all optimizers in the iterations before. ``sent`` are over groups, with an answer that may
    still be to read.
    """

    iteration: int
    steps: int
    parts: Collaborators
    scaling: Scaling
    sent: list[PendingVerdict] = dataclasses.field(default_factory=list)
    _number = 0

    def groups_for(self, optimizer: Optimizer) -> Sequence[Collectives]:
        """Return the groups that an optimizer's ranks agree over, before its gradients are looked at."""
        parts = self.parts
        groups = parts.agreement.usable_groups() or parts.current.adapter.groups_of(optimizer)
        for collectives in groups:
            # The default group is looked up when it is first needed.
            resolve: Callable[[], object] | None = getattr(collectives, "resolve", None)
            if resolve is not None:
                resolve()
        return groups

    def next_claim(
        self,
        groups: Sequence[Collectives],
        optimizer: object,
        max_norm: float | None = None,
        call: Purpose = Purpose.STEP,
        index: int = 0,
        *,
        checksum: str = "",
    ) -> Claim:
        """Return the claim of the next message; each call counts as a message."""
        self._number += 1
        agreement = self.parts.agreement
        label = agreement.label_of(optimizer)
        # Norms and diagnoses do not depend on the policy and the steps, which the step's own message compares.
        is_step = call is Purpose.STEP
        return Claim(
            call=call,
            iteration=self.iteration,
            message=self._number - 1,
            optimizer=label.number,
            scaler=agreement.number_over(groups[0]),
            group=index,
            settings=agreement.settings_hash(self.parts.current.policy) if is_step else 0,
            steps=self.steps if is_step else 0,
            max_norm=max_norm,
            checksum=checksum,
            kind=label.kind,
        )

    def read(self, pending: PendingVerdict) -> Verdict:
        """Read a verdict after those that were sent before it, since a rank that fails sends none after its failure."""
        while self.sent and self.sent[0] is not pending and pending.is_unread:
            if self.sent[0].is_unread:
                self.sent[0].read()
            del self.sent[0]
        return pending.read()

    def read_late(self, *, waits: bool = False) -> None:
        """Read late verdicts that have arrived, or all: ranks may differ, and each has a scale for ``note_scale``."""
        parts = self.parts
        for step in parts.reports.poll(waits=waits):
            with parts.agreement.failing():
                verdict = step.pending.read()
            has_gradients = verdict.reason is not Reason.NO_GRADIENTS
            if has_gradients:
                # First, since warnings may be errors.
                parts.tally.note(step.report(), step.position)
            if verdict.is_unscaled and step.pending.groups:
                parts.mistakes.tell_of_no_scale(step.iteration, "all ranks")
            if verdict.lacks_values and parts.guard is not None:
                parts.mistakes.warn_of_no_values(parts.guard.rule.of)
            if not has_gradients:
                parts.mistakes.tell_of_no_gradients()

    def forbid_untold_refusal(self, progress: Progress, optimizer: Optimizer) -> None:
        """Raise CallOrderError for a refusal that no message tells the other ranks."""
        if progress.pending is not None and progress.pending.is_placeholder and self.groups_for(optimizer):
            wrong_order(
                f"{PROGRAM_CALLS[progress.refused]} was called for an optimizer whose framework judges the gradients "
                "by itself, of which no message tells the other ranks: let the framework's own flags skip the step "
                "on all ranks",
                self.iteration,
            )

    def example(self, optimizer: Optimizer) -> Array | None:
        """Return one of an optimizer's gradients; None without any, or if they cannot be looked at."""
        with contextlib.suppress(Exception):
            return self.parts.current.adapter.collect(optimizer, UNSCALING).like
        return None

    def tell_of_failure(self, optimizer: Optimizer) -> None:
        """Tell the other ranks, which would wait for this one's message, so that they raise ScaleDesyncError."""
        agreement, current = self.parts.agreement, self.parts.current
        # What fails now is not what is wrong.
        with contextlib.suppress(Exception):
            groups = self.groups_for(optimizer)
            if not groups or agreement.standing.failure is not None:
                return
            claim = self.next_claim(groups, optimizer)
            scale = self.scaling.in_force(lambda: self.example(optimizer)).scale
            sent = current.state_adapter.integers(claims.pack_failure(claims.hash_of(claim), agreement.rank()), scale)
            agreement.ask(groups, sent, claim, current.state_adapter, current.policy)
