"""MicroBatchLosses: which micro-batches of a step are kept; a checksum of the gradients that ranks then hold."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.arithmetic import Kind, is_floating, kind_of, widened
from gradscale.core.backend import Backend
from gradscale.core.gradients import named_gradients
from gradscale.core.protocols import Array, Collectives, Optimizer
from gradscale.core.snapshot import Snapshot
from gradscale.core.summaries import sum_of_bits
from gradscale.scaler import claim as claims
from gradscale.scaler.claim import Flags, LossFault, Purpose, Reason
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.guard import is_nonfinite, value_of
from gradscale.scaler.judge import Judge
from gradscale.scaler.messages import Messages
from gradscale.scaler.scale import CurrentScale
from gradscale.scaler.scaling import Scaling


class MicroBatches(NamedTuple):
    """The micro-batches of a step, by the answers of ``keeps``."""

    kept: int = 0
    dropped: int = 0
    ends_dropped: bool = False
    """Whether the last one was dropped."""
    stepped: frozenset[int] = frozenset()
    """The ``id()`` of optimizers that were stepped by them in an iteration before."""

    def were_dropped(self, optimizer: object) -> bool:
        """Tell whether one of an optimizer's was dropped."""
        return self.dropped > 0 and id(optimizer) not in self.stepped


class MicroBatchLosses:
    """Judges the loss of each micro-batch of a step before its backward pass."""

    counts = MicroBatches()
    # Of what ``hold`` names, as the last micro-batch that was kept has left it.
    _marks: Sequence[Snapshot] = ()

    def __init__(self, parts: Collaborators, messages: Messages, scaling: Scaling, judge: Judge) -> None:
        self._parts, self._messages, self._scaling, self._judge = parts, messages, scaling, judge

    def keeps(self, owner: object, loss: Array | float) -> bool:
        """Tell whether the loss of a micro-batch is finite on all ranks, and count it: one message and one read."""
        snapshots, groups = self._parts.snapshots, self._parts.agreement.usable_groups()
        value = value_of(loss if isinstance(loss, float) else self._parts.current.backend_for(loss).values_of(loss))
        is_kept = self._is_finite_on_all(groups, owner, loss, value) if groups else math.isfinite(float(value))
        kept, dropped, *_ = MicroBatches() if self.counts.stepped else self.counts
        self.counts = MicroBatches(kept + is_kept, dropped + (not is_kept), not is_kept)
        if is_kept:
            self._judge.add_losses([loss])
            self._marks = [snapshot.anew() for snapshot in snapshots]
        for snapshot in () if is_kept else self._marks or snapshots:
            snapshot.restore()
        return is_kept

    def _is_finite_on_all(
        self, groups: Sequence[Collectives], owner: object, loss: Array | float, value: Array | float
    ) -> bool:
        current, agreement, messages = self._parts.current, self._parts.agreement, self._messages
        state = self._scaling.in_force(lambda: loss if is_array_api_obj(loss) else None)
        claim = messages.next_claim(groups, owner, call=Purpose.MICRO_BATCH)
        fault = claims.reason_code(Reason.OVERFLOW, agreement.rank(), LossFault.NONFINITE)
        flags = Flags(0, code=is_nonfinite(value, state.scale) * fault)
        sent = claims.pack_arrays(current.state_adapter, current.policy, state, claims.hash_of(claim), flags)
        with agreement.failing():
            ballot = agreement.send(groups, sent, messages.iteration, claim)
            return not ballot.verdict(*ballot.read(current.state_adapter), current.policy).reason

    def forget(self) -> None:
        """Take the next micro-batch for the first of a step."""
        self.counts, self._marks = MicroBatches(), ()


def checksum_of(current: CurrentScale, optimizer: Optimizer) -> str:
    """Return a checksum of gradients that all ranks hold, unless what averages them was left out."""
    located = [one.array for one in named_gradients(optimizer) if is_array_api_obj(one.array)]
    arrays = [part for one in located for part in _real_parts(current.backend_for(one), one)]
    backend = current.backend_for(arrays[0]) if arrays else current.adapter
    sums = [sum_of_bits(one, backend.bits(one)) for one in arrays]
    stack = [backend.move(one, arrays[0]) for one in sums if one is not None]
    numbers = backend.read(array_namespace(stack[0]).stack(stack)) if stack else []
    others = [array for array, one in zip(arrays, sums, strict=True) if one is None]
    summaries = backend.read_summaries(others)[0] if others else []
    checksum = zlib.crc32(repr((numbers, summaries)).encode())
    return (
        f"{checksum:08x} of the gradients, which differ: a micro-batch was dropped, and perhaps the one that "
        f"averages them, as the last does under no_sync(); make a backward pass in its place, of zeros. Of parts "
        f'of gradients say max_norm= with norm_over="group"'
    )


def _real_parts(backend: Backend, gradient: Array) -> list[Array]:
    """Return the real arrays that tell a gradient from others: its values, and where a sparse one has them."""
    parts: list[Array] = []
    for x in (backend.values_of(gradient), backend.places_of(gradient)):
        if x is not None and kind_of(x) is Kind.COMPLEX:
            parts += [array_namespace(x).real(x), array_namespace(x).imag(x)]
        elif x is not None and is_floating(x):
            parts.append(widened(x) if backend.bits(x) is None else x)
    return parts
