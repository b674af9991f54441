"""SkipSpikes: the rule that calls a loss or a gradient norm a spike, as pure functions of the values before it."""

from __future__ import annotations

import dataclasses
import math
from typing import Generic, Literal, NamedTuple, TypeAlias, overload

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import validation
from gradscale.core.arithmetic import device, device_kwargs, has_float64, narrowed
from gradscale.core.protocols import Array, ArrayT, ArrayT_co, Indexable, Namespace
from gradscale.errors import InvalidValueError
from gradscale.policies.dynamic import namespace_and_device

STANDARD_FUNCTIONS = ("abs", "max", "sqrt", "sum")
"""Names that SkipSpikes needs of a library besides those of the core."""

_TINY = validation.SMALLEST_NORMAL

Quantity: TypeAlias = Literal["loss", "norm"]


class SpikeState(NamedTuple, Generic[ArrayT_co]):
    """The values of the last steps, and how many steps in a row were skipped."""

    values: ArrayT_co
    """1-d float32, the newest last; the first one in the places that are not filled yet."""
    count: ArrayT_co  # type: ignore[assignment]  # a tuple has a method of this name
    """How many values there are: 0-d int32."""
    skipped: ArrayT_co
    """How many steps in a row were skipped for a spike, counted up to the rule's patience: 0-d int32."""


# As of a ScaleState: for type checkers alone.
SpikeState.__bases__ = (tuple,)


@dataclasses.dataclass(frozen=True)
class SkipSpikes:
    """Skip a step whose loss or gradient norm is a spike: far above those of the steps before.

    Parameters
    ----------
    window : int, default 128
        How many values before it a value is compared with.
    deviations : float, default 6.0
        A spike lies more than so many standard deviations (unbiased) above their mean.
    min_values : int, optional
        How many values there must be before one is judged; default: half a window.
    sides : {"above", "both"}, default "above"
        Whether a value may be too small, too.
    of : {"loss", "norm"} or tuple of these, default ("loss", "norm")
        A scaler judges the losses that ``scale`` multiplies, and the norm that ``unscale_(max_norm=)`` returns.
        ``judge`` and ``learn`` take any values: keep a state for each quantity.
    learns_from_skipped : bool, default False
        Whether the values of skipped steps are compared with, too.
    patience : int, default 10
        After so many steps in a row that were skipped for a spike, their values are learned, so that a new level
        becomes the usual one.
    above : float, optional
        A fixed bound in place of the deviations, as in Megatron-LM: any value above it is a spike, from the first on,
        and ``patience`` does not move it.
    act : bool, default True
        False skips no step for a spike, to try a rule: ``counts()["spikes seen"]`` has their number, and the report of
        such a step, which is not skipped, in ``by`` the rank that saw it. For scalers and guards; JAX's compiled steps
        refuse it, as their verdict has ``spike``.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        For a setting that is out of range or of a wrong type.

    Notes
    -----
    A value of NaN, inf or -inf is a spike on whatever ``sides`` once there are ``min_values``, with ``above`` from the
    first on, and never learned. A step whose gradients are not finite either is an overflow. If all values are equal
    their standard deviation is exactly 0: another equal value is no spike, any greater one is.

    It decides as the rules of OLMo-core and MaxText do (:meth:`olmo_core`, :meth:`maxtext`), but for their faults: in
    both a NaN is learned, so that each of the next 128 steps is skipped, and OLMo-core skips a value that equals all
    values before it, since 0 / 0 is not below 6.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> rule = gradscale.SkipSpikes(window=4)
    >>> state = rule.init(like=np.float32(0))
    >>> for loss in np.float32([2.0, 2.1, 1.9, 9.0, 2.0]):
    ...     is_spike = rule.judge(state, loss)
    ...     state = rule.learn(state, loss, skipped=is_spike)
    ...     print(bool(is_spike))
    False
    False
    False
    True
    False
    """

    window: int = 128
    deviations: float = 6.0
    min_values: int | None = None
    sides: Literal["above", "both"] = "above"
    of: Quantity | tuple[Quantity, ...] = ("loss", "norm")
    learns_from_skipped: bool = False
    patience: int = 10
    above: float | None = None
    act: bool = True

    def __post_init__(self) -> None:
        most = validation.LARGEST_FLOAT32
        window = validation.integer("window", self.window, 2, 2**16)
        least = max(2, window // 2) if self.min_values is None else self.min_values
        checked = {
            "window": window,
            "deviations": validation.number("deviations", self.deviations, above=0.0, at_most=most),
            "min_values": validation.integer("min_values", least, 2, window),
            "sides": validation.choice("sides", self.sides, ("above", "both")),
            "of": validation.choices("of", self.of, ("loss", "norm")),
            "learns_from_skipped": validation.boolean("learns_from_skipped", self.learns_from_skipped),
            "patience": validation.integer("patience", self.patience, 0, validation.LARGEST_INT32),
            "act": validation.boolean("act", self.act),
            "above": None if self.above is None else validation.number("above", self.above, at_most=most),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.above is not None and self.sides == "both":
            msg = f'above= is a bound on one side, got above={self.above!r} with sides="both": leave one of them out'
            raise InvalidValueError(msg)

    @classmethod
    def olmo_core(cls) -> SkipSpikes:
        """Return the rule of OLMo-core's ``SkipStepOptimizer``: both sides, from the 64th value on."""
        return cls(min_values=63, sides="both", learns_from_skipped=True)

    @classmethod
    def maxtext(cls, *, window: int = 128, deviations: float = 6.0) -> SkipSpikes:
        """Return the rule of MaxText's ``skip_step_on_spikes``: above only, from half a window on."""
        least = max(2, validation.integer("window", window, 2, 2**16) // 2 - 1)
        return cls(window=window, deviations=deviations, min_values=least, learns_from_skipped=True)

    @overload
    def init(self, like: Indexable[ArrayT]) -> SpikeState[ArrayT]: ...

    @overload
    def init(self, like: Array = None) -> SpikeState: ...

    def init(self, like: Array = None) -> SpikeState:
        """Return a state without values, in the library and on the device of an array."""
        xp, where = namespace_and_device(like)
        # Separate arrays, since JAX donates no array twice.
        count, skipped = (xp.zeros((), dtype=xp.int32, **device_kwargs(where)) for _ in range(2))
        return SpikeState(xp.zeros((self.window,), dtype=xp.float32, **device_kwargs(where)), count, skipped)

    def _column(self, xp: Namespace, state: SpikeState, value: Array) -> Array:
        """Return a value, float32 with an axis for the window; both it and the state are checked."""
        if state.values.shape[-1] != self.window:
            msg = (
                f"the state must be of a rule with window={self.window}, got {state.values.shape[-1]} values: make a "
                f"state with init(), or a rule with that window"
            )
            raise InvalidValueError(msg)
        if not is_array_api_obj(value):
            raise validation.wrong_type(value, "a value", "an array, 0-d, beside those of the state")
        return narrowed(value, xp.float32)[..., None]

    def judge(self, state: SpikeState[ArrayT], value: Array) -> ArrayT:
        """Return whether a value is a spike beside those of a state, which is left as it is: 0-d bool. No host read.

        ``value`` is 0-d, of any real floating dtype. If all arrays have one more axis in front, several are judged.
        """
        (values, count, _), xp = _arrays_of(state), array_namespace(state.values)
        x = self._column(xp, state, value)
        is_spike: ArrayT
        if self.above is not None:
            is_spike = xp.logical_not(xp.logical_and(xp.isfinite(x), x <= self.above))[..., 0]
            return is_spike
        is_wide = has_float64(xp, device(values))
        # As differences from one of them, equal values have a mean and a deviation of exactly 0, and so do the places
        # that are not filled yet, which hold the first value. What is wide makes the others so.
        dtype = xp.float64 if is_wide else xp.float32
        first, unit = xp.astype(values[..., :1], dtype), None
        apart = values - first
        if not is_wide:
            # Divided by the greatest, they have squares that fit.
            unit = xp.max(xp.abs(apart), axis=-1, keepdims=True) + _TINY
            apart = apart / unit
        count = count[..., None]
        number = xp.astype(count, dtype)
        total = xp.sum(apart, axis=-1, keepdims=True)
        # Adding _TINY changes no number but 0. Rounding may leave the sum below 0.
        mean = total / (number + _TINY)
        squares = xp.abs(xp.sum(apart * apart, axis=-1, keepdims=True) - total * mean)
        # Not divided, since a value may be farther away than float32 has units.
        far = x - first - (mean if unit is None else mean * unit)
        if self.sides == "both":
            far = xp.abs(far)
        deviation = xp.sqrt(squares / (number - 1.0 + _TINY))
        bound = (deviation if unit is None else deviation * unit) * self.deviations
        is_usual = xp.logical_and(_is_finite(x), far <= bound)
        is_spike = xp.logical_and(count >= self.min_values, xp.logical_not(is_usual))[..., 0]
        return is_spike

    def learn(self, state: SpikeState[ArrayT], value: Array, *, skipped: Array | bool) -> SpikeState[ArrayT]:
        """Return the state after a step that was skipped for a spike or not (``skipped``: 0-d bool). No host read.

        Over ranks ``skipped`` is what they agreed on, so that all learn from the same steps. NaN for ``value`` leaves
        the values as they are: give it for a step that was skipped for another reason. A Python bool spares work.
        """
        (values, count, run), xp = _arrays_of(state), array_namespace(state.values)
        x = self._column(xp, state, value)
        count, run = count[..., None], run[..., None]
        is_value = _is_finite(x)
        enters, new_run = is_value, xp.where(is_value, xp.zeros_like(run), run)
        if skipped is not False:
            # For True, an array of it.
            was_skipped = run >= 0 if skipped is True else skipped[..., None]
            is_patient = run < self.patience
            if not self.learns_from_skipped:
                enters = xp.logical_and(is_value, xp.logical_not(xp.logical_and(was_skipped, is_patient)))
            # Counted up to the patience, since only that is compared.
            new_run = xp.where(was_skipped, run + xp.astype(is_patient, xp.int32), new_run)
        entered = xp.where(count == 0, x, xp.concat([values[..., 1:], x], axis=-1))
        more = xp.astype(xp.logical_and(enters, count < self.window), xp.int32)
        return SpikeState(xp.where(enters, entered, values), (count + more)[..., 0], new_run[..., 0])


def _arrays_of(state: SpikeState) -> tuple[Array, Array, Array]:
    return state


def _is_finite(x: Array) -> Array:
    """Tell whether float32 are finite; in some libraries isfinite is more operations."""
    return array_namespace(x).abs(x) <= validation.LARGEST_FLOAT32


class Window(NamedTuple):
    """A state of numbers of the host: the values of the last steps, and how many steps in a row were skipped."""

    values: tuple[float, ...] = ()
    """float32, the newest last; at first fewer than the rule's window."""
    skipped: int = 0


def judge_number(rule: SkipSpikes, window: Window, x: float) -> bool:
    """Return whether a float32 is a spike, as ``rule.judge`` does of arrays where these have float64."""
    values = window.values
    if rule.above is not None:
        return not (math.isfinite(x) and x <= rule.above)
    is_judged = len(values) >= (rule.min_values or 0)
    if not is_judged or not math.isfinite(x):
        return is_judged
    first, number = values[0], len(values)
    apart = [value - first for value in values]
    total = math.fsum(apart)
    mean = total / number
    squares = abs(math.fsum(value * value for value in apart) - total * mean)
    far = x - first - mean
    return (abs(far) if rule.sides == "both" else far) > math.sqrt(squares / (number - 1)) * rule.deviations


def learn_number(rule: SkipSpikes, window: Window, x: float, *, skipped: bool) -> Window:
    """Return a window after a step, as ``rule.learn`` does of arrays."""
    values, run = window
    is_value, is_patient = math.isfinite(x), run < rule.patience
    if is_value and (not skipped or rule.learns_from_skipped or not is_patient):
        values = (*values, x)[-rule.window :]
    return Window(values, run + is_patient if skipped else 0 if is_value else run)


def empty_windows(rule: SkipSpikes, like: Array) -> SpikeState:
    """Return states without values, a row for each quantity that a rule judges."""
    return SpikeState(*(array_namespace(like).stack([field] * len(rule.of)) for field in rule.init(like)))
