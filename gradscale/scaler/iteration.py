"""Iteration: the calls between two updates, for all optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from gradscale.core.gradients import Findings, Request
from gradscale.core.protocols import Array, Optimizer
from gradscale.errors import GradscaleError, InvalidValueError
from gradscale.scaler import claim as claims
from gradscale.scaler import order
from gradscale.scaler.agreement import OF_ALL_RANKS
from gradscale.scaler.claim import PROGRAM_CALLS, Flags, Presence, Reason, Scaled, Verdict
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.collection import Collection, collect, example
from gradscale.scaler.guard import Losses
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.judge import Judge
from gradscale.scaler.messages import Messages
from gradscale.scaler.progress import Progress, Progresses, Stage
from gradscale.scaler.reports import StepReport
from gradscale.scaler.scale import Saved
from gradscale.scaler.scaling import Scaling, Source
from gradscale.scaler.verdict import UNJUDGED, JudgedLoss, PendingVerdict


class Iteration:
    """The calls between two updates. No part, progress or verdict keeps it alive.

    ``messages.steps`` counts the steps of all iterations before, of which it forgets those without a group
    (``alone_before``) when it joins one. ``before_update`` is the state that an update was to adapt; if that is
    interrupted, the next call goes back to it.
    """

    before_update: Saved | None = None

    def __init__(self, number: int, parts: Collaborators, steps_before: int = 0, alone_before: int = 0) -> None:
        self.number, self.parts, self.alone_before = number, parts, alone_before
        self.current, self.agreement, self.reports = parts.current, parts.agreement, parts.reports
        self.scaling, self.progresses = Scaling(number, parts), Progresses()
        self.messages = Messages(number, steps_before, parts, self.scaling)
        self.judge = Judge(parts, self.messages, self.scaling)
        # With the position of the optimizer's streak.
        self.steps: list[tuple[StepReport, int | None]] = []

    def progress_of(self, optimizer: Optimizer) -> Progress:
        """Return an optimizer's progress; raise the error of an agreement that has failed, or of an update."""
        if self.agreement.standing.failure is not None:
            raise self.agreement.standing.failure
        if self.before_update is not None:
            order.wrong_order(order.INTERRUPTED, self.number)
        progress = self.progresses.of(id(optimizer), optimizer)
        if self.reports.under_way and progress.stage.is_ready:
            self.messages.read_late()
        return progress

    def scale(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Multiply arrays by the scale; a first state begins beside the first one."""
        current, scaling = self.current, self.scaling
        state = scaling.closure_state or current.state or current.materialize(arrays[0])
        if current.state_adapter.forbid_tracing is not None:
            current.state_adapter.forbid_tracing("scale()")
        products = arrays if current.is_static and current.is_one(state) else current.state_adapter.scale(arrays, state)
        if scaling.closure_state is None:
            if scaling.state is not None and current.use.is_fresh:
                # A load has abandoned the iteration of the losses before.
                self.judge.losses = Losses()
            scaling.state = state
        if not current.use.is_scaled:
            current.mark_scaled()
        scaling.has_scaled = True
        for progress in self.progresses.all:
            progress.overtake()
        return products

    def set_inputs(self, progress: Progress, inputs: StepInputs, *, has_closure: bool) -> None:
        """Judge an optimizer by what the program says of its step."""
        order.check_inputs(progress, inputs, self.parts, self.number, has_closure=has_closure)
        if progress.stage.is_unscaled:
            if progress.inputs is not None:
                # The step has failed, and judges nothing again.
                return
            is_sent = progress.pending is not None and len(progress.pending.groups) > 0
            if inputs.norm is not None and progress.pending and not (is_sent and self.verdict(progress).reason):
                # Its norm judges the gradients once more.
                progress.judge_again()
        if inputs.loss is not None:
            self.judge.losses = Losses()
            self.judge.add_losses([inputs.loss])
        progress.inputs = inputs

    def keeps(self, owner: object, loss: Array | float) -> bool:
        """Tell whether the loss of a micro-batch is finite on all ranks, and count it, after the messages before."""
        if self.agreement.standing.failure is not None:
            raise self.agreement.standing.failure
        for progress in self.progresses.all if self.agreement.usable_groups() else ():
            if progress.pending is not None and progress.pending.is_unread:
                self.verdict(progress)
        return self.judge.keeps(owner, loss)

    def unscale(
        self,
        progress: Progress,
        optimizer: Optimizer,
        request: Request | None = None,
        *,
        divides: bool = True,
        is_framework_check: bool = False,
        then: Stage = Stage.JUDGED,
    ) -> Array | float | None:
        """Unscale an optimizer's gradients, start the agreement on them, and return their norm if ``request`` says so.

        Without a request it is the step that unscales, or has the optimizer do so if not ``divides``.
        ``is_framework_check``: a framework judges them outside of ``unscale_`` and ``step``, which come later.
        ``then``: the stage that follows.
        """
        if progress.closure.was_evaluated and not self.scaling.is_inside_closure:
            order.wrong_order(order.FAILED_CLOSURE, self.number)
        judge, guard = self.judge, self.parts.guard
        collection = collect(self.messages, progress, optimizer, request, judge.micro_batches, divides=divides)
        gradients, groups, max_norm, _ = collection
        source = self.scaling.source_of(progress, optimizer, lambda: gradients.like, has_groups=len(groups) > 0)
        has_values = True
        if guard is not None and not is_framework_check:
            has_values = judge.check_values(guard, progress, optimizer, max_norm, is_alone=not groups)
        # Gradients that are judged a second time have lost their norm.
        judges = progress.stage.is_ready and (guard is not None or progress.inputs is not None)
        findings, loss, before = None, UNJUDGED, progress.divide()
        try:
            findings = gradients.unscale(self.current, source.state)
            if judges:
                is_read = not groups and self.current.adapter.reads_verdict(optimizer)
                loss = judge.judge(progress, optimizer, findings, source.state, is_read=is_read)
            pending = self._pending(progress, optimizer, findings, source, collection, loss, has_values=has_values)
            progress.judge(pending, then)
        except BaseException as error:
            if findings is None and not gradients.is_touched:
                progress.undo(*before)
            self._fail(error, optimizer, is_divided=findings is not None)
            raise
        if groups and source.scaled is Scaled.NEVER:
            # As in a pipeline, another rank may have the loss.
            self.verdict(progress)
        if findings.narrow:
            self.parts.mistakes.warn_of_half(type(optimizer).__name__, findings.narrow)
        return findings.norm

    def _fail(self, error: BaseException, optimizer: Optimizer, *, is_divided: bool) -> None:
        """Tell the other ranks of an error while gradients are unscaled, or keep one that ends the agreement."""
        if is_divided and isinstance(error, GradscaleError):
            self.agreement.fail(error)
        elif isinstance(error, Exception) and (is_divided or not isinstance(error, OF_ALL_RANKS)):
            # An exchange of norms has failed on all ranks.
            self.messages.tell_of_failure(optimizer)

    def _pending(
        self,
        progress: Progress,
        optimizer: Optimizer,
        findings: Findings,
        source: Source,
        collection: Collection,
        loss: JudgedLoss,
        *,
        has_values: bool,
    ) -> PendingVerdict:
        """Return the verdict that follows from what this rank says of a step, to the other ranks, if there are any."""
        agreement, tally, (_, groups, max_norm, checksum) = self.agreement, self.parts.tally, collection
        if progress.refused:
            progress.code = claims.reason_code(progress.refused, agreement.rank())
        claim = None
        if groups:
            claim = self.messages.next_claim(groups, optimizer, max_norm, checksum=checksum)
        # It gives a new optimizer its position among the streaks, alone, too.
        is_last = tally.give_up_after is not None and tally.is_last_chance(optimizer) and len(groups) > 0
        presence = source.presence if findings.has_gradients else Presence.NONE
        scaled = source.scaled if has_values else min(source.scaled, Scaled.NOW)
        flags = Flags(findings.nonfinite, 2 * is_last, presence, scaled, progress.code)
        pending = PendingVerdict(self.current, agreement, findings, source.state, flags, groups, claim, loss)
        if groups:
            self.messages.sent.append(pending)
        return pending

    def refuse(self, optimizer: Optimizer, reason: Reason) -> None:
        """Let no rank make the coming step of an optimizer; of several reasons the gravest counts."""
        order.require_step(optimizer)
        progress = self.progress_of(optimizer)
        order.check_refusal(progress, reason, self.number)
        # In a closure an evaluation before may have left its verdict.
        pending = progress.pending if progress.stage.is_unscaled else None
        progress.refused = max(progress.refused, reason)
        if pending is not None:
            progress.code = claims.reason_code(progress.refused, self.agreement.rank())
            pending.refuse(progress.code)

    def verdict(self, progress: Progress) -> Verdict:
        """Finish the agreement on an optimizer's gradients and return its verdict: the one host read of a step."""
        pending = progress.pending
        if self.agreement.standing.failure is not None:
            raise self.agreement.standing.failure
        if pending is None or (pending.is_placeholder and not pending.is_begun):
            order.wrong_order(order.INCOMPLETE, self.number)
        if pending.is_placeholder:
            self.judge.note_values(has_values=False)
            if progress.refused:
                pending.refuse(claims.reason_code(progress.refused, self.agreement.rank()))
        try:
            verdict = (pending.verdict if pending.override is None else None) or self.messages.read(pending)
            if pending.is_judged_late and progress.optimizer is not None:
                verdict = self.judge.judge_late(progress, progress.optimizer, pending)
        except OF_ALL_RANKS as error:
            self.agreement.fail(error)
            raise
        if verdict.reason is Reason.NOT_SCALED:
            progress.begin_again()
            self.scaling.forbid_unscaled(progress, " on any rank")
        if pending.groups and verdict.is_unscaled:
            self.parts.mistakes.tell_of_no_scale(self.number, "all ranks")
        return verdict

    def verdict_for_step(self, progress: Progress, optimizer: Optimizer, then: Stage = Stage.STEPPING) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if progress.stage.is_ready:
            if self.parts.is_guard and self.current.state is None and self._is_without_array(progress, optimizer):
                self._tell_of_no_gradients(progress, optimizer, 1.0)
                return Verdict(Reason.NO_GRADIENTS, None, 0, 0, scale=1.0)
            self.unscale(progress, optimizer, then=then)
        if progress.refused:
            self.messages.forbid_untold_refusal(progress, optimizer)
        verdict = self.verdict(progress)
        pending = progress.pending
        if pending is not None and pending.findings.deferred is not None:
            self._finish(progress, pending, verdict, then)
        if verdict.reason is Reason.NO_GRADIENTS:
            self._tell_of_no_gradients(progress, optimizer, verdict.scale)
        elif self.parts.guard and pending and pending.groups and verdict.reason not in PROGRAM_CALLS:
            try:
                self.judge.note_values(has_values=not verdict.lacks_values)
            except InvalidValueError:
                progress.begin_again()
                self.judge.losses = Losses()
                raise
        return verdict

    def _finish(self, progress: Progress, pending: PendingVerdict, verdict: Verdict, then: Stage) -> None:
        """Divide and clip what was only looked at, if the verdict is to step."""
        # Until it is done, gradients may be divided in part.
        progress.divide()
        if not verdict.reason and pending.findings.deferred is not None:
            pending.findings.deferred.finish()
        is_scaled = pending.findings.is_scaled and verdict.reason > 0
        pending.findings = pending.findings._replace(is_scaled=is_scaled, deferred=None)
        progress.judge(pending, then)

    def _is_without_array(self, progress: Progress, optimizer: Optimizer) -> bool:
        """Tell whether a first step has no gradient for a state to be beside, and needs no other rank."""
        if progress.refused or progress.closure.was_evaluated:
            return False
        return not self.messages.groups_for(optimizer) and example(self.parts, optimizer) is None

    def _tell_of_no_gradients(self, progress: Progress, optimizer: Optimizer, scale: float) -> None:
        """Report a step without gradients: of a guard it does nothing, and else it is CallOrderError."""
        # The optimizer can begin again.
        progress.begin_again()
        self.reports.record(optimizer, StepReport(True, scale, 0, "no gradients", self.number))
        what = order.step_without_gradients(type(optimizer).__name__, is_alone=self.agreement.is_alone)
        if not self.parts.is_guard:
            order.wrong_order(what, self.number)
        self.scaling.has_scaled = False
        counts = self.judge.micro_batches
        if counts.kept or counts.dropped:
            # The next step has micro-batches of its own.
            if counts.dropped and not counts.stepped:
                self.parts.tally.drop(counts.dropped)
            self.judge.forget_micro_batches()
            self.judge.losses = Losses()
        self.parts.mistakes.warn_of_no_gradients(what)

    def read_verdicts(self) -> tuple[list[PendingVerdict], list[Verdict]]:
        """Return the pending verdicts that count in the update, and the verdicts that are read by now."""
        pending, verdicts = [], []
        for progress in self.progresses.all:
            one = progress.pending
            if one is None or (one.is_placeholder and not one.is_begun):
                continue
            if one.reading.is_late:
                pending.append(one)
                continue
            has_ended = progress.stage.has_ended
            verdict = (progress.verdict if has_ended else None) or self.verdict(progress)
            if verdict.reason and verdict.reason is Reason.NO_GRADIENTS:
                continue
            pending.append(one)
            verdicts.append(verdict)
            if not has_ended:
                progress.leave_out(verdict)
        return pending, verdicts

    @property
    def is_at_boundary(self) -> bool:
        """Whether no optimizer's progress has begun, here or, as far as messages say, on another rank."""
        return (
            self.agreement.standing.failure is None
            and not self.scaling.is_inside_closure
            and not self.progresses.have_begun()
        )

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError in mid-iteration."""
        if self.agreement.standing.failure is None and not self.is_at_boundary:
            raise order.not_at_boundary(what, self.number)
