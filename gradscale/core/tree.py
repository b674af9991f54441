"""Nested containers of arrays: list, tuple, namedtuple, dict, dataclass, and any subclass of them.

A container is rebuilt as its own type; leaves are visited in the order in which the container holds them. ``None``
is a leaf. Any other iterable (a generator, a deque) comes back as a list, because it can be walked only once.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gradscale.errors import InvalidValueError

__all__ = ["flatten", "leaves_with_paths", "map_leaves"]


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


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path suffix, child) for each child of a container."""
    if isinstance(node, Mapping):
        for key, child in node.items():
            yield f"[{key!r}]", child
    elif _is_dataclass(node):
        for field in dataclasses.fields(node):
            yield f".{field.name}", getattr(node, field.name)
    else:
        for index, child in enumerate(node):
            yield f"[{index}]", child


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


def map_leaves(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return a tree like ``tree`` whose leaves are ``function`` of its leaves, and of those of ``rest``.

    Parameters
    ----------
    function : callable
        Called with one leaf of each tree.
    tree, *rest : nested containers
        All of the same structure.

    Raises
    ------
    InvalidValueError
        When a tree of ``rest`` has another structure.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.tree.map_leaves(lambda x, y: x + y, {"a": 1, "b": [2, 3]}, {"a": 10, "b": [20, 30]})
    {'a': 11, 'b': [22, 33]}
    """
    if _is_leaf(tree):
        return function(tree, *rest)
    children = list(_children(tree))
    others = [_matching_children(tree, children, other) for other in rest]
    aligned = zip((child for _, child in children), *others, strict=True)
    return _rebuild(tree, [map_leaves(function, *nodes) for nodes in aligned])


def _matching_children(tree: Any, children: list[tuple[str, Any]], other: Any) -> list[Any]:
    """Return the children of ``other``, which must be a container with the keys of ``tree``."""
    if not _is_leaf(other):
        by_path = dict(_children(other))
        if by_path.keys() == {path for path, _ in children}:
            return [by_path[path] for path, _ in children]
    msg = f"trees must have one structure, got {_describe(tree)} beside {_describe(other)}"
    raise InvalidValueError(msg)


def _describe(node: Any) -> str:
    if _is_leaf(node):
        return f"a leaf of type {type(node).__name__}"
    return f"a {type(node).__name__} with {[path for path, _ in _children(node)]}"


def leaves_with_paths(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, leaf) of every leaf in order; a path reads as the expression that reaches it, ``['w'][0]``.

    Examples
    --------
    >>> import gradscale
    >>> list(gradscale.tree.leaves_with_paths({"a": 1, "b": [2, 3]}))
    [("['a']", 1), ("['b'][0]", 2), ("['b'][1]", 3)]
    """
    if _is_leaf(tree):
        return [(path, tree)]
    return [pair for suffix, child in _children(tree) for pair in leaves_with_paths(child, path + suffix)]


def flatten(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves in order, ``None`` among them, and a function that builds the tree anew from others.

    Returns
    -------
    leaves : list
        Every leaf.
    rebuild : callable
        Takes as many leaves and returns a tree of the same structure.

    Examples
    --------
    >>> import gradscale
    >>> leaves, rebuild = gradscale.tree.flatten({"a": 1, "b": [2, 3]})
    >>> leaves
    [1, 2, 3]
    >>> rebuild(leaf * 10 for leaf in leaves)
    {'a': 10, 'b': [20, 30]}
    """
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    # The copy can be walked again where the tree itself, an iterator, cannot.
    skeleton = map_leaves(collect, tree)

    def rebuild(new_leaves: Iterable[Any]) -> Any:
        remaining = iter(new_leaves)
        return map_leaves(lambda _: next(remaining), skeleton)

    return found, rebuild
