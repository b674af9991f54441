"""Iteration: which optimizers have had their turn since the last update."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from gradscale.errors import CallOrderError
from gradscale.reports.steps import StepReport
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.frame import Frame
from gradscale.scaler.parts import LiveState, Unscaler
from gradscale.scaler.turn import Stage, Turn

__all__ = ["Iteration"]


class Iteration:
    """The turns of the optimizers since the last update.

    Parameters
    ----------
    number : int
        Position in the run, from 1.

    Attributes
    ----------
    frame : Frame
        What the turns share.
    reports : list of StepReport
        In the order of the steps.
    turns : list of Turn
        In the order in which the optimizers were met.
    """

    def __init__(self, number: int) -> None:
        self.frame = Frame(number)
        self.reports: list[StepReport] = []
        # By the optimizer's id, with what returns the optimizer, or None once it is deleted.
        self._known: dict[int, tuple[Callable[[], Any], Turn]] = {}
        # The verdict of an optimizer that is deleted before the update counts all the same.
        self.turns: list[Turn] = []

    def of(
        self, optimizer: Any, live: LiveState, unscaler: Unscaler, agreement: Agreement, *, reads_at_once: bool
    ) -> Turn:
        """Return an optimizer's turn, with these parts if it is new."""
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        turn = Turn(self.frame, live, unscaler, agreement, reads_at_once=reads_at_once)
        try:
            reference: Callable[[], Any] = weakref.ref(optimizer)
        except TypeError:
            reference = lambda: optimizer  # noqa: E731
        self._known[id(optimizer)] = reference, turn
        self.turns.append(turn)
        return turn

    def by_id(self, identity: int) -> Turn | None:
        """Return the turn of the optimizer with this ``id()``; None if it was not met in this iteration."""
        known = self._known.get(identity)
        return None if known is None or known[0]() is None else known[1]

    def ids(self) -> list[int]:
        """Return the ``id()`` of each optimizer met in this iteration."""
        return [identity for identity, (reference, _) in self._known.items() if reference() is not None]

    def forget_turns(self) -> None:
        """Let every optimizer begin its turn anew, with what was scaled; agreements under way are finished first."""
        for turn in self.turns:
            if turn.pending is not None and turn.pending.is_begun:
                turn.verdict()
        self._known, self.turns = {}, []

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError unless nothing is unscaled or stepped yet, or the iteration has failed anyway."""
        if self.frame.failure is None and any(turn.stage is not Stage.READY for turn in self.turns):
            msg = (
                f"{what} is possible only at the beginning of an iteration, before unscale_() and step(), or at its "
                f"end, after update(); this is the middle of iteration {self.frame.number}"
            )
            raise CallOrderError(msg)

    def __getstate__(self) -> tuple[int, bool]:
        """Return what is pickled: the number, and whether something was scaled."""
        return self.frame.number, self.frame.scaled

    def __setstate__(self, kept: tuple[int, bool]) -> None:
        number, scaled = kept
        vars(self).update(vars(Iteration(number)))
        self.frame.scaled = scaled
