"""The cause of an overflow: the reports of all ranks in one, and whether the scale or the model is at fault."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from gradscale.scaler.diagnosis.report import Cause, OverflowReport, ParameterReport, rank_text

NO_GRADIENTS = (
    "they were zeroed after backward(), or never made, or the optimizer holds the parameters of another model "
    "(in torch's words: No inf checks were recorded for this optimizer)"
)

# Gradients underflow above these shares. float16 has 10 binades of subnormals: if a tenth of all nonzero values lies
# there, about as many lie below and are lost. Zeros alone prove little, as ReLUs and embeddings make most of some
# gradients zero, but not nearly all of all gradients.
_SUBNORMAL_SHARE = 0.1
_ZERO_SHARE = 0.99
_MAX_RANKS = 8


def join(reports: Sequence[OverflowReport], minimum: float | None, *, is_scaled: bool) -> OverflowReport:
    """Join the reports of ranks, and find the cause.

    ``minimum`` is the smallest scale that the policy allows, None if it is always 1; ``is_scaled``: whether the
    gradients of any rank still are.
    """
    # A rank without gradients may not know the scale, and one that has not called scale() not the iteration.
    first = max((one for one in reports if one.entries), key=lambda one: one.iteration, default=reports[0])
    searched = [one.broken for one in reports if one.broken is not None]
    losses = [one.loss_nonfinite for one in reports if one.loss_nonfinite is not None]
    report = dataclasses.replace(
        first,
        entries=_sorted(one.entries for one in reports),
        omitted_nonfinite=sum(one.omitted_nonfinite for one in reports),
        omitted_finite=sum(one.omitted_finite for one in reports),
        loss_nonfinite=sum(losses) if losses else None,
        broken=_sorted(searched) if searched else None,
        omitted_broken=sum(one.omitted_broken for one in reports),
    )
    cause, explanation = find_cause(report, minimum, is_scaled=is_scaled)
    if cause == "model":
        explanation += _beginning(report)
    return dataclasses.replace(report, cause=cause, explanation=explanation)


def cause_of_broken(broken: Sequence[ParameterReport], minimum: float | None) -> tuple[Cause, str]:
    """Return the cause if weights or state hold inf or NaN, and a sentence; the first is the worst."""
    first = broken[0]
    ranks = sorted({entry.rank for entry in broken if entry.kind == first.kind})
    names = ", ".join(map(rank_text, ranks[:_MAX_RANKS]))
    where = f" on rank {names}{' and others' * (len(ranks) > _MAX_RANKS)}" * (ranks != [()])
    lower = "" if minimum is None else "; a lower scale will not help"
    what = f"inf or NaN{where}, the most in {first.place!r}: load a checkpoint from before{lower}"
    if first.kind == "weight":
        return "weights", f"Weights hold {what}."
    return "optimizer state", f"The optimizer's state holds {what}."


def find_cause(report: OverflowReport, minimum: float | None, *, is_scaled: bool) -> tuple[Cause, str]:
    """Return the cause, and a sentence that explains it, of a report that has none yet."""
    entries, scale = report.entries, report.scale
    if report.broken:
        return cause_of_broken(report.broken, minimum)
    hint = "look for inf or NaN in the data and the weights, for a learning rate that is too high, or a division by 0"
    if report.loss_nonfinite:
        lost = "loss is not finite" if minimum is None else "unscaled loss is not finite, whatever the scale"
        return "model", f"The {lost}: {hint}."
    worst = entries[0] if entries else None
    if worst is None or worst.missing:
        return "no gradients", f"None of the parameters has a gradient: {NO_GRADIENTS}."
    if worst.nonfinite:
        where = f"{worst.place or 'The gradient'}{f' on rank {rank_text(worst.rank)}' if worst.rank else ''}"
        if minimum is None:
            values = " and ".join(["inf"] * (worst.inf > 0) + ["NaN"] * (worst.nan > 0))
            values += "; the weights and the state that were searched are finite" * (report.broken is not None)
            return "model", f"{'The gradient of ' * bool(worst.name)}{where} holds {values}: {hint}."
        if scale <= 1.0:
            return "model", f"{where} overflows at scale {scale:g}, which amplifies nothing: {hint}."
        if scale <= minimum:
            return "model", f"{where} overflows at the policy's minimum, {scale:g}, and no lower one is tried: {hint}."
        aside = "" if report.loss_nonfinite is None else ", and the unscaled loss is finite"
        return (
            "scale",
            f"{where} overflows at scale {scale:g}{aside}: the step is to be skipped and the scale lowered, by "
            f"hand if it is static. If it goes on at lower scales, the model is at fault.",
        )
    size = sum(entry.size for entry in entries)
    zeros = sum(entry.zeros for entry in entries)
    subnormals = sum(entry.subnormals for entry in entries)
    is_subnormal = subnormals > 0 and subnormals >= _SUBNORMAL_SHARE * (size - zeros)
    if is_subnormal or (size and zeros >= _ZERO_SHARE * size):
        shares = f"{100 * zeros / size:.3g} % of all values are zero and {100 * subnormals / size:.3g} % subnormal"
        if minimum is None:
            return "underflow", f"{shares}: keep gradients in float32 or bfloat16, or use a GradScaler."
        if is_scaled or not is_subnormal:
            return "underflow", f"{shares}: raise the scale (init_scale, or a shorter growth_interval)."
        return "underflow", f"{shares} once they are unscaled: keep float32 gradients (master_dtype), or bfloat16."
    return "none", "All gradients are finite."


def _beginning(report: OverflowReport) -> str:
    """Say at which parameter the first gradient of a backward pass is not finite; nothing if that is the last one."""
    if not report.nonfinite or report.omitted_nonfinite + report.omitted_finite:
        return ""
    rank = report.entries[0].rank
    places = {entry.index: entry for entry in report.entries if entry.rank == rank and not entry.missing}
    begin = max(index for index, entry in places.items() if entry.nonfinite)
    finite = [places[index].place for index in sorted(places) if index > begin]
    if not finite:
        return ""
    names = " to ".join(dict.fromkeys((finite[0], finite[-1])))
    return f" It begins at {places[begin].place}: from the loss down to there, {names}, gradients are finite."


def _sorted(lists: Iterable[Sequence[ParameterReport]]) -> tuple[ParameterReport, ...]:
    return tuple(sorted(itertools.chain.from_iterable(lists), key=lambda entry: entry.badness))
