"""Clipping by the global norm: the norm of the gradients of a rank or a group, and the factor."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from array_api_compat import array_namespace

from gradscale.core import validation
from gradscale.core.arithmetic import as_0d_array
from gradscale.core.protocols import Array

__all__ = [
    "STANDARD_FUNCTIONS",
    "NormOver",
    "checked_norm",
    "clip_factor",
    "clip_factor_of",
    "clip_factor_within",
    "largest_norm",
]

STANDARD_FUNCTIONS = ("imag", "sqrt", "sum")
"""What clipping needs of a library besides what the core needs."""

NormOver: TypeAlias = Literal["rank", "group"]

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6


def checked_norm(max_norm: object) -> float:
    """Return a largest norm as a float that is not negative; infinity is allowed."""
    return validation.number("max_norm", max_norm, at_least=0.0, is_finite=False)


def clip_factor(squares: Array, max_norm: float) -> tuple[Array, Array, Array]:
    """Return the norm, the factor to multiply arrays by (0-d float32), and whether that is an overflow (0-d int32).

    The factor is ``max_norm / (norm + 1e-6)``, as in torch's ``clip_grad_norm_``, but at most 1; 1 for a norm that is
    not finite. It is an overflow if the norm is not finite in float32, or the factor is so small that it loses bits.
    """
    return clip_factor_within(squares, array_namespace(squares).full_like(squares, largest_norm(max_norm)))


def largest_norm(max_norm: float) -> float:
    """Return the largest bound that finite norms are clipped to; beyond it, the quotient would overflow."""
    return min(max_norm, validation.LARGEST_FLOAT32)


def clip_factor_within(squares: Array, bound: Array) -> tuple[Array, Array, Array]:
    """Do what ``clip_factor`` does for a :func:`largest_norm` that is 0-d, of the dtype of ``squares``."""
    xp = array_namespace(squares)
    wide = as_0d_array(xp, xp.sqrt(squares))
    one = xp.full_like(wide, 1.0)
    divisor = wide + xp.full_like(wide, _EPSILON)
    norm = as_0d_array(xp, xp.astype(wide, xp.float32))
    is_clipped = xp.logical_and(bound < divisor, xp.isfinite(norm))
    wanted = xp.where(is_clipped, bound, one) / xp.where(is_clipped, divisor, one)
    factor = as_0d_array(xp, xp.astype(wanted, xp.float32))
    is_lost = xp.logical_and(xp.zeros_like(wanted) < wanted, wanted < xp.full_like(wanted, validation.SMALLEST_NORMAL))
    overflows = xp.logical_or(xp.logical_not(xp.isfinite(norm)), is_lost)
    return norm, factor, as_0d_array(xp, xp.astype(overflows, xp.int32))


def clip_factor_of(norm: float, max_norm: float, like: Array, flag: Array) -> tuple[Array, Array, Array]:
    """Do what ``clip_factor`` does for a norm that the host has, in Python's floats, so that all ranks clip alike."""
    xp = array_namespace(like)
    rounded = validation.round_to_float32(norm)
    wanted = max_norm / (norm + _EPSILON) if math.isfinite(rounded) else 1.0
    overflows = not math.isfinite(rounded) or 0.0 < wanted < validation.SMALLEST_NORMAL
    factor = validation.round_to_float32(min(wanted, 1.0))
    return xp.full_like(like, rounded), xp.full_like(like, factor), xp.full_like(flag, 1 if overflows else 0)
