"""Nested containers of arrays: list, tuple, namedtuple, dict, dataclass, and any subclass of them.

A container is rebuilt as its own type; leaves are visited in the order in which the container holds them. ``None``
is a leaf. Any other iterable (a generator, a deque) comes back as a list, because it can be walked only once. Trees may
be deeper than Python's limit of recursion; one that holds itself is an error.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from gradscale.core.messages import reading, shown, unreadable
from gradscale.core.protocols import Array
from gradscale.errors import GradscaleError, InvalidValueError

__all__ = ["flatten", "leaves_with_paths", "map_leaves"]

# A container that is nested deeper makes others for ever.
_DEEPEST = 10_000

_Result = TypeVar("_Result")


def _is_dataclass(node: object) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, (type, list, tuple, Mapping))


def _is_container(node: object) -> bool:
    """Tell whether a node can be walked more than once, and rebuilt as its own type."""
    return isinstance(node, (list, tuple, Mapping)) or _is_dataclass(node)


def _is_leaf(node: object) -> bool:
    # Arrays are iterable.
    if node is None or hasattr(node, "shape"):
        return True
    # Text and sets are iterable, and no containers of gradients.
    is_iterable = isinstance(node, Iterable) and not isinstance(node, (str, bytes, bytearray, set, frozenset, type))
    return not is_iterable and not _is_container(node)


def _values(node: Any) -> list[Any]:
    """Return the children of a container."""
    if isinstance(node, Mapping):
        return list(node.values())
    if not isinstance(node, (list, tuple)) and _is_dataclass(node):
        return [getattr(node, field.name) for field in dataclasses.fields(node)]
    return list(node)


def _suffixes(node: Any, count: int) -> list[str]:
    """Return the ends of the paths of a container's children."""
    if _is_dataclass(node):
        return [f".{field.name}" for field in dataclasses.fields(node)]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [f".{name}" for name in node._fields]
    return [f"[{shown(key)}]" for key in _keys(node, count)]


def _keys(node: Any, count: int) -> list[Hashable]:
    """Return the keys of a container's children; those of a sequence are numbered."""
    if _is_dataclass(node):
        return [*_suffixes(node, count)]
    return list(node if isinstance(node, Mapping) else range(count))


def _rebuild(node: Any, children: list[Any]) -> Any:
    """Return a container like ``node`` that holds ``children``."""
    if isinstance(node, dict):
        # A shallow copy keeps a subclass's default factory and attributes.
        rebuilt = copy.copy(node)
        for key, child in zip(node, children, strict=True):
            rebuilt[key] = child
        return rebuilt
    if isinstance(node, Mapping):
        return type(node)(dict(zip(node, children, strict=True)))  # type: ignore[call-arg]
    if isinstance(node, (list, tuple)):
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    if _is_dataclass(node):
        rebuilt = copy.copy(node)
        for field, child in zip(dataclasses.fields(node), children, strict=True):
            # As dataclasses.replace does for frozen classes, without running __post_init__ on traced values.
            object.__setattr__(rebuilt, field.name, child)
        return rebuilt
    return children


class _Container(NamedTuple):
    """A container, and the number of its children, which have been walked."""

    node: object
    size: int


# A tree from the leaves up: None for the next leaf, or a container of so many of the nodes before it.
_Plan = list[_Container | None]


def _walked(tree: object, is_leaf: Callable[[Any], bool] = _is_leaf) -> tuple[list[Array], _Plan]:
    """Return the leaves of a tree, and its plan; InvalidValueError for one that has no end."""
    leaves: list[Array] = []
    plan: _Plan = []
    waiting: list[object] = [tree]
    # The containers from the root to the present place.
    above: set[int] = set()
    try:
        while waiting:
            node = waiting.pop()
            if type(node) is _Container:
                above.discard(id(node.node))
                plan.append(node)
            elif node is None or hasattr(node, "shape") or is_leaf(node):
                leaves.append(node)
                plan.append(None)
            elif id(node) in above:
                raise _endless(node, "holds itself: build it without the way back")
            elif len(above) >= _DEEPEST:
                raise _endless(node, f"is below {_DEEPEST} others: make it anew from its own leaves")
            else:
                children = _values(node)
                above.add(id(node))
                waiting.append(_Container(node, len(children)))
                waiting.extend(reversed(children))
    except GradscaleError:
        raise
    except Exception as error:
        refusal = unreadable("a container of arrays", error)
        raise refusal from error
    return leaves, plan


def _endless(node: object, what: str) -> InvalidValueError:
    return InvalidValueError(f"nested containers of arrays must have an end, got a {type(node).__name__} that {what}")


def _folded(plan: _Plan, leaves: Iterable[_Result], combine: Callable[[object, list[_Result]], _Result]) -> _Result:
    """Return the root's result: ``combine`` of each container and its children's results."""
    remaining = iter(leaves)
    made: list[_Result] = []
    for step in plan:
        if step is None:
            made.append(next(remaining))
        else:
            first = len(made) - step.size
            made[first:] = [combine(step.node, made[first:])]
    return made[0]


def _built(plan: _Plan, leaves: Iterable[object]) -> Any:
    """Return a tree as it was planned, with other leaves."""
    with reading("a container of arrays, made anew with other leaves,"):
        return _folded(plan, leaves, _rebuild)


def map_leaves(function: Callable[..., object], tree: object, *rest: object) -> Any:
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
        # Not the tree itself, which may be an iterator.
        skeleton = _built(plan, leaves)
        with reading("a container of arrays"):
            columns = [_aligned(skeleton, other) for other in rest]
    return _built(plan, list(map(function, leaves, *columns)))


def _aligned(tree: object, other: object) -> list[Array]:
    """Return the nodes of another tree in the places of this one's leaves."""
    found = []
    waiting = [(tree, other)]
    while waiting:
        node, counterpart = waiting.pop()
        if _is_leaf(node):
            found.append(counterpart)
        else:
            children = _values(node)
            waiting.extend(
                reversed([*zip(children, _matching_children(node, len(children), counterpart), strict=True)])
            )
    return found


def _matching_children(node: object, count: int, other: object) -> list[Array]:
    """Return the children of ``other``, which must be a container with the keys of ``node``."""
    keys = _keys(node, count)
    if not _is_leaf(other):
        values = _values(other)
        by_key = dict(zip(_keys(other, len(values)), values, strict=True))
        if by_key.keys() == set(keys):
            return [by_key[key] for key in keys]
    msg = f"trees must have one structure, got {_describe(node)} beside {_describe(other)}"
    raise InvalidValueError(msg)


def _describe(node: object) -> str:
    if _is_leaf(node):
        return f"a leaf of type {type(node).__name__}"
    suffixes = _suffixes(node, len(_values(node))) if _is_container(node) else []
    return f"a {type(node).__name__} with {shown(suffixes)}"


def leaves_with_paths(tree: object, is_leaf: Callable[[Any], bool] = _is_leaf) -> list[tuple[str, Array]]:
    """Return (path, leaf) of every leaf in order; a path reads as the expression that reaches it, ``['w'][0]``.

    ``is_leaf`` is that of :func:`flatten`.

    Examples
    --------
    >>> import gradscale
    >>> list(gradscale.tree.leaves_with_paths({"a": 1, "b": [2, 3]}))
    [("['a']", 1), ("['b'][0]", 2), ("['b'][1]", 3)]
    """
    leaves, plan = _walked(tree, is_leaf)

    def below(node: object, children: list[list[tuple[str, Array]]]) -> list[tuple[str, Array]]:
        suffixes = _suffixes(node, len(children))
        return [(suffix + path, leaf) for suffix, found in zip(suffixes, children, strict=True) for path, leaf in found]

    with reading("a container of arrays"):
        return _folded(plan, ([("", leaf)] for leaf in leaves), below)


def flatten(
    tree: object, is_leaf: Callable[[Any], bool] = _is_leaf
) -> tuple[list[Array], Callable[[Iterable[object]], Any]]:
    """Return the leaves in order, ``None`` among them, and a function that builds the tree from others.

    Parameters
    ----------
    tree : leaf or nested containers
        It is not modified.
    is_leaf : callable, optional
        Tells whether a node is a leaf; everything that is not iterable must be one. Default: all but containers.

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
