"""scaled: an optax transformation that unscales, agrees, and leaves its inner one alone on steps that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from gradscale import ScaleState, SkipSpikes, StaticScale
from gradscale.core import validation
from gradscale.core.arithmetic import UnitState, check_real_dtype, checked_norm
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr
from gradscale.policies.spikes import SpikeState
from gradscale_jax import trees
from gradscale_jax.collectives import Verdict
from gradscale_jax.judge import GuardedState, Judge

T = TypeVar("T")


class _Stored(NamedTuple):
    """What a pytree sees of a state: names that no optax transformation has, and values that have none."""

    gradscale_scale_state: tuple[jax.Array, ...]
    gradscale_inner_state: optax.OptState
    gradscale_verdict: tuple[jax.Array, ...]
    gradscale_skipped: jax.Array
    gradscale_windows: dict[str, tuple[jax.Array, ...]]
    """At most one, by a name that says what its windows hold."""


class ScaledOptimizerState(_Stored):
    """State of :func:`scaled`; a pytree of arrays, whose dtypes and shapes never change.

    ``optax.tree_utils.tree_get`` and ``tree_set`` find what ``tx`` calls ``count``, ``scale`` or ``skipped``: in the
    pytree, in checkpoints and as keywords of the constructor, the fields are ``gradscale_scale_state``,
    ``gradscale_inner_state``, ``gradscale_verdict``, ``gradscale_skipped`` and ``gradscale_windows``, and hold plain
    tuples. Read the properties below; ``opt_state._replace`` takes their names.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.scaled(optax.sgd(0.25), gradscale.DynamicScale())
    >>> _, opt_state = tx.update(jnp.full(2, jnp.inf), tx.init(jnp.ones(2)))
    >>> print(opt_state.skipped, opt_state.scale_state.scale)
    1 32768.0
    """

    __slots__ = ()

    @property
    def scale_state(self) -> ScaleState[jax.Array]:
        """The state to scale the next loss with; :func:`scale_state` finds it."""
        return _rebuild(ScaleState, self.gradscale_scale_state)

    @property
    def inner_state(self) -> optax.OptState:
        """The inner transformation's state after the last step that was taken."""
        return self.gradscale_inner_state

    @property
    def verdict(self) -> Verdict:
        """The last step's verdict, which holds the counts; at first a clean one. :func:`verdict_of` finds it."""
        return _rebuild(Verdict, self.gradscale_verdict)

    @property
    def skipped(self) -> jax.Array:
        """0-d int32: steps skipped so far; stays at the largest int32."""
        return self.gradscale_skipped

    @property
    def windows(self) -> SpikeState[jax.Array] | None:
        """The values that ``skip`` compares with, a row for each of ``skip.of``; None if spikes are not skipped."""
        windows = self.gradscale_windows
        return _rebuild(SpikeState, next(iter(windows.values()), None) if isinstance(windows, dict) else windows)

    def _replace(self, **changes: Any) -> ScaledOptimizerState:
        changes |= {name: _fields(x) for name, x in changes.items() if isinstance(x, ScaleState | Verdict | SpikeState)}
        if type(windows := changes.get("windows")) is tuple:
            # A transformation refuses windows without a name.
            changes["windows"] = dict.fromkeys(self.gradscale_windows or ["gradscale_unnamed"], windows)
        return super()._replace(**{x if x in self._fields else f"gradscale_{x}": changes[x] for x in changes})

    def __repr__(self) -> str:
        names = [name.removeprefix("gradscale_") for name in self._fields]
        return f"ScaledOptimizerState({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class ScaledTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax has no types.
    """What ``scaled`` and ``guarded`` return: an optax transformation with a :class:`ScaledOptimizerState`.

    Examples
    --------
    >>> import gradscale_jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.guarded(optax.sgd(0.25))
    >>> updates, opt_state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    >>> print(updates, opt_state.skipped)
    [-0.25 -0.25] 0
    """

    __slots__ = ()

    init: Callable[[optax.Params], ScaledOptimizerState]
    update: Callable[..., tuple[optax.Updates, ScaledOptimizerState]]


def scaled(
    tx: optax.GradientTransformation | optax.MultiSteps,
    policy: Policy = None,  # type: ignore[assignment]  # The error for none says what to give.
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    dtype: DTypeLike | None = None,
    max_norm: float | None = None,
    skip: SkipSpikes | None = None,
    warn_after: int | None = None,
    give_up_after: int | None = None,
) -> ScaledTransformation:
    """Make an optax transformation take gradients of a scaled loss, and skip steps that overflow, or spike.

    Parameters
    ----------
    tx : optax.GradientTransformation
        Sees unscaled gradients. Everything that has a state or a threshold belongs in here: clipping, schedules,
        weight decay, ``optax.MultiSteps``, ``optax.masked``, ``optax.partition``.
    policy : Policy
        Such as ``gradscale.DynamicScale()``.
    axis_name : str or tuple of str, optional
        As for :func:`gradscale_jax.value_and_grad`. Default: none, which is right under plain jit.
    dtype : dtype, optional
        Dtype in which real gradients are unscaled, and in which ``tx`` holds its state and sees the parameters: float32
        for float16 parameters, in whose dtype the ``eps`` of Adam would be 0. Default: that of each gradient.
    max_norm : float, optional
        Clip the gradients to this global 2-norm, in the pass that judges them, in place of
        ``optax.clip_by_global_norm``. A norm that is not finite is an overflow, and ``verdict.nonfinite`` is then 1 for
        any number. Each rank of ``axis_name`` clips by the norm of its own gradients, which all hold: if the norms
        differ, the ranks are ``desynced``. Default: none.
    skip : SkipSpikes, optional
        As for ``value_and_grad``, with the loss that ``update`` is given as ``value=``. Each rank of ``axis_name``
        judges its own values, and all skip together. A loss that is not finite is a spike without a rule, too.
    warn_after, give_up_after : int, optional
        As for ``value_and_grad``; ``verdict_of(opt_state)`` has the counts and the ``check``.

    Returns
    -------
    ScaledTransformation
        Its state is a :class:`ScaledOptimizerState`. Its ``update`` takes gradients of
        ``gradscale_jax.scale(loss, scale_state(opt_state))`` and returns updates for ``optax.apply_updates``. If the
        step is skipped these are zeros (negative ones, so that not even the sign of a parameter's zero changes), and
        ``tx`` is as if it had not been called. Extra arguments reach ``tx`` as they are: give it the loss
        (``value=``) and the gradients (``grad=``) that are not scaled. Nothing is modified; no host read.

    Raises
    ------
    InvalidTypeError
        From ``init``: without ``dtype``, when ``tx`` makes state of float16 or float8 for parameters of that dtype.
        From ``update``: for a state of another transformation or another ``skip``, for leaves that are no arrays, for a
        loss that is no number, or when the dtypes of the state of ``tx`` change in a step.
    InvalidValueError
        For a negative ``max_norm``. From ``update``: when ``skip`` judges losses alone, and there is none. From
        ``init``: when it stands inside another one, or inside ``optax.masked`` or ``optax.partition``, which would
        leave other gradients scaled.

    Notes
    -----
    Scale a float32 loss: the first cotangent of a float16 one cannot hold 65536. Let it be the outermost
    transformation: what precedes it in a chain sees scaled gradients, what follows it sees a skipped step as zero
    updates, and ``optax.MultiSteps`` and ``optax.apply_if_finite`` around it hide overflows, or keep them for good.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.scaled(optax.sgd(0.25), gradscale.DynamicScale())
    >>> params = jnp.ones(2)
    >>> opt_state = tx.init(params)
    >>> grads = jax.grad(lambda w: gradscale_jax.scale(jnp.sum(w**2), gradscale_jax.scale_state(opt_state)))(params)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> print(optax.apply_updates(params, updates))
    [0.5 0.5]
    """
    inner = _require_transformation(tx)
    largest = None if max_norm is None else checked_norm(max_norm)
    judge = Judge(policy, axis_name, skip, warn_after=warn_after, give_up_after=give_up_after)

    def init(params: optax.Params) -> ScaledOptimizerState:
        _require_no_masks(params)
        first, verdict = judge.begin(params)
        check_real_dtype(first.scale_state.scale, dtype)
        inner_state = jax.tree.map(trees.strong, inner.init(_cast(params, dtype)))
        if _states_in(inner_state):
            msg = "scaled() must not stand inside another scaled(), which would divide the gradients twice: use one"
            raise InvalidValueError(msg)
        _require_wide(inner_state, params if dtype is None else ())
        zero = jnp.zeros_like(first.scale_state.growth_tracker)
        return ScaledOptimizerState(tuple(first.scale_state), inner_state, _fields(verdict), zero, first.windows)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: object
    ) -> tuple[optax.Updates, ScaledOptimizerState]:
        if not isinstance(state, ScaledOptimizerState):
            expected = "the one that init(params) of this transformation returned"
            raise validation.wrong_type(state, "the state", expected)
        _require_no_masks(updates)
        # A checkpoint may have come back as NumPy arrays.
        state = jax.tree.map(trees.strong, state)
        unscale_state = trees.to_unscale_with(state.scale_state, policy)
        grads, nonfinite = trees.unscale(updates, unscale_state, dtype=dtype)
        norm = None
        if largest is not None:
            # The compiler leaves out the count, which nothing uses then.
            grads, nonfinite, norm = trees.clip(grads, unscale_state.scale, largest)
        if isinstance(unscale_state, UnitState):
            # A state of another policy may go on here: the loss was scaled by it once, and is not from now on.
            nonfinite = nonfinite + (unscale_state.scale != 1.0).astype(nonfinite.dtype)
        before = GuardedState(state.scale_state, state.gradscale_windows, state.verdict.tally)
        verdict, after = judge(nonfinite, grads, extra_args.get("value"), before, norm, needs_finite=True)
        inner_updates, inner_state = inner.update(grads, state.inner_state, _cast(params, dtype), **extra_args)
        _require_same_dtypes(state.inner_state, inner_state)
        with reading("an update of tx"):
            # A skipped step keeps arrays of JAX back, and no others.
            inner_updates = jax.tree.map(lambda x: x if trees.is_float0(x) else jnp.asarray(x), inner_updates)
        updated = policy.update(state.scale_state, nonfinite=verdict.nonfinite)
        if isinstance(unscale_state, UnitState):
            updated = updated._replace(scale=unscale_state.scale / unscale_state.scale)
        taken, keeps_scale = verdict.taken, jnp.logical_or(verdict.desynced, verdict.spike)
        return trees.select(taken, inner_updates, jax.tree.map(_negative_zeros, inner_updates)), ScaledOptimizerState(
            tuple(trees.select(keeps_scale, state.scale_state, updated)),
            trees.select(taken, inner_state, state.inner_state),
            _fields(verdict),
            jnp.where(taken, state.skipped, jnp.minimum(state.skipped, validation.LARGEST_INT32 - 1) + 1),
            after.windows,
        )

    return ScaledTransformation(init, update)


def guarded(
    tx: optax.GradientTransformation | optax.MultiSteps,
    *,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    dtype: DTypeLike | None = None,
    max_norm: float | None = None,
    skip: SkipSpikes | None = None,
    warn_after: int | None = None,
    give_up_after: int | None = None,
) -> ScaledTransformation:
    """Return :func:`scaled` with ``gradscale.StaticScale(1.0)``: it skips bad steps, and scales nothing.

    Examples
    --------
    >>> import gradscale_jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.guarded(optax.sgd(0.25), give_up_after=100)
    >>> print(tx.update(jnp.asarray([1.0, jnp.nan]), tx.init(jnp.ones(2)))[0])
    [-0. -0.]
    """
    limits = {"warn_after": warn_after, "give_up_after": give_up_after}
    return scaled(tx, StaticScale(1.0), axis_name=axis_name, dtype=dtype, max_norm=max_norm, skip=skip, **limits)


def scale_state(opt_state: object) -> ScaleState[jax.Array]:
    """Return the scale state in an optax state, for ``gradscale_jax.scale(loss, scale_state(opt_state))``.

    Parameters
    ----------
    opt_state : pytree
        Holds one :class:`ScaledOptimizerState`, in any nesting; a whole train state is fine. InvalidValueError if it
        holds none, or several: one loss has one scale.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.scaled(optax.adam(0.01), gradscale.DynamicScale(init_scale=1024.0))
    >>> state = gradscale_jax.scale_state(tx.init(jnp.ones(2)))
    >>> print(gradscale_jax.scale(jnp.float32(0.5), state))
    512.0
    """
    return ScaleState(*_arrays(_only_state(opt_state).scale_state))


def verdict_of(opt_state: object) -> Verdict:
    """Return the verdict on the last step: for ``gradscale_jax.select`` on other state, for logs, or ``check(policy)``.

    Parameters
    ----------
    opt_state : pytree
        As for :func:`scale_state`; before the first step its verdict is a clean one.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp, optax
    >>> tx = gradscale_jax.scaled(optax.adam(0.01), gradscale.DynamicScale())
    >>> _, opt_state = tx.update(jnp.full(2, jnp.nan), tx.init(jnp.ones(2)))
    >>> print(gradscale_jax.verdict_of(opt_state).finite)
    False
    """
    return Verdict(*_arrays(_only_state(opt_state).verdict))


def carry_over(old: object, first: ScaledOptimizerState) -> ScaledOptimizerState:
    """Return a first state that goes on where another was, made without some options, such as ``skip``, or with them.

    Parameters
    ----------
    old : pytree
        As for :func:`scale_state`. Its scale, counts and the state of ``tx`` are kept, and its windows if ``skip``
        judges as many values of the same quantities.
    first : ScaledOptimizerState
        What ``init(params)`` of the transformation that goes on returns, around the same ``tx``, or InvalidValueError.
        Has empty windows and counts where the old state has none.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp, optax
    >>> params, before = jnp.ones(2), gradscale_jax.guarded(optax.adam(0.1))
    >>> _, old = before.update(params, before.init(params))
    >>> tx = gradscale_jax.guarded(optax.adam(0.1), skip=gradscale.SkipSpikes(), give_up_after=20)
    >>> opt_state = gradscale_jax.carry_over(old, tx.init(params))
    >>> print(opt_state.inner_state[0].count, opt_state.windows.count)
    1 [0 0]
    """
    kept, begun = _only_state(old), _only_state(first)
    theirs, own = _form(kept.inner_state), _form(begun.inner_state)
    if theirs != own:
        msg = (
            f"old and first must hold states of one tx for the same parameters, got {short_repr(theirs)} in old and "
            f"{short_repr(own)} in first: give tx.init(params) of a transformation around the tx that old is of, or "
            f"begin with first"
        )
        raise InvalidValueError(msg)
    verdict, tally = kept.verdict, begun.verdict.tally
    is_alike = jax.tree.map(np.shape, kept.gradscale_windows) == jax.tree.map(np.shape, begun.gradscale_windows)
    return kept._replace(
        verdict=verdict._replace(tally=tally if tally is None or verdict.tally is None else verdict.tally),
        windows=(kept if is_alike else begun).gradscale_windows,
    )


def _form(tree: object) -> tuple[object, list[tuple[int, ...]]]:
    """Return the structure and the shapes of a state of tx, whose arrays may be within variables of flax's NNX."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
    return jax.tree.structure(tree, is_leaf=_holds_one_array), shapes


def _holds_one_array(node: object) -> bool:
    return not isinstance(node, (tuple, list, dict)) and len(jax.tree.leaves(node)) == 1


def _only_state(opt_state: object) -> ScaledOptimizerState:
    states = _states_in(opt_state)
    if len(states) != 1:
        got = f"{len(states)}: one loss has one scale" if states else f"{type(opt_state).__name__} without one"
        msg = (
            f"opt_state must hold one state of gradscale_jax.scaled(tx, policy) or guarded(tx), got {got}; give what "
            f"its init(params) returned (restore a checkpoint into that), with one scaled() or guarded() around the "
            f"whole, or the part that is meant"
        )
        raise InvalidValueError(msg)
    return states[0]


def _arrays(fields: Iterable[object]) -> list[Any]:
    """Return the fields of a state as JAX arrays: of a checkpoint they may be NumPy's, in flax's NNX variables."""
    leaves = [jax.tree.leaves(field) for field in fields]
    return [trees.strong(only[0]) if len(only) == 1 else field for only, field in zip(leaves, fields, strict=True)]


def _states_in(tree: object) -> list[ScaledOptimizerState]:
    """Return the states of scaled() in a tree, those within others too."""
    states = trees.nodes(tree, ScaledOptimizerState)
    return states + [deeper for state in states for deeper in _states_in(state.inner_state)]


def _fields(record: ScaleState | Verdict | SpikeState) -> tuple[Any, ...]:
    """Return the fields as the optimizer's state holds them: without an empty tally."""
    return tuple(record[:-1] if isinstance(record, Verdict) and record.tally is None else record)


def _rebuild(kind: Callable[..., T], fields: Any) -> T:
    """Return the object of some fields; what stands in their place, such as a sharding or None, as it is."""
    return kind(*fields) if type(fields) is tuple else fields


def _require_transformation(tx: object) -> optax.GradientTransformationExtraArgs:
    if isinstance(tx, optax.MultiSteps):
        # Its own gradient_transformation() would drop them.
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    if not isinstance(tx, optax.GradientTransformation):
        raise validation.wrong_type(tx, "tx", "an optax.GradientTransformation, such as optax.adam(1e-3)")
    return optax.with_extra_args_support(tx)


def _require_no_masks(tree: object) -> None:
    """Raise InvalidValueError for leaves that an optax mask keeps back."""
    if trees.nodes(tree, optax.MaskedNode):
        msg = (
            "scaled() must not stand inside optax.masked, optax.partition or optax.freeze: what they keep back, got as "
            "optax.MaskedNode, would be applied while it is still scaled. Write scaled(optax.masked(tx, mask), policy)"
        )
        raise InvalidValueError(msg)


def _require_wide(inner_state: object, params: object) -> None:
    """Raise InvalidTypeError for state in a dtype of the parameters in which 1e-8 is 0."""
    narrow = {x.dtype for x in filter(_is_real, jax.tree.leaves(params)) if jnp.finfo(x.dtype).tiny > 1e-8}
    for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state):
        if getattr(leaf, "dtype", None) in narrow:
            msg = (
                f"an eps of 1e-8 must not be 0 in the state of tx, or a gradient of 0 makes NaN, got {leaf.dtype} in "
                f"tx.init(params){jax.tree_util.keystr(path)}: say scaled(tx, policy, dtype=jnp.float32)"
            )
            raise InvalidTypeError(msg)


def _is_real(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(params: T, dtype: DTypeLike | None) -> T:
    """Return parameters with their real floating leaves in a dtype, as the gradients come."""
    return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype) if _is_real(x) else x, params)


def _require_same_dtypes(old: object, new: object) -> None:
    """Raise InvalidTypeError for a step that changes the dtypes of a state, which no loop could carry."""
    for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=False):
        dtypes = getattr(before, "dtype", None), getattr(after, "dtype", None)
        if None not in dtypes and dtypes[0] != dtypes[1]:
            msg = (
                f"the state of tx must keep its dtypes, got {dtypes[1]} after a step where init had made {dtypes[0]} "
                f"of the parameters: give gradients in the dtype of the parameters, or dtype=jnp.float32 to scaled()"
            )
            raise InvalidTypeError(msg)


def _negative_zeros(leaf: object) -> object:
    """Return zeros that do not even change the sign of a parameter's zero; a float0 as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    zeros = jnp.zeros_like(leaf)
    return -zeros if jnp.issubdtype(leaf.dtype, jnp.inexact) else zeros
