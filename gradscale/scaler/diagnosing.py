"""Diagnosing: the part of a scaler that looks at an optimizer's gradients when it is asked to, and changes nothing."""

from __future__ import annotations

import cmath
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import ops, tree, validation
from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.gradients import Located, located_gradients, name_gradients
from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.core.summaries import Summary, count_nonfinite
from gradscale.errors import InvalidTypeError
from gradscale.reports.diagnose import gather as gather_reports
from gradscale.reports.overflow import OverflowReport, ParameterReport, RankReport
from gradscale.scaler.iteration import Progress, Stage
from gradscale.scaler.reporting import ReportingScale

__all__ = ["Diagnosing"]


class Diagnosing(ReportingScale):
    """``diagnose``, and what a scaler with ``diagnose="on_overflow"`` does in its steps."""

    def diagnose(self, optimizer: Any, names: Any = None, *, loss: Any = None, gather: bool = False) -> OverflowReport:
        """Report inf, NaN, zeros, subnormals and the largest magnitude of each gradient, and what is the cause.

        May be called at any time after the backward pass: before or after ``unscale_`` and ``step``, also a skipped
        one, and after ``update``. No gradient, state or stage is changed.

        Parameters
        ----------
        optimizer : Optimizer
            Its gradients are taken for scaled in an iteration that has called ``scale`` and not yet ``unscale_`` or
            ``step`` for it, and their magnitudes are divided by the scale; else for unscaled. Integer ones are left
            out.
        names : iterable, mapping or None
            Pairs of name and parameter, such as ``model.named_parameters()``, or a mapping; or a string for each
            parameter or leaf. Default: the optimizer's own names (torch's ``param_names``), else the expression that
            reaches the gradient.
        loss : array, float or nested containers of these, optional
            The unscaled loss. Where it is not finite, the model is at fault. Default: what ``scale`` was called with,
            if the scaler was made with ``diagnose="on_overflow"``.
        gather : bool, default False
            Report all ranks of the scaler's group. Every rank must call it then, and gets the same report: the 4096
            worst entries, or the 8 worst of each rank if that is more. Over several groups they are gathered in turn.

        Returns
        -------
        OverflowReport
            ``print`` shows it as a table. One host read, and two all-reduces for each group with ``gather``.

        Raises
        ------
        InvalidValueError
            For names that do not match the parameters.
        InvalidTypeError
            When the object has no gradients, or something among them is no array of one library.
        CollectiveTimeoutError, BackendError
            With ``gather``: when some rank does not come, or could not look at its gradients.
        """
        progress = self._iteration.by_id(id(optimizer))
        return self._diagnose(optimizer, progress, names, loss, gather=gather)

    def _remember_loss(self, leaves: Sequence[Any]) -> None:
        """Judge unscaled outputs, for the diagnosis of this iteration's overflows. No host read."""
        count = self._count_nonfinite(leaves)
        if count is not None:
            self._iteration.loss_nonfinite.append(count)

    def _diagnose_overflow(self, optimizer: Any, progress: Progress) -> OverflowReport:
        """Return the report on a skipped step, over the group that has skipped it."""
        return self._diagnose(optimizer, progress, None, None, gather=True)

    def _diagnose(
        self, optimizer: Any, progress: Progress | None, names: Any, loss: Any, *, gather: bool
    ) -> OverflowReport:
        minimum = self._policy.clamp(validation.SMALLEST_NORMAL)
        groups = self._groups_for_gathering(optimizer, progress) if gather and self._enabled else ()
        if not groups:
            return OverflowReport.of([self._look(optimizer, progress, names, loss)], minimum)
        failure: Exception | None = None
        try:
            own = self._look(optimizer, progress, names, loss)
        except Exception as error:
            # Whatever it is, also of the library or of a user's iterator: the other ranks wait for this one.
            failure, own = error, RankReport((), failure=f"{type(error).__name__}: {error}")
        like = self._like_any(optimizer)
        reports = gather_reports(own, groups, lambda group, values: self._maximum(group, values, like))
        if failure is not None:
            raise failure
        return OverflowReport.of(reports, minimum)

    # What a scaler over a group, and an adapter's scaler, replace.

    def _groups_for_gathering(self, optimizer: Any, progress: Progress | None) -> Sequence[Collectives]:  # noqa: ARG002
        """Return the groups to gather over; empty for a process alone."""
        return ()

    def _values_of(self, gradient: Any) -> Any:
        """Return the array that holds a gradient's values on this rank; None where it has none."""
        return gradient

    def _shape_of(self, gradient: Any) -> tuple[int, ...]:
        """Return the shape of a gradient on this rank."""
        return tuple(gradient.shape)

    def _holds_scaled(self, optimizer: Any, progress: Progress | None) -> bool:  # noqa: ARG002
        """Tell whether an optimizer's gradients are still scaled."""
        return self._enabled and _is_ready(progress) and self._iteration.scaled

    if TYPE_CHECKING:
        # What the scaler brings.
        def _in_force(self, like: Array | None) -> ScaleState: ...
        def _like_nothing(self) -> Array | None: ...

    # The parts of a diagnosis.

    def _look(self, optimizer: Any, progress: Progress | None, names: Any, loss: Any) -> RankReport:
        """Look at this rank's gradients: one host read."""
        chosen = self._choose(optimizer, names)
        arrays = [x for _, _, x in chosen if x is not None]
        is_scaled = self._holds_scaled(optimizer, progress)
        # Gradients that an iteration has left behind, or that no scaler has seen.
        is_over = _is_ready(progress) and not (self._enabled and self._iteration.scaled)
        scale, state, number = self._circumstances(optimizer, progress, is_over=is_over)
        counts, lost = self._judge_loss(loss, is_over=is_over)
        knows_loss = loss is not None or len(counts) > 0
        others = [array_namespace(count).reshape(count, (1,)) for count in counts]
        if state is not None:
            others.append(self._backend_for(state.scale).fingerprint(state))
        summaries: list[Summary] = []
        if arrays or others:
            backend = self._backend_for((arrays or others)[0])
            summaries, values = backend.read_summaries(arrays, others)
            if state is not None:
                scale = validation.float32_from_bits(values.pop()[0])
            lost += sum(value for (value,) in values)
        remaining = iter(summaries)
        divisor = scale if is_scaled else 1.0
        entries = [
            ParameterReport(one.name, index=index, missing=True)
            if x is None
            else _entry(index, one.name, self._shape_of(one.gradient), x, next(remaining), divisor)
            for index, one, x in chosen
        ]
        entries.sort(key=lambda entry: entry.badness)
        return RankReport(
            rank=(),
            entries=tuple(entries),
            scale=scale,
            iteration=number,
            is_scaled=is_scaled,
            loss_nonfinite=lost if knows_loss else None,
        )

    def _choose(self, optimizer: Any, names: Any) -> list[tuple[int, Located, Array | None]]:
        """Return the floating gradients with their positions and values, and those that are missing."""
        located = name_gradients(located_gradients(optimizer), names)
        what = f"gradient of {type(optimizer).__name__}"
        ops.require_arrays([one.gradient for one in located], what=what)
        chosen = []
        library = None
        for index, one in enumerate(located):
            if isinstance(one.gradient, int) or (one.gradient is not None and kind_of(one.gradient) is Kind.EXACT):
                continue
            values = None if one.gradient is None else self._values_of(one.gradient)
            if values is not None:
                xp = array_namespace(values)
                library = library or xp
                if kind_of(values) is Kind.UNKNOWN or xp is not library:
                    msg = (
                        f"{what} {one.name} must be a floating array of one library, {library.__name__}, got one of "
                        f"{xp.__name__} with dtype {values.dtype!r}"
                    )
                    raise InvalidTypeError(msg)
            chosen.append((index, one, values))
        return chosen

    def _judge_loss(self, loss: Any, *, is_over: bool) -> tuple[list[Array], int]:
        """Return the counts of arrays of the unscaled loss that are not finite, on the device, and that of floats."""
        if loss is None:
            return [] if is_over else self._iteration.loss_nonfinite, 0
        leaves = [leaf for _, leaf in tree.leaves_with_paths(loss)]
        # NumPy's float64 is both a number and an array.
        numbers = [leaf for leaf in leaves if leaf is not None and not is_array_api_obj(leaf)]
        for number in numbers:
            if not isinstance(number, (int, float, complex)):
                msg = f"loss must hold arrays and numbers, got {number!r} of type {type(number).__name__}"
                raise InvalidTypeError(msg)
        count = self._count_nonfinite(leaves)
        # Integers are finite, also those that no float holds.
        lost = sum(not isinstance(number, int) and not cmath.isfinite(number) for number in numbers)
        return [] if count is None else [count], lost

    def _count_nonfinite(self, leaves: Sequence[Any]) -> Array | None:
        """Return how many arrays, of those on this rank, are not finite; None without any."""
        return count_nonfinite([self._values_of(leaf) for leaf in leaves if is_array_api_obj(leaf)])

    def _circumstances(
        self, optimizer: Any, progress: Progress | None, *, is_over: bool
    ) -> tuple[float, ScaleState | None, int]:
        """Return the scale of an optimizer's gradients, or the state it is to be read from, and their iteration."""
        number = self._iteration.number
        if not self._enabled:
            return 1.0, None, number
        if is_over and optimizer in self._reports:
            report = self._reports[optimizer]
            return report.scale, None, report.iteration
        if progress is not None and progress.verdict is not None:
            return progress.verdict.scale, None, number
        if self._state is None and self._iteration.state is None:
            scale: float = self._snapshot()["scale"]
            return scale, None, number
        return 1.0, self._in_force(None), number

    def _like_any(self, optimizer: Any) -> Array:
        """Return an array of the library that this rank agrees in."""
        if self._state is not None:
            return self._state.scale
        try:
            found = [self._values_of(one.gradient) for one in located_gradients(optimizer) if one.gradient is not None]
        except Exception:
            # What is wrong with them has been found by looking at them, and is told once all ranks know.
            found = []
        like = ops.first_floating(found)
        return self._like_nothing() if like is None else like

    def _maximum(self, collectives: Collectives, values: list[int], like: Array) -> list[int]:
        """Return the element-wise MAX over a group."""
        xp, backend = array_namespace(like), self._backend_for(like)
        x = xp.asarray(values, dtype=xp.int32, device=backend.placement(like))
        return backend.read(collectives.start_max(x)())


def _is_ready(progress: Progress | None) -> bool:
    return progress is None or progress.stage is Stage.READY


def _entry(
    index: int, name: str, shape: tuple[int, ...], values: Array, summary: Summary, divisor: float
) -> ParameterReport:
    has_finite = summary.largest > 0.0 or summary.inf + summary.nan < summary.size
    return ParameterReport(
        name=name,
        index=index,
        shape=shape,
        dtype=str(values.dtype).rpartition(".")[2],
        size=summary.size,
        inf=summary.inf,
        nan=summary.nan,
        zeros=summary.zeros,
        subnormals=summary.subnormals,
        # A scale below 1 may leave float64 no room.
        largest=min(summary.largest / divisor, sys.float_info.max) if has_finite else None,
    )
