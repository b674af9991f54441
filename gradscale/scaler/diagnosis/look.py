"""Look: reads the arrays of this rank, and reports on each."""

from __future__ import annotations

import cmath
import dataclasses
import functools
import operator
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import registry, tree
from gradscale.core.arithmetic import device, is_floating, nonfinite_flag
from gradscale.core.gradients import NamedGradient, named_gradients
from gradscale.core.protocols import Array, Optimizer
from gradscale.core.summaries import Summary
from gradscale.core.tree import first_floating, floating_leaves, require_arrays
from gradscale.errors import GradscaleError, InvalidTypeError, short_repr
from gradscale.scaler.diagnosis.arrays import rename, weights_and_state
from gradscale.scaler.diagnosis.report import ParameterReport
from gradscale.scaler.scale import CurrentScale

Row: TypeAlias = tuple[ParameterReport, Array | None]
"""What a report says of an array before it is read, and its values on this rank, if it has any."""


class DiagnosisOptions(NamedTuple):
    """Options of ``diagnose``, from a user or from the scaler by itself, which searches all that it can find."""

    names: object = None
    loss: object = None
    params: object = None
    state: object = False
    is_by_itself: bool = False


class Look:
    """Reads arrays, and changes none."""

    def __init__(self, current: CurrentScale) -> None:
        self._current, self._adapter = current, current.adapter

    def rows_of(self, optimizer: Optimizer, options: DiagnosisOptions) -> tuple[list[Row], bool]:
        """Return an optimizer's gradients, its weights and state if they are to be searched, and whether they were."""
        gradients = named_gradients(optimizer)
        renamed = rename(gradients, options.names)
        rows = self._gradient_rows(optimizer, renamed)
        if options.params is None and (options.state is None or options.state is False):
            return rows, False
        try:
            arrays = weights_and_state(optimizer, gradients, renamed, options.params, options.state)
            others = [self._row(*each, index) for index, each in enumerate(arrays)]
        except GradscaleError:
            if not options.is_by_itself:
                raise
            return rows, False
        return [*rows, *(row for row in others if row[1] is not None)], True

    def _gradient_rows(self, optimizer: Optimizer, gradients: Sequence[NamedGradient]) -> list[Row]:
        """Return the floating gradients, and those that are missing."""
        arrays, what = [one.array for one in gradients], f"gradient of {type(optimizer).__name__}"
        require_arrays(arrays, what=what)
        like = first_floating(arrays)
        floating = [] if like is None else floating_leaves(arrays, array_namespace(like), what=what)
        wanted = {id(None), *map(id, floating)}
        rows = enumerate(gradients)
        return [self._row(ParameterReport(name), x, index) for index, (name, x, _) in rows if id(x) in wanted]

    def _row(self, label: ParameterReport, x: Array | None, index: int) -> Row:
        values = None if x is None else self._adapter.values_of(x)
        if values is None:
            return dataclasses.replace(label, index=index, missing=True), None
        shape, dtype = self._adapter.shape_of(x), str(values.dtype).rpartition(".")[2]
        return dataclasses.replace(label, index=index, shape=shape, dtype=dtype), values

    def count_nonfinite(self, leaves: Sequence[object]) -> Array | None:
        """Return how many arrays, of those on this rank, are not finite, 0-d int32; None without any. No host read."""
        values = [self._adapter.values_of(leaf) for leaf in leaves if is_array_api_obj(leaf)]
        floating = [x for x in values if x is not None and is_floating(x)]
        if not floating:
            return None
        flags = [nonfinite_flag(x, device(floating[0])) for x in floating]
        return array_namespace(flags[0]).asarray(functools.reduce(operator.add, flags))

    def counts_of_loss(self, loss: object) -> tuple[list[Array], int | None]:
        """Return the counts of arrays of a loss that are not finite, and of numbers, which is None without a loss."""
        if loss is None:
            return [], None
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

    def read(self, rows: Sequence[Row], others: list[Array]) -> tuple[list[Summary], list[list[int]]]:
        """Summarize the arrays that there are, and read others: one host read for each library."""
        arrays = [x for _, x in rows if x is not None]
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

    def reports(
        self, rows: Sequence[Row], summaries: Sequence[Summary], divisor: float
    ) -> tuple[tuple[ParameterReport, ...], tuple[ParameterReport, ...]]:
        """Return the reports on gradients, and on other arrays with inf or NaN, the worst first."""
        remaining = iter(summaries)
        reports = [label if x is None else _counted(label, next(remaining), divisor) for label, x in rows]
        reports.sort(key=lambda report: report.badness)
        gradients = tuple(report for report in reports if report.kind == "gradient")
        return gradients, tuple(report for report in reports if report.kind != "gradient" and report.nonfinite)


def _counted(label: ParameterReport, summary: Summary, divisor: float) -> ParameterReport:
    """Return the report on an array that was read; the values of a gradient are divided by ``divisor``."""
    has_finite = summary.largest > 0.0 or summary.inf + summary.nan < summary.size
    # Divided by a scale below 1 it may be beyond float64.
    largest = min(summary.largest / (divisor if label.kind == "gradient" else 1.0), sys.float_info.max)
    return dataclasses.replace(label, **summary._asdict() | {"largest": largest if has_finite else None})
