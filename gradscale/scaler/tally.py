"""Tally: how many steps were made and skipped, and since when every iteration is skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gradscale.core import validation
from gradscale.core.messages import warn_caller
from gradscale.errors import TrainingStalledError, TrainingStalledWarning
from gradscale.scaler.reports import REASONS, StepReport

_NAMES = ("taken", "overflow", "spike", "refused")
WARN_AFTER = 50


class Row(NamedTuple):
    """Iterations in a row whose every step was skipped."""

    length: int = 0
    iteration: int = 0
    reasons: Mapping[str, int] = {}
    """How many steps were skipped for each."""
    ranks: frozenset[int] = frozenset()
    first: float = 0.0
    """The scale of the first step, of the one before the last, and of the last."""
    previous: float = 0.0
    last: float = 0.0

    def plus(self, step: StepReport) -> Row:
        """Return the row with one more skipped step."""
        return Row(
            self.length + (step.iteration != self.iteration),
            step.iteration,
            {**self.reasons, step.reason: self.reasons.get(step.reason, 0) + 1},
            self.ranks if step.by is None else self.ranks | {step.by},
            self.first if self.length else step.scale,
            self.last,
            step.scale,
        )

    @property
    def is_falling(self) -> bool:
        """Whether the scale still falls, as a first one that is much too large may for long."""
        return 1.0 < self.last < self.previous

    @property
    def never_scales(self) -> bool:
        """Whether nothing was scaled, as the scale was always 1."""
        return self.first == self.last == 1.0

    def __str__(self) -> str:
        causes: dict[str, str] = {words.name: words.cause for words in REASONS.values()}
        reasons = ", ".join(f"{count} for {causes[name]}" for name, count in self.reasons.items())
        seen = f"first seen by rank {', '.join(map(str, sorted(self.ranks)))}; " if self.ranks else ""
        scales = "" if self.never_scales else f"the scale went from {self.first:g} to {self.last:g}, and "
        return (
            f"each step of the last {self.length} iterations was skipped: {reasons}; {seen}{scales}no weight has "
            f"changed since"
        )


def tell(sentences: Iterable[str], *, gives_up: bool) -> None:
    """Raise TrainingStalledError with some sentences, of which some may be empty, or warn."""
    msg = ". ".join(filter(None, sentences))
    if gives_up:
        raise TrainingStalledError(msg)
    warn_caller(msg, TrainingStalledWarning)


class Tally:
    """Counts the steps of a scaler, and the iterations in a row whose every step was skipped.

    A late verdict counts when the CPU has it, and those of a captured graph do not count.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        given = {"warn_after": WARN_AFTER, "give_up_after": None, **options}
        self._warn_after, self._give_up_after = (
            None if given[name] is None else validation.integer(name, given[name], 1, validation.LARGEST_INT32)
            for name in ("warn_after", "give_up_after")
        )
        self.restart({})

    def restart(self, counts: Mapping[str, int]) -> None:
        """Go on from saved counts."""
        self.counts = {name: counts.get(name, 0) for name in _NAMES}
        self.row, self._warn_at = Row(), self._warn_after

    def note(self, step: StepReport) -> None:
        """Count a step."""
        name = step.reason if step.skipped else "taken"
        self.counts = {**self.counts, name: self.counts[name] + 1}
        if step.skipped:
            self.row = self.row.plus(step)
        elif self.row.length:
            self.row, self._warn_at = Row(), self._warn_after

    @property
    def has_to_give_up(self) -> bool:
        """Whether as many iterations in a row were skipped as the user allows."""
        return self._give_up_after is not None and self.row.length >= self._give_up_after

    def has_to_warn(self) -> bool:
        """Tell whether a warning is due: after some skipped iterations, and again after ten times as many."""
        if self._warn_at is None or self.row.length < self._warn_at or self.row.is_falling:
            return False
        self._warn_at *= 10
        return True
