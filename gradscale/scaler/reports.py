"""StepReport and UpdateReport; Reports: the last ones, the history and the callbacks; Tally: how many were skipped."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from gradscale.core import validation
from gradscale.core.identity import IdentityMap
from gradscale.errors import CallOrderError
from gradscale.scaler.claim import KEEPS_SCALE, Reason, Verdict
from gradscale.scaler.diagnosis.report import TABLE_ROWS, OverflowReport
from gradscale.scaler.inputs import Batch
from gradscale.scaler.verdict import PendingVerdict, Reading


class StepReport(NamedTuple):
    """One optimizer's step in one iteration, as plain Python values.

    Attributes
    ----------
    skipped : bool
        Whether the step was skipped; an optimizer that skips by itself was called all the same.
    scale : float
        The scale that the gradients were divided by.
    nonfinite : int
        How many gradient arrays held an inf or NaN; over a group, the largest number on any rank. 1 if only the norm
        of finite ones overflowed. Kernels that judge many arrays at once on a device report 1 for any number.
    reason : {"stepped", "overflow", "spike", "refused", "no gradients", "disabled"}
        Why: all gradients were finite; some were not; the loss or the norm was a spike; the user refused the step;
        there was no gradient, which is an error; the scaler is disabled and checked nothing.
    iteration : int
        The scaler's iteration, from 1; ``update`` begins the next.
    retries : int
        How often a closure was evaluated again at a lower scale.
    local_nonfinite : int
        How many gradient arrays of this rank held an inf or NaN; 0 if only other ranks saw the overflow.
    overflow : OverflowReport or None
        Which parameters overflowed on which rank, for a skipped step of a scaler with ``diagnose="on_overflow"``.
    by : int or None
        The lowest rank with this reason, for a skipped step, or that saw a spike, for one that is made by a rule with
        ``act=False``: of those whose own loss was not finite, if there is one,
        else of those whose loss was a spike. None for an overflow that ranks have counted on devices.
    norm : float or None
        The 2-norm of this rank's gradients before they were clipped, if ``max_norm`` was given, or with
        ``norm_over="group"`` of all ranks', or what ``step(norm=)`` was given; inf if it is not finite. Of a closure,
        that of its last evaluation.
    batch : int, str, tuple of these, or None
        What ``step(batch=)`` was given.
    by_loss : bool
        Whether the own loss of rank ``by`` was not finite, or a spike, so that it is that rank's batch which is bad:
        an average gives gradients of NaN to all ranks.
    loss : float or None
        The loss of this rank that was judged, float32; None if the host does not know it without another read.
    rank : int or None
        This rank, if the step is skipped and it has seen the cause itself: with ``by_loss`` a bad loss of its own.

    Examples
    --------
    >>> import gradscale
    >>> report = gradscale.StepReport(skipped=True, scale=65536.0, nonfinite=2, reason="overflow", iteration=7)
    >>> if report.skipped:
    ...     print(f"iteration {report.iteration} overflowed at scale {report.scale:g}")
    iteration 7 overflowed at scale 65536
    """

    skipped: bool
    scale: float
    nonfinite: int
    reason: Literal["stepped", "overflow", "spike", "refused", "no gradients", "disabled"]
    iteration: int
    retries: int = 0
    local_nonfinite: int = 0
    overflow: OverflowReport | None = None
    by: int | None = None
    norm: float | None = None
    batch: Batch = None
    by_loss: bool = False
    loss: float | None = None
    rank: int | None = None


class UpdateReport(NamedTuple):
    """One iteration, as plain Python values; ``on_update`` is called with it.

    Attributes
    ----------
    iteration : int
        The iteration that this update ended, from 1.
    scale : float
        The scale that its gradients were divided by; of a closure that was evaluated again, at first.
    skipped : bool
        Whether any optimizer's step was skipped, on all ranks: also if the loop left out the step itself.
    rank : int
        This process's rank; 0 without a group.
    steps : tuple of StepReport
        One for each optimizer that was stepped, in order.
    new_scale : float or None
        The scale after the update. A scaler always fills it in, by one more host read if the state is on a device.
    counts : mapping or None
        How many steps were taken or skipped so far, as ``scaler.counts()`` returns them.

    Examples
    --------
    >>> import gradscale
    >>> report = gradscale.UpdateReport(7, scale=65536.0, skipped=True, rank=0, steps=(), new_scale=32768.0)
    >>> print(f"iteration {report.iteration}: {report.scale:g} -> {report.new_scale:g}")  # in an on_update callback
    iteration 7: 65536 -> 32768
    """

    iteration: int
    scale: float
    skipped: bool
    rank: int
    steps: tuple[StepReport, ...]
    new_scale: float | None = None
    counts: Mapping[str, int] | None = None


Diagnose: TypeAlias = Literal["on_overflow"]
OnSkip: TypeAlias = Callable[[StepReport], object] | Sequence[Callable[[StepReport], object]]
OnUpdate: TypeAlias = Callable[[UpdateReport], object] | Sequence[Callable[[UpdateReport], object]]


class Words(NamedTuple):
    """The words for a reason in reports, counts, warnings and logs."""

    name: Literal["overflow", "spike", "refused", "no gradients"]
    cause: str = ""
    """In a warning of a stall, after the number of steps skipped for it; empty if these count in no streak."""
    deed: str = ""
    """In a log, after the rank that has it."""


# The gravest first, which is the reason of a row in a log. The other reasons are errors, which have no report.
REASONS: dict[Reason, Words] = {
    Reason.NO_GRADIENTS: Words("no gradients"),
    Reason.OVERFLOW: Words("overflow", "non-finite gradients (inf or NaN)"),
    Reason.REFUSED: Words("refused", deed="refused it"),
    Reason.SPIKE: Words("spike", "a spike", "saw a spike"),
}
KEEPS_SCALE_NAMES = [REASONS[reason].name for reason in KEEPS_SCALE]
"""The reasons of steps that move no scale."""
COUNTED = ("taken", REASONS[Reason.OVERFLOW].name, *KEEPS_SCALE_NAMES)
"""What steps are counted by."""


_Report = TypeVar("_Report")
Callbacks: TypeAlias = tuple[Callable[[_Report], object], ...]


class Deferred(NamedTuple):
    """A step whose verdict the CPU has not read yet."""

    pending: PendingVerdict
    iteration: int
    position: int
    """Of the optimizer's streak."""
    batch: Batch = None

    def report(self) -> StepReport:
        """Read the verdict, and return the report of the step."""
        return step_report(self.pending.read(), self.iteration, self.pending.rank, batch=self.batch)


class Reports:
    """The reports of a scaler's steps; a late verdict is read when somebody asks for its report."""

    def __init__(self, options: Mapping[str, object]) -> None:
        # What a pickle keeps: no callbacks.
        self._kept = {name: options[name] for name in ("diagnose", "give_up_after", "history_size")}
        self.diagnoses = self._kept["diagnose"] is not None
        if self.diagnoses:
            validation.choice("diagnose", self._kept["diagnose"], ("on_overflow", None))
        self.on_skip: Callbacks[StepReport] = callbacks_of("on_skip", options.get("on_skip"))
        self.on_update: Callbacks[UpdateReport] = callbacks_of("on_update", options.get("on_update"))
        size = validation.integer("history_size", self._kept["history_size"], 0, validation.LARGEST_INT32)
        self._last: IdentityMap[StepReport | Deferred] = IdentityMap()
        self._history: collections.deque[StepReport | Deferred] = collections.deque(maxlen=size)
        # Steps whose verdicts are on their way to the CPU.
        self.under_way: collections.deque[Deferred] = collections.deque()

    @property
    def wants_each_step(self) -> bool:
        """Whether the verdict of each step is read within that step."""
        return bool(self.on_skip or self.on_update) or self.diagnoses or self._kept["give_up_after"] is not None

    @property
    def history(self) -> list[StepReport]:
        """The last reports of all optimizers, oldest first. Deferred verdicts are read now."""
        reports = [entry.report() if isinstance(entry, Deferred) else entry for entry in self._history]
        self._history.clear()
        self._history.extend(reports)
        return reports

    def __contains__(self, optimizer: object) -> bool:
        return id(optimizer) in self._last

    def last(self, optimizer: object, call: str = "last_step()") -> StepReport:
        """Return the report of an optimizer's last step; a deferred verdict is read now."""
        last = self._last.get(id(optimizer))
        if last is None:
            msg = f"call {call} after a step() of this optimizer, got one of type {type(optimizer).__name__}"
            if getattr(optimizer, "optimizer", None) in self:
                msg += ", around one that was stepped: pass its attribute .optimizer"
            raise CallOrderError(msg)
        if isinstance(last, StepReport):
            return last
        report = last.report()
        if last.pending.reading is not Reading.REPLAYED:
            # That of a captured graph is read each time: a replay may have overwritten it.
            self._last.set(optimizer, report)
        return report

    def record(self, optimizer: object, report: StepReport, rank: Callable[[], int] | None = None) -> None:
        """Keep the report of a step; if it was skipped, call ``on_skip``, unless ``rank`` is None."""
        self._last.set(optimizer, report)
        if report.reason in ("disabled", "no gradients"):
            return
        # Whole tables of a large model would be hundreds of MiB.
        overflow = report.overflow and report.overflow.worst(TABLE_ROWS)
        self._history.append(report if overflow is None else report._replace(overflow=overflow))
        if report.skipped and self.on_skip and rank is not None:
            _call(self.on_skip, report, rank())

    def record_later(self, optimizer: object, entry: Deferred) -> None:
        """Keep a step whose verdict the CPU has not read; the history leaves out those of captured graphs."""
        self._last.set(optimizer, entry)
        if entry.pending.reading is not Reading.REPLAYED:
            self.under_way.append(entry)
            self._history.append(entry)

    def poll(self, *, waits: bool = False) -> Iterator[Deferred]:
        """Yield the steps whose deferred verdicts have arrived since the last call, in order; all if it ``waits``."""
        while self.under_way and (waits or self.under_way[0].pending.has_arrived()):
            yield self.under_way.popleft()

    def tell_update(self, report: UpdateReport) -> None:
        """Call ``on_update`` with the report of an iteration."""
        _call(self.on_update, report, report.rank)

    def __reduce__(self) -> tuple[type[Reports], tuple[dict[str, object]]]:
        """Pickle the settings: no reports, and no callbacks."""
        return type(self), (self._kept,)


def step_report(
    verdict: Verdict,
    iteration: int,
    rank: Callable[[], int],
    retries: int = 0,
    overflow: OverflowReport | None = None,
    batch: Batch = None,
) -> StepReport:
    """Return the report of a step by its verdict."""
    is_skipped = verdict.reason > 0
    return StepReport(
        is_skipped,
        verdict.scale,
        verdict.nonfinite if is_skipped else 0,
        REASONS[verdict.reason].name if is_skipped else "stepped",
        iteration,
        retries,
        verdict.local_nonfinite if is_skipped else 0,
        overflow,
        verdict.by,
        verdict.norm,
        batch,
        verdict.by_loss,
        verdict.loss,
        rank() if verdict.saw and is_skipped else None,
    )


def _call(callbacks: Sequence[Callable[[_Report], object]], report: _Report, rank: int) -> None:
    for callback in callbacks:
        if rank == 0 or getattr(callback, "every_rank", False):
            callback(report)


def callbacks_of(name: str, callbacks: object) -> Callbacks[Any]:
    """Return callbacks as a tuple; InvalidTypeError for anything else."""
    sequence = () if callbacks is None else (callbacks,) if callable(callbacks) else callbacks
    if (
        isinstance(sequence, (str, bytes))
        or not isinstance(sequence, Sequence)
        # The first report would make an object of a class.
        or not all(callable(one) and not isinstance(one, type) for one in sequence)
    ):
        expected = "a callable that takes a report, such as callbacks.JSONLines(path), or a sequence of these"
        raise validation.wrong_type(callbacks, name, expected)
    return tuple(sequence)
