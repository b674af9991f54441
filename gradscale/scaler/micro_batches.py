"""MicroBatches: which of a step's are kept; a checksum of the gradients that ranks then hold."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.arithmetic import Kind, is_floating, kind_of, widened
from gradscale.core.backend import Backend
from gradscale.core.gradients import named_gradients
from gradscale.core.protocols import Optimizer
from gradscale.core.summaries import sum_of_bits
from gradscale.scaler.scale import CurrentScale


class MicroBatches(NamedTuple):
    """The micro-batches of a step, by the answers of ``keeps``."""

    kept: int = 0
    dropped: int = 0
    ends_dropped: bool = False
    """Whether the last one was dropped."""
    stepped: frozenset[int] = frozenset()
    """The ``id()`` of optimizers that were stepped by them in an iteration before."""


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
