"""What a call in the wrong place is told: what was wrong, and the right order."""

from __future__ import annotations

from typing import NoReturn

from gradscale.errors import CallOrderError

_ORDER = "The right order: scale(loss), backward pass, unscale_(optimizer) if wanted, step(optimizer), update()"

SINCE_UPDATE = (
    "on this optimizer since the last update(): most often the iteration before ended without update(), which each one "
    "needs; to skip a step call refuse(optimizer), then step(optimizer) and update() as always"
)
INCOMPLETE = (
    "the gradients of an optimizer could not be unscaled completely before: end the iteration with "
    "update(get_scale()), or load a state dict, and make new gradients"
)


def wrong_order(what: str, iteration: int) -> NoReturn:
    """Raise CallOrderError with what was wrong in an iteration, and the right order."""
    msg = f"{what} (iteration {iteration}). {_ORDER}"
    raise CallOrderError(msg)
