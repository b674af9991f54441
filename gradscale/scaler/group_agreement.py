"""GroupAgreement: one verdict for a group of processes, for a loop of pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation
from gradscale.core.arithmetic import as_0d_array, library_name
from gradscale.core.ops import require_state
from gradscale.core.protocols import Array, ArrayT, Collectives, Group, Namespace, Policy, ScaleState
from gradscale.errors import BackendError, ScaleUnderflowError
from gradscale.scaler import claim as claims
from gradscale.scaler.agreement import Agreement, whereabouts
from gradscale.scaler.claim import Claim, Flags, Purpose, Reason


class GroupAgreement:
    """Let the ranks of a group agree on a step of a loop of pure functions.

    ::

        agree = gradscale.GroupAgreement(MPI.COMM_WORLD, policy)
        grads, nonfinite = gradscale.unscale(grads, state)
        nonfinite = agree(nonfinite, state)                  # the same on every rank
        params = gradscale.select(nonfinite == 0, new_params, params)
        state = policy.update(state, nonfinite=nonfinite)

    Parameters
    ----------
    group, timeout
        As for :class:`ShardedGradScaler`, with the same errors.
    policy : Policy
        The one that updates the state; the same on every rank.

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

    def __init__(self, group: Group, policy: Policy, *, timeout: float = 1800.0) -> None:
        seconds = validation.timeout(timeout)
        self._policy: Policy = validation.policy(policy)
        self._groups: Sequence[Collectives] = registry.all_collectives_for(group, seconds)
        self._agreement = Agreement()
        self._agreement.settings_hash(self._policy)
        self._agreement.join(self._groups)
        self._calls = 0

    @overload
    def __call__(self, nonfinite: Array, state: ScaleState[ArrayT], spike: None = None) -> ArrayT: ...

    @overload
    def __call__(self, nonfinite: Array, state: ScaleState[ArrayT], spike: Array) -> tuple[ArrayT, ArrayT]: ...

    def __call__(self, nonfinite: Array, state: ScaleState, spike: Array | None = None) -> Array | tuple[Array, Array]:
        """Return the largest count of any rank; one collective for each group and one host read.

        Parameters
        ----------
        nonfinite : array
            0-d int32: this rank's count, as ``unscale`` returns it.
        state : ScaleState
            The state that this rank unscaled with; unchanged.
        spike : array, optional
            0-d bool: whether this rank sees a spike, as ``gradscale.SkipSpikes().judge`` returns it. Give it on every
            rank or on none.

        Returns
        -------
        nonfinite : array
            0-d int32 of the same library and device; 0 where every rank is clean.
        spike : array
            If it was given: 0-d bool, whether any rank sees a spike and none an overflow. Skip the step, leave the
            state as it is, and give it to ``learn`` as ``skipped=``.

        Raises
        ------
        InvalidTypeError
            For another count or spike, and in a function that jax compiles.
        ScaleDesyncError, ScaleUnderflowError
            On every rank: when the ranks come with different states, policies or numbers of calls, or some with a spike
            and some without; when the policy says that an overflow at its minimum must be raised.
        CollectiveTimeoutError
            When some rank does not come; the group cannot be used any more.
        BackendError
            For failures of the group's library, and after one of the failures before.
        """
        agreement = self._agreement
        failure = agreement.standing.failure
        if failure is not None:
            msg = f"the ranks could not agree before, so construct a new GroupAgreement on all of them: {failure}"
            raise BackendError(msg) from failure
        require_state(state)
        xp = array_namespace(state.scale)
        _require_0d("nonfinite", nonfinite, xp, "int32", "unscale")
        if spike is not None:
            _require_0d("spike", spike, xp, "bool", "SkipSpikes.judge")
        backend = registry.backend_for(state.scale)
        if backend.forbid_tracing is not None:
            backend.forbid_tracing("GroupAgreement")
        # Ranks of which some skip spikes would train on apart.
        call = Purpose.GROUP_AGREEMENT if spike is None else Purpose.GROUP_AGREEMENT_ON_SPIKES
        scaler, settings = agreement.number_over(self._groups[0]), agreement.settings_hash(self._policy)
        claim = Claim(call, self._calls, scaler=scaler, settings=settings)
        code: Array | int = 0
        if spike is not None:
            # No product with a Python number: NumPy 1 would make it int64.
            number = xp.full_like(spike, claims.reason_code(Reason.SPIKE, agreement.rank()), dtype=xp.int32)
            code = as_0d_array(xp, xp.where(spike, number, xp.zeros_like(number)))
        sent = claims.pack_arrays(backend, self._policy, state, claims.hash_of(claim), Flags(nonfinite, code=code))
        ballot, _, verdict = agreement.ask(self._groups, sent, claim, backend, self._policy)
        self._calls += 1
        if verdict.nonfinite and verdict.at_min_scale:
            where = whereabouts(self._groups, self._calls - 1)
            msg = (
                f"gradients overflow although the scale is at its minimum, {verdict.scale!r}, seen by {where}: look "
                f"for inf or NaN in the unscaled loss, the data or the weights"
            )
            raise ScaleUnderflowError(msg)
        agreed = claims.flags_in(ballot.agreed()).nonfinite
        if spike is None:
            return agreed
        return agreed, xp.full_like(agreed, verdict.reason is Reason.SPIKE, dtype=spike.dtype)


def _require_0d(name: str, x: Array, xp: Namespace, dtype: str, source: str) -> None:
    is_one = is_array_api_obj(x) and array_namespace(x) is xp and x.shape == ()
    # A kind of the standard: a library may call the dtype itself otherwise.
    if not is_one or not xp.isdtype(x.dtype, dtype if dtype == "bool" else getattr(xp, dtype)):
        kind = f"{dtype} array of the state's library, {library_name(xp)}"
        raise validation.wrong_type(x, name, f"a 0-d {kind}, such as {source} returns")
