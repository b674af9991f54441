"""ReportingScale: what a scaler tells of its steps: last_step, history, and the callbacks on_skip and on_update."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gradscale.core import validation
from gradscale.core.backend import Backend
from gradscale.core.protocols import Policy
from gradscale.core.vector import Packer, Verdict
from gradscale.errors import CallOrderError, InvalidTypeError
from gradscale.reports.steps import StepReport, UpdateReport
from gradscale.scaler.identity import IdentityMap
from gradscale.scaler.iteration import Iteration
from gradscale.scaler.stateful import StatefulScale

if TYPE_CHECKING:
    from gradscale.reports.overflow import OverflowReport

__all__ = ["Diagnose", "OnSkip", "OnUpdate", "ReportingScale", "step_report"]

Diagnose: TypeAlias = Literal["on_overflow"]
OnSkip: TypeAlias = Callable[[StepReport], object] | Sequence[Callable[[StepReport], object]]
OnUpdate: TypeAlias = Callable[[UpdateReport], object] | Sequence[Callable[[UpdateReport], object]]

HISTORY_SIZE = 1024


class ReportingScale(StatefulScale):
    """A policy and its state, with reports of the steps that were made or skipped.

    Parameters
    ----------
    policy, factors, enabled, backend
        As in :class:`StatefulScale`.
    on_skip : callable or sequence of callables, optional
        Called with the StepReport at the end of each skipped step.
    on_update : callable or sequence of callables, optional
        Called with an UpdateReport at the end of each update.
    diagnose : {"on_overflow"}, optional
        Find out for each skipped step which parameters overflowed.
    history_size : int, default 1024
        How many StepReports are kept.
    """

    def __init__(
        self,
        policy: Policy | None,
        factors: dict[str, Any],
        enabled: bool,
        backend: str | Backend | None,
        *,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
    ) -> None:
        super().__init__(policy, factors, enabled, backend)
        self.on_skip = on_skip
        self.on_update = on_update
        if diagnose is not None:
            validation.choice("diagnose", diagnose, ("on_overflow",))
        self._diagnoses = diagnose is not None
        self._packer = Packer(diagnoses=self._diagnoses)
        size = validation.integer("history_size", history_size, 0, validation.LARGEST_INT32)
        self._reports: IdentityMap[StepReport] = IdentityMap()
        # An adapter may put something in here that becomes a report when it is asked for.
        self._history: collections.deque[Any] = collections.deque(maxlen=size)

    @property
    def on_skip(self) -> OnSkip | None:
        """What is called with the StepReport of a skipped step, in ``step``; None for nothing.

        On rank 0 only, but for callables with a true attribute ``every_rank``, such as
        :func:`gradscale.callbacks.every_rank` gives.
        """
        return self._on_skip or None

    @on_skip.setter
    def on_skip(self, callbacks: OnSkip | None) -> None:
        self._on_skip = _as_tuple("on_skip", callbacks)

    @property
    def on_update(self) -> OnUpdate | None:
        """What is called with the UpdateReport of an iteration, in ``update``; None for nothing. As for ``on_skip``."""
        return self._on_update or None

    @on_update.setter
    def on_update(self, callbacks: OnUpdate | None) -> None:
        self._on_update = _as_tuple("on_update", callbacks)

    @property
    def history(self) -> list[StepReport]:
        """The reports of the last steps of all optimizers, oldest first; ``history_size`` of them at most.

        No host read beyond those that the steps made; steps that a fused optimizer has judged on a device are read
        now. Copies and pickles of a scaler begin with none.
        """
        return list(self._history)

    def last_step(self, optimizer: Any) -> StepReport:
        """Return what happened in the last ``step`` of an optimizer; no host read beyond the one that step made.

        Raises
        ------
        CallOrderError
            When it has not been stepped by this scaler.
        """
        if optimizer not in self._reports:
            msg = f"last_step() needs a step() of this optimizer first, got {optimizer!r}"
            raise CallOrderError(msg)
        return self._reports[optimizer]

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: settings and numbers, without arrays, callbacks and reports.

        Raises
        ------
        CallOrderError
            In the middle of an iteration.
        """
        kept = super().__getstate__()
        del kept["_reports"]
        packer = Packer(diagnoses=self._diagnoses)
        return kept | {"_packer": packer, "_on_skip": (), "_on_update": (), "_history": self._history.maxlen}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        super().__setstate__(kept)
        self._reports = IdentityMap()
        self._history = collections.deque(maxlen=kept["_history"])

    @property
    def _reports_at_once(self) -> bool:
        """Whether the host needs each step's report in that step."""
        return self._diagnoses or len(self._on_skip) + len(self._on_update) > 0

    def _record(self, optimizer: Any, report: StepReport) -> None:
        """Keep a step's report, and tell of it if the step was skipped."""
        self._reports[optimizer] = report
        self._history.append(report)
        self._iteration.reports.append(report)
        if report.skipped and self._on_skip:
            self._call(self._on_skip, report)

    def _tell_update(self, ended: Iteration, verdicts: Sequence[Verdict]) -> None:
        """Tell of an iteration that the update has ended, with the verdicts on what was unscaled in it."""
        steps = tuple(ended.reports)
        judged: list[StepReport | Verdict] = [*steps, *verdicts]
        # An iteration without gradients has not moved the scale.
        scale = judged[0].scale if judged else self._snapshot()["scale"]
        skipped = any(one.nonfinite > 0 for one in judged)
        self._call(self._on_update, UpdateReport(ended.number, scale, skipped, self._rank(), steps))

    def _call(self, callbacks: Sequence[Callable[[Any], object]], report: Any) -> None:
        is_first = self._rank() == 0
        for callback in callbacks:
            if is_first or getattr(callback, "every_rank", False):
                callback(report)

    def _rank(self) -> int:
        """Return this process's rank, for reports and callbacks."""
        return 0


def step_report(
    verdict: Verdict, iteration: int, retries: int = 0, overflow: OverflowReport | None = None
) -> StepReport:
    """Return the report of a step that was made, or skipped, as a verdict says."""
    return StepReport(
        skipped=verdict.nonfinite > 0,
        scale=verdict.scale,
        nonfinite=verdict.nonfinite,
        reason="overflow" if verdict.nonfinite else "stepped",
        iteration=iteration,
        retries=retries,
        local_nonfinite=verdict.local_nonfinite,
        overflow=overflow,
    )


def _as_tuple(name: str, callbacks: Any) -> tuple[Callable[[Any], object], ...]:
    listed = () if callbacks is None else (callbacks,) if callable(callbacks) else callbacks
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence) or not all(map(callable, listed)):
        msg = f"{name} must be a callable that takes a report, or a sequence of these, got {callbacks!r}"
        raise InvalidTypeError(msg)
    return tuple(listed)
