"""value_and_grad: a loss scaled, differentiated, unscaled and judged, in one function that jit compiles."""

from __future__ import annotations

import math
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

    Returns
    -------
    callable
        ``(state, *args, **kwargs) -> Scaled``. It composes with jit, vmap, scan, ``jax.checkpoint`` and shard_map; no
        host read. A float16 loss is never scaled by more than 32768, since the first cotangent has its dtype.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        From the function: when the loss is not a real floating scalar, or the state no ScaleState.
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

    def scaled_value_and_grad(state: ScaleState, /, *args: Any, **kwargs: Any) -> Scaled:
        state = trees.as_state(state)

        def scaled_loss(*args: Any, **kwargs: Any) -> Any:
            value = fun(*args, **kwargs)
            loss = _require_loss(value, has_aux)
            return trees.scale(loss, _limit(state, loss)), (value, loss)

        differentiate = jax.grad(scaled_loss, argnums, has_aux=True, allow_int=allow_int)
        grads, (value, loss) = differentiate(*args, **kwargs)
        if reduce is not None:
            grads = reduce(grads)
        limited = _limit(state, loss)
        unscaled, nonfinite = trees.unscale(grads, limited, dtype=dtype)
        verdict = agree(nonfinite, limited, policy, axis_name)
        updated = _limit(policy.update(limited, nonfinite=verdict.nonfinite), loss)
        return Scaled(value, unscaled, verdict, trees.select(verdict.desynced, state, updated))

    return scaled_value_and_grad


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
