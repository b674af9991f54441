"""CupyBackend: CuPy arrays, in place and into master gradients, in one launch for each pair of dtypes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import cupy

from gradscale import Backend, ScaleState
from gradscale.core.arithmetic import check_real_dtype, multiply_arrays, sum_of_squares, unscale_arrays
from gradscale.core.summaries import layout_of
from gradscale_cupy import launch
from gradscale_cupy.availability import explained
from gradscale_cupy.host import HostCopy, moved, refuse_capture, require_one_capture
from gradscale_cupy.launch import Prepared
from gradscale_cupy.tables import Tables

__all__ = ["CupyBackend", "backend"]

Array = Any

# ``device`` would make an object for each of thousands.
_device_id = operator.attrgetter("data.device_id")


class CupyBackend(Backend):
    """Fused unscale for CuPy arrays: one launch for each device and pair of dtypes, and no wait for a device.

    The state's device is the current one, as CuPy wants it of whatever is computed with; gradients may be on others.

    Attributes
    ----------
    tables : gradscale_cupy.tables.Tables
        Of addresses, kept for as long as the same memory comes again. Those that a CUDA graph has captured are kept
        for good, and with them the arrays.
    """

    name = "cupy"

    def __init__(self) -> None:
        self.tables = Tables()

    def __reduce__(self) -> tuple[type[CupyBackend], tuple[()]]:
        return type(self), ()

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints: waits for the current stream."""
        with explained("the verdict was read"):
            values: list[int] = x.get().tolist()
        return values

    def start_read(self, x: Array, /) -> HostCopy:
        """Begin to copy a 1-d int32 array to the host. See :class:`gradscale_cupy.host.HostCopy`."""
        return HostCopy(x)

    def move(self, x: Array, like: Array, /) -> Array:
        """Return a 0-d array on the device of ``like``; the streams wait for each other, and not the host."""
        return moved(x, like.device)

    def refuse_tracing(self, what: str, /) -> None:
        """Raise CallOrderError while the current stream is capturing a CUDA graph."""
        refuse_capture(what)

    def placement(self, like: Array, /) -> Any:
        """Return the array's device."""
        return like.device

    def example(self) -> Array:
        """Return a 0-d float32 array on the current device."""
        with explained("an array was made on the current device"):
            return cupy.zeros((), dtype=cupy.float32)

    def bits(self, x: Array, /) -> Array | None:
        """Return the bits of real values as signed integers; None for float8."""
        return x.view(f"i{x.dtype.itemsize}") if layout_of(x.dtype) is not None else None

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
            When a stream is capturing a CUDA graph and these arrays were not unscaled before, or those of other devices
            with arrays are not.
        """
        with explained("gradients were unscaled"):
            targets, nonfinite, _ = self._unscale(grads, state, dtype, out, squares=False)
        return targets, nonfinite

    def unscale_with_squares(
        self,
        grads: Sequence[Array],
        state: ScaleState,
        /,
        *,
        dtype: Any = None,
        out: Sequence[Array] | None = None,
    ) -> tuple[Sequence[Array], Array, Array]:
        """Do what ``unscale`` does, and return the sum of the squares of all unscaled elements from the same pass.

        It is 0-d float64 on the state's device; in it the order of the elements depends on how the arrays are aligned,
        and on nothing else.
        """
        with explained("gradients were unscaled"):
            targets, nonfinite, squares = self._unscale(grads, state, dtype, out, squares=True)
        with state.scale.device:
            total = squares[0] if squares else cupy.zeros((), dtype=cupy.float64)
            for more in squares[1:]:
                total = total + more
        return targets, nonfinite, total

    def multiply_in_place(self, arrays: Sequence[Array], factor: Array, /) -> Sequence[Array]:
        """Multiply arrays that ``unscale`` has returned by a 0-d float32 of at most 1.

        One launch for each device and dtype, which writes nothing where the factor is 1. No host read.
        """
        with explained("gradients were clipped"):
            parts = _by_device(arrays)
            require_one_capture([factor.device, *(device for device, _ in parts)])
            for device, indices in parts:
                self._clip_there([arrays[index] for index in indices], factor, device)
        return arrays

    def _clip_there(self, arrays: Sequence[Array], factor: Array, device: Any) -> None:
        there = factor if device == factor.device else moved(factor, device)
        with device:
            prepared = self.tables.of(arrays, arrays, "clip")
            launch.clip(prepared, there)
            rest = [arrays[index] for index in prepared.others]
            for target, values in zip(rest, multiply_arrays(rest, there), strict=True):
                target[...] = values

    def _unscale(
        self, grads: Sequence[Array], state: ScaleState, dtype: Any, out: Sequence[Array] | None, *, squares: bool
    ) -> tuple[Sequence[Array], Array, list[Array]]:
        """Return the arrays, the verdict and, if asked, a sum of squares for each device, on the state's device."""
        if out is None:
            check_real_dtype(state.scale, dtype)
            targets: Sequence[Array] = [_empty_for(grad, dtype) for grad in grads]
        else:
            targets = out
        home = state.scale.device
        sums: list[Array] = []
        kind = "square" if squares else "unscale"
        ready = []
        parts = _by_device(grads)
        require_one_capture([home, *(device for device, _ in parts)])
        for device, indices in parts:
            sources, made = [grads[index] for index in indices], [targets[index] for index in indices]
            with device:
                # What is refused is refused before anything is modified, on any device.
                ready.append((device, sources, made, self.tables.of(sources, made, kind)))
        with home:
            nonfinite = cupy.zeros((), dtype=cupy.int32)
        for device, sources, made, prepared in ready:
            with device:
                total = cupy.empty((), dtype=cupy.float64) if squares else None
                if device == home:
                    _unscale_there(prepared, sources, made, state, nonfinite, total)
                    sums += [] if total is None else [total]
                    continue
                found = cupy.zeros((), dtype=cupy.int32)
                there = ScaleState(moved(state.scale, device), *state[1:])
                _unscale_there(prepared, sources, made, there, found, total)
            with home:
                cupy.add(nonfinite, moved(found, home), out=nonfinite)
            sums += [] if total is None else [moved(total, home)]
        return targets, nonfinite, sums


def _unscale_there(
    prepared: Prepared,
    sources: Sequence[Array],
    targets: Sequence[Array],
    state: ScaleState,
    nonfinite: Array,
    total: Array | None,
) -> None:
    """Unscale arrays of the current device into arrays there, and add to a verdict and a sum of squares there."""
    if total is None:
        launch.unscale(prepared, state.scale, nonfinite)
    else:
        launch.unscale_with_squares(prepared, state.scale, nonfinite, total)
    if prepared.others:
        rest = [targets[index] for index in prepared.others]
        made, bad = unscale_arrays([sources[index] for index in prepared.others], state, out=rest)
        for target, values in zip(rest, made, strict=True):
            target[...] = values
        cupy.add(nonfinite, bad, out=nonfinite)
        if total is not None:
            cupy.add(total, sum_of_squares(rest, total), out=total)


def _by_device(arrays: Sequence[Array]) -> list[tuple[Any, list[int]]]:
    """Return each device with the positions of its arrays."""
    numbers = list(map(_device_id, arrays))
    return [
        (cupy.cuda.Device(number), [index for index, other in enumerate(numbers) if other == number])
        for number in dict.fromkeys(numbers)
    ]


def _empty_for(grad: Array, dtype: Any) -> Array:
    wanted = grad.dtype if dtype is None or grad.dtype.kind == "c" else dtype
    with grad.device:
        return cupy.empty_like(grad, dtype=wanted)


backend = CupyBackend()
