"""Iteration: the calls between two updates, for all optimizers."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.arithmetic import is_floating
from gradscale.core.gradients import (
    Collected,
    Findings,
    GivenNorm,
    ParameterCache,
    Request,
    named_gradients,
    no_optimizer,
)
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.snapshot import Snapshot
from gradscale.core.summaries import sum_of_bits
from gradscale.errors import CallOrderError, GradscaleError, InvalidValueError, ScaleUnderflowError, short_repr
from gradscale.scaler import claim as claims
from gradscale.scaler.agreement import OF_ALL_RANKS, Agreement, exchange_over
from gradscale.scaler.claim import Claim, Flags, LossFault, Presence, Purpose, Reason, Scaled, Verdict
from gradscale.scaler.clipping import Clipping
from gradscale.scaler.diagnosis.cause import NO_GRADIENTS
from gradscale.scaler.guard import Guard, Losses, beside, is_nonfinite, value_of
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.mistakes import Mistakes, no_values
from gradscale.scaler.progress import Closure, Progress, Progresses, Stage
from gradscale.scaler.reports import Reports, StepReport, UpdateReport, step_report
from gradscale.scaler.scale import CurrentScale, Saved, checked_scale, copied
from gradscale.scaler.stall import Tally
from gradscale.scaler.verdict import PendingVerdict

_ORDER = "The right order: scale(loss), backward pass, unscale_(optimizer) if wanted, step(optimizer), update()"

_SINCE = (
    "on this optimizer since the last update(): most often the iteration before ended without update(), which each one "
    "needs; to skip a step call refuse(optimizer), then step(optimizer) and update() as always"
)

_INCOMPLETE = (
    "the gradients of an optimizer could not be unscaled completely before: end the iteration with "
    "update(get_scale()), or load a state dict, and make new gradients"
)

_at_min_scale = operator.attrgetter("at_min_scale")

UNSCALING = Request()
"""Divide and judge; do not clip."""
_JUDGING = Request(divides=False)


class Collaborators(NamedTuple):
    """The parts of a scaler."""

    current: CurrentScale
    agreement: Agreement
    reports: Reports
    cache: ParameterCache
    """The parameters of optimizers, kept from call to call."""
    mistakes: Mistakes
    """Warns of loops that are probably wrong."""
    tally: Tally
    """Counts steps."""
    guard: Guard | None = None
    """Judges losses and norms; None if nothing does."""
    clipping: Clipping = Clipping()
    """How ``unscale_`` and ``step`` clip by default."""
    snapshots: Sequence[Snapshot] = ()
    """Of what ``hold`` names."""
    is_guard: bool = False
    """Whether a step ends its iteration, and an optimizer without gradients is no error."""


class MicroBatches(NamedTuple):
    """The micro-batches of a step, by the answers of ``keeps``."""

    kept: int = 0
    dropped: int = 0
    ends_dropped: bool = False
    """Whether the last one was dropped."""
    stepped: frozenset[int] = frozenset()
    """The ``id()`` of optimizers that were stepped by them in an iteration before."""

    def of(self, optimizer: object) -> MicroBatches:
        """Return those of an optimizer: none if it was stepped by them."""
        return MicroBatches() if id(optimizer) in self.stepped else self


class Iteration:
    """The calls between two updates. No part, progress or verdict keeps it alive.

    ``state`` is the one that outputs were scaled with last, and that gradients are divided by. ``lowered`` is the state
    after the backoffs of closures. ``steps_before`` counts the steps of all iterations, of which it forgets those
    without a group (``alone_before``) when it joins one.
    """

    micro = MicroBatches()
    _marks: Sequence[Snapshot] = ()
    # Whether some rank has skipped as many steps in a row as it allows.
    scaled = is_inside_closure = gives_up = False
    state: ScaleState | None = None
    lowered: ScaleState | None = None
    # The state before an update; if that is interrupted, the next call goes back to it.
    _before: Saved | None = None
    losses = Losses()
    loss_nonfinite: tuple[Array, ...] = ()
    _closure_state: ScaleState | None = None
    _messages = 0

    def __init__(self, number: int, parts: Collaborators, steps_before: int = 0, alone_before: int = 0) -> None:
        self.number, self.parts, self.steps_before, self.alone_before = number, parts, steps_before, alone_before
        self.current, self.agreement, self.reports, self._cache, self.mistakes, self.tally, self.guard, *_ = parts
        # With the position of the optimizer's streak.
        self.steps: list[tuple[StepReport, int | None]] = []
        self.progresses = Progresses()
        # Over groups, in the order of their messages.
        self._sent: list[PendingVerdict] = []

    # The progress of optimizers.

    def progress_of(self, optimizer: Optimizer) -> Progress:
        """Return an optimizer's progress; after a failed agreement, raise its error again.

        CallOrderError after an update that was interrupted.
        """
        if self.agreement.failure is not None:
            raise self.agreement.failure
        if self._before is not None:
            self.wrong_order("update() was interrupted, and may have adapted the state: call it again first")
        return self.progresses.of(optimizer)

    def begin_anew(self, number: int, steps: int) -> Iteration:
        """Return the iteration after a load, once agreements under way are finished; ``steps``: as saved.

        Gradients that nobody has unscaled yet can still be, by the state that they were scaled with. The steps
        before do not count: ranks that load one checkpoint may have had other numbers of them.
        """
        state = self.state
        if self.agreement.failure is None:
            # Other ranks may have seen a difference already, or never come.
            with contextlib.suppress(*OF_ALL_RANKS):
                self.read_verdicts()
        following = Iteration(number, self.parts, steps)
        self.current.is_unused = self.current.is_unused or not self.is_at_boundary
        self.current.has_leftovers |= not self.is_at_boundary and not self.current.is_one(state or self.current.state)
        if state is not None and self.is_at_boundary:
            # The load may write to the arrays of the state.
            following.state = copied(state)
            following.scaled, following.losses = self.scaled, self.losses
        return following

    def forget(self, identity: int | None = None) -> None:
        """Let the optimizer with this ``id()``, or each, begin again; agreements under way are finished first.

        KeyError for an optimizer that has no progress.
        """
        self.read_verdicts()
        self.progresses.forget(identity)

    def go_on_from(self, ended: Iteration) -> None:
        """Go on with the loss of the iteration before, for other optimizers, and with refusals of steps to come."""
        if ended.losses.number or ended.micro.kept or ended.micro.dropped:
            stepped = ended.progresses.stepped_ids()
            self.losses = ended.losses.of_others(stepped)
            self.micro = ended.micro._replace(stepped=ended.micro.stepped | stepped)
        for progress in ended.progresses.all:
            optimizer = progress.optimizer if progress.stage is Stage.READY else None
            if optimizer is not None:
                self.progress_of(optimizer).refused = progress.refused

    def add_losses(self, losses: Iterable[Array | float]) -> None:
        """Add losses, by whose mean the guard judges the next optimizer."""
        for loss in losses:
            value = loss if isinstance(loss, float) else self.current.backend_for(loss).values_of(loss)
            if value is not None:
                self.losses = self.losses.plus(value)

    # The state in force.

    def scale(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Multiply arrays by the scale; a first state begins beside the first one."""
        current = self.current
        state = self._closure_state or current.state or current.materialize(arrays[0])
        if current.state_adapter.forbid_tracing is not None:
            current.state_adapter.forbid_tracing("scale()")
        products = arrays if current.is_static and current.is_one(state) else current.state_adapter.scale(arrays, state)
        if self._closure_state is None:
            if current.is_fresh and self.state is not None:
                # A load has abandoned the iteration of the losses before.
                self.losses = Losses()
            self.state = state
        current.is_fresh = current.is_unused = current.has_leftovers = False
        self.scaled = True
        for progress in self.progresses.all:
            progress.overtake()
        return products

    def in_force(self, first: Callable[[], Array | None]) -> ScaleState:
        """Return the state to unscale with, a new one beside the ``first`` array; CallOrderError without any."""
        state = self._closure_state or self.state or self.current.state
        if state is not None:
            return state
        like = first()
        if like is None:
            like = self.agreement.example(self.current, self.number)
        if like is None:
            self.wrong_order("no array has been seen yet, so it is not known where the state belongs")
        return self.current.materialize(like)

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with the state that closures have lowered, if they have."""
        self._closure_state, self.is_inside_closure = self.lowered, True
        losses, scaled, self.scaled = self.losses, self.scaled, False
        try:
            yield
        except BaseException:
            # The closure is evaluated again, or never.
            self.losses = losses
            raise
        finally:
            self._closure_state, self.is_inside_closure = None, False
            self.scaled = self.scaled or scaled

    def lower(self) -> bool:
        """Back the scale off for the rest of this iteration's closures; False if the policy cannot."""
        state = self.lowered or self.state or self.current.materialize()
        self.lowered = self.current.policy.backoff(state)
        return self.lowered is not state

    # An optimizer's way.

    def begin_unscale(self, optimizer: Optimizer) -> Progress:
        """Return an optimizer's progress; CallOrderError if it was unscaled or stepped already."""
        progress = self.progress_of(optimizer)
        if progress.stage.is_unscaled:
            self.wrong_order(_INCOMPLETE if progress.is_incomplete else f"unscale_() has already been called {_SINCE}")
        if progress.stage.has_ended:
            self.wrong_order(f"unscale_() is being called after step() {_SINCE}")
        if self.reports.under_way:
            self.check_late_verdicts()
        return progress

    def begin_step(self, optimizer: Optimizer, *, by_closure: bool) -> Progress:
        """Return an optimizer's progress; CallOrderError if it was stepped, InvalidTypeError if it cannot be."""
        _require_step(optimizer)
        progress = self.progress_of(optimizer)
        if progress.stage.has_ended:
            self.wrong_order(f"step() has already been called {_SINCE}")
        if progress.stage is Stage.OVERTAKEN and not by_closure:
            self.wrong_order(
                "step() of this optimizer has failed, and a loss was scaled since, whose gradients nothing would "
                "divide: end the iteration with update(get_scale()), or load a state dict, and make new gradients"
            )
        if progress.stage is Stage.READY and self.reports.under_way:
            self.check_late_verdicts()
        return progress

    def set_inputs(self, progress: Progress, inputs: StepInputs, *, has_closure: bool) -> None:
        """Judge an optimizer by what the program says of its step."""
        loss, norm, _ = inputs
        is_unscaled = progress.stage.is_unscaled
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
        if is_unscaled and progress.inputs is None:
            if norm is None and loss is not None:
                self.wrong_order(
                    "step(loss=) was called after unscale_(), which has judged the step: give scale() loss="
                )
            if (
                progress.pending is not None
                and norm is not None
                and not (progress.pending.groups and self.verdict(progress).reason)
            ):
                # Its norm judges the gradients once more.
                progress.judge_again()
        elif is_unscaled:
            # The step has failed, and judges nothing again.
            return
        if loss is not None:
            self.losses = Losses()
            self.add_losses([loss])
        progress.inputs = inputs

    def keeps(self, owner: object, loss: Array | float) -> bool:
        """Tell whether the loss of a micro-batch is finite on all ranks, and count it: one message and one read."""
        current, agreement = self.current, self.agreement
        if agreement.failure is not None:
            raise agreement.failure
        groups = () if agreement.is_alone else agreement.usable_groups()
        value = value_of(loss if isinstance(loss, float) else current.backend_for(loss).values_of(loss))
        if not groups:
            is_kept = math.isfinite(float(value))
        else:
            for progress in self.progresses.all:
                if progress.pending is not None and progress.pending.is_unread:
                    self.verdict(progress)
            state = self.in_force(lambda: loss if is_array_api_obj(loss) else None)
            claim = self.next_claim(groups, owner, call=Purpose.MICRO_BATCH)
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
            self.add_losses([loss])
            self._marks = [snapshot.anew() for snapshot in self.parts.snapshots]
        for snapshot in () if is_kept else self._marks or self.parts.snapshots:
            snapshot.restore()
        return is_kept

    def _checksum(self, optimizer: Optimizer) -> str:
        """Return a checksum of gradients that all ranks hold, unless what averages them was left out."""
        located = [one.array for one in named_gradients(optimizer) if is_array_api_obj(one.array)]
        arrays = [one for one in map(self.current.adapter.values_of, located) if one is not None and is_floating(one)]
        backend = self.current.backend_for(arrays[0]) if arrays else self.current.adapter
        sums = [sum_of_bits(one, backend.bits(one)) for one in arrays]
        stack = [backend.move(one, arrays[0]) for one in sums if one is not None]
        numbers = backend.read(array_namespace(stack[0]).stack(stack)) if stack else []
        others = [array for array, one in zip(arrays, sums, strict=True) if one is None]
        summaries = backend.read_summaries(others)[0] if others else []
        checksum = zlib.crc32(repr((numbers, summaries)).encode())
        return (
            f"{checksum:08x} of the gradients, which differ: a micro-batch was dropped, and perhaps the one that "
            f"averages them, as the last does under no_sync(); make a backward pass in its place, of zeros. Of parts "
            f'of gradients say max_norm= with norm_over="group"'
        )

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
        if progress.closure is not Closure.NONE and not self.is_inside_closure:
            self.wrong_order(
                "a closure of this optimizer has failed, so that its gradients cannot be used: call step() with a "
                "closure again, or end the iteration with update(get_scale()) and make new gradients"
            )
        current, agreement, micro = self.current, self.agreement, self.micro.of(optimizer)
        groups = () if agreement.is_alone else agreement.usable_groups()
        if progress.stage is Stage.READY and micro.dropped and not micro.kept:
            progress.refused = progress.refused or Reason.REFUSED
        try:
            if request is None:
                request = UNSCALING if divides else _JUDGING
                if self.parts.clipping.max_norm is not None:
                    is_read = divides and not groups and current.adapter.reads_verdict(optimizer)
                    request = self.request(optimizer, self.parts.clipping)._replace(divides=divides, is_read=is_read)
            norm = None if progress.inputs is None else progress.inputs.norm
            gradients = self._collected(optimizer, request, norm)
            is_averaged = len(groups) > 0 and not gradients.groups and self.parts.clipping.norm_over != "group"
            checksum = self._checksum(optimizer) if micro.dropped and is_averaged else ""
        except Exception:
            self._tell_of_failure(optimizer)
            raise
        groups = groups or gradients.groups
        if micro.ends_dropped and micro.kept and gradients.groups:
            self.wrong_order(
                "keeps() has dropped the last micro-batch of DTensor gradients, and whether it was the one that "
                "reduces them cannot be seen: guard such a loop without keeps()"
            )
        not_scaled = None if self.scaled else self._never_scaled(progress, optimizer, groups)
        if not_scaled is Presence.SOME and not groups:
            self._forbid_unscaled(progress)
        state = self._closure_state or self.state or current.state or self.in_force(lambda: gradients.like)
        is_unscaled = not (
            self.scaled or not_scaled or progress.refused or current.adapter.is_replayed or current.is_one(state)
        )
        has_norm = request.max_norm is not None or norm is not None
        has_values = is_framework_check or self._has_values(progress, optimizer, has_norm=has_norm)
        if not groups:
            # Over a group another rank may have the loss.
            if is_unscaled:
                self.mistakes.tell_of_no_scale(self.number, type(optimizer).__name__)
            if not progress.refused:
                self._note_values(has_values=has_values)
        is_first, undo = progress.stage is Stage.READY, progress.divide()
        try:
            findings = gradients.unscale(current, state)
        except BaseException as error:
            # After a failure some gradients may be divided already, but not if they cannot be or the second time.
            if not gradients.is_touched:
                undo()
            # An exchange of norms has failed on all ranks.
            if isinstance(error, Exception) and not isinstance(error, OF_ALL_RANKS):
                self._tell_of_failure(optimizer)
            raise
        try:
            late: tuple[Array | float | None, bool] = None, False
            # Gradients that are judged a second time have lost their norm.
            if (self.guard is not None or progress.inputs is not None) and is_first:
                is_read = not groups and current.adapter.reads_verdict(optimizer)
                late = self._judge(progress, optimizer, findings, state, is_read=is_read)
            if progress.refused:
                progress.code = claims.reason_code(progress.refused, agreement.rank())
            claim = self.next_claim(groups, optimizer, request.max_norm) if groups else None
            if claim is not None and checksum:
                claim = claim._replace(checksum=checksum)
            presence = (not_scaled or Presence.SOME) if findings.has_gradients else Presence.NONE
            scaled = Scaled.NEVER if not_scaled else Scaled.BEFORE if is_unscaled else Scaled.NOW + has_values
            # It gives a new optimizer its position among the streaks, alone, too.
            is_last = self.tally.is_last_chance(optimizer) and len(groups) > 0
            flags = Flags(findings.nonfinite, 2 * is_last, presence, scaled, progress.code)
            loss, is_late = late
            pending = PendingVerdict(
                current, agreement, findings, state, flags, groups, claim, loss, is_judged_late=is_late
            )
            progress.judge(pending, then)
            if groups:
                self._sent.append(pending)
        except Exception as error:
            if isinstance(error, GradscaleError):
                agreement.fail(error)
            else:
                self._tell_of_failure(optimizer)
            raise
        if groups and not_scaled is not None:
            # As in a pipeline, another rank may have the loss.
            self.verdict(progress)
        if findings.narrow:
            self.mistakes.warn_of_half(type(optimizer).__name__, findings.narrow)
        return findings.norm

    def _has_values(self, progress: Progress, optimizer: Optimizer, *, has_norm: bool) -> bool:
        """Tell whether the rule for spikes has a value to judge on this rank, or needs none."""
        if self.guard is None:
            return True
        is_own = id(optimizer) not in self.losses.judged
        if progress.refused or progress.closure is Closure.BEGUN or (self.losses.is_used and is_own):
            return True
        has_value = {"loss": self.losses.number > 0 and is_own, "norm": has_norm}
        return any(has_value[name] for name in self.guard.rule.of)

    def _note_values(self, *, has_values: bool) -> None:
        """Warn of a step of which no rank has a value to judge; of a guard that never had one, InvalidValueError."""
        if self.guard is None:
            return
        self.guard.has_judged |= has_values
        if self.parts.is_guard and not self.guard.has_judged:
            raise InvalidValueError(no_values(self.guard.rule.of))
        if not has_values:
            self.mistakes.warn_of_no_values(self.guard.rule.of)

    def _collected(self, optimizer: Optimizer, request: Request, norm: Array | float | None) -> Collected:
        """Return an optimizer's gradients, or the norm that the program has clipped them by."""
        adapter = self.current.adapter
        if norm is None:
            return adapter.collect(optimizer, self._cache, request)
        groups = adapter.groups_of(optimizer)
        is_read = self.agreement.is_alone and not groups and request.divides and adapter.reads_verdict(optimizer)
        return GivenNorm(
            value_of(norm), lambda: adapter.collect(optimizer, self._cache, UNSCALING).like, groups, is_read=is_read
        )

    def _forbid_unscaled(self, progress: Progress, where: str = "") -> NoReturn:
        if progress.closure is not Closure.NONE:
            self.wrong_order(
                f"the closure of step() has not called scale(){where}: make the backward pass of scaler.scale(loss) in "
                f"each of its evaluations; or make it before, and call step(optimizer) without the closure"
            )
        since = " since a state was loaded, or a scale or a group set" if self.current.is_set else ""
        self.wrong_order(f"scale() has never been called{where}{since}: make the gradients of scaler.scale(loss)")

    def _never_scaled(self, progress: Progress, optimizer: Optimizer, groups: Sequence[Collectives]) -> Presence | None:
        """Return the presence of gradients whose loss this rank never scaled; a host read each, None for others."""
        current, has_closure = self.current, progress.closure is not Closure.NONE
        if progress.refused or current.adapter.is_replayed or not (current.is_fresh or has_closure):
            return None
        # Nothing has to be divided.
        is_one = self._closure_state is None and current.scale() == 1.0 and (len(groups) > 0 or current.is_set)
        if not current.has_leftovers and (current.never_scales or is_one):
            return None
        if not current.is_set:
            return Presence.SOME
        values = [
            current.adapter.values_of(one.array) for one in named_gradients(optimizer) if is_array_api_obj(one.array)
        ]
        arrays = [one for one in values if one is not None and is_floating(one)]
        summaries = [current.backend_for(one).read_summaries([one])[0][0] for one in arrays]
        if all(one.zeros == one.size for one in summaries):
            return Presence.ZEROS
        return Presence.SOME if current.is_unused or has_closure else None

    def refuse(self, optimizer: Optimizer, reason: Reason = Reason.REFUSED) -> None:
        """Let no rank make the coming step of an optimizer."""
        _require_step(optimizer)
        progress = self.progress_of(optimizer)
        if progress.stage.has_ended:
            self.wrong_order(f"refuse() is being called after step() {_SINCE}")
        # In a closure an evaluation before may have left its verdict.
        pending = progress.pending if progress.stage.is_unscaled else None
        if pending is not None and pending.groups:
            self.wrong_order("refuse() is being called after unscale_(), which has told the other ranks what comes")
        progress.refused = reason
        if pending is not None:
            progress.code = claims.reason_code(reason, self.agreement.rank())
            pending.refuse(progress.code)

    def _judge(
        self, progress: Progress, optimizer: Optimizer, findings: Findings, state: ScaleState, *, is_read: bool
    ) -> tuple[Array | float | None, bool]:
        """Judge the loss and the norm; return the loss, and whether that is left to when the host has read them."""
        backend, norm = self.current.state_adapter, findings.norm
        # The losses are this optimizer's, whether it is judged by them or not.
        loss = None if id(optimizer) in self.losses.judged else self.losses.mean()
        self.losses = self.losses._replace(is_used=True)
        progress.code, number = 0, None if is_array_api_obj(loss) else loss
        if progress.closure is Closure.BEGUN:
            return number, False
        if norm is not None and not isinstance(norm, float):
            (norm,) = backend.peek((norm,)) or (norm,)
        is_unknown = any(map(is_array_api_obj, (loss, norm))) or (norm is None and findings.deferred is not None)
        if is_unknown and is_read and backend.bits(state.scale) is not None:
            return beside(loss, state.scale) if is_array_api_obj(loss) else loss, True
        self._observe(progress, optimizer, loss, norm, state)
        return number, False

    def _observe(self, progress: Progress, optimizer: Optimizer, loss: Any, norm: Any, state: ScaleState) -> None:
        """Set the code of a spike that this rank sees, 0 of none; 0-d int32 if the host does not know."""
        # Also if the step is refused, so that windows are in one order in each run.
        seen = progress.observation = (
            None if self.guard is None else self.guard.judge(optimizer, loss, norm, state.scale)
        )
        if progress.refused:
            return
        code = functools.partial(claims.reason_code, Reason.SPIKE, self.agreement.rank())
        if seen is not None and self.guard is not None:
            # Its reason is 0 or Reason.SPIKE, which is 1.
            fault, reason = claims.fault_of(loss) or LossFault(seen.is_loss), Reason(self.guard.rule.act)
            progress.code = seen.reason * claims.reason_code(reason, self.agreement.rank(), fault)
        if progress.inputs is not None and progress.inputs.loss is not None:
            bad: Any = is_nonfinite(loss, state.scale) * code(LossFault.NONFINITE)
            # MLX has no operators with a number on the left.
            progress.code = bad | progress.code if is_array_api_obj(bad) else progress.code | bad

    def _tell_of_failure(self, optimizer: Optimizer) -> None:
        """Tell the other ranks, which would wait for this one's message, so that they raise ScaleDesyncError."""
        agreement, current = self.agreement, self.current
        # What fails now is not what is wrong.
        with contextlib.suppress(Exception):
            groups = self.groups_for(optimizer)
            if not groups or agreement.failure is not None:
                return
            claim = self.next_claim(groups, optimizer)

            def like() -> Array | None:
                with contextlib.suppress(Exception):
                    return current.adapter.collect(optimizer, self._cache, UNSCALING).like
                return None

            scale = self.in_force(like).scale
            sent = current.state_adapter.integers(claims.pack_failure(claims.hash_of(claim), agreement.rank()), scale)
            with agreement.failing():
                ballot = agreement.send(groups, sent, self.number, claim)
                ballot.verdict(*ballot.read(current.state_adapter), current.policy)

    def verdict(self, progress: Progress) -> Verdict:
        """Finish the agreement on an optimizer's gradients and return its verdict: the one host read of a step."""
        pending = progress.pending
        if self.agreement.failure is not None:
            raise self.agreement.failure
        if pending is None or (pending.is_placeholder and not pending.is_begun):
            self.wrong_order(_INCOMPLETE)
        if pending.is_placeholder and self.guard is not None:
            self._note_values(has_values=False)
        if pending.is_placeholder and progress.refused:
            pending.refuse(claims.reason_code(progress.refused, self.agreement.rank()))
        try:
            # In the order sent: a rank that could not unscale has sent a failure, and no message after it.
            while pending.is_unread and self._sent and self._sent[0] is not pending:
                if self._sent[0].is_unread:
                    self._sent[0].read()
                del self._sent[0]
            verdict = (pending.verdict if pending.override is None else None) or pending.read()
            optimizer = progress.optimizer if pending.is_judged_late else None
            if optimizer is not None:
                self._observe(progress, optimizer, pending.loss, pending.norm, pending.state)
                if isinstance(progress.code, int) and progress.code:
                    pending.refuse(progress.code)
                # Last, so that a step after Ctrl-C judges again.
                pending.is_judged_late = False
                verdict = pending.read()
        except OF_ALL_RANKS as error:
            self.agreement.fail(error)
            raise
        if verdict.reason is Reason.NOT_SCALED:
            progress.begin_again()
            self._forbid_unscaled(progress, " on any rank")
        if verdict.is_unscaled and pending.groups:
            self.mistakes.tell_of_no_scale(self.number, "all ranks")
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
        claim = functools.partial(self.next_claim, groups, optimizer, clipping.max_norm, Purpose.NORM)
        return Request(clipping.max_norm, exchange_over(agreement, current, groups[0], claim))

    def verdict_for_step(self, progress: Progress, optimizer: Optimizer, then: Stage = Stage.STEPPING) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if progress.stage is Stage.READY and self._has_no_array(progress, optimizer):
            self._tell_of_no_gradients(progress, optimizer, 1.0)
            return Verdict(Reason.NO_GRADIENTS, None, 0, 0, at_min_scale=False, scale=1.0)
        if progress.stage is Stage.READY:
            self.unscale(progress, optimizer, then=then)
        if progress.refused:
            self.forbid_untold_refusal(progress, optimizer)
        verdict = self.verdict(progress)
        pending = progress.pending
        if pending is not None and pending.findings.deferred is not None:
            # Until it is done, gradients may be divided in part.
            progress.divide()
            if not verdict.reason:
                pending.findings.deferred.finish()
            is_scaled = pending.findings.is_scaled and verdict.reason > 0
            pending.findings = pending.findings._replace(is_scaled=is_scaled, deferred=None)
            progress.judge(pending, then)
        if verdict.reason is Reason.NO_GRADIENTS:
            self._tell_of_no_gradients(progress, optimizer, verdict.scale)
        elif pending is not None and pending.groups and verdict.reason is not Reason.REFUSED:
            try:
                self._note_values(has_values=not verdict.lacks_values)
            except InvalidValueError:
                progress.begin_again()
                self.losses = Losses()
                raise
        return verdict

    def _has_no_array(self, progress: Progress, optimizer: Optimizer) -> bool:
        """Tell whether a guard's first step has no gradient for a state to be beside, and needs no other rank."""
        is_first = self.state is None and self.current.state is None
        if not (self.parts.is_guard and is_first) or progress.refused or progress.closure is not Closure.NONE:
            return False
        groups = self.groups_for(optimizer)
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
        self.scaled = False
        if self.micro.kept or self.micro.dropped:
            # The next step has micro-batches of its own.
            self.tally.drop(0 if self.micro.stepped else self.micro.dropped)
            self.micro, self._marks, self.losses = MicroBatches(), (), Losses()
        self.mistakes.warn_of_no_gradients(what)

    def forbid_untold_refusal(self, progress: Progress, optimizer: Optimizer) -> None:
        """Raise CallOrderError for a refusal that no message tells the other ranks."""
        if progress.pending is not None and progress.pending.is_placeholder and self.groups_for(optimizer):
            self.wrong_order(
                "refuse() was called for an optimizer whose framework judges the gradients by itself, of which no "
                "message tells the other ranks: let the framework's own flags skip the step on all ranks"
            )

    def decline(self, progress: Progress, verdict: Verdict | None) -> Verdict:
        """Return the verdict on a step that the optimizer itself has declined; the scale stays as it is."""
        verdict = verdict or self.verdict(progress)
        if not verdict.reason and progress.pending is not None:
            verdict = verdict._replace(reason=Reason.REFUSED, by=self.agreement.rank(), by_loss=False, saw=True)
            progress.decline()
            progress.pending.replace(verdict)
        return verdict

    # The end of the iteration.

    def close(
        self, new_scale: float | Array | None = None
    ) -> tuple[Callable[[], UpdateReport] | None, ScaleUnderflowError | None]:
        """Adapt the state to the verdicts, or set a scale; the host reads what a report needs, and a step left out.

        Return a function that makes the report of the update, if somebody wants it, and an error to raise afterwards.
        """
        current = self.current
        if self.agreement.failure is not None:
            raise self.agreement.failure
        for progress in self.progresses.all:
            is_left = progress.refused and progress.stage is Stage.READY and new_scale is None
            if is_left and not (self.parts.is_guard and self.progresses.are_over()):
                self.wrong_order(
                    "refuse() was called for an optimizer that was neither unscaled nor stepped: call step() of the "
                    "same object, which then makes no step, or end the iteration with update(get_scale())"
                )
        wanted = None if new_scale is None else checked_scale(new_scale, current.policy)
        pending, verdicts = self.read_verdicts()
        self.gives_up = any(each.gives_up and each.reason in (Reason.SPIKE, Reason.OVERFLOW) for each in verdicts)
        if wanted is None and self.lowered is None and not pending:
            self._forbid_update()
        report = self._report(pending, verdicts, wanted) if self.reports.on_update else None
        is_at_min = wanted is None and any(map(_at_min_scale, verdicts))
        underflow = self._underflow(pending, verdicts) if is_at_min else None
        if self.guard is not None:
            for progress in self.progresses.all:
                # A window learns from no gradients that were only looked at, or that the user has stepped with.
                if progress.stage.is_over and progress.observation is not None and progress.pending is not None:
                    self.guard.learn(progress.observation, progress.pending.reason(), current.state_adapter.write_into)
        if self.parts.snapshots:
            self._hold()
        # Last, since Ctrl-C after it would let the next update adapt the state again.
        if wanted is not None:
            current.set_scale(wanted)
        elif self.lowered is not None:
            current.set_state(self.lowered)
        else:
            self._adapt(pending)
        return report, underflow

    def _hold(self) -> None:
        """Save the arrays of ``hold`` if no step was skipped, else restore them, by flags of a device if need be."""
        begun = [progress for progress in self.progresses.all if progress.stage is not Stage.READY]
        if not begun:
            return
        all_stepped = all(progress.has_stepped for progress in begun)
        late = [
            progress.pending.skips() for progress in begun if progress.verdict is None and progress.pending is not None
        ]
        skips = [one for one in late if not isinstance(one, bool)] if all_stepped else []
        for snapshot in self.parts.snapshots:
            if not snapshot.takes_flags:
                # The host writes what it holds.
                xp = self.current.xp
                flags = [xp.astype(xp.reshape(one != 0, (1,)), xp.int32) for one in skips]
                all_stepped = all_stepped and not any(self.current.state_adapter.read(flag)[0] for flag in flags)
            if all_stepped and not (skips and snapshot.takes_flags):
                snapshot.save()
            else:
                snapshot.restore(skips if all_stepped else ())

    def _report(
        self, pending: Sequence[PendingVerdict], verdicts: Sequence[Verdict], wanted: float | None
    ) -> Callable[[], UpdateReport]:
        """Return a function that makes the report of the update once the state is adapted."""
        current, steps = self.current, [step for step, _ in self.steps]
        # Somebody wants them since a step whose verdict was to be read later.
        with self.agreement.failing():
            steps += [step_report(one.read(), self.number, one.rank()) for one in pending if one.is_late]
        scales = [step.scale for step in steps] + [verdict.scale for verdict in verdicts]
        # Without a verdict it has to be read; a closure's may be of a lower one than the update starts from.
        before = current.scale() if not scales or any(step.retries for step in steps) else scales[0]
        skipped = any(step.skipped for step in steps) or any(verdict.reason for verdict in verdicts)

        def report() -> UpdateReport:
            after = current.scale() if wanted is None else wanted
            rank, counts = self.agreement.rank(), self.tally.counts
            return UpdateReport(self.number, before, skipped, rank, tuple(steps), after, counts)

        return report

    def _underflow(self, pending: Sequence[PendingVerdict], verdicts: Sequence[Verdict]) -> ScaleUnderflowError | None:
        # If a policy raises, no verdict is late. A closure may have tried the lowest scale, and the update does not.
        for one, verdict in zip(pending, verdicts, strict=False):
            if verdict.at_min_scale and verdict.nonfinite and one.state is (self.state or self.current.state):
                return ScaleUnderflowError(
                    f"gradients overflow although the scale is at its minimum, {verdict.scale!r}: the cause is not "
                    f"the scale. Look for inf or NaN in the unscaled loss, the data or the weights, which "
                    f"diagnose(optimizer, loss=loss, state=True) searches; lower the learning "
                    f'rate, or allow a smaller min_scale; at_min="clamp" skips such steps instead. Got '
                    f"{short_repr(self.current.policy)}"
                )
        return None

    def _adapt(self, pending: Sequence[PendingVerdict]) -> None:
        counts: list[Array | int] = []
        flags: list[Array | bool] = []
        for one in pending:
            if (count := one.count()) is not None:
                counts.append(count)
                # On a device a step may be neither clean nor an overflow without the CPU's knowledge.
                if one.is_late and (flag := one.keeps_scale()) is not False:
                    flags.append(flag)
        if self.reports.under_way:
            self.check_late_verdicts()
        if counts:
            if self._before is None:
                self._before = self.current.saved()
            else:
                self.current.restore(self._before)
            self.current.advance(counts, flags if len(flags) == len(counts) else (), self._before)

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

    # Messages.

    def groups_for(self, optimizer: Optimizer) -> Sequence[Collectives]:
        """Return the groups that an optimizer's ranks agree over, before its gradients are looked at."""
        groups = self.agreement.usable_groups() or self.current.adapter.groups_of(optimizer)
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
    ) -> Claim:
        """Return the claim of the next message of this iteration; each call counts as a message."""
        self._messages += 1
        agreement = self.agreement
        label = agreement.label_of(optimizer)
        # Norms and diagnoses do not depend on the policy and the steps, which the step's own message compares.
        is_step = call is Purpose.STEP
        return Claim(
            call=call,
            iteration=self.number,
            message=self._messages - 1,
            optimizer=label.number,
            scaler=agreement.number_over(groups[0]),
            group=index,
            settings=agreement.settings_hash(self.current.policy) if is_step else 0,
            steps=self.steps_before if is_step else 0,
            max_norm=max_norm,
            kind=label.kind,
        )

    # Errors of ranks and callers.

    def _forbid_update(self) -> NoReturn:
        """Raise CallOrderError for an update before which nothing was unscaled or stepped."""
        if any(progress.is_incomplete for progress in self.progresses.all):
            self.wrong_order(_INCOMPLETE)
        never = self.current.never_scales
        if self.scaled or never:
            since = "in this iteration" if never else "since scale(): gradients are still multiplied by the scale"
            self.wrong_order(
                f"no optimizer was unscaled or stepped by the scaler {since}; call scaler.step(optimizer) in place of "
                f"optimizer.step(), and before update()"
            )
        self.wrong_order("update() was called, and nothing was scaled or unscaled since the last update()")

    @property
    def is_at_boundary(self) -> bool:
        """Whether no optimizer's progress has begun, here or, as far as messages say, on another rank."""
        return self.agreement.failure is None and not self.is_inside_closure and not self.progresses.have_begun()

    @property
    def counts_alone(self) -> bool:
        """Whether no other rank counts the steps of this iteration."""
        return self.agreement.is_alone and not self.progresses.sent_messages()

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError in mid-iteration."""
        if self.agreement.failure is None and not self.is_at_boundary:
            msg = (
                f"{what} is possible only at the beginning of an iteration, before refuse(), unscale_() and step(), or "
                f"at its end, after update(); this is the middle of iteration {self.number}, which load_state_dict() "
                f"begins anew"
            )
            raise CallOrderError(msg)

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        msg = f"{what} (iteration {self.number}). {_ORDER}"
        raise CallOrderError(msg)


def _require_step(optimizer: object) -> None:
    """Raise InvalidTypeError for an object that cannot be stepped."""
    if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
        raise no_optimizer(optimizer, "step()")
