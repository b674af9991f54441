"""StepReport: what happened to one optimizer's step."""

from typing import Literal, NamedTuple

__all__ = ["StepReport"]


class StepReport(NamedTuple):
    """What happened to one optimizer in one iteration, as plain Python values.

    Attributes
    ----------
    skipped : bool
        Whether the step was left out; an optimizer that skips by itself was called all the same.
    scale : float
        The scale that the gradients were divided by.
    nonfinite : int
        How many gradient arrays held an inf or NaN; over a group, the largest number on any rank. Kernels that judge
        many arrays at once on a device report 1 for any number.
    reason : {"stepped", "overflow", "disabled"}
        Why: all gradients were finite; some were not; the scaler is disabled and checked nothing.
    iteration : int
        The scaler's iteration, from 1; ``update`` begins the next.
    retries : int
        How often a closure was evaluated again at a lower scale.
    local_nonfinite : int
        How many gradient arrays of this rank held an inf or NaN: whether it saw the overflow, or only heard of it.
    """

    skipped: bool
    scale: float
    nonfinite: int
    reason: Literal["stepped", "overflow", "disabled"]
    iteration: int
    retries: int = 0
    local_nonfinite: int = 0
