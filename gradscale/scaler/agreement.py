"""Agreement: with whom a scaler agrees; Ballot: one message to them, from its start until the CPU has the answer."""

from __future__ import annotations

import contextlib
import copy
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import NamedTuple

from gradscale.core import registry, vector
from gradscale.core.backend import Backend
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Collectives, Policy
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError, CallOrderError, CollectiveTimeoutError, GradscaleError, ScaleDesyncError
from gradscale.policies.spikes import SkipSpikes
from gradscale.scaler.parts import LiveState

__all__ = ["Agreement", "Ballot", "take_lists", "whereabouts"]


# How many scalers each group has had, by the library's own group.
_scalers: IdentityMap[int] = IdentityMap()
# The library's own groups over which the ranks have compared their versions.
_greeted: IdentityMap[bool] = IdentityMap()


def _is_weak(group: object) -> bool:
    """Tell whether a group may be noted down: another would be kept for ever, with memory of a device."""
    try:
        weakref.ref(group)
    except TypeError:
        return False
    return True


def _count_scaler(group: object) -> int:
    """Return how many scalers a library's own group has had before, and count one more."""
    if not _is_weak(group):
        return 0
    number = _scalers.by_id(id(group)) or 0
    _scalers.put(group, number + 1)
    return number


class Met(NamedTuple):
    """An optimizer as ranks compare it."""

    number: int
    """In the order in which the scaler meets them."""
    size: int
    """How many ``param_groups`` it has."""
    kind: int
    """A hash of its class, this number and its name."""


class Agreement:
    """With whom a scaler agrees, why it cannot go on, and the numbers by which ranks tell their messages apart.

    Parameters
    ----------
    groups : sequence of Collectives or None, default ()
        What to agree over, in turn; empty for a process that decides alone, None while it is not known.
    diagnoses : bool, default False
        Whether overflows are diagnosed, which takes more collectives; the same on every rank.
    skip : SkipSpikes, optional
        The rule that skips spikes; the same on every rank.
    own_rank : callable, optional
        Returns the rank of this process for reports, or None for the one that its groups give it.

    Attributes
    ----------
    failure : GradscaleError or None
        Why the ranks could not agree; the iteration can only be abandoned.
    steps : int
        How many steps the scaler has made over its groups.
    takes_lists : bool
        Whether all groups take lists of int as well as arrays.
    kinds : dict of int to str
        What the hashes of kinds of optimizers stand for, for errors.
    """

    def __init__(
        self,
        groups: Sequence[Collectives] | None = (),
        *,
        diagnoses: bool = False,
        skip: SkipSpikes | None = None,
        own_rank: Callable[[], int | None] | None = None,
    ) -> None:
        self._groups = groups
        self._diagnoses, self._skip = diagnoses, skip
        self._own_rank = own_rank
        self.failure: GradscaleError | None = None
        # Why the groups can no longer be used.
        self._lost: BackendError | CollectiveTimeoutError | None = None
        # This scaler's number in each of the library's own groups, which it has again if it joins one again.
        self._had: IdentityMap[int] = IdentityMap()
        self.kinds: dict[int, str] = {}
        self._names: IdentityMap[str] = IdentityMap()
        # As for all scalers, but of groups that cannot be referenced weakly.
        self._greeted: IdentityMap[bool] = IdentityMap()
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        """Reset what depends on the groups, as every rank does that joins one."""
        self._forget_counts()
        self.takes_lists = take_lists(self._groups or ())
        # By the collectives, the number of this scaler over the group.
        self._own_numbers: IdentityMap[int] = IdentityMap()
        self._policy: Policy | None = None
        self._identity = 0

    def _forget_counts(self) -> None:
        """Count steps and optimizers from 0 again."""
        self.steps = 0
        self._optimizers: IdentityMap[Met] = IdentityMap()
        # How many optimizers there were: a list, which copies share.
        self._count = [0]

    @property
    def groups(self) -> Sequence[Collectives]:
        """What is agreed over; empty for a process that decides alone. CallOrderError for a scaler without a group."""
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
        self._groups, self.failure, self._lost = groups, None, None
        self._begin_to_count()
        for collectives in groups:
            self.number_over(collectives)

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

    # Why the ranks cannot agree.

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keep the error that ends an agreement; another try could fail differently on each rank."""
        try:
            yield
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self.failure = error
            raise

    def break_off(self, error: BaseException, iteration: int) -> None:
        """Use the groups no more, since something like Ctrl-C has come between the messages that start an agreement."""
        lost = BackendError(
            f"{type(error).__name__} has interrupted the start of an agreement, {whereabouts(self.groups, iteration)}: "
            f"call set_group() with another group on every rank"
        )
        lost.__cause__ = error
        self._lost = self.failure = lost

    def lose(self, error: BackendError | CollectiveTimeoutError, iteration: int) -> None:
        """Use the groups no more."""
        if isinstance(error, CollectiveTimeoutError):
            error.iteration = iteration
        self._lost = error

    def recover(self) -> None:
        """Go on with a loaded state after ranks have differed; a group that was lost is not used again."""
        if self.failure is not None:
            # Every rank has failed, and they may have counted differently.
            self._forget_counts()
        self.failure = None

    def usable_groups(self) -> Sequence[Collectives]:
        """Return the groups to agree over; BackendError if one was lost."""
        if self._groups and self._lost is not None:
            msg = f"the group was lost before, and needs set_group() with another one on every rank: {self._lost}"
            raise BackendError(msg) from self._lost
        return self.groups

    def example(self, live: LiveState, number: int) -> Array | None:
        """Return an array for a rank that has none; None if it need not take part.

        Raises
        ------
        CallOrderError
            If it has to, and no library is known.
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

    # The contents of a message.

    def identify(self, policy: Policy) -> int:
        """Return the number that tells policies and rules apart, and whether the scaler diagnoses."""
        if self._policy is not policy:
            rule = 0 if self._skip is None else vector.identify(self._skip)
            self._identity = vector.identify(policy) ^ rule ^ self._diagnoses
            # Another kind may change in place.
            self._policy = policy if vector.is_fixed(policy) else None
        return self._identity

    def met(self, optimizer: object) -> Met:
        """Return what of an optimizer is compared with the other ranks'."""
        known = self._optimizers.by_id(id(optimizer))
        groups = getattr(optimizer, "param_groups", None)
        size = len(groups) if isinstance(groups, Sized) else 0
        if known is None or known.size != size:
            if known is None:
                number = self._count[0]
                self._count[0] += 1
            else:
                number = known.number
            name = self._names.by_id(id(optimizer))
            kind = type(optimizer).__qualname__ + (f" with {size} param_groups" if size else "")
            # With a name, ranks may hold other parts of a model, such as the stages of a pipeline.
            known = Met(number, size, zlib.crc32(ascii(name or kind).encode()) & 0x7FFFFFFF)
            self.kinds[known.kind] = kind if name is None else f"{kind}, named {name!r}"
            self._optimizers.put(optimizer, known)
        return known

    def name(self, optimizer: object, name: str) -> None:
        """Compare a name of an optimizer with the other ranks' instead of its class and number of ``param_groups``."""
        self._names.put(optimizer, name)
        known = self._optimizers.by_id(id(optimizer))
        if known is not None:
            self._optimizers.put(optimizer, known._replace(size=-1))

    def number_over(self, collectives: Collectives) -> int:
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

    def greet(self, collectives: Collectives, like: Array, number: int) -> None:
        """Compare versions over a group before the first message of any scaler over it; ``like`` is that message."""
        group = getattr(collectives, "identity", collectives)
        if group in _greeted or group in self._greeted:
            return
        own = vector.greeting()
        backend = None if isinstance(like, list) else registry.backend_for(like)
        finish = collectives.start_max(own if backend is None else backend.integers(own, like))
        agreed = finish()
        _wait_for_ranks(finish)
        vector.require_one_version(
            agreed if backend is None else backend.read(agreed), own, whereabouts([collectives], number)
        )
        (_greeted if _is_weak(group) else self._greeted).put(group, True)

    def __getstate__(self) -> dict[str, object]:
        """Return the state to pickle: without groups, which do not travel."""
        groups = () if self.is_alone else None
        fresh = Agreement(groups, diagnoses=self._diagnoses, skip=self._skip, own_rank=self._own_rank)
        return fresh.__dict__

    def __copy__(self) -> Agreement:
        # A copy in the same process talks to the same ranks.
        copied = Agreement(self._groups, diagnoses=self._diagnoses, skip=self._skip, own_rank=self._own_rank)
        copied._lost = self._lost
        # The same numbers, since some ranks may go on with a copy and others with the original.
        copied.steps, copied._optimizers, copied._count = self.steps, self._optimizers, self._count
        copied._names, copied.kinds = self._names, self.kinds
        copied._own_numbers, copied._had, copied._greeted = self._own_numbers, self._had, self._greeted
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Agreement:
        memo[id(self)] = copied = copy.copy(self)
        return copied


class Ballot:
    """One message over the groups of a list in turn, from its start until the CPU has the answer.

    Parameters
    ----------
    agreement : Agreement
        The scaler's; it keeps why the ranks could not agree.
    groups : sequence of Collectives
        In one order on every rank; of none, the answer is what was sent.
    sent : array or list of int
        What this rank sends.
    number : int
        Of the iteration, for errors.
    """

    def __init__(self, agreement: Agreement, groups: Sequence[Collectives], sent: Array, number: int) -> None:
        self._agreement, self._groups, self.sent, self._number = agreement, groups, sent, number
        self._shifts = vector.shifts([agreement.number_over(one) for one in groups]) if len(groups) > 1 else []
        # By the group, as far as they have come: what finishes the message, and the answer.
        self._begun: list[Callable[[], Array]] = []
        self._answers: list[Array] = []
        if groups:
            self._start(groups[0], sent)

    def _start(self, group: Collectives, sent: Array) -> None:
        agreement = self._agreement
        try:
            agreement.greet(group, sent, self._number)
            self._begun.append(group.start_max(sent))
        except (BackendError, CollectiveTimeoutError) as error:
            agreement.lose(error, self._number)
            raise
        except GradscaleError:
            raise
        except BaseException as error:
            agreement.break_off(error, self._number)
            raise

    def agreed(self, *, is_read: bool = False) -> Array:
        """Finish the message, at the first call, and return the MAX over all ranks: an array or a list, as sent.

        For a read, let the CPU wait for the ranks, as long as it can still give up.
        """
        answers = self._answers
        try:
            # After Ctrl-C this goes on where it was.
            while len(answers) < len(self._groups):
                if len(self._begun) == len(answers):
                    backend = None if isinstance(answers[-1], list) else registry.backend_for(answers[-1])
                    shifted = vector.shifted(backend, answers[-1], self._shifts[len(answers) - 1])
                    self._start(self._groups[len(answers)], shifted)
                answers.append(self._begun[-1]())
            agreed = answers[-1] if answers else self.sent
            if is_read and not isinstance(agreed, list):
                for finish in self._begun:
                    _wait_for_ranks(finish)
        except (BackendError, CollectiveTimeoutError) as error:
            self._agreement.lose(error, self._number)
            raise
        return agreed

    def read(self, backend_for: Callable[[Array], Backend]) -> tuple[list[int], list[int]]:
        """Return the answer and what this rank has sent: one host read, none of lists."""
        agreed = self.agreed(is_read=True)
        if isinstance(agreed, list):
            return agreed, self.sent
        return vector.read_both(backend_for(agreed), agreed, self.sent)

    def verdict(self, agreed: Sequence[int], sent: Sequence[int], policy: Policy) -> Verdict:
        """Return the verdict from an answer that was read; ScaleDesyncError if the ranks differ."""
        return vector.read_verdict(
            agreed,
            sent,
            policy,
            lambda: whereabouts(self._groups, self._number),
            sum(self._shifts),
            self._agreement.kinds,
        )


def _wait_for_ranks(finish: Callable[[], Array]) -> None:
    """Let the CPU wait for a message that a device waits for, if its group can: a read would wait for ever."""
    wait: Callable[[], None] | None = getattr(finish, "wait", None)
    if wait is not None:
        wait()


def take_lists(groups: Sequence[Collectives]) -> bool:
    """Tell whether groups take lists of int as well as arrays: all of them have a true attribute ``takes_lists``."""
    return all(getattr(collectives, "takes_lists", False) for collectives in groups)


def whereabouts(groups: Sequence[Collectives], number: int) -> str:
    """Say which process this is, and in which iteration, for error messages."""
    ranks = [f"rank {collectives.rank} of {collectives.size}" for collectives in groups]
    return f"{' / '.join(ranks) or 'this process'} in iteration {number}"
