"""Nested containers of arrays: list, tuple, namedtuple, dict, dataclass, and any subclass of them.

A container is rebuilt as its own type; leaves are visited in the order in which the container holds them. ``None``
is a leaf. Any other iterable (a generator, a deque) comes back as a list, because it can be walked only once. Trees may
be deeper than Python's limit of recursion; one that holds itself is an error.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradscale.core.messages import reading, shown
from gradscale.errors import InvalidValueError

__all__ = ["flatten", "leaves_with_paths", "map_leaves"]


# What is nested deeper is taken for a container that makes others for ever.
_DEEPEST = 10_000


def _is_leaf(node: Any) -> bool:
    """Tell whether a node is a leaf: no container, and nothing that could be walked as one."""
    # Arrays first: they are the most frequent nodes, and iterable.
    if node is None or hasattr(node, "shape"):
        return True
    if isinstance(node, (list, tuple, Mapping)) or _is_dataclass(node):
        return False
    # Text and sets are iterable, and no containers of gradients.
    return isinstance(node, (str, bytes, bytearray, set, frozenset, type)) or not isinstance(node, Iterable)


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _is_container(node: Any) -> bool:
    """Tell whether a node that is no leaf can be walked more than once, and rebuilt as its own type."""
    return isinstance(node, (list, tuple, Mapping)) or _is_dataclass(node)


def _values(node: Any) -> list[Any]:
    """Return the children of a container."""
    if isinstance(node, (list, tuple)):
        return list(node)
    if isinstance(node, Mapping):
        return list(node.values())
    if _is_dataclass(node):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return list(node)


def _keys(node: Any, count: int) -> list[Any]:
    """Return what tells the children of a container apart; those of a sequence are numbered."""
    if isinstance(node, Mapping):
        return list(node)
    if _is_dataclass(node):
        return [(".", field.name) for field in dataclasses.fields(node)]
    return list(range(count))


def _suffixes(node: Any, count: int) -> list[str]:
    """Return what is added to the path of a container to reach each of its children."""
    if isinstance(node, Mapping):
        return [f"[{shown(key)}]" for key in node]
    if _is_dataclass(node):
        return [f".{field.name}" for field in dataclasses.fields(node)]
    return [f"[{index}]" for index in range(count)]


def _rebuild(node: Any, children: list[Any]) -> Any:
    """Return a container like ``node`` that holds ``children``."""
    if isinstance(node, dict):
        # A shallow copy keeps what a subclass carries beside its items (a default factory, attributes).
        rebuilt = copy.copy(node)
        for key, child in zip(node, children, strict=True):
            rebuilt[key] = child
        return rebuilt
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node, children, strict=True)))  # type: ignore[call-arg]
    if _is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        rebuilt = copy.copy(node)
        for name, child in zip(names, children, strict=True):
            # As dataclasses.replace does for frozen classes, without running __post_init__ on traced values.
            object.__setattr__(rebuilt, name, child)
        return rebuilt
    if isinstance(node, tuple):
        if hasattr(node, "_fields"):
            return type(node)(*children)
        return type(node)(children)
    if isinstance(node, list):
        return type(node)(children)
    return children


# A tree that has been walked, from the leaves up: how many leaves come next, or a container and how many of the nodes
# before it are its children.
_Plan = list[int | tuple[Any, int]]


def _unfold(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], _Plan]:
    """Return the leaves of a tree, and how they stand in it. Depth costs no recursion.

    Raises
    ------
    InvalidValueError
        For a tree that holds itself, or has no end.
    InvalidTypeError
        For a container that raises when it is read.
    """
    if is_leaf(tree):
        return [tree], [1]
    leaves: list[Any] = []
    plan: _Plan = []
    children = _values(tree)
    # The containers on the way from the root to the present place, each with the children that are left.
    above = [(tree, len(children), iter(children))]
    on_the_way = {id(tree)}
    planned = 0
    while above:
        node, count, remaining = above[-1]
        for child in remaining:
            if is_leaf(child):
                leaves.append(child)
                continue
            if id(child) in on_the_way:
                raise _endless(child, "holds itself: build it without the way back")
            if len(above) >= _DEEPEST:
                raise _endless(child, f"is below {_DEEPEST} others: make it anew from its own leaves")
            children = _values(child)
            above.append((child, len(children), iter(children)))
            on_the_way.add(id(child))
            break
        else:
            above.pop()
            on_the_way.discard(id(node))
            if len(leaves) > planned:
                plan.append(len(leaves) - planned)
            # What can be walked only once is not kept.
            plan.append((node if _is_container(node) else None, count))
            planned = len(leaves)
            continue
        if len(leaves) > planned:
            plan.append(len(leaves) - planned)
            planned = len(leaves)
    return leaves, plan


def _endless(node: Any, what: str) -> InvalidValueError:
    return InvalidValueError(f"nested containers of arrays must have an end, got a {type(node).__name__} that {what}")


def _walked(tree: Any, is_leaf: Callable[[Any], bool] = _is_leaf) -> tuple[list[Any], _Plan]:
    """Return what ``_unfold`` does; whatever else a container raises is an InvalidTypeError."""
    with reading("a container of arrays"):
        return _unfold(tree, is_leaf)


def _folded(plan: _Plan, leaves: Iterable[Any], combine: Callable[[Any, list[Any]], Any]) -> Any:
    """Return what becomes of the root when each container is combined with what became of its children."""
    remaining = iter(leaves)
    made: list[Any] = []
    for step in plan:
        if isinstance(step, int):
            made.extend(itertools.islice(remaining, step))
        else:
            node, count = step
            first = len(made) - count
            made[first:] = [combine(node, made[first:])]
    return made[0]


def _built(plan: _Plan, leaves: Iterable[Any]) -> Any:
    """Return a tree as it was planned, with other leaves."""
    with reading("a container of arrays, made anew with other leaves,"):
        return _folded(plan, leaves, _rebuild)


def map_leaves(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return a tree like ``tree`` whose leaves are ``function`` of its leaves, and of those of ``rest``.

    Parameters
    ----------
    function : callable
        Called with one leaf of each tree.
    tree : leaf or nested containers
        Gives the structure of the result. It is not modified.
    *rest
        Trees of the same structure: at each container of ``tree`` one with the same keys or length, of any type.

    Raises
    ------
    InvalidValueError
        When a tree of ``rest`` has another structure, or a tree holds itself.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.tree.map_leaves(lambda x, y: x + y, {"a": 1, "b": [2, 3]}, {"a": 10, "b": [20, 30]})
    {'a': 11, 'b': [22, 33]}
    """
    leaves, plan = _walked(tree)
    columns = []
    if rest:
        # Walked again beside each of the others, where the tree itself, an iterator, cannot be.
        skeleton = _built(plan, leaves)
        with reading("a container of arrays"):
            columns = [_aligned(skeleton, other) for other in rest]
    return _built(plan, list(map(function, leaves, *columns)))


def _aligned(tree: Any, other: Any) -> list[Any]:
    """Return what stands in another tree where this one, which has an end, has its leaves."""
    found = []
    waiting = [(tree, other)]
    while waiting:
        node, beside = waiting.pop()
        if _is_leaf(node):
            found.append(beside)
        else:
            children = _values(node)
            pairs = zip(children, _matching_children(node, len(children), beside), strict=True)
            waiting.extend(reversed(list(pairs)))
    return found


def _matching_children(node: Any, count: int, other: Any) -> list[Any]:
    """Return the children of ``other``, which must be a container with the keys of ``node``."""
    keys = _keys(node, count)
    if not _is_leaf(other):
        values = _values(other)
        by_key = dict(zip(_keys(other, len(values)), values, strict=True))
        if by_key.keys() == set(keys):
            return [by_key[key] for key in keys]
    msg = f"trees must have one structure, got {_describe(node)} beside {_describe(other)}"
    raise InvalidValueError(msg)


def _describe(node: Any) -> str:
    if _is_leaf(node):
        return f"a leaf of type {type(node).__name__}"
    suffixes = _suffixes(node, 0 if _is_dataclass(node) else len(node)) if _is_container(node) else []
    return f"a {type(node).__name__} with {shown(suffixes)}"


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return (path, leaf) of every leaf in order; a path reads as the expression that reaches it, ``['w'][0]``.

    Examples
    --------
    >>> import gradscale
    >>> list(gradscale.tree.leaves_with_paths({"a": 1, "b": [2, 3]}))
    [("['a']", 1), ("['b'][0]", 2), ("['b'][1]", 3)]
    """
    leaves, plan = _walked(tree)

    def below(node: Any, children: list[list[tuple[str, Any]]]) -> list[tuple[str, Any]]:
        suffixes = _suffixes(node, len(children))
        return [(suffix + path, leaf) for suffix, found in zip(suffixes, children, strict=True) for path, leaf in found]

    with reading("a container of arrays"):
        found: list[tuple[str, Any]] = _folded(plan, ([("", leaf)] for leaf in leaves), below)
    return found


def flatten(tree: Any, is_leaf: Callable[[Any], bool] = _is_leaf) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves in order, ``None`` among them, and a function that builds the tree anew from others.

    Parameters
    ----------
    tree : leaf or nested containers
        It is not modified.
    is_leaf : callable, optional
        Tells whether a node is a leaf, which everything has to be that is not iterable. Default: what is no container.

    Returns
    -------
    leaves : list
        Every leaf.
    rebuild : callable
        Takes as many leaves and returns a tree of the same structure.

    Raises
    ------
    InvalidValueError
        For a tree that holds itself.
    InvalidTypeError
        For a container that raises when it is read.

    Examples
    --------
    >>> import gradscale
    >>> leaves, rebuild = gradscale.tree.flatten({"a": 1, "b": [2, 3]})
    >>> leaves
    [1, 2, 3]
    >>> rebuild(leaf * 10 for leaf in leaves)
    {'a': 10, 'b': [20, 30]}
    """
    leaves, plan = _walked(tree, is_leaf)
    return leaves, functools.partial(_built, plan)
