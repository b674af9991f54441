"""NumpyBackend: NumPy arrays, in place and into master gradients."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import NDArray

from gradscale import Backend, ScaleState
from gradscale.core import arithmetic
from gradscale.core.aliasing import Span, overlaps_itself, require_disjoint, span
from gradscale.core.arithmetic import check_real_dtype
from gradscale.errors import InvalidValueError
from gradscale_numpy import kernels, summaries

__all__ = ["NumpyBackend"]

NumpyArray = NDArray[Any]
UnscaleAll = Callable[[Sequence[NumpyArray], Sequence[NumpyArray], np.float32], int]
UnscaleOwners = Callable[[Sequence[Any], np.float32], int | None]

_SINGLE = np.dtype(np.float32)
_EXAMPLE = np.zeros((), dtype=np.float32)

_FAST_VARIABLE = "GRADSCALE_NUMPY_FAST"


class NumpyBackend(Backend):
    """Fused unscale for NumPy arrays.

    Parameters
    ----------
    fast : bool, optional
        Whether to use the kernels compiled by numba (extra ``fast``); they are compiled at the
        first call and cached on disk. Default: where numba is installed, unless the environment says
        ``GRADSCALE_NUMPY_FAST=0``. Both give the same bits.

    Examples
    --------
    >>> import gradscale, gradscale_numpy, numpy as np
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(like=np.float32(0.0))
    >>> backend = gradscale_numpy.NumpyBackend(fast=False)
    >>> backend.unscale([np.float16([2.0, 4.0])], state, dtype=np.float32)
    ([array([0.5, 1. ], dtype=float32)], array(0, dtype=int32))
    """

    name = "numpy"
    computes_on_host = True

    def __init__(self, fast: bool | None = None) -> None:
        self._fast = fast

    @functools.cached_property
    def is_compiled(self) -> bool:
        """Whether the kernels are those compiled by numba."""
        if self._fast is not None:
            return self._fast
        return os.environ.get(_FAST_VARIABLE, "1") != "0" and importlib.util.find_spec("numba") is not None

    @functools.cached_property
    def _unscale_all(self) -> UnscaleAll:
        if self.is_compiled:
            from gradscale_numpy import fast as compiled

            return compiled.unscale_all
        return kernels.unscale_all

    @functools.cached_property
    def _unscale_owners(self) -> UnscaleOwners:
        if self.is_compiled:
            from gradscale_numpy import fast as compiled

            return compiled.unscale_owners
        return kernels.unscale_owners

    @functools.cached_property
    def _summarize_all(self) -> Callable[[Sequence[NumpyArray]], list[int]]:
        if not self.is_compiled:
            return summaries.summarize_all
        from gradscale_numpy import fast as compiled

        return functools.partial(summaries.summarize_all, count=compiled.count_words)

    def __reduce__(self) -> tuple[type[NumpyBackend], tuple[bool | None]]:
        return type(self), (self._fast,)

    def read(self, x: NumpyArray, /) -> list[int]:
        """Return a 1-d int32 array as Python ints."""
        values: list[int] = x.tolist()
        return values

    def placement(self, like: NumpyArray, /) -> str:  # noqa: ARG002
        """Return the one device that NumPy has."""
        return "cpu"

    def example(self) -> NumpyArray:
        """Return a 0-d float32 array."""
        return np.zeros((), dtype=np.float32)

    def bits(self, x: NumpyArray, /) -> NumpyArray | None:
        """Return the bits of real values in any byte order as signed integers; None for float8 and long double."""
        return summaries.bits(np.asarray(x))

    def fingerprint(self, state: ScaleState, /) -> NumpyArray:
        """Return a state as a 1-d int32 array: the bits of the scale, then each tracker."""
        return np.array([self.bits(state.scale), *state[1:]], dtype=np.int32)

    def summarize(self, arrays: Sequence[NumpyArray], /) -> NumpyArray:
        """Return what :func:`gradscale.core.summaries.summarize_arrays` does, from the bits of the arrays.

        Parameters
        ----------
        arrays : sequence of arrays
            Of the dtypes that ``unscale`` takes; any strides, any byte order. Left alone.
        """
        return np.array(self._summarize_all(arrays), dtype=np.int32)

    def scale(self, outputs: Sequence[NumpyArray], state: ScaleState, /) -> list[NumpyArray]:
        """Multiply arrays by the scale: new arrays of the same dtypes, but float32 for 0-d ones of half precision."""
        if isinstance(state.scale, float):
            if len(outputs) == 1 and _is_single_loss(outputs[0]):
                # In a third of the time: the product of two float32 is exact in float64.
                return [np.asarray(outputs[0].item() * state.scale, _SINGLE)]
            factor = _as_factor(state.scale)
        else:
            factor = state.scale
        return [
            np.asarray(np.multiply(x, factor)) if x.dtype is _SINGLE else arithmetic.scaled(x, factor) for x in outputs
        ]

    def unscale_at_once(self, leaves: Sequence[Any], state: ScaleState, /) -> int | None:
        """Unscale contiguous arrays that own their memory, each once; None where there is anything else."""
        # Another way to unscale, of a class that derives from this one, is not passed by.
        if type(self).unscale is not NumpyBackend.unscale:
            return None
        return self._unscale_owners(leaves, _inverse_of(state.scale))

    def unscale(
        self,
        grads: Sequence[NumpyArray],
        state: ScaleState,
        /,
        *,
        dtype: Any = None,
        out: Sequence[NumpyArray] | None = None,
    ) -> tuple[Sequence[NumpyArray], NumpyArray | int]:
        """Divide arrays by the scale and count those with a non-finite value.

        Parameters
        ----------
        grads : sequence of arrays
            float16, float32, float64, longdouble, complex, and the dtypes of ml_dtypes; any strides, any byte order.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new arrays.
        out : sequence of arrays, optional
            Arrays to write to instead, of equal shapes; the gradients themselves for unscaling in place. NumPy's
            scalars, which cannot be written, come back as new arrays.

        Returns
        -------
        arrays : sequence of arrays
            ``out``, or new ones.
        nonfinite : array or int
            0-d int32; an int for a state of numbers.

        Raises
        ------
        InvalidValueError
            When an array to be written is read-only, or shares memory with itself or another one; nothing is modified.
        """
        inverse = _inverse_of(float(state.scale))
        count = self._unscale_owners(grads, inverse) if out is grads else None
        unscaled, nonfinite = self._unscale_into(grads, inverse, dtype, out) if count is None else (grads, count)
        return unscaled, nonfinite if isinstance(state.scale, float) else np.asarray(nonfinite, dtype=np.int32)

    def _unscale_into(
        self, grads: Sequence[NumpyArray], inverse: np.float32, dtype: Any, out: Sequence[NumpyArray] | None
    ) -> tuple[Sequence[NumpyArray], int]:
        """Unscale arrays into others, or into themselves, having looked at each."""
        if out is None:
            check_real_dtype(_EXAMPLE, dtype)
            sources = [np.asarray(grad) for grad in grads]
            targets = [np.empty_like(source, dtype=_stored_dtype(source, dtype)) for source in sources]
            returned = targets
        else:
            _require_disjoint(grads, out)
            targets = [_writable(index, target) for index, target in enumerate(out)]
            # The kernels see by identity that they overwrite.
            sources = [
                target if grad is given and not isinstance(grad, np.generic) else np.asarray(grad)
                for grad, given, target in zip(grads, out, targets, strict=True)
            ]
            returned = [
                target if isinstance(given, np.generic) else given for given, target in zip(out, targets, strict=True)
            ]
        return returned, self._unscale_all(sources, targets, inverse)

    def unscale_with_squares(
        self,
        grads: Sequence[NumpyArray],
        state: ScaleState,
        /,
        *,
        dtype: Any = None,
        out: Sequence[NumpyArray] | None = None,
    ) -> tuple[Sequence[NumpyArray], NumpyArray | int, NumpyArray]:
        """Do what ``unscale`` does, and return the sum of the squares of all unscaled elements, 0-d float64, too."""
        unscaled, nonfinite = self.unscale(grads, state, dtype=dtype, out=out)
        return unscaled, nonfinite, np.asarray(kernels.sum_of_squares([np.asarray(x) for x in unscaled]))

    def multiply_in_place(self, arrays: Sequence[NumpyArray], factor: NumpyArray, /) -> Sequence[NumpyArray]:
        """Multiply arrays that ``unscale`` has returned by a 0-d float32; nothing is written where it is 1."""
        plain = [np.asarray(x) for x in arrays]
        if factor != 1:
            # What unscales multiplies by the reciprocal of the scale.
            self._unscale_all(plain, plain, np.float32(factor))
        return arrays


@functools.lru_cache(maxsize=16)
def _as_factor(scale: float) -> NumpyArray:
    """Return a scale as a 0-d float32, which nobody writes to."""
    return np.asarray(scale, dtype=np.float32)


@functools.lru_cache(maxsize=16)
def _inverse_of(scale: float) -> np.float32:
    return np.float32(1.0 / scale)


def _is_single_loss(x: NumpyArray) -> bool:
    return type(x) is np.ndarray and x.ndim == 0 and x.dtype is _SINGLE


def _require_disjoint(grads: Sequence[NumpyArray], out: Sequence[NumpyArray]) -> None:
    """Refuse arrays that share memory, part of which would be divided twice."""
    arrays = dict(enumerate(out))
    if out is not grads:
        pairs = enumerate(zip(grads, out, strict=True), start=len(out))
        arrays |= {number: grad for number, (grad, target) in pairs if grad is not target}
    spans = [
        (_span(array), number) for number, array in arrays.items() if not isinstance(array, np.generic) and array.size
    ]
    require_disjoint(spans, lambda one, other: _share_memory(arrays[one], arrays[other]), len(out))


def _span(array: NumpyArray) -> Span:
    start: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    return span(start, array.shape, array.strides, array.itemsize)


def _share_memory(a: NumpyArray, b: NumpyArray) -> bool:
    """Tell whether two arrays share an element; where that is too hard to tell, that they do."""
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _writable(index: int, array: NumpyArray) -> NumpyArray:
    """Return what to write to for an array: itself, as a plain ndarray; a new one for a scalar."""
    if type(array) is np.ndarray and array.flags.carray:
        return array
    if isinstance(array, np.generic):
        return np.empty((), dtype=array.dtype)
    if not array.flags.writeable:
        msg = (
            f"gradient {index}, shape {array.shape}, {array.dtype}, is read-only and cannot be unscaled in place: "
            f"assign a copy (grad.copy()), or take new arrays from gradscale.unscale(grads, state)"
        )
        raise InvalidValueError(msg)
    if overlaps_itself(array.shape, array.strides, array.itemsize):
        msg = (
            f"gradient {index}, shape {array.shape}, strides {array.strides}, overlaps itself and cannot be unscaled "
            f"in place: assign a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
    return array.view(np.ndarray)


def _stored_dtype(grad: NumpyArray, dtype: Any) -> Any:
    return grad.dtype if dtype is None or grad.dtype.kind == "c" else np.dtype(dtype)
