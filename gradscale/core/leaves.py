"""Which leaves of a tree are floating arrays of one library; errors name the place of a leaf that is neither."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import tree
from gradscale.core.arithmetic import Kind, kind_of, library_name
from gradscale.core.messages import reading, shown
from gradscale.core.protocols import Array, Namespace
from gradscale.errors import InvalidTypeError

_Rebuild: TypeAlias = Callable[[Sequence[object]], object]

# Types and dtypes of floating arrays, and the names of the namespaces that they belong to.
_known: set[tuple[type, object, str]] = set()


def require_arrays(leaves: Sequence[object], what: str, rebuild: _Rebuild | None = None) -> None:
    """Raise for a leaf that is no array, None or integer; the error names its place."""
    with reading(what):
        for index, leaf in enumerate(leaves):
            _require_array(leaf, functools.partial(_leaf_name, what, leaves, index, rebuild))


def _require_array(leaf: object, name: Callable[[], str]) -> None:
    if leaf is None or isinstance(leaf, int) or is_array_api_obj(leaf):
        return
    msg = (
        f"{name()} must be an array of a library that follows the array API standard (or None), got {shown(leaf)} of "
        f"type {type(leaf).__name__}"
    )
    if isinstance(leaf, float):
        msg += f"; wrap it, such as np.float32({leaf})"
    raise InvalidTypeError(msg)


def first_floating(leaves: Sequence[object]) -> Array | None:
    """Return the first array that is not of integers, on whose device a scale belongs; None without one."""
    with reading("an array"):
        return next((leaf for leaf in leaves if is_array_api_obj(leaf) and kind_of(leaf) is not Kind.INTEGRAL), None)


def floating_leaves(
    leaves: Sequence[Array],
    home: Namespace,
    *,
    what: str,
    rebuild: _Rebuild | None = None,
    takes_integers: bool = True,
) -> Sequence[Array]:
    """Return the floating arrays among leaves (arrays, None, integers), each object once; all must be of one library.

    Errors call a leaf ``what``, and ``rebuild`` builds the tree, to name the place of a bad one.
    """
    if not _are_known(leaves, home):
        with reading(what):
            kinds = [(type(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]
            floating = set()
            for kind in dict.fromkeys(kinds):
                first = kinds.index(kind)
                name = functools.partial(_leaf_name, what, leaves, first, rebuild)
                if _is_floating(leaves[first], home, takes_integers, name):
                    floating.add(kind)
            leaves = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind in floating]
            _known.update((*kind, home.__name__) for kind in floating)
    return leaves if len(set(map(id, leaves))) == len(leaves) else [*{id(x): x for x in leaves}.values()]


def _are_known(leaves: Sequence[Array], home: Namespace) -> bool:
    """Tell whether thousands of leaves are of the few kinds that were found to be floating arrays of a library."""
    try:
        return {(type(leaf), leaf.dtype, home.__name__) for leaf in leaves} <= _known
    except Exception:
        # A look at each leaf says which one cannot be read.
        return False


def _is_floating(leaf: Array, home: Namespace, takes_integers: bool, name: Callable[[], str]) -> bool:
    """Tell whether a leaf is a floating array, and not one to be left out; raise for any other leaf."""
    _require_array(leaf, name)
    if leaf is None or (takes_integers and isinstance(leaf, int)):
        return False
    dtype = getattr(leaf, "dtype", leaf)
    kind = Kind.INTEGRAL if isinstance(leaf, int) else kind_of(leaf)
    if kind is Kind.UNKNOWN or (kind is Kind.INTEGRAL and not takes_integers and "float0" not in str(dtype)):
        dtypes = "floating, complex, integer or bool" if takes_integers else "floating or complex"
        msg = f"{name()} must have a {dtypes} dtype, got {shown(dtype)}"
        raise InvalidTypeError(msg)
    # Arrays that pass through may be of any library (JAX marks integer gradients with a NumPy array).
    if kind is not Kind.INTEGRAL and array_namespace(leaf) is not home:
        msg = (
            f"{name()} must be an array of the library that the state is in, {library_name(home)}, got one of "
            f"{library_name(array_namespace(leaf))}; use one scaler for each library"
        )
        raise InvalidTypeError(msg)
    return kind is not Kind.INTEGRAL


def _leaf_name(what: str, leaves: Sequence[object], index: int, rebuild: _Rebuild | None) -> str:
    """Return the name of a leaf, and its number or the expression that reaches it in its tree."""
    if rebuild is None:
        return f"{what} {index}"
    path = tree.leaves_with_paths(rebuild(leaves))[index][0]
    return f"{what} at {path}" if path else what
