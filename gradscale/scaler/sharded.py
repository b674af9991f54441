"""ShardedGradScaler: GradScaler whose verdict is agreed over a group of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradscale.core import registry, validation
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, Policy
from gradscale.errors import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    GradscaleError,
)
from gradscale.scaler.iteration import Iteration, Progress
from gradscale.scaler.reporting import HISTORY_SIZE, Diagnose, OnSkip, OnUpdate
from gradscale.scaler.scaler import GradScaler

__all__ = ["ShardedGradScaler"]

DEFAULT_TIMEOUT = 1800.0


class ShardedGradScaler(GradScaler):
    """A GradScaler whose ranks skip together, back off together, and notice when they differ.

    For gradients that the ranks hold parts of: sharded weights or optimizer states, tensor, pipeline and expert
    parallelism. One collective of 64 bytes for each optimizer, iteration and group, on every rank, whatever it found
    and even when it holds no gradients. It carries a fingerprint of the state, so that a rank whose scale has drifted
    is an error on every rank instead of a silent divergence.

    Parameters
    ----------
    group : communicator, Collectives, or list of these
        What to agree over: an MPI communicator (duplicated, which is collective over it), an object with ``rank``,
        ``size`` and ``start_max``, or a list of them (data, tensor, pipeline, expert), agreed over in turn.
    timeout : float, default 1800.0
        Seconds to wait for the other ranks, ``math.inf`` for ever. Ignored by Collectives of your own.
    init_scale, growth_factor, backoff_factor, growth_interval, policy, enabled, backend, diagnose
        As in :class:`GradScaler`; the same on every rank. ``backend`` lets a rank that never has an array take part.
    on_skip, on_update, history_size
        As in :class:`GradScaler`. Rank 0 is the one that is rank 0 of every group.

    Raises
    ------
    InvalidTypeError
        For a group that no adapter serves.
    BackendNotAvailableError
        When the adapter for the group is not installed.
    CollectiveTimeoutError
        When some rank does not construct its scaler.

    Notes
    -----
    Construct it on every rank, and call ``unscale_``, ``step`` and ``update`` for the same optimizers in the same order
    on every rank. A disabled scaler makes no collectives.
    """

    def __init__(
        self,
        *,
        group: Any,
        timeout: float = DEFAULT_TIMEOUT,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        policy: Policy | None = None,
        enabled: bool = True,
        backend: str | Backend | None = None,
        on_skip: OnSkip | None = None,
        on_update: OnUpdate | None = None,
        diagnose: Diagnose | None = None,
        history_size: int = HISTORY_SIZE,
    ) -> None:
        super().__init__(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            policy=policy,
            enabled=enabled,
            backend=backend,
            on_skip=on_skip,
            on_update=on_update,
            diagnose=diagnose,
            history_size=history_size,
        )
        self._timeout = validation.timeout(timeout)
        self._groups: Sequence[Collectives] | None = None
        # Why the group can no longer be used.
        self._lost: GradscaleError | None = None
        self.set_group(group)

    def set_group(self, group: Any) -> None:
        """Agree over another group from now on; needed after unpickling, since communicators do not travel.

        Parameters
        ----------
        group : communicator, Collectives, or list of these
            As for the constructor. Collective over it.

        Raises
        ------
        CallOrderError
            In the middle of an iteration, unless its agreement has failed: it is then abandoned.
        """
        self._iteration.require_boundary("set_group()")
        if not self._enabled:
            return
        if self._iteration.failure is not None:
            self._iteration = Iteration(self._iteration.number)
        self._groups = registry.all_collectives_for(group, self._timeout)
        self._lost = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; the group is not, see ``set_group``."""
        return super().__getstate__() | {"_groups": None, "_lost": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGradScaler:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(self.__getstate__())
        # A copy in the same process talks to the same ranks.
        copied._groups, copied._lost = self._groups, self._lost
        return copied

    def _start(self, progress: Progress) -> Callable[[], Array]:
        """Begin the agreement over the first group; over the others it is made in turn when it is finished."""
        progress.groups = progress.groups or self._require_groups()
        first, *others = progress.groups
        pending = first.start_max(progress.sent)

        def finish() -> Array:
            try:
                agreed = pending()
                for collectives in others:
                    agreed = collectives.start_max(agreed)()
            except CollectiveTimeoutError as error:
                error.iteration = self._iteration.number
                self._lost = error
                raise
            except BackendError as error:
                self._lost = error
                raise
            return agreed

        return finish

    def _require_groups(self) -> Sequence[Collectives]:
        if self._groups is None:
            msg = "this scaler was unpickled and has no group yet: call set_group(group) on every rank first"
            raise CallOrderError(msg)
        return self._groups

    def _require_group(self) -> None:
        self._require_groups()
        if self._lost is not None:
            msg = f"the group was lost before, and needs set_group() with another one on every rank: {self._lost}"
            raise BackendError(msg) from self._lost

    def _whereabouts(self, progress: Progress) -> str:
        groups = progress.groups or self._require_groups()
        ranks = [f"rank {collectives.rank} of {collectives.size}" for collectives in groups]
        return f"{' / '.join(ranks)} in iteration {self._iteration.number}"

    def _rank(self) -> int:
        # Groups that are the axes of a grid of ranks give each rank a number of its own.
        rank = 0
        for collectives in reversed(self._groups or ()):
            rank = rank * collectives.size + collectives.rank
        return rank

    def _groups_for_gathering(self, optimizer: Any, progress: Progress | None) -> Sequence[Collectives]:  # noqa: ARG002
        self._require_group()
        return (progress.groups if progress is not None else ()) or self._require_groups()

    def _maximum(self, collectives: Collectives, values: list[int], like: Array) -> list[int]:
        try:
            return super()._maximum(collectives, values, like)
        except (BackendError, CollectiveTimeoutError) as error:
            if isinstance(error, CollectiveTimeoutError):
                error.iteration = self._iteration.number
            self._lost = self._iteration.failure = error
            raise

    def _may_unscale_unscaled(self) -> bool:
        # A pipeline's inner stages get gradients that the last stage has scaled.
        return True

    def _like_nothing(self) -> Array | None:
        if self._backend is not None:
            backend = registry.array_backend(self._backend) if isinstance(self._backend, str) else self._backend
            return backend.example()
        example: Callable[[], Array] | None = getattr(self._require_groups()[0], "example", None)
        if example is not None:
            return example()
        msg = (
            f"{self._whereabouts(Progress())} has seen no array yet, so it is not known in which library it takes "
            f'part: pass backend= (such as backend="numpy") to a scaler whose rank may hold no gradients'
        )
        raise CallOrderError(msg)
