"""Agreement over named axes, inside a compiled step: one pmax of int32 over the ranks of shard_map, vmap or pmap."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale import ScaleState, registry
from gradscale.core import validation
from gradscale.core.arithmetic import is_floating
from gradscale.core.protocols import Policy
from gradscale.errors import CallOrderError, InvalidTypeError, ScaleDesyncError, ScaleUnderflowError
from gradscale.scaler import claim as claims
from gradscale.scaler.diagnosis.cause import cause_of_broken
from gradscale.scaler.diagnosis.report import ParameterReport
from gradscale.scaler.differences import spread
from gradscale.scaler.stall import SkipStreak, raise_or_warn
from gradscale_jax import trees
from gradscale_jax.arrays import JaxBackend


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
    spike : array
        0-d bool: a rank has seen a spike, and no rank an overflow. No rank may step, and the scale stays as it is.
    tally : array, optional
        1-d int32: what :meth:`counts` returns and more, and first how many steps in a row were skipped. None without
        ``warn_after=`` and ``give_up_after=``.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> state = policy.init(jnp.zeros(()))
    >>> verdict = gradscale_jax.value_and_grad(lambda w: jnp.sum(w) * jnp.inf, policy)(state, jnp.ones(2)).verdict
    >>> verdict.check(policy)  # raises nothing: an overflow is no error
    >>> print(verdict.finite, verdict.nonfinite, verdict.desynced)
    False 1 False
    >>> print(verdict)
    Verdict(skipped, gradient arrays that are not finite: 1, scale 65536)
    """

    nonfinite: jax.Array
    desynced: jax.Array
    at_min_scale: jax.Array
    highest: jax.Array
    lowest: jax.Array
    spike: jax.Array
    tally: jax.Array | None = None

    @property
    def finite(self) -> jax.Array:
        """0-d bool: the gradients of all ranks are finite, and the ranks hold one state."""
        return jnp.logical_and(self.nonfinite == 0, jnp.logical_not(self.desynced))

    @property
    def taken(self) -> jax.Array:
        """0-d bool: take the step; ``finite`` if no spikes are skipped. For ``select``, ``jnp.where``, ``lax.cond``."""
        return jnp.logical_and(self.finite, jnp.logical_not(self.spike))

    def __repr__(self) -> str:
        """Say in words what happened; of a traced verdict, or of several, show the fields."""
        if isinstance(self.spike, (jax.Array, np.ndarray, np.generic)) and np.shape(self.spike) == ():
            # Traced, or donated to a compiled step.
            with contextlib.suppress(TypeError, RuntimeError):
                return f"Verdict({_in_words(self)})"
        return f"Verdict(nonfinite={self.nonfinite!r}, desynced={self.desynced!r}, spike={self.spike!r})"

    def __bool__(self) -> NoReturn:
        msg = (
            "a verdict is no Python bool: inside jit use gradscale_jax.select(verdict.taken, new, old), "
            "outside bool(verdict.taken)"
        )
        raise InvalidTypeError(msg)

    def counts(self) -> dict[str, int]:
        """Return how many steps were made or skipped so far: ``taken``, ``overflow`` and ``spike``; one host read.

        CallOrderError if they are not counted, since neither ``warn_after=`` nor ``give_up_after=`` was given.
        """
        if self.tally is None:
            msg = "steps are counted with warn_after= or give_up_after=, got the verdict of a step without them"
            raise CallOrderError(msg)
        counts = np.moveaxis(np.asarray(self.tally)[..., 3:6], -1, 0)
        return dict(zip(("taken", "overflow", "spike"), counts.tolist(), strict=True))

    def check(self, policy: Policy | None = None, params: object = None) -> None:
        """Raise on the host what a compiled step cannot; waits for the step, so call it as often as you log.

        Parameters
        ----------
        policy : Policy, optional
            The one of the step, for the message. The fields of the verdict may be stacked, as a scan, vmap or pmap
            returns them.
        params : pytree, optional
            Say in the message on a row of skipped steps whether these hold inf or NaN. They are looked at for that
            message alone; if they are spread over processes, all of these must check.

        Raises
        ------
        CallOrderError, ScaleDesyncError, ScaleUnderflowError
            For a traced verdict; when the ranks held different states, whose fields it names; when the policy's minimum
            was reached with ``at_min="raise"`` and gradients still overflow.
        TrainingStalledError
            With ``give_up_after=``, once so many steps in a row were skipped; with ``warn_after=`` each check warns, by
            a TrainingStalledWarning, once so many were and the scale falls no longer. Nothing is changed: the state
            that the step returned can be saved, and used on.
        """
        if any(isinstance(field, jax.core.Tracer) for field in self):
            msg = "check() reads from the device: call it outside of jit, on the verdict that the step returns"
            raise CallOrderError(msg)
        verdict: Verdict = jax.device_get(self)
        if np.any(verdict.desynced):
            # Of a scan, of vmap or of pmap there are several.
            lowest, highest = verdict.lowest[verdict.desynced], verdict.highest[verdict.desynced]
            differing = spread(lowest.min(axis=0).tolist(), highest.max(axis=0).tolist())
            what = "; ".join(differing) or f"settings: compare the policy (here {policy!r})"
            msg = (
                f"ranks hold different states: {what}. No rank took this step. Load one checkpoint on every rank, "
                f"and build the step with one policy everywhere"
            )
            raise ScaleDesyncError(msg)
        if np.any(verdict.at_min_scale):
            msg = (
                f"gradients are not finite although the scale has fallen to the minimum of {policy!r}: look for NaN in "
                f"the unscaled loss or the data, or lower min_scale"
            )
            raise ScaleUnderflowError(msg)
        if verdict.tally is not None:
            _report_stall(verdict.tally, params)


def _in_words(verdict: Verdict) -> str:
    nonfinite, desynced, _, highest, lowest, spike, _ = (np.asarray(field).tolist() for field in verdict)
    if desynced:
        return "; ".join(["skipped, ranks hold different states", *spread(lowest, highest)])
    bad = f"gradient arrays that are not finite: {nonfinite}" if nonfinite else "a spike"
    what = f"skipped, {bad}" if nonfinite or spike else "taken"
    return f"{what}, scale {validation.float32_from_bits(highest[0]):.9g}"


def with_tally(verdict: Verdict, before: jax.Array, limits: list[int]) -> Verdict:
    """Return a verdict with the tally of the step before it and this step.

    Its elements are how many steps in a row were skipped, for an overflow, for a spike; how many in all were made, and
    skipped for either; the first scale, the steps since it fell and the last one, as a SkipStreak has them, scales by
    their bits; and the two limits.
    """
    taken, reasons, scale = verdict.taken, [verdict.nonfinite != 0, verdict.spike], verdict.highest[0]
    happened = jnp.stack([jnp.logical_not(taken), *reasons, taken, *reasons]).astype(jnp.int32)
    lasting = jnp.where(taken, np.asarray([0, 0, 0, 1, 1, 1], np.int32), 1) * before[:6]
    counts = jnp.minimum(lasting, validation.LARGEST_INT32 - happened) + happened
    is_first, most = before[0] == 0, validation.LARGEST_INT32
    since_fall = jnp.where(is_first | (scale < before[8]), 0, jnp.minimum(before[7], most - 1) + 1)
    scales = jnp.stack([jnp.where(is_first, scale, before[6]), since_fall, scale])
    return verdict._replace(tally=jnp.concatenate([counts, scales, np.asarray(limits, np.int32)]))


def _report_stall(tally: jax.Array, params: object) -> None:
    """Warn of the longest of the rows in one or several tallies, or raise, if a limit says so."""
    length, overflow, spike, _, _, _, *scales, warn_after, give_up_after = max(tally.reshape(-1, 11).tolist())
    reasons = {name: count for name, count in (("overflow", overflow), ("spike", spike)) if count}
    first, last = map(validation.float32_from_bits, scales[::2])
    streak = SkipStreak(reasons, frozenset(), first, scales[1], last)
    if length >= give_up_after or (length >= warn_after and not streak.is_falling):
        strict = "skip= may be too strict for what is usual here, or value= is not finite" if spike else ""
        minimum = None if streak.never_scales else 1.0
        broken = _broken_weights(params, minimum) if overflow else ""
        raise_or_warn([streak.sentence("the optimizer"), broken, strict], gives_up=length >= give_up_after)


def _broken_weights(params: object, minimum: float | None) -> str:
    """Say that parameters hold inf or NaN, if they do; one host read. ``minimum``: None if nothing was scaled."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    weights = {name: x for name, x in leaves.items() if isinstance(x, jax.Array) and is_floating(x)}
    summaries = zip(weights, JaxBackend().read_summaries([*weights.values()])[0], strict=True)
    reports = [ParameterReport(name, kind="weight", **summary._asdict()) for name, summary in summaries]
    broken = sorted((report for report in reports if report.nonfinite), key=lambda report: report.badness)
    if not broken:
        return ""
    cause, explanation = cause_of_broken(broken, minimum)
    return f"Cause: {cause}. {explanation.rstrip('.')}"


def _bound(axis_name: Hashable | Sequence[Hashable]) -> tuple[Hashable, ...]:
    """Return the names of mapped axes; CallOrderError if one is not bound here, InvalidTypeError for no names."""
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or not all(isinstance(name, Hashable) and name is not None for name in names):
        raise validation.wrong_type(axis_name, "axis_name", "the name of a mapped axis, or a tuple of names")
    try:
        lax.axis_size(names)
    except NameError as error:
        msg = (
            f"axis_name {axis_name!r} is not bound here ({error}): call inside the function that jax.shard_map, "
            f"jax.vmap(axis_name=...) or jax.pmap maps over it, or leave axis_name out"
        )
        raise CallOrderError(msg) from error
    return names


def agree(
    nonfinite: jax.Array,
    state: ScaleState,
    policy: Policy,
    axis_name: Hashable | Sequence[Hashable] | None = None,
    *,
    spike: jax.Array | None = None,
    norm: jax.Array | None = None,
) -> Verdict:
    """Return one verdict for all ranks of named axes, and whether they hold one state; traceable, no host read.

    Parameters
    ----------
    nonfinite : array
        0-d int32: the count of this rank, as ``unscale`` returns it.
    state : ScaleState
        The state that this rank's loss was scaled with.
    policy : Policy
        The same on every rank. The compiler cannot raise its errors: ``verdict.check(policy)`` does, on the host.
    axis_name : str or tuple of str, optional
        Axes to agree over, as ``jax.shard_map``, ``jax.vmap(axis_name=)`` or a mesh names them, in one ``pmax`` of 21
        int32; CallOrderError if one is not bound, InvalidTypeError for anything but names. Default: none, the verdict
        of this rank alone; under plain jit the gradients of a mesh are whole arrays, and need no agreement.
    spike : array, optional
        0-d bool: whether this rank sees a spike, such as ``gradscale.SkipSpikes().judge(window, loss)`` returns, or
        InvalidTypeError. If ``verdict.spike``, take no step and leave ``state`` as it is.
    norm : array, optional
        0-d float32: the norm that each rank clips by, of gradients that all hold; if ranks' differ by more than a
        thousandth, ``verdict.desynced``.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax, jax.numpy as jnp
    >>> policy = gradscale.DynamicScale()
    >>> state = policy.init(jnp.zeros(()))
    >>> def finite(nonfinite):  # on each rank of the axis
    ...     return gradscale_jax.agree(nonfinite, state, policy, "data").finite
    >>> print(jax.vmap(finite, axis_name="data")(jnp.asarray([0, 1, 0])))
    [False False False]
    """
    validation.policy(policy)
    state = trees.as_state(state)
    if getattr(nonfinite, "dtype", None) != jnp.int32 or np.shape(nonfinite) != ():
        raise validation.wrong_type(nonfinite, "nonfinite", "a 0-d int32 array, such as unscale returns")
    words = claims.hash_of(claims.Claim(claims.Purpose.COMPILED, settings=claims.settings_hash(policy)))
    axes = None if axis_name is None else _bound(axis_name)
    code: jax.Array | int = 0
    if spike is not None:
        if not isinstance(spike, (bool, np.bool_, np.ndarray, jax.Array)) or np.shape(spike) != ():
            expected = "a 0-d bool, such as gradscale.SkipSpikes().judge(window, loss) returns"
            raise validation.wrong_type(spike, "spike", expected, ": of several values give jnp.any(spike)")
        code = jnp.where(spike, claims.reason_code(claims.Reason.SPIKE, 0) - (lax.axis_index(axes) if axes else 0), 0)
    backend = registry.backend_for(state.scale)
    flags = claims.Flags(nonfinite, code=code)
    message = claims.pack_arrays(backend, policy, state, words, flags, 0.0 if norm is None else norm)
    if axes:
        message = lax.pmax(message, axes)
    group_flags, (lowest, highest) = claims.flags_in(message), claims.bounds_in(message)
    is_bad = group_flags.nonfinite != 0
    desynced = jnp.any(highest != lowest) | (claims.norms_differ_in(message) & jnp.logical_not(is_bad))
    at_min_scale = jnp.logical_and(group_flags.limits != 0, is_bad)
    is_spike = jnp.logical_and(group_flags.code != 0, jnp.logical_not(jnp.logical_or(is_bad, desynced)))
    return Verdict(group_flags.nonfinite, desynced, at_min_scale, highest, lowest, is_spike)
