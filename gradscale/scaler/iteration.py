"""Iteration: which optimizers have been unscaled and stepped since the last update, and the errors of a wrong order."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import CallOrderError, GradscaleError
from gradscale.reports.steps import StepReport
from gradscale.scaler.identity import IdentityMap

__all__ = ["Iteration", "Progress", "Stage"]

_ORDER = (
    "The right order in each iteration: scale(loss) and the backward pass; then, for each optimizer, "
    "unscale_(optimizer) if wanted, once, and step(optimizer), once; then update()"
)


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclasses.dataclass(slots=True)
class Progress:
    """One optimizer's iteration: its stage and, once its gradients are unscaled, the verdict on them.

    Attributes
    ----------
    stage : Stage
        How far it has come.
    sent, agreed : array or None
        The vector of :mod:`gradscale.core.vector`, before and after the group's MAX.
    finish : callable or None
        Completes the agreement and returns ``agreed``.
    verdict : Verdict or None
        ``agreed``, read by the host.
    by_closure : bool
        Whether a closure has been evaluated, so that the step may evaluate one again if it failed.
    groups : sequence of Collectives
        What the agreement is made over; empty for a process that decides alone.
    found : object
        What an adapter keeps of its own verdict.
    """

    stage: Stage = Stage.READY
    sent: Array | None = None
    finish: Callable[[], Array] | None = None
    agreed: Array | None = None
    verdict: Verdict | None = None
    by_closure: bool = False
    groups: Sequence[Collectives] = ()
    found: Any = None


class Iteration:
    """What has been called since the last update.

    Parameters
    ----------
    number : int
        Position in the run, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.scaled = False
        # What this iteration scales and unscales with, even if another state is loaded in between.
        self.state: ScaleState | None = None
        # Why the ranks could not agree; the iteration can only be abandoned.
        self.failure: GradscaleError | None = None
        self.calls = 0
        self.lowered: ScaleState | None = None
        # In the order of the steps.
        self.reports: list[StepReport] = []
        # For a diagnosis: how many of the unscaled outputs were not finite, one 0-d array for each call of scale().
        self.loss_nonfinite: list[Array] = []
        self._progress: IdentityMap[Progress] = IdentityMap()
        # The map forgets an optimizer that is deleted before the update; its verdict counts all the same.
        self._all: list[Progress] = []

    def of(self, optimizer: Any) -> Progress:
        """Return an optimizer's progress, READY if it is new."""
        if optimizer not in self._progress:
            self._progress[optimizer] = Progress()
            self._all.append(self._progress[optimizer])
        return self._progress[optimizer]

    def by_id(self, identity: int) -> Progress | None:
        """Return the progress of the optimizer with this ``id()``; None if it was not met in this iteration."""
        return self._progress.by_id(identity)

    def ids(self) -> list[int]:
        """Return the ``id()`` of each optimizer met in this iteration."""
        return self._progress.ids()

    def judged(self) -> list[Progress]:
        """Return the progress of every optimizer whose gradients have been unscaled."""
        return [progress for progress in self._all if progress.finish is not None]

    def require_sound(self) -> None:
        """Raise again what an agreement of this iteration failed with: ranks would not fail alike a second time."""
        if self.failure is not None:
            raise self.failure

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError unless nothing is unscaled or stepped yet, or the iteration has failed anyway."""
        if self.failure is None and any(progress.stage is not Stage.READY for progress in self._all):
            msg = (
                f"{what} is possible only at the beginning of an iteration, before unscale_() and step(), or at its "
                f"end, after update(); this is the middle of iteration {self.number}"
            )
            raise CallOrderError(msg)

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        msg = f"{what} (iteration {self.number}). {_ORDER}"
        raise CallOrderError(msg)
