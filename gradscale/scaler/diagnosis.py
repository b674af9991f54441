"""Diagnosis: reports on an optimizer's gradients, and changes nothing."""

from __future__ import annotations

import cmath
import dataclasses
import functools
import json
import operator
import sys
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, tree, validation
from gradscale.core.arithmetic import Kind, device, is_floating, kind_of, library_name, nonfinite_flag
from gradscale.core.gradients import InspectedArray, inspected_arrays, name_gradients, named_gradients
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.summaries import Summary
from gradscale.core.tree import first_floating, require_arrays
from gradscale.errors import BackendError, GradscaleError, InvalidTypeError, short_repr
from gradscale.scaler.agreement import exchange_over
from gradscale.scaler.claim import Purpose, Verdict
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Collaborators, Iteration
from gradscale.scaler.overflow import OverflowReport, ParameterReport, RankReport
from gradscale.scaler.progress import Progress, Stage

# After so many overflows in a row the weights and the optimizer's state are searched, too.
_SUSPICIOUS = 3
# A gathered report lists so many entries of all ranks together, or so many of each, whichever is more: all of 3000
# parameters on 512 ranks would be some 200 MB on every one of them.
_GATHERED = 4096
_GATHERED_OF_EACH = 8


class DiagnosisOptions(NamedTuple):
    """Options of ``diagnose``, from a user or from the scaler by itself, which searches all that it can find."""

    names: object = None
    loss: object = None
    params: object = None
    state: object = False
    is_by_itself: bool = False


class Diagnosis:
    """Makes the reports of ``diagnose``, and of a scaler with ``diagnose="on_overflow"`` in its steps."""

    def __init__(self, parts: Collaborators, *, enabled: bool) -> None:
        self._current, self._agreement, self._reports = parts.current, parts.agreement, parts.reports
        self._adapter, self._cache, self._tally = parts.current.adapter, parts.cache, parts.tally
        self._enabled = enabled

    def of_overflow(self, optimizer: Optimizer, iteration: Iteration) -> OverflowReport:
        """Return the report on a step that is skipped now; from the third in a row on with weights and state."""
        before = self._tally.streak_of(optimizer).reasons.get("overflow", 0)
        options = DiagnosisOptions(state=before + 1 >= _SUSPICIOUS, is_by_itself=True)
        return self.diagnose(optimizer, iteration, options, gather=True)

    def of_stall(self, optimizer: Optimizer, iteration: Iteration, ranks: Collection[int]) -> str:
        """Return the cause that this rank sees, or which ranks see it; empty if its arrays cannot be looked at."""
        progress = iteration.progresses.get(id(optimizer))
        loss = progress.verdict.loss if progress is not None and progress.verdict is not None else None
        try:
            report = self.diagnose(
                optimizer, iteration, DiagnosisOptions(loss=loss, state=True, is_by_itself=True), gather=False
            )
        except GradscaleError:
            return ""
        if report.cause in ("none", "underflow", "no gradients") and not self._agreement.is_alone:
            logs = f"log of rank {', '.join(map(str, sorted(ranks)))}" if ranks else "logs of the other ranks"
            return f"No gradient of this rank is inf or NaN: the {logs} may have the cause"
        text = f"Cause: {report.cause}. {report.explanation.rstrip('.')}"
        if report.cause in ("scale", "model") and not report.loss_nonfinite:
            text += f". {'If the' if report.loss_nonfinite is None else 'The'} loss is finite: see whether gradients "
            text += "are zeroed after a skipped step, too, which keep NaN"
        return text

    def diagnose(
        self, optimizer: Optimizer, iteration: Iteration, options: DiagnosisOptions, *, gather: bool
    ) -> OverflowReport:
        """Return the report on an optimizer's gradients, as :meth:`gradscale.GradScaler.diagnose` does."""
        progress = iteration.progresses.get(id(optimizer))
        pending = None if progress is None else progress.pending
        if optimizer in self._reports:
            # Its verdict may not have been read yet.
            self._reports.last(optimizer)
        current = self._current
        minimum = (
            None if current.never_scales or not self._enabled else current.policy.clamp(validation.SMALLEST_NORMAL)
        )
        groups: Sequence[Collectives] = ()
        if gather and self._enabled:
            groups = (pending and pending.groups) or iteration.groups_for(optimizer)
        if not groups:
            return OverflowReport.of([self._rank_report(optimizer, iteration, progress, options)], minimum)
        if len(groups) > 1 and progress is not None and pending is not None and pending.is_begun:
            # A rank that has not called scale() has sent all of this message in unscale_, before the diagnosis.
            iteration.verdict(progress)
        failure: Exception | None = None
        try:
            own = self._rank_report(optimizer, iteration, progress, options)
        except Exception as error:
            # Any error, also one of the library or of a user's iterator: the other ranks wait for this one.
            failure, own = error, RankReport(failure=f"{type(error).__name__}: {error}")
        exchanges = []
        for index, group in enumerate(groups):
            claim = functools.partial(iteration.next_claim, [group], optimizer, None, Purpose.DIAGNOSIS, index)
            exchanges.append(exchange_over(self._agreement, current, group, claim))
        reports = _gather(own, exchanges, self._like_any(optimizer, iteration))
        if failure is not None:
            raise failure
        return OverflowReport.of(reports, minimum)

    def count_nonfinite(self, leaves: Sequence[object]) -> Array | None:
        """Return how many arrays, of those on this rank, are not finite, 0-d int32; None without any. No host read."""
        values = [self._adapter.values_of(leaf) for leaf in leaves if is_array_api_obj(leaf)]
        floating = [x for x in values if x is not None and is_floating(x)]
        if not floating:
            return None
        flags = [nonfinite_flag(x, device(floating[0])) for x in floating]
        return array_namespace(flags[0]).asarray(functools.reduce(operator.add, flags))

    def _holds_scaled(self, optimizer: Optimizer, iteration: Iteration, progress: Progress | None) -> bool:
        if _is_ready(progress) and self._enabled and iteration.scaled:
            return True
        if progress is not None and progress.stage.is_unscaled:
            return progress.pending is not None and progress.pending.findings.is_scaled
        if not self._adapter.was_left_scaled(optimizer, self._cache):
            return False
        # An optimizer that unscales by itself does so only where it steps.
        verdict = _verdict_of(progress)
        return self._reports.last(optimizer).skipped if verdict is None else verdict.reason > 0

    def _rank_report(
        self, optimizer: Optimizer, iteration: Iteration, progress: Progress | None, options: DiagnosisOptions
    ) -> RankReport:
        """Return the report on this rank's arrays: one host read."""
        located = named_gradients(optimizer)
        named = name_gradients(located, options.names)
        rows = self._choose(optimizer, named)
        is_searched = options.params is not None or not (options.state is None or options.state is False)
        if is_searched:
            try:
                arrays = inspected_arrays(optimizer, located, named, options.params, options.state)
                values = [(one, self._adapter.values_of(one.array)) for one in arrays]
                rows += [(index, one, x) for index, (one, x) in enumerate(values) if x is not None]
            except GradscaleError:
                if not options.is_by_itself:
                    raise
                is_searched = False
        is_scaled = self._holds_scaled(optimizer, iteration, progress)
        # Whether the gradients are those of an earlier iteration, or no scaler's.
        is_over = _is_ready(progress) and not (self._enabled and iteration.scaled)
        scale, state, number = self._scale_of(optimizer, iteration, progress, is_over=is_over)
        counts, lost = self._judge_loss(options.loss, [] if is_over else list(iteration.loss_nonfinite))
        others = [array_namespace(count).reshape(count, (1,)) for count in counts]
        if state is not None:
            others.append(self._current.backend_for(state.scale).fingerprint(state))
        summaries, numbers = self._read([x for _, _, x in rows if x is not None], others)
        if state is not None:
            scale = validation.float32_from_bits(numbers.pop()[0])
        remaining = iter(summaries)
        reports = [
            ParameterReport(one.name, index=index, missing=True)
            if x is None
            else self._report(index, one, x, next(remaining), scale if is_scaled and one.kind == "gradient" else 1.0)
            for index, one, x in rows
        ]
        reports.sort(key=lambda report: report.badness)
        broken = tuple(report for report in reports if report.kind != "gradient" and report.nonfinite)
        return RankReport(
            entries=tuple(report for report in reports if report.kind == "gradient"),
            broken=broken if is_searched else None,
            scale=scale,
            iteration=number,
            is_scaled=is_scaled,
            loss_nonfinite=lost + sum(map(sum, numbers)) if counts or options.loss is not None else None,
        )

    def _report(self, index: int, one: InspectedArray, x: Array, summary: Summary, divisor: float) -> ParameterReport:
        has_finite = summary.largest > 0.0 or summary.inf + summary.nan < summary.size
        # Divided by a scale below 1 it may be beyond float64.
        largest = min(summary.largest / divisor, sys.float_info.max) if has_finite else None
        counted = summary._asdict() | {"largest": largest, "dtype": str(x.dtype).rpartition(".")[2]}
        shape = self._adapter.shape_of(one.array)
        return ParameterReport(one.name, index=index, shape=shape, kind=one.kind, key=one.key, **counted)

    def _read(self, arrays: list[Array], others: list[Array]) -> tuple[list[Summary], list[list[int]]]:
        """Summarize arrays and read others: one host read for each library."""
        summaries: dict[int, Summary] = {}
        values: dict[int, list[int]] = {}
        backend_for = self._current.backend_for
        for xp in dict.fromkeys(map(array_namespace, arrays + others)):
            own, theirs = ([x for x in some if array_namespace(x) is xp] for some in (arrays, others))
            own_summaries, their_values = backend_for((own or theirs)[0]).read_summaries(own, theirs)
            summaries |= zip(map(id, own), own_summaries, strict=True)
            values |= zip(map(id, theirs), their_values, strict=True)
            # The scaler's own adapter is for the first library.
            backend_for = registry.backend_for
        return [summaries[id(x)] for x in arrays], [values[id(x)] for x in others]

    def _choose(
        self, optimizer: Optimizer, named: Sequence[InspectedArray]
    ) -> list[tuple[int, InspectedArray, Array | None]]:
        """Return the floating gradients with their positions and values, and those that are missing."""
        what = f"gradient of {type(optimizer).__name__}"
        require_arrays([one.array for one in named], what=what)
        chosen = []
        library = None
        for index, one in enumerate(named):
            if isinstance(one.array, int) or (one.array is not None and kind_of(one.array) is Kind.INTEGRAL):
                continue
            values = None if one.array is None else self._adapter.values_of(one.array)
            if values is not None:
                xp = array_namespace(values)
                library = library or xp
                if not is_floating(values) or xp is not library:
                    msg = (
                        f"{what} {one.name} must be a floating array of one library, {library_name(library)}, got "
                        f"one of {library_name(xp)} with dtype {values.dtype!r}"
                    )
                    raise InvalidTypeError(msg)
            chosen.append((index, one, values))
        return chosen

    def _judge_loss(self, loss: object, remembered: list[Array]) -> tuple[list[Array], int]:
        """Return the counts of arrays of the unscaled loss that are not finite, on the device, and that of floats."""
        if loss is None:
            return remembered, 0
        leaves = tree.flatten(loss)[0]
        # NumPy's float64 is both a number and an array.
        numbers = [leaf for leaf in leaves if leaf is not None and not is_array_api_obj(leaf)]
        for number in numbers:
            if not isinstance(number, (int, float, complex)):
                msg = f"loss must hold arrays and numbers, got {short_repr(number)} of type {type(number).__name__}"
                raise InvalidTypeError(msg)
        # They may be of several libraries.
        counts = [self.count_nonfinite([leaf]) for leaf in leaves]
        # Integers are finite, even those too large for a float.
        lost = sum(not isinstance(number, int) and not cmath.isfinite(number) for number in numbers)
        return [count for count in counts if count is not None], lost

    def _scale_of(
        self, optimizer: Optimizer, iteration: Iteration, progress: Progress | None, *, is_over: bool
    ) -> tuple[float, ScaleState | None, int]:
        """Return the scale of an optimizer's gradients, or the state to read it from, and their iteration."""
        number = iteration.number
        if not self._enabled:
            return 1.0, None, number
        if is_over and optimizer in self._reports:
            report = self._reports.last(optimizer)
            return report.scale, None, report.iteration
        verdict = _verdict_of(progress)
        if verdict is not None:
            return verdict.scale, None, number
        if self._current.state is None and iteration.state is None:
            return self._current.scale(), None, number
        state = iteration.in_force(self._current.example)
        scale = self._current.state_adapter.peek(state[:1])
        return (1.0, state, number) if scale is None else (scale[0], None, number)

    def _like_any(self, optimizer: Optimizer, iteration: Iteration) -> Array:
        """Return an array of the library that this rank agrees in."""
        if self._current.state is not None:
            return self._current.state.scale
        try:
            gradients = [one.array for one in named_gradients(optimizer) if one.array is not None]
            values = [self._adapter.values_of(gradient) for gradient in gradients]
        except Exception:
            # Looking at them has raised the same error, which diagnose raises once all ranks know.
            values = []
        like = first_floating(values)
        if like is None:
            like = self._current.example()
        return self._agreement.example(self._current, iteration.number) if like is None else like


def _verdict_of(progress: Progress | None) -> Verdict | None:
    """Return the verdict on an optimizer's gradients, if it has been read."""
    return None if progress is None or progress.pending is None else progress.pending.verdict


def _is_ready(progress: Progress | None) -> bool:
    return progress is None or progress.stage is Stage.READY


def _gather(own: RankReport, exchanges: Sequence[Exchange], like: Array) -> list[RankReport]:
    """Return the reports of all ranks, the same on every rank; BackendError if another rank's has a ``failure``."""
    # The ranks in all groups identify a rank, whose report may arrive over two of them.
    rank = tuple(exchange.rank for exchange in exchanges)
    reports = {rank: dataclasses.replace(own, rank=rank)}
    for exchange in exchanges:
        limit = max(_GATHERED_OF_EACH, _GATHERED // (exchange.size * len(reports)))
        rows = [dataclasses.astuple(report.worst(limit)) for report in reports.values()]
        received = exchange.texts(zlib.compress(json.dumps(rows).encode()), like)
        reports = {report.rank: report for message in received for report in _unpack(message)}
    failed = [report for report in reports.values() if report.failure]
    if failed and not own.failure:
        where = ", ".join("/".join(map(str, report.rank)) for report in failed)
        msg = f"the diagnosis failed on rank {where}, and so on all: {failed[0].failure}"
        raise BackendError(msg)
    return list(reports.values())


def _unpack(message: bytes) -> list[RankReport]:
    reports = []
    # The decompressor ignores the padding behind the compressed text.
    for rank, entries, broken, *rest in json.loads(zlib.decompressobj().decompress(message)):
        first, second = (
            tuple(ParameterReport(name, tuple(rank), k, tuple(shape), *more) for name, _, k, shape, *more in rows)
            for rows in (entries, broken or ())
        )
        reports.append(RankReport(tuple(rank), first, None if broken is None else second, *rest))
    return reports
