"""value_and_grad: a loss scaled, differentiated, unscaled and judged, in one function that jit compiles."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gradscale import ScaleState, SkipSpikes
from gradscale.core.arithmetic import Kind, UnitState, kind_of
from gradscale.core.protocols import Policy
from gradscale.core.validation import wrong_type
from gradscale.errors import InvalidTypeError, InvalidValueError, short_repr
from gradscale_jax import trees
from gradscale_jax.collectives import Verdict
from gradscale_jax.judge import GuardedState, Judge

P = ParamSpec("P")
V = TypeVar("V")
G = TypeVar("G")
S = TypeVar("S", bound=ScaleState | GuardedState)


class Scaled(NamedTuple, Generic[V, S]):
    """The result of a function that :func:`value_and_grad` makes; a pytree.

    Attributes
    ----------
    value : array, or tuple of array and auxiliary data
        The loss as the function returned it, not scaled.
    grads : pytree
        Unscaled gradients; not finite where ``verdict.finite`` is false.
    verdict : Verdict
        Whether to take the step.
    state : ScaleState or GuardedState
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

    value: V
    grads: Any
    verdict: Verdict
    state: S


@dataclasses.dataclass(frozen=True)
class Differentiated(Generic[P, V, S]):
    """What :func:`value_and_grad` returns: call it with ``(state, *args, **kwargs)``.

    Attributes
    ----------
    init : callable
        Takes the parameters, and returns the first state, on their devices: a GuardedState if spikes are skipped or
        steps counted, else ``policy.init()``.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> differentiate = gradscale_jax.value_and_grad(jnp.sum, gradscale.DynamicScale(), give_up_after=20)
    >>> state = differentiate.init(jnp.ones(2))
    >>> print(differentiate(state, jnp.ones(2)).verdict.counts())
    {'taken': 1, 'overflow': 0, 'spike': 0}
    """

    _call: Callable[..., Scaled[V, S]]
    init: Callable[[object], S]

    def __call__(self, state: S, /, *args: P.args, **kwargs: P.kwargs) -> Scaled[V, S]:
        """Evaluate the loss and its gradients, judge them, and adapt the scale."""
        return self._call(state, *args, **kwargs)


@overload
def value_and_grad(
    fun: Callable[P, V],
    policy: Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    reduce: Callable[[G], G] | None = None,
    dtype: DTypeLike | None = None,
    filter: Callable[[object], bool] | None = None,
) -> Differentiated[P, V, ScaleState[jax.Array]]: ...
@overload
def value_and_grad(
    fun: Callable[P, V],
    policy: Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    reduce: Callable[[G], G] | None = None,
    dtype: DTypeLike | None = None,
    filter: Callable[[object], bool] | None = None,
    skip: SkipSpikes | None = None,
    warn_after: int | None = None,
    give_up_after: int | None = None,
) -> Differentiated[P, V, GuardedState | Any]: ...
def value_and_grad(
    fun: Callable[P, V],
    policy: Policy = None,  # type: ignore[assignment]  # The error for none says what to give.
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    reduce: Callable[[G], G] | None = None,
    dtype: DTypeLike | None = None,
    filter: Callable[[object], bool] | None = None,  # noqa: A002
    skip: SkipSpikes | None = None,
    warn_after: int | None = None,
    give_up_after: int | None = None,
) -> Differentiated[P, V, Any]:
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
        Named axes whose ranks agree by one ``pmax`` of 84 bytes: all step, or none does. CallOrderError if not bound.
    reduce : callable, optional
        Applied to the gradients while they are still scaled, such as
        ``lambda grads: jax.lax.pmean(grads, "data")``. Default: none; ``jax.shard_map`` has summed those of replicated
        parameters itself, and to average them again is wrong, unless ``check_vma=False``.
    dtype : dtype, optional
        Wanted dtype of the real gradients, such as float32 for float16 parameters. Default: their own.
    filter : callable, optional
        Tells whether a leaf of the arguments in ``argnums`` is trained, such as ``eqx.is_inexact_array`` for an equinox
        module. The gradients are the same tree with None for other leaves, as ``eqx.filter_grad`` returns it. Default:
        every leaf is trained. For flax nnx give the parameters of ``nnx.split(model, nnx.Param, ...)``, and
        ``nnx.merge`` them in ``fun``.
    skip : SkipSpikes, optional
        Tell by ``verdict.taken`` of spikes, too, of the loss and of the global norm of the unscaled gradients; the
        scale stays as it is. For windows that are equal on all ranks return the mean of the loss, and let each rank
        hold whole gradients. Default: none.
    warn_after, give_up_after : int, optional
        Count the steps made and skipped: ``verdict.counts()``. After so many skipped steps in a row
        ``verdict.check(policy, params)`` warns by a TrainingStalledWarning, or raises TrainingStalledError, on all
        ranks of ``axis_name``. Default: none; if both are, nothing is counted.

    Returns
    -------
    callable
        ``(state, *args, **kwargs) -> Scaled``, whose ``init(params)`` makes the first state: with ``skip`` or a limit a
        GuardedState, else a ScaleState, as ``policy.init`` does. It composes with jit, vmap, scan, ``jax.checkpoint``
        and shard_map; no host read. A float16 loss is never scaled by more than 32768, since the first cotangent has
        its dtype.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        From the function: when the loss is no real floating scalar, the state not of its ``init``, or an argument holds
        more than can be differentiated by.

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
    judge = Judge(policy, axis_name, skip, warn_after=warn_after, give_up_after=give_up_after)
    if filter is not None and not callable(filter):
        raise wrong_type(filter, "filter", "a function of a leaf, such as eqx.is_inexact_array")

    call: Callable[..., V] = fun
    chosen: Any = argnums if hasattr(argnums, "__index__") else tuple(argnums)
    indices = chosen if isinstance(chosen, tuple) else (chosen,)

    def scaled_value_and_grad(state: object, /, *args: P.args, **kwargs: P.kwargs) -> Scaled[V, Any]:
        before = judge.unpack(state)
        scale_state = before.scale_state
        trained: list[object] = list(args)
        for index, arg in enumerate(args):
            if index in indices or index - len(args) in indices:
                if filter is not None:
                    trained[index] = jax.tree.map(lambda leaf: leaf if filter(leaf) else None, arg)
                _require_trainable(index, arg, trained[index], allow_int=allow_int)

        def scaled_loss(*traced: object, **kwargs: object) -> tuple[jax.Array, tuple[V, jax.Array]]:
            value = call(*(traced if filter is None else map(_fill_in, traced, args)), **kwargs)
            loss = _require_loss(value, has_aux)
            # At a constant scale of 1 the loss itself is differentiated.
            is_one = isinstance(trees.to_unscale_with(scale_state, policy), UnitState)
            return loss if is_one else trees.scale(loss, _limit(scale_state, loss)), (value, loss)

        differentiate = jax.grad(scaled_loss, chosen, has_aux=True, allow_int=allow_int)
        grads, (value, loss) = differentiate(*trained, **kwargs)
        if reduce is not None:
            grads = reduce(grads)
        limited = _limit(scale_state, loss)
        unscaled, nonfinite = trees.unscale(grads, trees.to_unscale_with(limited, policy), dtype=dtype)
        verdict, after = judge(nonfinite, unscaled, loss, before._replace(scale_state=limited))
        updated = _limit(policy.update(limited, nonfinite=verdict.nonfinite), loss)
        keeps_scale = verdict.desynced if skip is None else jnp.logical_or(verdict.desynced, verdict.spike)
        after = after._replace(scale_state=trees.select(keeps_scale, scale_state, updated))
        return Scaled(value, unscaled, verdict, judge.pack(after))

    return Differentiated(scaled_value_and_grad, lambda params: judge.pack(judge.begin(params)[0]))


def _fill_in(trained: object, whole: object) -> object:
    """Return an argument whose leaves that are not trained, which are None, come from the whole argument."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, whole, is_leaf=lambda leaf: leaf is None)


def _require_trainable(index: int, arg: object, trained: object, *, allow_int: bool) -> None:
    """Raise InvalidTypeError for leaves that have no gradient, and for flax nnx modules that change in a call."""
    if changing := _changing_variables(arg):
        msg = (
            f"fun is differentiated by argument {index}, a flax nnx module that must hold parameters alone, got "
            f"{', '.join(changing)}, too, whose changes in fun would be lost: {_OF_NNX}"
        )
        raise InvalidTypeError(msg)
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        if not _is_differentiable(leaf, allow_int=allow_int):
            msg = (
                f"fun is differentiated by argument {index}, whose leaves must be floating or complex arrays, got "
                f"{getattr(leaf, 'dtype', None) or short_repr(leaf)} at {jax.tree_util.keystr(path) or 'its root'}: "
                f"say filter=eqx.is_inexact_array for equinox (and compile with eqx.filter_jit), or give params of "
                f"params, static = eqx.partition(model, eqx.is_inexact_array) and call eqx.combine(params, static) in "
                f"fun; with flax nnx {_OF_NNX}; for integers say allow_int=True"
            )
            raise InvalidTypeError(msg)


_OF_NNX = (
    "give params of graphdef, params, others = nnx.split(model, nnx.Param, ...), call "
    "model = nnx.merge(graphdef, params, others, copy=True) in fun, and return nnx.split(model, nnx.Param, ...)[2] "
    "beside the loss with has_aux=True"
)


def _changing_variables(tree: object) -> list[str]:
    """Return the kinds of variables but parameters, such as BatchStat, in the modules of flax nnx in a tree."""
    # Who has a module has imported it.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    variables = [x for module in trees.nodes(tree, nnx.Module) for x in trees.nodes(module, nnx.Variable)]
    return sorted({type(x).__name__ for x in variables if not isinstance(x, nnx.Param)})


def _is_differentiable(leaf: object, *, allow_int: bool) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        return allow_int or jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)
    return hasattr(leaf, "__jax_array__")


def _require_loss(value: Any, has_aux: bool) -> jax.Array:
    if has_aux and not (isinstance(value, (tuple, list)) and len(value) == 2):
        msg = f"with has_aux=True fun must return a pair (loss, aux), got {short_repr(value)}"
        raise InvalidTypeError(msg)
    loss = value[0] if has_aux else value
    if not isinstance(loss, (jax.Array, float, np.floating)):
        hint = ": say has_aux=True" if isinstance(loss, tuple) else ""
        msg = f"fun must return a scalar loss, got {short_repr(loss)}{hint}"
        raise InvalidTypeError(msg)
    loss = jnp.asarray(loss)
    if loss.shape != ():
        msg = f"fun must return a scalar loss, got one of shape {loss.shape}: take its mean or sum"
        raise InvalidValueError(msg)
    if kind_of(loss) not in (Kind.HALF, Kind.WIDE):
        msg = f"fun must return a real floating loss, got {loss.dtype}"
        raise InvalidTypeError(msg)
    return loss


def _limit(state: ScaleState[jax.Array], loss: jax.Array) -> ScaleState[jax.Array]:
    """Return the state with a scale that the dtype of a loss can hold, as the first cotangent must."""
    if kind_of(loss) is Kind.WIDE:
        return state
    info = jnp.finfo(loss.dtype)
    return state._replace(scale=jnp.where(state.scale <= float(info.max), state.scale, 2.0 ** (info.maxexp - 1)))
