"""Frame: what the turns of one iteration share: its number, the state in force, and what has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import CallOrderError, GradscaleError
from gradscale.scaler.parts import LiveState

__all__ = ["Frame"]

_ORDER = (
    "The right order in each iteration: scale(loss) and the backward pass; then, for each optimizer, "
    "unscale_(optimizer) if wanted, once, and step(optimizer), once; then update()"
)


class Frame:
    """What the turns of one iteration share. It knows none of them, so that neither keeps the other alive.

    Parameters
    ----------
    number : int
        Position in the run, from 1.

    Attributes
    ----------
    scaled : bool
        Whether ``scale`` was called.
    state : ScaleState or None
        What this iteration scales and unscales with, even if another state is loaded in between.
    lowered : ScaleState or None
        What closures have lowered it to; ``update`` makes it the state.
    failure : GradscaleError or None
        Why the ranks could not agree; the iteration can only be abandoned.
    loss_nonfinite : tuple of arrays
        For a diagnosis: how many of the unscaled outputs were not finite, 0-d, one for each call of ``scale``.
    """

    scaled = False
    state: ScaleState | None = None
    lowered: ScaleState | None = None
    failure: GradscaleError | None = None
    loss_nonfinite: tuple[Array, ...] = ()
    _closure_state: ScaleState | None = None
    _messages = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def in_force(self, live: LiveState, like: Array | None = None) -> ScaleState:
        """Return the state that gradients are scaled and unscaled with, made beside ``like`` if there is none yet.

        Raises
        ------
        CallOrderError
            When there is none, and no array to make it beside.
        """
        state = self._closure_state or self.state
        if state is not None:
            return live.resolved(state)
        if like is None and not live.is_made:
            self.wrong_order("no array has been seen yet, so it is not known where the scale belongs")
        return live.current(like)

    def note_scaled(self, state: ScaleState) -> None:
        """Take note that outputs were scaled with a state."""
        if self._closure_state is None:
            self.state = state
        self.scaled = True

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with what closures have lowered the state to, if they have."""
        self._closure_state = self.lowered
        try:
            yield
        finally:
            self._closure_state = None

    def next_position(self) -> tuple[int, int]:
        """Return the iteration and the number of the next message in it."""
        position = self.number, self._messages
        self._messages += 1
        return position

    def require_sound(self) -> None:
        """Raise again what an agreement of this iteration failed with: ranks would not fail alike a second time."""
        if self.failure is not None:
            raise self.failure

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        msg = f"{what} (iteration {self.number}). {_ORDER}"
        raise CallOrderError(msg)
