"""Clipping by the global norm: the norm of what a rank or a group holds, and what it is multiplied by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from array_api_compat import array_namespace

from gradscale import ops, validation
from gradscale.arithmetic import float32_bits, multiply_arrays, no_scalar, sum_of_squares
from gradscale.diagnosing import Diagnosing
from gradscale.errors import InvalidValueError
from gradscale.gradients import collect_gradients
from gradscale.policy import DynamicScale
from gradscale.protocols import Array, Backend, Collectives
from gradscale.state import ScaleState

__all__ = ["STANDARD_FUNCTIONS", "Clip", "Clipping", "NormOver", "checked_norm", "clip_factor", "unscale_with_squares"]

STANDARD_FUNCTIONS = ("imag", "sqrt", "sum")
"""What clipping needs of a library beside the rest of the core."""

NormOver: TypeAlias = Literal["rank", "group"]

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6
_INFINITY_BITS = 0x7F800000
_LOWEST_INT32 = -(2**31)


class Clip(NamedTuple):
    """What gradients are clipped to.

    Attributes
    ----------
    max_norm : float
        The largest 2-norm of all of them together.
    group : Collectives or None
        Whose ranks hold parts of the gradients; None where this rank's are all there are.
    """

    max_norm: float
    group: Collectives | None


def checked_norm(max_norm: Any) -> float:
    """Return a largest norm as a float: a number that is not negative, infinity included."""
    if isinstance(max_norm, float) and max_norm == math.inf:
        return max_norm
    return validation.number("max_norm", max_norm, at_least=0.0)


def unscale_with_squares(
    backend: Backend, grads: Sequence[Array], state: ScaleState, *, dtype: Any, out: Sequence[Array] | None
) -> tuple[Sequence[Array], Array, Array]:
    """Return unscaled arrays, the count of those that are not finite, and the sum of the squares of all elements.

    By the adapter in one pass where it can, else by the pure functions.
    """
    fused = getattr(backend, "unscale_with_squares", None)
    if fused is not None:
        unscaled, nonfinite, squares = fused(grads, state, dtype=dtype, out=out)
        return unscaled, nonfinite, squares
    unscaled, nonfinite = backend.unscale(grads, state, dtype=dtype, out=out)
    return unscaled, nonfinite, sum_of_squares(unscaled, state.scale)


def clip_factor(squares: Array, max_norm: float) -> tuple[Array, Array, Array]:
    """Return the norm, what arrays of this norm are multiplied by, and whether that is an overflow. No host read.

    Parameters
    ----------
    squares : array
        0-d float64 or float32: the sum of squares.
    max_norm : float
        At least 0.

    Returns
    -------
    norm : array
        0-d float32.
    factor : array
        0-d float32, at most 1: ``max_norm / (norm + 1e-6)``, as torch's ``clip_grad_norm_`` has it; 1 for a norm that
        is not finite.
    overflows : array
        0-d int32: 1 where the norm is not finite in float32, or the factor is so small that it loses bits.
    """
    xp = array_namespace(squares)
    wide = no_scalar(xp, xp.sqrt(squares))
    one = xp.full_like(wide, 1.0)
    wanted = xp.full_like(wide, max_norm) / (wide + xp.full_like(wide, _EPSILON))
    norm = no_scalar(xp, xp.astype(wide, xp.float32))
    is_clipped = xp.logical_and(wanted < one, xp.isfinite(norm))
    factor = no_scalar(xp, xp.astype(xp.where(is_clipped, wanted, one), xp.float32))
    is_lost = xp.logical_and(xp.zeros_like(wanted) < wanted, wanted < xp.full_like(wanted, validation.SMALLEST_NORMAL))
    overflows = xp.logical_or(xp.logical_not(xp.isfinite(norm)), is_lost)
    return norm, factor, no_scalar(xp, xp.astype(overflows, xp.int32))


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
            norm, factor, overflows = _clip_factor_of(total, clip.max_norm, norm, overflows)
        nonfinite = no_scalar(array_namespace(nonfinite), nonfinite + overflows)
        multiply = getattr(backend, "multiply_in_place", None)
        if multiply is None:
            return multiply_arrays(arrays, factor), nonfinite, norm
        multiply(arrays, factor)
        return arrays, nonfinite, norm

    def _norm_over_ranks(self, backend: Backend, norm: Array, group: Collectives) -> float:
        """Return the norm of what all ranks hold, by the host, and so the same one on every rank."""
        xp = array_namespace(norm)
        is_normal = xp.logical_and(xp.isfinite(norm), norm >= xp.full_like(norm, validation.SMALLEST_NORMAL))
        bits = float32_bits(no_scalar(xp, xp.where(is_normal, norm, xp.full_like(norm, 1.0))))
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
        unscaled, nonfinite, squares = unscale_with_squares(backend, chosen, state, dtype=None, out=chosen)
        clipped, _, norm = self._clip(backend, unscaled, nonfinite, squares, clip)
        if clipped is not chosen:
            assign({id(old): new for old, new in zip(chosen, clipped, strict=True)})
        return norm


def _clip_factor_of(norm: float, max_norm: float, like: Array, flag: Array) -> tuple[Array, Array, Array]:
    """Do what ``clip_factor`` does for a norm that the host has, in Python's floats.

    Ranks may compute in several libraries and precisions, and have to clip alike.
    """
    xp = array_namespace(like)
    rounded = validation.round_to_float32(norm)
    wanted = max_norm / (norm + _EPSILON) if math.isfinite(rounded) else 1.0
    overflows = not math.isfinite(rounded) or 0.0 < wanted < validation.SMALLEST_NORMAL
    factor = validation.round_to_float32(min(wanted, 1.0))
    return xp.full_like(like, rounded), xp.full_like(like, factor), xp.full_like(flag, 1 if overflows else 0)
