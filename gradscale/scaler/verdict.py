"""PendingVerdict: the verdict on one optimizer's gradients, from the start of the agreement until the host has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from array_api_compat import array_namespace

from gradscale.core import vector
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.validation import float32_from_bits
from gradscale.core.vector import Reason, Verdict
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
    code : array or int, default 0
        Why this rank skips the step, other than for an overflow.
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
        code: Array | int = 0,
    ) -> None:
        live: Any = iteration.live
        self.groups, self.version = groups, live.version
        count = found.nonfinite
        self._is_plain = isinstance(count, int)
        at_min_scale = self._is_plain and live.at_min_scale(state) is True
        agreement = iteration.agreement
        if self._is_plain and count:
            code = vector.reason_code(Reason.OVERFLOW, agreement.rank())
        if self._is_plain and not groups:
            self.known = Verdict(count, count, at_min_scale, state.scale, found.has_gradients, cast(int, code))
            return
        self._live, self._state, self._rank = live, state, agreement.rank
        about = (0,) * vector.ABOUT
        if groups:
            about = (agreement.identify(live.policy), *iteration.position(groups, optimizer, max_norm))
        if self._is_plain:
            sent: Array | list[int] = vector.pack_plain(
                state, count, at_min_scale, about, has_gradients=found.has_gradients, code=cast(int, code)
            )
            if not agreement.takes_lists:
                sent = live.home.asarray(sent, dtype=live.home.int32)
        else:
            sent = live.backend.pack(live.policy, state, count, about, has_gradients=found.has_gradients, code=code)
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
                scale, *trackers = sent[vector.FLAGS : vector.FLAGS + 4]
                self.numbers = ScaleState(float32_from_bits(scale), *trackers)
                self._count = ballot.agreed()[0]
                if hasattr(ballot.agreed(), "compute"):
                    # A lazy library would compute all that it depends on once more in the update.
                    xp = array_namespace(ballot.agreed())
                    self._count = xp.asarray(agreed, dtype=xp.int32)[0]
                    live.settle(self._state, agreed[vector.FLAGS : vector.FLAGS + 4])
            found = ballot.verdict(agreed, sent, live.policy)
            if found.nonfinite and not self.groups:
                found = found._replace(code=vector.reason_code(Reason.OVERFLOW, self._rank()))
            self.known = found
        return self.known

    def count(self) -> Array | int | None:
        """Return the agreed count, 0-d int32, or an int for a state of numbers; None if it does not count."""
        known = self.known
        if known is not None and known.is_held:
            return None
        return known.nonfinite if self._is_plain and known is not None else self._count

    def reason(self) -> Reason:
        """Return why the ranks have skipped the step, or that they have not."""
        return self.verdict().reason

    def held(self) -> bool:
        """Return whether the scale stays as it is."""
        return self.verdict().is_held

    def refuse(self, code: int) -> None:
        """Skip the step of a process that decides alone."""
        found = self.verdict()
        self.known = found if found.nonfinite else found._replace(code=code)

    def has_arrived(self) -> bool:
        """Return True: the step has read it."""
        return True
