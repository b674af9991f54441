"""Arithmetic on trees of arrays: scale, unscale and select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace, is_array_api_obj

from gradscale import registry, tree
from gradscale.arithmetic import Kind, PerDevice, kind_of, multiply
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.protocols import Array
from gradscale.state import ScaleState

__all__ = ["floating_leaves", "require_arrays", "scale", "select", "unscale"]


def scale(outputs: Any, state: ScaleState) -> Any:
    """Multiply outputs (a loss, or nested containers of arrays) by the scale.

    Parameters
    ----------
    outputs : array or nested containers of arrays
        Any shapes and floating dtypes, on any devices of one library. Integer arrays, Python integers and ``None``
        pass through untouched.
    state : ScaleState
        Gives the scale; unchanged.

    Returns
    -------
    same as outputs
        New arrays of the same dtypes, except that a 0-d array of half precision comes back as float32: float16 cannot
        hold a loss times 65536. Nothing is modified; no host read, no collective.

    Raises
    ------
    InvalidTypeError
        For a leaf that is no array, or arrays of two libraries.
    """
    leaves, rebuild = tree.flatten(outputs)
    chosen = floating_leaves(leaves, state, what="output", rebuild=rebuild)
    factors = PerDevice(state.scale)
    scaled = {}
    for x in chosen:
        xp = array_namespace(x)
        factor = factors.on(x)
        if kind_of(x) is not Kind.NARROW:
            scaled[id(x)] = multiply(xp, x, factor)
            continue
        wide = xp.astype(x, xp.float32) * factor
        scaled[id(x)] = wide if x.ndim == 0 else xp.astype(wide, x.dtype)
    return rebuild(scaled.get(id(leaf), leaf) for leaf in leaves)


def unscale(grads: Any, state: ScaleState, *, dtype: Any = None) -> tuple[Any, Array]:
    """Divide gradients by the scale, and count the leaves that are not finite afterwards.

    Use the state that ``scale`` used: a policy's update comes after (systems that update first halve the gradients
    on every growth step).

    Parameters
    ----------
    grads : array or nested containers of arrays
        Floating or complex, any shapes, one library. Computed in float32 (float64 in itself); integer arrays, Python
        integers and ``None`` pass through untouched and are not counted.
    state : ScaleState
        Gives the scale; unchanged.
    dtype : dtype, optional
        Wanted dtype of real floating leaves, such as float32 master gradients out of float16 ones. Default: each
        leaf's own.

    Returns
    -------
    grads : same as grads
        New arrays; the given ones are not modified.
    nonfinite : array
        0-d int32 on the state's device: how many leaves hold an inf or NaN, judged on the unscaled values in the dtype
        in which they are returned, which is what the optimizer will see. No host read, no collective.

    Raises
    ------
    InvalidTypeError
        For a leaf that is no array, or arrays of two libraries.
    """
    leaves, rebuild = tree.flatten(grads)
    chosen = floating_leaves(leaves, state, what="gradient", rebuild=rebuild)
    backend = registry.backend_for(state.scale)
    unscaled, nonfinite = backend.unscale(chosen, state, dtype=dtype)
    by_identity = {id(old): new for old, new in zip(chosen, unscaled, strict=True)}
    return rebuild(by_identity.get(id(leaf), leaf) for leaf in leaves), nonfinite


def select(pred: Array, on_true: Any, on_false: Any) -> Any:
    """Choose between two trees by a 0-d bool, leaf by leaf, without a host read.

    Parameters
    ----------
    pred : array
        0-d bool, such as ``nonfinite == 0``.
    on_true, on_false : nested containers of arrays
        Of one structure, with equal dtypes and shapes leaf by leaf. Leaves that are no arrays must be equal.

    Returns
    -------
    same as on_true
        New arrays; nothing is modified.

    Raises
    ------
    InvalidTypeError
        When two leaves differ in dtype (casting one of them would be a promotion by accident).
    InvalidValueError
        When the trees differ in structure, shapes, or in a leaf that is no array.
    """

    def choose(a: Any, b: Any) -> Any:
        if not is_array_api_obj(a) or not is_array_api_obj(b):
            if a is b or (type(a) is type(b) and not is_array_api_obj(a) and a == b):
                return a
            msg = f"leaves that are no arrays must be equal in both trees, got {a!r} and {b!r}"
            raise InvalidValueError(msg)
        if a.dtype != b.dtype:
            msg = f"both trees must have one dtype leaf by leaf, got {a.dtype} and {b.dtype}; cast one of them"
            raise InvalidTypeError(msg)
        if a.shape != b.shape:
            msg = f"both trees must have one shape leaf by leaf, got {a.shape} and {b.shape}"
            raise InvalidValueError(msg)
        xp = array_namespace(a, b)
        return xp.asarray(xp.where(pred, a, b))

    return tree.map_leaves(choose, on_true, on_false)


def require_arrays(leaves: Sequence[Any], *, what: str, rebuild: Any = None) -> None:
    """Check that every leaf is an array, ``None`` or a Python integer.

    Raises
    ------
    InvalidTypeError
        Naming the leaf and its place.
    """
    accepted: set[type] = {type(None), int, bool}
    for index, leaf in enumerate(leaves):
        if type(leaf) in accepted:
            continue
        if not is_array_api_obj(leaf):
            msg = (
                f"{what}{_path(leaves, index, rebuild)} must be an array of a library that follows the array API "
                f"standard (or None), got {leaf!r} of type {type(leaf).__name__}"
            )
            raise InvalidTypeError(msg)
        accepted.add(type(leaf))


def floating_leaves(leaves: Sequence[Any], state: ScaleState, *, what: str, rebuild: Any = None) -> list[Array]:
    """Return the floating arrays among leaves, each object once.

    Parameters
    ----------
    leaves : sequence
        Arrays, ``None`` and Python integers.
    state : ScaleState
        Its library is the one that all floating arrays must belong to.
    what : str
        The name of a leaf in error messages, such as "gradient".
    rebuild : callable, optional
        Builds the tree from leaves, to name the place of a bad one.

    Raises
    ------
    InvalidTypeError
        For a leaf that is no array, or of another library than the state.
    """
    require_arrays(leaves, what=what, rebuild=rebuild)
    chosen = {}
    home = array_namespace(state.scale)
    kinds: dict[tuple[type, Any], Kind] = {
        (type(None), None): Kind.EXACT,
        (int, None): Kind.EXACT,
        (bool, None): Kind.EXACT,
    }
    for index, leaf in enumerate(leaves):
        key = (type(leaf), getattr(leaf, "dtype", None))
        kind = kinds.get(key)
        if kind is None:
            kind = kinds[key] = kind_of(leaf)
            if kind is Kind.UNKNOWN:
                msg = (
                    f"{what}{_path(leaves, index, rebuild)} must have a floating, complex, integer or bool dtype, got "
                    f"{leaf.dtype!r}"
                )
                raise InvalidTypeError(msg)
            # Arrays that pass through may be of any library (JAX marks integer gradients with a NumPy array).
            xp = array_namespace(leaf)
            if xp is not home and kind is not Kind.EXACT:
                msg = (
                    f"{what}{_path(leaves, index, rebuild)} must be an array of the library that the scale is in, "
                    f"{home.__name__}, got one of {xp.__name__}; use one scaler for each library"
                )
                raise InvalidTypeError(msg)
        if kind is not Kind.EXACT:
            chosen[id(leaf)] = leaf
    return list(chosen.values())


def _path(leaves: Sequence[Any], index: int, rebuild: Any) -> str:
    """Return where a leaf stands in its tree, as the expression that reaches it."""
    if rebuild is None:
        return f" {index}"
    path = tree.leaves_with_paths(rebuild(leaves))[index][0]
    return f" at {path}" if path else ""
