"""Turn: one optimizer's way through one iteration, and all that steppers and closures are given of a scaler."""

from __future__ import annotations

import enum
from typing import Any

from gradscale.core.protocols import Array, ScaleState
from gradscale.core.vector import Verdict
from gradscale.errors import BackendError, CollectiveTimeoutError, ScaleDesyncError
from gradscale.scaler.agreement import Agreement
from gradscale.scaler.frame import Frame
from gradscale.scaler.parts import LiveState, Pending, Unscaler

__all__ = ["Stage", "Turn"]


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


class Turn:
    """One optimizer's way through one iteration. It keeps neither the optimizer nor its gradients.

    Parameters
    ----------
    frame : Frame
        Of the iteration.
    live, unscaler, agreement : LiveState, Unscaler, Agreement
        The scaler's.
    reads_at_once : bool
        Whether the host needs the verdict within the step, for callbacks or a diagnosis.

    Attributes
    ----------
    stage : Stage
        How far it has come.
    pending : Pending or None
        The verdict on its gradients, once they are unscaled.
    by_closure : bool
        Whether a closure has been evaluated, so that the step may evaluate one again if it failed.
    """

    __slots__ = (
        *("__weakref__", "_agreement", "_unscaler"),
        *("by_closure", "frame", "live", "pending", "reads_at_once", "stage"),
    )

    def __init__(
        self, frame: Frame, live: LiveState, unscaler: Unscaler, agreement: Agreement, *, reads_at_once: bool
    ) -> None:
        self.frame = frame
        self.live = live
        self._unscaler = unscaler
        self._agreement = agreement
        self.reads_at_once = reads_at_once
        self.stage = Stage.READY
        self.pending: Pending | None = None
        self.by_closure = False

    @property
    def state(self) -> ScaleState:
        """The state in force."""
        return self.frame.in_force(self.live)

    @property
    def known(self) -> Verdict | None:
        """The verdict, where the host has read it."""
        return None if self.pending is None else self.pending.known

    @property
    def is_judged(self) -> bool:
        """Whether the gradients have been judged, so that the verdict counts in the update."""
        return self.pending is not None and self.pending.is_begun

    def unscale(self, optimizer: Any, request: Any = None) -> Array | None:
        """Unscale an optimizer's gradients, start the agreement on them, and return their norm if it was asked for.

        Parameters
        ----------
        optimizer : object
            Whose turn this is.
        request : object, optional
            What the unscaler is asked for besides, such as a Clip.

        Raises
        ------
        CallOrderError
            When nothing has ever been scaled, and the gradients cannot have been scaled on another rank.
        """
        frame, live, agreement = self.frame, self.live, self._agreement
        groups = agreement.usable_groups()
        gradients = self._unscaler.collect(optimizer, request)
        groups = groups or gradients.groups()
        like = None
        # Where outputs were scaled there is a state.
        if frame.state is None and not live.is_made:
            if not groups and not live.is_known:
                what = "gradients are to be unscaled, and scale() has never been called"
                # As in a pipeline, of which the last stage alone has a loss.
                frame.wrong_order(f"{what}; if another rank has the loss, use ShardedGradScaler")
            like = gradients.like
            if like is None:
                like = agreement.example(live, frame.number)
        state = frame.in_force(live, like)
        before, self.stage, self.pending = self.stage, Stage.UNSCALED, None
        try:
            found = self._unscaler.unscale(gradients, live, state)
        except BaseException:
            # Whatever fails may have unscaled some gradients, but for a refusal before.
            if not gradients.is_touched:
                self.stage = before
            raise
        if groups:
            subject = agreement.subject(optimizer, getattr(request, "max_norm", None))
            self.pending = agreement.start(found, live, state, frame, groups, subject)
        else:
            self.pending = agreement.start(found, live, state, frame, groups)
        norm: Array | None = found.norm
        return norm

    def verdict(self) -> Verdict:
        """Finish the agreement and return its verdict: the one host read of a step.

        Raises
        ------
        CallOrderError
            When the gradients could not be unscaled completely.
        ScaleDesyncError, CollectiveTimeoutError, BackendError
            When the ranks differ or do not come. The iteration can then only be abandoned.
        """
        pending = self.pending
        if pending is None or not pending.is_begun or self.frame.failure is not None:
            self.frame.require_sound()
            self.frame.wrong_order("the gradients of this optimizer could not be unscaled completely before")
        try:
            return pending.verdict()
        except (BackendError, CollectiveTimeoutError, ScaleDesyncError) as error:
            self.frame.failure = error
            raise

    def verdict_for_step(self, optimizer: Any) -> Verdict:
        """Return the verdict on an optimizer's gradients, unscaled now if they are not yet."""
        if self.stage is Stage.READY:
            self.unscale(optimizer)
        return self.verdict()

    def lower(self) -> bool:
        """Back the scale off for the rest of this iteration's closures, and tell whether the policy does."""
        frame = self.frame
        state = frame.lowered or frame.state or self.live.current()
        frame.lowered = self.live.lowered(state)
        return frame.lowered is not state
