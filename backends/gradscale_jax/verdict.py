"""Verdict: the outcome of a compiled step, on the device, and its errors, which the host raises."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.core.protocols import Policy
from gradscale.core.vector import describe_differences
from gradscale.errors import CallOrderError, InvalidTypeError, ScaleDesyncError, ScaleUnderflowError

__all__ = ["Verdict"]


class Verdict(NamedTuple):
    """The outcome of a step; a pytree of small arrays, the same on all ranks of the axis that it was agreed over.

    Attributes
    ----------
    nonfinite : array
        0-d int32: the largest number of gradient leaves that are not finite on any rank; 0 for a clean step.
    desynced : array
        0-d bool: the ranks came with different states. No rank may step, and none changes its state.
    at_min_scale : array
        0-d bool: the step overflowed, and the policy says that this must be raised (``at_min="raise"``).
    highest, lowest : array
        1-d int32: the fingerprints of state and policy over the ranks; equal unless ``desynced``.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> state = policy.init(jnp.zeros(()))
    >>> verdict = gradscale_jax.value_and_grad(lambda w: jnp.sum(w) * jnp.inf, policy)(state, jnp.ones(2)).verdict
    >>> verdict.check(policy)  # raises nothing: an overflow is no error
    >>> print(verdict.finite, verdict.nonfinite, verdict.desynced)
    False 1 False
    """

    nonfinite: jax.Array
    desynced: jax.Array
    at_min_scale: jax.Array
    highest: jax.Array
    lowest: jax.Array

    @property
    def finite(self) -> jax.Array:
        """0-d bool: whether to take the step; for ``gradscale_jax.select``, ``jnp.where`` or ``lax.cond``."""
        return jnp.logical_and(self.nonfinite == 0, jnp.logical_not(self.desynced))

    def __bool__(self) -> NoReturn:
        msg = (
            "a verdict is no Python bool: inside jit use gradscale_jax.select(verdict.finite, new, old), "
            "outside bool(verdict.finite)"
        )
        raise InvalidTypeError(msg)

    def check(self, policy: Policy) -> None:
        """Raise on the host what a compiled step cannot; waits for the step, so call it as often as you log.

        Parameters
        ----------
        policy : Policy
            The one of the step, for the message. The fields may be stacked, as a scan, vmap or pmap returns them.

        Raises
        ------
        CallOrderError
            For a traced verdict.
        ScaleDesyncError
            When the ranks held different states; it names the fields.
        ScaleUnderflowError
            When the policy's minimum was reached with ``at_min="raise"`` and gradients still overflow.
        """
        if any(isinstance(field, jax.core.Tracer) for field in self):
            msg = "check() reads from the device: call it outside of jit, on the verdict that the step returns"
            raise CallOrderError(msg)
        found: Verdict = jax.device_get(self)
        if np.any(found.desynced):
            # Of a scan, of vmap or of pmap there are several.
            count = found.lowest.shape[-1]
            lowest, highest = (each.reshape(-1, count)[found.desynced.reshape(-1)] for each in found[:2:-1])
            differing = describe_differences(lowest.min(axis=0).tolist(), highest.max(axis=0).tolist(), None, policy)
            msg = (
                f"ranks hold different states: {differing}. No rank took this step. Load one checkpoint on every rank, "
                f"and build the step with one policy everywhere"
            )
            raise ScaleDesyncError(msg)
        if np.any(found.at_min_scale):
            msg = (
                f"gradients are not finite although the scale has fallen to the minimum of {policy!r}: look for NaN in "
                f"the unscaled loss or the data, or lower min_scale"
            )
            raise ScaleUnderflowError(msg)
