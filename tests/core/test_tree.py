"""Trees: every container is walked in order and rebuilt as its own type."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from gradscale import tree


class Pair(NamedTuple):
    first: Any
    second: Any


Untyped = namedtuple("Untyped", ["x"])


@dataclasses.dataclass
class Layer:
    w: Any
    b: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    w: Any

    def __post_init__(self):
        if isinstance(self.w, str):
            raise TypeError("checked when constructed by the user")


class MyList(list[Any]):
    """A list of another class."""


class MyDict(dict[str, Any]):
    extra = "kept"


CONTAINERS: dict[str, Any] = {
    "list": [1, [2, 3], []],
    "list subclass": MyList([1, 2]),
    "namedtuple": Pair(1, Untyped([2])),
    "dict": {"b": 1, "a": {"c": 2}},
    "OrderedDict": OrderedDict([("b", 1), ("a", 2)]),
    "defaultdict": defaultdict(list, {"a": 1}),
    "dict subclass": MyDict(a=1),
    "UserDict": UserDict({"a": 1}),
    "mapping proxy": MappingProxyType({"a": 1}),
    "dataclass": Layer(1, Layer([2])),
    "frozen dataclass": Frozen((1, 2)),
    "leaf": 7,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_rebuilt_as_its_own_type(name: str):
    given = CONTAINERS[name]
    mapped = tree.map_leaves(lambda leaf: leaf, given)
    assert type(mapped) is type(given)
    assert mapped == given
    assert mapped is not given or not isinstance(given, (list, dict, Layer))
    leaves, rebuild = tree.flatten(given)
    assert rebuild(leaves) == given
    assert type(rebuild(leaves)) is type(given)


def test_a_container_keeps_its_factory_and_order_and_is_rebuilt_without_the_checks_of_its_constructor():
    assert tree.map_leaves(lambda leaf: -leaf, defaultdict(list, {"a": 1}))["new"] == []
    assert list(tree.map_leaves(lambda leaf: -leaf, OrderedDict(b=1, a=2)).items()) == [("b", -1), ("a", -2)]
    assert tree.map_leaves(lambda leaf: f"traced {leaf}", Frozen(1)).w == "traced 1"


def test_text_sets_and_classes_are_leaves():
    leaves: list[Any] = ["text", b"bytes", {1, 2}, frozenset({1}), int, 1.5, object(), Layer]
    assert tree.flatten(leaves)[0] == leaves


@pytest.mark.parametrize(
    "iterable",
    [(x for x in (1, [2])), deque([1, [2]]), iter([1, [2]]), {"k": 1, "l": [2]}.values()],
    ids=["generator", "deque", "iterator", "view"],
)
def test_another_iterable_comes_back_as_a_list(iterable):
    leaves, rebuild = tree.flatten(iterable)
    assert leaves == [1, 2]
    assert rebuild([3, 4]) == [3, [4]]
    assert rebuild([5, 6]) == [5, [6]]


def test_paths_read_as_the_expression_that_reaches_the_leaf():
    given = {"w": [1, Pair(2, 3)], 7: Layer(4, None)}
    found = tree.leaves_with_paths(given)
    assert found == [("['w'][0]", 1), ("['w'][1].first", 2), ("['w'][1].second", 3), ("[7].w", 4), ("[7].b", None)]
    for path, leaf in found:
        assert eval(f"given{path}", {"given": given}) == leaf
    assert tree.leaves_with_paths(3) == [("", 3)]


def test_several_trees_are_mapped_together_by_their_keys():
    first = {"a": 1, "b": [2, Layer(3, 4)]}
    second = {"b": (20, Layer(30, 40)), "a": 10}
    assert tree.map_leaves(lambda x, y: x + y, first, second) == {"a": 11, "b": [22, Layer(33, 44)]}
