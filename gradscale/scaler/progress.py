"""Progress: how far one optimizer has come in an iteration, by its Stage; Progresses: those of all optimizers."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable

from gradscale.core.protocols import Array, Optimizer
from gradscale.scaler.claim import Reason, Verdict
from gradscale.scaler.guard import Observation
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.verdict import PendingVerdict


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration.

    ``is_unscaled``: its gradients are divided, if only in part, and ``step`` has not come to its end. ``has_ended``:
    it has. ``is_over``: it has, or is as good as ended; ``is_counted`` then, but if the optimizer has made none itself.
    """

    READY = "its gradients are as the backward pass has made them"
    DIVIDING = "they are being divided, or are divided in part after an interrupt or a failure"
    JUDGED = "they are divided and judged"
    STEPPING = "its step is under way, or has failed"
    OVERTAKEN = "its step has failed, and a loss was scaled since"
    LEFT_OUT = "its step was not called, and all ranks skip it, which is as good as if it was"
    STEPPED = "its step was made or skipped"
    DECLINED = "the optimizer itself has made no step; if that was so on some ranks alone, the number of steps says it"

    def __init__(self, _: str) -> None:
        # Attributes, since each step asks for them many times, and a member of the class takes longer.
        self.is_ready = self.name == "READY"
        self.has_ended = self.name in ("STEPPED", "DECLINED")
        self.is_over = self.has_ended or self.name == "LEFT_OUT"
        self.is_unscaled = not (self.is_ready or self.has_ended)
        self.is_counted = self.is_over and self.name != "DECLINED"


class Closure(enum.Enum):
    """How far the closure of an optimizer's step has come."""

    NONE = "none was evaluated"
    EVALUATING = "it was, and without it its gradients cannot be used, also if it has failed"
    BEGUN = "an evaluation was fine: later ones are no spikes, since a line search tries losses that are far apart"

    def __init__(self, _: str) -> None:
        self.has_begun = self.name == "BEGUN"
        self.was_evaluated = self.name != "NONE"


class Progress:
    """How far one optimizer has come in an iteration. It keeps neither the optimizer nor its gradients.

    ``owner``: returns the optimizer, or None if it is gone; None if there is only its ``id()``. ``verdict``: that of a
    step that is over, or left out. ``refused``: why the program on this rank wants no step, if so. ``inputs``: what the
    program says of the step. ``is_judged_in_step``: by no call before it. ``code``: this rank's spike or refusal, as
    :func:`claim.reason_code`, or 0; ``PendingVerdict`` adds an overflow. Only this file writes ``stage`` and
    ``closure``.
    """

    owner: Callable[[], Optimizer | None] | None = None
    stage = Stage.READY
    closure = Closure.NONE
    pending: PendingVerdict | None = None
    verdict: Verdict | None = None
    refused = Reason.STEPPED
    code: Array | int = 0
    observation: Observation | None = None
    inputs: StepInputs | None = None
    is_judged_in_step = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it is gone, or only its ``id()`` is there."""
        return None if self.owner is None else self.owner()

    @property
    def is_awaited(self) -> bool:
        """Whether the optimizer was unscaled, and its step is still to come."""
        return self.stage.is_unscaled and (self.owner is None or self.owner() is not None)

    @property
    def has_stepped(self) -> bool:
        """Whether the step is over and was not skipped, as far as the host knows without a read."""
        verdict = self.verdict or (self.pending and self.pending.verdict)
        return self.stage is Stage.STEPPED and not (verdict and verdict.reason)

    @property
    def is_incomplete(self) -> bool:
        """Whether the gradients may be divided in part; not if a framework has divided and judged them."""
        return self.stage.is_unscaled and (self.pending is None or not self.pending.is_begun)

    # Transitions of the closure.

    def begin_closure(self) -> None:
        """Begin a step with a closure, perhaps once more."""
        if self.closure.was_evaluated:
            self.closure = Closure.EVALUATING

    def evaluate(self) -> None:
        """Begin an evaluation, whose gradients are judged in place of those before."""
        self.stage = Stage.READY
        if not self.closure.was_evaluated:
            self.closure = Closure.EVALUATING

    def end_evaluation(self) -> None:
        """End an evaluation that was fine."""
        self.closure = Closure.BEGUN

    # Transitions of the stage.

    def begin_again(self) -> None:
        """Take the gradients for those of a backward pass that nothing has judged."""
        self.stage, self.pending, self.verdict = Stage.READY, None, None

    def judge_again(self) -> None:
        """Let what follows be judged in place of the gradients before, whose verdict counts until then."""
        self.stage, self.verdict = Stage.READY, None

    def divide(self) -> tuple[Stage, PendingVerdict | None]:
        """Begin to divide the gradients; return what :meth:`undo` goes back to."""
        before = self.stage, self.pending
        self.stage, self.pending = Stage.DIVIDING, None
        return before

    def undo(self, stage: Stage, pending: PendingVerdict | None) -> None:
        """Go back to before gradients of which none was touched."""
        self.stage, self.pending = stage, pending

    def judge(self, pending: PendingVerdict, then: Stage) -> None:
        """Go on with a verdict, and gradients that are divided completely, to the stage ``then``."""
        self.pending, self.verdict, self.stage = pending, None, then

    def begin_step(self) -> None:
        """Begin the step of gradients that are judged, and not only divided."""
        pending = self.pending
        if pending is not None and (not pending.is_placeholder or pending.is_begun):
            self.stage, self.verdict = Stage.STEPPING, None

    def take_for_unscaled(self) -> None:
        """Believe a framework that it has divided the gradients, in part until it says its verdict."""
        self.stage, self.verdict = Stage.DIVIDING, None

    def fail_step(self) -> None:
        """End a step in an error; gradients that are divided in part stay so."""
        if self.stage.is_unscaled and self.stage is not Stage.OVERTAKEN:
            self.stage, self.verdict = Stage.STEPPING, None

    def leave_skipped(self) -> None:
        """End in an error a step that is skipped anyway, so that no gradients of a later loss can be stepped."""
        if self.stage is Stage.STEPPING:
            self.stage = Stage.JUDGED

    def overtake(self) -> None:
        """Note that a loss was scaled: gradients of a step that has failed can be stepped no more."""
        if self.stage is Stage.STEPPING:
            self.stage = Stage.OVERTAKEN

    def leave_out(self, verdict: Verdict) -> None:
        """Take a step that was not called for one that all ranks skip, if the verdict says so."""
        if self.stage.is_unscaled and verdict.reason:
            self.stage, self.verdict = Stage.LEFT_OUT, verdict
        elif self.stage is Stage.LEFT_OUT:
            self.stage, self.verdict = Stage.JUDGED, None

    def decline(self) -> None:
        """End a step that the optimizer itself has not made."""
        self.stage = Stage.DECLINED

    def end_step(self, verdict: Verdict | None) -> None:
        """End a step; without a verdict it is read later."""
        if not self.stage.has_ended:
            self.stage = Stage.STEPPED
        self.verdict = verdict


@dataclasses.dataclass(eq=False)
class Progresses:
    """The progress of each optimizer in one iteration.

    The verdict of an optimizer that is deleted before the update counts all the same.
    """

    all: list[Progress] = dataclasses.field(default_factory=list)
    _by_id: dict[int, Progress] = dataclasses.field(default_factory=dict)

    def of(self, identity: int, optimizer: Optimizer | None = None) -> Progress:
        """Return the progress of the optimizer with this ``id()``, which may begin here."""
        progress = self._by_id.get(identity)
        if progress is None or (progress.owner is not None and progress.owner() is None):
            progress = Progress()
            # Before it can be found, or Ctrl-C in between would leave a step that no update counts.
            self.all.append(progress)
            self._by_id[identity] = progress
        if progress.owner is None and optimizer is not None:
            try:
                progress.owner = weakref.ref(optimizer)
            except TypeError:
                progress.owner = lambda: optimizer
        return progress

    def get(self, identity: int) -> Progress | None:
        """Return the progress of the optimizer with this ``id()``; None if it has none in this iteration."""
        progress = self._by_id.get(identity)
        return None if progress is None or (progress.owner is not None and progress.owner() is None) else progress

    def ids(self) -> list[int]:
        """Return the ``id()`` of each optimizer."""
        return [identity for identity in self._by_id if self.get(identity) is not None]

    def stepped_ids(self) -> frozenset[int]:
        """Return the ``id()`` of each optimizer whose step has come to its end."""
        return frozenset(identity for identity, progress in self._by_id.items() if progress.stage.has_ended)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that are alive."""
        return [one for progress in self._by_id.values() if (one := progress.optimizer) is not None]

    def forget(self, identity: int | None = None) -> None:
        """Let the optimizer with this ``id()``, or each, begin again; KeyError for one that has no progress."""
        if identity is None:
            self.all, self._by_id = [], {}
        else:
            self.all.remove(self._by_id.pop(identity))

    def have_begun(self) -> bool:
        """Tell whether some optimizer was refused, unscaled or stepped."""
        return any(progress.refused or not progress.stage.is_ready for progress in self.all)

    def are_over(self) -> bool:
        """Tell whether a step is over, and no other one has begun that is still to come."""
        has_stepped = False
        for progress in self.all:
            if progress.is_awaited:
                return False
            has_stepped = has_stepped or progress.stage.is_over
        return has_stepped

    def sent_messages(self) -> bool:
        """Tell whether a message was sent for a step."""
        return any(progress.pending is not None and progress.pending.groups for progress in self.all)
