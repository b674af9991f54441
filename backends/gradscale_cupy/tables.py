"""Tables that are kept: for as long as the same memory comes again, and for good once a CUDA graph reads them."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Sequence
from typing import Any

import cupy

from gradscale.errors import CallOrderError, InvalidValueError
from gradscale_cupy.launch import Prepared, prepare
from gradscale_cupy.plan import Arrays, require_aligned, require_disjoint

__all__ = ["MOST_PLANS", "Entry", "Tables"]

Array = Any

MOST_PLANS = 32
"""Sets of arrays whose tables are kept: gradients of several optimizers, and of the iterations before, whose memory
comes back from CuPy's pool."""

# For thousands of arrays these attributes are most of what the host does.
_address = operator.attrgetter("data.ptr")
_kind = operator.attrgetter("shape", "strides", "dtype")


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """Tables that are kept.

    Attributes
    ----------
    prepared : Prepared
    captured : pair of sequences of arrays, or None
        The sources and targets, where a captured graph reads and writes their memory.
    used : int
        The later the tables were used last, the larger.
    """

    prepared: Prepared
    captured: tuple[Sequence[Array], Sequence[Array]] | None = None
    used: int = 0


class Tables:
    """The tables of one adapter; threads may share it.

    Attributes
    ----------
    entries : dict
        What is kept, by the device, the stream, and where the arrays lie.
    """

    def __init__(self) -> None:
        self.entries: dict[Any, Entry] = {}
        self._lock = threading.RLock()
        self._uses = itertools.count()

    def of(self, sources: Sequence[Array], targets: Sequence[Array], kind: str) -> Prepared:
        """Return the tables of arrays of the current device: kept ones, where each lies where one has lain before.

        Parameters
        ----------
        sources, targets : sequence of arrays
            Pair by pair; the same for work in place.
        kind : {"unscale", "square", "clip"}
            Which kernels are to be launched.

        Raises
        ------
        InvalidValueError
            When arrays to be written share memory, or are on other devices than their gradients.
        CallOrderError
            When the current stream is capturing a CUDA graph and has not done the same before.
        """
        in_place = len(sources) == len(targets) and all(map(operator.is_, sources, targets))
        both = sources if in_place else (*sources, *targets)
        arrays = Arrays.of(map(_address, both), map(_kind, both), len(both))
        stream = cupy.cuda.get_current_stream()
        # An address may have been another device's before; and memory of one stream's pool is not another stream's.
        key = (cupy.cuda.Device().id, stream.ptr, in_place, arrays.key)
        is_capturing = stream.is_capturing()
        with self._lock:
            # Thousands of addresses are looked up once.
            entry = self.entries.get(key)
            if is_capturing and (entry is None or kind not in entry.prepared.launched):
                msg = (
                    f"these {len(sources)} arrays must be unscaled once before a CUDA graph captures it, and clipped "
                    f"if the graph does: got arrays or kernels that are not on the device yet. Run the iteration once "
                    f"on the same stream, with the same gradients and, for masters, the same out="
                )
                raise CallOrderError(msg)
            if entry is None:
                entry = Entry(_prepared(sources, targets, arrays))
                self._make_room()
                self.entries[key] = entry
            entry.prepared.launched.add(kind)
            entry.used = next(self._uses)
            # What is captured once more is the same memory, which a first graph may hold by these alone.
            if is_capturing and entry.captured is None:
                entry.captured = sources, targets
        return entry.prepared

    def _make_room(self) -> None:
        """Forget the tables that were used longest ago, but for those that graphs read."""
        free = [key for key, entry in self.entries.items() if entry.captured is None]
        if len(free) >= MOST_PLANS:
            del self.entries[min(free, key=lambda key: self.entries[key].used)]


def _prepared(sources: Sequence[Array], targets: Sequence[Array], arrays: Arrays) -> Prepared:
    if len(arrays.addresses) == len(sources):
        read = written = arrays
    else:
        read, written = arrays[: len(sources)], arrays[len(sources) :]
        # A kernel may not reach the memory of another device.
        for source, target in zip(sources, targets, strict=True):
            if source.data.device_id != target.data.device_id:
                msg = (
                    f"a gradient must be on the device of the array it is written to, got one of shape {source.shape} "
                    f"on {source.device!r} for an array on {target.device!r}: copy it there, with cupy.asarray in the "
                    f"context of that device"
                )
                raise InvalidValueError(msg)
    require_aligned(arrays)
    require_disjoint(read, written)
    return prepare(read, written)
