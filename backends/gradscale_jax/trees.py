"""scale, unscale and select on any pytree that JAX knows: equinox modules, flax states, classes of your own."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

import gradscale
from gradscale import ScaleState, StaticScale
from gradscale.core.arithmetic import UnitState, clip_factor, is_floating, multiply_arrays, sum_of_squares
from gradscale.core.validation import wrong_type
from gradscale.errors import InvalidValueError, reading
from gradscale_jax.arrays import count_nonfinite

T = TypeVar("T")


def scale(outputs: T, state: ScaleState) -> T:
    """Multiply outputs by the scale as :func:`gradscale.scale` does, in any pytree that JAX knows.

    Parameters
    ----------
    outputs : pytree
        Python floats and NumPy arrays become JAX arrays. A 0-d array of half precision comes back as float32, but its
        cotangent does not: differentiate a float32 loss, or bound the scale by 32768.
    state : ScaleState
        Gives the scale; unchanged.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=1024.0).init(jnp.zeros(()))
    >>> float(gradscale_jax.scale(jnp.float32(0.5), state))
    512.0
    """
    leaves, structure = _flattened(outputs)
    leaves = [strong(leaf) if isinstance(leaf, float) else leaf for leaf in leaves]
    scaled: T = structure.unflatten(gradscale.scale(leaves, as_state(state)))
    return scaled


def unscale(grads: T, state: ScaleState, *, dtype: DTypeLike | None = None) -> tuple[T, jax.Array]:
    """Unscale gradients, and count the non-finite, as :func:`gradscale.unscale` does, in any pytree that JAX knows.

    Parameters
    ----------
    grads : pytree
        Integers and float0 pass through and are not counted; leaves that are spread over a mesh count as wholes. What
        flax's fp8 training gives in place of gradients, in the collection ``_overwrite_with_gradient``, is counted and
        not divided.
    state, dtype
        As for :func:`gradscale.unscale`.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    >>> grads, nonfinite = gradscale_jax.unscale({"w": jnp.ones(2), "b": jnp.full(1, jnp.inf)}, state)
    >>> print(grads["w"], nonfinite)
    [0.25 0.25] 1
    """
    leaves, structure = _flattened(grads)
    gradients, bad = without_values(grads, leaves)
    unscaled, nonfinite = gradscale.unscale(gradients, as_state(state), dtype=dtype)
    tree: T = structure.unflatten([x if new is None else new for x, new in zip(leaves, unscaled, strict=True)])
    return tree, nonfinite + bad


def without_values(grads: object, leaves: list[Any]) -> tuple[list[Any], jax.Array | int]:
    """Return leaves with None for new values of flax's fp8, which no scale divides, and how many are not finite."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
    dtypes = [str(getattr(leaf, "dtype", None)) for leaf in leaves]
    are_values = ["_overwrite_with_gradient" in x or "fp8_meta" in y for x, y in zip(paths, dtypes, strict=True)]
    # One of flax's own dtypes has to be converted.
    values = [x for x in itertools.compress(leaves, are_values) if isinstance(x, jax.Array)]
    judged = [x if is_floating(x) else jax.lax.convert_element_type(x, jnp.float32) for x in values]
    gradients = [None if is_value else x for x, is_value in zip(leaves, are_values, strict=True)]
    return gradients, count_nonfinite(judged) if judged else 0


def clip(grads: T, like: jax.Array, max_norm: float) -> tuple[T, jax.Array, jax.Array]:
    """Return gradients clipped to a norm, 1 if that overflows, as for any that is not finite, else 0, and the norm."""
    leaves, structure = _flattened(grads)
    gradients, bad = without_values(grads, leaves)
    floating = [isinstance(x, jax.Array) and is_floating(x) for x in gradients]
    chosen = [x for x, one in zip(leaves, floating, strict=True) if one]
    norm, factor, overflows = clip_factor(sum_of_squares(chosen, like), max_norm)
    clipped = iter(multiply_arrays(chosen, factor))
    tree: T = structure.unflatten([next(clipped) if one else x for x, one in zip(leaves, floating, strict=True)])
    return tree, overflows + bad, norm


def select(pred: jax.Array, on_true: T, on_false: T) -> T:
    """Choose between two pytrees by a 0-d bool, leaf by leaf, as :func:`gradscale.select` does.

    Parameters
    ----------
    pred : array
        0-d bool, such as ``verdict.finite``.
    on_true, on_false : pytree
        Of one structure, with equal dtypes and shapes leaf by leaf; others (functions) must be equal.

    Examples
    --------
    >>> import gradscale_jax, jax.numpy as jnp
    >>> stepped, params = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    >>> print(gradscale_jax.select(jnp.asarray(False), stepped, params)["w"])
    [0. 0.]
    """
    chosen, structure = _flattened(on_true)
    others, other_structure = _flattened(on_false)
    if structure != other_structure:
        msg = f"trees must have one structure, got {structure} beside {other_structure}"
        raise InvalidValueError(msg)
    without = [[None if is_float0(leaf) else leaf for leaf in leaves] for leaves in (chosen, others)]
    pairs = zip(chosen, gradscale.select(pred, *without), strict=True)
    selected: T = structure.unflatten([old if is_float0(old) else new for old, new in pairs])
    return selected


def _flattened(tree: object) -> tuple[list[object], PyTreeDef]:
    """Return the leaves of a pytree, NumPy's as JAX's but for float0, and its structure."""
    with reading("a pytree"):
        try:
            leaves, structure = jax.tree.flatten(tree)
        except RecursionError as error:
            msg = f"a pytree must not hold itself, nor be deeper than JAX can walk, got a {type(tree).__name__} that is"
            raise InvalidValueError(msg) from error
        leaves = [jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) and not is_float0(x) else x for x in leaves]
    return leaves, structure


def is_float0(leaf: object) -> bool:
    """Tell whether a leaf is the gradient of an integer: a NumPy array without values."""
    return isinstance(leaf, np.ndarray) and leaf.dtype == jax.dtypes.float0


def as_state(state: object) -> ScaleState[jax.Array]:
    """Return a state as JAX arrays of its dtypes; a checkpoint may have come back as NumPy's, or as numbers."""
    if not isinstance(state, ScaleState):
        raise wrong_type(state, "state", "a ScaleState, such as policy.init(jnp.zeros(())) returns")
    return type(state)(strong(state.scale, jnp.float32), *(strong(tracker, jnp.int32) for tracker in state[1:]))


def to_unscale_with(state: ScaleState[jax.Array], policy: object) -> ScaleState[jax.Array]:
    """Return a state, as a UnitState if its policy is a constant scale of 1."""
    return UnitState(*state) if type(policy) is StaticScale and policy.init_scale == 1.0 else state


def strong(leaf: object, dtype: DTypeLike | None = None) -> object:
    """Return a number or an array as a JAX array that is not weakly typed, or no step would be compiled once."""
    if isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        leaf = jnp.asarray(leaf, dtype=dtype)
    if isinstance(leaf, jax.Array) and (getattr(leaf, "weak_type", False) or leaf.dtype != (dtype or leaf.dtype)):
        return jax.lax.convert_element_type(leaf, dtype or leaf.dtype)
    return leaf


def nodes(tree: object, kind: type[T]) -> list[T]:
    """Return the outermost nodes of a class in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in leaves if isinstance(node, kind)]
