"""Arithmetic on trees of arrays: scale, unscale and select."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast, overload

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, tree
from gradscale.core.arithmetic import Kind, as_0d_array, kind_of, replicas
from gradscale.core.protocols import Array, ArrayT, ScaleState
from gradscale.core.tree import floating_leaves
from gradscale.core.validation import wrong_type
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr

_T = TypeVar("_T")


def scale(outputs: _T, state: ScaleState) -> _T:
    """Multiply outputs (a loss, or nested containers of arrays) by the scale.

    Parameters
    ----------
    outputs : array or nested containers of arrays
        Any shapes and floating dtypes, on any devices of one library. Integer arrays, Python integers and ``None``
        pass through untouched. InvalidTypeError for another leaf, and for arrays of two libraries.
    state : ScaleState
        Gives the scale; unchanged.

    Returns
    -------
    same as outputs
        New arrays of the same dtypes, except that a 0-d array of half precision comes back as float32: float16 cannot
        hold a loss times 65536. Nothing is modified; no host read, no collective.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> state = gradscale.DynamicScale(init_scale=1024.0).init(like=np.float32(0.0))
    >>> gradscale.scale({"loss": np.float32(0.5), "count": 3}, state)
    {'loss': array(512., dtype=float32), 'count': 3}
    """
    require_state(state)
    leaves, rebuild = tree.flatten(outputs)
    chosen = floating_leaves(leaves, array_namespace(state.scale), what="output", rebuild=rebuild)
    scaled = registry.backend_for(state.scale).scale(chosen, state)
    by_identity = {id(old): new for old, new in zip(chosen, scaled, strict=True)}
    return cast("_T", rebuild(by_identity.get(id(leaf), leaf) for leaf in leaves))


@overload
def unscale(grads: _T, state: ScaleState[ArrayT]) -> tuple[_T, ArrayT]: ...
@overload
def unscale(grads: object, state: ScaleState[ArrayT], *, dtype: object) -> tuple[Any, ArrayT]: ...
@overload
def unscale(grads: object, state: ScaleState[ArrayT], *, out: _T) -> tuple[_T, ArrayT]: ...
def unscale(grads: object, state: ScaleState, *, dtype: object = None, out: object = None) -> tuple[Any, Array]:
    """Divide gradients by the scale, and count the leaves that are not finite afterwards.

    Use the state that ``scale`` used: a policy's update comes after (systems that update first halve the gradients
    on every growth step).

    Parameters
    ----------
    grads : array or nested containers of arrays
        As for :func:`scale`, and complex ones; computed in float32 (float64 in itself). Integers are not counted.
    state : ScaleState
        Gives the scale; unchanged.
    dtype : dtype, optional
        Wanted dtype of real floating leaves, such as float32 master gradients out of float16 ones. Default: each
        leaf's own.
    out : same as grads, optional
        Arrays to write to, of equal shapes and any floating dtypes, such as float32 masters that are there already, or
        the gradients themselves. A library whose arrays cannot be written (JAX) gives new ones of these dtypes.
        InvalidValueError for another structure or shape, for two arrays of one gradient that stands twice, or together
        with ``dtype``.

    Returns
    -------
    grads : same as grads
        ``out`` if it is given and can be written, else new arrays; no others are modified.
    nonfinite : array
        0-d int32 on the state's device: how many leaves hold an inf or NaN, judged on the unscaled values in the dtype
        in which they are returned, which is what the optimizer will see. No host read, no collective.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> state = gradscale.DynamicScale(init_scale=1024.0).init(like=np.float32(0.0))
    >>> grads, nonfinite = gradscale.unscale([np.float16([1.0, 2.0]), np.float16([np.nan])], state, dtype=np.float32)
    >>> print(*grads, int(nonfinite))
    [0.00097656 0.00195312] [nan] 1
    """
    require_state(state)
    leaves, rebuild = tree.flatten(grads)
    chosen = floating_leaves(leaves, array_namespace(state.scale), what="gradient", rebuild=rebuild)
    backend = registry.backend_for(state.scale)
    outs = None if out is None else _matching_outs(rebuild(leaves), out, chosen, state)
    if outs is not None and dtype is not None:
        msg = f"give dtype= or out=, whose arrays have their dtypes, not both, got dtype={short_repr(dtype)}"
        raise InvalidValueError(msg)
    unscaled, nonfinite = backend.unscale(chosen, state, dtype=dtype, out=outs)
    by_identity = {id(old): new for old, new in zip(chosen, unscaled, strict=True)}
    return rebuild(by_identity.get(id(leaf), leaf) for leaf in leaves), nonfinite


def require_state(state: object) -> None:
    """Raise InvalidTypeError for another thing than a state of arrays."""
    if not isinstance(state, ScaleState) or not is_array_api_obj(state.scale):
        raise wrong_type(state, "state", "a ScaleState, such as policy.init(like=loss) returns")


def _matching_outs(grads: object, out: object, chosen: Sequence[Array], state: ScaleState) -> list[Array]:
    targets: dict[int, list[Array]] = {id(grad): [] for grad in chosen}
    tree.map_leaves(lambda grad, target: targets.get(id(grad), []).append(target), grads, out)
    outs = [first for first, *_ in targets.values()]
    written = floating_leaves(outs, array_namespace(state.scale), what="out")
    for grad, target in zip(chosen, outs, strict=True):
        if getattr(target, "shape", None) != grad.shape:
            msg = (
                f"out must hold an array of shape {tuple(grad.shape)} for a gradient of that shape, got "
                f"{short_repr(target)}"
            )
            raise InvalidValueError(msg)
        if (kind_of(target) is Kind.COMPLEX) is not (kind_of(grad) is Kind.COMPLEX):
            msg = f"out must be complex for a complex gradient and for no other, got {target.dtype} for {grad.dtype}"
            raise InvalidValueError(msg)
    is_split = any(target is not first for first, *others in targets.values() for target in others)
    if len(written) != len(outs) or is_split:
        msg = "out must hold a floating array for each gradient, each once; one that stands twice has one array"
        raise InvalidValueError(msg)
    return outs


def select(pred: Array, on_true: _T, on_false: _T) -> _T:
    """Choose between two trees by a 0-d bool, leaf by leaf, without a host read; the arrays are new.

    Parameters
    ----------
    pred : array
        0-d bool, such as ``nonfinite == 0``; on any device of the library.
    on_true, on_false : nested containers of arrays
        Of one structure, with equal dtypes and shapes leaf by leaf. Leaves that are no arrays must be equal.

    Raises
    ------
    InvalidTypeError
        When ``pred`` is no 0-d bool, or two leaves differ in dtype (casting one would be a promotion by accident).
    InvalidValueError
        When the trees differ in structure, shapes, or in a leaf that is no array.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> stepped, params = {"w": np.ones(2)}, {"w": np.zeros(2)}
    >>> nonfinite = np.asarray(1, np.int32)
    >>> gradscale.select(nonfinite == 0, stepped, params)
    {'w': array([0., 0.])}
    """
    if not is_array_api_obj(pred) or pred.shape != () or not array_namespace(pred).isdtype(pred.dtype, "bool"):
        raise wrong_type(pred, "pred", "a 0-d bool array, such as nonfinite == 0")
    backend = registry.backend_for(pred)
    chosen = replicas(pred, backend.placement, backend.move)

    def choose(a: Array, b: Array) -> Array:
        if not is_array_api_obj(a) or not is_array_api_obj(b):
            with reading("an array"):
                if a is b or (type(a) is type(b) and a == b):
                    return a
            msg = f"leaves that are no arrays must be equal in both trees, got {short_repr(a)} and {short_repr(b)}"
            raise InvalidValueError(msg)
        if a.dtype != b.dtype:
            msg = f"both trees must have one dtype leaf by leaf, got {a.dtype} and {b.dtype}; cast one of them"
            raise InvalidTypeError(msg)
        if a.shape != b.shape:
            msg = f"both trees must have one shape leaf by leaf, got {a.shape} and {b.shape}"
            raise InvalidValueError(msg)
        xp = array_namespace(a, b)
        result = xp.where(chosen(a), a, b)
        # CuPy has no where() of bfloat16 and makes it float32; that and the way back are exact.
        return as_0d_array(xp, result if result.dtype == a.dtype else xp.astype(result, a.dtype))

    return cast("_T", tree.map_leaves(choose, on_true, on_false))
