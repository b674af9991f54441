"""HeadroomScale, an experiment: a policy that watches the largest gradient and keeps a distance from overflow.

Not one of gradscale's public policies: :mod:`gradscale_bench.headroom` compares it with torch's rule.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from gradscale.protocols import Array

__all__ = ["LARGEST_HALF", "HeadroomScale", "HeadroomState"]

LARGEST_HALF = 65504.0
# Of the scaled gradients that are still finite beside others that are not: from here on it is they that overflow.
_NEAR_THE_LIMIT = 2.0**14


class HeadroomState(NamedTuple):
    """What the policy remembers, as 0-d arrays: float32, and int32 for what counts.

    Attributes
    ----------
    scale : array
        The factor that the loss is multiplied by; a power of two.
    recent, previous : array
        The largest unscaled magnitude of this window of steps, and of the one before; 0 where there is none.
    steps : array
        Steps in this window.
    ceiling : array
        What the scale may not pass because, above, something overflowed that magnitudes do not show; or inf.
    clean_steps : array
        Steps since the last overflow or rise of the ceiling.
    overflows : array
        Consecutive overflows.
    """

    scale: Array
    recent: Array
    previous: Array
    steps: Array
    ceiling: Array
    clean_steps: Array
    overflows: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadroomScale:
    """Keep ``largest * scale`` at least ``margin_bits`` powers of two below float16's largest number.

    - The scale falls at once when a magnitude comes nearer than that, without a step being lost.
    - It rises, by as many powers of two as there is room, when a whole window has left it; in the first window, and on
      the first clean step after overflows, at once.
    - An overflow that begins in the parameters' own gradients is seen in those that are still finite, close to the
      limit: the scale falls below it, and rises again when the window has forgotten it.
    - Any other overflow, such as in the gradients of activations, says nothing of where the limit is. It halves the
      scale, and consecutive ones take it down by 2, 4, 16, 256, ...; half the lowest scale at which it was seen is a
      ceiling from then on, which doubles after ``growth_interval`` clean steps.

    Parameters
    ----------
    init_scale : float, default 65536.0
        The first scale; a power of two.
    margin_bits : int, default 2
        The distance from overflow.
    window : int, default 100
        Steps; the magnitudes of one to two windows count.
    growth_interval : int, default 2000
        Clean steps until the ceiling rises.
    min_scale, max_scale : float, default 2**-24 and 2**64
        The bounds.
    """

    init_scale: float = 2.0**16
    margin_bits: int = 2
    window: int = 100
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64

    def init(self, like: Array) -> HeadroomState:
        """Return the first state, in the library of ``like``."""
        xp = array_namespace(like)
        floats = [xp.asarray(value, dtype=xp.float32) for value in (self.init_scale, 0.0, 0.0, xp.inf)]
        counts = [xp.asarray(value, dtype=xp.int32) for value in (0, 0, 0)]
        scale, recent, previous, ceiling = floats
        steps, clean_steps, overflows = counts
        return HeadroomState(scale, recent, previous, steps, ceiling, clean_steps, overflows)

    def update(self, state: HeadroomState, nonfinite: Array, largest: Array) -> HeadroomState:
        """Return the state after a step.

        Parameters
        ----------
        state : HeadroomState
            What the step's gradients were scaled with; unchanged.
        nonfinite : array
            0-d; anything but zero is an overflow.
        largest : array
            0-d float32, the largest finite magnitude of the unscaled gradients; 0 when there is none.

        Returns
        -------
        HeadroomState
            New arrays; no host read.
        """
        xp = array_namespace(state.scale)
        zero, none = xp.zeros_like(state.scale), xp.zeros_like(state.steps)
        overflow = nonfinite != xp.zeros_like(nonfinite)
        is_shown = overflow & (largest * state.scale >= _NEAR_THE_LIMIT)
        is_hidden = overflow & ~is_shown

        # What has overflowed was at least as large as the limit; twice as large, so that the scale falls.
        beyond = 2 * LARGEST_HALF / state.scale
        magnitude = xp.where(overflow, xp.where(is_shown, beyond, zero), largest)
        recent = xp.maximum(state.recent, magnitude)
        known = xp.maximum(recent, state.previous)
        room = self._room(xp, known)

        ceiling = xp.where(is_hidden, xp.minimum(state.ceiling, state.scale / 2), state.ceiling)
        rises = ~overflow & (state.clean_steps + 1 >= self.growth_interval)
        ceiling = xp.where(rises, ceiling * 2, ceiling)
        clean_steps = xp.where(overflow | rises, none, state.clean_steps + 1)

        allowed = xp.where(known > zero, xp.minimum(room, ceiling), xp.minimum(state.scale, ceiling))
        is_over = state.steps + 1 >= self.window
        may_rise = is_over | (state.overflows > 0) | (state.previous == zero)
        kept = xp.where(may_rise, allowed, xp.minimum(allowed, state.scale))
        fall = 2.0 ** xp.minimum(2.0 ** xp.astype(state.overflows, xp.float32), zero + 16.0)
        scale = xp.where(overflow, xp.minimum(state.scale / fall, allowed), kept)
        return HeadroomState(
            scale=self._clamped(xp, scale),
            recent=xp.where(is_over, zero, recent),
            previous=xp.where(is_over, recent, state.previous),
            steps=xp.where(is_over, none, state.steps + 1),
            ceiling=ceiling,
            clean_steps=clean_steps,
            overflows=xp.where(overflow, state.overflows + 1, none),
        )

    def _room(self, xp: Any, known: Array) -> Array:
        """Return the largest power of two that leaves the margin above a magnitude."""
        some = xp.where(known > xp.zeros_like(known), known, xp.ones_like(known))
        return 2.0 ** xp.floor(xp.log2(LARGEST_HALF / 2.0**self.margin_bits / some))

    def _clamped(self, xp: Any, scale: Array) -> Array:
        least, most = xp.full_like(scale, self.min_scale), xp.full_like(scale, self.max_scale)
        return xp.minimum(xp.maximum(scale, least), most)
