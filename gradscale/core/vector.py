"""The message of ranks: 18 int32 (72 bytes) with what a rank has found, its state, and a hash of its claim.

::

    [nonfinite, at_min_scale, has_gradients, code, stage, scale, three trackers, two of the hash, minus stage, ...]

After an element-wise MAX over the ranks, the first four are what any rank found (:func:`reason_code`: why a rank skips
the step, and which it is), and each of the next seven is minus the one of its negative exactly when all ranks hold one
value, so that a rank that has drifted is found in the same message, on every rank. What travels are integers: MAX over
floats gives ranks different answers if one of them holds a NaN. Every collective of a group has this form and length,
whatever the library of the sender's arrays.

The ``stage`` says that a message is gradscale's, and what it is for. Values of single ranks, such as norms, travel in
rounds of such messages in the place of the state. A :func:`greeting` goes before all others over a group, since another
version may make them of another form.

No other file knows the layout.
"""

from __future__ import annotations

import enum
import operator
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from array_api_compat import array_namespace

from gradscale.core import claims
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Numbers, Policy, ScaleState
from gradscale.core.validation import bits_of_float32, float32_from_bits
from gradscale.errors import ScaleDesyncError
from gradscale.version import __version__

__all__ = [
    "CARRIED",
    "HELD",
    "LENGTH",
    "Found",
    "Outcome",
    "Reason",
    "Verdict",
    "bounds_in",
    "carried",
    "carrying",
    "failed_rank",
    "foreign_message",
    "found_in",
    "greeting",
    "judged",
    "of_arrays",
    "of_numbers",
    "outcome",
    "read_both",
    "reason_and_rank",
    "reason_code",
    "reason_number",
    "refusal",
    "require_one_version",
    "shifted",
    "spread",
    "spread_of",
    "state_bits",
    "state_of",
    "telling",
    "told",
    "verdict_of",
]

_FLAGS = 4
_STAGE, _SCALE, _HASH = _FLAGS, _FLAGS + 1, _FLAGS + 5
_MIDDLE = _HASH + claims.WORDS
_FIELDS = _MIDDLE - _FLAGS
LENGTH = _MIDDLE + _FIELDS

CARRIED = 2 * (_HASH - _SCALE)
"""How many values of ranks a message carries."""

# Numbers that hardly another message holds in this place, and its negative in the other; the last one is always seen.
_USUAL, _CARRYING, _TELLING = 0x47534D30, 0x47534D31, 0x47534D32

_RANK_BITS = 20
_LAST_RANK = (1 << _RANK_BITS) - 1


class Reason(enum.IntEnum):
    """Why a rank skips a step, the gravest last; false if it makes it."""

    STEPPED = 0
    SPIKE = 1
    REFUSED = 2
    OVERFLOW = 3
    FAILED = 4
    """Its gradients cannot be unscaled; an error on every rank."""
    NO_GRADIENTS = 5
    """No rank has a gradient, an error on every rank; in no message, where the flags say it."""


def reason_code(reason: Reason, rank: int) -> int:
    """Return a reason and a rank as one number: the MAX over ranks has the gravest reason, and its lowest rank."""
    return reason << _RANK_BITS | _LAST_RANK - min(rank, _LAST_RANK)


def reason_number(code: Array | int) -> Array | int:
    """Return the number of the reason in a :func:`reason_code`, 0-d int32 or an int."""
    return code >> _RANK_BITS


def reason_and_rank(code: int) -> tuple[Reason, int]:
    """Return the reason and the rank of a :func:`reason_code`."""
    return Reason(code >> _RANK_BITS), _LAST_RANK - (code & _LAST_RANK)


HELD = Reason.SPIKE, Reason.REFUSED
"""Why a step is neither clean nor an overflow, so that the scale stays as it is."""


class Verdict(NamedTuple):
    """What the group agreed on, as Python values."""

    reason: Reason
    """Why no rank makes the step, if so."""
    by: int | None
    """The lowest rank with this reason; None for a step that is made, or if its rank is not known."""
    nonfinite: int
    """Largest number of non-finite gradient arrays on any rank."""
    local_nonfinite: int
    """The number on this rank."""
    at_min_scale: bool
    """Whether the overflow must be raised, as the policy says."""
    scale: float
    """The scale that all ranks hold."""


def judged(
    nonfinite: int, local_nonfinite: int, at_min_scale: bool, scale: float, has_gradients: bool, code: int
) -> Verdict:
    """Return the verdict that counts, flags and the gravest :func:`reason_code` give."""
    reason, by = Reason.STEPPED, None
    if code:
        reason, by = reason_and_rank(code)
    elif not has_gradients:
        reason = Reason.NO_GRADIENTS
    if nonfinite and reason is not Reason.OVERFLOW:
        reason, by = Reason.OVERFLOW, None
    return Verdict(reason, by, nonfinite, local_nonfinite, at_min_scale, scale)


# What is sent.


def of_numbers(
    state: Numbers,
    words: Sequence[int],
    nonfinite: int = 0,
    at_min_scale: bool = False,
    has_gradients: bool = True,
    code: int = 0,
) -> list[int]:
    """Return the message of a state of Python numbers; ``words``: the hash of the claim."""
    scale, *trackers = state
    fields = [_USUAL, bits_of_float32(scale), *trackers, *words]
    return [nonfinite, at_min_scale, has_gradients, code, *fields, *map(operator.neg, fields)]


def of_arrays(
    backend: Backend,
    policy: Policy,
    state: ScaleState,
    nonfinite: Array,
    words: Sequence[int],
    *,
    has_gradients: bool = True,
    code: Array | int = 0,
) -> Array:
    """Return the message of a state of arrays, 1-d int32, as :func:`of_numbers` does; ``nonfinite`` is 0-d int32.

    No host read.
    """
    xp, like = array_namespace(state.scale), state.scale

    def word(x: Array | int) -> Array:
        return backend.integers([x], like) if isinstance(x, int) else xp.reshape(xp.astype(x, xp.int32), (1,))

    at_min_scale = policy.at_min_scale(state)
    found = nonfinite, False if at_min_scale is None else at_min_scale, has_gradients, code, _USUAL
    start = xp.concat([*map(word, found), backend.fingerprint(state), backend.integers(words, like)])
    return xp.concat([start, -start[_FLAGS:]])


_NO_STATE = Numbers(0.0)


def carrying(words: Sequence[int], values: Sequence[int]) -> list[int]:
    """Return the message of one round of values, of which there are :data:`CARRIED`; it says nothing of a state."""
    half = CARRIED // 2
    return [0] * _FLAGS + [_CARRYING, *values[:half], *words, -_CARRYING, *values[half:], *map(operator.neg, words)]


def refusal(words: Sequence[int], rank: int) -> list[int]:
    """Return the message of a rank whose gradients cannot be unscaled."""
    return of_numbers(_NO_STATE, words, nonfinite=1, code=reason_code(Reason.FAILED, rank))


def telling() -> list[int]:
    """Return the message of a rank that has met a difference, and waits until all ranks tell their claims."""
    fields = [_TELLING] + [0] * (_FIELDS - 1)
    return [0] * _FLAGS + fields + list(map(operator.neg, fields))


def shifted(backend: Backend | None, x: Array, before: Sequence[int], after: Sequence[int]) -> Array:
    """Return a message for the next group of a list, whose claim has another hash; None and a list, or an array."""
    row = [0] * LENGTH
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        row[_HASH + index], row[_HASH + _FIELDS + index] = other - one, one - other
    if backend is None:
        return list(map(operator.add, x, row))
    return x + backend.integers(row, x)


# What comes back.


class Found(NamedTuple):
    """What any rank has found, as 0-d int32 of a device."""

    nonfinite: Array
    at_min_scale: Array
    has_gradients: Array
    code: Array


def found_in(agreed: Array) -> Found:
    """Return what any rank has found. No host read."""
    xp = array_namespace(agreed)
    # Not by index, for which NumPy gives a scalar.
    return Found(*(xp.reshape(agreed[index : index + 1], ()) for index in range(_FLAGS)))


def bounds_in(agreed: Array) -> tuple[Array, Array]:
    """Return the least and the greatest state and hash of any rank, 1-d int32; they are equal if all hold one."""
    return -agreed[_MIDDLE + 1 :], agreed[_SCALE:_MIDDLE]


def read_both(backend: Backend, agreed: Array, sent: Array) -> tuple[list[int], list[int]]:
    """Return the group's answer and what this rank has sent: one host read."""
    if agreed is sent:
        values = backend.read(agreed)
        return values, values
    both = backend.read(array_namespace(agreed).concat([agreed, sent]))
    return both[: len(both) // 2], both[len(both) // 2 :]


def state_bits(values: Sequence[int]) -> Sequence[int]:
    """Return the state of a message as it travels: the bits of the scale, and the trackers."""
    return values[_SCALE:_HASH]


def state_of(values: Sequence[int]) -> Numbers:
    """Return the state of a message as Python numbers."""
    scale, *trackers = state_bits(values)
    return Numbers(float32_from_bits(scale), *trackers)


def carried(values: Sequence[int]) -> list[int]:
    """Return the values that a message carries."""
    return [*values[_SCALE:_HASH], *values[_SCALE + _FIELDS : _HASH + _FIELDS]]


class Outcome(enum.Enum):
    """What an answer says of the ranks."""

    ONE_STATE = 0
    """All ranks have sent this message, whatever they have found, and whatever values they carry."""
    DIFFERENT = 1
    FAILED = 2
    """Some rank's gradients cannot be unscaled."""
    TOLD = 3
    """Some rank has met a difference in a message before, and this rank has not."""
    FOREIGN = 4
    """Some rank has sent another message than gradscale's."""


def outcome(values: Sequence[int], own: Sequence[int]) -> Outcome:
    """Return what the answer says; ``own`` is what this rank sent, over the last group of a list."""
    if own[_STAGE] == _CARRYING:
        own = carrying(own[_HASH:_MIDDLE], carried(values))
    # If MAX has changed neither a field nor its negative, all ranks have sent the same.
    has_failed = values[3] >> _RANK_BITS >= Reason.FAILED
    if values[_FLAGS:] == own[_FLAGS:] and not has_failed:
        return Outcome.ONE_STATE
    stages = {values[_STAGE], -values[_MIDDLE]}
    # No maximum is below what went into it.
    if not stages <= {_USUAL, _CARRYING, _TELLING} or any(map(operator.lt, values[_FLAGS:], own[_FLAGS:])):
        return Outcome.FOREIGN
    if has_failed:
        return Outcome.FAILED
    return Outcome.TOLD if _TELLING in stages and own[_STAGE] != _TELLING else Outcome.DIFFERENT


def failed_rank(values: Sequence[int]) -> int:
    """Return the lowest rank whose gradients cannot be unscaled, if there is any."""
    return reason_and_rank(values[3])[1]


def verdict_of(values: Sequence[int], own: Sequence[int]) -> Verdict:
    """Return the verdict of ranks that hold one state."""
    return judged(values[0], own[0], bool(values[1]), float32_from_bits(values[_SCALE]), bool(values[2]), values[3])


def spread(lowest: Sequence[int], highest: Sequence[int], own: Numbers | None = None) -> list[str]:
    """Say between which values the states of ranks lie, by :func:`bounds_in`; [] if they are one."""
    texts = []
    for index, name in enumerate(ScaleState._fields):
        low, high = (float32_from_bits(one) if index == 0 else one for one in (lowest[index], highest[index]))
        if low != high:
            texts.append(f"{name} from {low} to {high}" + (f" (here {own[index]})" if own is not None else ""))
    return texts


def spread_of(values: Sequence[int], own: Sequence[int]) -> list[str]:
    """Do that for an answer on the CPU; [] if some message had no state."""
    if {values[_STAGE], -values[_MIDDLE]} != {_USUAL}:
        return []
    lowest = [-value for value in values[_MIDDLE + 1 :]]
    return spread(lowest, values[_SCALE:_MIDDLE], state_of(own))


def told(own: Sequence[int], claim: claims.Claim, settings: str) -> dict[str, object]:
    """Return what the other ranks are told after a difference: the state of a message, its claim, and the settings."""
    state = {} if own[_STAGE] == _CARRYING else state_of(own)._asdict()
    return state | claim._asdict() | {"settings": [claim.settings, settings]}


def foreign_message(where: str) -> ScaleDesyncError:
    """Return the error for a message that is not gradscale's."""
    return ScaleDesyncError(
        f"a foreign message was met, seen by {where}: some rank makes a collective of its own over this group where "
        f"others make gradscale's. No rank takes this step, and what that collective gave is wrong, too. Make all "
        f"collectives over the group in one order on every rank, or pass the scaler a group of its own"
    )


# The first message.


def greeting() -> list[int]:
    """Return the first message over a group, whose form never changes: ``[release, -release, build, -build]``.

    ``release`` is the version's three numbers; ``build`` is a hash of the whole version and of the form of messages.
    """
    major, minor, micro = map(int, re.findall(r"\d+", f"{__version__}.0.0")[:3])
    release = (major & 0x7FF) << 20 | (minor & 0x3FF) << 10 | micro & 0x3FF
    build = zlib.crc32(ascii((__version__, LENGTH, _USUAL, claims.Claim._fields)).encode()) & 0x7FFFFFFF
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
