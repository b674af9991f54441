"""Iteration: what happens between two updates, for all optimizers; Turn: how far one of them has come in it."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from gradscale.core.protocols import Array, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError, CallOrderError, CollectiveTimeoutError, GradscaleError, ScaleDesyncError
from gradscale.reports.recorder import Reports
from gradscale.reports.steps import StepReport
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.parts import LiveState, Pending, Unscaler

__all__ = ["Iteration", "Stage", "Turn"]

_ORDER = (
    "The right order in each iteration: scale(loss) and the backward pass; then, for each optimizer, "
    "unscale_(optimizer) if wanted, once, and step(optimizer), once; then update()"
)


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
    by_closure : bool
        Whether a closure has been evaluated, so that the step may evaluate one again if it failed.
    reads_at_once : bool
        Whether the host needs the verdict within the step, for callbacks or a diagnosis.
    """

    __slots__ = ("__weakref__", "by_closure", "pending", "reads_at_once", "stage")

    def __init__(self) -> None:
        self.stage = Stage.READY
        self.pending: Pending | None = None
        self.by_closure = self.reads_at_once = False

    @property
    def known(self) -> Verdict | None:
        """The verdict, where the host has read it."""
        return None if self.pending is None else self.pending.known

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
    live, unscaler, agreement, reports : LiveState, Unscaler, Agreement, Reports
        The scaler's.

    Attributes
    ----------
    scaled : bool
        Whether ``scale`` was called.
    state : ScaleState or None
        What is scaled and unscaled with, even if another state is loaded in between.
    lowered : ScaleState or None
        What closures have lowered it to; ``update`` makes it the state.
    failure : GradscaleError or None
        Why the ranks could not agree; the iteration can only be abandoned.
    loss_nonfinite : tuple of arrays
        For a diagnosis: how many of the unscaled outputs were not finite, 0-d, one for each call of ``scale``.
    turns : list of Turn
        In the order in which the optimizers were met.
    reports : list of StepReport
        In the order of the steps.
    """

    def __init__(
        self, number: int, live: LiveState, unscaler: Unscaler, agreement: Agreement, reports: Reports[Pending]
    ) -> None:
        self.number = number
        self.live = live
        self.agreement = agreement
        self._unscaler = unscaler
        self._recorder = reports
        self.scaled = False
        self.state: ScaleState | None = None
        self.lowered: ScaleState | None = None
        self.failure: GradscaleError | None = None
        self.loss_nonfinite: tuple[Array, ...] = ()
        self.reports: list[StepReport] = []
        # The verdict of an optimizer that is deleted before the update counts all the same.
        self.turns: list[Turn] = []
        # By the optimizer's id, with what returns the optimizer, or None once it is deleted.
        self._known: dict[int, tuple[Callable[[], Any], Turn]] = {}
        self._closure_state: ScaleState | None = None
        self._messages = 0

    # Turns.

    def turn_of(self, optimizer: Any) -> Turn:
        """Return an optimizer's turn."""
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        turn = Turn()
        try:
            reference: Callable[[], Any] = weakref.ref(optimizer)
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
        """Let every optimizer begin its turn anew, with what was scaled; agreements under way are finished first."""
        for turn in self.turns:
            if turn.is_judged:
                self.verdict(turn)
        self._known, self.turns = {}, []

    # The state in force.

    def in_force(self, like: Array | None = None) -> ScaleState:
        """Return the state that gradients are scaled and unscaled with, made beside ``like`` if there is none yet.

        Raises
        ------
        CallOrderError
            When there is none, and no array to make it beside.
        """
        state = self._closure_state or self.state
        if state is not None:
            return state
        if like is None and not self.live.is_made:
            self.wrong_order("no array has been seen yet, so it is not known where the scale belongs")
        return self.live.current(like)

    def note_scaled(self, state: ScaleState) -> None:
        """Take note that outputs were scaled with a state."""
        if self._closure_state is None:
            self.state = state
        self.scaled = True

    @contextlib.contextmanager
    def inside_closure(self) -> Iterator[None]:
        """Scale and unscale with what closures have lowered the state to, if they have."""
        self._closure_state = self.lowered
        try:
            yield
        finally:
            self._closure_state = None

    def lower(self) -> bool:
        """Back the scale off for the rest of this iteration's closures, and tell whether the policy does."""
        state = self.lowered or self.state or self.live.current()
        self.lowered = self.live.lowered(state)
        return self.lowered is not state

    # An optimizer's way.

    def begin_unscale(self, optimizer: Any) -> Turn:
        """Return an optimizer's turn, having checked that its gradients may be unscaled.

        Raises
        ------
        CallOrderError
            When they were already, or the optimizer was stepped.
        """
        self.require_sound()
        turn = self.turn_of(optimizer)
        if turn.stage is Stage.UNSCALED:
            self.wrong_order("unscale_() has already been called on this optimizer since the last update()")
        if turn.stage is Stage.STEPPED:
            self.wrong_order("unscale_() is being called after step() on this optimizer")
        self.catch_up()
        return turn

    def begin_step(self, optimizer: Any) -> Turn:
        """Return an optimizer's turn, having checked that it may be stepped.

        Raises
        ------
        CallOrderError
            When it was stepped already.
        """
        self.require_sound()
        turn = self.turn_of(optimizer)
        turn.reads_at_once = self._recorder.wants_each_step
        if turn.stage is Stage.STEPPED:
            self.wrong_order("step() has already been called on this optimizer since the last update()")
        if turn.stage is Stage.READY:
            self.catch_up()
        return turn

    def catch_up(self) -> None:
        """Look at the late verdicts that have arrived: ranks may differ, and the scale is known for a while."""
        if self._recorder.under_way:
            for pending in self._recorder.poll():
                try:
                    verdict = pending.verdict()
                except ScaleDesyncError as error:
                    self.failure = error
                    raise
                self.live.observe(verdict.scale, pending.version)

    def unscale(self, turn: Turn, optimizer: Any, request: Any = None) -> Array | None:
        """Unscale an optimizer's gradients, start the agreement on them, and return their norm if it was asked for.

        Parameters
        ----------
        turn : Turn
            The optimizer's.
        optimizer : object
            Whose gradients.
        request : object, optional
            What the unscaler is asked for besides, such as a Clip.

        Raises
        ------
        CallOrderError
            When nothing has ever been scaled, and the gradients cannot have been scaled on another rank.
        """
        live, agreement = self.live, self.agreement
        groups = agreement.usable_groups()
        gradients = self._unscaler.collect(optimizer, request)
        groups = groups or gradients.groups()
        like = None
        # Where outputs were scaled there is a state.
        if self.state is None and not live.is_made:
            if not groups and not live.is_known:
                what = "gradients are to be unscaled, and scale() has never been called"
                # As in a pipeline, of which the last stage alone has a loss.
                self.wrong_order(f"{what}; if another rank has the loss, use ShardedGradScaler")
            like = gradients.like
            if like is None:
                like = agreement.example(live, self.number)
        state = self.in_force(like)
        before, turn.stage, turn.pending = turn.stage, Stage.UNSCALED, None
        try:
            found = self._unscaler.unscale(gradients, live, state)
        except BaseException:
            # Whatever fails may have unscaled some gradients, but for a refusal before.
            if not gradients.is_touched:
                turn.stage = before
            raise
        max_norm = None if request is None else request.max_norm
        turn.pending = agreement.pending(self, found, state, groups, optimizer, max_norm)
        norm: Array | None = found.norm
        return norm

    def verdict(self, turn: Turn) -> Verdict:
        """Finish the agreement on an optimizer's gradients and return its verdict: the one host read of a step.

        Raises
        ------
        CallOrderError
            When the gradients could not be unscaled completely.
        ScaleDesyncError, CollectiveTimeoutError, BackendError
            When the ranks differ or do not come. The iteration can then only be abandoned.
        """
        pending = turn.pending
        if pending is None or not pending.is_begun or self.failure is not None:
            self.require_sound()
            self.wrong_order("the gradients of this optimizer could not be unscaled completely before")
        try:
            return pending.verdict()
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self.failure = error
            raise

    def verdict_for_step(self, turn: Turn, optimizer: Any) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if turn.stage is Stage.READY:
            self.unscale(turn, optimizer)
        return self.verdict(turn)

    # What ranks and callers do wrong.

    def next_message(self) -> int:
        """Return the number of the next message of this iteration."""
        self._messages += 1
        return self._messages - 1

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Let the iteration be over for good where the ranks do not agree inside."""
        try:
            yield
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self.failure = error
            raise

    def require_sound(self) -> None:
        """Raise again what an agreement of this iteration failed with: ranks would not fail alike a second time."""
        if self.failure is not None:
            raise self.failure

    def require_boundary(self, what: str) -> None:
        """Raise CallOrderError unless nothing is unscaled or stepped yet, or the iteration has failed anyway."""
        if self.failure is None and any(turn.stage is not Stage.READY for turn in self.turns):
            msg = (
                f"{what} is possible only at the beginning of an iteration, before unscale_() and step(), or at its "
                f"end, after update(); this is the middle of iteration {self.number}"
            )
            raise CallOrderError(msg)

    def wrong_order(self, what: str) -> NoReturn:
        """Raise CallOrderError with what was wrong and the right order."""
        msg = f"{what} (iteration {self.number}). {_ORDER}"
        raise CallOrderError(msg)
