"""NumpyBackend: NumPy arrays, in place and into master gradients."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscale import ScaleState
from gradscale.arithmetic import check_real_dtype
from gradscale.errors import InvalidValueError

__all__ = ["NumpyBackend"]

NumpyArray = NDArray[Any]
UnscaleAll = Callable[[Sequence[NumpyArray], Sequence[NumpyArray], np.float32], int]

_FAST_VARIABLE = "GRADSCALE_NUMPY_FAST"


class NumpyBackend:
    """Fused unscale for NumPy arrays.

    Parameters
    ----------
    fast : bool, optional
        Whether to use the kernels compiled by numba (extra ``fast``); their first call compiles for a few seconds, and
        caches on disk. Default: where numba is installed, unless the environment says ``GRADSCALE_NUMPY_FAST=0``.
        Both give the same bits.
    """

    name = "numpy"

    def __init__(self, fast: bool | None = None) -> None:
        self._fast = fast

    @functools.cached_property
    def _unscale_all(self) -> UnscaleAll:
        fast = self._fast
        if fast is None:
            fast = os.environ.get(_FAST_VARIABLE, "1") != "0" and importlib.util.find_spec("numba") is not None
        if fast:
            from gradscale_numpy import fast as compiled

            return compiled.unscale_all
        from gradscale_numpy import kernels

        return kernels.unscale_all

    def __reduce__(self) -> tuple[type[NumpyBackend], tuple[bool | None]]:
        return type(self), (self._fast,)

    def read(self, x: NumpyArray, /) -> list[int]:
        """Return a 1-d int32 array as Python ints."""
        values: list[int] = x.tolist()
        return values

    def example(self) -> NumpyArray:
        """Return a 0-d float32 array."""
        return np.zeros((), dtype=np.float32)

    def fingerprint(self, state: ScaleState, /) -> NumpyArray:
        """Return a state as a 1-d int32 array: the bits of the scale, then each tracker."""
        return np.array([np.asarray(state.scale).view(np.int32), *state[1:]], dtype=np.int32)

    def unscale(
        self, grads: Sequence[NumpyArray], state: ScaleState, /, *, dtype: Any = None, in_place: bool = False
    ) -> tuple[list[NumpyArray], NumpyArray]:
        """Divide arrays by the scale and count those with a non-finite value.

        Parameters
        ----------
        grads : sequence of arrays
            float16, float32, float64, longdouble, complex, and the dtypes of ml_dtypes; any strides, any byte order.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones, as new arrays.
        in_place : bool, default False
            Overwrite the given arrays; NumPy's scalars, which cannot be written, come back as new arrays.

        Returns
        -------
        arrays : list of arrays
            The given ones if ``in_place``.
        nonfinite : array
            0-d int32.

        Raises
        ------
        InvalidValueError
            When an array is to be overwritten and is read-only or overlaps itself; nothing is modified.
        """
        check_real_dtype(state.scale, dtype)
        if in_place:
            outs = [_writable(index, grad) for index, grad in enumerate(grads)]
            # The kernels see by identity that they may overwrite.
            sources = [_scalar_or(grad, out) for grad, out in zip(grads, outs, strict=True)]
            returned = [grad if source is out else out for grad, source, out in zip(grads, sources, outs, strict=True)]
        else:
            sources = [np.asarray(grad) for grad in grads]
            outs = [np.empty_like(source, dtype=_stored_dtype(source, dtype)) for source in sources]
            returned = outs
        inverse = np.float32(1.0 / float(state.scale))
        count = self._unscale_all(sources, outs, inverse)
        return returned, np.asarray(count, dtype=np.int32)


def _writable(index: int, grad: NumpyArray) -> NumpyArray:
    """Return what to write to for an array that is to be overwritten: itself, as a plain ndarray."""
    if type(grad) is np.ndarray and grad.flags.carray:
        return grad
    if isinstance(grad, np.generic):
        return np.empty((), dtype=grad.dtype)
    if not grad.flags.writeable:
        msg = (
            f"gradient {index}, shape {grad.shape}, {grad.dtype}, is read-only and cannot be unscaled in place: assign "
            f"a copy (grad.copy()), or take new arrays from gradscale.unscale(grads, state)"
        )
        raise InvalidValueError(msg)
    if any(stride == 0 and length > 1 for stride, length in zip(grad.strides, grad.shape, strict=True)) and grad.size:
        msg = (
            f"gradient {index}, shape {grad.shape}, strides {grad.strides}, overlaps itself and cannot be unscaled in "
            f"place: assign a copy (grad.copy())"
        )
        raise InvalidValueError(msg)
    return grad.view(np.ndarray)


def _scalar_or(grad: NumpyArray, out: NumpyArray) -> NumpyArray:
    """Return the source for an array: the one that is overwritten, or a scalar's value."""
    return np.asarray(grad) if isinstance(grad, np.generic) else out


def _stored_dtype(grad: NumpyArray, dtype: Any) -> Any:
    return grad.dtype if dtype is None or grad.dtype.kind == "c" else np.dtype(dtype)
