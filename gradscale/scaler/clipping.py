"""Clipping: what a scaler does for ``unscale_(optimizer, max_norm=)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from gradscale.core import ops, validation
from gradscale.core.arithmetic import float32_bits, no_scalar
from gradscale.core.backend import Backend
from gradscale.core.clipping import Clip, checked_norm, clip_factor, clip_factor_of
from gradscale.core.gradients import collect_gradients
from gradscale.core.protocols import Array, Collectives
from gradscale.errors import InvalidValueError
from gradscale.policies.dynamic import DynamicScale
from gradscale.scaler.diagnosing import Diagnosing

__all__ = ["Clipping"]

_INFINITY_BITS = 0x7F800000
_LOWEST_INT32 = -(2**31)


class Clipping(Diagnosing):
    """What a scaler does for ``unscale_(optimizer, max_norm=)``."""

    def _checked_clip(self, optimizer: Any, max_norm: Any, norm_over: Any) -> Clip | None:
        """Return what to clip to, having looked at the arguments before anything is modified.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            For a norm that is no number or negative, another ``norm_over`` or none over a group, or several groups.
        """
        if norm_over not in (None, "rank", "group"):
            msg = f'norm_over must be "rank" or "group", got {norm_over!r}'
            raise InvalidValueError(msg)
        if max_norm is None:
            if norm_over is not None:
                msg = f"norm_over={norm_over!r} says over what the norm is taken for max_norm=, got no max_norm"
                raise InvalidValueError(msg)
            return None
        largest = checked_norm(max_norm)
        if not self._enabled and norm_over == "group":
            msg = (
                'a disabled scaler talks to no group, got norm_over="group": use StaticScale(1.0) as its policy to '
                "train in float32 with a scaler that does"
            )
            raise InvalidValueError(msg)
        groups = self._groups_for_gathering(optimizer, None) if self._enabled else ()
        if not groups or norm_over == "rank":
            return Clip(largest, None)
        if norm_over is None:
            msg = (
                'max_norm= over a group needs norm_over=, since gradients may be parts or copies: "group" where each '
                'rank holds a part of the gradients, "rank" where each holds all of them, the same ones'
            )
            raise InvalidValueError(msg)
        if len(groups) > 1:
            msg = (
                f'norm_over="group" needs one group, got {len(groups)}, of which it is not known which hold parts: '
                f"call unscale_(optimizer), and clip the gradients by a norm of your own"
            )
            raise InvalidValueError(msg)
        return Clip(largest, groups[0])

    def _clip(
        self, backend: Backend, arrays: Sequence[Array], nonfinite: Array, squares: Array, clip: Clip
    ) -> tuple[Sequence[Array], Array, Array]:
        """Clip unscaled arrays, in place where their library can.

        Returns
        -------
        arrays : sequence of arrays
            The same ones, or new ones.
        nonfinite : array
            0-d int32: one more than before where the norm is an overflow.
        norm : array
            0-d float32, before clipping. Over a group two host reads and one all-reduce; else none.
        """
        norm, factor, overflows = clip_factor(squares, clip.max_norm)
        if clip.group is not None:
            total = self._norm_over_ranks(backend, norm, clip.group)
            norm, factor, overflows = clip_factor_of(total, clip.max_norm, norm, overflows)
        nonfinite = no_scalar(array_namespace(nonfinite), nonfinite + overflows)
        return backend.multiply_in_place(arrays, factor), nonfinite, norm

    def _norm_over_ranks(self, backend: Backend, norm: Array, group: Collectives) -> float:
        """Return the norm of what all ranks hold, by the host, and so the same one on every rank."""
        xp = array_namespace(norm)
        is_normal = xp.logical_and(xp.isfinite(norm), norm >= xp.full_like(norm, validation.SMALLEST_NORMAL))
        kept = no_scalar(xp, xp.where(is_normal, norm, xp.full_like(norm, 1.0)))
        cast = backend.bits(kept)
        bits = float32_bits(kept) if cast is None else cast
        infinite = xp.where(xp.isfinite(norm), xp.zeros_like(bits), xp.full_like(bits, _INFINITY_BITS))
        sent = no_scalar(xp, xp.where(is_normal, bits, infinite))
        slots = [_LOWEST_INT32] * group.size
        (slots[group.rank],) = backend.read(xp.reshape(sent, (1,)))
        received = self._maximum(group, slots, norm)
        return math.hypot(*map(validation.float32_from_bits, received))

    def _clip_unscaled(self, optimizer: Any, clip: Clip) -> Array | None:
        """Clip gradients that are not scaled, for a disabled scaler, and return their norm; None if there are none."""
        found, assign = collect_gradients(optimizer)
        like = ops.first_floating(found)
        if like is None:
            return None
        # Dividing by one changes nothing.
        state = DynamicScale(init_scale=1.0).init(like)
        backend = self._backend_for(state.scale)
        chosen = ops.floating_leaves(found, state, what=f"gradient of {type(optimizer).__name__}")
        unscaled, nonfinite, squares = backend.unscale_with_squares(chosen, state, out=chosen)
        clipped, _, norm = self._clip(backend, unscaled, nonfinite, squares, clip)
        if clipped is not chosen:
            assign({id(old): new for old, new in zip(chosen, clipped, strict=True)})
        return norm
