"""Scaling: by which state the outputs of one iteration were scaled, if any were, and its gradients are divided."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from gradscale.core.gradients import values_of_gradients
from gradscale.core.protocols import Array, Optimizer, ScaleState
from gradscale.scaler.claim import Presence, Scaled
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.order import wrong_order
from gradscale.scaler.progress import Progress
from gradscale.scaler.scale import Use


class Source(NamedTuple):
    """Where gradients come from."""

    state: ScaleState
    """The state to divide them by."""
    scaled: Scaled = Scaled.WITH_VALUES
    presence: Presence = Presence.SOME
    """What there is of them; only of a rank that has not scaled it is known whether they are zeros."""


@dataclasses.dataclass(eq=False)
class Scaling:
    """The state that outputs were scaled with last, by which gradients are divided.

    ``lowered`` is the state after the backoffs of closures, and ``closure_state`` the same inside of one.
    ``loss_nonfinite`` are counts for a diagnosis.
    """

    number: int
    parts: Collaborators
    has_scaled: bool = False
    is_inside_closure: bool = False
    state: ScaleState | None = None
    lowered: ScaleState | None = None
    loss_nonfinite: tuple[Array, ...] = ()
    closure_state: ScaleState | None = None

    def in_force(self, first: Callable[[], Array | None]) -> ScaleState:
        """Return the state to unscale with, a new one beside the ``first`` array; CallOrderError without any."""
        state = self.closure_state or self.state or self.parts.current.state
        if state is not None:
            return state
        like = first()
        if like is None:
            like = self.parts.agreement.example(self.parts.current, self.number)
        if like is None:
            wrong_order("no array has been seen yet, so it is not known where the state belongs", self.number)
        return self.parts.current.materialize(like)

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with the state that closures have lowered, if they have."""
        self.closure_state, self.is_inside_closure = self.lowered, True
        has_scaled, self.has_scaled = self.has_scaled, False
        try:
            yield
        finally:
            self.closure_state, self.is_inside_closure = None, False
            self.has_scaled = self.has_scaled or has_scaled

    def lower(self) -> bool:
        """Back the scale off for the rest of this iteration's closures; False if the policy cannot."""
        state = self.lowered or self.state or self.parts.current.materialize()
        self.lowered = self.parts.current.policy.backoff(state)
        return self.lowered is not state

    def source_of(
        self, progress: Progress, optimizer: Optimizer, like: Callable[[], Array | None], *, has_groups: bool
    ) -> Source:
        """Return where an optimizer's gradients come from; CallOrderError alone, if no loss of theirs was scaled."""
        current = self.parts.current
        if self.has_scaled or progress.refused or current.adapter.is_replayed:
            return Source(self.closure_state or self.state or self.in_force(like))
        presence = self._unscaled_presence(progress, optimizer, has_groups=has_groups)
        if presence is Presence.SOME and not has_groups:
            self.forbid_unscaled(progress)
        state = self.in_force(like)
        if presence is not None:
            return Source(state, Scaled.NEVER, presence)
        if current.is_one(state):
            return Source(state)
        if not has_groups:
            # Over a group another rank may have the loss.
            self.parts.mistakes.tell_of_no_scale(self.number, type(optimizer).__name__)
        return Source(state, Scaled.BEFORE)

    def _unscaled_presence(self, progress: Progress, optimizer: Optimizer, *, has_groups: bool) -> Presence | None:
        """Return the presence of gradients whose loss this rank never scaled; a host read each, None for others."""
        current, has_closure = self.parts.current, progress.closure.was_evaluated
        if not (current.use.is_fresh or has_closure):
            return None
        # Nothing has to be divided.
        is_one = self.closure_state is None and current.scale() == 1.0 and (has_groups or current.is_set)
        if not current.use.has_leftovers and (current.never_scales or is_one):
            return None
        if not current.is_set:
            return Presence.SOME
        if self._are_zeros(optimizer):
            return Presence.ZEROS
        return Presence.SOME if current.use is not Use.LOADED or has_closure else None

    def _are_zeros(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer's gradients are nothing but zeros; a host read each."""
        current = self.parts.current
        values = values_of_gradients(current.adapter, optimizer)
        summaries = [current.backend_for(one).read_summaries([one])[0][0] for one in values]
        return all(one.zeros == one.size for one in summaries)

    def forbid_unscaled(self, progress: Progress, where: str = "") -> NoReturn:
        """Raise CallOrderError for gradients whose loss was never scaled."""
        if progress.closure.was_evaluated:
            wrong_order(
                f"the closure of step() has not called scale(){where}: make the backward pass of scaler.scale(loss) in "
                f"each of its evaluations; or make it before, and call step(optimizer) without the closure",
                self.number,
            )
        since = " since a state was loaded, or a scale or a group set" if self.parts.current.is_set else ""
        wrong_order(
            f"scale() has never been called{where}{since}: make the gradients of scaler.scale(loss)", self.number
        )
