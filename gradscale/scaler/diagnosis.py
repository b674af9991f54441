"""Diagnosis: reports on an optimizer's gradients, and changes nothing."""

from __future__ import annotations

import cmath
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import ops, registry, tree, validation
from gradscale.core.arithmetic import Kind, kind_of, library_name
from gradscale.core.gradients import HeldArray, NamedGradient, held_arrays, name_gradients, named_gradients
from gradscale.core.identity import IdentityMap
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Collectives, Optimizer, ScaleState
from gradscale.core.summaries import Summary, count_nonfinite
from gradscale.core.vector import Purpose, Verdict
from gradscale.errors import GradscaleError, InvalidTypeError
from gradscale.scaler.exchange import Exchange
from gradscale.scaler.iteration import Iteration, Parts, Stage, Turn
from gradscale.scaler.overflow import OverflowReport, ParameterReport, RankReport
from gradscale.scaler.overflow import gather as gather_reports

__all__ = ["Asked", "Diagnosis"]

# After so many overflows in a row the weights and the optimizer's state are searched, too.
_SUSPICIOUS = 3


class Asked(NamedTuple):
    """What a user asks for besides gradients; or the scaler by itself, which searches what there is to be found."""

    names: object = None
    loss: object = None
    params: object = None
    state: object = False
    is_by_itself: bool = False

    @property
    def searches(self) -> bool:
        """Whether the weights or the optimizer's state are searched."""
        return self.params is not None or not (self.state is None or self.state is False)


class Diagnosis:
    """What ``diagnose`` does, and a scaler with ``diagnose="on_overflow"`` in its steps.

    Parameters
    ----------
    parts : Parts
        The scaler's.
    enabled : bool
        Whether the scaler scales, so that gradients may be scaled and ranks may agree.
    """

    def __init__(self, parts: Parts, *, enabled: bool) -> None:
        self._live, _, self._unscaler, self._agreement, self._reports, *_ = parts
        self._enabled = enabled
        # How many of the last steps of an optimizer have overflowed.
        self._overflows: IdentityMap[int] = IdentityMap()

    def of_overflow(self, optimizer: Optimizer, iteration: Iteration) -> OverflowReport:
        """Return the report on a step that is skipped now; from the third in a row on with weights and state."""
        has_overflowed = optimizer in self._reports and self._reports.last(optimizer).reason == "overflow"
        count = 1 + (self._overflows.by_id(id(optimizer)) or 0) * has_overflowed
        self._overflows.put(optimizer, count)
        asked = Asked(state=count >= _SUSPICIOUS, is_by_itself=True)
        return self.diagnose(optimizer, iteration, asked, gather=True)

    def diagnose(self, optimizer: Optimizer, iteration: Iteration, asked: Asked, *, gather: bool) -> OverflowReport:
        """Return the report on an optimizer's gradients, as :meth:`gradscale.GradScaler.diagnose` does."""
        turn = iteration.by_id(id(optimizer))
        if optimizer in self._reports:
            # Its verdict may not have been read yet.
            self._reports.last(optimizer)
        minimum = self._live.policy.clamp(validation.SMALLEST_NORMAL)
        groups = self._groups_for(optimizer, turn) if gather and self._enabled else ()
        if not groups:
            return OverflowReport.of([self._look(optimizer, iteration, turn, asked)], minimum)
        failure: Exception | None = None
        try:
            own = self._look(optimizer, iteration, turn, asked)
        except Exception as error:
            # Any error, also one of the library or of a user's iterator: the other ranks wait for this one.
            failure, own = error, RankReport((), failure=f"{type(error).__name__}: {error}")
        like = self._like_any(optimizer, iteration)
        exchanges: IdentityMap[Exchange] = IdentityMap()
        for index, group in enumerate(groups):
            exchanges.put(group, Exchange(iteration, group, Purpose.DIAGNOSIS, optimizer, index=index))

        def agree(collectives: Collectives, values: list[int]) -> list[int]:
            return exchanges[collectives].maximum(values, like)

        reports = gather_reports(own, groups, agree)
        if failure is not None:
            raise failure
        return OverflowReport.of(reports, minimum)

    def count_nonfinite(self, leaves: Sequence[object]) -> Array | None:
        """Return how many arrays, of those on this rank, are not finite; None without any. No host read."""
        return count_nonfinite([self._unscaler.values_of(leaf) for leaf in leaves if is_array_api_obj(leaf)])

    def _groups_for(self, optimizer: Optimizer, turn: Turn | None) -> Sequence[Collectives]:
        """Return the groups to gather over; empty for a process alone."""
        given = self._agreement.usable_groups()
        agreed_over = () if turn is None or turn.pending is None else turn.pending.groups
        return self._unscaler.groups_for(optimizer, agreed_over or given)

    def _holds_scaled(self, optimizer: Optimizer, iteration: Iteration, turn: Turn | None) -> bool:
        """Tell whether an optimizer's gradients are still scaled."""
        if _is_ready(turn) and self._enabled and iteration.scaled:
            return True
        if turn is not None and turn.stage is Stage.UNSCALED:
            return turn.pending is not None and turn.pending.is_scaled
        if not self._unscaler.was_left_scaled(optimizer):
            return False
        # An optimizer that unscales by itself does so only where it steps.
        verdict = _known(turn)
        return self._reports.last(optimizer).skipped if verdict is None else verdict.is_skipped

    def _look(self, optimizer: Optimizer, iteration: Iteration, turn: Turn | None, asked: Asked) -> RankReport:
        """Look at what this rank holds: one host read."""
        unnamed = named_gradients(optimizer)
        located = name_gradients(unnamed, asked.names)
        chosen = self._choose(optimizer, located)
        paths = {one.name: named.name for one, named in zip(unnamed, located, strict=True)}
        held = self._held(optimizer, located, paths, asked) if asked.searches else None
        arrays = [x for _, _, x in chosen if x is not None] + [x for _, x in held or ()]
        is_scaled = self._holds_scaled(optimizer, iteration, turn)
        # Whether the gradients are those of an earlier iteration, or no scaler's.
        is_over = _is_ready(turn) and not (self._enabled and iteration.scaled)
        scale, state, number = self._scale_of(optimizer, iteration, turn, is_over=is_over)
        counts, lost = self._judge_loss(asked.loss, [] if is_over else list(iteration.loss_nonfinite))
        knows_loss = asked.loss is not None or len(counts) > 0
        others = [array_namespace(count).reshape(count, (1,)) for count in counts]
        if state is not None:
            others.append(self._live.backend_for(state.scale).fingerprint(state))
        summaries: list[Summary] = []
        if arrays or others:
            summaries, values = self._read(arrays, others)
            if state is not None:
                scale = validation.float32_from_bits(values.pop()[0])
            lost += sum(value for (value,) in values)
        remaining = iter(summaries)
        divisor = scale if is_scaled else 1.0
        entries = [
            ParameterReport(one.name, index=index, missing=True)
            if x is None
            else _entry(index, one.name, self._unscaler.shape_of(one.gradient), x, next(remaining), divisor)
            for index, one, x in chosen
        ]
        entries.sort(key=lambda entry: entry.badness)
        searched = []
        for index, (one, x) in enumerate(held or ()):
            entry = _entry(index, one.name, self._unscaler.shape_of(one.array), x, next(remaining), 1.0)
            searched.append(dataclasses.replace(entry, kind=one.kind, key=one.key))
        broken = sorted((entry for entry in searched if entry.nonfinite), key=lambda entry: entry.badness)
        return RankReport(
            rank=(),
            entries=tuple(entries),
            broken=None if held is None else tuple(broken),
            scale=scale,
            iteration=number,
            is_scaled=is_scaled,
            loss_nonfinite=lost if knows_loss else None,
        )

    def _held(
        self, optimizer: Optimizer, located: Sequence[NamedGradient], paths: Mapping[str, str], asked: Asked
    ) -> list[tuple[HeldArray, Array]] | None:
        """Return the weights and the arrays of the state with their values; None if the scaler knows of none."""
        try:
            held = held_arrays(optimizer, located, paths, asked.params, asked.state)
        except GradscaleError:
            if asked.is_by_itself:
                return None
            raise
        return [(one, x) for one in held if (x := self._unscaler.values_of(one.array)) is not None]

    def _read(self, arrays: list[Array], others: list[Array]) -> tuple[list[Summary], list[list[int]]]:
        """Summarize arrays and read others: one host read, and one for each array of another library than the first."""
        first = (arrays or others)[0]
        foreign = [k for k, x in enumerate(arrays) if array_namespace(x) is not array_namespace(first)]
        own = [x for k, x in enumerate(arrays) if k not in foreign]
        summaries, values = self._live.backend_for(first).read_summaries(own, others)
        for k in foreign:
            summaries[k:k] = registry.backend_for(arrays[k]).read_summaries([arrays[k]])[0]
        return summaries, values

    def _choose(
        self, optimizer: Optimizer, located: Sequence[NamedGradient]
    ) -> list[tuple[int, NamedGradient, Array | None]]:
        """Return the floating gradients with their positions and values, and those that are missing."""
        what = f"gradient of {type(optimizer).__name__}"
        ops.require_arrays([one.gradient for one in located], what=what)
        chosen = []
        library = None
        for index, one in enumerate(located):
            if isinstance(one.gradient, int) or (one.gradient is not None and kind_of(one.gradient) is Kind.INTEGRAL):
                continue
            values = None if one.gradient is None else self._unscaler.values_of(one.gradient)
            if values is not None:
                xp = array_namespace(values)
                library = library or xp
                if kind_of(values) is Kind.UNKNOWN or xp is not library:
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
        leaves = [leaf for _, leaf in tree.leaves_with_paths(loss)]
        # NumPy's float64 is both a number and an array.
        numbers = [leaf for leaf in leaves if leaf is not None and not is_array_api_obj(leaf)]
        for number in numbers:
            if not isinstance(number, (int, float, complex)):
                msg = f"loss must hold arrays and numbers, got {shown(number)} of type {type(number).__name__}"
                raise InvalidTypeError(msg)
        count = self.count_nonfinite(leaves)
        # Integers are finite, even those too large for a float.
        lost = sum(not isinstance(number, int) and not cmath.isfinite(number) for number in numbers)
        return [] if count is None else [count], lost

    def _scale_of(
        self, optimizer: Optimizer, iteration: Iteration, turn: Turn | None, *, is_over: bool
    ) -> tuple[float, ScaleState | None, int]:
        """Return the scale of an optimizer's gradients, or the state to read it from, and their iteration."""
        number = iteration.number
        if not self._enabled:
            return 1.0, None, number
        if is_over and optimizer in self._reports:
            report = self._reports.last(optimizer)
            return report.scale, None, report.iteration
        known = _known(turn)
        if known is not None:
            return known.scale, None, number
        if not self._live.is_made and iteration.state is None:
            return self._live.scale(), None, number
        state = iteration.in_force()
        if isinstance(state.scale, float):
            return state.scale, None, number
        return 1.0, state, number

    def _like_any(self, optimizer: Optimizer, iteration: Iteration) -> Array:
        """Return an array of the library that this rank agrees in."""
        if self._live.is_made:
            return self._live.arrays(self._live.current()).scale
        try:
            gradients = [one.gradient for one in named_gradients(optimizer) if one.gradient is not None]
            found = [self._unscaler.values_of(gradient) for gradient in gradients]
        except Exception:
            # Looking at them has raised the same error, which diagnose raises once all ranks know.
            found = []
        like = ops.first_floating(found)
        if like is None:
            like = self._live.example()
        return self._agreement.example(self._live, iteration.number) if like is None else like


def _known(turn: Turn | None) -> Verdict | None:
    """Return the verdict on an optimizer's gradients, if it has been read."""
    return None if turn is None or turn.pending is None else turn.pending.known


def _is_ready(turn: Turn | None) -> bool:
    return turn is None or turn.stage is Stage.READY


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
        # Divided by a scale below 1 it may be beyond float64.
        largest=min(summary.largest / divisor, sys.float_info.max) if has_finite else None,
    )
