"""Tally: how many steps were made and skipped, and since when every iteration is skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gradscale.core import validation
from gradscale.scaler.reports import StepReport

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
        row = self.row
        # A first scale that is much too large may fall for long.
        is_falling = 1.0 < row.last < row.previous
        if self._warn_at is None or row.length < self._warn_at or is_falling:
            return False
        self._warn_at *= 10
        return True

    def __str__(self) -> str:
        row = self.row
        words = {"overflow": "non-finite gradients (inf or NaN)", "spike": "a spike", "refused": "a refusal"}
        reasons = ", ".join(f"{count} for {words[name]}" for name, count in row.reasons.items())
        ranks = ", ".join(map(str, sorted(row.ranks))) or "unknown"
        return (
            f"each step of the last {row.length} iterations was skipped: {reasons}; first seen by rank {ranks}; the "
            f"scale went from {row.first:g} to {row.last:g}, and no weight has changed since"
        )
