"""What ranks differ in, in words: which values of their claims and states, and which ranks hold what."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gradscale.core.protocols import Numbers, ScaleState
from gradscale.core.validation import float32_from_bits

# The position in each group of a list.
_Rank: TypeAlias = tuple[int, ...]

# How much an error of many ranks lists: fields, values and their characters; and of one field values or runs of ranks.
_MAX_FIELDS, _MAX_VALUES, _MAX_CHARACTERS, _MAX_OF_FIELD = 4, 12, 720, 8
# Characters of the differences over several groups.
_MAX_JOINED = 1800
# The fields that are named if ranks make different calls.
_OF_ANY_CALL = ("call", "iteration", "message", "optimizer", "scaler", "group")
_NAMES = {
    "call": "the call itself",
    "message": "call of the iteration",
    "scaler": "scaler of the group",
    "group": "position of the group in the list",
    "steps": "steps made in the iterations before",
    "kind": "optimizer's class, number of param_groups or name",
    "norm": "norm of the gradients",
}
_CONSEQUENCES = {
    "norm": "of a rank that holds all gradients it is the same on all: average them before unscale_(); if ranks hold "
    "parts, give norm_over='group'",
    "message": "so some rank left one out",
    "optimizer": "numbered in the order in which the scaler has met them, so some rank has them in another order",
    "scaler": "numbered in the order of their construction, so some rank has them in another order",
    "group": "so some rank has the groups in another order",
    "steps": "so some rank left out step() after unscale_(), or its optimizer alone has refused one, or ranks have "
    "loaded states that were saved after other steps",
    "kind": "so some rank has them in another order; if ranks hold other parts of a model, give its optimizer one name "
    "on all: scaler.name(optimizer, 'main')",
}


def spread(lowest: Sequence[int], highest: Sequence[int], own: Numbers | None = None) -> list[str]:
    """Say between which values the states of ranks lie, by :func:`bounds_in`; [] if they are one."""
    texts = []
    for index, name in enumerate(ScaleState._fields):
        low, high = (float32_from_bits(one) if index == 0 else one for one in (lowest[index], highest[index]))
        if low != high:
            texts.append(f"{name} from {low} to {high}" + (f" (here {own[index]})" if own is not None else ""))
    return texts


def norm_spread(least: float, most: float) -> str:
    """Say between which values the norms of ranks lie."""
    return f"{_NAMES['norm']} from {least} to {most} ({_CONSEQUENCES['norm']})"


def difference(details: Mapping[_Rank, Mapping[str, Any]]) -> str:
    """Say in what ranks differ, and which ranks hold what, by the details of each: some 20 lines at most."""
    # By name and value, its text and the ranks that hold it.
    values: dict[str, dict[object, tuple[str, list[_Rank]]]] = {}
    for rank, claim in details.items():
        for name, value in claim.items():
            key, text = value if name == "settings" else (value, str(value))
            values.setdefault(name, {}).setdefault(key, (text, []))[1].append(rank)
    differing = [name for name, by_value in values.items() if len(by_value) > 1]
    if "call" in differing:
        differing = [name for name in differing if name in _OF_ANY_CALL]
    named, others = differing[:_MAX_FIELDS], differing[_MAX_FIELDS:]
    count = min(_MAX_OF_FIELD, _MAX_VALUES // max(1, len(named)))
    room = _MAX_CHARACTERS // max(1, sum(min(count, len(values[name])) for name in named))
    texts = [_field_text(name, list(values[name].values()), count, room) for name in named]
    if others:
        texts.append(f"and also {', '.join(others)}")
    return "; ".join(texts)


def joined(differences: Iterable[str]) -> str:
    """Join the differences over several groups, as many as an error has room for."""
    texts = list(dict.fromkeys(filter(None, differences)))
    kept = sum(length <= _MAX_JOINED for length in itertools.accumulate(map(len, texts)))
    parts, others = texts[: max(1, kept)], texts[max(1, kept) :]
    if others:
        parts.append(f"and {len(others)} more over other groups")
    return "; ".join(parts)


def _field_text(name: str, values: Sequence[tuple[str, Sequence[_Rank]]], count: int, room: int) -> str:
    texts = [text for text, _ in values]
    if name == "settings":
        texts = _distinct_words(texts)
    parts = [
        f"{text if len(text) <= room else text[:room] + '...'} on rank {_ranks_text(ranks)}"
        for text, (_, ranks) in zip(texts[:count], values, strict=False)
    ]
    more = f" | and {len(texts) - count} other values" if len(texts) > count else ""
    consequence = f" ({_CONSEQUENCES[name]})" if name in _CONSEQUENCES else ""
    return f"{_NAMES.get(name, name)}: {' | '.join(parts)}{more}{consequence}"


def _distinct_words(texts: Sequence[str]) -> list[str]:
    """Return of each text the words that some other does not have, or all of it if there is none."""
    words = [re.split(r"[(), ]+", text) for text in texts]
    common = set(words[0]).intersection(*words)
    return [
        ", ".join(word for word in own if word not in common) or text for own, text in zip(words, texts, strict=True)
    ]


def _ranks_text(ranks: Sequence[_Rank]) -> str:
    """Return ranks as text, such as ``0-61, 63``, with the ranks in each group of a list as ``0/1``."""
    # In a run the last number grows as the position does.
    numbered = itertools.groupby(enumerate(ranks), lambda item: (*item[1][:-1], item[1][-1] - item[0]))
    runs = [[rank for _, rank in run] for _, run in numbered]
    texts: list[str] = []
    for run in runs[:_MAX_OF_FIELD]:
        names = ["/".join(map(str, rank)) for rank in run]
        texts += names if len(names) < 3 else [f"{names[0]}-{names[-1]}"]
    others = sum(map(len, runs[_MAX_OF_FIELD:]))
    return ", ".join(texts) + (f" and {others} others" if others else "")
