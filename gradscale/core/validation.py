"""Checks of users' values: each returns the value as a plain Python one, or raises an error that names it."""

import contextlib
import json
import math
import operator
import struct
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr

LARGEST_FLOAT16 = 65504.0
LARGEST_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127
SMALLEST_NORMAL = 2.0**-126
LARGEST_INT32 = 2**31 - 1

# Backoffs by 0.0001 on the whole way through float32's range are 1.7 million, and take a second to follow.
_LONGEST_WAY = 2_000_000

_BOUNDS = {"above": operator.gt, "below": operator.lt, "at least": operator.ge, "at most": operator.le}

_Choice = TypeVar("_Choice")


def wrong_type(value: object, name: str, expected: str, advice: str = "") -> InvalidTypeError:
    """Return the error for a value of another type, with what to do about it."""
    return InvalidTypeError(
        f"{name} must be {expected}, got {short_repr(value)} of type {type(value).__name__}{advice}"
    )


def wrong_value(value: object, name: str, expected: str, advice: str = "") -> InvalidValueError:
    """Return the error for a value that is out of range, with what to do about it."""
    return InvalidValueError(f"{name} must be {expected}, got {short_repr(value)}{advice}")


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    below: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    is_finite: bool = True,
) -> float:
    """Return a real number within bounds as a float, never NaN; NumPy's numbers are fine, booleans and text are not."""
    limits = zip(_BOUNDS.items(), (above, below, at_least, at_most), strict=True)
    bounds = [(word, holds, limit) for (word, holds), limit in limits if limit is not None]
    wanted = " and ".join(f"{word} {limit:g}" for word, _, limit in bounds)
    expected = f"a {'finite ' * is_finite}number{' ' * bool(wanted)}{wanted}"
    converted = _as_float(name, value, expected)
    is_number = not math.isnan(converted) and not (is_finite and math.isinf(converted))
    if not is_number or not all(holds(converted, limit) for _, holds, limit in bounds):
        raise wrong_value(value, name, expected)
    return converted


def _as_float(name: str, value: Any, expected: str) -> float:
    if not isinstance(value, (bool, str, bytes, complex)) and hasattr(type(value), "__float__"):
        # Tensors of several elements, or without a value, raise errors of their own; a user's object any.
        with contextlib.suppress(Exception):
            # One-element arrays convert as well: checkpoints in npz or msgpack hold numbers so. Those of booleans,
            # complex numbers and text would convert, too.
            dtype = str(getattr(value, "dtype", "float"))
            if "float" in dtype or "int" in dtype:
                try:
                    return float(value)
                except OverflowError:
                    return -math.inf if value < 0 else math.inf
    raise wrong_type(value, name, expected)


def magnitude(name: str, value: object) -> float:
    """Return a number from 0 on as a float; inf and NaN are fine, and a number beyond every float is inf."""
    expected = "a number from 0 on"
    converted = _as_float(name, value, expected)
    if converted < 0:
        raise wrong_value(value, name, expected)
    return converted


def scale(name: str, value: object) -> float:
    """Return a scale, rounded to float32: above zero, finite and no subnormal there."""
    rounded = round_to_float32(number(name, value))
    if not SMALLEST_NORMAL <= rounded <= LARGEST_FLOAT32:
        limits = f"{SMALLEST_NORMAL:g} to {LARGEST_FLOAT32:g}"
        raise wrong_value(value, name, f"above 0 and within float32's normal range, {limits}")
    return rounded


def integer(name: str, value: Any, at_least: int, at_most: int) -> int:
    """Return an integer within bounds as an int; a bool and a float raise InvalidTypeError."""
    expected = f"an integer from {at_least} to {at_most}"
    try:
        # Arrays of booleans can be an index, too.
        if "bool" in str(getattr(value, "dtype", type(value).__name__)):
            raise TypeError
        converted = operator.index(value)
    except Exception:
        raise wrong_type(value, name, expected) from None
    if not at_least <= converted <= at_most:
        raise wrong_value(value, name, expected)
    return converted


def boolean(name: str, value: object) -> bool:
    """Return a bool; NumPy's is fine, numbers are not."""
    if type(value).__name__ in ("bool_", "bool"):
        with contextlib.suppress(Exception):
            return bool(value)
    raise wrong_type(value, name, "True or False")


def truth(name: str, value: object) -> bool:
    """Return whether a value is true; anything that Python's ``if`` takes."""
    try:
        return bool(value)
    except Exception as error:
        raise wrong_type(value, name, "true or false", ", which is neither") from error


def count(name: str, value: Any, at_least: int = 0) -> int:
    """Return a counter below 2**63, as 2**62 at most, so that what it grows to can be loaded again."""
    return min(integer(name, value, at_least, 2**63 - 1), 2**62)


def choice(name: str, value: object, options: tuple[_Choice, ...]) -> _Choice:
    """Return the option that equals a value."""
    if isinstance(value, str):
        for option in options:
            # Not by the operator, which a subclass or an array may define otherwise.
            if str.__eq__(value, option) is True:
                return option
    raise wrong_value(value, name, f"one of {', '.join(map(repr, options))}")


def choices(name: str, value: object, options: tuple[_Choice, ...]) -> tuple[_Choice, ...]:
    """Return the options among several values, in the order of ``options``; one alone may be bare."""
    with reading(name):
        values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
        chosen = {choice(name, item, options) for item in values}
    if not chosen:
        msg = f"{name} must hold at least one of {', '.join(map(repr, options))}, got {short_repr(value)}"
        raise InvalidValueError(msg)
    return tuple(option for option in options if option in chosen)


def mapping(name: str, value: object, wanted: str = "a mapping") -> dict[Any, object]:
    """Return a mapping as a new dict: a user's own may answer differently each time."""
    with reading(name):
        if isinstance(value, Mapping):
            return dict(value)
    raise wrong_type(value, name, wanted)


def parse_list(name: str, text: object) -> list[Any]:
    """Return the list that a text of a state dict holds, one value however long it is."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise wrong_value(text, name, "the text that state_dict() gives")
    return value


def timeout(value: object) -> float:
    """Return seconds to wait, above 0; infinity for ever."""
    return math.inf if isinstance(value, float) and value == math.inf else number("timeout", value, above=0.0)


def policy(value: Any, members: Iterable[str] = ("init", "update", "at_min_scale")) -> Policy:
    """Return a policy; InvalidTypeError if it lacks a member, or is a class. All but ``init_scale`` are methods."""
    with reading("policy"):
        missing = [
            x for x in members if not hasattr(value, x) or not (callable(getattr(value, x)) or x == "init_scale")
        ]
    if isinstance(value, type) or missing:
        msg = f"policy must be an instance of a policy, such as gradscale.DynamicScale(), got {short_repr(value)}"
        if isinstance(value, str):
            msg += f": write gradscale.presets.named({short_repr(value)})"
        elif not missing or isinstance(value, FunctionType):
            msg += f": call it, {value.__name__}()" if value.__name__.isidentifier() else ": call it"
        else:
            msg += f", which has no {', '.join(missing)}"
        raise InvalidTypeError(msg)
    checked: Policy = value
    return checked


def is_fixed(policy: object) -> bool:
    """Tell whether a policy is a frozen dataclass of settings that cannot change either."""
    parameters = getattr(type(policy), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        with contextlib.suppress(TypeError):
            hash(policy)
            return True
    return False


def is_power_of_two(value: float) -> bool:
    """Tell whether a positive float is a power of two."""
    return math.frexp(value)[0] == 0.5


def round_to_float32(value: float) -> float:
    """Return the nearest float32, or an inf beyond its range."""
    # Adding rounds to the last place of a float32. No ctypes and no struct, which torch's compiler cannot trace.
    shift = math.ldexp(1.5, 52 + min(max(math.frexp(value)[1] - 24, -149), 105))
    rounded = math.copysign(float(value) + shift - shift, value)
    return rounded if abs(rounded) <= LARGEST_FLOAT32 else rounded * math.inf


def bits_of_float32(value: float) -> int:
    """Return the bits of the nearest float32 as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def float32_from_bits(bits: int) -> float:
    """Return the float32 that an int32 holds the bits of."""
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


def largest_with_finite_product(factor: float) -> float:
    """Return the largest float32 whose product with a factor above 1, or with it as a float32, is a finite float32."""
    factor = max(factor, round_to_float32(factor))
    # A product rounds to inf from half a unit above the largest float32 on.
    limit = 2.0**128 - 2.0**103
    largest = round_to_float32(min(limit / factor, LARGEST_FLOAT32))
    while largest * factor >= limit:
        largest = round_to_float32(largest * (1.0 - 2.0**-24))
    return largest


def last_above(limit: float, scale: float, factor: float) -> float:
    """Return the last normal float32 above a limit on the way down from a scale by a factor; or the scale."""
    for _ in range(_LONGEST_WAY):
        lowered = round_to_float32(scale * factor)
        # A factor that rounds to 1 leads nowhere.
        if not limit < lowered < scale or lowered < SMALLEST_NORMAL:
            return scale
        scale = lowered
    msg = f"a factor of {factor!r} is too near to 1, got more than {_LONGEST_WAY} backoffs down to {limit!r}"
    raise InvalidValueError(msg)
