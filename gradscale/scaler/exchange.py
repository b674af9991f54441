"""Exchange: values of each rank of one group, for the norms and diagnoses of one iteration."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from gradscale.core.protocols import Array, Collectives, Optimizer
from gradscale.scaler import claim as claims
from gradscale.scaler.agreement import gather_numbers, gather_texts
from gradscale.scaler.claim import Call, Claim
from gradscale.scaler.iteration import Iteration


class Exchange:
    """Values of each rank of one group, in rounds of messages of the usual form, as arrays of the library of ``like``.

    If some rank makes another call, the first round is a ScaleDesyncError on every rank.
    """

    def __init__(
        self,
        iteration: Iteration,
        collectives: Collectives,
        call: Call,
        optimizer: Optimizer,
        *,
        max_norm: float | None = None,
        index: int = 0,
    ) -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self._iteration, self._group = iteration, collectives
        self._about = [collectives], optimizer, max_norm, call, index
        self._claim: Claim | None = None

    def announce(self, like: Array) -> None:
        """Tell the other ranks that a collective of another kind comes next."""
        self._carry(like, [0] * claims.CARRIED)

    def numbers(self, number: int, like: Array) -> list[int]:
        """Return the int32 of each rank; a round, and a host read, for each 8 of them."""
        return gather_numbers(number, self._group, functools.partial(self._carry, like))

    def texts(self, sent: bytes, like: Array) -> list[bytes]:
        """Return the bytes of each rank; a round, and a host read, for each 32 of them."""
        return gather_texts(sent, self._group, functools.partial(self._carry, like))

    def _carry(self, like: Array, values: Sequence[int]) -> list[int]:
        iteration = self._iteration
        agreement, live = iteration.agreement, iteration.live
        # One for all rounds, of which other rows of a grid of ranks may have more.
        self._claim = claim = self._claim or iteration.next_claim(*self._about)
        sent = live.backend_for(like).integers(claims.carrying(claims.hash_of(claim), values), like)
        with agreement.failing():
            ballot = agreement.send([self._group], sent, iteration.number, claim)
            answer = ballot.read(live.backend_for)
            ballot.verdict(*answer, live.policy)
        return claims.carried(answer[0])
