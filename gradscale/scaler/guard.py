"""Guard: tells whether a step's loss or gradient norm is a spike beside those before; Losses: those of an iteration."""

from __future__ import annotations

import functools
import gc
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation
from gradscale.core.arithmetic import Kind, as_0d_array, device, device_kwargs, kind_of, narrowed, nonfinite_flag
from gradscale.core.identity import IdentityMap, assign_position
from gradscale.core.protocols import Array, Optimizer
from gradscale.errors import InvalidTypeError, short_repr, warn_caller
from gradscale.policies.spikes import SkipSpikes, SpikeState, Window, empty_windows, judge_number, learn_number
from gradscale.scaler.claim import Reason

SavedWindows: TypeAlias = Sequence[Mapping[str, Window]]
"""The windows of each optimizer by quantity, in the order in which they were first judged."""
_Write: TypeAlias = Callable[[SpikeState, SpikeState], SpikeState]

# So many optimizers are hardly meant.
_MANY = 64


class Losses(NamedTuple):
    """The losses of an iteration, up to the optimizer that is judged by them; each is rounded to float32."""

    total: Array | float = 0.0
    """A number if the CPU computes with its library's arrays anyway, else 0-d."""
    number: int = 0
    is_used: bool = False
    """Whether an optimizer was judged by them, so that the next loss is another one's."""
    judged: frozenset[int] = frozenset()
    """The ``id()`` of each optimizer that was judged by them in an iteration before, and is not again."""

    def plus(self, loss: Array | float) -> Losses:
        """Return them with one more."""
        loss = value_of(loss)
        if self.number == 0 or self.is_used:
            return Losses(loss, 1)
        total = beside(self.total, loss) if is_array_api_obj(loss) else self.total
        return Losses(_rounded(total + loss), self.number + 1)

    def of_others(self, optimizers: Iterable[int]) -> Losses:
        """Return them for other optimizers than those with an ``id()`` among these."""
        return self._replace(is_used=True, judged=self.judged.union(optimizers)) if self.number else Losses()

    def mean(self) -> Array | float | None:
        """Return their mean; None if there are none."""
        if self.number < 2:
            return self.total if self.number else None
        # On GPUs torch divides by a number by multiplying with its reciprocal, which is rounded.
        number = beside(self.number, self.total) if is_array_api_obj(self.total) else self.number
        return _rounded(self.total / number)


def value_of(x: Array | float) -> Array | float:
    """Return a number or an array of one element in float32: a number if the host has it, else 0-d."""
    if is_array_api_obj(x):
        numbers = registry.backend_for(x).peek((array_namespace(x).reshape(x, ()),))
        x = x if numbers is None else numbers[0]
    return beside(x, x) if is_array_api_obj(x) else validation.round_to_float32(x)


def is_loss(x: Array) -> bool:
    """Tell whether an output is a loss: a real floating array of one element."""
    return is_array_api_obj(x) and kind_of(x) in (Kind.HALF, Kind.WIDE) and math.prod(x.shape) == 1


def checked_loss(loss: object, expected: str) -> Array | float:
    """Return the loss of a user; InvalidTypeError for another thing than is ``expected``."""
    if is_loss(loss):
        return loss
    if not isinstance(loss, (int, float)) or isinstance(loss, bool):
        msg = f"{expected}, got {short_repr(loss)}"
        raise InvalidTypeError(msg)
    try:
        return float(loss)
    except OverflowError:
        return math.inf if loss > 0 else -math.inf


class Observation(NamedTuple):
    """The values that a step was judged by, which the window of its optimizer learns."""

    window: int
    """Position of the window."""
    values: Array | Sequence[float]
    """float32, in the order of the rule's ``of``; NaN for a value that this rank does not have. Numbers of the host for
    a window of numbers, else 1-d."""
    reason: Reason | Array
    """SPIKE or STEPPED; its number as a 0-d int32 if the CPU would have to wait for it."""
    is_loss: bool = False
    """Whether the loss is a spike, or if the CPU would have to wait, nothing but the loss is judged."""


def guard_for(skip: object) -> Guard | None:
    """Return a guard that judges by a rule; None without a rule."""
    if skip is not None and not isinstance(skip, SkipSpikes):
        raise validation.wrong_type(skip, "skip", "a SkipSpikes, such as gradscale.SkipSpikes(deviations=6.0)")
    return None if skip is None else Guard(skip)


class Guard:
    """Judges losses and norms by a rule, with a window for each optimizer.

    ``has_judged``: whether there ever was a value, on any rank.

    Pickles and copies hold the windows as numbers; optimizers get them in the order in which they are judged.
    """

    has_judged = False

    def __init__(self, rule: SkipSpikes, saved: SavedWindows = ()) -> None:
        self.rule = rule
        # Of each optimizer those of all quantities: numbers where the host has them in time, or arrays beside a state.
        self._windows: list[list[Window] | SpikeState] = []
        # By position; optimizers have got as many as there are ``_windows``.
        self._saved = [*map(self._trimmed, saved)]
        # Of each optimizer's window.
        self._positions: IdentityMap[int] = IdentityMap()
        # By the position of a window, what it has learned last, and what it has become.
        self._learned: dict[int, tuple[Observation, list[Window] | SpikeState]] = {}

    def judge(
        self, optimizer: Optimizer, loss: Array | float | None, norm: Array | float | None, like: Array
    ) -> Observation | None:
        """Judge a step on this rank; None if there is nothing to judge. Arrays need a window beside ``like``."""
        quantities = [{"loss": loss, "norm": norm}[name] for name in self.rule.of]
        if all(value is None for value in quantities):
            return None
        position, numbers = self._position_of(optimizer), [math.nan if value is None else value for value in quantities]
        if not any(map(is_array_api_obj, numbers)):
            windows = self._windows[position] = self._numbers_of(self._windows[position])
            pairs = zip(windows, quantities, strict=True)
            spikes = [x is not None and judge_number(self.rule, window, x) for window, x in pairs]
            is_loss = dict(zip(self.rule.of, spikes, strict=True)).get("loss", False)
            return Observation(position, numbers, Reason.SPIKE if any(spikes) else Reason.STEPPED, is_loss)
        state = self._windows[position] = self._arrays_of(self._windows[position], like)
        xp = array_namespace(state.values)
        values = xp.stack([beside(value, state.values[0, 0]) for value in numbers])
        judged = self.rule.judge(state, values)
        flags = [judged[index] for index, value in enumerate(quantities) if value is not None]
        is_spike = xp.astype(as_0d_array(xp, functools.reduce(xp.logical_or, flags)), xp.int32)
        return Observation(position, values, is_spike, norm is None or self.rule.of == ("loss",))

    def learn(self, observation: Observation, reason: Reason | Array, write: _Write) -> None:
        """Let a window learn from a step, by the reason that the ranks agreed on or its number as a 0-d int32."""
        if isinstance(reason, Reason) and reason > Reason.SPIKE:
            return
        old, values = self._windows[observation.window], observation.values
        last, learned = self._learned.get(observation.window, (None, old))
        if last is not observation:
            if not isinstance(old, SpikeState):
                pairs = zip(old, values, strict=True)
                learned = [learn_number(self.rule, *one, skipped=reason is Reason.SPIKE) for one in pairs]
            else:
                if not isinstance(reason, Reason):
                    xp = array_namespace(values)
                    values = xp.where(reason <= Reason.SPIKE, values, xp.full_like(values, xp.nan))
                learned = self.rule.learn(old, values, skipped=reason == Reason.SPIKE)
            self._learned[observation.window] = observation, learned
        if isinstance(old, SpikeState) and isinstance(learned, SpikeState):
            learned = write(old, learned)
        self._windows[observation.window] = learned
        if observation.window == _MANY and last is None:
            # Here, where it may be an error: the other ranks wait for nothing.
            warn_caller(
                f"skip= has begun window {_MANY + 1}, one for each optimizer that is alive: if each iteration makes a "
                f"new optimizer, none is ever judged; keep one, or delete it before the next is made"
            )

    def _position_of(self, optimizer: Optimizer) -> int:
        """Return the position of an optimizer's window; a new optimizer takes over one whose owner is gone."""
        position = self._positions.get(id(optimizer))
        if position is None:
            if 0 < len(self._windows) == len(self._positions):
                # One that is in a reference cycle is there until it is collected, on some ranks sooner than on others.
                gc.collect()
            position = assign_position(self._positions, optimizer)
        if position == len(self._windows):
            self._windows.append(self._saved[position] if position < len(self._saved) else self._trimmed({}))
        return position

    def numbers(self) -> SavedWindows:
        """Return the windows as numbers. Two host reads for each that is on a device."""
        windows = [*map(self._numbers_of, self._windows), *self._saved[len(self._windows) :]]
        return [dict(zip(self.rule.of, each, strict=True)) for each in windows]

    def _trimmed(self, saved: Mapping[str, Window]) -> list[Window]:
        """Return the windows of the rule's quantities, as long as it allows; empty ones if they are not saved."""
        rule, windows = self.rule, [saved.get(name, Window((), 0)) for name in self.rule.of]
        rounded = validation.round_to_float32
        return [Window((*map(rounded, values[-rule.window :]),), min(run, rule.patience)) for values, run in windows]

    def _numbers_of(self, windows: list[Window] | SpikeState) -> list[Window]:
        """Return windows as numbers; two host reads for arrays."""
        if not isinstance(windows, SpikeState):
            return windows
        backend, xp, rule = registry.backend_for(windows.values), array_namespace(windows.values), self.rule
        ends = backend.read(xp.concat([windows.count, windows.skipped]))
        flat = xp.reshape(windows.values, (-1,))
        bits = backend.bits(flat)
        if bits is None:
            values = [float(flat[index]) for index in range(flat.shape[0])]
        else:
            values = [validation.float32_from_bits(each) for each in backend.read(bits)]
        last = [(index + 1) * rule.window for index in range(len(rule.of))]
        counts, skipped = ends[: len(last)], ends[len(last) :]
        return [Window((*values[end - n : end],), run) for end, n, run in zip(last, counts, skipped, strict=True)]

    def _arrays_of(self, windows: list[Window] | SpikeState, like: Array) -> SpikeState:
        """Return windows as arrays beside another one; of empty ones nothing is sent to a device."""
        if isinstance(windows, SpikeState):
            return windows
        rule, xp, empty = self.rule, array_namespace(like), empty_windows(self.rule, like)
        if not any(one.values or one.skipped for one in windows):
            return empty
        fields = (
            [[*(one.values or (0.0,))[:1] * (rule.window - len(one.values)), *one.values] for one in windows],
            [len(one.values) for one in windows],
            [one.skipped for one in windows],
        )
        on = device_kwargs(registry.backend_for(like).placement(like))
        return SpikeState(*(xp.asarray(x, dtype=old.dtype, **on) for x, old in zip(fields, empty, strict=True)))

    def load(self, saved: SavedWindows, write: _Write) -> None:
        """Go on with saved windows; optimizers that have one keep its arrays."""
        self._saved, self.has_judged = [*map(self._trimmed, saved)], False
        empty = [self._trimmed({})] * len(self._windows)
        for index, (old, new) in enumerate(zip(self._windows, [*self._saved, *empty], strict=False)):
            self._windows[index] = write(old, self._arrays_of(new, old.values)) if isinstance(old, SpikeState) else new

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rule, self.numbers())


def text_of_windows(windows: SavedWindows) -> str:
    """Return windows as one value, however many there are."""
    return json.dumps([{name: one._asdict() for name, one in each.items()} for each in windows])


def windows_from(text: object) -> SavedWindows:
    """Return the windows of a state dict; InvalidValueError or InvalidTypeError for another text than it has."""
    return [
        {
            name: _window(f"spikes[{index}][{short_repr(name)}]", one)
            for name, one in validation.mapping(f"spikes[{index}]", each).items()
        }
        for index, each in enumerate(validation.parse_list("spikes", text))
    ]


def _window(name: str, saved: object) -> Window:
    window, most = validation.mapping(name, saved), validation.LARGEST_FLOAT32
    values = window.get("values")
    if not isinstance(values, list):
        raise validation.wrong_type(values, f"{name}['values']", "a list of numbers")
    numbers = [validation.number(f"{name}['values']", each, at_least=-most, at_most=most) for each in values]
    return Window(
        (*numbers,), validation.integer(f"{name}['skipped']", window.get("skipped"), 0, validation.LARGEST_INT32)
    )


def _rounded(x: Array | float) -> Array | float:
    """Return an array as it is, and a number as the nearest float32."""
    return x if is_array_api_obj(x) else validation.round_to_float32(x)


def is_nonfinite(x: Array | float, like: Array) -> Array | int:
    """Return 1 if a value is inf or NaN, else 0; of an array 0-d int32 beside another one."""
    if not is_array_api_obj(x):
        return int(not math.isfinite(x))
    return nonfinite_flag(beside(x, like), device(like))


def beside(x: Array | float, like: Array) -> Array:
    """Return a value of one element as a 0-d float32 on the device of another array; no host read."""
    xp = array_namespace(like)
    if not is_array_api_obj(x):
        return xp.full_like(like, x, dtype=xp.float32)
    own = array_namespace(x)
    return registry.backend_for(like).move(own.reshape(narrowed(x, own.float32), ()), like)
