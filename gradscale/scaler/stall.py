"""Tally: how many steps were taken or skipped, and for each optimizer its skipped steps in a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gradscale.core import validation
from gradscale.core.identity import IdentityMap, assign_position
from gradscale.errors import TrainingStalledError, TrainingStalledWarning, warn_caller
from gradscale.scaler.reports import COUNTED, REASONS, StepReport

# A scale falls once in so many skipped steps, or oftener: the hysteresis of a policy.
_SLOWEST_FALL = 32
_SEEN, _DROPPED = "spikes seen", "dropped"
_CAUSES: dict[str, str] = {words.name: words.cause for words in REASONS.values() if words.cause}


class SkipStreak(NamedTuple):
    """Steps of one optimizer that were skipped in a row; those that the program has refused are left out."""

    reasons: Mapping[str, int] = {}
    """How many were skipped for each."""
    ranks: frozenset[int] = frozenset()
    first: float = 0.0
    """The scale of the first step since the state was loaded."""
    since_fall: int = 0
    """How many steps ago the scale has fallen last."""
    last: float = 0.0
    """The scale of the last step."""
    warned_at: int = 0
    """Its length when it was last warned of."""

    @property
    def length(self) -> int:
        """How many steps it has."""
        return sum(self.reasons.values())

    def plus(self, step: StepReport) -> SkipStreak:
        """Return the streak with one more skipped step."""
        return SkipStreak(
            {**self.reasons, step.reason: self.reasons.get(step.reason, 0) + 1},
            self.ranks if step.by is None else self.ranks | {step.by},
            self.first or step.scale,
            0 if step.scale < self.last else self.since_fall + 1,
            step.scale,
            self.warned_at,
        )

    @property
    def is_falling(self) -> bool:
        """Whether the scale still falls, as a first one that is much too large may for long."""
        return 1.0 < self.last < self.first and self.since_fall < _SLOWEST_FALL

    @property
    def never_scales(self) -> bool:
        """Whether nothing was scaled, as the scale was always 1."""
        return self.first == self.last == 1.0

    def sentence(self, optimizer: str) -> str:
        """Say in words how long it is, why, and who has seen it; ``optimizer``: what to call that."""
        reasons = ", ".join(f"{count} for {_CAUSES[name]}" for name, count in self.reasons.items())
        seen = f"first seen by rank {', '.join(map(str, sorted(self.ranks)))}; " if self.ranks else ""
        scales = "" if self.never_scales else f"the scale went from {self.first:g} to {self.last:g}, and "
        return (
            f"each of the last {self.length} steps of {optimizer} was skipped: {reasons}; {seen}{scales}no weight has "
            f"changed since, of those that it steps"
        )


_NO_STREAK = SkipStreak()


def text_of(streaks: Iterable[SkipStreak]) -> str:
    """Return streaks as one value, however many there are."""
    return json.dumps([{**one.reasons, "scales": [one.first, one.since_fall, one.last]} for one in streaks])


def streaks_from(text: object) -> list[SkipStreak]:
    """Return the streaks of a state dict; InvalidValueError or InvalidTypeError for another text than it has."""
    streaks = []
    for each in [validation.mapping("streaks", one) for one in validation.parse_list("streaks", text)]:
        reasons = {name: validation.count("streaks", count, 1) for name, count in each.items() if name in _CAUSES}
        first, since_fall, last = _scales(each.get("scales", [0.0, 0, 0.0]))
        streaks.append(SkipStreak(reasons, frozenset(), first, since_fall, last))
    return streaks


def _scales(saved: object) -> tuple[float, int, float]:
    if not isinstance(saved, list) or len(saved) != 3:
        raise validation.wrong_value(saved, "the scales of streaks", "the three numbers that state_dict() gives")
    name, (first, since_fall, last) = "the scales of streaks", saved
    number = validation.number
    return number(name, first, at_least=0.0), validation.count(name, since_fall), number(name, last, at_least=0.0)


def raise_or_warn(sentences: Iterable[str], *, gives_up: bool) -> None:
    """Warn of a stalled run, or raise TrainingStalledError if ``gives_up``; empty sentences are left out."""
    msg = ". ".join(filter(None, sentences))
    if gives_up:
        raise TrainingStalledError(msg)
    warn_caller(msg, TrainingStalledWarning)


class Tally:
    """Counts the steps of a scaler, and the skipped ones in a row of each optimizer.

    A late verdict counts when the CPU has it, and those of a captured graph do not count.
    """

    def __init__(self, options: Mapping[str, object]) -> None:
        self._warn_after, self.give_up_after = (
            None if options[name] is None else validation.integer(name, options[name], 1, validation.LARGEST_INT32)
            for name in ("warn_after", "give_up_after")
        )
        self._positions: IdentityMap[int] = IdentityMap()
        self._names = COUNTED if getattr(options["skip"], "act", True) else (*COUNTED, _SEEN)
        self.restart({})

    def restart(self, counts: Mapping[str, int], streaks: Sequence[SkipStreak] = ()) -> None:
        """Go on from saved counts, and streaks, which optimizers get in the order of their first steps."""
        self.counts = {name: counts.get(name, 0) for name in self._names}
        if counts.get(_DROPPED):
            self.counts[_DROPPED] = counts[_DROPPED]
        self._streaks = {position: streak for position, streak in enumerate(streaks) if streak.length}
        # The positions of streaks for new optimizers: not those of optimizers that are gone.
        self._loaded = {*self._streaks}
        self.grown: set[int] = set()
        """The positions of streaks that have grown since the last ``pop_stalled``."""

    def drop(self, number: int) -> None:
        """Count micro-batches that were dropped."""
        self.counts[_DROPPED] = self.counts.get(_DROPPED, 0) + number

    def position_of(self, optimizer: object) -> int:
        """Return the position of an optimizer's streak, which it takes now if it has none."""
        position = self._positions.get(id(optimizer))
        if position is None:
            position = assign_position(self._positions, optimizer)
            if position not in self._loaded:
                self._streaks.pop(position, None)
        return position

    def streak_of(self, optimizer: object) -> SkipStreak:
        """Return the skipped steps of an optimizer in a row."""
        position = self._positions.get(id(optimizer))
        return _NO_STREAK if position is None else self._at(position)

    def _at(self, position: int) -> SkipStreak:
        return self._streaks.get(position, _NO_STREAK)

    def saved(self) -> list[SkipStreak] | None:
        """Return the streaks by position; None without ``give_up_after``."""
        last = max(self._streaks, default=-1)
        return None if self.give_up_after is None else [*map(self._at, range(last + 1))]

    def note(self, step: StepReport, position: int | None) -> None:
        """Count a step, and in the streak of its optimizer, if that is alive."""
        name = step.reason if step.skipped else "taken"
        self.counts[name] += 1
        if not step.skipped and step.by is not None:
            self.counts[_SEEN] += 1
        if position is None:
            return
        self._loaded.discard(position)
        if not step.skipped:
            self._streaks.pop(position, None)
            self.grown.discard(position)
        elif name in _CAUSES:
            self._streaks[position] = self._at(position).plus(step)
            self.grown.add(position)

    def is_last_chance(self, optimizer: object) -> bool:
        """Tell whether one more skipped step of an optimizer is as many in a row as the user allows."""
        return self._at(self.position_of(optimizer)).length + 1 >= (self.give_up_after or math.inf)

    def pop_stalled(self, *, is_alone: bool, gives_up: bool) -> tuple[int | None, bool]:
        """Return the position of a streak that has grown and is too long, and whether the run ends.

        A process that decides alone ends it by its own count, and ranks if they have agreed so: ``gives_up``. One is
        long enough to warn of after some steps, and again after ten times as many.
        """
        grown, self.grown = sorted(self.grown, key=lambda one: (self._at(one).length, one)), set()
        is_last = is_alone and self._at(grown[-1]).length >= (self.give_up_after or math.inf)
        if gives_up or is_last:
            return grown[-1], True
        for position in reversed(grown):
            streak = self._at(position)
            if streak.length >= (10 * streak.warned_at or self._warn_after or math.inf) and not streak.is_falling:
                return position, False
        return None, False

    def mark_warned(self, position: int) -> SkipStreak:
        """Return a streak, marked as warned of at its length."""
        streak = self._streaks[position] = self._at(position)._replace(warned_at=self._at(position).length)
        return streak

    def __getstate__(self) -> dict[str, object]:
        """Return the counts and streaks for a pickle or a copy, whose optimizers are others."""
        return self.__dict__ | {
            "counts": {**self.counts},
            "_streaks": {**self._streaks},
            "_loaded": {*self._streaks},
            "grown": set(),
            "_positions": IdentityMap(),
        }
