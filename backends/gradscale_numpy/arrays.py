"""NumpyBackend: NumPy arrays, in place and into master gradients."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.exceptions import TooHardError
from numpy.typing import DTypeLike, NDArray

from gradscale import Backend, ScaleState
from gradscale.core import arithmetic
from gradscale.core.aliasing import numbered, overlap, overlaps_itself, require_disjoint, span
from gradscale.core.arithmetic import check_real_dtype
from gradscale.core.backend import UNKNOWN
from gradscale.core.summaries import Summary
from gradscale.errors import InvalidValueError, warn_caller
from gradscale_numpy import kernels

NumpyArray = NDArray[Any]
_Arrays: TypeAlias = Sequence[NumpyArray]
UnscaleAll = Callable[[_Arrays, _Arrays, np.float32], int]

_SINGLE = np.dtype(np.float32)

_ONLY_ARRAYS = frozenset([np.ndarray])
# C-contiguous, Fortran-contiguous or not, the owner of its memory, aligned and writable.
_OWN_AND_PLAIN = frozenset(0x0001 | fortran | 0x0004 | 0x0100 | 0x0400 for fortran in (0, 0x0002))
_item = operator.methodcaller("item")
_flags = operator.attrgetter("flags.num")

_FAST_VARIABLE = "GRADSCALE_NUMPY_FAST"


class NumpyBackend(Backend):
    """Fused unscale for NumPy arrays.

    Parameters
    ----------
    fast : bool, optional
        Whether to use the kernels compiled by numba (extra ``fast``) for float16, bfloat16 and float32; they are
        compiled at the first call and cached on disk. Default: if numba is installed, unless the environment says
        ``GRADSCALE_NUMPY_FAST=0``. Under ``NUMBA_DISABLE_JIT=1`` they are never used. Both give the same bits, but for
        those of a NaN.

    Examples
    --------
    >>> import gradscale, gradscale_numpy, numpy as np
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(like=np.float32(0.0))
    >>> backend = gradscale_numpy.NumpyBackend(fast=False)
    >>> backend.unscale([np.float16([2.0, 4.0])], state, dtype=np.float32)
    ([array([0.5, 1. ], dtype=float32)], array(0, dtype=int32))
    """

    name = "numpy"
    # The verdict reports a norm that overflows, also where NumPy's errors are set to raise.
    clip_factor = np.errstate(all="ignore")(Backend.clip_factor)

    def __init__(self, fast: bool | None = None) -> None:
        self._fast = fast

    @functools.cached_property
    def _unscale_all(self) -> UnscaleAll:
        is_wanted = os.environ.get(_FAST_VARIABLE, "1") != "0" and importlib.util.find_spec("numba") is not None
        if is_wanted if self._fast is None else self._fast:
            try:
                from gradscale_numpy import fast as compiled
            except Exception as error:
                if self._fast:
                    raise
                warn_caller(f"numba cannot be imported, so that NumPy alone unscales, which is slower: {error}")
            else:
                if compiled.is_enabled():
                    return compiled.unscale_all
        return kernels.unscale_all

    def __reduce__(self) -> tuple[type[NumpyBackend], tuple[bool | None]]:
        return type(self), (self._fast,)

    def example(self) -> NumpyArray:
        """Return a 0-d float32 array."""
        return np.zeros((), dtype=np.float32)

    def peek(self, arrays: _Arrays, /) -> list[Any]:
        """Return the numbers in 0-d arrays."""
        return list(map(_item, arrays))

    def integers(self, values: Sequence[int], like: NumpyArray, /) -> NumpyArray:  # noqa: ARG002
        """Return Python ints as a 1-d int32 array."""
        return np.array(values, np.int32)

    def with_numbers(
        self, state: ScaleState, numbers: Sequence[float | None], before: Sequence[float | None] = UNKNOWN
    ) -> ScaleState:
        """Return a state with its fields replaced by numbers, but where they are equal to those of before, or None."""
        fields = zip(state, numbers, before, strict=True)
        return ScaleState(*[x if number == old else np.array(number, x.dtype) for x, number, old in fields])

    def bits(self, x: NumpyArray, /) -> NumpyArray | None:
        """Return the bits of real values in any byte order as signed integers; None for float8 and long double."""
        return kernels.bits(np.asarray(x))

    def read_summaries(self, arrays: _Arrays, others: _Arrays = ()) -> tuple[list[Summary], list[list[int]]]:
        """Summarize arrays from their bits, and read others, 1-d int32."""
        return [kernels.summary_of(np.asarray(x)) for x in arrays], list(map(self.read, others))

    def scale(self, outputs: _Arrays, state: ScaleState, /) -> list[NumpyArray]:
        """Multiply arrays by the scale: new arrays of the same dtypes, but float32 for 0-d ones of half precision."""
        factor = np.asarray(state.scale, _SINGLE)
        return [
            np.asarray(np.multiply(x, factor)) if x.dtype is _SINGLE else arithmetic.scaled(x, factor) for x in outputs
        ]

    def unscale(
        self, grads: _Arrays, state: ScaleState, /, *, dtype: DTypeLike | None = None, out: _Arrays | None = None
    ) -> tuple[_Arrays, NumpyArray]:
        """Divide arrays by the scale and count those with a non-finite value, as :meth:`gradscale.Backend.unscale`.

        Arrays may have any strides, any byte order, and any floating or complex dtype of NumPy or ml_dtypes; NumPy's
        scalars, which cannot be written, come back as new arrays. InvalidValueError if an array of ``out`` is
        read-only, or shares memory with itself or another one; nothing is modified then.
        """
        scale = float(state.scale)
        # A policy of the program's may give 0, by which no gradient is finite.
        inverse = np.float32(1.0 / scale if scale else np.inf)
        sources, targets, returned = grads, grads, grads
        if out is None:
            check_real_dtype(self.example(), dtype)
            sources = [np.asarray(grad) for grad in grads]
            returned = targets = [np.empty_like(x, dtype=None if x.dtype.kind == "c" else dtype) for x in sources]
        elif out is not grads or not _own_their_memory(grads):
            _forbid_shared_memory(grads, out)
            targets = [_writable(index, target) for index, target in enumerate(out)]
            # The kernels see by identity that they overwrite.
            sources = [
                target if grad is array and not isinstance(grad, np.generic) else np.asarray(grad)
                for grad, array, target in zip(grads, out, targets, strict=True)
            ]
            returned = [
                target if isinstance(array, np.generic) else array for array, target in zip(out, targets, strict=True)
            ]
        nonfinite = self._unscale_all(sources, targets, inverse)
        return returned, np.asarray(nonfinite, dtype=np.int32)

    def sum_of_squares(self, arrays: _Arrays, like: NumpyArray, /) -> NumpyArray:  # noqa: ARG002
        """Return the sum of the squares of all elements, 0-d float64."""
        return np.asarray(kernels.squared_norm([np.asarray(x) for x in arrays]))

    def multiply_in_place(self, arrays: _Arrays, factor: NumpyArray, /) -> _Arrays:
        """Multiply arrays that ``unscale`` has returned by a 0-d float32; nothing is written if it is 1."""
        if factor != 1:
            plain = [np.asarray(x) for x in arrays]
            # One list says that these arrays are contiguous.
            self._unscale_all(plain, plain if _own_their_memory(plain) else [*plain], np.float32(factor))
        return arrays


def _own_their_memory(arrays: _Arrays) -> bool:
    """Tell quickly whether all are plain arrays that own their memory, each once: then no two share any."""
    is_owner = _ONLY_ARRAYS.issuperset(map(type, arrays)) and _OWN_AND_PLAIN.issuperset(map(_flags, arrays))
    return is_owner and len(set(map(id, arrays))) == len(arrays)


def _forbid_shared_memory(grads: _Arrays, out: _Arrays) -> None:
    """Raise for arrays that share memory, part of which would be divided twice."""
    arrays = numbered(grads, out)
    spans = [
        (span(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize), number)
        for number, array in arrays.items()
        if not isinstance(array, np.generic) and array.size
    ]
    require_disjoint(spans, lambda one, other: _share_memory(arrays[one], arrays[other]), len(out))


def _share_memory(a: NumpyArray, b: NumpyArray) -> bool:
    """Tell whether two arrays share an element; True if that is too hard to tell."""
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except TooHardError:
        return True


def _writable(index: int, array: NumpyArray) -> NumpyArray:
    """Return the plain ndarray to write to for an array: of its own memory; a new one for a scalar."""
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
        raise overlap(index, array.shape, array.strides)
    return array.view(np.ndarray)
