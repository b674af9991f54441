"""Iteration: what happens between two updates, for all optimizers; Turn: how far one of them has come in it."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from array_api_compat import array_namespace

from gradscale.core import vector
from gradscale.core.messages import shown, warn_caller
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.vector import Position, Purpose, Reason, Verdict
from gradscale.errors import (
    BackendError,
    CallOrderError,
    CollectiveTimeoutError,
    GradscaleError,
    InvalidTypeError,
    InvalidValueError,
    ScaleDesyncError,
)
from gradscale.policies.spikes import SpikeState
from gradscale.scaler.agreement import Agreement, Ballot, take_lists
from gradscale.scaler.overflow import NO_GRADIENTS
from gradscale.scaler.parts import LiveState, Pending, Request, Scaling, Unscaler
from gradscale.scaler.reports import Reports, StepReport
from gradscale.scaler.spikes import Judged, Losses, Spikes

__all__ = ["Iteration", "Parts", "Stage", "Turn"]

_ORDER = (
    "The right order in each iteration: scale(loss) and the backward pass; then, for each optimizer, "
    "unscale_(optimizer) if wanted, once, and step(optimizer), once; then update()"
)

_INCOMPLETE = (
    "the gradients of an optimizer could not be unscaled completely before: end the iteration with "
    "update(get_scale()), or load a state dict, and make new gradients"
)

_NO_LOSSES = Losses()


class Parts(NamedTuple):
    """What a scaler is made of: the array scaler's own parts, or those that an adapter brings."""

    live: LiveState
    scaling: Scaling
    unscaler: Unscaler
    agreement: Agreement
    reports: Reports[Pending]
    begin_verdict: Callable[..., Pending]
    """Starts the agreement on one optimizer: the class PendingVerdict, or an adapter's."""
    spikes: Spikes | None = None
    """What judges losses and norms; None if nothing does."""


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


class Turn:
    """How far one optimizer has come in an iteration. It keeps neither the optimizer nor its gradients.

    Attributes
    ----------
    stage : Stage
        How far it has come.
    pending : Pending or None
        The verdict on its gradients, once they are unscaled.
    verdict : Verdict or None
        What the optimizer was stepped by, if that was read.
    by_closure : bool
        Whether a closure has been evaluated, so that a step that failed may evaluate one again.
    has_begun_to_step : bool
        Whether a closure's first evaluation was fine: later ones are no spikes, since a line search tries losses that
        are far apart.
    is_refused : bool
        Whether the user has refused the step on this rank.
    code : array or int
        Why this rank skips the step, other than for an overflow; 0 if it does not.
    judged : Judged or None
        The loss and norm that were judged, which the update learns.
    learned : SpikeState or None
        What the update has learned.
    """

    stage = Stage.READY
    pending: Pending | None = None
    verdict: Verdict | None = None
    by_closure = has_begun_to_step = is_refused = False
    code: Array | int = 0
    judged: Judged | None = None
    learned: SpikeState | None = None

    @property
    def is_incomplete(self) -> bool:
        """Whether the gradients may be divided in part, after an interrupt or a failure."""
        return self.stage is Stage.UNSCALED and not self.is_judged

    @property
    def is_judged(self) -> bool:
        """Whether the gradients have been judged, so that the verdict counts in the update."""
        return self.pending is not None and self.pending.is_begun


class Iteration:
    """What happens between two updates. No part, turn or verdict keeps it alive.

    Parameters
    ----------
    number : int
        Position in the run, from 1.
    parts : Parts
        The scaler's.

    Attributes
    ----------
    parts : Parts
        The scaler's; each has an attribute of its own, too.
    scaled : bool
        Whether ``scale`` was called.
    state : ScaleState or None
        What is scaled and unscaled with, even if another state is loaded in between.
    lowered : ScaleState or None
        What closures have lowered it to; ``update`` makes it the state.
    is_of_replaced_state : bool
        Whether the state was loaded after ``scale``, so that the gradients belong to the one before.
    losses : Losses
        For a scaler that skips spikes.
    loss_nonfinite : tuple of arrays
        For a diagnosis: how many of the unscaled outputs were not finite, 0-d, one for each call of ``scale``.
    is_inside_closure : bool
        Whether a closure, or an optimizer that asks the scaler, may call it within the step.
    turns : list of Turn
        In the order in which the optimizers were met.
    steps : list of StepReport
        In the order of the steps.
    """

    def __init__(self, number: int, parts: Parts) -> None:
        self.number = number
        self.parts = parts
        self.live, _, self.unscaler, self.agreement, self.reports, self._begin_verdict, self._spikes = parts
        self.scaled = self.is_of_replaced_state = self.is_inside_closure = False
        self.state: ScaleState | None = None
        self.lowered: ScaleState | None = None
        self.losses = _NO_LOSSES
        self.loss_nonfinite: tuple[Array, ...] = ()
        self.steps: list[StepReport] = []
        # The verdict of an optimizer that is deleted before the update counts all the same.
        self.turns: list[Turn] = []
        # By id(optimizer): a weak reference to it, and its turn.
        self._known: dict[int, tuple[Callable[[], Optimizer | None], Turn]] = {}
        self._closure_state: ScaleState | None = None
        self._messages = 0

    # Turns.

    def turn_of(self, optimizer: Optimizer) -> Turn:
        """Return an optimizer's turn; after a failed agreement, raise its error again."""
        if self.agreement.failure is not None:
            raise self.agreement.failure
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        turn = Turn()
        try:
            reference: Callable[[], Optimizer | None] = weakref.ref(optimizer)
        except TypeError:
            reference = lambda: optimizer  # noqa: E731
        self._known[id(optimizer)] = reference, turn
        self.turns.append(turn)
        return turn

    def by_id(self, identity: int) -> Turn | None:
        """Return the turn of the optimizer with this ``id()``; None if it was not met in this iteration."""
        known = self._known.get(identity)
        return None if known is None or known[0]() is None else known[1]

    def ids(self) -> list[int]:
        """Return the ``id()`` of each optimizer met in this iteration."""
        return [identity for identity, (reference, _) in self._known.items() if reference() is not None]

    def forget_turns(self) -> None:
        """Let every optimizer begin its turn again; agreements under way are finished first."""
        self.judged()
        self._known, self.turns = {}, []

    # The state in force.

    def in_force(self, like: Array | None = None) -> ScaleState:
        """Return the state that gradients are scaled and unscaled with; ``like`` says where a first one is made.

        Raises
        ------
        CallOrderError
            If there is neither a state nor an array.
        """
        state = self._closure_state or self.state
        if state is not None:
            return state
        if like is None and not self.live.is_made:
            self.wrong_order("no array has been seen yet, so it is not known where the scale belongs")
        return self.live.current(like)

    def note_scaled(self, state: ScaleState) -> None:
        """Record the state that outputs were scaled with."""
        if self._closure_state is None:
            self.state = state
        self.scaled = True

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with what closures have lowered the state to, if they have."""
        self._closure_state, self.is_inside_closure = self.lowered, True
        losses = self.losses
        try:
            yield
        except BaseException:
            # The closure is evaluated again, or never.
            self.losses = losses
            raise
        finally:
            self._closure_state, self.is_inside_closure = None, False

    def lower(self) -> bool:
        """Back the scale off for the rest of this iteration's closures; False if the policy cannot."""
        state = self.lowered or self.state or self.live.current()
        self.lowered = self.live.lowered(state)
        return self.lowered is not state

    # An optimizer's way.

    def begin_unscale(self, optimizer: Optimizer) -> Turn:
        """Return an optimizer's turn; CallOrderError if it was unscaled or stepped already."""
        turn = self.turn_of(optimizer)
        if turn.stage is Stage.UNSCALED:
            if turn.is_incomplete:
                self.wrong_order(_INCOMPLETE)
            self.wrong_order("unscale_() has already been called on this optimizer since the last update()")
        if turn.stage is Stage.STEPPED:
            self.wrong_order("unscale_() is being called after step() on this optimizer")
        self.catch_up()
        return turn

    def begin_step(self, optimizer: Optimizer) -> Turn:
        """Return an optimizer's turn; CallOrderError if it was stepped already, InvalidTypeError if it cannot be."""
        if not callable(getattr(optimizer, "step", None)):
            raise _no_optimizer(optimizer)
        turn = self.turn_of(optimizer)
        if turn.stage is Stage.STEPPED:
            self.wrong_order("step() has already been called on this optimizer since the last update()")
        if turn.stage is Stage.READY:
            self.catch_up()
        return turn

    def catch_up(self) -> None:
        """Look at the late verdicts that have arrived: ranks may differ, and the scale is known for a while."""
        if self.reports.under_way:
            for pending in self.reports.poll():
                with self.agreement.failing():
                    verdict = pending.verdict()
                self.live.observe(verdict.scale, pending.version)
                if not verdict.has_gradients and not verdict.code:
                    # No error: each rank would raise it at another call, and the others would wait for it.
                    warn_caller(
                        f"a step before, whose verdict has now arrived, found no gradient on any rank: {NO_GRADIENTS}"
                    )

    def unscale(
        self, turn: Turn, optimizer: Optimizer, request: Request | None = None, *, is_look: bool = False
    ) -> Array | None:
        """Unscale an optimizer's gradients, start the agreement on them, and return their norm if it was asked for.

        ``is_look`` says that somebody judges them outside of ``unscale_`` and ``step``, which come later.

        Raises
        ------
        CallOrderError
            If nothing has ever been scaled, and the gradients cannot have been scaled on another rank.
        InvalidTypeError, InvalidValueError
            For gradients that cannot be unscaled; the other ranks hear of it.
        """
        if turn.by_closure and not self.is_inside_closure:
            self.wrong_order(
                "a closure of this optimizer has failed, which may have scaled by a lower scale: call step() with a "
                "closure again, or end the iteration with update(get_scale()) and make new gradients"
            )
        live, agreement = self.live, self.agreement
        groups = agreement.usable_groups()
        try:
            gradients = self.unscaler.collect(optimizer, request)
        except (InvalidTypeError, InvalidValueError):
            self._tell_of_refusal(optimizer)
            raise
        groups = groups or gradients.groups
        like = None
        # If outputs were scaled there is a state.
        if self.state is None and not live.is_made:
            if not groups and not live.is_known:
                # As in a pipeline, of which the last stage alone has a loss.
                self.wrong_order(
                    "step() or unscale_() was called, and scale() has never been called: make the gradients of "
                    "scaler.scale(loss); if another rank alone has the loss, use ShardedGradScaler"
                )
            like = gradients.like
            if like is None:
                like = agreement.example(live, self.number)
        # Over a group another rank may have the loss.
        if not self.scaled and not groups and not live.is_scaled_unseen:
            warn_caller(
                f"scale() was not called in iteration {self.number}, and the gradients of {type(optimizer).__name__} "
                f"are divided by the scale. If you forgot it, make the gradients of scaler.scale(loss). If they are "
                f"from before update(), which may have changed the scale, call step() before update(). If you have "
                f"multiplied the loss by get_scale(), all is well. (Said once.)"
            )
            live.is_scaled_unseen = True
        max_norm = None if request is None else request.max_norm
        is_seen = is_look or turn.is_refused or turn.has_begun_to_step or self.losses.is_judged
        if self._spikes is not None and not groups and not is_seen:
            self._spikes.warn_of_nothing(self.losses, has_norm=max_norm is not None)
        state = self.in_force(like)
        before = turn.stage, turn.pending
        turn.stage, turn.pending = Stage.UNSCALED, None
        try:
            found = self.unscaler.unscale(gradients, live, state)
        except BaseException as error:
            # After a failure some gradients may be divided already, but not after a refusal or in a second look.
            if not gradients.is_touched:
                turn.stage, turn.pending = before
            if isinstance(error, (InvalidTypeError, InvalidValueError)):
                self._tell_of_refusal(optimizer)
            raise
        try:
            # If gradients are judged a second time their norm is not known any longer.
            if turn.is_refused or (before[0] is Stage.READY and self._spikes is not None):
                turn.code = self._reason_code(turn, optimizer, found.norm, state)
            turn.pending = self._begin_verdict(self, found, state, groups, optimizer, max_norm, turn.code)
        except GradscaleError as error:
            agreement.failure = error
            raise
        return found.norm

    def refuse(self, optimizer: Optimizer) -> None:
        """Let no rank make the coming step of an optimizer."""
        if not callable(getattr(optimizer, "step", None)):
            raise _no_optimizer(optimizer)
        turn = self.turn_of(optimizer)
        if turn.stage is Stage.STEPPED:
            self.wrong_order("refuse() is being called after step() on this optimizer")
        # In a closure an evaluation before may have left its verdict.
        pending = turn.pending if turn.stage is Stage.UNSCALED else None
        if pending is not None and pending.groups:
            self.wrong_order("refuse() is being called after unscale_(), which has told the other ranks what comes")
        turn.is_refused = True
        if pending is not None:
            pending.refuse(vector.reason_code(Reason.REFUSED, self.agreement.rank()))

    def _reason_code(self, turn: Turn, optimizer: Optimizer, norm: Array | None, state: ScaleState) -> Array | int:
        """Return why this rank skips the step, other than for an overflow; 0-d int32 if the host does not know."""
        # The losses are this optimizer's, whether it is judged by them or not.
        losses, self.losses = self.losses, self.losses._replace(is_judged=True)
        if turn.is_refused:
            return vector.reason_code(Reason.REFUSED, self.agreement.rank())
        if self._spikes is None or turn.has_begun_to_step:
            return 0
        live = self.live
        found = self._spikes.judge(optimizer, losses, norm, lambda: live.arrays(state).scale)
        if found is None:
            return 0
        is_spike, turn.judged = found
        if is_spike is False:
            return 0
        code = vector.reason_code(Reason.SPIKE, self.agreement.rank())
        if is_spike is True:
            return code
        xp = array_namespace(is_spike)
        flag: Array = xp.astype(is_spike, xp.int32)
        return flag * xp.full_like(flag, code)

    def _tell_of_refusal(self, optimizer: Optimizer) -> None:
        """Raise ScaleDesyncError on all ranks but this one, which would wait for a message of it."""
        agreement, live = self.agreement, self.live
        # What fails now is not what is wrong.
        with contextlib.suppress(Exception):
            groups = self.unscaler.groups_for(optimizer, agreement.usable_groups())
            if not groups or agreement.failure is not None:
                return
            sent: Array = vector.refusal(self.position(groups, optimizer), agreement.rank())
            if not take_lists(groups):
                is_known = self.state is not None or live.is_made
                like = live.arrays(self.in_force(None if is_known else agreement.example(live, self.number))).scale
                sent = live.backend_for(like).integers(sent, like)
            with agreement.failing():
                ballot = Ballot(agreement, groups, sent, self.number)
                ballot.verdict(*ballot.read(live.backend_for), live.policy)

    def verdict(self, turn: Turn) -> Verdict:
        """Finish the agreement on an optimizer's gradients and return its verdict: the one host read of a step.

        Raises
        ------
        CallOrderError
            If the gradients could not be unscaled completely.
        ScaleDesyncError, CollectiveTimeoutError, BackendError
            If the ranks differ or do not come. The iteration can then only be abandoned.
        """
        pending = turn.pending
        if pending is None or not pending.is_begun or self.agreement.failure is not None:
            self.require_sound()
            self.wrong_order(_INCOMPLETE)
        try:
            return pending.verdict()
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self.agreement.failure = error
            raise

    def verdict_for_step(self, turn: Turn, optimizer: Optimizer) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if turn.stage is Stage.READY:
            self.unscale(turn, optimizer)
        verdict = self.verdict(turn)
        if not verdict.has_gradients and not verdict.code:
            self.refuse_without_gradients(turn, optimizer, verdict)
        return verdict

    def refuse_without_gradients(self, turn: Turn, optimizer: Optimizer, verdict: Verdict) -> NoReturn:
        """Raise CallOrderError for a step that would change nothing, and let the optimizer begin its turn again."""
        turn.stage, turn.pending = Stage.READY, None
        self.reports.record(optimizer, StepReport(True, verdict.scale, 0, "no gradients", self.number))
        ranks = "" if self.agreement.is_alone else " on any rank"
        self.wrong_order(
            f"step() of {type(optimizer).__name__}, none of whose parameters has a gradient{ranks}: {NO_GRADIENTS}. "
            f"Nothing was stepped"
        )

    def judged(self) -> tuple[list[Pending], list[Verdict]]:
        """Return the pending verdicts that count in the update, and the verdicts that are read by now."""
        pending, verdicts = [], []
        for turn in self.turns:
            one = turn.pending
            if one is not None and one.is_begun:
                verdict = None if one.is_read_later else turn.verdict or self.verdict(turn)
                if verdict is not None and not verdict.has_gradients and not verdict.code:
                    continue
                pending.append(one)
                if verdict is not None:
                    verdicts.append(verdict)
        return pending, verdicts

    def held(self) -> list[Array]:
        """Return for the verdicts that are read later whether they leave the scale as it is, if they may do so."""
        late = [turn.pending for turn in self.turns if turn.pending is not None and turn.pending.is_read_later]
        return [flag for one in late if (flag := one.held()) is not False]

    def learn(self) -> None:
        """Let the windows learn what was judged, once."""
        if self._spikes is None:
            return
        for turn in self.turns:
            if turn.judged is not None and turn.pending is not None:
                # An update that was interrupted may have replaced the state already, and may do so again.
                if turn.learned is None:
                    turn.learned = self._spikes.learned(turn.judged, turn.pending.reason())
                self._spikes.keep(turn.judged, turn.learned)
                turn.judged = None

    # Messages.

    def position(
        self,
        groups: Sequence[Collectives],
        optimizer: object,
        max_norm: float | None = None,
        purpose: Purpose = Purpose.STEP,
        index: int = 0,
    ) -> Position:
        """Return the position of the next message of this iteration."""
        self._messages += 1
        agreement = self.agreement
        met = agreement.met(optimizer)
        return vector.position(
            self.number,
            self._messages - 1,
            purpose=purpose,
            optimizer=met.number,
            scaler=agreement.number_over(groups[0]),
            group=index,
            steps=agreement.steps if purpose is Purpose.STEP else 0,
            max_norm=max_norm,
            kind=met.kind,
        )

    # Errors of ranks and callers.

    def require_sound(self) -> None:
        """After a failed agreement, raise its error again."""
        if self.agreement.failure is not None:
            raise self.agreement.failure

    def require_made_steps(self) -> None:
        """Raise CallOrderError if a step was refused, and neither unscaled nor made."""
        if any(turn.is_refused and turn.stage is Stage.READY for turn in self.turns):
            self.wrong_order(
                "refuse() was called for an optimizer that was neither unscaled nor stepped: call step() of the same "
                "object, which then makes no step, or end the iteration with update(get_scale())"
            )

    def refuse_update(self) -> NoReturn:
        """Raise CallOrderError for an update before which nothing was unscaled or stepped."""
        if self.is_incomplete:
            self.wrong_order(_INCOMPLETE)
        if self.scaled:
            self.wrong_order(
                "update() was called, and no optimizer was unscaled or stepped by the scaler since scale(): the "
                "gradients are still multiplied by the scale; call scaler.step(optimizer) in place of optimizer.step()"
            )
        self.wrong_order("update() was called, and nothing was scaled or unscaled since the last update()")

    @property
    def is_incomplete(self) -> bool:
        """Whether an optimizer's gradients may be divided in part, so that the iteration can only be abandoned."""
        return any(turn.is_incomplete for turn in self.turns)

    def require_boundary(self, what: str, *, abandons: bool = False) -> None:
        """Raise CallOrderError unless nothing is refused, unscaled or stepped yet, or the iteration has failed.

        ``abandons`` tells that what comes makes gradients that are divided in part useless.
        """
        if self.agreement.failure is not None or (abandons and self.is_incomplete):
            return
        is_refused = any(turn.is_refused for turn in self.turns)
        if self.is_inside_closure or is_refused or any(turn.stage is not Stage.READY for turn in self.turns):
            msg = (
                f"{what} is possible only at the beginning of an iteration, before {'refuse(), ' * is_refused}"
                f"unscale_() and step(), or at its end, after update(); this is the middle of iteration {self.number}"
            )
            raise CallOrderError(msg)

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        msg = f"{what} (iteration {self.number}). {_ORDER}"
        raise CallOrderError(msg)


def _no_optimizer(got: object) -> InvalidTypeError:
    return InvalidTypeError(f"an optimizer must have step(), got {shown(got)} of type {type(got).__name__}")
