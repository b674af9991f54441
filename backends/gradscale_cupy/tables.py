"""Tables that are kept: for as long as the same memory comes again, and for good once a CUDA graph reads them."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import cupy

from gradscale.errors import CallOrderError, InvalidValueError
from gradscale_cupy.launch import Prepared, prepare
from gradscale_cupy.plan import layout_of, require_disjoint

__all__ = ["MOST_PLANS", "Tables"]

Array = Any

MOST_PLANS = 32
"""Sets of arrays whose tables are kept: gradients of several optimizers, and of the iterations before, whose memory
comes back from CuPy's pool."""

# For thousands of arrays these attributes are most of what the host does; ``device`` would make an object each time.
_layout_key = operator.attrgetter("data.ptr", "shape", "strides", "dtype")


class Tables:
    """The tables of one adapter; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._plans: OrderedDict[Any, Prepared] = OrderedDict()
        # What captured graphs read.
        self._captured: dict[Any, tuple[Prepared, Sequence[Array], Sequence[Array]]] = {}

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
        in_place = all(source is target for source, target in zip(sources, targets, strict=True))
        arrays = sources if in_place else (*sources, *targets)
        stream = cupy.cuda.get_current_stream()
        # An address may have been another device's before; and memory of one stream's pool is not another stream's.
        keys = list(map(_layout_key, arrays))
        key = (cupy.cuda.Device().id, stream.ptr, in_place, *keys)
        is_capturing = stream.is_capturing()
        with self._lock:
            prepared = self._captured[key][0] if key in self._captured else self._plans.get(key)
            if is_capturing and (prepared is None or kind not in prepared.launched):
                msg = (
                    f"these {len(sources)} arrays must be unscaled once before a CUDA graph captures it, and clipped "
                    f"if the graph does: got arrays or kernels that are not on the device yet. Run the iteration once "
                    f"on the same stream, with the same gradients and, for masters, the same out="
                )
                raise CallOrderError(msg)
            if prepared is None:
                prepared = self._plans[key] = _prepared(sources, targets, keys)
            prepared.launched.add(kind)
            if key in self._plans:
                self._plans.move_to_end(key)
                if is_capturing:
                    self._captured[key] = (self._plans.pop(key), sources, targets)
            if not is_capturing and len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)
        return prepared


def _prepared(sources: Sequence[Array], targets: Sequence[Array], keys: Sequence[Any]) -> Prepared:
    in_place = len(keys) == len(sources)
    # A kernel may not reach the memory of another device.
    for source, target in () if in_place else zip(sources, targets, strict=True):
        if source.data.device_id != target.data.device_id:
            msg = (
                f"a gradient must be on the device of the array it is written to, got one of shape {source.shape} on "
                f"{source.device!r} for an array on {target.device!r}: copy it there, with cupy.asarray in the context "
                f"of that device"
            )
            raise InvalidValueError(msg)
    layouts = list(itertools.starmap(layout_of, keys))
    read, written = (layouts, layouts) if in_place else (layouts[: len(sources)], layouts[len(sources) :])
    require_disjoint(read, written)
    return prepare(read, written)
