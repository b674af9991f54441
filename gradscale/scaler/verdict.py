"""PendingVerdict: the verdict on one optimizer's gradients, from the start of the agreement until the host has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from gradscale.core import vector
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.validation import float32_from_bits
from gradscale.core.vector import Verdict
from gradscale.scaler.agreement import Ballot
from gradscale.scaler.iteration import Iteration

__all__ = ["PendingVerdict"]


class PendingVerdict:
    """The verdict on one optimizer's gradients; see :class:`gradscale.scaler.parts.Pending`.

    Parameters
    ----------
    iteration : Iteration
        Not kept.
    found : ArrayFound
        By the scaler's unscaler.
    state : ScaleState
        What the gradients were unscaled with.
    groups : sequence of Collectives
        What to agree over; empty for a process that decides alone.
    optimizer : object
        Whose gradients; not kept.
    max_norm : float, optional
        What they are clipped to.
    """

    is_begun = True
    is_read_later = is_scaled = is_captured = False
    known: Verdict | None = None
    numbers: ScaleState | None = None

    def __init__(
        self,
        iteration: Iteration,
        found: Any,
        state: ScaleState,
        groups: Sequence[Collectives],
        optimizer: Optimizer,
        max_norm: float | None = None,
    ) -> None:
        live: Any = iteration.live
        self.groups, self.version = groups, live.version
        count = found.nonfinite
        self._is_plain = isinstance(count, int)
        at_min_scale = self._is_plain and live.at_min_scale(state) is True
        if self._is_plain and not groups:
            self.known = Verdict(count, count, at_min_scale, state.scale, found.has_gradients)
            return
        self._live, self._state = live, state
        agreement = iteration.agreement
        about = (0,) * vector.ABOUT
        if groups:
            about = (agreement.identify(live.policy), *iteration.position(groups, optimizer, max_norm))
        if self._is_plain:
            sent: Array | list[int] = vector.pack_plain(
                state, count, at_min_scale, about, has_gradients=found.has_gradients
            )
            if not agreement.takes_lists:
                sent = live.home.asarray(sent, dtype=live.home.int32)
        else:
            sent = vector.pack(live.backend, live.policy, state, count, about, has_gradients=found.has_gradients)
        self._ballot = Ballot(agreement, groups, sent, iteration.number)

    def verdict(self) -> Verdict:
        """Finish the agreement and read its verdict: the one host read of a step."""
        if self.known is None:
            live, ballot = self._live, self._ballot
            agreed, sent = ballot.read(live.backend_for)
            if not self.groups:
                # No other rank has contributed, so an impossible value is the array library's fault.
                live.checked(agreed[vector.FLAGS : vector.FLAGS + 4])
            if not self._is_plain:
                self.numbers = ScaleState(float32_from_bits(sent[3]), *sent[4:7])
                self._count = ballot.agreed()[0]
                if hasattr(ballot.agreed(), "compute"):
                    # A lazy library would compute all that it depends on once more in the update.
                    xp = array_namespace(ballot.agreed())
                    self._count = xp.asarray(agreed, dtype=xp.int32)[0]
                    live.settle(self._state, agreed[vector.FLAGS : vector.FLAGS + 4])
            self.known = ballot.verdict(agreed, sent, live.policy)
        return self.known

    def count(self) -> Array | int:
        """Return the agreed count, 0-d int32, or an int for a state of numbers. No host read."""
        return self.known.nonfinite if self._is_plain and self.known is not None else self._count

    def has_arrived(self) -> bool:
        """Return True: the step has read it."""
        return True
