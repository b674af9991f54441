"""The end of an iteration: the state is adapted to its verdicts, windows learn, and arrays of ``hold`` are saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn

from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import ScaleUnderflowError, short_repr
from gradscale.scaler.agreement import OF_ALL_RANKS
from gradscale.scaler.claim import PROGRAM_CALLS, Reason, Verdict
from gradscale.scaler.guard import Guard
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.order import INCOMPLETE, wrong_order
from gradscale.scaler.progress import Progress, Stage
from gradscale.scaler.reports import StepReport, UpdateReport, step_report
from gradscale.scaler.scale import checked_scale, copied
from gradscale.scaler.verdict import PendingVerdict


class Update:
    """The update of an iteration.

    One that is interrupted can be made again: windows learn once, and it counts in its last try. ``gives_up``: some
    rank has skipped as many steps in a row as it allows.
    """

    report: Callable[[], UpdateReport] | None = None
    """Makes the report of the update, if somebody wants it."""
    underflow: ScaleUnderflowError | None = None
    """To raise afterwards."""
    gives_up = False
    is_alone = True
    """Whether no message was sent for a step."""

    def __init__(self, iteration: Iteration, new_scale: float | Array | None = None) -> None:
        """Adapt the state to the verdicts, or set a scale; the host reads what a report needs, and a step left out."""
        self._iteration, current = iteration, iteration.current
        if iteration.agreement.standing.failure is not None:
            raise iteration.agreement.standing.failure
        for progress in iteration.progresses.all if new_scale is None else ():
            if progress.refused and progress.stage.is_ready:
                self._forbid_refusal(progress)
        wanted = None if new_scale is None else checked_scale(new_scale, current.policy)
        pending, verdicts = iteration.read_verdicts()
        lowered = iteration.scaling.lowered
        if wanted is None and lowered is None and not pending:
            self._forbid()
        if iteration.reports.on_update:
            self.report = self._report(pending, verdicts, wanted)
        # If a policy raises, no verdict is late.
        for one, verdict in zip(pending, verdicts, strict=False):
            if verdict.reason:
                self._note_end(one, verdict, is_set=wanted is not None)
        if iteration.parts.guard is not None:
            self._learn(iteration.parts.guard)
        if iteration.parts.snapshots:
            self._hold()
        # Last, since Ctrl-C after it would let the next update adapt the state again.
        self._adapt(pending, wanted, lowered)

    def _forbid_refusal(self, progress: Progress) -> None:
        """Raise CallOrderError for an optimizer that was refused, and not stepped; that of a guard comes later."""
        iteration = self._iteration
        if not (iteration.parts.is_guard and iteration.progresses.are_over()):
            wrong_order(
                f"{PROGRAM_CALLS[progress.refused]} was called for an optimizer that was neither unscaled nor stepped: "
                "call step() of the same object, which then makes no step, or end the iteration with "
                "update(get_scale())",
                iteration.number,
            )

    def _forbid(self) -> NoReturn:
        """Raise CallOrderError for an update before which nothing was unscaled or stepped."""
        iteration = self._iteration
        if any(progress.is_incomplete for progress in iteration.progresses.all):
            wrong_order(INCOMPLETE, iteration.number)
        never = iteration.current.never_scales
        if iteration.scaling.has_scaled or never:
            since = "in this iteration" if never else "since scale(): gradients are still multiplied by the scale"
            wrong_order(
                f"no optimizer was unscaled or stepped by the scaler {since}; call scaler.step(optimizer) in place of "
                f"optimizer.step(), and before update()",
                iteration.number,
            )
        what = "update() was called, and nothing was scaled or unscaled since the last update()"
        wrong_order(what, iteration.number)

    def _report(
        self, pending: Sequence[PendingVerdict], verdicts: Sequence[Verdict], wanted: float | None
    ) -> Callable[[], UpdateReport]:
        """Return a function that makes the report of the update once the state is adapted."""
        iteration = self._iteration
        current, number, steps = iteration.current, iteration.number, [step for step, _ in iteration.steps]
        # Somebody wants them since a step whose verdict was to be read later.
        with iteration.agreement.failing():
            steps += [step_report(one.read(), number, one.rank) for one in pending if one.reading.is_late]
        scales = [step.scale for step in steps] + [verdict.scale for verdict in verdicts]
        # Without a verdict it has to be read; a closure's may be of a lower one than the update starts from.
        before = current.scale() if not scales or any(step.retries for step in steps) else scales[0]
        skipped = any(step.skipped for step in steps) or any(verdict.reason for verdict in verdicts)

        def report() -> UpdateReport:
            after = current.scale() if wanted is None else wanted
            rank, counts = iteration.agreement.rank(), {**iteration.parts.tally.counts}
            return UpdateReport(number, before, skipped, rank, tuple(steps), after, counts)

        return report

    def _note_end(self, pending: PendingVerdict, verdict: Verdict, *, is_set: bool) -> None:
        """Note whether a verdict ends the run, or is an overflow at the lowest scale, if the update starts from it."""
        iteration = self._iteration
        state = None if is_set else iteration.scaling.state or iteration.current.state
        self.gives_up |= verdict.gives_up and verdict.reason in (Reason.SPIKE, Reason.OVERFLOW)
        # A closure may have tried the lowest scale, and the update does not.
        if verdict.at_min_scale and verdict.nonfinite and pending.state is state:
            self.underflow = ScaleUnderflowError(
                f"gradients overflow although the scale is at its minimum, {verdict.scale!r}: the cause is not the "
                f"scale. Look for inf or NaN in the unscaled loss, the data or the weights, which "
                f"diagnose(optimizer, loss=loss, state=True) searches; lower the learning rate, or allow a smaller "
                f'min_scale; at_min="clamp" skips such steps instead. Got {short_repr(iteration.current.policy)}'
            )

    def _learn(self, guard: Guard) -> None:
        """Let the windows of optimizers learn from their steps, but not from those that the user has made."""
        for progress in self._iteration.progresses.all:
            pending, observation = progress.pending, progress.observation
            if progress.stage.is_over and observation is not None and pending is not None:
                guard.learn(observation, pending.reason(), self._iteration.current.state_adapter.write_into)

    def _hold(self) -> None:
        """Save the arrays of ``hold`` if no step was skipped, else restore them, by flags of a device if need be."""
        begun = [each for each in self._iteration.progresses.all if not each.stage.is_ready]
        all_stepped, skips = all(each.has_stepped for each in begun), _late_skips(begun)
        for snapshot in self._iteration.parts.snapshots if begun else ():
            if all_stepped and skips and not snapshot.takes_flags:
                # The host writes what it holds.
                all_stepped, skips = not self._any(skips), []
            if all_stepped and not skips:
                snapshot.save()
            else:
                snapshot.restore(skips if all_stepped else ())

    def _any(self, flags: Sequence[Array]) -> bool:
        """Read whether any of some flags is not 0."""
        current = self._iteration.current
        xp = current.xp
        return any(current.state_adapter.read(xp.astype(xp.reshape(one != 0, (1,)), xp.int32))[0] for one in flags)

    def _adapt(self, pending: Sequence[PendingVerdict], wanted: float | None, lowered: ScaleState | None) -> None:
        """Adapt the state to the counts of the verdicts, also in another try after an interrupt; or set another one."""
        iteration, current = self._iteration, self._iteration.current
        if wanted is not None:
            current.set_scale(wanted)
            return
        if lowered is not None:
            current.set_state(lowered)
            return
        counts: list[Array | int] = []
        flags: list[Array | bool] = []
        for one in pending:
            if (count := one.count()) is not None:
                counts.append(count)
                # On a device a step may be neither clean nor an overflow without the CPU's knowledge.
                if one.reading.is_late and not current.is_static and (flag := one.keeps_scale()) is not False:
                    flags.append(flag)
        if iteration.reports.under_way:
            iteration.messages.read_late()
        if counts:
            if iteration.before_update is None:
                iteration.before_update = current.saved()
            else:
                current.restore(iteration.before_update)
            current.advance(counts, flags if len(flags) == len(counts) else (), iteration.before_update)

    def next_iteration(self) -> tuple[Iteration, list[tuple[StepReport, int | None]]]:
        """Return the iteration that follows, and the reports of this one's steps with the positions of streaks."""
        ended, parts = self._iteration, self._iteration.parts
        steps, reports = 0, [*ended.steps]
        for progress in ended.progresses.all:
            stage = progress.stage
            steps += stage.is_counted
            if progress.pending is not None and progress.pending.groups:
                self.is_alone = False
            if stage is Stage.LEFT_OUT and progress.verdict is not None:
                optimizer = progress.optimizer
                position = None if optimizer is None else parts.tally.position_of(optimizer)
                reports.append((step_report(progress.verdict, ended.number, parts.agreement.rank), position))
        alone = ended.alone_before + (steps if self.is_alone and not ended.agreement.standing.groups else 0)
        following = Iteration(ended.number + 1, parts, ended.messages.steps + steps, alone)
        if parts.is_guard and ended.progresses.are_over():
            _go_on(following, ended)
        return following, reports


def _go_on(iteration: Iteration, ended: Iteration) -> None:
    """Go on with the losses of the iteration before, for other optimizers, and with refusals of steps to come."""
    counts = ended.judge.micro_batches
    if ended.judge.losses.number or counts.kept or counts.dropped:
        stepped = ended.progresses.stepped_ids()
        iteration.judge.losses = ended.judge.losses.of_others(stepped)
        iteration.judge.micro_batches = counts._replace(stepped=counts.stepped | stepped)
    for progress in ended.progresses.all:
        optimizer = progress.optimizer if progress.stage.is_ready else None
        if optimizer is not None:
            iteration.progresses.of(id(optimizer), optimizer).refused = progress.refused


def iteration_after_load(ended: Iteration, number: int, steps: int) -> Iteration:
    """Return the iteration after a load, once agreements under way are finished; ``steps``: as saved.

    Gradients that nobody has unscaled yet can still be, by the state that they were scaled with. The steps before do
    not count: ranks that load one checkpoint may have had other numbers of them.
    """
    state, current = ended.scaling.state, ended.current
    if ended.agreement.standing.failure is None:
        # Other ranks may have seen a difference already, or never come.
        with contextlib.suppress(*OF_ALL_RANKS):
            ended.read_verdicts()
    following = Iteration(number, ended.parts, steps)
    if not ended.is_at_boundary:
        current.mark_unused(has_leftovers=not current.is_one(state or current.state))
    elif state is not None:
        # The load may write to the arrays of the state.
        following.scaling.state = copied(state)
        following.scaling.has_scaled, following.judge.losses = ended.scaling.has_scaled, ended.judge.losses
    return following


def _late_skips(begun: Sequence[Progress]) -> list[Array]:
    """Return whether steps are skipped whose verdict the host has not read, each 0-d."""
    late = [each.pending.skips() for each in begun if each.verdict is None and each.pending is not None]
    return [one for one in late if not isinstance(one, bool)]
