"""Clipping: to what norm gradients are clipped, and over which ranks the norm is."""

from __future__ import annotations

from typing import NamedTuple

from gradscale.core.arithmetic import NormOver, checked_norm
from gradscale.errors import InvalidValueError, short_repr


class Clipping(NamedTuple):
    """The largest norm, and what it is the norm of."""

    max_norm: float | None = None
    """None if nothing is clipped."""
    norm_over: NormOver | None = None
    """None for what the optimizer's gradients say: "group" for DTensors, else "rank"."""


def checked_clipping(max_norm: object, norm_over: object) -> Clipping:
    """Return the two arguments of a scaler or of ``unscale_``, checked."""
    if norm_over not in (None, "rank", "group"):
        msg = f'norm_over must be "rank" or "group", got {short_repr(norm_over)}'
        raise InvalidValueError(msg)
    if max_norm is None and norm_over is not None:
        msg = f"norm_over={norm_over!r} says over what the norm is taken for max_norm=, got no max_norm"
        raise InvalidValueError(msg)
    return Clipping(None if max_norm is None else checked_norm(max_norm), norm_over)
