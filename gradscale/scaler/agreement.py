"""Agreement: one verdict for a group of processes, of a scaler's steps or of a loop made of pure functions."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, validation, vector
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Collectives, Policy, ScaleState
from gradscale.core.validation import float32_from_bits
from gradscale.core.vector import AgreementVector, Position, Purpose, Verdict
from gradscale.errors import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    GradscaleError,
    InvalidTypeError,
    ScaleDesyncError,
    ScaleUnderflowError,
)
from gradscale.scaler.frame import Frame
from gradscale.scaler.live_state import ArrayState
from gradscale.scaler.options import DEFAULT_TIMEOUT
from gradscale.scaler.parts import LiveState, Pending

__all__ = ["Agreement", "Exchange", "GroupAgreement", "PendingVerdict", "Subject", "take_lists", "whereabouts"]


class Subject(NamedTuple):
    """Whose message it is, beside the scaler.

    Attributes
    ----------
    optimizer : int
        Number of the optimizer, in the order in which the scaler has met them in messages.
    max_norm : float or None
        What its gradients are clipped to.
    """

    optimizer: int = 0
    max_norm: float | None = None


_NOBODY = Subject()
# Optimizers of which that is kept.
_KEPT = 64


class _Numbers:
    """Numbers for objects in the order in which they come. Copies of a scaler go on with the same ones."""

    def __init__(self) -> None:
        self._known: IdentityMap[int] = IdentityMap()
        self._next = 0

    def of(self, key: Any) -> int:
        number = self._known.by_id(id(key))
        if number is None:
            number = self._next
            self._known.put(key, number)
            self._next += 1
        return number


# How many scalers each group has had, by the library's own group.
_scalers: IdentityMap[int] = IdentityMap()


def _count_scaler(group: Any) -> int:
    """Return how many scalers a library's own group has had before, and count one more."""
    try:
        weakref.ref(group)
    except TypeError:
        # It would be kept for ever, and a communicator holds memory of a device.
        return 0
    number = _scalers.by_id(id(group)) or 0
    _scalers.put(group, number + 1)
    return number


class Agreement:
    """How the ranks of a scaler agree: one message for each optimizer, iteration and group, or none at all.

    Parameters
    ----------
    groups : sequence of Collectives or None, default ()
        What to agree over, in turn; empty for a process that decides alone, None while it is not known.
    diagnoses : bool, default False
        Whether the scaler makes more collectives after an overflow, which has to be the same on every rank.
    pending : callable, default PendingVerdict
        Begins an agreement; called with this object and the arguments of ``start``.
    own_rank : callable, optional
        Returns the rank of this process for reports, or None for the one that its groups give it.

    Attributes
    ----------
    vector : AgreementVector
        Makes what is sent.
    steps : int
        How many steps the scaler has made over its groups.
    """

    def __init__(
        self,
        groups: Sequence[Collectives] | None = (),
        *,
        diagnoses: bool = False,
        pending: Callable[..., Pending] | None = None,
        own_rank: Callable[[], int | None] | None = None,
    ) -> None:
        self._groups = groups
        self._diagnoses = diagnoses
        self._pending: Callable[..., Pending] = PendingVerdict if pending is None else pending
        self._own_rank = own_rank
        # Why the groups can no longer be used.
        self._lost: GradscaleError | None = None
        self.vector = AgreementVector(diagnoses=diagnoses)
        # By the library's own group, the number of this scaler, which it has again when it joins that group again.
        self._had: IdentityMap[int] = IdentityMap()
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        """Begin with the numbers that all ranks begin with, which join one group."""
        self.steps = 0
        self._optimizers = _Numbers()
        # By the collectives, the number of this scaler over the group.
        self._own_numbers: IdentityMap[int] = IdentityMap()
        # What the messages of an optimizer have in common.
        self._first_positions: dict[tuple[Subject, int], Position] = {}
        self._last_subject = _NOBODY

    @property
    def groups(self) -> Sequence[Collectives]:
        """What is agreed over; empty for a process that decides alone.

        Raises
        ------
        CallOrderError
            After unpickling, before there is a group.
        """
        if self._groups is None:
            msg = "this scaler was unpickled and has no group yet: call set_group(group) on every rank first"
            raise CallOrderError(msg)
        return self._groups

    @property
    def is_alone(self) -> bool:
        """Whether this process decides alone."""
        return self._groups is not None and len(self._groups) == 0

    @property
    def is_unjoined(self) -> bool:
        """Whether it is not known what to agree over."""
        return self._groups is None

    def join(self, groups: Sequence[Collectives]) -> None:
        """Agree over other groups from now on, as one more scaler over them, or as before over a group that it had."""
        self._groups = groups
        self._lost = None
        self._begin_to_count()
        for collectives in groups:
            self._number_over(collectives)

    def leave(self) -> None:
        """Agree over nothing until there is a group, which is an error to do without."""
        self._groups = None

    def rank(self) -> int:
        """Return this process's rank, for reports and callbacks; 0 on exactly one rank of a grid of groups."""
        rank = None if self._own_rank is None else self._own_rank()
        if rank is not None:
            return rank
        rank = 0
        # Groups that are the axes of a grid of ranks give each rank a number of its own.
        for collectives in reversed(self._groups or ()):
            rank = rank * collectives.size + collectives.rank
        return rank

    def usable_groups(self) -> Sequence[Collectives]:
        """Return what is agreed over; raise while there is nobody to agree with, before any gradient is touched.

        Raises
        ------
        CallOrderError
            After unpickling, before there is a group.
        BackendError
            When the group was lost.
        """
        if self._groups is None:
            return self.groups
        if self._groups and self._lost is not None:
            msg = f"the group was lost before, and needs set_group() with another one on every rank: {self._lost}"
            raise BackendError(msg) from self._lost
        return self._groups

    def example(self, live: LiveState, number: int) -> Array | None:
        """Return an array for a rank that has none; None where it need not take part.

        Raises
        ------
        CallOrderError
            When it has to, and no library is known.
        """
        if self.is_alone:
            return None
        found = live.example()
        if found is not None:
            return found
        example: Callable[[], Array] | None = getattr(self.groups[0], "example", None)
        if example is not None:
            return example()
        msg = (
            f"{whereabouts(self.groups, number)} has seen no array yet, so it is not known in which library it takes "
            f'part: pass backend= (such as backend="numpy") to a scaler whose rank may hold no gradients'
        )
        raise CallOrderError(msg)

    def subject(self, optimizer: Any, max_norm: float | None = None) -> Subject:
        """Return whose message is to be sent: an optimizer is numbered when it is first asked for."""
        number = self._optimizers.of(optimizer)
        if (number, max_norm) != self._last_subject:
            self._last_subject = Subject(number, max_norm)
        return self._last_subject

    def position(self, frame: Frame, groups: Sequence[Collectives], subject: Subject) -> Position:
        """Return what the next message of a step is about, which counts in its iteration."""
        iteration, call = frame.next_position()
        key = subject, self._number_over(groups[0])
        first = self._first_positions.get(key)
        if first is None:
            if len(self._first_positions) >= _KEPT:
                self._first_positions = {}
            (optimizer, max_norm), scaler = key
            first = vector.position(0, optimizer=optimizer, scaler=scaler, max_norm=max_norm)
            self._first_positions[key] = first
        return vector.next_position(first, iteration, call, self.steps)

    def position_of_call(self, number: int, groups: Sequence[Collectives]) -> Position:
        """Return what the message of a GroupAgreement is about."""
        return vector.position(number, purpose=Purpose.GROUP_AGREEMENT, scaler=self._number_over(groups[0]))

    def _number_over(self, collectives: Collectives) -> int:
        """Return the number of this scaler over a group, counted when it joins the group or first sends over it."""
        number = self._own_numbers.by_id(id(collectives))
        if number is None:
            group = getattr(collectives, "identity", collectives)
            number = self._had.by_id(id(group))
            if number is None:
                number = _count_scaler(group)
                self._had.put(group, number)
            self._own_numbers.put(collectives, number)
        return number

    def _shifts(self, groups: Sequence[Collectives]) -> list[int]:
        """Return what is added to a message's place from each group of a list to the next."""
        places = [vector.place(self._number_over(one), index) for index, one in enumerate(groups)]
        return [after - before for before, after in itertools.pairwise(places)]

    def moved(self, groups: Sequence[Collectives]) -> int:
        """Return by how much a message's place is greater after all groups than it was."""
        return sum(self._shifts(groups)) if len(groups) > 1 else 0

    def start(
        self,
        found: Any,
        live: LiveState,
        state: ScaleState,
        frame: Frame,
        groups: Sequence[Collectives],
        subject: Subject = _NOBODY,
    ) -> Pending:
        """Begin the agreement on what this rank has found in an optimizer's gradients.

        Parameters
        ----------
        found : Found
            By the scaler's unscaler.
        live : LiveState
            The scaler's.
        state : ScaleState
            What the gradients were unscaled with.
        frame : Frame
            Of the iteration.
        groups : sequence of Collectives
            What to agree over; empty for a process that decides alone.
        subject : Subject, optional
            Whose gradients they are.
        """
        return self._pending(self, found, live, state, frame, groups, subject)

    def reduce(self, groups: Sequence[Collectives], sent: Any, number: int) -> Callable[[], Any]:
        """Begin a MAX over the first group, and return what finishes it, and then those over the others.

        Parameters
        ----------
        groups : sequence of Collectives
            In one order on every rank.
        sent : array or list of int
            What this rank sends.
        number : int
            Of the iteration, for the error.
        """
        if not groups:
            return lambda: sent
        pending = groups[0].start_max(sent)
        shifts = self._shifts(groups) if len(groups) > 1 else ()

        def finish() -> Any:
            try:
                agreed = pending()
                for index, by in enumerate(shifts, start=1):
                    backend = None if isinstance(agreed, list) else registry.backend_for(agreed)
                    agreed = groups[index].start_max(self.vector.shifted(backend, agreed, by))()
            except (BackendError, CollectiveTimeoutError) as error:
                self._lose(error, number)
                raise
            return agreed

        return finish

    def maximum(
        self, collectives: Collectives, values: list[int], like: Array, live: LiveState, number: int
    ) -> list[int]:
        """Return the element-wise MAX of a few integers over a group, in the library of ``like``. One host read."""
        try:
            if take_lists([collectives]):
                agreed: list[int] = collectives.start_max(values)()
                return agreed
            backend = live.backend_for(like)
            return backend.read(collectives.start_max(backend.integers(values, like))())
        except (BackendError, CollectiveTimeoutError) as error:
            self._lose(error, number)
            raise

    def announce(
        self,
        collectives: Collectives,
        index: int,
        purpose: Purpose,
        subject: Subject,
        live: LiveState,
        frame: Frame,
        like: Array,
    ) -> None:
        """Tell the ranks of a group which collective comes next, by a message that is as long as every other.

        Whatever another rank sends in its place is then seen on every rank, before messages of different lengths meet.
        One collective and one host read.

        Raises
        ------
        ScaleDesyncError
            When the ranks have come to the group by different calls, or for different optimizers.
        """
        iteration, call = frame.next_position()
        scaler = self._number_over(collectives)
        position = vector.position(
            iteration, call, purpose=purpose, optimizer=subject.optimizer, scaler=scaler, max_norm=subject.max_norm
        )
        sent = vector.announcement(vector.at_group(position, index))
        agreed = self.maximum(collectives, sent, like, live, iteration)
        vector.read_verdict(agreed, sent, live.policy, lambda: whereabouts([collectives], iteration))

    def _lose(self, error: BackendError | CollectiveTimeoutError, number: int) -> None:
        if isinstance(error, CollectiveTimeoutError):
            error.iteration = number
        self._lost = error

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: without groups, which do not travel."""
        fresh = Agreement(() if self.is_alone else None, diagnoses=self._diagnoses)
        kept = {"_pending": self._pending, "_own_rank": self._own_rank}
        return self.__dict__ | fresh.__dict__ | kept

    def __copy__(self) -> Agreement:
        # A copy in the same process talks to the same ranks.
        copied = Agreement(self._groups, diagnoses=self._diagnoses, pending=self._pending, own_rank=self._own_rank)
        copied._lost = self._lost
        # Nothing tells it from this one, which it may take the place of on some ranks.
        copied.steps, copied._optimizers = self.steps, self._optimizers
        copied._own_numbers, copied._had = self._own_numbers, self._had
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Agreement:
        memo[id(self)] = copied = copy.copy(self)
        return copied


class PendingVerdict:
    """The verdict on one optimizer's gradients, from the start of the agreement until the host has read it.

    Parameters
    ----------
    agreement, found, live, state, frame, groups, subject
        As for :meth:`Agreement.start`.
    """

    is_begun = True
    is_read_later = is_scaled = is_captured = False
    known: Verdict | None = None
    numbers: ScaleState | None = None
    # Whether the count is one that the host knows.
    _is_plain = True

    def __init__(
        self,
        agreement: Agreement,
        found: Any,
        live: ArrayState,
        state: ScaleState,
        frame: Frame,
        groups: Sequence[Collectives],
        subject: Subject = _NOBODY,
    ) -> None:
        self.groups, self.version = groups, live.version
        count = found.nonfinite
        if isinstance(count, int) and not groups:
            self.known = vector.verdict((count, count, live.at_min_scale(state) is True, state.scale))
            return
        self._live, self._state, self._number = live, state, frame.number
        self._agreed: Any = None
        if isinstance(count, int):
            at_min_scale = live.at_min_scale(state) is True
            position = agreement.position(frame, groups, subject)
            self._sent = agreement.vector.pack_plain(live.policy, state, count, position, at_min_scale=at_min_scale)
            if not take_lists(groups):
                self._sent = live.home.asarray(self._sent, dtype=live.home.int32)
        else:
            self._is_plain = False
            # A process alone has nobody to tell what it is about.
            position = agreement.position(frame, groups, subject) if groups else vector.position(frame.number)
            self._sent = agreement.vector.pack(live.backend, live.policy, state, count, position)
        self._moved = agreement.moved(groups)
        self._finish = agreement.reduce(groups, self._sent, frame.number)

    def verdict(self) -> Verdict:
        """Finish the agreement and read its verdict: the one host read of a step."""
        if self.known is None:
            self._agreed = self._finish()
            if isinstance(self._agreed, list):
                agreed, sent = self._agreed, self._sent
            else:
                agreed, sent = vector.read_both(self._live.backend_for(self._agreed), self._agreed, self._sent)
            if not self.groups:
                # Nobody else has had a hand in it: what cannot be is the library's.
                self._live.checked(agreed[2:6])
            if not self._is_plain:
                self.numbers = ScaleState(float32_from_bits(sent[2]), *sent[3:6])
                if hasattr(self._agreed, "compute"):
                    # A lazy library would compute all that it depends on once more in the update.
                    xp = array_namespace(self._agreed)
                    self._agreed = xp.asarray(agreed, dtype=xp.int32)
                    self._live.settle(self._state, agreed[2:6])
            self.known = vector.read_verdict(
                agreed, sent, self._live.policy, lambda: whereabouts(self.groups, self._number), self._moved
            )
        return self.known

    def count(self) -> Array | int:
        """Return the agreed count, 0-d int32, or an int for a state of numbers. No host read."""
        known = self.known
        return known.nonfinite if self._is_plain and known is not None else self._agreed[0]

    def has_arrived(self) -> bool:
        """Return True: the step has read it."""
        return True


class Exchange:
    """A MAX of a few integers over one group, for the norms and diagnoses of one iteration.

    Parameters
    ----------
    collectives : Collectives
        The group.
    agreement, live, frame
        Of the scaler, whose iteration a failure ends.
    purpose : Purpose
        What it is for.
    optimizer : object
        Whose norm or diagnosis.
    max_norm : float, optional
        What is clipped to.
    index : int, default 0
        Position of the group in the list.
    """

    def __init__(
        self,
        collectives: Collectives,
        agreement: Agreement,
        live: LiveState,
        frame: Frame,
        purpose: Purpose,
        optimizer: Any,
        *,
        max_norm: float | None = None,
        index: int = 0,
    ) -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self._collectives, self._agreement, self._live, self._frame = collectives, agreement, live, frame
        self._purpose, self._optimizer, self._max_norm, self._index = purpose, optimizer, max_norm, index
        self._is_announced = False

    def announce(self, like: Array) -> None:
        """Tell the other ranks what comes, and find out that they come to it as well. One collective, one host read.

        Raises
        ------
        ScaleDesyncError
            On every rank, when another one comes to the group by another call.
        """
        subject = self._agreement.subject(self._optimizer, self._max_norm)
        with self._ending_the_iteration():
            self._agreement.announce(
                self._collectives, self._index, self._purpose, subject, self._live, self._frame, like
            )
        self._is_announced = True

    def maximum(self, values: list[int], like: Array) -> list[int]:
        """Return the element-wise MAX over the group, in the library and on the device of ``like``. One host read.

        The first one is announced, by one collective and one host read more.
        """
        if not self._is_announced:
            self.announce(like)
        with self._ending_the_iteration():
            return self._agreement.maximum(self._collectives, values, like, self._live, self._frame.number)

    @contextlib.contextmanager
    def _ending_the_iteration(self) -> Iterator[None]:
        try:
            yield
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self._frame.failure = error
            raise


def take_lists(groups: Sequence[Collectives]) -> bool:
    """Tell whether groups take lists of int beside arrays: all of them have a true attribute ``takes_lists``."""
    return all(getattr(collectives, "takes_lists", False) for collectives in groups)


def whereabouts(groups: Sequence[Collectives], number: int) -> str:
    """Say which process this is, and in which iteration, for error messages."""
    ranks = [f"rank {collectives.rank} of {collectives.size}" for collectives in groups]
    return f"{' / '.join(ranks) or 'this process'} in iteration {number}"


class GroupAgreement:
    """Let the ranks of a group agree on a step, where no scaler is used.

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

    def __init__(self, group: Any, policy: Policy, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        seconds = validation.timeout(timeout)
        self._policy: Policy = validation.policy(policy)
        self._groups: Sequence[Collectives] = registry.all_collectives_for(group, seconds)
        vector.identify(self._policy)
        self._agreement = Agreement()
        self._agreement.join(self._groups)
        self._calls = 0
        # Why the ranks can no longer agree.
        self._failure: GradscaleError | None = None

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
        if self._failure is not None:
            msg = f"the ranks could not agree before, so construct a new GroupAgreement on all of them: {self._failure}"
            raise BackendError(msg) from self._failure
        if not is_array_api_obj(nonfinite) or nonfinite.shape != () or "int32" not in str(nonfinite.dtype):
            msg = f"nonfinite must be a 0-d int32 array, such as unscale returns, got {nonfinite!r}"
            raise InvalidTypeError(msg)
        backend = registry.backend_for(state.scale)
        backend.refuse_tracing("GroupAgreement")
        xp = array_namespace(state.scale)
        agreement = self._agreement
        position = agreement.position_of_call(self._calls, self._groups)
        sent = agreement.vector.pack(backend, self._policy, state, nonfinite, position)
        try:
            agreed = agreement.reduce(self._groups, sent, self._calls)()
            received, own = vector.read_both(backend, agreed, sent)
            moved = agreement.moved(self._groups)
            verdict = vector.read_verdict(received, own, self._policy, self._where, moved)
        except (CollectiveTimeoutError, BackendError, ScaleDesyncError) as error:
            self._failure = error
            raise
        self._calls += 1
        if verdict.nonfinite and verdict.at_min_scale:
            msg = (
                f"gradients overflow although the scale is at its minimum, {verdict.scale!r}, seen by "
                f"{self._where()}: look for inf or NaN in the unscaled loss, the data or the weights"
            )
            raise ScaleUnderflowError(msg)
        # Not by index, for which NumPy gives a scalar.
        return xp.reshape(agreed[:1], ())

    def _where(self) -> str:
        return whereabouts(self._groups, self._calls)
