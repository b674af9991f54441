"""ArrayUnscaler: an optimizer's gradients collected, unscaled, clipped and judged, by the adapter of their library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from array_api_compat import array_namespace

from gradscale.core import ops, validation
from gradscale.core.arithmetic import as_0d_array, clip_factor_of, float32_bits
from gradscale.core.backend import Backend
from gradscale.core.gradients import ListedParameters, collect_gradients
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.dynamic import StaticScale
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.live_state import ArrayState
from gradscale.scaler.parts import LiveState

__all__ = ["ArrayFound", "ArrayGradients", "ArrayUnscaler", "Clip"]

_INFINITY_BITS = 0x7F800000
_LOWEST_INT32 = -(2**31)
# Dividing by it changes nothing.
_ONE = StaticScale(1.0)


class Clip(NamedTuple):
    """What gradients are clipped to."""

    max_norm: float
    """The largest 2-norm of all of them together."""
    exchange: Exchange | None = None
    """Over the group whose ranks hold parts of the gradients; None if this rank holds them all."""


class ArrayGradients:
    """An optimizer's gradients, and how unscaled ones go back to it."""

    # Arrays of the standard are this process's own.
    groups: Sequence[Collectives] = ()
    __slots__ = ("assign", "clip", "is_touched", "leaves", "master_dtype", "what")

    def __init__(self, optimizer: Optimizer, clip: Clip | None, known: IdentityMap[ListedParameters]) -> None:
        self.leaves, self.assign = collect_gradients(optimizer, known)
        self.what = f"gradient of {type(optimizer).__name__}"
        self.master_dtype = getattr(optimizer, "master_dtype", None)
        self.clip = clip
        self.is_touched = False

    @property
    def like(self) -> Array | None:
        """The first floating array, which says where the state belongs."""
        return ops.first_floating(self.leaves)


class ArrayFound(NamedTuple):
    """What has been found in an optimizer's gradients."""

    nonfinite: Array | int
    """How many are not finite: 0-d int32 on the state's device; an int for a state of numbers."""
    norm: Array | None
    """Their norm before clipping, 0-d float32."""
    has_gradients: bool = True
    """Whether there is any."""


class ArrayUnscaler:
    """Unscales in place if the library can, else assigns new arrays. No host read but for a norm over ranks."""

    def __init__(self) -> None:
        self._known: IdentityMap[ListedParameters] = IdentityMap()

    def __reduce__(self) -> tuple[type[ArrayUnscaler], tuple[()]]:
        return type(self), ()

    def collect(self, optimizer: Optimizer, request: Clip | None = None) -> ArrayGradients:
        """Return an optimizer's gradients; nothing is modified."""
        return ArrayGradients(optimizer, request, self._known)

    def unscale(self, gradients: ArrayGradients, live: ArrayState, state: ScaleState) -> ArrayFound:
        """Divide gradients by the scale of a state, clip and judge them; a refusal modifies none."""
        backend = live.backend
        backend.refuse_tracing("unscale_()")
        chosen = ops.floating_leaves(gradients.leaves, live.home, what=gradients.what, takes_integers=False)
        dtype, clip, norm = gradients.master_dtype, gradients.clip, None
        out = chosen if dtype is None else None
        gradients.is_touched = True
        try:
            if clip is None:
                unscaled, nonfinite = backend.unscale(chosen, state, dtype=dtype, out=out)
            else:
                unscaled, nonfinite, squares = backend.unscale_with_squares(chosen, state, dtype=dtype, out=out)
        except (InvalidTypeError, InvalidValueError):
            gradients.is_touched = False
            raise
        if clip is not None:
            unscaled, nonfinite, norm = _clip(backend, unscaled, nonfinite, squares, clip)
        if unscaled is not chosen:
            gradients.assign({id(old): new for old, new in zip(chosen, unscaled, strict=True)})
        return ArrayFound(nonfinite, norm, len(chosen) > 0)

    def clip_unscaled(self, optimizer: Optimizer, max_norm: float, live: LiveState) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; None if there are none. No host read."""
        gradients = self.collect(optimizer, Clip(max_norm))
        gradients.master_dtype = None
        like = gradients.like
        if like is None:
            return None
        one = ArrayState(_ONE, live.backend_for(like))
        return self.unscale(gradients, one, one.current(like)).norm

    def groups_for(self, optimizer: Optimizer, groups: Sequence[Collectives]) -> Sequence[Collectives]:  # noqa: ARG002
        """Return the scaler's groups."""
        return groups

    def values_of(self, gradient: Array) -> Array | None:
        """Return the gradient itself."""
        return gradient

    def shape_of(self, gradient: Array) -> tuple[int, ...]:
        """Return the gradient's shape."""
        return tuple(gradient.shape)

    def was_left_scaled(self, optimizer: Optimizer) -> bool:  # noqa: ARG002
        """Return False: no optimizer unscales by itself."""
        return False

    def remember_left_scaled(self, optimizer: Optimizer) -> None:
        """Do nothing: no optimizer unscales by itself."""


def _clip(
    backend: Backend, arrays: Sequence[Array], nonfinite: Array | int, squares: Array, clip: Clip
) -> tuple[Sequence[Array], Array | int, Array]:
    """Clip unscaled arrays, and return them, the count (1 if the norm of finite ones overflows) and the norm before.

    Over a group three host reads and two all-reduces; else none.
    """
    norm, factor, overflows = backend.clip_factor(squares, clip.max_norm)
    if clip.exchange is not None:
        norms = _norms_of_ranks(backend, norm, clip.exchange)
        norm, factor, overflows = clip_factor_of(math.hypot(*norms), clip.max_norm, norm, overflows)
        if math.isfinite(norms[clip.exchange.rank]) and not all(map(math.isfinite, norms)):
            # The ranks whose own norm is not finite report it.
            overflows = array_namespace(overflows).zeros_like(overflows)
    if isinstance(nonfinite, int):
        nonfinite = max(nonfinite, backend.read(array_namespace(overflows).reshape(overflows, (1,)))[0])
    else:
        xp = array_namespace(nonfinite)
        nonfinite = as_0d_array(xp, xp.maximum(nonfinite, overflows))
    return backend.multiply_in_place(arrays, factor), nonfinite, norm


def _norms_of_ranks(backend: Backend, norm: Array, exchange: Exchange) -> list[float]:
    """Return the norm of what each rank holds, so that the CPU computes the same norm of them all on every rank."""
    xp = array_namespace(norm)
    is_normal = xp.logical_and(xp.isfinite(norm), norm >= xp.full_like(norm, validation.SMALLEST_NORMAL))
    kept = as_0d_array(xp, xp.where(is_normal, norm, xp.full_like(norm, 1.0)))
    cast = backend.bits(kept)
    bits = float32_bits(kept) if cast is None else cast
    infinite = xp.where(xp.isfinite(norm), xp.zeros_like(bits), xp.full_like(bits, _INFINITY_BITS))
    sent = as_0d_array(xp, xp.where(is_normal, bits, infinite))
    slots = [_LOWEST_INT32] * exchange.size
    (slots[exchange.rank],) = backend.read(xp.reshape(sent, (1,)))
    return [validation.float32_from_bits(bits) for bits in exchange.maximum(slots, norm)]
