"""scale, unscale and select on any pytree that JAX knows: equinox modules, flax states, classes of your own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradscale
from gradscale import ScaleState
from gradscale.core.messages import reading, shown
from gradscale.errors import InvalidTypeError, InvalidValueError

__all__ = ["as_jax", "as_state", "flattened", "scale", "select", "strong", "unscale"]


def scale(outputs: Any, state: ScaleState) -> Any:
    """Multiply outputs (a loss, or a pytree of arrays) by the scale.

    Parameters
    ----------
    outputs : pytree
        Floating leaves are multiplied; integers and float0 pass through.
    state : ScaleState
        Gives the scale; unchanged.

    Returns
    -------
    pytree
        The same dtypes, except that a 0-d array of half precision comes back as float32, which holds a loss times
        65536. Its cotangent does not: differentiate a float32 loss, or bound the scale by 32768. Python floats and
        NumPy arrays become JAX arrays. No host read, no collective.

    Raises
    ------
    InvalidTypeError
        For a leaf that is no array.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=1024.0).init(jnp.zeros(()))
    >>> float(gradscale_jax.scale(jnp.float32(0.5), state))
    512.0
    """
    leaves, treedef = flattened(outputs)
    inexact = [strong(leaf) if isinstance(leaf, float) else as_jax(leaf) for leaf in leaves if not _is_float0(leaf)]
    scaled = iter(gradscale.scale(inexact, as_state(state)))
    return jax.tree.unflatten(treedef, [leaf if _is_float0(leaf) else next(scaled) for leaf in leaves])


def unscale(grads: Any, state: ScaleState, *, dtype: Any = None) -> tuple[Any, jax.Array]:
    """Divide gradients by the scale, and count the leaves that are not finite afterwards.

    Parameters
    ----------
    grads : pytree
        Floating and complex leaves are divided; integers and float0 pass through and are not counted.
    state : ScaleState
        The state that the loss was scaled with; unchanged.
    dtype : dtype, optional
        Wanted dtype of real leaves, such as float32 for float16 parameters with float32 masters.

    Returns
    -------
    grads : pytree
        New arrays.
    nonfinite : array
        0-d int32: how many leaves hold an inf or NaN as they are returned. No host read, no collective; for leaves
        that are spread over a mesh under jit, of the whole arrays.

    Raises
    ------
    InvalidTypeError
        For a leaf that is no array.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    >>> grads, nonfinite = gradscale_jax.unscale({"w": jnp.ones(2), "b": jnp.full(1, jnp.inf)}, state)
    >>> print(grads["w"], nonfinite)
    [0.25 0.25] 1
    """
    leaves, treedef = flattened(grads)
    inexact = [as_jax(leaf) for leaf in leaves if not _is_float0(leaf)]
    new, nonfinite = gradscale.unscale(inexact, as_state(state), dtype=dtype)
    unscaled = iter(new)
    return jax.tree.unflatten(treedef, [leaf if _is_float0(leaf) else next(unscaled) for leaf in leaves]), nonfinite


def select(pred: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Choose between two pytrees by a 0-d bool, leaf by leaf, without a host read.

    Parameters
    ----------
    pred : array
        0-d bool, such as ``verdict.finite``.
    on_true, on_false : pytree
        Of one structure, with equal dtypes and shapes leaf by leaf; others (functions) must be equal.

    Returns
    -------
    pytree
        Of new arrays.

    Raises
    ------
    InvalidTypeError
        When ``pred`` is no 0-d bool array, or two leaves differ in dtype.
    InvalidValueError
        When the trees differ in structure, or leaves in shape.

    Examples
    --------
    >>> import gradscale_jax, jax.numpy as jnp
    >>> stepped, params = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    >>> print(gradscale_jax.select(jnp.asarray(False), stepped, params)["w"])
    [0. 0.]
    """
    structure: Any
    other_structure: Any
    chosen, structure = flattened(on_true)
    others, other_structure = flattened(on_false)
    if structure != other_structure:
        msg = f"trees must have one structure, got {structure} beside {other_structure}"
        raise InvalidValueError(msg)
    # What an integer's gradient is has no values to choose between.
    pairs = [(a, b) if _is_float0(a) else (as_jax(a), as_jax(b)) for a, b in zip(chosen, others, strict=True)]
    inexact = [pair for pair in pairs if not _is_float0(pair[0])]
    selected = iter(gradscale.select(pred, [a for a, _ in inexact], [b for _, b in inexact]))
    return jax.tree.unflatten(structure, [a if _is_float0(a) else next(selected) for a, _ in pairs])


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a pytree and its structure.

    Raises
    ------
    InvalidValueError
        For one that holds itself, or is deeper than JAX walks.
    InvalidTypeError
        For one that raises when it is read.
    """
    try:
        with reading("a pytree"):
            return jax.tree.flatten(tree)
    except InvalidTypeError as error:
        if not isinstance(error.__cause__, RecursionError):
            raise
        msg = f"a pytree must not hold itself, nor be deeper than JAX can walk, got a {type(tree).__name__} that is"
        raise InvalidValueError(msg) from error.__cause__


def as_state(state: Any) -> ScaleState:
    """Return a state as JAX arrays of its dtypes; a checkpoint may have come back as NumPy's, or as numbers.

    Raises
    ------
    InvalidTypeError
        For anything but a ScaleState.
    """
    if not isinstance(state, ScaleState):
        msg = f"state must be a ScaleState, such as policy.init(jnp.zeros(())) returns, got {shown(state)}"
        raise InvalidTypeError(msg)
    dtypes = (jnp.float32, *[jnp.int32] * (len(state) - 1))
    return ScaleState(*(strong(field, dtype) for field, dtype in zip(state, dtypes, strict=True)))


def strong(leaf: Any, dtype: Any = None) -> Any:
    """Return a number or an array as a JAX array that is not weakly typed, or no step would be compiled once."""
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        leaf = jnp.asarray(leaf, dtype=dtype)
    if isinstance(leaf, jax.Array) and (getattr(leaf, "weak_type", False) or leaf.dtype != (dtype or leaf.dtype)):
        return jax.lax.convert_element_type(leaf, dtype or leaf.dtype)
    return leaf


def as_jax(leaf: Any) -> Any:
    """Return NumPy's arrays and scalars as JAX arrays, and anything else as it is."""
    return jnp.asarray(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _is_float0(leaf: Any) -> bool:
    """Tell whether a leaf is the gradient of an integer: a NumPy array without content."""
    return isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0
