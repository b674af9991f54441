"""StepReport and UpdateReport: one optimizer's step, and one iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from gradscale.reports.overflow import OverflowReport

__all__ = ["StepReport", "UpdateReport"]


class StepReport(NamedTuple):
    """One optimizer's step in one iteration, as plain Python values.

    Attributes
    ----------
    skipped : bool
        Whether the step was skipped; an optimizer that skips by itself was called all the same.
    scale : float
        The scale that the gradients were divided by.
    nonfinite : int
        How many gradient arrays held an inf or NaN; over a group, the largest number on any rank. 1 if only the norm
        of finite ones overflowed. Kernels that judge many arrays at once on a device report 1 for any number.
    reason : {"stepped", "overflow", "spike", "refused", "no gradients", "disabled"}
        Why: all gradients were finite; some were not; the loss or the norm was a spike; the user refused the step;
        there was no gradient, which is an error; the scaler is disabled and checked nothing.
    iteration : int
        The scaler's iteration, from 1; ``update`` begins the next.
    retries : int
        How often a closure was evaluated again at a lower scale.
    local_nonfinite : int
        How many gradient arrays of this rank held an inf or NaN; 0 if only other ranks saw the overflow.
    overflow : OverflowReport or None
        Which parameters overflowed on which rank, for a skipped step of a scaler with ``diagnose="on_overflow"``.
    by : int or None
        The lowest rank with this reason, for a skipped step; None for an overflow that ranks have counted on devices.

    Examples
    --------
    >>> import gradscale
    >>> report = gradscale.StepReport(skipped=True, scale=65536.0, nonfinite=2, reason="overflow", iteration=7)
    >>> if report.skipped:
    ...     print(f"iteration {report.iteration} overflowed at scale {report.scale:g}")
    iteration 7 overflowed at scale 65536
    """

    skipped: bool
    scale: float
    nonfinite: int
    reason: Literal["stepped", "overflow", "spike", "refused", "no gradients", "disabled"]
    iteration: int
    retries: int = 0
    local_nonfinite: int = 0
    overflow: OverflowReport | None = None
    by: int | None = None


class UpdateReport(NamedTuple):
    """One iteration, as plain Python values; ``on_update`` is called with it.

    Attributes
    ----------
    iteration : int
        The iteration that this update ended, from 1.
    scale : float
        The scale that its gradients were divided by.
    skipped : bool
        Whether any optimizer's step was skipped, on all ranks: also if the loop left out the step itself.
    rank : int
        This process's rank; 0 without a group.
    steps : tuple of StepReport
        One for each optimizer that was stepped, in order.
    new_scale : float or None
        The scale after the update. A scaler always fills it in: a frozen policy computes it from the numbers that the
        step has read; otherwise it takes one more host read, such as of torch's tensors on an accelerator.

    Examples
    --------
    >>> import gradscale
    >>> report = gradscale.UpdateReport(7, scale=65536.0, skipped=True, rank=0, steps=(), new_scale=32768.0)
    >>> print(f"iteration {report.iteration}: {report.scale:g} -> {report.new_scale:g}")  # in an on_update callback
    iteration 7: 65536 -> 32768
    """

    iteration: int
    scale: float
    skipped: bool
    rank: int
    steps: tuple[StepReport, ...]
    new_scale: float | None = None
