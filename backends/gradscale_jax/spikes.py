"""Spikes in compiled steps: windows of losses and gradient norms, as arrays of a state that the step carries."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradscale import SkipSpikes
from gradscale.core.arithmetic import Kind, kind_of, sum_of_squares
from gradscale.core.messages import shown
from gradscale.errors import InvalidTypeError, InvalidValueError
from gradscale.policies.spikes import SpikeState
from gradscale.scaler.spikes import checked_loss, is_loss
from gradscale_jax.collectives import Verdict

__all__ = ["Judged", "first_windows", "judge", "learn"]


class Judged(NamedTuple):
    """What this rank has found in a step; None if no spikes are skipped."""

    is_spike: jax.Array | None = None
    """0-d bool."""
    values: jax.Array | None = None
    """1-d float32, in the order of the rule's ``of``; NaN for a loss that is not known."""


def first_windows(rule: SkipSpikes | None, like: jax.Array) -> SpikeState | None:
    """Return empty windows, a row for each quantity that the rule judges; None without a rule."""
    return None if rule is None else SpikeState(*(jnp.stack([field] * len(rule.of)) for field in rule.init(like)))


def judge(rule: SkipSpikes | None, windows: SpikeState | None, loss: object, grads: object) -> Judged:
    """Judge the loss of a step, or None, and the norm of its unscaled gradients; traceable.

    Raises
    ------
    InvalidTypeError
        For windows of another rule, or a loss that is no number.
    InvalidValueError
        If the rule judges losses alone, and there is none.
    """
    given, wanted = windows and windows.values.shape, rule and (len(rule.of), rule.window)
    if given != wanted:
        msg = (
            f"the state must be one for {rule!r}, got windows of shape {given}: begin with init(params), or give the "
            f"skip= that the state was made with"
        )
        raise InvalidTypeError(msg)
    if rule is None or windows is None:
        return Judged()
    found = {}
    if loss is not None and "loss" in rule.of:
        is_number = isinstance(loss, (int, float)) and not isinstance(loss, bool)
        if not is_loss(loss) and not is_number:
            msg = f"value must be the loss, a number or a real floating array of one element, got {shown(loss)}"
            raise InvalidTypeError(msg)
        found["loss"] = jnp.reshape(jnp.asarray(checked_loss(loss), jnp.float32), ())
    if "norm" in rule.of:
        leaves = [x for x in jax.tree.leaves(grads) if kind_of(x) in (Kind.HALF, Kind.WIDE, Kind.COMPLEX)]
        found["norm"] = jnp.sqrt(_sum_of_squares(leaves, windows.values)).astype(jnp.float32)
    if not found:
        msg = f"{rule!r} judges losses alone, and got none: call update(grads, opt_state, params, value=loss)"
        raise InvalidValueError(msg)
    unknown = jnp.full_like(windows.values[0, 0], jnp.nan)
    values = jnp.stack([found.get(name, unknown) for name in rule.of])
    is_known = np.asarray([name in found for name in rule.of])
    return Judged(jnp.any(jnp.logical_and(rule.judge(windows, values), is_known)), values)


def learn(rule: SkipSpikes | None, windows: SpikeState | None, judged: Judged, verdict: Verdict) -> SpikeState | None:
    """Return the windows after a step, with its values unless it overflowed or the ranks differ; traceable."""
    if rule is None or windows is None or judged.values is None:
        return windows
    values = jnp.where(verdict.finite, judged.values, jnp.full_like(judged.values, jnp.nan))
    return rule.learn(windows, values, skipped=jnp.broadcast_to(verdict.spike, values.shape))


# Under jit it is a part of the step.
_sum_of_squares = jax.jit(sum_of_squares)
