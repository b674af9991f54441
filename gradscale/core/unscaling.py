"""Gradients: an optimizer's, collected, unscaled, clipped and judged, by the adapter of their library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from array_api_compat import array_namespace

from gradscale.core import validation
from gradscale.core.arithmetic import as_0d_array, clip_factor_of, float32_bits
from gradscale.core.gradients import collect_gradients
from gradscale.core.identity import IdentityMap
from gradscale.core.leaves import first_floating, floating_leaves
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from gradscale.core.backend import Backend

_INFINITY_BITS = 0x7F800000

Listed: TypeAlias = IdentityMap[Any]
"""The parameters of optimizers as a framework lists them, kept from call to call."""


class Home(Protocol):
    """Where the state lives."""

    backend: Backend
    """The adapter of the state's library."""
    home: Any
    """Its namespace."""

    def floor(self, state: ScaleState) -> float:
        """Return the smallest value that the scale of a state can have, as far as the host knows without a read."""


class Exchanging(Protocol):
    """The group whose ranks hold parts of the gradients."""

    rank: int
    size: int

    def announce(self, like: Array) -> None:
        """Tell the other ranks what comes."""

    def numbers(self, number: int, like: Array) -> list[int]:
        """Return the int32 of each rank."""


class Request(NamedTuple):
    """What is asked for besides unscaling."""

    max_norm: float | None = None
    """The largest 2-norm of all gradients together, to be clipped to."""
    exchange: Exchanging | None = None
    """Over the group whose ranks hold parts of the gradients; None if this rank holds them all."""
    judges_only: bool = False
    """Whether gradients are left as they are, to the optimizer to unscale if they ``are_scaled``."""
    are_scaled: bool = True


class Found(NamedTuple):
    """The findings of one rank in an optimizer's gradients."""

    nonfinite: Array | int
    """How many are not finite; a 0-d array if the host would have to wait, which may say 1 for any number."""
    norm: Array | None = None
    """Their norm before clipping, 0-d float32."""
    has_gradients: bool = True
    """Whether there is any."""
    is_scaled: bool = False
    """Whether they were only judged, and are left to the optimizer to unscale."""
    flags: Mapping[Any, Array] | None = None
    """By device whether any is not finite, for frameworks that look at it."""


class Collected(Protocol):
    """An optimizer's gradients on their way; kept by nobody."""

    is_touched: bool
    """Whether some of them may have been overwritten, so that they cannot be unscaled again."""

    @property
    def like(self) -> Array | None:
        """An array that says where the state belongs; None without any."""

    @property
    def groups(self) -> Sequence[Collectives]:
        """The groups that the gradients themselves are spread over, for a scaler that was given none."""

    def unscale(self, live: Home, state: ScaleState) -> Found:
        """Divide them by the scale of a state, clip and judge them; a refusal modifies none."""

    def clip(self, one: Callable[[Array], tuple[Home, ScaleState]]) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; ``one`` gives a state of scale 1."""


class Gradients:
    """Gradients of arrays of the standard, and how unscaled ones go back to the optimizer."""

    # Arrays of the standard are this process's own.
    groups: Sequence[Collectives] = ()
    __slots__ = ("_assign", "_leaves", "_master_dtype", "_request", "_what", "is_touched")

    def __init__(self, optimizer: Optimizer, listed: Listed, request: Request) -> None:
        self._leaves, self._assign = collect_gradients(optimizer, listed)
        self._what = f"gradient of {type(optimizer).__name__}"
        self._master_dtype = getattr(optimizer, "master_dtype", None)
        self._request = request
        self.is_touched = False

    @property
    def like(self) -> Array | None:
        """The first floating array, which says where the state belongs."""
        return first_floating(self._leaves)

    def unscale(self, live: Home, state: ScaleState) -> Found:
        """Divide them by the scale of a state, clip and judge them; a refusal modifies none.

        No host read but for a norm over ranks.
        """
        backend = live.backend
        backend.forbid_tracing("unscale_()")
        chosen = floating_leaves(self._leaves, live.home, what=self._what, takes_integers=False)
        max_norm, dtype, norm = self._request.max_norm, self._master_dtype, None
        out = chosen if dtype is None else None
        self.is_touched = True
        try:
            if max_norm is None:
                unscaled, nonfinite = backend.unscale(chosen, state, dtype=dtype, out=out)
            else:
                unscaled, nonfinite, squares = backend.unscale_with_squares(chosen, state, dtype=dtype, out=out)
        except (InvalidTypeError, InvalidValueError):
            self.is_touched = False
            raise
        if max_norm is not None:
            unscaled, nonfinite, norm = _clip(backend, unscaled, nonfinite, squares, max_norm, self._request.exchange)
        known = backend.peek((nonfinite,))
        if unscaled is not chosen:
            self._assign({id(old): new for old, new in zip(chosen, unscaled, strict=True)})
        return Found(nonfinite if known is None else known[0], norm, len(chosen) > 0)

    def clip(self, one: Callable[[Array], tuple[Home, ScaleState]]) -> Array | None:
        """Clip gradients that are not scaled, and return their norm; None without any.

        ``one`` returns a state of scale 1 beside an array.
        """
        like = self.like
        if like is None:
            return None
        self._master_dtype = None
        return self.unscale(*one(like)).norm


def _clip(
    backend: Backend,
    arrays: Sequence[Array],
    nonfinite: Array,
    squares: Array,
    max_norm: float,
    exchange: Exchanging | None,
) -> tuple[Sequence[Array], Array, Array]:
    """Clip unscaled arrays, and return them, the count (1 if the norm of finite ones overflows) and the norm before.

    Over a group two host reads, and one more for each all-reduce, of which one has the norms of 8 ranks; else none.
    """
    norm, factor, overflows = backend.clip_factor(squares, max_norm)
    if exchange is not None:
        norms = _norms_of_ranks(backend, norm, exchange)
        norm, factor, overflows = clip_factor_of(math.hypot(*norms), max_norm, norm, overflows)
        if math.isfinite(norms[exchange.rank]) and not all(map(math.isfinite, norms)):
            # The ranks whose own norm is not finite report it.
            overflows = array_namespace(overflows).zeros_like(overflows)
    xp = array_namespace(nonfinite)
    return backend.multiply_in_place(arrays, factor), as_0d_array(xp, xp.maximum(nonfinite, overflows)), norm


def _norms_of_ranks(backend: Backend, norm: Array, exchange: Exchanging) -> list[float]:
    """Return the norm of what each rank holds, so that the CPU computes the same norm of them all on every rank."""
    xp = array_namespace(norm)
    is_normal = xp.logical_and(xp.isfinite(norm), norm >= xp.full_like(norm, validation.SMALLEST_NORMAL))
    kept = as_0d_array(xp, xp.where(is_normal, norm, xp.full_like(norm, 1.0)))
    cast = backend.bits(kept)
    bits = float32_bits(kept) if cast is None else cast
    infinite = xp.where(xp.isfinite(norm), xp.zeros_like(bits), xp.full_like(bits, _INFINITY_BITS))
    sent = as_0d_array(xp, xp.where(is_normal, bits, infinite))
    (number,) = backend.read(xp.reshape(sent, (1,)))
    return [validation.float32_from_bits(bits) for bits in exchange.numbers(number, norm)]
