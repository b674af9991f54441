"""Progress: how far one optimizer has come in an iteration, by its Stage."""

from __future__ import annotations

import enum
from collections.abc import Callable

from gradscale.core.protocols import Array, Optimizer
from gradscale.scaler.claim import Reason, Verdict
from gradscale.scaler.guard import Observation
from gradscale.scaler.inputs import StepInputs
from gradscale.scaler.verdict import PendingVerdict


class Stage(enum.Enum):
    """How far an optimizer has come in the iteration."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


class Progress:
    """How far one optimizer has come in an iteration. It keeps neither the optimizer nor its gradients.

    ``owner``: returns the optimizer, or None if it is gone; None if there is only its ``id()``. ``by_closure``:
    a step that failed may evaluate a closure again. ``has_begun_to_step``: later evaluations are no spikes, since a
    line search tries losses that are far apart. ``is_declined``: the optimizer itself did not step; if that was so on
    some ranks alone, the number of steps in the next message says it. ``has_failed``: its step has begun and not
    ended; ``is_overtaken``: a loss was scaled since. ``left_out``: the verdict by which all ranks skip, if
    ``step`` was not called, which is as good as if it was. ``refused``: why the program on this rank wants no step, if
    so. ``inputs``: what the program says of the step. ``code``: this rank's spike or refusal, as
    :func:`claim.reason_code`, or 0; ``PendingVerdict`` adds an overflow.
    """

    owner: Callable[[], Optimizer | None] | None = None
    stage = Stage.READY
    pending: PendingVerdict | None = None
    verdict: Verdict | None = None
    left_out: Verdict | None = None
    by_closure = has_begun_to_step = is_declined = has_failed = is_overtaken = False
    refused = Reason.STEPPED
    code: Array | int = 0
    observation: Observation | None = None
    inputs: StepInputs | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the optimizer was unscaled, and its step is still to come."""
        return self.stage is Stage.UNSCALED and (self.owner is None or self.owner() is not None)

    @property
    def is_over(self) -> bool:
        """Whether the optimizer has stepped, or its step was skipped, or left out where all ranks skip."""
        return self.stage is Stage.STEPPED or self.left_out is not None

    @property
    def has_stepped(self) -> bool:
        """Whether the step is over and was not skipped, as far as the host knows without a read."""
        verdict = self.verdict or (self.pending and self.pending.verdict)
        return self.stage is Stage.STEPPED and not (verdict and verdict.reason)

    @property
    def is_incomplete(self) -> bool:
        """Whether the gradients may be divided in part, after an interrupt or a failure."""
        return self.stage is Stage.UNSCALED and (self.pending is None or not self.pending.is_begun)
