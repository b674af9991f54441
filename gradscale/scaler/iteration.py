"""Iteration: the calls between two updates, for all optimizers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from array_api_compat import is_array_api_obj

from gradscale.core.gradients import (
    Collected,
    Findings,
    Request,
    UserNorm,
    no_optimizer,
)
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.snapshot import Snapshot
from gradscale.errors import CallOrderError, GradscaleError, InvalidValueError
from gradscale.scaler import claim as claims
from gradscale.scaler.agreement import OF_ALL_RANKS, exchange_over
from gradscale.scaler.claim import PROGRAM_CALLS, Flags, LossFault, Presence, Purpose, Reason, Scaled, Verdict
from gradscale.scaler.clipping import Clipping
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.diagnosis.cause import NO_GRADIENTS
from gradscale.scaler.guard import Losses, is_nonfinite, value_of
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.judge import Judge
from gradscale.scaler.messages import UNSCALING, Messages
from gradscale.scaler.micro_batches import MicroBatches, checksum_of
from gradscale.scaler.order import INCOMPLETE, SINCE_UPDATE, wrong_order
from gradscale.scaler.progress import Progress, Progresses, Stage
from gradscale.scaler.reports import StepReport
from gradscale.scaler.scale import Saved, copied
from gradscale.scaler.scaling import Scaling, Source
from gradscale.scaler.verdict import UNJUDGED, JudgedLoss, PendingVerdict

_JUDGING = Request(divides=False)


class Collection(NamedTuple):
    """An optimizer's gradients, and over which groups they are judged."""

    gradients: Collected
    groups: Sequence[Collectives]
    max_norm: float | None
    """What they are clipped to."""
    has_norm: bool
    checksum: str
    """Of gradients that ranks may hold unlike, else empty."""


class Iteration:
    """The calls between two updates. No part, progress or verdict keeps it alive.

    ``steps_before`` counts the steps of all iterations, of which it forgets those without a group (``alone_before``)
    when it joins one. ``before_update`` is the state that an update was to adapt; if that is interrupted, the next call
    goes back to it.
    """

    micro = MicroBatches()
    before_update: Saved | None = None
    _marks: Sequence[Snapshot] = ()

    def __init__(self, number: int, parts: Collaborators, steps_before: int = 0, alone_before: int = 0) -> None:
        self.number, self.parts, self.steps_before, self.alone_before = number, parts, steps_before, alone_before
        self.current, self.agreement, self.reports, self._cache, self.mistakes, self.tally, self.guard, *_ = parts
        self.judge, self.scaling = Judge(parts), Scaling(number, parts)
        self.messages = Messages(number, parts, self.scaling)
        self.progresses = Progresses()
        # With the position of the optimizer's streak.
        self.steps: list[tuple[StepReport, int | None]] = []

    # The progress of optimizers.

    def progress_of(self, optimizer: Optimizer) -> Progress:
        """Return an optimizer's progress; after a failed agreement, raise its error again.

        CallOrderError after an update that was interrupted.
        """
        if self.agreement.standing.failure is not None:
            raise self.agreement.standing.failure
        if self.before_update is not None:
            self.wrong_order("update() was interrupted, and may have adapted the state: call it again first")
        return self.progresses.of(optimizer)

    def begin_anew(self, number: int, steps: int) -> Iteration:
        """Return the iteration after a load, once agreements under way are finished; ``steps``: as saved.

        Gradients that nobody has unscaled yet can still be, by the state that they were scaled with. The steps
        before do not count: ranks that load one checkpoint may have had other numbers of them.
        """
        state = self.scaling.state
        if self.agreement.standing.failure is None:
            # Other ranks may have seen a difference already, or never come.
            with contextlib.suppress(*OF_ALL_RANKS):
                self.read_verdicts()
        following = Iteration(number, self.parts, steps)
        if not self.is_at_boundary:
            self.current.mark_unused(has_leftovers=not self.current.is_one(state or self.current.state))
        if state is not None and self.is_at_boundary:
            # The load may write to the arrays of the state.
            following.scaling.state = copied(state)
            following.scaling.has_scaled, following.judge.losses = self.scaling.has_scaled, self.judge.losses
        return following

    def forget(self, identity: int | None = None) -> None:
        """Let the optimizer with this ``id()``, or each, begin again; agreements under way are finished first.

        KeyError for an optimizer that has no progress.
        """
        self.read_verdicts()
        self.progresses.forget(identity)

    def go_on_from(self, ended: Iteration) -> None:
        """Go on with the loss of the iteration before, for other optimizers, and with refusals of steps to come."""
        if ended.judge.losses.number or ended.micro.kept or ended.micro.dropped:
            stepped = ended.progresses.stepped_ids()
            self.judge.losses = ended.judge.losses.of_others(stepped)
            self.micro = ended.micro._replace(stepped=ended.micro.stepped | stepped)
        for progress in ended.progresses.all:
            optimizer = progress.optimizer if progress.stage.is_ready else None
            if optimizer is not None:
                self.progress_of(optimizer).refused = progress.refused

    # An optimizer's way.

    def scale(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Multiply arrays by the scale; a first state begins beside the first one."""
        scaling = self.scaling
        is_abandoned = self.current.use.is_fresh and scaling.state is not None and scaling.closure_state is None
        products = scaling.scale(arrays)
        if is_abandoned:
            # A load has abandoned the iteration of the losses before.
            self.judge.losses = Losses()
        for progress in self.progresses.all:
            progress.overtake()
        return products

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with the state that closures have lowered; forget the losses of one that fails."""
        losses = self.judge.losses
        try:
            with self.scaling.inside_closure():
                yield
        except BaseException:
            # The closure is evaluated again, or never.
            self.judge.losses = losses
            raise

    def begin_unscale(self, optimizer: Optimizer) -> Progress:
        """Return an optimizer's progress; CallOrderError if it was unscaled or stepped already."""
        progress = self.progress_of(optimizer)
        if progress.stage.is_unscaled:
            self.wrong_order(
                INCOMPLETE if progress.is_incomplete else f"unscale_() has already been called {SINCE_UPDATE}"
            )
        if progress.stage.has_ended:
            self.wrong_order(f"unscale_() is being called after step() {SINCE_UPDATE}")
        if self.reports.under_way:
            self.check_late_verdicts()
        return progress

    def begin_step(self, optimizer: Optimizer, *, by_closure: bool) -> Progress:
        """Return an optimizer's progress; CallOrderError if it was stepped, InvalidTypeError if it cannot be."""
        _require_step(optimizer)
        progress = self.progress_of(optimizer)
        if progress.stage.has_ended:
            self.wrong_order(f"step() has already been called {SINCE_UPDATE}")
        if progress.stage is Stage.OVERTAKEN and not by_closure:
            self.wrong_order(
                "step() of this optimizer has failed, and a loss was scaled since, whose gradients nothing would "
                "divide: end the iteration with update(get_scale()), or load a state dict, and make new gradients"
            )
        if progress.stage.is_ready and self.reports.under_way:
            self.check_late_verdicts()
        return progress

    def set_inputs(self, progress: Progress, inputs: StepInputs, *, has_closure: bool) -> None:
        """Judge an optimizer by what the program says of its step."""
        loss, norm, _ = inputs
        is_unscaled = progress.stage.is_unscaled
        self._check_inputs(loss, norm, has_closure=has_closure, is_unscaled=is_unscaled)
        if is_unscaled and progress.inputs is not None:
            # The step has failed, and judges nothing again.
            return
        if is_unscaled:
            if norm is None and loss is not None:
                self.wrong_order(
                    "step(loss=) was called after unscale_(), which has judged the step: give scale() loss="
                )
            pending = progress.pending
            if norm is not None and pending is not None and not (pending.groups and self.verdict(progress).reason):
                # Its norm judges the gradients once more.
                progress.judge_again()
        if loss is not None:
            self.judge.losses = Losses()
            self.judge.add_losses([loss])
        progress.inputs = inputs

    def _check_inputs(self, loss: object, norm: object, *, has_closure: bool, is_unscaled: bool) -> None:
        """Raise for a loss or a norm that a step cannot be given."""
        if has_closure and (loss is not None or norm is not None):
            msg = "step() with a closure takes no loss= and no norm=: scale() is given the loss of each evaluation"
            raise InvalidValueError(msg)
        if norm is not None and self.parts.clipping.max_norm is not None:
            msg = "norm= is the norm of gradients that the program has clipped, got a scaler that clips by max_norm="
            raise InvalidValueError(msg)
        if norm is not None and not is_unscaled and not self.current.never_scales:
            self.wrong_order(
                "step(norm=) needs the norm of unscaled gradients: call unscale_() before they are clipped"
            )

    def keeps(self, owner: object, loss: Array | float) -> bool:
        """Tell whether the loss of a micro-batch is finite on all ranks, and count it: one message and one read."""
        current, agreement = self.current, self.agreement
        if agreement.standing.failure is not None:
            raise agreement.standing.failure
        groups = agreement.usable_groups()
        value = value_of(loss if isinstance(loss, float) else current.backend_for(loss).values_of(loss))
        if not groups:
            is_kept = math.isfinite(float(value))
        else:
            for progress in self.progresses.all:
                if progress.pending is not None and progress.pending.is_unread:
                    self.verdict(progress)
            state = self.scaling.in_force(lambda: loss if is_array_api_obj(loss) else None)
            claim = self.messages.next_claim(groups, owner, call=Purpose.MICRO_BATCH)
            code = is_nonfinite(value, state.scale) * claims.reason_code(
                Reason.OVERFLOW, agreement.rank(), LossFault.NONFINITE
            )
            sent = claims.pack_arrays(
                current.state_adapter, current.policy, state, claims.hash_of(claim), Flags(0, code=code)
            )
            with agreement.failing():
                ballot = agreement.send(groups, sent, self.number, claim)
                is_kept = not ballot.verdict(*ballot.read(current.state_adapter), current.policy).reason
        kept, dropped, *_ = MicroBatches() if self.micro.stepped else self.micro
        self.micro = MicroBatches(kept + is_kept, dropped + (not is_kept), not is_kept)
        if is_kept:
            self.judge.add_losses([loss])
            self._marks = [snapshot.anew() for snapshot in self.parts.snapshots]
        for snapshot in () if is_kept else self._marks or self.parts.snapshots:
            snapshot.restore()
        return is_kept

    def check_late_verdicts(self, *, waits: bool = False) -> None:
        """Read late verdicts that have arrived, or all: ranks may differ, and each has a scale for ``note_scale``."""
        for step in self.reports.poll(waits=waits):
            with self.agreement.failing():
                verdict = step.pending.read()
            has_gradients = verdict.reason is not Reason.NO_GRADIENTS
            if has_gradients:
                # First, since warnings may be errors.
                self.tally.note(step.report(), step.position)
            if verdict.is_unscaled and step.pending.groups:
                self.mistakes.tell_of_no_scale(step.iteration, "all ranks")
            if verdict.lacks_values and self.guard is not None:
                self.mistakes.warn_of_no_values(self.guard.rule.of)
            if not has_gradients:
                self.mistakes.tell_of_no_gradients()

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
            self.wrong_order(
                "a closure of this optimizer has failed, so that its gradients cannot be used: call step() with a "
                "closure again, or end the iteration with update(get_scale()) and make new gradients"
            )
        collection = self._collect(progress, optimizer, request, divides=divides)
        gradients, groups, *_ = collection
        source = self.scaling.source_of(progress, optimizer, lambda: gradients.like, has_groups=len(groups) > 0)
        has_values = self.guard is None or is_framework_check
        has_values = has_values or self.judge.has_values(progress, optimizer, has_norm=collection.has_norm)
        if not groups:
            # Over a group another rank may have the loss.
            self._warn_alone(progress, optimizer, source, has_values=has_values)
        is_first = progress.stage.is_ready
        findings = self._divide(progress, optimizer, gradients, source.state)
        try:
            loss = UNJUDGED
            # Gradients that are judged a second time have lost their norm.
            if is_first and (self.guard is not None or progress.inputs is not None):
                is_read = not groups and self.current.adapter.reads_verdict(optimizer)
                loss = self.judge.judge(progress, optimizer, findings, source.state, is_read=is_read)
            pending = self._pending(progress, optimizer, findings, source, collection, loss, has_values=has_values)
            progress.judge(pending, then)
            if groups:
                self.messages.note_sent(pending)
        except Exception as error:
            if isinstance(error, GradscaleError):
                self.agreement.fail(error)
            else:
                self.messages.tell_of_failure(optimizer, self.steps_before)
            raise
        if groups and source.scaled is Scaled.NEVER:
            # As in a pipeline, another rank may have the loss.
            self.verdict(progress)
        if findings.narrow:
            self.mistakes.warn_of_half(type(optimizer).__name__, findings.narrow)
        return findings.norm

    def _warn_alone(self, progress: Progress, optimizer: Optimizer, source: Source, *, has_values: bool) -> None:
        """Warn of gradients whose loss was not scaled, and of a step that has nothing to be judged by."""
        if source.scaled is Scaled.BEFORE:
            self.mistakes.tell_of_no_scale(self.number, type(optimizer).__name__)
        if not progress.refused:
            self.judge.note_values(has_values=has_values)

    def _collect(
        self, progress: Progress, optimizer: Optimizer, request: Request | None, *, divides: bool
    ) -> Collection:
        """Return an optimizer's gradients, or the norm that the program has clipped them by."""
        groups, micro = self.agreement.usable_groups(), self.micro.of(optimizer)
        norm = None if progress.inputs is None else progress.inputs.norm
        if micro.are_all_dropped and progress.stage.is_ready:
            progress.refused = max(progress.refused, Reason.REFUSED)
        try:
            if request is None:
                request = self._request_of_step(optimizer, divides=divides, has_groups=len(groups) > 0)
            gradients = self._gradients_of(optimizer, request, norm)
            is_averaged = len(groups) > 0 and not gradients.groups and self.parts.clipping.norm_over != "group"
            checksum = checksum_of(self.current, optimizer) if micro.dropped and is_averaged else ""
        except Exception:
            self.messages.tell_of_failure(optimizer, self.steps_before)
            raise
        if micro.ends_dropped and micro.kept and gradients.groups:
            self.wrong_order(
                "keeps() has dropped the last micro-batch of DTensor gradients, and whether it was the one that "
                "reduces them cannot be seen: guard such a loop without keeps()"
            )
        has_norm = request.max_norm is not None or norm is not None
        return Collection(gradients, groups or gradients.groups, request.max_norm, has_norm, checksum)

    def _request_of_step(self, optimizer: Optimizer, *, divides: bool, has_groups: bool) -> Request:
        """Return what a step wants of the gradients that it unscales, or has the optimizer unscale."""
        if self.parts.clipping.max_norm is None:
            return UNSCALING if divides else _JUDGING
        is_read = divides and not has_groups and self.current.adapter.reads_verdict(optimizer)
        return self.request(optimizer, self.parts.clipping)._replace(divides=divides, is_read=is_read)

    def _divide(self, progress: Progress, optimizer: Optimizer, gradients: Collected, state: ScaleState) -> Findings:
        """Divide gradients by the scale, of which a failure may leave some divided, unless none can be."""
        before = progress.divide()
        try:
            return gradients.unscale(self.current, state)
        except BaseException as error:
            if not gradients.is_touched:
                progress.undo(*before)
            # An exchange of norms has failed on all ranks.
            if isinstance(error, Exception) and not isinstance(error, OF_ALL_RANKS):
                self.messages.tell_of_failure(optimizer, self.steps_before)
            raise

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
        agreement, (_, groups, max_norm, _, checksum) = self.agreement, collection
        if progress.refused:
            progress.code = claims.reason_code(progress.refused, agreement.rank())
        claim = None
        if groups:
            steps = self.steps_before
            claim = self.messages.next_claim(groups, optimizer, max_norm, steps=steps, checksum=checksum)
        # It gives a new optimizer its position among the streaks, alone, too.
        is_last = self.tally.is_last_chance(optimizer) and len(groups) > 0
        presence = source.presence if findings.has_gradients else Presence.NONE
        scaled = source.scaled + (has_values and source.scaled == Scaled.NOW)
        flags = Flags(findings.nonfinite, 2 * is_last, presence, scaled, progress.code)
        return PendingVerdict(self.current, agreement, findings, source.state, flags, groups, claim, loss)

    def _gradients_of(self, optimizer: Optimizer, request: Request, norm: Array | float | None) -> Collected:
        """Return an optimizer's gradients, or the norm that the program has clipped them by."""
        adapter = self.current.adapter
        if norm is None:
            return adapter.collect(optimizer, self._cache, request)
        groups = adapter.groups_of(optimizer)
        is_read = self.agreement.is_alone and not groups and request.divides and adapter.reads_verdict(optimizer)
        return UserNorm(
            value_of(norm), lambda: adapter.collect(optimizer, self._cache, UNSCALING).like, groups, is_read=is_read
        )

    def refuse(self, optimizer: Optimizer, reason: Reason = Reason.REFUSED) -> None:
        """Let no rank make the coming step of an optimizer; of several reasons the gravest counts."""
        _require_step(optimizer)
        progress = self.progress_of(optimizer)
        if progress.stage.has_ended:
            self.wrong_order(f"{PROGRAM_CALLS[reason]} is being called after step() {SINCE_UPDATE}")
        # In a closure an evaluation before may have left its verdict.
        pending = progress.pending if progress.stage.is_unscaled else None
        if pending is not None and pending.groups:
            self.wrong_order(
                f"{PROGRAM_CALLS[reason]} is being called after unscale_(), which has told the other ranks what comes"
            )
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
            self.wrong_order(INCOMPLETE)
        if pending.is_placeholder:
            self.judge.note_values(has_values=False)
            if progress.refused:
                pending.refuse(claims.reason_code(progress.refused, self.agreement.rank()))
        try:
            verdict = self._read(progress, pending)
        except OF_ALL_RANKS as error:
            self.agreement.fail(error)
            raise
        if verdict.reason is Reason.NOT_SCALED:
            progress.begin_again()
            self.scaling.forbid_unscaled(progress, " on any rank")
        if verdict.is_unscaled and pending.groups:
            self.mistakes.tell_of_no_scale(self.number, "all ranks")
        return verdict

    def _read(self, progress: Progress, pending: PendingVerdict) -> Verdict:
        """Read a verdict after those that were sent before it, and judge what the host has read with it."""
        if pending.groups:
            self.messages.read_before(pending)
        verdict = (pending.verdict if pending.override is None else None) or pending.read()
        if pending.is_judged_late and progress.optimizer is not None:
            return self.judge.judge_late(progress, progress.optimizer, pending)
        return verdict

    def request(self, optimizer: Optimizer, clipping: Clipping) -> Request:
        """Return what clipping asks for; InvalidValueError for gradients without a norm, before any is modified."""
        agreement, current = self.agreement, self.current
        groups = current.adapter.norm_groups(optimizer, self._cache)
        if not groups and clipping.norm_over == "group":
            groups = agreement.usable_groups()
        if not groups:
            return Request(clipping.max_norm)
        if len(groups) > 1:
            msg = (
                f'norm_over="group" needs one group, got {len(groups)}, of which it is not known which hold parts: '
                f"call unscale_(optimizer), and clip the gradients by a norm of your own"
            )
            raise InvalidValueError(msg)
        claim = functools.partial(self.messages.next_claim, groups, optimizer, clipping.max_norm, Purpose.NORM)
        return Request(clipping.max_norm, exchange_over(agreement, current, groups[0], claim))

    def verdict_for_step(self, progress: Progress, optimizer: Optimizer, then: Stage = Stage.STEPPING) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if progress.stage.is_ready and self._has_no_array(progress, optimizer):
            self._tell_of_no_gradients(progress, optimizer, 1.0)
            return Verdict(Reason.NO_GRADIENTS, None, 0, 0, at_min_scale=False, scale=1.0)
        if progress.stage.is_ready:
            self.unscale(progress, optimizer, then=then)
        if progress.refused:
            self.forbid_untold_refusal(progress, optimizer)
        verdict = self.verdict(progress)
        pending = progress.pending
        if pending is not None and pending.findings.deferred is not None:
            self._finish(progress, pending, verdict, then)
        if verdict.reason is Reason.NO_GRADIENTS:
            self._tell_of_no_gradients(progress, optimizer, verdict.scale)
        elif pending is not None and pending.groups and verdict.reason not in PROGRAM_CALLS:
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

    def _has_no_array(self, progress: Progress, optimizer: Optimizer) -> bool:
        """Tell whether a guard's first step has no gradient for a state to be beside, and needs no other rank."""
        is_first = self.scaling.state is None and self.current.state is None
        if not (self.parts.is_guard and is_first) or progress.refused or progress.closure.was_evaluated:
            return False
        groups = self.messages.groups_for(optimizer)
        return not groups and self.current.adapter.collect(optimizer, self._cache, UNSCALING).like is None

    def _tell_of_no_gradients(self, progress: Progress, optimizer: Optimizer, scale: float) -> None:
        """Report a step without gradients: of a guard it does nothing, and else it is CallOrderError."""
        # The optimizer can begin again.
        progress.begin_again()
        self.reports.record(optimizer, StepReport(True, scale, 0, "no gradients", self.number))
        ranks = "" if self.agreement.is_alone else " on any rank"
        what = (
            f"step() of {type(optimizer).__name__}, none of whose parameters has a gradient{ranks}: "
            f"{NO_GRADIENTS}. Nothing was stepped"
        )
        if not self.parts.is_guard:
            self.wrong_order(what)
        self.scaling.has_scaled = False
        if self.micro.kept or self.micro.dropped:
            # The next step has micro-batches of its own.
            self.tally.drop(0 if self.micro.stepped else self.micro.dropped)
            self.micro, self._marks, self.judge.losses = MicroBatches(), (), Losses()
        self.mistakes.warn_of_no_gradients(what)

    def forbid_untold_refusal(self, progress: Progress, optimizer: Optimizer) -> None:
        """Raise CallOrderError for a refusal that no message tells the other ranks."""
        if progress.pending is not None and progress.pending.is_placeholder and self.messages.groups_for(optimizer):
            self.wrong_order(
                f"{PROGRAM_CALLS[progress.refused]} was called for an optimizer whose framework judges the gradients "
                "by itself, of which no message tells the other ranks: let the framework's own flags skip the step "
                "on all ranks"
            )

    def decline(self, progress: Progress, verdict: Verdict | None) -> Verdict:
        """Return the verdict on a step that the optimizer itself has declined; the scale stays as it is."""
        verdict = verdict or self.verdict(progress)
        if not verdict.reason and progress.pending is not None:
            verdict = verdict._replace(reason=Reason.REFUSED, by=self.agreement.rank(), by_loss=False, saw=True)
            progress.decline()
            progress.pending.replace(verdict)
        return verdict

    def read_verdicts(self) -> tuple[list[PendingVerdict], list[Verdict]]:
        """Return the pending verdicts that count in the update, and the verdicts that are read by now."""
        pending, verdicts = [], []
        for progress in self.progresses.all:
            one = progress.pending
            if one is not None and (not one.is_placeholder or one.is_begun):
                verdict = progress.verdict if progress.stage.has_ended else None
                verdict = None if one.is_late else verdict or self.verdict(progress)
                if verdict is not None and verdict.reason is Reason.NO_GRADIENTS:
                    continue
                pending.append(one)
                if verdict is not None:
                    verdicts.append(verdict)
                    progress.leave_out(verdict)
        return pending, verdicts

    # Errors of ranks and callers.

    @property
    def is_at_boundary(self) -> bool:
        """Whether no optimizer's progress has begun, here or, as far as messages say, on another rank."""
        return (
            self.agreement.standing.failure is None
            and not self.scaling.is_inside_closure
            and not self.progresses.have_begun()
        )

    @property
    def counts_alone(self) -> bool:
        """Whether no other rank counts the steps of this iteration."""
        return self.agreement.is_alone and not self.progresses.sent_messages()

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError in mid-iteration."""
        if self.agreement.standing.failure is None and not self.is_at_boundary:
            msg = (
                f"{what} is possible only at the beginning of an iteration, before refuse(), unscale_() and step(), or "
                f"at its end, after update(); this is the middle of iteration {self.number}, which load_state_dict() "
                f"begins anew"
            )
            raise CallOrderError(msg)

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        wrong_order(what, self.number)


def _require_step(optimizer: object) -> None:
    """Raise InvalidTypeError for an object that cannot be stepped."""
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        raise no_optimizer(optimizer, "step()")
