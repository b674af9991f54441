"""Spikes: the windows of a scaler that skips spikes, one for each optimizer; Losses: what ``scale`` was given."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation
from gradscale.core.arithmetic import Kind, as_0d_array, kind_of
from gradscale.core.identity import IdentityMap
from gradscale.core.messages import shown, warn_caller
from gradscale.core.protocols import Array, Optimizer
from gradscale.errors import InvalidTypeError
from gradscale.policies.spikes import SkipSpikes, SpikeState
from gradscale.scaler.claim import Reason

__all__ = ["Judged", "Losses", "SavedWindows", "Spikes", "checked_loss", "checked_windows", "is_loss"]

SavedWindows: TypeAlias = list[dict[str, dict[str, Any]]]
"""By optimizer and quantity, the values of a window and the count of skipped steps."""
_Put: TypeAlias = Callable[[SpikeState, SpikeState], SpikeState]


class Judged(NamedTuple):
    """What an optimizer's window learns in the update."""

    number: int
    """Of the optimizer."""
    values: Array
    """1-d float32, in the order of the rule's ``of``; NaN for what this rank does not have."""


class Losses(NamedTuple):
    """The losses of an iteration, up to the optimizer that is judged by them."""

    total: Any = 0.0
    """A number, or an array of a device."""
    number: int = 0
    is_judged: bool = False
    """Whether an optimizer was judged by them, so that the next loss is another one's."""

    def as_numbers(self) -> Losses:
        """Return them without an array: a host read of one."""
        return self._replace(total=float(self.total))

    def plus(self, loss: Any) -> Losses:
        """Return them with one more; a number if the CPU computes with its library's arrays anyway."""
        if not is_array_api_obj(loss):
            loss = validation.round_to_float32(loss)
        elif (known := registry.backend_for(loss).peek((array_namespace(loss).reshape(loss, ()),))) is not None:
            loss = validation.round_to_float32(known[0])
        else:
            loss = _beside(loss, loss)
        if self.number == 0 or self.is_judged:
            return Losses(loss, 1)
        if is_array_api_obj(loss):
            return Losses(_beside(self.total, loss) + loss, self.number + 1)
        total = self.total + loss
        return Losses(total if is_array_api_obj(total) else validation.round_to_float32(total), self.number + 1)

    def mean(self) -> Any:
        """Return the mean of the losses, rounded to float32 as an array is; None if there are none."""
        if self.number < 2:
            return self.total if self.number else None
        mean = self.total / self.number
        return mean if is_array_api_obj(mean) else validation.round_to_float32(mean)


def is_loss(x: Any) -> bool:
    """Tell whether an output is a loss: a real floating array of one element."""
    return is_array_api_obj(x) and kind_of(x) in (Kind.HALF, Kind.WIDE) and math.prod(x.shape) == 1


def checked_loss(loss: object) -> Array | float:
    """Return a loss that a user has given."""
    if is_loss(loss):
        return loss
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        try:
            return float(loss)
        except OverflowError:
            return math.inf if loss > 0 else -math.inf
    msg = f"loss must be a number, a real floating array of one element, or False for none, got {shown(loss)}"
    raise InvalidTypeError(msg)


# So many optimizers are hardly meant.
_MANY = 64


class Spikes:
    """Judges losses and norms by a rule, with a window for each optimizer, which learns in the update.

    What is called ``put`` returns the state that takes the place of an old one, such as the old arrays with new values.
    """

    def __init__(self, rule: SkipSpikes) -> None:
        self.rule = rule
        # In the order in which optimizers are met.
        self._numbers: IdentityMap[int] = IdentityMap()
        self._windows: list[SpikeState] = []
        self._saved: SavedWindows = []
        self._has_warned = False

    def judge(
        self, optimizer: Optimizer, losses: Losses, norm: Array | None, like: Callable[[], Array]
    ) -> tuple[Array | bool, Judged] | None:
        """Return whether this rank sees a spike, and what is to be learned; None if it has no value.

        A bool if the CPU computes with the arrays anyway, else 0-d without a host read. ``like`` returns an array
        beside which a first window is made.
        """
        found: dict[str, Any] = {"loss": losses.mean(), "norm": norm}
        if all(found[name] is None for name in self.rule.of):
            return None
        number = self._numbers.by_id(id(optimizer))
        if number is None:
            # An optimizer that is made anew in each iteration takes the window of the one before.
            taken = self._numbers.values()
            number = next(index for index in range(len(taken) + 1) if index not in taken)
            if number == len(self._windows):
                self._windows.append(self._restored(number, like()))
                if number == _MANY:
                    warn_caller(
                        f"skip= has begun window {_MANY + 1}, one for each optimizer that is alive: if each iteration "
                        f"makes a new optimizer, none is ever judged; keep one, or delete it before the next is made"
                    )
            self._numbers.put(optimizer, number)
        state = self._windows[number]
        xp = array_namespace(state.values)
        values = [math.nan if found[name] is None else found[name] for name in self.rule.of]
        on_host = registry.backend_for(state.values).peek((state.values[0, 0],)) is not None
        if on_host:
            judged = xp.asarray([float(value) for value in values], dtype=xp.float32)
        else:
            judged = xp.stack([_beside(value, state.values[0, 0]) for value in values])
        are_spikes = self.rule.judge(state, judged)
        known = [are_spikes[index] for index, name in enumerate(self.rule.of) if found[name] is not None]
        if on_host:
            return any(map(bool, known)), Judged(number, judged)
        return as_0d_array(xp, functools.reduce(xp.logical_or, known)), Judged(number, judged)

    def warn_of_nothing(self, losses: Losses, *, has_norm: bool) -> None:
        """Warn, once, if there is nothing to judge in a step of a process that decides alone."""
        are_there = {"loss": losses.number > 0, "norm": has_norm}
        if not self._has_warned and not any(are_there[name] for name in self.rule.of):
            self._has_warned = True
            warn_caller(
                f"skip= judges {' and '.join(self.rule.of)}, and found nothing in this step: for the loss give scale() "
                f"an array of one element, or loss=; for the norm call unscale_() with max_norm="
            )

    def learned(self, judged: Judged, reason: Reason | Array) -> SpikeState:
        """Return the state after a step that ended for an agreed reason: a Reason, or its number as a 0-d int32."""
        old, values = self._windows[judged.number], judged.values
        skipped: Array | bool
        if isinstance(reason, Reason):
            if reason > Reason.SPIKE:
                return old
            skipped = reason is Reason.SPIKE
        else:
            xp = array_namespace(values)
            values = xp.where(reason <= Reason.SPIKE, values, xp.full_like(values, xp.nan))
            skipped = reason == Reason.SPIKE
        return self.rule.learn(old, values, skipped=skipped)

    def keep(self, judged: Judged, state: SpikeState, put: _Put) -> None:
        """Put what was learned in the place of an optimizer's state."""
        self._windows[judged.number] = put(self._windows[judged.number], state)

    def numbers(self) -> SavedWindows:
        """Return the windows as plain values. Two host reads for each."""
        made = [self._numbers_of(state) for state in self._windows]
        return made + copy.deepcopy(self._saved[len(made) :])

    def _numbers_of(self, state: SpikeState) -> dict[str, dict[str, Any]]:
        backend, xp = registry.backend_for(state.values), array_namespace(state.values)
        size = len(self.rule.of)
        counts = backend.read(xp.concat([state.count, state.skipped]))
        flat = xp.reshape(state.values, (-1,))
        bits = backend.bits(flat)
        values = (
            [float(flat[index]) for index in range(flat.shape[0])]
            if bits is None
            else [validation.float32_from_bits(each) for each in backend.read(bits)]
        )
        ends = range(self.rule.window, len(values) + 1, self.rule.window)
        return {
            name: {"values": values[end - count : end], "skipped": skipped}
            for name, end, count, skipped in zip(self.rule.of, ends, counts[:size], counts[size:], strict=True)
        }

    def load(self, saved: SavedWindows, put: _Put) -> None:
        """Go on with saved windows, those of optimizers that have been met in the same arrays."""
        self._saved = saved
        for number, state in enumerate(self._windows):
            self._windows[number] = put(state, self._restored(number, state.values))

    def _restored(self, number: int, like: Array) -> SpikeState:
        """Return the saved window of an optimizer, or an empty one."""
        xp = array_namespace(like)
        empty = self.rule.init(like)
        saved = self._saved[number] if number < len(self._saved) else {}
        if not saved:
            # Nothing that a device would have to be sent.
            return SpikeState(*(xp.stack([field] * len(self.rule.of)) for field in empty))
        rows, counts, runs = [], [], []
        for name in self.rule.of:
            window = saved.get(name, {"values": [], "skipped": 0})
            kept = window["values"][-self.rule.window :]
            rows.append([*kept[:1] * (self.rule.window - len(kept)), *kept] or [0.0] * self.rule.window)
            counts.append(len(kept))
            runs.append(min(window["skipped"], self.rule.patience))
        where = registry.backend_for(like).placement(like)
        return SpikeState(
            *(
                xp.asarray(each, dtype=field.dtype, device=where)
                for each, field in zip((rows, counts, runs), empty, strict=True)
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the rule and numbers, without arrays and optimizers."""
        return _with_windows, (self.rule, self.numbers())


def _with_windows(rule: SkipSpikes, saved: SavedWindows) -> Spikes:
    made = Spikes(rule)
    made._saved = saved
    return made


def checked_windows(saved: object) -> SavedWindows:
    """Return the saved windows of a state dict; InvalidValueError or InvalidTypeError for what is none."""
    if not isinstance(saved, Sequence) or isinstance(saved, (str, bytes)):
        msg = f"spikes must be a list with a mapping for each optimizer, got {shown(saved)}"
        raise InvalidTypeError(msg)
    windows = [validation.mapping(f"spikes[{index}]", each) for index, each in enumerate(saved)]
    return [
        {name: _checked_window(f"spikes[{index}][{name!r}]", window) for name, window in each.items()}
        for index, each in enumerate(windows)
    ]


def _checked_window(name: str, saved: object) -> dict[str, Any]:
    window: Mapping[str, Any] = validation.mapping(name, saved)
    values = window.get("values")
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        msg = f"{name}['values'] must be a list of numbers, got {shown(values)}"
        raise InvalidTypeError(msg)
    most = validation.LARGEST_FLOAT32
    return {
        "values": [validation.number(f"{name}['values']", each, at_least=-most, at_most=most) for each in values],
        "skipped": validation.integer(f"{name}['skipped']", window.get("skipped"), 0, validation.LARGEST_INT32),
    }


def _beside(x: Array | float, like: Array) -> Array:
    """Return a value of one element as a 0-d float32 on the device of another array; no host read."""
    xp = array_namespace(like)
    if not is_array_api_obj(x):
        return xp.full_like(like, x, dtype=xp.float32)
    own = array_namespace(x)
    flat = own.reshape(own.astype(x, own.float32), ())
    return registry.backend_for(like).move(flat, like)
