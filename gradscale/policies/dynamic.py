"""The rule that adapts the scale, as pure functions of a state: DynamicScale and StaticScale.

All arithmetic is on 0-d arrays of the array API standard, without a host read, and runs under a tracing compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

from array_api_compat import array_namespace, is_array_api_obj, to_device

from gradscale.core import registry, validation
from gradscale.core.arithmetic import as_0d_array, device, device_kwargs, has_float64, narrowed
from gradscale.core.protocols import Array, ArrayT, Indexable, Namespace, Numbers, ScaleState
from gradscale.errors import InvalidTypeError, InvalidValueError, short_repr

AtMin = Literal["clamp", "hold", "raise"]
GrowthAfter = Literal["interval", "first_interval_plus_one", "interval_plus_one"]
Refill = Literal["clean_step", "growth", "backoff"]

_Parameters = ParamSpec("_Parameters")
_State = TypeVar("_State", bound=ScaleState)


def verdict_by_name(update: Callable[_Parameters, _State]) -> Callable[_Parameters, _State]:
    """Let a policy's ``update`` raise for a verdict without its name: the opposite flag would train on silently."""

    @functools.wraps(update)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _State:
        if len(args) > 2 or "nonfinite" not in kwargs:
            value = f"{short_repr(args[2])} without a name" if len(args) > 2 else "none"
            msg = (
                f"update takes its verdict by name, got {value}; call update(state, nonfinite=...) with the number of "
                f"gradients that are not finite, 0 for a clean step (jmp's adjust takes the opposite: whether all are)"
            )
            raise InvalidTypeError(msg)
        return update(*args, **kwargs)

    return checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """Back the scale off on an overflow, and let it grow after a run of clean steps.

    The defaults are torch.amp's rule. The scale is never inf, NaN or 0: growth that float32 cannot hold does not
    happen, and backoff stops at ``min_scale``. It stays a power of two when its factors and bounds are; with others
    JAX without ``jax_enable_x64`` rounds in another way than NumPy, so that ranks of both cannot agree.

    Parameters
    ----------
    init_scale : float, default 65536.0
        The first scale, within ``min_scale`` and ``max_scale``.
    growth_factor : float, default 2.0
        Multiplies the scale at growth; above 1.
    backoff_factor : float, default 0.5
        Multiplies the scale at backoff; between 0 and 1, exclusive.
    growth_interval : int, default 2000
        N, the run of clean steps that growth needs.
    growth_after : {"interval", "first_interval_plus_one", "interval_plus_one"}, default "interval"
        On which clean step of a run growth happens: the N-th; the N+1-th of a run that begins at the start or after an
        overflow and N later for each further growth (DeepSpeed); the N+1-th always (flax).
    hysteresis : int, default 1
        Which overflow since the last refill is the first to back off; the ones before it are tolerated, but still
        skip their step and restart the run.
    hysteresis_refill : tuple of {"clean_step", "growth", "backoff"}, default ("clean_step",)
        The events that make the tolerated overflows available again: a clean step, so that only consecutive overflows
        count (apex, NeMo); a growth (Megatron, ColossalAI, DeepSpeed); a backoff (Paddle: a clean step or a backoff).
    tolerance : float, optional
        Instead of hysteresis: back off only when the overflows since the last backoff are at least this fraction of
        the steps since the scale last changed (fairseq). Between 0 and 1.
    min_scale : float, default 2**-126
        The scale is never below; the default is the smallest normal float32.
    max_scale : float, optional
        The scale is never above. Default: none but float32's range, where growth stops at the last finite value.
    at_min : {"clamp", "hold", "raise"}, default "clamp"
        A backoff that would pass below ``min_scale`` goes to ``min_scale``; leaves the scale; or goes to
        ``min_scale``, and the scaler raises ScaleUnderflowError for the next overflow that must back off (DeepSpeed,
        fairseq). A pure function cannot raise on a value: functional loops read :meth:`at_min_scale`.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For an argument out of range or of a wrong type, with its name and value.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> policy = gradscale.DynamicScale(init_scale=2.0**16, hysteresis=2)
    >>> state = policy.init(like=np.float32(0.0))
    >>> for nonfinite in (1, 0, 3, 1):  # of four steps, the first and the last two overflow
    ...     state = policy.update(state, nonfinite=np.int32(nonfinite))
    ...     print(float(state.scale))
    65536.0
    65536.0
    65536.0
    32768.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = validation.SMALLEST_NORMAL
    max_scale: float | None = None
    at_min: AtMin = "clamp"
    growth_after: GrowthAfter = "interval"
    hysteresis: int = 1
    hysteresis_refill: tuple[Refill, ...] = ("clean_step",)
    tolerance: float | None = None

    def __post_init__(self) -> None:
        largest, most = validation.LARGEST_FLOAT32, validation.LARGEST_INT32
        growth_after = validation.choice("growth_after", self.growth_after, get_args(GrowthAfter))
        # The tracker counts one step more where growth comes one step later.
        longest = most - (growth_after != "interval")
        checked: dict[str, object] = {
            "growth_after": growth_after,
            "hysteresis": validation.integer("hysteresis", self.hysteresis, 1, most),
            "hysteresis_refill": validation.choices("hysteresis_refill", self.hysteresis_refill, get_args(Refill)),
            "growth_interval": validation.integer("growth_interval", self.growth_interval, 1, longest),
            "init_scale": validation.scale("init_scale", self.init_scale),
            # A larger factor would overflow in the product that is discarded where the scale does not grow.
            "growth_factor": validation.number("growth_factor", self.growth_factor, above=1.0, at_most=largest),
            "backoff_factor": validation.number("backoff_factor", self.backoff_factor, above=0.0, below=1.0),
            "min_scale": validation.scale("min_scale", self.min_scale),
            "at_min": validation.choice("at_min", self.at_min, get_args(AtMin)),
            "max_scale": None if self.max_scale is None else validation.scale("max_scale", self.max_scale),
        }
        if self.tolerance is not None:
            checked["tolerance"] = validation.number("tolerance", self.tolerance, at_least=0.0, at_most=1.0)
            if checked["hysteresis"] != 1:
                msg = f"give hysteresis= or tolerance=, not both, got {self.hysteresis!r} and {self.tolerance!r}"
                raise InvalidValueError(msg)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not self.min_scale <= self.init_scale <= self.largest_scale:
            msg = (
                f"init_scale must lie within min_scale and max_scale, got init_scale={self.init_scale!r}, "
                f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r}"
            )
            raise InvalidValueError(msg)

    @property
    def largest_scale(self) -> float:
        """``max_scale``, or float32's own largest."""
        return validation.LARGEST_FLOAT32 if self.max_scale is None else self.max_scale

    @property
    def largest_trackers(self) -> tuple[int, int, int]:
        """The largest growth, overflow and rescale tracker that ``update`` makes of a fresh state."""
        if self.tolerance is not None:
            return self.growth_interval, validation.LARGEST_INT32, validation.LARGEST_INT32
        return self.growth_interval, 0 if self.hysteresis == 1 else self.hysteresis, 0

    @overload
    def init(self, like: Indexable[ArrayT]) -> ScaleState[ArrayT]: ...

    @overload
    def init(self, like: Array = None) -> ScaleState: ...

    def init(self, like: Array = None) -> ScaleState:
        """Return the first state, in the library and on the device of ``like``: ``init_scale``, trackers of 0."""
        return _first_state(self.init_scale, like)

    @verdict_by_name
    def update(self, state: ScaleState[ArrayT], *, nonfinite: Array) -> ScaleState[ArrayT]:
        """Return the state after a step, in new arrays: backed off, grown, or with its trackers advanced. No host read.

        Parameters
        ----------
        state : ScaleState
            The state that the step's gradients were scaled and unscaled with; unchanged.
        nonfinite : array
            0-d and of any numeric or bool dtype; anything but zero is an overflow. On any device of the library.
        """
        xp, overflow = array_namespace(state.scale), overflow_flag(nonfinite, state.scale)
        clean = xp.logical_not(overflow)
        threshold = self.growth_interval + (self.growth_after != "interval")
        run = next_count(xp, state.growth_tracker, threshold)
        grow = xp.logical_and(clean, run >= xp.full_like(run, threshold))
        restart = xp.full_like(run, 1 if self.growth_after == "first_interval_plus_one" else 0)
        zero = xp.zeros_like(run)
        growth_tracker = xp.where(overflow, zero, xp.where(grow, restart, run))

        backoff = xp.logical_and(overflow, self._backoff_due(xp, state))
        overflow_tracker, rescale_tracker = self._next_trackers(xp, state, overflow, grow, backoff)
        kept = xp.where(grow, self.raised_scale(xp, state.scale), state.scale)
        scale = xp.where(backoff, self.lowered_scale(xp, state.scale), kept)
        return new_state(xp, scale, growth_tracker, overflow_tracker, rescale_tracker)

    def clamp(self, scale: float) -> float:
        """Return the nearest scale in ``[min_scale, max_scale]``."""
        return min(max(scale, self.min_scale), self.largest_scale)

    def backoff(self, state: ScaleState[ArrayT]) -> ScaleState[ArrayT]:
        """Return the state with the scale backed off once, even if the overflow is tolerated, and trackers of 0."""
        xp = array_namespace(state.scale)
        zeros = [xp.zeros_like(tracker) for tracker in state[1:]]
        return new_state(xp, self.lowered_scale(xp, state.scale), *zeros)

    def at_min_scale(self, state: ScaleState) -> Array | None:
        """Return a 0-d bool: would an overflow now have to be raised; None without ``at_min="raise"``. No host read."""
        if self.at_min != "raise":
            return None
        xp = array_namespace(state.scale)
        at_min = state.scale <= xp.full_like(state.scale, self.min_scale)
        return as_0d_array(xp, xp.logical_and(at_min, self._backoff_due(xp, state)))

    def lowered_scale(self, xp: ModuleType, scale: Array) -> Array:
        """Return a scale backed off once, as ``at_min`` says. No host read."""
        lowered = times(xp, scale, self.backoff_factor)
        floor = xp.full_like(scale, self.min_scale)
        if self.at_min == "hold":
            return xp.where(lowered < floor, scale, lowered)
        return xp.maximum(lowered, floor)

    def raised_scale(self, xp: ModuleType, scale: Array) -> Array:
        """Return a scale that has grown once, or as far as float32 and ``max_scale`` allow."""
        # Chosen before the product, so that no library has an overflow to warn of.
        fits = scale <= xp.full_like(scale, validation.largest_with_finite_product(self.growth_factor))
        product = times(xp, xp.where(fits, scale, xp.full_like(scale, 1.0)), self.growth_factor)
        if self.max_scale is None:
            return xp.where(fits, product, scale)
        largest = xp.full_like(scale, self.max_scale)
        return xp.where(fits, xp.minimum(product, largest), largest)

    def _backoff_due(self, xp: ModuleType, state: ScaleState) -> Array:
        """Return a 0-d bool: would an overflow now be one too many, or reach the tolerated fraction of the steps."""
        if self.tolerance is not None:
            counts = [next_count(xp, tracker, validation.LARGEST_INT32) for tracker in state[2:]]
            overflows, steps = (xp.astype(count, xp.float32) for count in counts)
            return as_0d_array(xp, overflows / steps >= xp.full_like(steps, self.tolerance))
        overflows = next_count(xp, state.overflow_tracker, self.hysteresis)
        return overflows >= xp.full_like(overflows, self.hysteresis)

    def _next_trackers(
        self, xp: ModuleType, state: ScaleState, overflow: Array, grow: Array, backoff: Array
    ) -> tuple[Array, Array]:
        if self.tolerance is None and self.hysteresis == 1:
            return state.overflow_tracker, state.rescale_tracker
        limit = self.hysteresis if self.tolerance is None else validation.LARGEST_INT32
        overflows = next_count(xp, state.overflow_tracker, limit)
        counted = xp.where(overflow, overflows, state.overflow_tracker)
        if self.tolerance is not None:
            steps = next_count(xp, state.rescale_tracker, limit)
            zero = xp.zeros_like(steps)
            return xp.where(backoff, zero, counted), xp.where(xp.logical_or(backoff, grow), zero, steps)
        events = {"clean_step": xp.logical_not(overflow), "growth": grow, "backoff": backoff}
        for name in self.hysteresis_refill:
            counted = xp.where(events[name], xp.zeros_like(counted), counted)
        return counted, state.rescale_tracker


@dataclasses.dataclass(frozen=True)
class StaticScale:
    """Keep one scale for good; steps with non-finite gradients are still skipped.

    Parameters
    ----------
    init_scale : float, default 65536.0
        The scale; finite, and a normal float32 above zero.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> policy = gradscale.StaticScale(128.0)
    >>> state = policy.init(like=np.float32(0.0))
    >>> float(policy.update(state, nonfinite=np.int32(1)).scale)
    128.0
    """

    init_scale: float = 2.0**16

    def __post_init__(self) -> None:
        object.__setattr__(self, "init_scale", validation.scale("init_scale", self.init_scale))

    @overload
    def init(self, like: Indexable[ArrayT]) -> ScaleState[ArrayT]: ...

    @overload
    def init(self, like: Array = None) -> ScaleState: ...

    def init(self, like: Array = None) -> ScaleState:
        """Return the state, in the library and on the device of ``like``."""
        return _first_state(self.init_scale, like)

    def clamp(self, scale: float) -> float:
        """Return a scale as it is: any valid one may be set by hand."""
        return scale

    @verdict_by_name
    def update(self, state: ScaleState[ArrayT], *, nonfinite: Array) -> ScaleState[ArrayT]:  # noqa: ARG002
        """Return the state as it is."""
        return state

    def backoff(self, state: ScaleState[ArrayT]) -> ScaleState[ArrayT]:
        """Return the state as it is."""
        return state

    def at_min_scale(self, state: ScaleState) -> Array | None:  # noqa: ARG002
        """Return None: it never raises."""
        return None


def next_numbers(policy: object, state: Sequence[Any], nonfinite: int) -> Numbers | None:
    """Return the numbers of the state after a step, bit for bit; None for a policy whose rule is for arrays alone."""
    if type(policy) is StaticScale:
        return Numbers(*state)
    # A subclass may have another rule.
    if type(policy) is not DynamicScale:
        return None
    rounded = validation.round_to_float32
    scale, growth_tracker, overflow_tracker, rescale_tracker = state
    overflow = nonfinite != 0
    threshold = policy.growth_interval + (policy.growth_after != "interval")
    run = min(growth_tracker, threshold - 1) + 1
    grow = not overflow and run >= threshold
    restart = 1 if policy.growth_after == "first_interval_plus_one" else 0
    backoff, counted, steps = overflow, overflow_tracker, rescale_tracker
    if policy.tolerance is not None or policy.hysteresis > 1:
        limit = policy.hysteresis if policy.tolerance is None else validation.LARGEST_INT32
        overflows = min(overflow_tracker, limit - 1) + 1
        counted = overflows if overflow else overflow_tracker
        if policy.tolerance is None:
            backoff = overflow and overflows >= limit
            events = {"clean_step": not overflow, "growth": grow, "backoff": backoff}
            counted = 0 if any(map(events.__getitem__, policy.hysteresis_refill)) else counted
        else:
            steps = min(rescale_tracker, limit - 1) + 1
            backoff = overflow and rounded(rounded(overflows) / rounded(steps)) >= rounded(policy.tolerance)
            counted, steps = 0 if backoff else counted, 0 if backoff or grow else steps
    if backoff:
        lowered, floor = rounded(scale * policy.backoff_factor), rounded(policy.min_scale)
        scale = max(lowered, floor) if policy.at_min != "hold" or lowered >= floor else scale
    elif grow:
        largest = scale if policy.max_scale is None else rounded(policy.max_scale)
        fits = scale <= rounded(validation.largest_with_finite_product(policy.growth_factor))
        scale = rounded(scale * policy.growth_factor) if fits else largest
        scale = scale if policy.max_scale is None else min(scale, largest)
    return Numbers(scale, 0 if overflow else restart if grow else run, counted, steps)


def namespace_and_device(like: Array) -> tuple[Namespace, object]:
    """Return the namespace and the ``device=`` for a state beside an array; InvalidTypeError for anything else."""
    if not is_array_api_obj(like):
        expected = "an array, beside which the state is made"
        raise validation.wrong_type(like, "like", expected, ": such as init(params['w'])")
    return array_namespace(like), registry.backend_for(like).placement(like)


def _first_state(scale: float, like: Array) -> ScaleState:
    xp, where = namespace_and_device(like)
    # Under CuPy, zeros and full leave out the device.
    trackers = [xp.asarray(0, dtype=xp.int32, **device_kwargs(where)) for _ in ScaleState._fields[1:]]
    return ScaleState(xp.asarray(scale, dtype=xp.float32, **device_kwargs(where)), *trackers)


def new_state(xp: ModuleType, *fields: Array) -> ScaleState:
    """Return a state of fields that may be scalars."""
    # NumPy's operators return scalars for 0-d arrays.
    return ScaleState(*(as_0d_array(xp, field) for field in fields))


def overflow_flag(nonfinite: Array, like: Array) -> Array:
    """Return a 0-d bool on the device of ``like``: is ``nonfinite`` anything but zero."""
    if not is_array_api_obj(nonfinite) or nonfinite.shape != ():
        msg = f"nonfinite must be a 0-d array, such as unscale returns, got {short_repr(nonfinite)}"
        if isinstance(nonfinite, int):
            msg += f"; wrap it, such as np.int32({nonfinite})"
        raise InvalidTypeError(msg)
    xp = array_namespace(nonfinite)
    flag = nonfinite if xp.isdtype(nonfinite.dtype, "bool") else nonfinite != xp.zeros_like(nonfinite)
    placement = registry.backend_for(like).placement
    where = placement(like)
    return flag if where is None or placement(flag) == where else to_device(flag, where)


def next_count(xp: ModuleType, tracker: Array, limit: int) -> Array:
    """Return a tracker plus one, which stays at ``limit`` so that no counter wraps."""
    return xp.minimum(tracker, xp.full_like(tracker, limit - 1)) + xp.full_like(tracker, 1)


def times(xp: ModuleType, scale: Array, factor: float) -> Array:
    """Return ``scale * factor`` rounded once to float32, as float32(float64(scale) * factor)."""
    if validation.is_power_of_two(factor) or not has_float64(xp, device(scale)):
        return scale * xp.full_like(scale, factor)
    wide = xp.astype(scale, xp.float64)
    return narrowed(wide * xp.full_like(wide, factor), xp.float32)
