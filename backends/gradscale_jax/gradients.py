"""value_and_grad: a loss scaled, differentiated, unscaled and judged, in one function that jit compiles."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradscale import ScaleState
from gradscale.core import validation
from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.messages import shown
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale_jax import trees
from gradscale_jax.collectives import agree
from gradscale_jax.verdict import Verdict

__all__ = ["Scaled", "value_and_grad"]


class Scaled(NamedTuple):
    """What a scaled differentiation returns; a pytree.

    Attributes
    ----------
    value : array, or tuple of array and auxiliary data
        The loss as the function returned it, not scaled.
    grads : pytree
        Unscaled gradients; not finite where ``verdict.finite`` is false.
    verdict : Verdict
        Whether to take the step.
    state : ScaleState
        For the next step.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> differentiate = gradscale_jax.value_and_grad(lambda w: jnp.sum(w**2), policy)
    >>> scaled = differentiate(policy.init(jnp.zeros(())), jnp.ones(2))
    >>> print(scaled.value, scaled.grads, scaled.verdict.finite)
    2.0 [2. 2.] True
    """

    value: Any
    grads: Any
    verdict: Verdict
    state: ScaleState


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    reduce: Callable[[Any], Any] | None = None,
    dtype: Any = None,
    filter: Callable[[Any], bool] | None = None,  # noqa: A002
) -> Callable[..., Scaled]:
    """Make a function that evaluates a loss and its unscaled gradients, judges them, and adapts the scale.

    Parameters
    ----------
    fun : callable
        Returns a scalar loss of any real floating dtype, or ``(loss, aux)``.
    policy : Policy
        Such as ``gradscale.DynamicScale()``; its ``init`` makes the first state.
    argnums : int or sequence of int, default 0
        Which arguments of ``fun`` to differentiate by.
    has_aux : bool, default False
        Whether ``fun`` returns a pair; ``value`` is then that pair.
    allow_int : bool, default False
        Whether to differentiate by integers too, whose gradients are float0 and pass through.
    axis_name : str or tuple of str, optional
        Named axes whose ranks agree: all step, or none does. One ``pmax`` of 88 bytes.
    reduce : callable, optional
        Applied to the gradients while they are still scaled, such as
        ``lambda grads: jax.lax.pmean(grads, "data")``: sums of small float16 numbers then do not vanish, and a sum that
        overflows is found. Default: none; ``jax.shard_map`` has summed those of replicated parameters itself, and to
        average them again is wrong, unless it is told ``check_vma=False``.
    dtype : dtype, optional
        Wanted dtype of the real gradients, such as float32 for float16 parameters. Default: their own.
    filter : callable, optional
        Tells of a leaf of the arguments in ``argnums`` whether it is trained, such as ``eqx.is_inexact_array`` for an
        equinox module: the gradients are the same tree with None in the place of all others, as ``eqx.filter_grad``
        returns it. Default: every leaf is trained. For flax nnx give the parameters of
        ``nnx.split(model, nnx.Param, ...)``, and ``nnx.merge`` them in ``fun``.

    Returns
    -------
    callable
        ``(state, *args, **kwargs) -> Scaled``. It composes with jit, vmap, scan, ``jax.checkpoint`` and shard_map; no
        host read. A float16 loss is never scaled by more than 32768, since the first cotangent has its dtype.

    Raises
    ------
    InvalidTypeError
        When ``policy`` is no policy, or ``filter`` no function.
    InvalidValueError, InvalidTypeError
        From the function: when the loss is not a real floating scalar, or the state no ScaleState; for an argument that
        cannot be differentiated by, such as a module that holds more than parameters.
    CallOrderError
        From the function: when ``axis_name`` is not bound.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> @jax.jit
    ... def step(state, w):
    ...     value, grads, verdict, state = gradscale_jax.value_and_grad(lambda w: jnp.sum(w**2), policy)(state, w)
    ...     return gradscale_jax.select(verdict.finite, w - 0.25 * grads, w), state
    >>> print(step(policy.init(jnp.zeros(())), jnp.ones(2))[0])
    [0.5 0.5]
    """
    validation.policy(policy)
    if filter is not None and not callable(filter):
        msg = f"filter must be a function of a leaf, such as eqx.is_inexact_array, got {filter!r}"
        raise InvalidTypeError(msg)

    def scaled_value_and_grad(state: ScaleState, /, *args: Any, **kwargs: Any) -> Scaled:
        state = trees.as_state(state)
        positions = _positions(argnums, len(args))
        trained, others = (args, {}) if filter is None else _part(args, positions, filter)
        for index in positions:
            _require_trainable(index, args[index], trained[index], allow_int=allow_int)

        def scaled_loss(*args: Any, **kwargs: Any) -> Any:
            whole = [_joined(arg, others[index]) if index in others else arg for index, arg in enumerate(args)]
            value = fun(*whole, **kwargs)
            loss = _require_loss(value, has_aux)
            return trees.scale(loss, _limit(state, loss)), (value, loss)

        differentiate = jax.grad(scaled_loss, argnums, has_aux=True, allow_int=allow_int)
        grads, (value, loss) = differentiate(*trained, **kwargs)
        if reduce is not None:
            grads = reduce(grads)
        limited = _limit(state, loss)
        unscaled, nonfinite = trees.unscale(grads, limited, dtype=dtype)
        verdict = agree(nonfinite, limited, policy, axis_name)
        updated = _limit(policy.update(limited, nonfinite=verdict.nonfinite), loss)
        return Scaled(value, unscaled, verdict, trees.select(verdict.desynced, state, updated))

    return scaled_value_and_grad


def _positions(argnums: int | Sequence[int], count: int) -> list[int]:
    """Return the positions of arguments to differentiate by, those that there are."""
    given = (argnums,) if isinstance(argnums, int) else argnums
    return [index for index in range(count) if index in given or index - count in given]


def _part(
    args: Sequence[Any], positions: Sequence[int], is_trained: Callable[[Any], bool]
) -> tuple[list[Any], dict[int, Any]]:
    """Return arguments with None for the leaves that are not trained, and by position what is left of each."""
    trained, others = list(args), {}
    for index in positions:
        leaves, structure = jax.tree.flatten(args[index])
        parted = [(leaf, None) if is_trained(leaf) else (None, leaf) for leaf in leaves]
        trained[index] = jax.tree.unflatten(structure, [leaf for leaf, _ in parted])
        others[index] = jax.tree.unflatten(structure, [leaf for _, leaf in parted])
    return trained, others


def _joined(trained: Any, others: Any) -> Any:
    """Return the argument of which two parts are given."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, others, is_leaf=lambda leaf: leaf is None)


def _require_trainable(index: int, arg: Any, trained: Any, *, allow_int: bool) -> None:
    """Refuse an argument that cannot be differentiated by, and modules of flax nnx that change while they are called.

    Raises
    ------
    InvalidTypeError
        Which says how to part what is trained from the rest.
    """
    changing = _changing_variables(arg)
    if changing:
        msg = (
            f"fun is differentiated by argument {index}, a flax nnx module that must hold parameters alone, got "
            f"{', '.join(changing)}, too, whose changes in fun would be lost: {_OF_NNX}"
        )
        raise InvalidTypeError(msg)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        if not _is_differentiable(leaf, allow_int=allow_int):
            got = f"{leaf.dtype}" if hasattr(leaf, "dtype") else f"{leaf!r}"
            msg = (
                f"fun is differentiated by argument {index}, whose leaves must be floating or complex arrays, got "
                f"{got} at {jax.tree_util.keystr(path) or 'its root'}: {_remedy(arg)}"
            )
            raise InvalidTypeError(msg)


_OF_EQUINOX = (
    "say filter=eqx.is_inexact_array (and compile with eqx.filter_jit), or give params of "
    "params, static = eqx.partition(model, eqx.is_inexact_array) and call eqx.combine(params, static) in fun"
)
_OF_NNX = (
    "give params of graphdef, params, others = nnx.split(model, nnx.Param, ...), call "
    "model = nnx.merge(graphdef, params, others, copy=True) in fun, and return nnx.split(model, nnx.Param, ...)[2] "
    "beside the loss with has_aux=True"
)


def _remedy(arg: Any) -> str:
    """Return what to do about an argument that holds more than parameters."""
    if any(base.__module__.partition(".")[0] == "equinox" for base in type(arg).__mro__):
        return _OF_EQUINOX
    return f"for integers say allow_int=True; with equinox {_OF_EQUINOX}; with flax nnx {_OF_NNX}"


def _changing_variables(tree: Any) -> list[str]:
    """Return the names of what the modules of flax nnx in a tree hold beside parameters, such as BatchStat."""
    # Who has a module has imported it.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    modules = [x for x in _nodes(tree, nnx.Module) if isinstance(x, nnx.Module)]
    kinds = {type(x) for module in modules for x in _nodes(module, nnx.Variable) if isinstance(x, nnx.Variable)}
    return sorted(kind.__name__ for kind in kinds if not issubclass(kind, nnx.Param))


def _nodes(tree: Any, kind: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))


def _is_differentiable(leaf: Any, *, allow_int: bool) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return allow_int or jnp.issubdtype(leaf.dtype, jnp.inexact)
    if isinstance(leaf, (bool, int)):
        return allow_int
    return isinstance(leaf, (float, complex)) or hasattr(leaf, "__jax_array__")


def _require_loss(value: Any, has_aux: bool) -> jax.Array:
    """Return the loss of what a user's function has returned, as an array."""
    if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
        msg = f"with has_aux=True fun must return a pair (loss, aux), got {shown(value)}"
        raise InvalidTypeError(msg)
    loss = value[0] if has_aux else value
    if not isinstance(loss, (jax.Array, float, np.floating)):
        hint = ": say has_aux=True" if isinstance(loss, tuple) else ""
        msg = f"fun must return a scalar loss, got {shown(loss)}{hint}"
        raise InvalidTypeError(msg)
    loss = jnp.asarray(loss)
    if loss.shape != ():
        msg = f"fun must return a scalar loss, got one of shape {loss.shape}: take its mean or sum"
        raise InvalidValueError(msg)
    if kind_of(loss) not in (Kind.HALF, Kind.WIDE):
        msg = f"fun must return a real floating loss, got {loss.dtype}"
        raise InvalidTypeError(msg)
    return loss


def _limit(state: ScaleState, loss: jax.Array) -> ScaleState:
    """Return the state with a scale that the dtype of a loss can hold, as the first cotangent must."""
    largest = float(jnp.finfo(loss.dtype).max)
    if largest >= validation.LARGEST_FLOAT32:
        return state
    power = 2.0 ** (math.frexp(largest)[1] - 1)
    fits = state.scale <= jnp.full_like(state.scale, largest)
    return state._replace(scale=jnp.where(fits, state.scale, jnp.full_like(state.scale, power)))
