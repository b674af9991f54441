"""OverflowReport, of the ParameterReports of all ranks, and RankReport, of those of one: plain values and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from gradscale.core import validation
from gradscale.errors import one_line

Cause = Literal["none", "scale", "model", "underflow", "no gradients", "weights", "optimizer state"]
_LONGEST_NAME = 48
TABLE_ROWS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterReport:
    """One parameter's gradient on one rank; or its weight, or an array of the optimizer's state.

    Attributes
    ----------
    name : str
        The parameter's name.
    rank : tuple of int
        Rank in each group that was gathered over; empty without one.
    index : int
        Position among the optimizer's parameters, from 0.
    shape : tuple of int
        Shape of the array on this rank; empty if the gradient is missing.
    dtype : str
        Dtype of the array, such as "float16"; empty if the gradient is missing.
    size : int
        How many elements were looked at.
    inf, nan, zeros, subnormals : int
        How many of its elements are. A complex element counts once: as NaN, else inf, else subnormal if one of its
        parts is, and as zero if both are.
    largest : float or None
        Largest finite magnitude, of a real or imaginary part, divided by the scale if the gradient is still scaled;
        None if no element is finite.
    missing : bool
        Whether there is no gradient: ``None``, or one without values.
    kind : {"gradient", "weight", "state"}
        Which of the parameter's arrays it is.
    key : str
        Of the optimizer's state: which array of the parameter's, such as "exp_avg". If ``name`` is "state", the array
        is ``state`` with this key behind it, such as "['momentum'][0]".

    Examples
    --------
    >>> import gradscale
    >>> report = gradscale.ParameterReport("head", shape=(2, 2), dtype="float16", size=4, inf=1, zeros=2, largest=8.0)
    >>> (report.nonfinite, report.zero_fraction, report.largest)
    (1, 0.5, 8.0)
    """

    name: str
    rank: tuple[int, ...] = ()
    index: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    size: int = 0
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormals: int = 0
    largest: float | None = None
    missing: bool = False
    kind: Literal["gradient", "weight", "state"] = "gradient"
    key: str = ""

    @property
    def place(self) -> str:
        """The array as a person would say it: "weight", "exp_avg of weight", "state['momentum'][0]"; on one line."""
        return one_line(f"{self.name}{self.key}" if self.key[:1] in ("", "[", ".") else f"{self.key} of {self.name}")

    @property
    def nonfinite(self) -> int:
        """How many elements are inf or NaN."""
        return self.inf + self.nan

    @property
    def zero_fraction(self) -> float:
        """Fraction of elements that are zero; 0 of an empty gradient."""
        return self.zeros / max(self.size, 1)

    @property
    def subnormal_fraction(self) -> float:
        """Fraction of elements that are subnormal in the gradient's own dtype; 0 of an empty gradient."""
        return self.subnormals / max(self.size, 1)

    @property
    def badness(self) -> tuple[bool, int, bool, float, float, int, tuple[int, ...]]:
        """The sort key of reports: weights before state, inf and NaN first, then underflow, then the largest values."""
        return (
            self.kind == "state",
            -self.nonfinite,
            self.missing,
            -self.subnormal_fraction,
            -(self.largest or 0.0),
            self.index,
            self.rank,
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain Python values that JSON can hold: every float is finite."""
        names = ["name", "kind", "key", "dtype", "size", "inf", "nan", "largest"]
        names += ["zero_fraction", "subnormal_fraction", "missing"]
        return {name: getattr(self, name) for name in names} | {"rank": list(self.rank), "shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, slots=True)
class OverflowReport:
    """The inf, NaN, zeros and subnormals of an optimizer's gradients; ``print(report)`` shows a table, the worst first.

    Attributes
    ----------
    entries : tuple of ParameterReport
        One for each parameter and rank, the worst first.
    scale : float
        The scale that the gradients are scaled with, or were divided by.
    iteration : int
        The scaler's iteration that they belong to.
    cause : {"none", "scale", "model", "underflow", "no gradients", "weights", "optimizer state"}
        Nothing is wrong; the scale is too high; the model makes inf or NaN at any scale; nothing overflows, and many
        values are too small for the dtype; no parameter has a gradient; the weights hold inf or NaN already, whatever
        else is wrong; the optimizer's state does.
    explanation : str
        The cause in a sentence, and what to do.
    omitted_nonfinite, omitted_finite : int
        How many parameters of all ranks are not listed: of each rank of a large group only the worst are gathered.
    loss_nonfinite : int or None
        How many arrays of the unscaled loss, on all ranks, are not finite; None if it is not known.
    broken : tuple of ParameterReport, or None
        The weights that hold inf or NaN, the worst first, and then such arrays of the optimizer's state; None if they
        were not searched.
    omitted_broken : int
        How many of these are not listed.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> class SGD:
    ...     def step(self): ...
    >>> optimizer, scaler = SGD(), gradscale.GradScaler()
    >>> optimizer.grads = {"head": scaler.scale(np.float32([1.0, np.inf]))}
    >>> report = scaler.diagnose(optimizer)
    >>> (report.cause, [(entry.name, entry.inf) for entry in report.nonfinite])
    ('scale', [("['head']", 1)])
    """

    entries: tuple[ParameterReport, ...]
    scale: float
    iteration: int
    cause: Cause
    explanation: str
    omitted_nonfinite: int = 0
    omitted_finite: int = 0
    loss_nonfinite: int | None = None
    broken: tuple[ParameterReport, ...] | None = None
    omitted_broken: int = 0

    def worst(self, limit: int) -> OverflowReport:
        """Return the report with at most so many entries, among them the largest, and as many broken arrays."""
        entries, largest = self.entries[:limit], max(self.entries, key=lambda one: one.largest or 0.0, default=None)
        if entries and largest is not None and largest not in entries:
            # The magnitude of the step in logs and plots.
            entries = (*entries[:-1], largest)
        return self.of_some(entries, limit)

    def of_some(self, entries: tuple[ParameterReport, ...], limit: int) -> OverflowReport:
        """Return the report of some of its entries, and at most so many broken arrays; it counts what it leaves out."""
        bad, bad_kept = (sum(entry.nonfinite > 0 for entry in each) for each in (self.entries, entries))
        broken = self.broken or ()
        return dataclasses.replace(
            self,
            entries=entries,
            broken=self.broken and broken[:limit],
            omitted_nonfinite=self.omitted_nonfinite + bad - bad_kept,
            omitted_finite=self.omitted_finite + len(self.entries) - bad - (len(entries) - bad_kept),
            omitted_broken=self.omitted_broken + len(broken[limit:]),
        )

    @property
    def nonfinite(self) -> tuple[ParameterReport, ...]:
        """The entries with inf or NaN, the worst first."""
        return tuple(entry for entry in self.entries if entry.nonfinite)

    def __str__(self) -> str:
        return self.table()

    def table(self, limit: int = TABLE_ROWS) -> str:
        """Return the report as text of at most ``limit`` rows; InvalidTypeError, InvalidValueError for a bad limit."""
        limit = validation.integer("limit", limit, 0, validation.LARGEST_INT32)
        shown = self.of_some(self.entries[:limit], limit)
        bad = len(self.nonfinite) + self.omitted_nonfinite
        total = len(self.entries) + self.omitted_nonfinite + self.omitted_finite
        lines = [
            f"{bad} of {total} gradients with inf or NaN, iteration {self.iteration}"
            + f", scale {self.scale:g}" * (self.scale != 1.0),
            f"cause: {self.cause}. {self.explanation}",
        ]
        if self.broken:
            lines += ["", "weights and optimizer state with inf or NaN", *_table(shown.broken or ())]
            lines += [f"... and {shown.omitted_broken} more"] * (shown.omitted_broken > 0)
        if shown.entries:
            lines += ["", *_table(shown.entries)]
        more_bad, more_finite = shown.omitted_nonfinite, shown.omitted_finite
        more = [f"{more_bad} more with inf or NaN"] * (more_bad > 0)
        more += [f"{more_finite} more finite parameter{'s' * (more_finite != 1)}"] * (more_finite > 0)
        return "\n".join([*lines, f"... and {' and '.join(more)}"] if more else lines)

    def to_dict(self) -> dict[str, object]:
        """Return plain Python values that JSON can hold, for logs: every float is finite."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        broken = None if self.broken is None else [entry.to_dict() for entry in self.broken]
        return fields | {"entries": [entry.to_dict() for entry in self.entries], "broken": broken}


@dataclasses.dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's own report, as it is sent to the others."""

    report: OverflowReport
    """Of this rank alone, without the cause; an empty one with a ``failure``."""
    rank: tuple[int, ...] = ()
    """In each group that is gathered over."""
    is_scaled: bool = False
    """Whether the gradients still are."""
    failure: str = ""
    """Why this rank could not look at its arrays."""


def rank_text(rank: Sequence[int]) -> str:
    """Return a rank as text: the numbers in each group that was gathered over."""
    return "/".join(map(str, rank))


def _table(entries: Sequence[ParameterReport]) -> list[str]:
    """Return a table's lines, words to the left and numbers to the right; with ranks only if there are any."""
    header = ["parameter", "rank", "shape", "dtype", "inf", "nan", "largest", "zeros", "subnormal"]
    columns = [*zip(header, *map(_cells, entries), strict=True)]
    columns = columns if any(columns[1][1:]) else [columns[0], *columns[2:]]
    sides = "<" * (len(columns) - 5) + ">" * 5
    formats = [f"{side}{max(map(len, column))}" for side, column in zip(sides, columns, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in zip(*columns, strict=True)]


def _cells(entry: ParameterReport) -> list[str]:
    # The end of a long name tells more than its beginning.
    name = entry.place if len(entry.place) <= _LONGEST_NAME else f"...{entry.place[3 - _LONGEST_NAME :]}"
    if entry.missing:
        return [name, rank_text(entry.rank), "no gradient", *[""] * 6]
    largest = "none" if entry.largest is None else f"{entry.largest:.3g}"
    shares = [f"{100 * share:.1f} %" for share in (entry.zero_fraction, entry.subnormal_fraction)]
    shape = "x".join(map(str, entry.shape)) or "0-d"
    return [name, rank_text(entry.rank), shape, entry.dtype, str(entry.inf), str(entry.nan), largest, *shares]
