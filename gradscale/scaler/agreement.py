"""Agreement: with whom a scaler agrees; Ballot: one message, until the CPU has the answer."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import NamedTuple

from array_api_compat import array_namespace

from gradscale.core import registry, validation
from gradscale.core.backend import Backend
from gradscale.core.identity import IdentityMap
from gradscale.core.protocols import Array, Collectives, Policy
from gradscale.errors import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    GradscaleError,
    ScaleDesyncError,
    short_repr,
)
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import Claim, Outcome, Verdict
from gradscale.scaler.differences import difference, joined
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.scale import CurrentScale
from gradscale.waiting import call_within

OF_ALL_RANKS = BackendError, CollectiveTimeoutError, ScaleDesyncError
"""The errors that end an agreement: what ranks differ in, on all of them, and what one has waited for in vain."""


# Seconds in which the other ranks answer a rank that sends its claim.
_PATIENCE = 5.0


class _Common:
    """What all scalers over one group must number alike: how many there were, how often ranks differed."""

    scalers = 0
    """How many the group has had."""
    differences = 0
    """In how many messages its ranks have differed, whichever scaler or GroupAgreement sent them here."""
    is_greeted = False
    """Whether the ranks have compared their versions."""

    def __init__(self) -> None:
        self.queue: list[Ballot] = []
        """The messages that have still to start over the group, in the order in which they were sent."""


# By the library's own group.
_commons: IdentityMap[_Common] = IdentityMap()


def _is_weak(group: object) -> bool:
    """Tell whether a group may be noted down: another would be kept for ever, with memory of a device."""
    with contextlib.suppress(TypeError):
        weakref.ref(group)
        return True
    return False


class OptimizerLabel(NamedTuple):
    """An optimizer as ranks compare it."""

    number: int
    """In the order in which the scaler meets them."""
    size: int
    """How many ``param_groups`` it has."""
    kind: str
    """Its class and this number, or its name."""


class Standing(NamedTuple):
    """With whom a scaler agrees, and why it cannot. It is replaced at once: Ctrl-C leaves no half of another."""

    groups: Sequence[Collectives] | None = ()
    """The groups to agree over: none for a process that decides alone, and None before a scaler has joined any."""
    failure: GradscaleError | None = None
    """Why the iteration can only be abandoned."""
    lost: BackendError | CollectiveTimeoutError | None = None
    """Why the groups can be used no more."""


class Agreement:
    """With whom a scaler agrees, and the numbers by which ranks tell their messages apart.

    ``options`` are those of the scaler that must be the same on all ranks.
    """

    def __init__(
        self,
        groups: Sequence[Collectives] | None = (),
        options: Mapping[str, object] | None = None,
        own_rank: Callable[[], int | None] | None = None,
    ) -> None:
        self.standing = Standing(groups)
        self._options = options or {}
        self._own_rank = own_rank
        # This scaler's number in each of the library's own groups, which it has again if it joins one again.
        self._numbers_by_group: IdentityMap[int] = IdentityMap()
        self._names: IdentityMap[str] = IdentityMap()
        # Of a pickle or a deep copy, whose optimizers may be other objects.
        self._lost_names: set[str] = set()
        # Of groups that cannot be referenced weakly, which no other scaler shares.
        self._own_commons: IdentityMap[_Common] = IdentityMap()
        self._begin_to_count()

    def _begin_to_count(self) -> None:
        """Reset what depends on the groups, as every rank does that joins one."""
        self._forget_counts()
        # By the collectives, the number of this scaler over the group.
        self._own_numbers: IdentityMap[int] = IdentityMap()
        # Of each group, with the number of its differences when this scaler began to count optimizers.
        self._counted_since: dict[_Common, int] = {}
        self._policy: Policy | None = None
        self._identity = 0

    def _forget_counts(self) -> None:
        self._optimizers: IdentityMap[OptimizerLabel] = IdentityMap()
        # How many optimizers there were: a list, which copies share.
        self._count = [0]

    @property
    def is_alone(self) -> bool:
        """Whether this process decides alone."""
        return self.standing.groups is not None and len(self.standing.groups) == 0

    def join(self, groups: Sequence[Collectives]) -> None:
        """Agree over other groups from now on, as one more scaler over them, or as before over a group that it had."""
        self._empty_queues()
        self.standing = Standing(groups)
        self._begin_to_count()
        for collectives in groups:
            self.number_over(collectives)

    def rank(self) -> int:
        """Return this process's rank, for reports and callbacks; 0 on exactly one rank of a grid of groups."""
        rank = None if self._own_rank is None else self._own_rank()
        if rank is not None:
            return rank
        rank = 0
        # Groups that are the axes of a grid of ranks give each rank a number of its own, row by row.
        for collectives in self.standing.groups or ():
            rank = rank * collectives.size + collectives.rank
        return rank

    def common_of(self, collectives: Collectives) -> _Common:
        """Return the record that the scalers over a library's own group share."""
        group = getattr(collectives, "identity", collectives)
        common = _commons.get(id(group)) or self._own_commons.get(id(group))
        if common is None:
            common = _Common()
            (_commons if _is_weak(group) else self._own_commons).set(group, common)
        return common

    # Why the ranks cannot agree.

    def fail(self, error: GradscaleError) -> None:
        """Let the iteration only be abandoned from now on, with its messages."""
        self.standing = self.standing._replace(failure=error)
        self._empty_queues()

    def _empty_queues(self) -> None:
        for common in self._counted_since:
            common.queue[:] = [ballot for ballot in common.queue if ballot.agreement is not self]

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keep the error that ends an agreement; another try could fail differently on each rank."""
        try:
            yield
        except OF_ALL_RANKS as error:
            self.fail(error)
            raise

    def lose(self, error: BaseException, iteration: int) -> None:
        """Use the groups no more after their failure or Ctrl-C in a start; errors of another kind leave them."""
        if isinstance(error, CollectiveTimeoutError):
            error.iteration = iteration
        elif not isinstance(error, GradscaleError):
            failure = BackendError(
                f"{type(error).__name__} has interrupted the start of an agreement, "
                f"{whereabouts(self.standing.groups or (), iteration)}: call set_group() with another group on every "
                f"rank"
            )
            failure.__cause__ = error
            self.standing = self.standing._replace(failure=failure, lost=failure)
            self._empty_queues()
        if isinstance(error, (BackendError, CollectiveTimeoutError)):
            self.standing = self.standing._replace(lost=error)

    def recover(self) -> None:
        """Go on with a loaded state after ranks have differed; a group that was lost is not used again."""
        have_differed = any(common.differences > since for common, since in self._counted_since.items())
        if self.standing.failure is not None or have_differed:
            # Every rank has failed, if not by this scaler, and they may have counted differently.
            self._forget_counts()
            self._counted_since = {common: common.differences for common in self._counted_since}
        self.standing = self.standing._replace(failure=None)

    def usable_groups(self) -> Sequence[Collectives]:
        """Return the groups to agree over; BackendError if one was lost, CallOrderError before it has joined any."""
        groups, _, lost = self.standing
        if groups is None:
            msg = "this scaler was unpickled and has no group yet: call set_group(group) on every rank first"
            raise CallOrderError(msg)
        if groups and lost is not None:
            msg = f"the group was lost before, and needs set_group() with another one on every rank: {lost}"
            raise BackendError(msg) from lost
        return groups

    def example(self, current: CurrentScale, number: int) -> Array | None:
        """Return an array for a rank that has none; None if it decides alone. CallOrderError without a library."""
        groups = self.standing.groups
        if not groups:
            return None
        example: Callable[[], Array] | None = getattr(groups[0], "example", None)
        own, theirs = current.example(), None if example is None else example()
        if own is None or (theirs is not None and array_namespace(theirs) is array_namespace(own)):
            # Where the group carries it, as the other ranks' arrays.
            own = theirs
        if own is not None:
            return own
        msg = (
            f"{whereabouts(groups, number)} has seen no array yet, so it is not known in which library it takes "
            f'part: pass backend= (such as backend="numpy") to a scaler whose rank may hold no gradients'
        )
        raise CallOrderError(msg)

    # The contents of a message.

    def settings_hash(self, policy: Policy) -> int:
        """Return the number that tells policies and options apart."""
        if self._policy is not policy:
            self._identity = claims.settings_hash(policy, self._options)
            # Another kind may change in place.
            self._policy = policy if validation.is_fixed(policy) else None
        return self._identity

    def settings_text(self, policy: Policy) -> str:
        """Return in words the settings that :meth:`settings_hash` hashes."""
        return ", ".join(
            [short_repr(policy), *(f"{name}={short_repr(value)}" for name, value in self._options.items())]
        )

    def label_of(self, optimizer: object) -> OptimizerLabel:
        """Return an optimizer as the ranks compare it."""
        label = self._optimizers.get(id(optimizer))
        groups = getattr(optimizer, "param_groups", None)
        size = len(groups) if isinstance(groups, Sized) else 0
        if label is None or label.size != size:
            name = self._names.get(id(optimizer))
            if name is None and self._lost_names:
                text = "copies of optimizers have no names after unpickling or copying: call name() for those named"
                msg = f"{text} {sorted(self._lost_names)}, got a {type(optimizer).__name__} without a name"
                raise CallOrderError(msg)
            number = self._count[0] if label is None else label.number
            self._count[0] += label is None
            kind = type(optimizer).__qualname__ + (f" with {size} param_groups" if size else "")
            # With a name, ranks may hold other parts of a model, such as the stages of a pipeline.
            label = OptimizerLabel(number, size, kind if name is None else f"named {name!r}")
            self._optimizers.set(optimizer, label)
        return label

    def name(self, optimizer: object, name: str) -> None:
        """Compare a name of an optimizer with the other ranks' instead of its class and number of ``param_groups``."""
        self._names.set(optimizer, name)
        self._lost_names.discard(name)
        label = self._optimizers.get(id(optimizer))
        if label is not None:
            self._optimizers.set(optimizer, label._replace(size=-1))

    def number_over(self, collectives: Collectives) -> int:
        """Return the number of this scaler over a group, counted when it joins the group or first sends over it."""
        number = self._own_numbers.get(id(collectives))
        if number is None:
            group = getattr(collectives, "identity", collectives)
            common, number = self.common_of(collectives), self._numbers_by_group.get(id(group))
            if number is None:
                number = common.scalers
                common.scalers += 1
                self._numbers_by_group.set(group, number)
            self._own_numbers.set(collectives, number)
            self._counted_since.setdefault(common, common.differences)
        return number

    # Messages.

    def send(self, groups: Sequence[Collectives], sent: Array, claim: Claim) -> Ballot:
        """Start a message over groups in turn; over new ones wait until the ranks have compared their versions.

        ``sent`` has the hash of ``claim`` over the first group.
        """
        try:
            commons = []
            for one in groups:
                common = self.common_of(one)
                if not common.is_greeted:
                    self._greet(one, sent, claim.iteration)
                    common.is_greeted = True
                commons.append(common)
            return Ballot(self, groups, commons, sent, claim)
        except BaseException as error:
            self.lose(error, claim.iteration)
            raise

    def ask(
        self, groups: Sequence[Collectives], sent: Array, claim: Claim, backend: Backend, policy: Policy
    ) -> tuple[Ballot, list[int], Verdict]:
        """Send a message and read its answer; return it, the answer and the verdict. An error of all ranks is kept."""
        with self.failing():
            ballot = self.send(groups, sent, claim)
            agreed, own = ballot.read(backend)
            return ballot, agreed, ballot.verdict(agreed, own, policy)

    def _greet(self, collectives: Collectives, like: Array, number: int) -> None:
        """Compare versions over a group before the first message of any scaler over it; ``like`` is that message."""
        own = claims.greeting()
        backend = registry.backend_for(like)
        agreed = _agreed(collectives, backend.integers(own, like))
        claims.require_one_version(backend.read(agreed), own, whereabouts([collectives], number))

    def __getstate__(self) -> dict[str, object]:
        groups = () if self.is_alone else None
        fresh = Agreement(groups, self._options, self._own_rank)
        fresh._lost_names = self._lost_names.union(self._names.values())
        return fresh.__dict__

    def __copy__(self) -> Agreement:
        # A copy in the same process talks to the same ranks, and has the same numbers, since some ranks may go on with
        # a copy and others with the original.
        copied = Agreement()
        copied.__dict__ |= self.__dict__ | {"standing": self.standing._replace(failure=None)}
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Agreement:
        memo[id(self)] = copied = copy.copy(self)
        copied._lost_names = self._lost_names.union(self._names.values())
        return copied


class Ballot:
    """One message over the groups of a list in turn, from its start until the CPU has the answer."""

    values: list[int] | None = None
    """What was sent, as numbers, which the host that has them need not read."""

    def __init__(
        self, agreement: Agreement, groups: Sequence[Collectives], commons: Sequence[_Common], sent: Array, claim: Claim
    ) -> None:
        self.agreement, self._groups, self._commons = agreement, groups, commons
        self.sent, self._number, self._claims = sent, claim.iteration, [claim]
        self._hashes: list[tuple[int, ...]] = []
        if len(groups) > 1:
            numbers = map(agreement.number_over, groups)
            self._claims = [claim._replace(scaler=one, group=k) for k, one in enumerate(numbers)]
            self._hashes = [claims.hash_of(one) for one in self._claims]
        self._failure: GradscaleError | None = None
        # By the group, as far as they have come: what finishes the message, and the answer.
        self._begun: list[Callable[[], Array]] = []
        self._answers: list[Array] = []
        for common in commons:
            common.queue.append(self)
        self._start(sent)

    def _start(self, sent: Array) -> None:
        """Start the message over the next group, after those that were sent before it."""
        position = len(self._begun)
        queue = self._commons[position].queue
        for earlier in queue[: queue.index(self)]:
            earlier.agreed()
        self._begun.append(self._groups[position].start_max(sent))
        queue.remove(self)

    def agreed(self, *, is_read: bool = False) -> Array:
        """Finish the message and return the MAX over all ranks; for a read, wait while the CPU can give up."""
        answers = self._answers
        try:
            # After Ctrl-C this goes on where it was.
            while len(answers) < len(self._groups):
                if len(self._begun) == len(answers):
                    backend = registry.backend_for(answers[-1])
                    shifted = claims.with_other_hash(
                        backend, answers[-1], *self._hashes[len(answers) - 1 : len(answers) + 1]
                    )
                    try:
                        self._start(shifted)
                    except BaseException as error:
                        self.agreement.lose(error, self._number)
                        raise
                answers.append(self._begun[-1]())
            if is_read:
                for finish in self._begun:
                    _wait_for_ranks(finish)
        except (BackendError, CollectiveTimeoutError) as error:
            self.agreement.lose(error, self._number)
            raise
        return answers[-1]

    def read(self, backend: Backend) -> tuple[list[int], list[int]]:
        """Return the answer and this rank's own message: one host read."""
        agreed = self.agreed(is_read=True)
        if self.values is not None:
            return backend.read(agreed), self.values
        values = backend.read(array_namespace(agreed).concat([agreed, self.sent]))
        return values[: claims.LENGTH], values[claims.LENGTH :]

    def verdict(self, agreed: Sequence[int], sent: Sequence[int], policy: Policy, *, is_late: bool = False) -> Verdict:
        """Return the verdict from an answer that was read; ScaleDesyncError if the ranks differ.

        Then they tell their claims, unless ``is_late``, since ranks read a late answer at different times.
        """
        if self._failure is not None:
            raise self._failure
        own = claims.with_other_hash(None, list(sent), self._hashes[0], self._hashes[-1]) if self._hashes else sent
        outcome = claims.outcome(agreed, own)
        if outcome is not Outcome.ONE_STATE:
            for common in self._commons:
                common.differences += 1
            self._failure = self._error(outcome, agreed, own, policy, is_late=is_late)
            raise self._failure
        return claims.verdict_of(agreed, own)

    def _error(
        self, outcome: Outcome, agreed: Sequence[int], own: Sequence[int], policy: Policy, *, is_late: bool
    ) -> ScaleDesyncError:
        where = whereabouts(self._groups, self._number)
        if outcome is Outcome.FOREIGN:
            return claims.foreign_message(where)
        if outcome is Outcome.FAILED:
            return ScaleDesyncError(
                f"rank {claims.verdict_of(agreed, own).by} cannot unscale its gradients, seen by {where}: the error on "
                f"that rank says why. No rank takes this step. Once they are right, load one checkpoint on every rank, "
                f"or call set_group()"
            )
        settings = self.agreement.settings_text(policy)
        differing = silence = ending = ""
        cause: Exception | None = None
        if outcome is Outcome.DIFFERENT and not is_late:
            try:
                differing = self._exchange_details(own, settings)
            except (BackendError, TimeoutError) as error:
                silence, cause = "some rank has not told its own in time", error
        elif outcome is Outcome.DETAILS:
            silence = "this one has not told its own"
        if silence:
            # The last message may still be under way.
            ending = f". Call set_group() with another group, too, since {silence}"
            self.agreement.lose(BackendError(f"the ranks differed{ending}"), self._number)
        if not differing:
            claim = ", ".join(f"{name}={value}" for name, value in self._claims[-1]._asdict().items())
            here = f"what this rank holds is {claim}, {settings}"
            before = "a message before this one, of which the other ranks tell; " * (outcome is Outcome.DETAILS)
            differing = "; ".join([*claims.spread_of(agreed, own), f"{before}{here}"])
        failure = ScaleDesyncError(
            f"ranks hold different states, seen by {where}: {differing}. No rank takes this step. Load "
            f"one checkpoint on every rank, construct every scaler with one policy and the same options, and make "
            f"the same calls for the same optimizers in the same order everywhere (a list of them, not a set){ending}"
        )
        failure.__cause__ = cause
        return failure

    def _exchange_details(self, own: Sequence[int], settings: str) -> str:
        """Tell the other ranks this rank's claim, and return in what they differ; empty if some rank tells nothing.

        Some ranks may have sent other messages since, so each rank first says that it tells, until all say so at once.
        """
        before = ""
        for collectives, claim in zip(self._groups, self._claims, strict=True):
            asking = claims.details_message()
            while (
                outcome := claims.outcome(self._answer(collectives, self.sent, asking), asking)
            ) is not Outcome.ONE_STATE:
                if outcome is not Outcome.DIFFERENT:
                    return before
            exchange = Exchange(collectives, functools.partial(self._carry, collectives))
            ranks = zip(*(exchange.numbers(one.rank, self.sent) for one in self._groups), strict=True)
            message = json.dumps([claims.claimed(own, claim, settings), before]).encode()
            # If several ranks tell the same, the first of them sends it.
            hashes = exchange.numbers(zlib.crc32(message) & 0x7FFFFFFF, self.sent)
            firsts = [hashes.index(one) for one in hashes]
            texts = exchange.texts(message if collectives.rank in firsts else b"", self.sent)
            details, earlier = zip(*(json.loads(texts[first]) for first in firsts), strict=True)
            differing = difference(dict(zip(ranks, details, strict=True)))
            # Others may have differed over the groups before.
            before = joined([differing, *earlier])
        return before

    def _carry(self, collectives: Collectives, like: Array, values: Sequence[int]) -> list[int]:
        sent = claims.pack_values(claims.NO_HASH, values)
        agreed = self._answer(collectives, like, sent)
        if claims.outcome(agreed, sent) is not Outcome.ONE_STATE:
            msg = "another message came in between"
            raise BackendError(msg)
        return claims.unpack_values(agreed)

    def _answer(self, collectives: Collectives, like: Array, values: Sequence[int]) -> list[int]:
        """Send a message whose answer comes within seconds, and return it."""
        backend = registry.backend_for(like)
        sent = backend.integers(values, like)

        def call() -> list[int]:
            return backend.read(_agreed(collectives, sent))

        within: Callable[[float], contextlib.AbstractContextManager[None]] | None
        within = getattr(collectives, "within", None)
        if within is None:
            return call_within(call, _PATIENCE)
        with within(_PATIENCE):
            return call()


def exchange_over(
    agreement: Agreement, current: CurrentScale, collectives: Collectives, claim: Callable[[], Claim]
) -> Exchange:
    """Return the exchange of a scaler over one group, all of whose rounds have the claim of ``claim``.

    That is called once a round is needed. If some rank makes another call, the first round is a ScaleDesyncError on
    every rank.
    """
    # One for all rounds, of which other rows of a grid of ranks may have more.
    claim = functools.cache(claim)

    def carry(like: Array, values: Sequence[int]) -> list[int]:
        own, backend = claim(), current.backend_for(like)
        sent = backend.integers(claims.pack_values(claims.hash_of(own), values), like)
        _, agreed, _ = agreement.ask([collectives], sent, own, backend, current.policy)
        return claims.unpack_values(agreed)

    return Exchange(collectives, carry)


def _agreed(collectives: Collectives, sent: Array) -> Array:
    finish = collectives.start_max(sent)
    agreed = finish()
    _wait_for_ranks(finish)
    return agreed


def _wait_for_ranks(finish: Callable[[], Array]) -> None:
    """Let the CPU wait for a message that a device waits for, if its group can: a read would wait for ever."""
    wait: Callable[[], None] | None = getattr(finish, "wait", None)
    if wait is not None:
        wait()


def whereabouts(groups: Sequence[Collectives], number: int) -> str:
    """Say which process this is, and in which iteration, for error messages."""
    ranks = [f"rank {collectives.rank} of {collectives.size}" for collectives in groups]
    return f"{' / '.join(ranks) or 'this process'} in iteration {number}"
