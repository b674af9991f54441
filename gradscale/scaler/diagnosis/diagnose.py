"""Diagnosis: reports on an optimizer's gradients, and changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

from array_api_compat import array_namespace

from gradscale.core import validation
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.errors import GradscaleError
from gradscale.scaler.agreement import exchange_over
from gradscale.scaler.claim import Purpose
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.diagnosis.cause import join
from gradscale.scaler.diagnosis.gather import gather as gather_reports
from gradscale.scaler.diagnosis.look import DiagnosisOptions, Look
from gradscale.scaler.diagnosis.report import OverflowReport, RankReport
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.progress import Progress

# After so many overflows in a row the weights and the optimizer's state are searched, too.
_SUSPICIOUS = 3
_NOTHING = OverflowReport((), 1.0, 0, "none", "")


class Diagnosis:
    """Makes the reports of ``diagnose``, and of a scaler with ``diagnose="on_overflow"`` in its steps."""

    def __init__(self, parts: Collaborators, *, enabled: bool) -> None:
        self._current, self._agreement, self._reports = parts.current, parts.agreement, parts.reports
        self._adapter, self._tally, self._enabled = parts.current.adapter, parts.tally, enabled
        self.look = Look(parts.current)

    def of_overflow(self, optimizer: Optimizer, iteration: Iteration) -> OverflowReport:
        """Return the report on a step that is skipped now; from the third in a row on with weights and state."""
        before = self._tally.streak_of(optimizer).reasons.get("overflow", 0)
        options = DiagnosisOptions(state=before + 1 >= _SUSPICIOUS, is_by_itself=True)
        return self.diagnose(optimizer, iteration, options, gather=True)

    def of_stall(self, optimizer: Optimizer, iteration: Iteration, ranks: Collection[int]) -> str:
        """Return the cause that this rank sees, or which ranks see it; empty if its arrays cannot be looked at."""
        progress = _progress_of(optimizer, iteration)
        options = DiagnosisOptions(loss=progress.verdict and progress.verdict.loss, state=True, is_by_itself=True)
        try:
            report = self.diagnose(optimizer, iteration, options, gather=False)
        except GradscaleError:
            return ""
        if report.cause in ("none", "underflow", "no gradients") and not self._agreement.is_alone:
            logs = f"log of rank {', '.join(map(str, sorted(ranks)))}" if ranks else "logs of the other ranks"
            return f"No gradient of this rank is inf or NaN: the {logs} may have the cause"
        text = f"Cause: {report.cause}. {report.explanation.rstrip('.')}"
        if report.cause in ("scale", "model") and not report.loss_nonfinite:
            text += f". {'If the' if report.loss_nonfinite is None else 'The'} loss is finite: see whether gradients "
            text += "are zeroed after a skipped step, too, which keep NaN"
        return text

    def diagnose(
        self, optimizer: Optimizer, iteration: Iteration, options: DiagnosisOptions, *, gather: bool
    ) -> OverflowReport:
        """Return the report on an optimizer's gradients, as :meth:`gradscale.GradScaler.diagnose` does."""
        if optimizer in self._reports:
            # Its verdict may not have been read yet.
            self._reports.last(optimizer)
        groups = self._groups_of(optimizer, iteration) if gather and self._enabled else ()
        failure: Exception | None = None
        try:
            own = self._rank_report(optimizer, iteration, options)
        except Exception as error:
            # Any error, also one of the library or of a user's iterator: the other ranks wait for this one.
            failure, own = error, RankReport(_NOTHING, failure=f"{type(error).__name__}: {error}")
        ranks = self._gathered(own, optimizer, iteration, groups) if groups else [own]
        if failure is not None:
            raise failure
        is_scaled = any(one.is_scaled for one in ranks)
        return join([one.report for one in ranks], self._smallest_scale(), is_scaled=is_scaled)

    def _groups_of(self, optimizer: Optimizer, iteration: Iteration) -> Sequence[Collectives]:
        """Return the groups to gather over, once an agreement over several of them is finished."""
        progress = _progress_of(optimizer, iteration)
        pending = progress.pending
        groups = (pending and pending.groups) or iteration.messages.groups_for(optimizer)
        if len(groups) > 1 and pending is not None and pending.is_begun:
            # A rank that has not called scale() has sent all of this message in unscale_, before the diagnosis.
            iteration.verdict(progress)
        return groups

    def _gathered(
        self, own: RankReport, optimizer: Optimizer, iteration: Iteration, groups: Sequence[Collectives]
    ) -> list[RankReport]:
        """Return the reports of all ranks."""
        exchanges = []
        for index, group in enumerate(groups):
            claim = functools.partial(iteration.messages.next_claim, [group], optimizer, None, Purpose.DIAGNOSIS, index)
            exchanges.append(exchange_over(self._agreement, self._current, group, claim))
        return gather_reports(own, exchanges, self._like_any(optimizer, iteration))

    def _smallest_scale(self) -> float | None:
        """Return the smallest scale that the policy allows; None if it is always 1."""
        current = self._current
        return None if current.never_scales or not self._enabled else current.policy.clamp(validation.SMALLEST_NORMAL)

    def _rank_report(self, optimizer: Optimizer, iteration: Iteration, options: DiagnosisOptions) -> RankReport:
        """Return the report on this rank's arrays: one host read."""
        rows, is_searched = self.look.rows_of(optimizer, options)
        progress = _progress_of(optimizer, iteration)
        is_ready, is_begun = progress.stage.is_ready, self._enabled and iteration.scaling.has_scaled
        is_scaled = (is_ready and is_begun) or self._was_left_scaled(optimizer, progress)
        # Whether the gradients are those of an earlier iteration, or no scaler's.
        is_over = is_ready and not is_begun
        scale, number = self._scale_of(optimizer, iteration, progress, is_over=is_over)
        counts, lost = list(iteration.scaling.loss_nonfinite), 0 if iteration.scaling.loss_nonfinite else None
        if options.loss is not None or is_over:
            counts, lost = self.look.counts_of_loss(options.loss)
        others = [array_namespace(count).reshape(count, (1,)) for count in counts]
        if not isinstance(scale, float):
            others.append(self._current.backend_for(scale.scale).fingerprint(scale))
        summaries, numbers = self.look.read(rows, others)
        if not isinstance(scale, float):
            scale = validation.float32_from_bits(numbers.pop()[0])
        entries, broken = self.look.reports(rows, summaries, scale if is_scaled else 1.0)
        loss_nonfinite = None if lost is None else lost + sum(map(sum, numbers))
        searched = broken if is_searched else None
        report = OverflowReport(entries, scale, number, "none", "", 0, 0, loss_nonfinite, searched)
        return RankReport(report, is_scaled=is_scaled)

    def _was_left_scaled(self, optimizer: Optimizer, progress: Progress) -> bool:
        """Tell whether gradients were left to an optimizer to unscale, which it does only where it steps."""
        pending = progress.pending
        if progress.stage.is_unscaled:
            return pending is not None and pending.findings.is_scaled
        if not self._adapter.was_left_scaled(optimizer):
            return False
        verdict = pending and pending.verdict
        return verdict.reason > 0 if verdict else self._reports.last(optimizer).skipped

    def _scale_of(
        self, optimizer: Optimizer, iteration: Iteration, progress: Progress, *, is_over: bool
    ) -> tuple[float | ScaleState, int]:
        """Return the scale of an optimizer's gradients, or the state to read it from, and their iteration."""
        number = iteration.number
        if not self._enabled:
            return 1.0, number
        if is_over and optimizer in self._reports:
            report = self._reports.last(optimizer)
            return report.scale, report.iteration
        if progress.pending is not None and progress.pending.verdict is not None:
            return progress.pending.verdict.scale, number
        if self._current.state is None and iteration.scaling.state is None:
            return self._current.scale(), number
        state = iteration.scaling.in_force(self._current.example)
        scale = self._current.state_adapter.peek(state[:1])
        return (state if scale is None else scale[0]), number

    def _like_any(self, optimizer: Optimizer, iteration: Iteration) -> Array:
        """Return an array of the library that this rank agrees in."""
        if self._current.state is not None:
            return self._current.state.scale
        # If looking at the gradients raises the same error as before, diagnose raises it once all ranks know.
        like = iteration.messages.example(optimizer)
        return self._agreement.example(self._current, iteration.number) if like is None else like


def _progress_of(optimizer: Optimizer, iteration: Iteration) -> Progress:
    """Return an optimizer's progress, which diagnosing it does not begin."""
    return iteration.progresses.get(id(optimizer)) or Progress()
