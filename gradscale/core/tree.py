"""Nested containers of arrays, and which of their leaves are floating arrays of one library.

They are list, tuple, namedtuple, dict, dataclass, and any subclass of them.

A container is rebuilt as its own type; leaves are visited in the order in which the container holds them. ``None``
is a leaf. Any other iterable (a generator, a deque) comes back as a list, because it can be walked only once. A tree
that holds itself, or is deeper than Python recurses, is an InvalidValueError, and a container that raises when it is
read an InvalidTypeError.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.arithmetic import Kind, kind_of, library_name
from gradscale.core.protocols import Array, Namespace
from gradscale.core.validation import wrong_type
from gradscale.errors import GradscaleError, InvalidTypeError, InvalidValueError, reading, short_repr, unreadable

__all__ = ["flatten", "leaves_with_paths", "map_leaves"]
__dir__ = __all__.copy

_Result = TypeVar("_Result")
_Located: TypeAlias = list[tuple[str, Array]]
_IsLeaf: TypeAlias = Callable[[object], bool]
_Rebuild: TypeAlias = Callable[[Sequence[object]], object]
# Of nodes side by side: None for a leaf; or a container, the keys of its children, and their plans.
_Plans: TypeAlias = "list[tuple[object, Sequence[Hashable], _Plans] | None]"

_WHAT = "a container of arrays"
# By the name of a namespace: types and dtypes of its floating arrays.
_floating_kinds: dict[str, set[tuple[type, object]]] = {}
# Types of leaves, of which there may be thousands side by side: those of floating arrays.
_leaf_types: set[type] = {type(None)}


def _is_leaf(node: object) -> bool:
    if isinstance(node, (list, tuple, dict)):
        return False
    # Arrays, text and sets are iterable, and no containers of gradients.
    if node is None or hasattr(node, "shape") or isinstance(node, (str, bytes, bytearray, set, frozenset, type)):
        return True
    return not isinstance(node, Iterable) and not dataclasses.is_dataclass(node)


def _is_dataclass(node: object) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, (list, tuple, Mapping))


def _keys_and_children(node: Array) -> tuple[Sequence[Hashable], list[object]]:
    """Return the keys and the children of a container; a sequence's keys are numbers, a dataclass's ``.name``."""
    if isinstance(node, (list, tuple)):
        return range(len(node)), list(node)
    if isinstance(node, Mapping):
        return list(node), list(node.values())
    if dataclasses.is_dataclass(node):
        return _keys_and_children({f".{field.name}": getattr(node, field.name) for field in dataclasses.fields(node)})
    children = list(node)
    return range(len(children)), children


def _rebuild(node: object, keys: Sequence[Hashable], children: list[Any]) -> object:
    if isinstance(node, (list, tuple)):
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    by_key = zip(keys, children, strict=True)
    if type(node) is dict:
        return dict(by_key)
    if isinstance(node, dict) or _is_dataclass(node):
        # A shallow copy keeps a subclass's default factory and attributes.
        rebuilt: Any = copy.copy(node)
        for key, child in by_key:
            if isinstance(node, dict):
                rebuilt[key] = child
            else:
                # As dataclasses.replace does for frozen classes, without running __post_init__ on traced values.
                object.__setattr__(rebuilt, str(key)[1:], child)
        return rebuilt
    return type(node)(dict(by_key)) if isinstance(node, Mapping) else children  # type: ignore[call-arg]


def _plan(nodes: list[Array], is_leaf: _IsLeaf, leaves: list[Array], above: dict[int, object]) -> _Plans:
    """Return the plans of nodes that are below some containers, and append their leaves."""
    plans: _Plans = []
    for node in nodes:
        if node is None or hasattr(node, "shape") or is_leaf(node):
            leaves.append(node)
            plans.append(None)
        elif id(node) in above:
            raise _endless(node, "holds itself: build it without the way back")
        else:
            above[id(node)] = node
            keys, children = _keys_and_children(node)
            if _leaf_types.issuperset(map(type, children)):
                leaves.extend(children)
                plans.append((node, keys, [None] * len(children)))
            else:
                plans.append((node, keys, _plan(children, is_leaf, leaves, above)))
            del above[id(node)]
    return plans


def _endless(node: object, what: str) -> InvalidValueError:
    return InvalidValueError(f"nested containers of arrays must have an end, got a {type(node).__name__} that {what}")


def _walk(tree: object, is_leaf: _IsLeaf = _is_leaf) -> tuple[list[Array], _Plans]:
    leaves: list[Array] = []
    above: dict[int, object] = {}
    try:
        return leaves, _plan([tree], is_leaf, leaves, above)
    except RecursionError as error:
        deepest = next(reversed(above.values()), tree)
        raise _endless(deepest, f"is below {len(above)} others: make it anew from its own leaves") from error
    except GradscaleError:
        raise
    except Exception as error:
        raise unreadable(_WHAT, error) from error


def _fold(plans: _Plans, leaves: Iterator[_Result], combine: Callable[..., _Result]) -> list[_Result]:
    """Return the leaves, and ``combine`` of each container, its keys and the results of its children."""
    results = []
    for plan in plans:
        # A comprehension would be a frame more for each level, so that some trees could be walked and not rebuilt.
        results.append(next(leaves) if plan is None else combine(*plan[:2], _fold(plan[2], leaves, combine)))
    return results


def _build(plans: _Plans, leaves: Iterable[object]) -> Any:
    with reading(f"{_WHAT}, made anew with other leaves,"):
        return _fold(plans, iter(leaves), _rebuild)[0]


def map_leaves(function: Callable[..., object], tree: object, *rest: object) -> Any:
    """Return a tree like ``tree`` whose leaves are ``function`` of its leaves, and of those of ``rest``.

    Parameters
    ----------
    function : callable
        Called with one leaf of each tree.
    tree : leaf or nested containers
        Gives the structure of the result. It is not modified.
    *rest
        Trees of the same structure, else InvalidValueError: at each container of ``tree`` one with the same keys or
        length, of any type.

    Examples
    --------
    >>> import gradscale
    >>> gradscale.tree.map_leaves(lambda x, y: x + y, {"a": 1, "b": [2, 3]}, {"a": 10, "b": [20, 30]})
    {'a': 11, 'b': [22, 33]}
    """
    leaves, plans = _walk(tree)
    with reading(_WHAT):
        columns = [_align(plans, [other]) for other in rest]
    return _build(plans, list(map(function, leaves, *columns)))


def _align(plans: _Plans, others: Iterable[object]) -> list[object]:
    """Return the nodes of other trees in the places of the planned leaves."""
    nodes: list[object] = []
    for plan, other in zip(plans, others, strict=True):
        if plan is None:
            nodes.append(other)
            continue
        node, keys, below = plan
        by_key = None if _is_leaf(other) else dict(zip(*_keys_and_children(other), strict=True))
        if by_key is None or by_key.keys() != set(keys):
            msg = f"trees must have one structure, got {_describe(node)} beside {_describe(other)}"
            raise InvalidValueError(msg)
        nodes += _align(below, [by_key[key] for key in keys])
    return nodes


def _describe(node: object) -> str:
    if _is_leaf(node):
        return f"a leaf of type {type(node).__name__}"
    return f"a {type(node).__name__} with {short_repr(_suffixes(node, _keys_and_children(node)[0]))}"


def _suffixes(node: object, keys: Sequence[Hashable]) -> list[str]:
    """Return the ends of the paths of a container's children."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [f".{name}" for name in node._fields]
    return [str(key) if _is_dataclass(node) else f"[{short_repr(key)}]" for key in keys]


def leaves_with_paths(tree: object, is_leaf: _IsLeaf = _is_leaf) -> list[tuple[str, Array]]:
    """Return (path, leaf) of every leaf in order; a path reads as the expression that reaches it, ``['w'][0]``.

    ``is_leaf`` is that of :func:`flatten`.

    Examples
    --------
    >>> import gradscale
    >>> list(gradscale.tree.leaves_with_paths({"a": 1, "b": [2, 3]}))
    [("['a']", 1), ("['b'][0]", 2), ("['b'][1]", 3)]
    """
    leaves, plans = _walk(tree, is_leaf)

    def below(node: object, keys: Sequence[Hashable], children: list[_Located]) -> _Located:
        branches = zip(_suffixes(node, keys), children, strict=True)
        return [(suffix + path, leaf) for suffix, branch in branches for path, leaf in branch]

    with reading(_WHAT):
        return _fold(plans, ([("", leaf)] for leaf in leaves), below)[0]


def flatten(tree: object, is_leaf: _IsLeaf = _is_leaf) -> tuple[list[Array], Callable[[Iterable[object]], Any]]:
    """Return the leaves in order, ``None`` among them, and a function that builds the tree from as many others.

    Parameters
    ----------
    tree : leaf or nested containers
        It is not modified.
    is_leaf : callable, optional
        Tells whether a node is a leaf; everything that is not iterable must be one. Default: all but containers.

    Examples
    --------
    >>> import gradscale
    >>> leaves, rebuild = gradscale.tree.flatten({"a": 1, "b": [2, 3]})
    >>> leaves
    [1, 2, 3]
    >>> rebuild(leaf * 10 for leaf in leaves)
    {'a': 10, 'b': [20, 30]}
    """
    leaves, plans = _walk(tree, is_leaf)
    return leaves, functools.partial(_build, plans)


def require_arrays(leaves: Sequence[object], what: str, rebuild: _Rebuild | None = None) -> None:
    """Raise for a leaf that is no array, None or integer; the error names its place."""
    with reading(what):
        for index, leaf in enumerate(leaves):
            _require_array(leaf, functools.partial(_leaf_name, what, leaves, index, rebuild))


def _require_array(leaf: object, name: Callable[[], str]) -> None:
    if leaf is None or isinstance(leaf, int) or is_array_api_obj(leaf):
        return
    advice = f"; wrap it, such as np.float32({leaf})" if isinstance(leaf, float) else ""
    raise wrong_type(leaf, name(), "an array of a library that follows the array API standard (or None)", advice)


def first_floating(leaves: Sequence[object]) -> Array | None:
    """Return the first array that is not of integers, on whose device a scale belongs; None without one."""
    with reading("an array"):
        return next((leaf for leaf in leaves if is_array_api_obj(leaf) and kind_of(leaf) is not Kind.INTEGRAL), None)


def floating_leaves(
    leaves: Sequence[Array],
    namespace: Namespace,
    *,
    what: str,
    rebuild: _Rebuild | None = None,
    takes_integers: bool = True,
) -> Sequence[Array]:
    """Return the floating arrays among leaves (arrays, None, integers), each object once; all must be of one library.

    Errors call a leaf ``what``, and ``rebuild`` builds the tree, to name the place of a bad one.
    """
    return leaves_and_dtypes(leaves, namespace, what, rebuild, takes_integers=takes_integers)[0]


def leaves_and_dtypes(
    leaves: Sequence[Array], namespace: Namespace, what: str, rebuild: _Rebuild | None = None, *, takes_integers: bool
) -> tuple[Sequence[Array], frozenset[object]]:
    """Return the floating arrays among leaves, as :func:`floating_leaves` does, and their dtypes."""
    floating = _floating_kinds.setdefault(namespace.__name__, set())
    try:
        # (torch's compiler does not trace an attrgetter.)
        types, dtypes = [*map(type, leaves)], [leaf.dtype for leaf in leaves]
        # Thousands of leaves are of few kinds, most often of one; to compare takes less time than to hash.
        if len(leaves) > 1 and types.count(types[0]) == dtypes.count(dtypes[0]) == len(leaves):
            types, dtypes = types[:1], dtypes[:1]
        are_floating = floating.issuperset(zip(types, dtypes, strict=True))
    except Exception:
        # Read one by one, below, the leaves say which one raises.
        are_floating = False
    if not are_floating:
        with reading(what):
            kinds, taken = [(type(leaf), getattr(leaf, "dtype", None)) for leaf in leaves], []
            for kind in dict.fromkeys(kinds):
                first = kinds.index(kind)
                name = functools.partial(_leaf_name, what, leaves, first, rebuild)
                if _is_floating(leaves[first], namespace, takes_integers, name):
                    taken.append(kind)
            # torch's compiler does not look for what it has just added to a set.
            floating.update(taken)
            _leaf_types.update(kind for kind, _ in taken)
            leaves, dtypes = (
                [x for x, kind in zip(leaves, kinds, strict=True) if kind in taken],
                [one for _, one in taken],
            )
    leaves = leaves if len(set(map(id, leaves))) == len(leaves) else [*{id(x): x for x in leaves}.values()]
    return leaves, frozenset(dtypes)


def _is_floating(leaf: Array, namespace: Namespace, takes_integers: bool, name: Callable[[], str]) -> bool:
    """Tell whether a leaf is a floating array, and not one to be left out; raise for any other leaf."""
    _require_array(leaf, name)
    if leaf is None or (takes_integers and isinstance(leaf, int)):
        return False
    dtype = getattr(leaf, "dtype", leaf)
    kind = Kind.INTEGRAL if isinstance(leaf, int) else kind_of(leaf)
    if kind is Kind.UNKNOWN or (kind is Kind.INTEGRAL and not takes_integers and "float0" not in str(dtype)):
        dtypes = "floating, complex, integer or bool" if takes_integers else "floating or complex"
        msg = f"{name()} must have a {dtypes} dtype, got {short_repr(dtype)}"
        raise InvalidTypeError(msg)
    # Arrays that pass through may be of any library (JAX marks integer gradients with a NumPy array).
    if kind is not Kind.INTEGRAL and array_namespace(leaf) is not namespace:
        msg = (
            f"{name()} must be an array of the library that the state is in, {library_name(namespace)}, got one of "
            f"{library_name(array_namespace(leaf))}; use one scaler for each library"
        )
        raise InvalidTypeError(msg)
    return kind is not Kind.INTEGRAL


def _leaf_name(what: str, leaves: Sequence[object], index: int, rebuild: _Rebuild | None) -> str:
    """Return the name of a leaf, and its number or the expression that reaches it in its tree."""
    if rebuild is None:
        return f"{what} {index}"
    path = leaves_with_paths(rebuild(leaves))[index][0]
    return f"{what} at {path}" if path else what
