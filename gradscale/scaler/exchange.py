"""Exchange: a MAX of a few integers over one group, for the norms and diagnoses of one iteration."""

from __future__ import annotations

from gradscale.core import vector
from gradscale.core.protocols import Array, Collectives, Optimizer
from gradscale.core.vector import Purpose
from gradscale.scaler.agreement import Ballot, take_lists
from gradscale.scaler.iteration import Iteration

__all__ = ["Exchange"]


class Exchange:
    """A MAX of a few integers over one group, after a message of the usual length that announces it.

    ``index`` is the position of the group in the scaler's list.
    """

    def __init__(
        self,
        iteration: Iteration,
        collectives: Collectives,
        purpose: Purpose,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        index: int = 0,
    ) -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self._iteration, self._groups = iteration, [collectives]
        self._about = self._groups, optimizer, max_norm, purpose, index
        self._is_announced = False

    def announce(self, like: Array) -> None:
        """Tell the other ranks what comes; ScaleDesyncError on every rank if one comes by another call.

        That is seen before messages of different lengths meet. One collective, one host read.
        """
        iteration = self._iteration
        sent = vector.announcement(iteration.position(*self._about))
        with iteration.agreement.failing():
            ballot, agreed = self._send(sent, like)
            ballot.verdict(agreed, sent, iteration.live.policy)
        self._is_announced = True

    def maximum(self, values: list[int], like: Array) -> list[int]:
        """Return the element-wise MAX over the group, sent in the library of ``like``; the first one is announced."""
        if not self._is_announced:
            self.announce(like)
        with self._iteration.agreement.failing():
            return self._send(values, like)[1]

    def _send(self, values: list[int], like: Array) -> tuple[Ballot, list[int]]:
        iteration = self._iteration
        backend = iteration.live.backend_for(like)
        sent = values if take_lists(self._groups) else backend.integers(values, like)
        ballot = Ballot(iteration.agreement, self._groups, sent, iteration.number)
        agreed = ballot.agreed(is_read=True)
        return ballot, agreed if isinstance(agreed, list) else backend.read(agreed)
