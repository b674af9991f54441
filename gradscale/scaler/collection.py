"""Collection: an optimizer's gradients, what a call asks of them, and over which groups they are judged."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.arithmetic import is_floating, real_parts, widened
from gradscale.core.backend import Backend
from gradscale.core.gradients import UNSCALING, Collected, Request, UserNorm, named_gradients
from gradscale.core.protocols import Array, Collectives, Optimizer
from gradscale.core.summaries import sum_of_bits
from gradscale.errors import InvalidValueError, reading
from gradscale.scaler.agreement import exchange_over
from gradscale.scaler.claim import Purpose, Reason
from gradscale.scaler.collaborators import Collaborators
from gradscale.scaler.guard import value_of
from gradscale.scaler.judge import MicroBatches
from gradscale.scaler.messages import Messages
from gradscale.scaler.options import Clipping
from gradscale.scaler.order import DROPPED_DTENSORS, wrong_order
from gradscale.scaler.progress import Progress
from gradscale.scaler.scale import CurrentScale

_JUDGING = Request(divides=False)


class Collection(NamedTuple):
    """An optimizer's gradients, and over which groups they are judged."""

    gradients: Collected
    groups: Sequence[Collectives]
    max_norm: float | None
    """What they are clipped to."""
    checksum: str
    """Of gradients that ranks may hold unlike, else empty."""


def clipping_request(messages: Messages, optimizer: Optimizer, clipping: Clipping) -> Request:
    """Return the options of clipping; InvalidValueError for gradients without a norm, before any is modified."""
    current, agreement = messages.parts.current, messages.parts.agreement
    groups = current.adapter.norm_groups(optimizer)
    if not groups and clipping.norm_over == "group":
        groups = agreement.usable_groups()
    if not groups:
        return Request(clipping.max_norm)
    if len(groups) > 1:
        msg = (
            f'norm_over="group" needs one group, got {len(groups)}, of which it is not known which hold parts: '
            f"call unscale_(optimizer), and clip the gradients by a norm of your own"
        )
        raise InvalidValueError(msg)
    claim = functools.partial(messages.next_claim, groups, optimizer, clipping.max_norm, Purpose.NORM)
    return Request(clipping.max_norm, exchange_over(agreement, current, groups[0], claim))


def collect(
    messages: Messages,
    progress: Progress,
    optimizer: Optimizer,
    request: Request | None,
    micro_batches: MicroBatches,
    *,
    divides: bool,
) -> Collection:
    """Return an optimizer's gradients, or the norm that the program has clipped them by.

    Without a request by what a step wants. A failure is told to the other ranks.
    """
    parts = messages.parts
    groups = parts.agreement.usable_groups()
    norm = None if progress.inputs is None else progress.inputs.norm
    has_dropped = micro_batches.dropped > 0 and id(optimizer) not in micro_batches.stepped
    if has_dropped and not micro_batches.kept and progress.stage.is_ready:
        progress.refused = max(progress.refused, Reason.REFUSED)
    try:
        if request is None and parts.clipping.max_norm is None:
            request = UNSCALING if divides else _JUDGING
        elif request is None:
            request = _clipping_of_step(messages, optimizer, divides=divides, has_groups=len(groups) > 0)
        if norm is None:
            gradients = parts.current.adapter.collect(optimizer, request)
        else:
            gradients = _norm_alone(parts, optimizer, norm, divides=request.divides)
        checksum = _comparison(parts, optimizer, groups, gradients) if has_dropped else ""
    except Exception:
        messages.tell_of_failure(optimizer)
        raise
    if has_dropped:
        _forbid_dropped_dtensors(messages, micro_batches, gradients)
    return Collection(gradients, groups or gradients.groups, request.max_norm, checksum)


def _forbid_dropped_dtensors(messages: Messages, micro_batches: MicroBatches, gradients: Collected) -> None:
    """Raise CallOrderError for DTensors of which the last micro-batch, which may reduce them, was dropped."""
    if micro_batches.ends_dropped and micro_batches.kept and gradients.groups:
        wrong_order(DROPPED_DTENSORS, messages.iteration)


def _clipping_of_step(messages: Messages, optimizer: Optimizer, *, divides: bool, has_groups: bool) -> Request:
    """Return the options of a step that unscales and clips the gradients, or has the optimizer unscale them."""
    parts = messages.parts
    is_read = divides and not has_groups and parts.current.adapter.reads_verdict(optimizer)
    return clipping_request(messages, optimizer, parts.clipping)._replace(divides=divides, is_read=is_read)


def _norm_alone(parts: Collaborators, optimizer: Optimizer, norm: Array | float, *, divides: bool) -> UserNorm:
    """Return a norm that stands for gradients that are not looked at."""
    with reading("norm"):
        norm = value_of(norm)
    adapter = parts.current.adapter
    groups = adapter.groups_of(optimizer)
    is_read = parts.agreement.is_alone and not groups and divides and adapter.reads_verdict(optimizer)
    return UserNorm(norm, lambda: example(parts, optimizer), groups, is_read=is_read)


def _comparison(parts: Collaborators, optimizer: Optimizer, groups: Sequence[Collectives], gradients: Collected) -> str:
    """Return a checksum of gradients that all ranks hold, unless what averages them was left out; empty for others."""
    if not groups or gradients.groups or parts.clipping.norm_over == "group":
        return ""
    return (
        f"{_checksum(parts.current, optimizer):08x} of the gradients, which differ: a micro-batch was dropped, and "
        f"perhaps the one that averages them, as the last does under no_sync(); make a backward pass in its place, of "
        f'zeros. Of parts of gradients say max_norm= with norm_over="group"'
    )


def _checksum(current: CurrentScale, optimizer: Optimizer) -> int:
    """Return a checksum of an optimizer's gradients on this rank."""
    located = [one.array for one in named_gradients(optimizer) if is_array_api_obj(one.array)]
    arrays = [part for one in located for part in _real_parts(current.backend_for(one), one)]
    backend = current.backend_for(arrays[0]) if arrays else current.adapter
    sums = [sum_of_bits(one, backend.bits(one)) for one in arrays]
    stack = [backend.move(one, arrays[0]) for one in sums if one is not None]
    numbers = backend.read(array_namespace(stack[0]).stack(stack)) if stack else []
    others = [array for array, one in zip(arrays, sums, strict=True) if one is None]
    summaries = backend.read_summaries(others)[0] if others else []
    return zlib.crc32(repr((numbers, summaries)).encode())


def _real_parts(backend: Backend, gradient: Array) -> list[Array]:
    """Return the real arrays that tell a gradient from others: its values, and where a sparse one has them."""
    arrays = [x for x in (backend.values_of(gradient), backend.places_of(gradient)) if x is not None and is_floating(x)]
    return [widened(x) if backend.bits(x) is None else x for each in arrays for x in real_parts(each)]


def example(parts: Collaborators, optimizer: Optimizer) -> Array | None:
    """Return one of an optimizer's gradients, beside which a state can be; None without any."""
    return parts.current.adapter.collect(optimizer, UNSCALING).like
