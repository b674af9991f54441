"""The vector that ranks agree on: 26 int32 (104 bytes) with the verdict and a fingerprint of the state.

::

    [nonfinite, at_min_scale, has_gradients, code, f1 .. f11, -f1 .. -f11]

After an element-wise MAX over the ranks, the first four are what any rank found (:func:`reason_code`: why a rank skips
the step, and which it is), and ``max(f) == -max(-f)`` exactly
when all ranks hold one value, so that a rank that has drifted is found in the same message, on every rank. What travels
are integers (over gloo two int64 that stand for these): MAX over floats gives ranks different answers if one of them
holds a NaN.

The fields are whatever the ranks must hold in common: the four of the state, the policy, and a :func:`position`, which
says what the message is about. Small numbers share an int32; the least and the greatest value of such a field are those
of some rank, so an error can take them apart.

A :func:`greeting` goes before all others over a group, since another version may make them of another form.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import numbers
import operator
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from array_api_compat import array_namespace

from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, ScaleState
from gradscale.core.validation import LARGEST_INT32, bits_of_float32, float32_from_bits, round_to_float32
from gradscale.errors import InvalidTypeError, ScaleDesyncError
from gradscale.version import __version__

__all__ = [
    "ABOUT",
    "FLAGS",
    "LENGTH",
    "Position",
    "Purpose",
    "Reason",
    "Verdict",
    "announcement",
    "describe_differences",
    "foreign_message",
    "greeting",
    "identify",
    "is_fixed",
    "laid_out",
    "pack_plain",
    "position",
    "read_both",
    "read_verdict",
    "reason_and_rank",
    "reason_code",
    "reason_number",
    "refusal",
    "require_one_version",
    "shifted",
    "shifts",
]

_Form: TypeAlias = "str | bytes | tuple[_Form, ...] | None"

_MAIN = "__main__"
# The name that the program's module has in a spawned process.
_SPAWNED_MAIN = "__mp_main__"

_STATE = ("scale", "growth_tracker", "overflow_tracker", "rescale_tracker")
_FIELDS = (*_STATE, "policy", "iteration", "message", "place", "steps", "max_norm", "kind")
_COUNT = len(_FIELDS)
FLAGS = 4
"""How many values are what any rank found: ``nonfinite``, ``at_min_scale``, ``has_gradients`` and ``code``."""
LENGTH = FLAGS + 2 * _COUNT
ABOUT = _COUNT - len(_STATE)
"""How many fields say which policy there is and what a message is about."""
_PLACE = _FIELDS.index("place")
_RANK_BITS = 20
_LAST_RANK = (1 << _RANK_BITS) - 1

# Of "message", from the lowest: the optimizer, the call of the iteration, the purpose.
_OPTIMIZER_BITS = 15
_CALL_BITS = 12
# Of "place", from the lowest: a checksum of the digits of max_norm that float32 lacks, the position of the group in the
# list, the scaler.
_REST_BITS = 12
_GROUP_BITS = 5
_SCALER_BITS = 14
_NO_MAX_NORM = -1


class Reason(enum.IntEnum):
    """Why a rank skips a step, the gravest last."""

    STEPPED = 0
    SPIKE = 1
    REFUSED = 2
    OVERFLOW = 3
    FAILED = 4
    """Its gradients cannot be unscaled; an error on every rank."""


def reason_code(reason: Reason, rank: int) -> int:
    """Return a reason and a rank as one number: the MAX over ranks has the gravest reason, and its lowest rank."""
    return reason << _RANK_BITS | _LAST_RANK - min(rank, _LAST_RANK)


def reason_number(code: Array | int) -> Array | int:
    """Return the number of the reason in a :func:`reason_code`, 0-d int32 or an int."""
    return code >> _RANK_BITS


def reason_and_rank(code: int) -> tuple[Reason, int]:
    """Return the reason and the rank of a :func:`reason_code`."""
    return Reason(code >> _RANK_BITS), _LAST_RANK - (code & _LAST_RANK)


class Purpose(enum.IntEnum):
    """What a message is for: those of one purpose are sent by the same call on every rank."""

    STEP = 0
    NORM = 1
    DIAGNOSIS = 2
    GROUP_AGREEMENT = 3
    COMPILED = 4


_CALLS = {
    Purpose.STEP: "unscale_() or step()",
    Purpose.NORM: "unscale_(max_norm=), for the norm over the group",
    Purpose.DIAGNOSIS: "diagnose(gather=True)",
    Purpose.GROUP_AGREEMENT: "a GroupAgreement",
    Purpose.COMPILED: "gradscale_jax.agree",
}

Position: TypeAlias = tuple[int, int, int, int, int, int]
"""The last fields of the fingerprint: what a message is about. Made by :func:`position`."""


class Verdict(NamedTuple):
    """What the group agreed on, as Python numbers."""

    nonfinite: int
    """Largest number of non-finite gradient arrays on any rank."""
    local_nonfinite: int
    """The number on this rank."""
    at_min_scale: bool
    """Whether an overflow now must be raised, as the policy says."""
    scale: float
    """The scale that all ranks hold."""
    has_gradients: bool = True
    """Whether any rank has a gradient."""
    code: int = 0
    """The group's :func:`reason_code`; 0 if no rank has given one."""

    @property
    def reason(self) -> Reason:
        """Why no rank makes the step, if so."""
        return Reason.OVERFLOW if self.nonfinite else reason_and_rank(self.code)[0]

    @property
    def is_skipped(self) -> bool:
        """Whether no rank makes the step."""
        return self.nonfinite > 0 or self.code > 0

    @property
    def is_held(self) -> bool:
        """Whether the step is neither clean nor an overflow, so that the scale stays as it is."""
        return self.code > 0 and self.nonfinite == 0

    @property
    def by(self) -> int | None:
        """The lowest rank with this reason; None for a step that is made, or if its rank is not known."""
        reason, rank = reason_and_rank(self.code)
        return rank if self.is_skipped and reason is self.reason else None


def pack_plain(
    state: ScaleState,
    nonfinite: int,
    at_min_scale: bool,
    about: Sequence[int],
    *,
    has_gradients: bool = True,
    code: int = 0,
) -> list[int]:
    """Return the vector of a state of Python numbers, as a list; :meth:`Backend.pack` makes one of arrays."""
    fields = [bits_of_float32(state.scale), *state[1:], *about]
    return laid_out([nonfinite, at_min_scale, has_gradients, code], fields)


def laid_out(flags: Sequence[Any], fields: Sequence[Any]) -> list[Any]:
    """Return the vector as a list of numbers, or of 0-d arrays."""
    return [*flags, *fields, *map(operator.neg, fields)]


def position(
    iteration: int,
    call: int = 0,
    *,
    purpose: Purpose = Purpose.STEP,
    optimizer: int = 0,
    scaler: int = 0,
    group: int = 0,
    steps: int = 0,
    max_norm: float | None = None,
    kind: int = 0,
) -> Position:
    """Return the fields that say what a message is about; numbers that do not fit are taken modulo.

    ``call`` is the number of the message in the iteration; optimizers are numbered as the scaler meets them, scalers as
    they are constructed over the group, ``group`` is the group's place in the list, and ``kind`` tells optimizers apart
    by their class, number of param_groups and name.
    """
    norm, rest = (_NO_MAX_NORM, 0) if max_norm is None else _bits_of_norm(max_norm)
    message = purpose << _CALL_BITS | call & (1 << _CALL_BITS) - 1
    return (
        iteration & LARGEST_INT32,
        message << _OPTIMIZER_BITS | optimizer & (1 << _OPTIMIZER_BITS) - 1,
        _place(scaler, group) | rest,
        steps & LARGEST_INT32,
        norm,
        kind,
    )


def _place(scaler: int, group: int) -> int:
    number = (scaler & (1 << _SCALER_BITS) - 1) << _GROUP_BITS | group & (1 << _GROUP_BITS) - 1
    return number << _REST_BITS


def shifts(scalers: Sequence[int]) -> list[int]:
    """Return the change of ``place`` from each group of a list to the next; ``scalers``: its number over each."""
    places = [_place(scaler, group) for group, scaler in enumerate(scalers)]
    return [after - before for before, after in itertools.pairwise(places)]


def shifted(backend: Backend | None, x: Array, by: int) -> Array:
    """Return the vector for the next group of a list; ``backend`` is None for a list, and ``x`` is left alone."""
    row = [0] * LENGTH
    row[FLAGS + _PLACE], row[FLAGS + _COUNT + _PLACE] = by, -by
    if backend is None:
        return list(map(operator.add, x, row))
    return x + backend.integers(row, x)


@functools.lru_cache(maxsize=64)
def _bits_of_norm(max_norm: float) -> tuple[int, int]:
    """Return the bits of the nearest float32, and a few for the digits that float32 does not have."""
    rounded = round_to_float32(max_norm)
    rest = 0 if rounded == max_norm else zlib.crc32(struct.pack("<d", max_norm)) & (1 << _REST_BITS) - 1
    return bits_of_float32(rounded), rest


def announcement(position: Position) -> list[int]:
    """Return the vector that announces another collective; it says nothing of a state."""
    return pack_plain(ScaleState(0.0, 0, 0, 0), 0, False, (0, *position))


def refusal(position: Position, rank: int) -> list[int]:
    """Return the vector of a rank whose gradients cannot be unscaled."""
    return [1, 0, 1, reason_code(Reason.FAILED, rank), *announcement(position)[FLAGS:]]


def greeting() -> list[int]:
    """Return the first message over a group, whose form never changes: ``[release, -release, build, -build]``.

    ``release`` is the version's three numbers; ``build`` is a hash of the whole version and of the form of messages.
    """
    major, minor, micro = map(int, re.findall(r"\d+", f"{__version__}.0.0")[:3])
    release = (major & 0x7FF) << 20 | (minor & 0x3FF) << 10 | micro & 0x3FF
    form = __version__, FLAGS, _FIELDS, _OPTIMIZER_BITS, _CALL_BITS, _REST_BITS, _GROUP_BITS, _SCALER_BITS
    build = zlib.crc32(ascii(form).encode()) & 0x7FFFFFFF
    return [release, -release, build, -build]


def require_one_version(values: Sequence[int], own: Sequence[int], where: str) -> None:
    """Raise ScaleDesyncError if the greetings of all ranks after MAX (``values``) are not this rank's own."""
    if list(values) == list(own):
        return
    if len(values) != len(own) or any(map(operator.lt, values, own)):
        raise foreign_message(where)
    here, most, least = (f"{one >> 20}.{one >> 10 & 0x3FF}.{one & 0x3FF}" for one in (own[0], values[0], -values[1]))
    found = f"two builds of version {here}" if least == most else f"versions from {least} to {most} (here {here})"
    msg = (
        f"ranks run different versions of gradscale, seen by {where}: {found}. No rank takes this step. Install one "
        f"version on every rank"
    )
    raise ScaleDesyncError(msg)


def is_fixed(policy: object) -> bool:
    """Tell whether a policy is a frozen dataclass of settings that cannot change either."""
    parameters = getattr(type(policy), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        return False
    try:
        hash(policy)
    except TypeError:
        return False
    return True


def identify(policy: object) -> int:
    """Return a number from 0 to 2**31-1 that tells policies apart: a hash of a dataclass's settings, else of its name.

    Raises
    ------
    InvalidTypeError
        For a setting that has no value which is the same in every process; it names the field.
    """
    if dataclasses.is_dataclass(policy):
        text = _canonical(policy, f"the policy {type(policy).__qualname__}")
    else:
        text = type(policy).__qualname__.encode()
    return zlib.crc32(text) & 0x7FFFFFFF


def _canonical(policy: Any, what: str) -> bytes:
    """Return bytes of a dataclass's name and compared fields that are the same in every process.

    The fields are numbers, text, bytes, enumerations, None, classes, tuples and frozen dataclasses of these;
    InvalidTypeError names any other one, after ``what``.
    """
    try:
        # Not repr: which characters it escapes depends on the version of Python.
        return ascii(_fields(policy, what)).encode()
    except RecursionError as error:
        msg = f"{what} must be the same value in every process, got one that is too deep or holds itself"
        raise InvalidTypeError(msg) from error


def _fields(value: Any, what: str) -> _Form:
    compared = [field.name for field in dataclasses.fields(value) if field.compare]
    forms = [(name, _form(getattr(value, name), f"{what}.{name}")) for name in compared]
    return ("dataclass", type(value).__qualname__, *forms)


def _form(value: object, what: str) -> _Form:
    """Return a value as nested tuples of text."""
    if value is None:
        return None
    if isinstance(value, numbers.Complex):
        return ("number", _real(value.real), _real(value.imag))
    if isinstance(value, str):
        return ("text", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return ("bytes", bytes(value))
    if isinstance(value, enum.Enum):
        return ("enumeration", _name(type(value)), str(value.name))
    if isinstance(value, type):
        return ("class", _name(value))
    if isinstance(value, tuple):
        return ("tuple", *(_form(item, f"{what}[{index}]") for index, item in enumerate(value)))
    settings = getattr(type(value), "__dataclass_params__", None)
    if dataclasses.is_dataclass(value) and settings is not None and settings.frozen:
        return _fields(value, what)
    msg = (
        f"{what} must be the same value in every process, so that ranks can tell whether they hold one policy, got "
        f"{shown(value)}: make it a number, text, bytes, an enumeration, a class, or a tuple or frozen dataclass of "
        f"these, or leave the field out with dataclasses.field(compare=False)"
    )
    raise InvalidTypeError(msg)


def _real(value: SupportsFloat) -> str:
    """Return a real number as its exact ratio, in digits that Python does not limit; or as inf or nan."""
    if isinstance(value, numbers.Rational):
        return f"{value.numerator:x}/{value.denominator:x}"
    wide = float(value)
    return "{:x}/{:x}".format(*wide.as_integer_ratio()) if math.isfinite(wide) else str(wide)


def _name(kind: type) -> str:
    module = _MAIN if kind.__module__ == _SPAWNED_MAIN else kind.__module__
    return f"{module}.{kind.__qualname__}"


def read_both(backend: Backend, agreed: Array, sent: Array) -> tuple[list[int], list[int]]:
    """Return the group's answer and what this rank has sent: one host read."""
    if agreed is sent:
        values = backend.read(agreed)
        return values, values
    both = backend.read(array_namespace(agreed).concat([agreed, sent]))
    return both[:LENGTH], both[LENGTH:]


def read_verdict(
    values: Sequence[int],
    own: Sequence[int],
    policy: object,
    where: Callable[[], str],
    moved: int,
    kinds: Mapping[int, str],
) -> Verdict:
    """Return the verdict from the vector after MAX (``values``) and this rank's before it (``own``).

    Parameters
    ----------
    policy, where : Policy, callable
        This rank's policy, and what returns its rank and iteration, for the message.
    moved : int
        What was added to ``place`` between the groups of a list.
    kinds : mapping of int to str
        What the hashes of kinds of optimizers stand for, for the message.

    Raises
    ------
    ScaleDesyncError
        If the ranks differ, or have met a message that is not gradscale's; it names the fields.
    """
    # If MAX has changed neither a field nor its negative, all ranks have sent the same.
    code = values[3]
    if values[FLAGS:] != own[FLAGS:] or code >> _RANK_BITS >= Reason.FAILED:
        _require_one_state(values, own, policy, where, moved, kinds)
    return Verdict(values[0], own[0], bool(values[1]), float32_from_bits(values[FLAGS]), bool(values[2]), code)


def _require_one_state(
    values: Sequence[int],
    own: Sequence[int],
    policy: object,
    where: Callable[[], str],
    moved: int,
    kinds: Mapping[int, str],
) -> None:
    mine = list(own)
    middle = FLAGS + _COUNT
    mine[FLAGS + _PLACE] += moved
    mine[middle + _PLACE] -= moved
    highest, lowest = values[FLAGS:middle], [-value for value in values[middle:LENGTH]]
    if any(map(operator.lt, values[FLAGS:], mine[FLAGS:])):
        # No maximum is below what went into it.
        raise foreign_message(where())
    if values[3] >> _RANK_BITS >= Reason.FAILED:
        _, rank = reason_and_rank(values[3])
        msg = (
            f"rank {rank} has refused its gradients, seen by {where()}: the error on that rank says why. No rank takes "
            f"this step. Once they are right, load one checkpoint on every rank, or call set_group()"
        )
        raise ScaleDesyncError(msg)
    if highest != lowest:
        differing = describe_differences(lowest, highest, mine[FLAGS:middle], policy, kinds)
        msg = (
            f"ranks hold different states, seen by {where()}: {differing}. No rank takes this step. Load "
            f"one checkpoint on every rank, construct every scaler with one policy, and call unscale_(), step() and "
            f"update() for the same optimizers in the same order everywhere (a list of them, not a set)"
        )
        raise ScaleDesyncError(msg)


def foreign_message(where: str) -> ScaleDesyncError:
    """Return the error for a message that is not gradscale's."""
    return ScaleDesyncError(
        f"a foreign message was met, seen by {where}: some rank makes a collective of its own over this group where "
        f"others make gradscale's. No rank takes this step, and what that collective gave is wrong, too. Make all "
        f"collectives over the group in one order on every rank, or pass the scaler a group of its own"
    )


def describe_differences(
    lowest: Sequence[int], highest: Sequence[int], own: Sequence[int] | None, policy: object, kinds: Mapping[int, str]
) -> str:
    """Name the fields in which ranks differ, by the least and greatest value of each and this rank's own.

    The last fields may be left out, and ``own`` is None if one process drives all ranks.
    """
    all_three = [_unpacked(fields) for fields in (lowest, highest, own or ())]
    low, high, here = all_three
    differing = [name for name in low if low[name] != high[name]]
    if "purpose" in differing:
        # What the calls are for differs with them.
        differing = [name for name in differing if name not in (*_STATE, "policy", "steps", "max_norm", "kind")]
    return "; ".join(_difference(name, low[name], high[name], here.get(name), policy, kinds) for name in differing)


def _unpacked(fields: Sequence[int]) -> dict[str, int]:
    """Return the fields by name, with packed ones taken apart."""
    named = dict(zip(_FIELDS, fields, strict=False))
    if "message" in named:
        message = named.pop("message")
        named["optimizer"] = message & (1 << _OPTIMIZER_BITS) - 1
        named["call"] = message >> _OPTIMIZER_BITS & (1 << _CALL_BITS) - 1
        named["purpose"] = message >> _OPTIMIZER_BITS + _CALL_BITS
    if "place" in named:
        number = named.pop("place")
        named["rest"] = number & (1 << _REST_BITS) - 1
        named["group"] = number >> _REST_BITS & (1 << _GROUP_BITS) - 1
        named["scaler"] = number >> _REST_BITS + _GROUP_BITS
    return named


_DESCRIPTIONS = {
    "call": "call of the iteration",
    "purpose": "the call itself",
    "optimizer": "optimizer",
    "scaler": "scaler of the group",
    "steps": "steps made so far",
}
_CONSEQUENCES = {
    "call": ", so some rank left one out",
    "optimizer": ", numbered in the order in which the scaler has met them, so some rank has them in another order",
    "scaler": ", numbered in the order of their construction, so some rank has them in another order",
    "steps": ", so some rank left out step() after unscale_()",
}


def _difference(name: str, low: int, high: int, own: int | None, policy: object, kinds: Mapping[int, str]) -> str:
    if name == "policy":
        return f"settings: compare policy (here {policy!r}), diagnose=, skip= and spike= of the ranks"
    if name == "kind":
        here = f" (here {kinds[own]})" if own is not None and own in kinds else ""
        return (
            f"optimizer's class, number of param_groups or name{here}, so some rank has them in another order; if "
            f"ranks hold other parts of a model, give its optimizer one name on all: scaler.name(optimizer, 'main')"
        )
    if name == "group":
        return "position of the group in the list, so some rank has the groups in another order"
    if name == "rest":
        return "max_norm, in digits that float32 does not have"
    least, most, here = (_readable(name, value) for value in (low, high, own))
    described = f"{_DESCRIPTIONS.get(name, name)} from {least} to {most}"
    return described + (f" (here {here})" if own is not None else "") + _CONSEQUENCES.get(name, "")


def _readable(name: str, value: int | None) -> str:
    if value is None:
        return ""
    if name == "purpose":
        return _CALLS[Purpose(value)] if value in _CALLS else f"an unknown one, {value}"
    if name == "max_norm" and value == _NO_MAX_NORM:
        return "None"
    return repr(float32_from_bits(value)) if name in ("scale", "max_norm") else str(value)
