"""The message of ranks: what they must hold in common, in words; its hash; its one form.

A :class:`Claim` is what ranks must hold in common besides the state. Its hash travels in a message of 21 int32::

    [nonfinite, limits, presence, scaled, code, stage, scale, three trackers, two of the hash, norm, negatives]

After an element-wise MAX over the ranks, the first five are any rank's findings (``code``: the gravest reason to skip
the step, and the lowest rank that has it, by :func:`reason_code`), and each of the next eight is minus the one of its
negative exactly when all ranks hold one value, so that a rank that has drifted is seen in the same message, on every
rank. What travels are integers: MAX over floats gives ranks different answers if one of them holds a NaN. Every message
has this form and length, whatever the library of the sender's arrays.

The ``stage`` says that a message is gradscale's, and what it is for. Values of single ranks, such as norms, and the
words of ranks that differ, travel in rounds of such messages, in the place of the state. Only the :func:`greeting` is
shorter. It goes before all others over a group, since another version may make them of another form.

No other file knows the layout. One more thing to agree on is one of these:

- An option of the scaler: one more in options.py, of those that ``collaborators_of`` of scaler.py checks, by
  core/validation.py, and gives to the agreement, and in the docstrings of the scalers (JAX's have options of their
  own). The first step says if ranks differ.
- What may change from message to message: a field of the claim, before ``kind``, which ``next_claim`` fills; claims
  that other files make leave it at its default.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import numbers
import operator
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from array_api_compat import array_namespace

from gradscale.core.arithmetic import state_fields
from gradscale.core.backend import Backend
from gradscale.core.gradients import norm_bits
from gradscale.core.protocols import Array, Numbers, Policy, ScaleState
from gradscale.core.validation import bits_of_float32, float32_from_bits
from gradscale.errors import InvalidTypeError, ScaleDesyncError, short_repr
from gradscale.scaler.differences import norm_spread, spread
from gradscale.version import __version__

WORDS = 2
"""How many words the hash has."""
NO_HASH = (0,) * WORDS
"""That of a message without a claim."""
# The difference of two words, added to a third, is an int32.
_WORD_BITS = 30

_FLAGS = 5
_STAGE, _SCALE, _HASH = _FLAGS, _FLAGS + 1, _FLAGS + 5
STATE = slice(_SCALE, _HASH)
"""Where a message has the state: the bits of the scale, and the trackers."""
_NORM = _HASH + WORDS
_MIDDLE = _NORM + 1
_FIELDS = _MIDDLE - _FLAGS
# A state, and its bits.
_STATE, _BITS = struct.Struct("=f3i"), struct.Struct("=4i")
LENGTH = _MIDDLE + _FIELDS

VALUES = 2 * (_HASH - _SCALE)
"""How many values of ranks a message carries."""

# By how many steps of a float32 the norms of ranks that hold the same gradients may differ, since processors add up in
# other orders: by a thousandth.
_CLOSE = 2**13

# Numbers that hardly another message holds in this place, and its negative in the other; MAX keeps _DETAILS.
_USUAL, _CARRYING, _DETAILS = 0x47534D30, 0x47534D31, 0x47534D32

# Of a float32.
_BITS_OF_ONE = 0x3F800000

_RANK_BITS = 20
_LAST_RANK = (1 << _RANK_BITS) - 1
# Of a reason_code below the reason: the rank, and above it two bits for its own loss.
_CODE_BITS = _RANK_BITS + 2


# The words and numbers that ranks hold in common.


class Purpose(enum.StrEnum):
    """The call that sends a message."""

    STEP = "unscale_() or step()"
    NORM = "unscale_(max_norm=), for the norm over the group"
    DIAGNOSIS = "diagnose(gather=True)"
    MICRO_BATCH = "keeps()"
    GROUP_AGREEMENT = "a GroupAgreement"
    GROUP_AGREEMENT_ON_SPIKES = "a GroupAgreement with spike="
    COMPILED = "gradscale_jax.agree"


class Claim(NamedTuple):
    """Words that ranks must hold in common besides the state; text that may have several lines comes last."""

    call: str
    iteration: int = 0
    message: int = 0
    """The number of the message in the iteration."""
    optimizer: int = 0
    """The number of the optimizer, in the order in which the scaler first used them."""
    scaler: int = 0
    """The number of the scaler, in the order in which the group has had them."""
    group: int = 0
    """The position of the group in the list."""
    settings: int = 0
    """The number that ``Agreement.settings_hash`` gives the scaler's policy and options."""
    steps: int = 0
    """How many steps the iterations before have had."""
    max_norm: float | None = None
    checksum: str = ""
    """Of gradients that ranks hold alike, after a micro-batch was dropped."""
    kind: str = ""
    """The optimizer's class and number of ``param_groups``, or its name."""


def hash_of(claim: Claim) -> tuple[int, ...]:
    """Return the hash of a claim as numbers from 0 to 2**30-1."""
    text = "\n".join(map(str, claim)).encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return number >> 64 - _WORD_BITS, number & (1 << _WORD_BITS) - 1


# Reasons to skip a step, and the verdict.


class Reason(enum.IntEnum):
    """Why a rank skips a step; false if it makes it. From FAILED on it is an error on every rank.

    Of the others the gravest is the last, which MAX over the ranks keeps. A spike is 1, so that a flag, 0 or 1, is its
    number, and windows learn from no step with a greater one.

    One more reason that the program gives is:

    1. A member before OVERFLOW, in the order of gravity (the members after it are one more), and its call in
       ``_CALLS``.
    2. Its words in ``REASONS`` of reports.py, the gravest first, and its name in ``Words`` and ``StepReport``.
    3. A method of the scaler beside ``refuse``, and its name among those that torch's scaler makes ``untraced``.
    4. Its name in what ``counts()``, state dicts and logs are compared with: pages, and tests of literal counts.
    """

    STEPPED = 0
    SPIKE = 1
    REFUSED = 2
    OVERFLOW = 3
    FAILED = 4
    """Its gradients cannot be unscaled; an error on every rank."""
    NO_GRADIENTS = 5
    """No rank has a gradient: an error on every rank. The flags of the message say it, and no code."""
    NOT_SCALED = 6
    """There are gradients, and no rank has scaled by its state, new or loaded: as NO_GRADIENTS."""


class LossFault(enum.IntEnum):
    """What is wrong with a rank's own loss; a reduction gives the gradients of a bad one to all ranks."""

    NONE = 0
    SPIKE = 1
    NONFINITE = 3
    """As bits it contains a spike."""


def reason_code(reason: Reason, rank: int, fault: LossFault = LossFault.NONE) -> int:
    """Return a reason and a rank as one number, whose MAX over the ranks has the gravest reason.

    It has the lowest rank with that reason: of those whose own loss has the gravest fault, if there are any.
    """
    return reason << _CODE_BITS | fault << _RANK_BITS | _LAST_RANK - min(rank, _LAST_RANK)


def is_skip(code: Array | int) -> Array | bool:
    """Tell whether a :func:`reason_code` skips the step: that of a spike which is only seen does not."""
    return code >= 1 << _CODE_BITS


def reason_number(code: Array | int) -> Array | int:
    """Return the number of the reason in a :func:`reason_code`, 0-d int32 or an int."""
    return code >> _CODE_BITS


def fault_of(loss: Array | float | None) -> LossFault:
    """Return the fault that the host sees in a loss: whether it is a number that is not finite."""
    return LossFault.NONFINITE if isinstance(loss, float) and not math.isfinite(loss) else LossFault.NONE


def fault_in(code: int) -> LossFault:
    """Return the fault of the loss in a :func:`reason_code`."""
    return LossFault(code >> _RANK_BITS & 3)


def has_seen(verdict: Verdict, agreed: int, code: int, fault: LossFault) -> bool:
    """Tell whether a rank, by its own :func:`reason_code` and loss, has itself seen why all skip."""
    if verdict.by_loss:
        return max(fault, fault_in(code)) >= fault_in(agreed)
    return verdict.local_nonfinite > 0 if verdict.reason is Reason.OVERFLOW else reason_number(code) == verdict.reason


def reason_and_rank(code: int) -> tuple[Reason, int]:
    """Return the reason and the rank of a :func:`reason_code`."""
    return Reason(code >> _CODE_BITS), _LAST_RANK - (code & _LAST_RANK)


class Presence(enum.IntEnum):
    """The gradients that a rank has; the MAX over ranks counts."""

    NONE = 0
    ZEROS = 1
    """Nothing but zeros; only a rank that has not scaled tells them from others."""
    SOME = 2
    REFUSED = 3
    """The program refuses the step, which an overflow on any rank hides in the code; one more for a graver reason."""


class Scaled(enum.IntEnum):
    """When a rank has scaled the loss of its gradients; the MAX over ranks counts."""

    NEVER = 0
    """Not by a state that is new or was loaded."""
    BEFORE = 1
    """In an iteration before, and the gradients are divided all the same."""
    NOW = 2
    """In this iteration, or it needs not; and the rule for spikes has no value."""
    WITH_VALUES = 3
    """The same, and it has one, or needs none."""


_CALLS = {Reason.REFUSED: "refuse()"}
PROGRAM_CALLS = {reason: _CALLS[reason] for reason in Reason if Reason.SPIKE < reason < Reason.OVERFLOW}
"""By which call the program gives a reason; one that is missing here is a KeyError."""
_REFUSALS = {Presence.REFUSED + number: reason for number, reason in enumerate(PROGRAM_CALLS)}
KEEPS_SCALE = Reason.SPIKE, *PROGRAM_CALLS
"""Why a step is neither clean nor an overflow, so that the scale stays as it is."""


class Flags(NamedTuple):
    """The five fields of a message whose MAX over the ranks makes the verdict: numbers, or 0-d int32 of a device."""

    nonfinite: Array = 0
    limits: Array = 0
    """1: an overflow must be raised, as the policy says; and 2 more: of this rank, one more skipped step ends the run.
    Ranks with one state differ in the latter alone."""
    presence: Array = Presence.SOME
    scaled: Array = Scaled.WITH_VALUES
    code: Array = 0


class Verdict(NamedTuple):
    """The agreement of the group, as Python values."""

    reason: Reason
    """Why no rank makes the step, if so."""
    by: int | None
    """The lowest rank with this reason, or with a spike that skips nothing; None if the host cannot tell any."""
    nonfinite: int
    """Largest number of non-finite gradient arrays on any rank."""
    local_nonfinite: int
    """The number on this rank."""
    scale: float
    """The scale that all ranks hold."""
    flags: Flags = Flags()
    """Those of all ranks, numbers."""
    by_loss: bool = False
    """Whether the own loss of the rank ``by`` is the cause."""
    norm: float | None = None
    """The norm of this rank's gradients before they were clipped, if they were."""
    loss: float | None = None
    """This rank's loss, if the host knows it."""
    saw: bool = True
    """Whether this rank itself has seen why the step is skipped: a bad loss of its own if that is the cause."""

    @property
    def at_min_scale(self) -> bool:
        """Whether the overflow must be raised, as the policy says."""
        return bool(self.flags.limits & 1)

    @property
    def gives_up(self) -> bool:
        """Whether a rank ends the run if the step is skipped, since it has skipped as many in a row as it allows."""
        return bool(self.flags.limits > 1)

    @property
    def is_unscaled(self) -> bool:
        """Whether no rank has scaled a loss in this iteration, and gradients are divided all the same."""
        return bool(self.flags.scaled == Scaled.BEFORE and self.flags.presence)

    @property
    def lacks_values(self) -> bool:
        """Whether no rank has a value for the rule for spikes."""
        return bool(self.flags.scaled == Scaled.NOW and self.flags.presence)

    @property
    def refusal(self) -> Reason:
        """Why the program on some rank refuses the step, if so, whatever else is wrong."""
        return _REFUSALS.get(self.flags.presence, Reason.STEPPED)


def verdict_from(flags: Flags, local_nonfinite: int, scale: float) -> Verdict:
    """Return the verdict that the ranks' findings give, of which the code is the gravest :func:`reason_code`."""
    nonfinite, _, presence, scaled, code = flags
    reason, by = reason_and_rank(code) if code else (Reason.STEPPED, None)
    if not reason and not presence:
        reason, by = Reason.NO_GRADIENTS, None
    by_loss = by is not None and fault_in(code) > 0
    if nonfinite and reason not in (Reason.OVERFLOW, Reason.FAILED):
        # A count of devices names no rank; a bad loss does.
        reason, by = Reason.OVERFLOW, by if by_loss else None
    if not scaled and presence >= Presence.SOME and reason in (Reason.STEPPED, Reason.SPIKE, Reason.OVERFLOW):
        reason, by, by_loss = Reason.NOT_SCALED, None, False
    return Verdict(reason, by, nonfinite, local_nonfinite, scale, flags, by_loss)


# The message that a rank sends.


def pack_numbers(state: Numbers, words: Sequence[int], flags: Flags, norm: float = 0.0) -> list[int]:
    """Return the message of a state of Python numbers; ``words``: the hash of the claim."""
    # The trackers of a user's policy may be floats on the host.
    bits = _BITS.unpack(_STATE.pack(state[0], *map(int, state[1:])))
    fields = [_USUAL, *bits, *words, bits_of_float32(norm) if norm else 0]
    return [*flags, *fields, *map(operator.neg, fields)]


def pack_arrays(
    backend: Backend, policy: Policy, state: ScaleState, words: Sequence[int], flags: Flags, norm: Array | float = 0.0
) -> Array:
    """Return the message of a state of arrays, 1-d int32, as :func:`pack_numbers` does; no host read."""
    xp, like = array_namespace(state.scale), state.scale
    at_min_scale = policy.at_min_scale(state)
    if at_min_scale is not None:
        if flags.limits:
            at_min_scale = flags.limits + xp.astype(xp.asarray(at_min_scale), xp.int32)
        flags = flags._replace(limits=at_min_scale)
    bits = bits_of_float32(norm) if isinstance(norm, float) else norm_bits(backend, norm)
    fields: list[Array | int] = [*flags, _USUAL, backend.fingerprint(state), *words, bits]
    # All numbers at once, with a 0 in the place of each array: on a device each copy is a launch.
    numbers = backend.integers([int(x) if isinstance(x, int) else 0 for x in fields], like)
    start = xp.concat([numbers[k : k + 1] if isinstance(x, int) else _as_int32(x) for k, x in enumerate(fields)])
    return xp.concat([start, -start[_FLAGS:]])


def pack_alone(backend: Backend, state: ScaleState, flags: Flags, words: Sequence[Array]) -> Array:
    """Return what the host reads if it decides alone, 1-d int32: the flags that it does not know, the state, words."""
    xp = array_namespace(state.scale)
    fields = state_fields(state, backend.bits(state.scale))
    for flag in reversed([x for x in flags if not isinstance(x, int)]):
        # To cast may be a launch, and the bits of a float say as much.
        bits = backend.bits(flag) if flag.dtype == xp.float32 else flag
        fields.insert(0, xp.astype(flag, xp.int32) if bits is None or bits.dtype != xp.int32 else bits)
    return xp.concat([xp.reshape(x, (-1,)) for x in (*fields, *words)])


def _as_int32(x: Array) -> Array:
    xp = array_namespace(x)
    # To cast may copy.
    return xp.reshape(x if x.dtype == xp.int32 else xp.astype(x, xp.int32), (-1,))


def unpack_alone(flags: Flags, values: Sequence[int]) -> tuple[Flags, Sequence[int], Sequence[int]]:
    """Return the flags, the state as it travels, and the words, from the values of :func:`pack_alone`."""
    unknown = iter(values)
    flags = Flags(*(x if isinstance(x, int) else next(unknown) for x in flags))
    rest = [*unknown]
    is_float = flags.nonfinite == _BITS_OF_ONE
    return flags._replace(nonfinite=1) if is_float else flags, rest[: _HASH - _SCALE], rest[_HASH - _SCALE :]


def pack_values(words: Sequence[int], values: Sequence[int], stage: int = _CARRYING) -> list[int]:
    """Return the message of one round of values, of which there are :data:`VALUES`; it says nothing of a state."""
    half = VALUES // 2
    return [0] * _FLAGS + [stage, *values[:half], *words, 0, -stage, *values[half:], *map(operator.neg, words), 0]


def pack_failure(words: Sequence[int], rank: int) -> list[int]:
    """Return the message of a rank whose gradients cannot be unscaled."""
    return pack_numbers(Numbers(0.0), words, Flags(1, code=reason_code(Reason.FAILED, rank)))


def details_message() -> list[int]:
    """Return the message of a rank that has seen a difference, and waits until all ranks send their claims."""
    return pack_values(NO_HASH, [0] * VALUES, _DETAILS)


def with_other_hash(backend: Backend | None, x: Array, before: Sequence[int], after: Sequence[int]) -> Array:
    """Return a message for the next group of a list, whose claim has another hash; None and a list, or an array."""
    row = [0] * LENGTH
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        row[_HASH + index], row[_HASH + _FIELDS + index] = other - one, one - other
    if backend is None:
        return list(map(operator.add, x, row))
    return x + backend.integers(row, x)


# The answer of the group.


def flags_in(agreed: Array) -> Flags:
    """Return the flags of an answer, 0-d. No host read."""
    xp = array_namespace(agreed)
    # Not by index, for which NumPy gives a scalar.
    return Flags(*(xp.reshape(agreed[index : index + 1], ()) for index in range(_FLAGS)))


def bounds_in(agreed: Array) -> tuple[Array, Array]:
    """Return the least and the greatest state and hash of any rank, 1-d int32; they are equal if all hold one."""
    return -agreed[_MIDDLE + 1 : -1], agreed[_SCALE:_NORM]


def differ_in(agreed: Array) -> Array:
    """Tell whether ranks hold different states, hashes or norms, 0-d; norms may after an overflow. No host read."""
    xp, (least, most) = array_namespace(agreed), bounds_in(agreed)
    return xp.logical_or(xp.any(least != most), norms_differ_in(agreed))


def norms_differ_in(agreed: Array) -> Array:
    """Tell whether ranks hold norms that are not close, 0-d, as they may after an overflow. No host read."""
    return array_namespace(agreed).any(agreed[_NORM : _NORM + 1] + agreed[-1:] > _CLOSE)


def state_of(values: Sequence[int]) -> Numbers:
    """Return the state of a message as Python numbers."""
    return Numbers(*_STATE.unpack(_BITS.pack(*values[STATE])))


def norm_of(values: Sequence[int]) -> float:
    """Return the norm of a message."""
    return float32_from_bits(values[_NORM])


def unpack_values(values: Sequence[int]) -> list[int]:
    """Return the values that a message carries."""
    return [*values[STATE], *values[_SCALE + _FIELDS : _HASH + _FIELDS]]


def _has_one_norm(values: Sequence[int]) -> bool:
    return values[_NORM] + values[-1] <= _CLOSE


class Outcome(enum.Enum):
    """How the ranks stand by an answer."""

    ONE_STATE = 0
    """All ranks have sent this message, whatever their findings and the values they carry."""
    DIFFERENT = 1
    FAILED = 2
    """Some rank's gradients cannot be unscaled."""
    DETAILS = 3
    """Some rank has seen a difference in a message before, and this rank has not."""
    FOREIGN = 4
    """Some rank has sent another message than gradscale's."""


def outcome(values: Sequence[int], own: Sequence[int]) -> Outcome:
    """Return how the ranks stand by an answer; ``own`` is this rank's message over the last group of a list."""
    if values[_FLAGS:] != own[_FLAGS:]:
        if own[_STAGE] == _CARRYING:
            # The values that ranks carry may differ.
            own = pack_values(own[_HASH:_NORM], unpack_values(values))
        if values[0] or _has_one_norm(values):
            # Norms may differ, too, if they are close, or the gradients overflow.
            own = [*own[:_NORM], values[_NORM], *own[_MIDDLE:-1], values[-1]]
    # If MAX has changed neither a field nor its negative, all ranks have sent the same.
    has_failed = values[_FLAGS - 1] >> _CODE_BITS >= Reason.FAILED
    if values[_FLAGS:] == own[_FLAGS:] and not has_failed:
        return Outcome.ONE_STATE
    stages = {values[_STAGE], -values[_MIDDLE]}
    # No maximum is below what went into it.
    if not stages <= {_USUAL, _CARRYING, _DETAILS} or any(map(operator.lt, values[_FLAGS:], own[_FLAGS:])):
        return Outcome.FOREIGN
    if has_failed:
        return Outcome.FAILED
    return Outcome.DETAILS if _DETAILS in stages and own[_STAGE] != _DETAILS else Outcome.DIFFERENT


def code_in(values: Sequence[int]) -> int:
    """Return the gravest :func:`reason_code` of an answer."""
    return values[_FLAGS - 1]


def verdict_of(values: Sequence[int], own: Sequence[int]) -> Verdict:
    """Return the verdict of ranks that hold one state, or of which some cannot unscale their gradients."""
    scale, *_ = _STATE.unpack(_BITS.pack(*values[STATE]))
    return verdict_from(Flags(*values[:_FLAGS]), own[0], scale)


# The words for a difference between ranks.


def spread_of(values: Sequence[int], own: Sequence[int]) -> list[str]:
    """Say between which values the states and norms of an answer lie; [] if some message had no state."""
    if {values[_STAGE], -values[_MIDDLE]} != {_USUAL}:
        return []
    texts = spread([-value for value in values[_MIDDLE + 1 :]], values[STATE], state_of(own))
    if not (values[0] or _has_one_norm(values)):
        least, most = map(float32_from_bits, (-values[-1], values[_NORM]))
        texts.append(norm_spread(least, most))
    return texts


def claimed(own: Sequence[int], claim: Claim, settings: str) -> dict[str, object]:
    """Return the details for the other ranks: the state of a message, its claim, and the settings."""
    state = {} if own[_STAGE] == _CARRYING else state_of(own)._asdict()
    # Ranks that hold the same gradients have about the same norm.
    return (
        state
        | {"norm": f"{float32_from_bits(own[_NORM]):.3g}"}
        | claim._asdict()
        | {"settings": [claim.settings, settings]}
    )


def foreign_message(where: str) -> ScaleDesyncError:
    """Return the error for a message that is not gradscale's."""
    return ScaleDesyncError(
        f"a foreign message was met, seen by {where}: some rank makes a collective of its own over this group where "
        f"others make gradscale's. No rank takes this step, and what that collective gave is wrong, too. Make all "
        f"collectives over the group in one order on every rank, or pass the scaler a group of its own"
    )


# The first message.


def greeting() -> list[int]:
    """Return the first message over a group, ``[release, -release, build, -build]``, whose form never changes.

    ``release`` is the version's three numbers; ``build`` is a hash of the whole version and of the form of messages.
    """
    major, minor, micro = map(int, re.findall(r"\d+", f"{__version__}.0.0")[:3])
    release = (major & 0x7FF) << 20 | (minor & 0x3FF) << 10 | micro & 0x3FF
    form = __version__, LENGTH, _CODE_BITS, _USUAL, Claim._fields, [*Reason.__members__], [*Purpose]
    build = zlib.crc32(ascii(form).encode()) & 0x7FFFFFFF
    return [release, -release, build, -build]


def require_one_version(values: Sequence[int], own: Sequence[int], where: str) -> None:
    """Raise ScaleDesyncError if the greetings of all ranks after MAX (``values``) are not this rank's own."""
    if list(values) == list(own):
        return
    if len(values) != len(own) or any(map(operator.lt, values, own)):
        raise foreign_message(where)
    here, most, least = (f"{one >> 20}.{one >> 10 & 0x3FF}.{one & 0x3FF}" for one in (own[0], values[0], -values[1]))
    versions = f"two builds of version {here}" if least == most else f"versions from {least} to {most} (here {here})"
    msg = (
        f"ranks run different versions of gradscale, seen by {where}: {versions}. No rank takes this step. Install one "
        f"version on every rank"
    )
    raise ScaleDesyncError(msg)


# The number of settings.

_Form: TypeAlias = "str | bytes | tuple[_Form, ...] | None"


def settings_hash(policy: object, options: Mapping[str, object] | None = None) -> int:
    """Return a hash of a policy's settings, or of its name, and of other options, from 0 to 2**31-1."""
    text = type(policy).__qualname__
    if dataclasses.is_dataclass(policy):
        what = f"the policy {text}"
        try:
            # Not repr: which characters it escapes depends on the version of Python.
            text = ascii(_fields(policy, what))
        except RecursionError as error:
            msg = f"{what} must be the same value in every process, got one that is too deep or holds itself"
            raise InvalidTypeError(msg) from error
    text += "".join(f"{name}={_form(value, name)!a}" for name, value in (options or {}).items())
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def _fields(value: Any, what: str) -> _Form:
    """Return a dataclass's name and compared fields as nested tuples of text, the same in every process."""
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
        f"{short_repr(value)}: make it a number, text, bytes, an enumeration, a class, or a tuple or frozen dataclass "
        f"of these, or leave the field out with dataclasses.field(compare=False)"
    )
    raise InvalidTypeError(msg)


def _real(value: SupportsFloat) -> str:
    """Return a real number as its exact ratio, in digits that Python does not limit; or as inf or nan."""
    if isinstance(value, numbers.Rational):
        return f"{value.numerator:x}/{value.denominator:x}"
    wide = float(value)
    return "{:x}/{:x}".format(*wide.as_integer_ratio()) if math.isfinite(wide) else str(wide)


def _name(kind: type) -> str:
    # In a spawned process the program's module has another name.
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"
