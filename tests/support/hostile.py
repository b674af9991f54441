"""Objects that raise, lie or are huge when they are read, and strategies of them for the fuzzing of every entrance."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

HUGE = 10**5000
_METHODS = (
    *("__float__", "__index__", "__int__", "__bool__", "__len__", "__iter__", "__getitem__", "__contains__"),
    *("__eq__", "__lt__", "__repr__", "__str__", "__hash__", "__array__", "__call__"),
)


class _OddError(Exception):
    """What no library expects, and no text says."""

    def __str__(self) -> str:
        raise ValueError("not even this")


def _raise(*_):
    raise _OddError


class Raising:
    """Raises from whatever it is asked, but for its attributes."""


class Lying:
    """Answers whatever it is asked with the wrong kind of thing."""


class Attributes:
    """Raises at every attribute that it does not have."""

    def __getattr__(self, name: str):
        raise _OddError(name)


class RaisingMapping(Mapping[str, Any]):
    """A mapping that has keys, and raises for their values."""

    def __init__(self, *keys: str):
        self._names = keys

    def __getitem__(self, key: str):
        raise _OddError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return 7


class LyingList(list[Any]):
    """A list that says it is longer, and cannot be walked to the end."""

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        yield 1.0
        raise _OddError


class LyingFloat(float):
    """A float that is none when it is asked for one."""

    def __float__(self):
        return "1.0"

    __lt__ = __repr__ = _raise


class LyingText(str):
    """A text that equals everything."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


for _method in _METHODS:
    setattr(Raising, _method, _raise)
    setattr(Lying, _method, lambda *_: Lying)


def deep(levels: int, leaf=None):
    """Return a leaf in lists and dicts of so many levels."""
    tree = np.float32(1.0) if leaf is None else leaf
    for level in range(levels):
        tree = [tree] if level % 2 else {"x": tree}
    return tree


def holding_itself(leaf=None):
    """Return a tree whose dict holds the list that it is in."""
    tree: list[Any] = [np.ones(2, np.float32) if leaf is None else leaf]
    tree.append({"back": tree})
    return tree


# Made anew for each use: some are arrays, which may be written to.
HOSTILE: dict[str, Callable[[], Any]] = {
    "huge": lambda: HUGE,
    "minus huge": lambda: -HUGE,
    "huge in a list": lambda: [HUGE],
    "huge key": lambda: {HUGE: 1.0},
    "bytes": lambda: b"1",
    "complex": lambda: 1j,
    "fraction": lambda: Fraction(1, 3),
    "object": object,
    "class": lambda: float,
    "function": lambda: deep,
    "array": lambda: np.array([1.0, 2.0]),
    "array of text": lambda: np.array(["interval", "growth"]),
    "0-d array": lambda: np.array(3),
    "empty array": lambda: np.array([]),
    "array of objects": lambda: np.array([object(), None], dtype=object),
    "array of complex": lambda: np.complex64(1),
    "raising": Raising,
    "lying": Lying,
    "no attributes": Attributes,
    "raising mapping": lambda: RaisingMapping("scale", "kind", "params"),
    "lying list": lambda: LyingList([1, 2]),
    "lying float": lambda: LyingFloat(2.0),
    "lying text": lambda: LyingText("interval"),
    "namespace": lambda: types.SimpleNamespace(shape=None, dtype="float32"),
    "shape of nonsense": lambda: types.SimpleNamespace(shape="ab", dtype=Raising(), grad=1),
    "raising iterator": lambda: (_raise() for _ in range(2)),
    "holding itself": holding_itself,
    "very deep": lambda: deep(3000),
}


@dataclasses.dataclass(frozen=True)
class Named:
    """Stands for a hostile object, which Hypothesis could not print."""

    name: str


def made(spec):
    """Return what a strategy has drawn with the hostile objects in their places."""
    if isinstance(spec, Named):
        return HOSTILE[spec.name]()
    if type(spec) is dict:
        return {key: made(value) for key, value in spec.items()}
    if type(spec) in (list, tuple):
        return type(spec)(map(made, spec))
    return spec


_LIMITS = [1.0, 2.0, 0.5, 2000, 2**31 - 1, 2**31, 2**63, 2.0**-126, 2.0**127, 65536.0, 10**400]
_NUMBERS = st.integers(-5, 5) | st.integers() | st.floats() | st.sampled_from(_LIMITS)


def values():
    """Return a strategy of values that are fine, nearly fine or hostile, or of containers of these."""
    hostile = st.sampled_from([Named(name) for name in sorted(HOSTILE)])
    texts = st.sampled_from(["", "interval", "growth", "clean_step", "clamp", "raise", "hold", "DynamicScale", "1"])
    numpy = st.floats(width=32).map(np.float32) | st.integers(-5, 5).map(np.int64)
    leaf = st.one_of(_NUMBERS, hostile, texts, st.booleans(), st.none(), numpy, st.text(max_size=5))
    return leaf | st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=5), leaf, max_size=3)


def changed(fine: Mapping[str, Any]):
    """Return a strategy of dicts that are fine but for a few keys, changed or left out."""
    keys = st.sampled_from(sorted(fine))
    replaced = st.dictionaries(keys | st.text(max_size=3), values(), max_size=3)
    return st.builds(lambda new, gone: {**{k: fine[k] for k in fine if k != gone}, **new}, replaced, st.none() | keys)


def trees():
    """Return a strategy of trees whose leaves are arrays of float32, or hostile."""
    array = st.lists(st.floats(width=32), max_size=3).map(lambda found: np.array(found, np.float32))
    return st.recursive(
        array | array | values(),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=3), below, max_size=3),
    )
