"""scale, unscale and select on any pytree that JAX knows: equinox modules, flax states, classes of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

import gradscale
from gradscale import ScaleState
from gradscale.core.messages import reading, shown
from gradscale.errors import InvalidTypeError, InvalidValueError

__all__ = ["as_state", "nodes", "scale", "select", "strong", "unscale"]

T = TypeVar("T")


def scale(outputs: T, state: ScaleState) -> T:
    """Multiply outputs (a loss, or a pytree of arrays) by the scale; no host read, no collective.

    Parameters
    ----------
    outputs : pytree
        Floating leaves are multiplied; integers and float0 pass through. InvalidTypeError for a leaf that is no array.
    state : ScaleState
        Gives the scale; unchanged.

    Returns
    -------
    pytree
        The same dtypes, except that a 0-d array of half precision comes back as float32, which holds a loss times
        65536. Its cotangent does not: differentiate a float32 loss, or bound the scale by 32768. Python floats and
        NumPy arrays become JAX arrays.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=1024.0).init(jnp.zeros(()))
    >>> float(gradscale_jax.scale(jnp.float32(0.5), state))
    512.0
    """
    leaves, rebuilt, _ = _parted(outputs)
    leaves = [strong(leaf) if isinstance(leaf, float) else leaf for leaf in leaves]
    scaled: T = rebuilt(gradscale.scale(leaves, as_state(state)))
    return scaled


def unscale(grads: T, state: ScaleState, *, dtype: DTypeLike | None = None) -> tuple[T, jax.Array]:
    """Divide gradients by the scale, and count the leaves that are not finite afterwards; no host read, no collective.

    Parameters
    ----------
    grads : pytree
        Floating and complex leaves are divided; integers and float0 pass through and are not counted. InvalidTypeError
        for a leaf that is no array.
    state : ScaleState
        The state that the loss was scaled with; unchanged.
    dtype : dtype, optional
        Wanted dtype of real leaves, such as float32 for float16 parameters with float32 masters.

    Returns
    -------
    grads : pytree
        New arrays.
    nonfinite : array
        0-d int32: how many leaves hold an inf or NaN; under jit, leaves that are spread over a mesh count as wholes.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    >>> grads, nonfinite = gradscale_jax.unscale({"w": jnp.ones(2), "b": jnp.full(1, jnp.inf)}, state)
    >>> print(grads["w"], nonfinite)
    [0.25 0.25] 1
    """
    leaves, rebuilt, _ = _parted(grads)
    unscaled, nonfinite = gradscale.unscale(leaves, as_state(state), dtype=dtype)
    return rebuilt(unscaled), nonfinite


def select(pred: jax.Array, on_true: T, on_false: T) -> T:
    """Choose between two pytrees by a 0-d bool, leaf by leaf, without a host read; the arrays are new.

    Parameters
    ----------
    pred : array
        0-d bool, such as ``verdict.finite``.
    on_true, on_false : pytree
        Of one structure, with equal dtypes and shapes leaf by leaf; others (functions) must be equal.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        When ``pred`` is no 0-d bool array, or leaves differ in dtype; when they differ in shape, or the trees do.

    Examples
    --------
    >>> import gradscale_jax, jax.numpy as jnp
    >>> stepped, params = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    >>> print(gradscale_jax.select(jnp.asarray(False), stepped, params)["w"])
    [0. 0.]
    """
    chosen, rebuilt, structure = _parted(on_true)
    others, _, other_structure = _parted(on_false)
    if structure != other_structure:
        msg = f"trees must have one structure, got {structure} beside {other_structure}"
        raise InvalidValueError(msg)
    selected: T = rebuilt(gradscale.select(pred, chosen, others))
    return selected


def _parted(tree: object) -> tuple[list[object], Callable[[Iterable[object]], Any], PyTreeDef]:
    """Return the leaves of a pytree but for float0, a function that puts others in their place, and the structure."""
    try:
        with reading("a pytree"):
            leaves, structure = jax.tree.flatten(tree)
    except InvalidTypeError as error:
        if not isinstance(error.__cause__, RecursionError):
            raise
        msg = f"a pytree must not hold itself, nor be deeper than JAX can walk, got a {type(tree).__name__} that is"
        raise InvalidValueError(msg) from error.__cause__
    # A float0 is the gradient of an integer: a NumPy array without values.
    is_float0 = [isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0 for leaf in leaves]

    def rebuilt(new: Iterable[object]) -> Any:
        made = iter(new)
        return jax.tree.unflatten(
            structure, [x if skip else next(made) for x, skip in zip(leaves, is_float0, strict=True)]
        )

    kept = [leaf for leaf, skip in zip(leaves, is_float0, strict=True) if not skip]
    return [jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in kept], rebuilt, structure


def as_state(state: object) -> ScaleState:
    """Return a state as JAX arrays of its dtypes; a checkpoint may have come back as NumPy's, or as numbers."""
    if not isinstance(state, ScaleState):
        msg = f"state must be a ScaleState, such as policy.init(jnp.zeros(())) returns, got {shown(state)}"
        raise InvalidTypeError(msg)
    dtypes = (jnp.float32, *[jnp.int32] * (len(state) - 1))
    return ScaleState(*(strong(field, dtype) for field, dtype in zip(state, dtypes, strict=True)))


def strong(leaf: object, dtype: DTypeLike | None = None) -> object:
    """Return a number or an array as a JAX array that is not weakly typed, or no step would be compiled once."""
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        leaf = jnp.asarray(leaf, dtype=dtype)
    if isinstance(leaf, jax.Array) and (getattr(leaf, "weak_type", False) or leaf.dtype != (dtype or leaf.dtype)):
        return jax.lax.convert_element_type(leaf, dtype or leaf.dtype)
    return leaf


def nodes(tree: object, kind: type[T]) -> list[T]:
    """Return the outermost nodes of a class in a pytree."""
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]
