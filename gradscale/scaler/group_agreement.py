"""GroupAgreement: one verdict for a group of processes, for a loop made of pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation, vector
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.vector import Purpose
from gradscale.errors import (
    BackendError,
    InvalidTypeError,
    ScaleUnderflowError,
)
from gradscale.scaler.agreement import Agreement, Ballot, whereabouts
from gradscale.scaler.scaler import DEFAULT_TIMEOUT

__all__ = ["GroupAgreement"]


class GroupAgreement:
    """Let the ranks of a group agree on a step of a loop made of pure functions.

    ::

        agree = gradscale.GroupAgreement(MPI.COMM_WORLD, policy)
        grads, nonfinite = gradscale.unscale(grads, state)
        nonfinite = agree(nonfinite, state)                  # the same on every rank
        params = gradscale.select(nonfinite == 0, new_params, params)
        state = policy.update(state, nonfinite=nonfinite)

    Parameters
    ----------
    group : communicator, Collectives, or list of these
        As for :class:`ShardedGradScaler`.
    policy : Policy
        The one that updates the state; the same on every rank.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks, ``math.inf`` for ever. Ignored by Collectives of your own.

    Raises
    ------
    InvalidTypeError
        For a group that no adapter serves.
    CollectiveTimeoutError
        When some rank does not construct its own.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> policy = gradscale.DynamicScale()
    >>> def train(group):  # one rank has found an inf or NaN
    ...     nonfinite = np.asarray(1 if group.rank == 0 else 0, np.int32)
    ...     return int(gradscale.GroupAgreement(group, policy)(nonfinite, policy.init(like=nonfinite)))
    >>> gradscale.testing.run_ranks(3, train)
    [1, 1, 1]
    """

    def __init__(self, group: object, policy: Policy, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        seconds = validation.timeout(timeout)
        self._policy: Policy = validation.policy(policy)
        self._groups: Sequence[Collectives] = registry.all_collectives_for(group, seconds)
        self._agreement = Agreement()
        self._agreement.identify(self._policy)
        self._agreement.join(self._groups)
        self._calls = 0

    def __call__(self, nonfinite: Array, state: ScaleState) -> Array:
        """Return the largest count of any rank; one collective for each group and one host read.

        Parameters
        ----------
        nonfinite : array
            0-d int32: this rank's count, as ``unscale`` returns it. Outside of compiled functions.
        state : ScaleState
            The state that this rank unscaled with; unchanged.

        Returns
        -------
        array
            0-d int32 of the same library and device; 0 where every rank is clean.

        Raises
        ------
        InvalidTypeError
            For a count that is no 0-d int32 array, or in a function that jax compiles.
        ScaleDesyncError
            On every rank, when the ranks come with different states, policies or numbers of calls.
        ScaleUnderflowError
            On every rank, when the policy says that an overflow at its minimum must be raised.
        CollectiveTimeoutError
            When some rank does not come; the group cannot be used any more.
        BackendError
            For failures of the group's library, and after one of the failures before.
        """
        agreement = self._agreement
        failure = agreement.failure
        if failure is not None:
            msg = f"the ranks could not agree before, so construct a new GroupAgreement on all of them: {failure}"
            raise BackendError(msg) from failure
        is_array = is_array_api_obj(nonfinite)
        if not is_array or nonfinite.shape != () or nonfinite.dtype != array_namespace(nonfinite).int32:
            msg = f"nonfinite must be a 0-d int32 array, such as unscale returns, got {nonfinite!r}"
            raise InvalidTypeError(msg)
        backend = registry.backend_for(state.scale)
        backend.refuse_tracing("GroupAgreement")
        xp = array_namespace(state.scale)
        scaler = agreement.number_over(self._groups[0])
        position = vector.position(self._calls, purpose=Purpose.GROUP_AGREEMENT, scaler=scaler)
        about = (agreement.identify(self._policy), *position)
        sent = vector.pack(backend, self._policy, state, nonfinite, about)
        with agreement.failing():
            ballot = Ballot(agreement, self._groups, sent, self._calls)
            verdict = ballot.verdict(*ballot.read(lambda _: backend), self._policy)
        self._calls += 1
        if verdict.nonfinite and verdict.at_min_scale:
            where = whereabouts(self._groups, self._calls - 1)
            msg = (
                f"gradients overflow although the scale is at its minimum, {verdict.scale!r}, seen by {where}: look "
                f"for inf or NaN in the unscaled loss, the data or the weights"
            )
            raise ScaleUnderflowError(msg)
        # Not by index, for which NumPy gives a scalar.
        return xp.reshape(ballot.agreed()[:1], ())
