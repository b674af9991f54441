"""Claim: in words, what ranks must hold in common; they compare a hash of it, and tell it if that differs.

The number of a policy's settings is part of it, the same in every process for equal settings.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import math
import numbers
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError

__all__ = ["WORDS", "Call", "Claim", "difference", "identify", "is_fixed", "joined", "words"]

_Form: TypeAlias = "str | bytes | tuple[_Form, ...] | None"

# The position in each group of a list.
_Rank: TypeAlias = tuple[int, ...]

_MAIN = "__main__"
# The name that the program's module has in a spawned process.
_SPAWNED_MAIN = "__mp_main__"

WORDS = 2
"""How many words the hash has."""
# The difference of two words, added to a third, is an int32.
_WORD_BITS = 30
# How much an error of many ranks lists: fields, values and their characters; and of one field values or runs of ranks.
_NAMED, _VALUES, _CHARACTERS, _LISTED = 4, 12, 720, 8
# Characters of what is told over several groups.
_LONGEST = 1800


class Call(enum.StrEnum):
    """What sends a message."""

    STEP = "unscale_() or step()"
    NORM = "unscale_(max_norm=), for the norm over the group"
    DIAGNOSIS = "diagnose(gather=True)"
    GROUP_AGREEMENT = "a GroupAgreement"
    GROUP_AGREEMENT_ON_SPIKES = "a GroupAgreement with spike="
    COMPILED = "gradscale_jax.agree"


class Claim(NamedTuple):
    """What ranks must hold in common besides the state, in words."""

    call: str
    iteration: int = 0
    message: int = 0
    """Which one of the iteration."""
    optimizer: int = 0
    """In the order in which the scaler has met them."""
    scaler: int = 0
    """In the order in which the group has had them."""
    group: int = 0
    """Position in the list."""
    settings: int = 0
    """The number of the policy and the rest; see :func:`identify`."""
    steps: int = 0
    """Made so far."""
    max_norm: float | None = None
    kind: str = ""
    """The optimizer's class and number of ``param_groups``, or its name."""


def words(claim: Claim | None) -> tuple[int, ...]:
    """Return a hash as numbers from 0 to 2**30-1; zeros for a process that decides alone."""
    if claim is None:
        return (0,) * WORDS
    # The last one alone can hold the separator.
    text = "\n".join(map(str, claim)).encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return number >> 64 - _WORD_BITS, number & (1 << _WORD_BITS) - 1


# What is compared, of what ranks hold, whatever they send.
_OF_ANY_CALL = ("call", "iteration", "message", "optimizer", "scaler", "group")
_NAMES = {
    "call": "the call itself",
    "message": "call of the iteration",
    "scaler": "scaler of the group",
    "group": "position of the group in the list",
    "steps": "steps made so far",
    "kind": "optimizer's class, number of param_groups or name",
}
_CONSEQUENCES = {
    "message": "so some rank left one out",
    "optimizer": "numbered in the order in which the scaler has met them, so some rank has them in another order",
    "scaler": "numbered in the order of their construction, so some rank has them in another order",
    "group": "so some rank has the groups in another order",
    "steps": "so some rank left out step() after unscale_()",
    "kind": "so some rank has them in another order; if ranks hold other parts of a model, give its optimizer one name "
    "on all: scaler.name(optimizer, 'main')",
}


def difference(told: Mapping[_Rank, Mapping[str, Any]]) -> str:
    """Say in what ranks differ, and which ranks hold what, by what each of them has told: some 20 lines at most."""
    # By name and value, its text and the ranks that hold it.
    held: dict[str, dict[Any, tuple[str, list[_Rank]]]] = {}
    for rank, claim in told.items():
        for name, value in claim.items():
            key, text = value if name == "settings" else (value, str(value))
            held.setdefault(name, {}).setdefault(key, (text, []))[1].append(rank)
    differing = [name for name, by_value in held.items() if len(by_value) > 1]
    if "call" in differing:
        differing = [name for name in differing if name in _OF_ANY_CALL]
    named, others = differing[:_NAMED], differing[_NAMED:]
    count = min(_LISTED, _VALUES // max(1, len(named)))
    room = _CHARACTERS // max(1, sum(min(count, len(held[name])) for name in named))
    texts = [_described(name, list(held[name].values()), count, room) for name in named]
    if others:
        texts.append(f"and also {', '.join(others)}")
    return "; ".join(texts)


def joined(differences: Iterable[str]) -> str:
    """Return what was told over several groups, as much as an error has room for."""
    texts = list(dict.fromkeys(filter(None, differences)))
    kept = sum(length <= _LONGEST for length in itertools.accumulate(map(len, texts)))
    others = texts[max(1, kept) :]
    return "; ".join([*texts[: max(1, kept)], *[f"and {len(others)} more over other groups"] * bool(others)])


def _described(name: str, held: Sequence[tuple[str, Sequence[_Rank]]], count: int, room: int) -> str:
    texts = [text for text, _ in held]
    if name == "settings":
        texts = _apart(texts)
    shown = [
        f"{text if len(text) <= room else text[:room] + '...'} on rank {_listed(ranks)}"
        for text, (_, ranks) in zip(texts[:count], held, strict=False)
    ]
    more = f" | and {len(texts) - count} other values" if len(texts) > count else ""
    consequence = f" ({_CONSEQUENCES[name]})" if name in _CONSEQUENCES else ""
    return f"{_NAMES.get(name, name)}: {' | '.join(shown)}{more}{consequence}"


def _apart(texts: Sequence[str]) -> list[str]:
    """Return of each text the words that some other does not have, or all of it if there is none."""
    words = [re.split(r"[(), ]+", text) for text in texts]
    common = set(words[0]).intersection(*words)
    return [
        ", ".join(word for word in own if word not in common) or text for own, text in zip(words, texts, strict=True)
    ]


def _listed(ranks: Sequence[_Rank]) -> str:
    """Return ranks as text, such as ``0-61, 63``, with the ranks in each group of a list as ``0/1``."""
    runs: list[list[_Rank]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == (*rank[:-1], rank[-1] - 1):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts: list[str] = []
    for run in runs[:_LISTED]:
        names = ["/".join(map(str, rank)) for rank in run]
        texts += names if len(names) < 3 else [f"{names[0]}-{names[-1]}"]
    others = sum(map(len, runs[_LISTED:]))
    return ", ".join(texts) + (f" and {others} others" if others else "")


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
