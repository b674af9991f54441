"""Judge: the verdict on a step by its gradients and its loss, and the state for the next one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradscale import ScaleState, SkipSpikes
from gradscale.core import validation
from gradscale.core.arithmetic import is_floating
from gradscale.core.protocols import Policy
from gradscale.errors import InvalidTypeError, InvalidValueError, short_repr
from gradscale.policies.spikes import SpikeState, empty_windows
from gradscale.scaler.guard import checked_loss, guard_for, is_loss
from gradscale_jax import trees
from gradscale_jax.arrays import JaxBackend, sum_of_squares
from gradscale_jax.collectives import Verdict, agree, with_tally

T = TypeVar("T")

_Axes: TypeAlias = Hashable | Sequence[Hashable] | None

Windows: TypeAlias = dict[str, tuple[jax.Array, ...]]
"""At most one, by a name that says what its windows hold."""


class GuardedState(NamedTuple):
    """State of :func:`value_and_grad` if it skips spikes or counts steps; a pytree of arrays that keep dtype and shape.

    Attributes
    ----------
    scale_state : ScaleState
        The scale and its trackers.
    windows : dict
        The values that ``skip`` compares with, under a name that says which they are; empty without ``skip``.
    tally : array, optional
        As in :class:`Verdict`.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> policy, rule = gradscale.StaticScale(1.0), gradscale.SkipSpikes(above=5.0, of="loss")
    >>> differentiate = gradscale_jax.value_and_grad(lambda w: jnp.sum(w**2), policy, skip=rule)
    >>> state = differentiate.init(jnp.ones(2))
    >>> for w in (jnp.ones(2), jnp.full(2, 3.0)):
    ...     value, grads, verdict, state = differentiate(state, w)
    ...     print(value, verdict.taken)
    2.0 True
    18.0 False
    """

    scale_state: ScaleState[jax.Array]
    windows: Windows
    tally: jax.Array | None = None


class Judge:
    """Judges each step by one policy, over the ranks of some axes; may skip spikes, and count steps."""

    def __init__(self, policy: Policy, axis_name: _Axes, skip: SkipSpikes | None, **limits: int | None) -> None:
        self.policy, self.axis_name, self.skip = validation.policy(policy), axis_name, skip
        guard_for(skip)
        if skip is not None and not skip.act:
            msg = (
                f"a compiled step skips by its rule, got {short_repr(skip)}: count verdict.spike of one without "
                f"act=False"
            )
            raise InvalidValueError(msg)
        most = validation.LARGEST_INT32
        self._limits = [most if x is None else validation.integer(name, x, 1, most) for name, x in limits.items()]
        self._counts = set(limits.values()) != {None}

    def begin(self, params: object) -> tuple[GuardedState, Verdict]:
        """Return the first state and a clean verdict, beside the leaf on the most devices."""
        placed = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and JaxBackend().placement(x)]
        like = max(placed, key=lambda leaf: len(leaf.sharding.device_set), default=jnp.zeros(()))

        def first(state: ScaleState[jax.Array]) -> tuple[Windows, Verdict]:
            verdict = agree(jnp.zeros_like(state.growth_tracker), state, self.policy)
            tally = jnp.asarray([0] * 9 + self._limits, jnp.int32) if self._counts else None
            return self._named(lambda rule: empty_windows(rule, state.scale)), verdict._replace(tally=tally)

        scale_state = self.policy.init(like)
        # Compiled, since its results then are on no chosen device unless the state is.
        windows, verdict = jax.jit(first)(scale_state)
        return GuardedState(scale_state, windows, verdict.tally), verdict

    def unpack(self, state: Any) -> GuardedState:
        """Return a state of value_and_grad as JAX arrays; a checkpoint may have come back as NumPy's."""
        is_guarded = isinstance(state, GuardedState) and self.pack(state) is state
        guarded = jax.tree.map(trees.strong, state) if is_guarded else GuardedState(state, {})
        return guarded._replace(scale_state=trees.as_state(guarded.scale_state))

    def pack(self, state: GuardedState) -> Any:
        """Return a state as value_and_grad returns it: the ScaleState if no spike is skipped and no step counted."""
        return state if self._counts or self.skip is not None else state.scale_state

    def __call__(
        self,
        nonfinite: jax.Array,
        grads: object,
        loss: object,
        before: GuardedState,
        norm: jax.Array | None = None,
        *,
        needs_finite: bool = False,
    ) -> tuple[Verdict, GuardedState]:
        """Return the verdict on a step, and the state with other windows and another tally, and the same scale.

        ``norm``: of the gradients before they were clipped by it, if they were. ``needs_finite``: a loss that is not
        finite is a spike, with any rule and without one.
        """
        windows, is_spike, tally = self._windows_of(before), None, before.tally
        if self.skip is not None and windows is not None:
            values, is_spike = _judge(self.skip, windows, loss, grads, norm)
        if needs_finite and (type(loss) in (int, float) or is_loss(loss)):
            is_bad = jnp.logical_not(jnp.isfinite(_as_float32(loss)))
            is_spike = is_bad if is_spike is None else jnp.logical_or(is_spike, is_bad)
        verdict = agree(nonfinite, before.scale_state, self.policy, self.axis_name, spike=is_spike, norm=norm)
        if tally is not None:
            verdict = with_tally(verdict, tally, self._limits)
        if self.skip is not None and windows is not None:
            values = jnp.where(verdict.finite, values, jnp.nan)
            windows = self.skip.learn(windows, values, skipped=jnp.broadcast_to(verdict.spike, values.shape))
        return verdict, before._replace(windows=self._named(lambda _: windows or ()), tally=verdict.tally)

    def _named(self, make: Callable[[SkipSpikes], Iterable[T]]) -> dict[str, tuple[T, ...]]:
        """Return values for the rule, named by the quantities that it judges; an empty dict without a rule."""
        return {} if self.skip is None else {f"gradscale_{'_and_'.join(self.skip.of)}": tuple(make(self.skip))}

    def _windows_of(self, state: GuardedState) -> SpikeState | None:
        """Return the windows of a state; InvalidTypeError for a state of another rule, or that counts or does not."""
        shapes = {name: np.shape(fields[0]) for name, fields in (state.windows or {}).items()}
        counts = state.tally is not None
        words = ["does not count steps", "counts steps (warn_after=, give_up_after=)"]
        both = self._named(lambda rule: (len(rule.of), rule.window)), shapes
        skips = [f"has skip= and windows of shape {of_one}" if of_one else "has no skip=" for of_one in both]
        pairs = (words[self._counts], words[counts]), skips
        if differences := [f"one that {own}, got one that {theirs}" for own, theirs in pairs if own != theirs]:
            msg = (
                f"the state must be {', and '.join(differences)}: go on by gradscale_jax.carry_over(state, "
                f"tx.init(params)), or without optax by init(params)._replace(scale_state=state); begin with "
                f"init(params), or give the options that the state was made with"
            )
            raise InvalidTypeError(msg)
        return SpikeState(*next(iter(state.windows.values()))) if shapes else None


def _as_float32(loss: object) -> jax.Array:
    number = checked_loss(loss, "value must be the loss, a number or a real floating array of one element")
    return jnp.reshape(jnp.asarray(number, jnp.float32), ())


def _judge(
    rule: SkipSpikes, windows: SpikeState, loss: object, grads: object, norm: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the values that a rule judges, NaN for a missing loss, and whether any is a spike; traceable."""
    quantities = {}
    if loss is not None and "loss" in rule.of:
        quantities["loss"] = _as_float32(loss)
    if "norm" in rule.of:
        gradients = () if norm is not None else trees.without_values(grads, jax.tree.leaves(grads))[0]
        leaves = [x for x in gradients if x is not None and is_floating(x)]
        squares = sum_of_squares(leaves, windows.values)
        quantities["norm"] = jnp.sqrt(squares).astype(jnp.float32) if norm is None else norm
    if not quantities:
        msg = f"{rule!r} judges losses alone, and got none: call update(grads, opt_state, params, value=loss)"
        raise InvalidValueError(msg)
    values = jnp.stack([quantities.get(name, np.float32(np.nan)) for name in rule.of])
    has_value = np.asarray([name in quantities for name in rule.of])
    return values, jnp.any(jnp.logical_and(rule.judge(windows, values), has_value))
