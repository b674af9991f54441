"""CupyBackend: CuPy arrays, in place and into master gradients, in one launch for each pair of dtypes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import cupy

from gradscale import ScaleState
from gradscale.arithmetic import check_real_dtype, unscale_arrays
from gradscale.errors import CallOrderError, InvalidValueError
from gradscale_cupy.launch import Prepared, prepare, run
from gradscale_cupy.plan import layout_of, require_disjoint

__all__ = ["CupyBackend", "backend"]

Array = Any

# Sets of arrays whose tables are kept: gradients of several optimizers, and of the iterations before, whose memory
# comes back from CuPy's pool.
_MOST_PLANS = 32


class CupyBackend:
    """Fused unscale for CuPy arrays: one launch for each device and pair of dtypes, and no wait for a device.

    The tables of addresses are kept for as long as the same memory comes again. Those that a CUDA graph has captured
    are kept for good, and with them the arrays.
    """

    name = "cupy"

    def __init__(self) -> None:
        self._plans: OrderedDict[Any, Prepared] = OrderedDict()
        # What captured graphs read.
        self._captured: dict[Any, tuple[Prepared, Sequence[Array], Sequence[Array]]] = {}

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: waits for the current stream."""
        values: list[int] = x.get().tolist()
        return values

    def placement(self, like: Array, /) -> Any:
        """Return the array's device."""
        return like.device

    def example(self) -> Array:
        """Return a 0-d float32 array on the current device."""
        return cupy.zeros((), dtype=cupy.float32)

    def fingerprint(self, state: ScaleState, /) -> Array:
        """Return a state as a 1-d int32 array: the bits of the scale, then each tracker."""
        return cupy.stack([state.scale.view(cupy.int32), *state[1:]])

    def unscale(
        self,
        grads: Sequence[Array],
        state: ScaleState,
        /,
        *,
        dtype: Any = None,
        out: Sequence[Array] | None = None,
    ) -> tuple[Sequence[Array], Array]:
        """Divide arrays by the scale and tell whether any value is not finite afterwards.

        Parameters
        ----------
        grads : sequence of arrays
            float16, bfloat16, float32, float64, complex; any strides, on any devices of this process.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new arrays.
        out : sequence of arrays, optional
            Arrays to write to instead, of equal shapes; the gradients themselves for unscaling in place.

        Returns
        -------
        arrays : sequence of arrays
            ``out``, or new ones.
        nonfinite : array
            0-d int32 on the state's device: for each device 1 where any array holds something not finite. No host
            read; on the current streams of the devices.

        Raises
        ------
        InvalidValueError
            When arrays to be written share memory, or are on other devices than their gradients; nothing is modified.
        CallOrderError
            When a stream is capturing a CUDA graph and these arrays were not unscaled before.
        """
        if out is None:
            check_real_dtype(state.scale, dtype)
            targets: Sequence[Array] = [_empty_for(grad, dtype) for grad in grads]
        else:
            targets = out
        home = state.scale.device
        by_device: dict[Any, list[int]] = {}
        for index, grad in enumerate(grads):
            by_device.setdefault(grad.device.id, []).append(index)
        with home:
            nonfinite = cupy.zeros((), dtype=cupy.int32)
        for number, indices in by_device.items():
            device = cupy.cuda.Device(number)
            sources, made = [grads[index] for index in indices], [targets[index] for index in indices]
            if number == home.id:
                with device:
                    self._unscale_there(sources, made, state, nonfinite)
                continue
            with device:
                found = cupy.zeros((), dtype=cupy.int32)
                there = ScaleState(_moved(state.scale, device), *state[1:])
                self._unscale_there(sources, made, there, found)
            with home:
                cupy.add(nonfinite, _moved(found, home), out=nonfinite)
        return targets, nonfinite

    def _unscale_there(
        self, sources: Sequence[Array], targets: Sequence[Array], state: ScaleState, nonfinite: Array
    ) -> None:
        """Unscale arrays of the current device into arrays there, and add to a verdict there."""
        prepared = self._prepared(sources, targets)
        run(prepared, state.scale, nonfinite)
        if prepared.others:
            rest = [targets[index] for index in prepared.others]
            made, bad = unscale_arrays([sources[index] for index in prepared.others], state, out=rest)
            for target, values in zip(rest, made, strict=True):
                target[...] = values
            cupy.add(nonfinite, bad, out=nonfinite)

    def _prepared(self, sources: Sequence[Array], targets: Sequence[Array]) -> Prepared:
        """Return the tables of these arrays: kept ones, where each lies where one has lain before."""
        in_place = all(source is target for source, target in zip(sources, targets, strict=True))
        arrays = sources if in_place else (*sources, *targets)
        key = (in_place, *((x.data.ptr, x.shape, x.strides, x.dtype) for x in arrays))
        is_capturing = cupy.cuda.get_current_stream().is_capturing()
        if key in self._captured:
            return self._captured[key][0]
        prepared = self._plans.get(key)
        if prepared is None:
            if is_capturing:
                msg = (
                    f"these {len(sources)} arrays must be unscaled once before a CUDA graph captures it, got arrays "
                    f"whose table of addresses is not on the device: run the iteration once on the same stream, and "
                    f"keep the same gradient arrays"
                )
                raise CallOrderError(msg)
            _require_same_devices(sources, targets)
            layouts = [layout_of(x) for x in sources]
            written = layouts if in_place else [layout_of(x) for x in targets]
            require_disjoint(written)
            prepared = self._plans[key] = prepare(layouts, written)
        self._plans.move_to_end(key)
        if is_capturing:
            self._captured[key] = (self._plans.pop(key), sources, targets)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        return prepared


def _require_same_devices(sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Refuse to write to other devices than the gradients', whose memory a kernel may not reach."""
    for source, target in zip(sources, targets, strict=True):
        if source.device != target.device:
            msg = (
                f"a gradient must be on the device of the array it is written to, got one of shape {source.shape} on "
                f"{source.device!r} for an array on {target.device!r}: copy it there, with cupy.asarray in the context "
                f"of that device"
            )
            raise InvalidValueError(msg)


def _empty_for(grad: Array, dtype: Any) -> Array:
    wanted = grad.dtype if dtype is None or grad.dtype.kind == "c" else dtype
    with grad.device:
        return cupy.empty_like(grad, dtype=wanted)


def _moved(x: Array, device: Any) -> Array:
    """Return a copy of a 0-d array on another device; the streams wait for each other, and not the host."""
    with x.device:
        source_stream = cupy.cuda.get_current_stream()
        written = cupy.cuda.Event(disable_timing=True)
        written.record(source_stream)
    with device:
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(written)
        made = cupy.array(x, copy=True)
        copied = cupy.cuda.Event(disable_timing=True)
        copied.record(stream)
    with x.device:
        # The memory of ``x`` goes back to its stream's pool, and must have been read by then.
        source_stream.wait_event(copied)
    return made


backend = CupyBackend()
