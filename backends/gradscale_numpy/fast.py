"""Unscale and judge NumPy arrays of float16, bfloat16 and float32 in one pass, by loops that Numba compiles.

They give the same bits as ``kernels``, which serves all other arrays. NumPy has no vector instructions for the first
two, and passes over each array of float32 several times.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscale.extras import needs
from gradscale_numpy import kernels

with needs("gradscale_numpy.fast", "fast"):
    import numba

Array = NDArray[Any]

# Arrays per call of a compiled loop: a call takes longer than a small array.
_TOGETHER = 32

_ONLY_SINGLES = frozenset([np.dtype(np.float32)])
_dtype = operator.attrgetter("dtype")

_f4 = np.float32
_u2 = np.uint16
_u4 = np.uint32
_Halves, _Singles = numba.uint16[::1], numba.float32[::1]
_ReadHalves = numba.types.Array(numba.uint16, 1, "C", readonly=True)

# Compiled as a part of the loops that call them; no fast-math, which assumes that there are no infinities and NaNs.
_inner = numba.njit(nogil=True)


def _compiled(*types: object) -> Callable[[Callable[..., Any]], Callable[[], Callable[..., Any]]]:
    """Make a function that returns a loop over arrays of some types, compiled once, and kept on disk if possible."""

    def decorate(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
        @functools.cache
        def loop() -> Callable[..., Any]:
            try:
                return numba.njit(types, cache=True, nogil=True)(function)
            except Exception:
                # There is no folder for it, or what is in it cannot be read or written.
                return numba.njit(types, nogil=True)(function)

        return loop

    return decorate


def is_enabled() -> bool:
    """Return whether Numba compiles at all, which ``NUMBA_DISABLE_JIT=1`` prevents."""
    return hasattr(_half_to_single, "py_func")


@_inner
def _half_to_single(half: np.uint16) -> np.float32:
    magnitude = _u4(half) & _u4(0x7FFF)
    subnormal = _f4(_f4(np.int32(magnitude)) * _f4(2.0**-24)).view(_u4)
    normal = _u4((magnitude << _u4(13)) + _u4(0x38000000))
    special = _u4((magnitude << _u4(13)) | _u4(0x7F800000))
    finite = subnormal if magnitude < _u4(0x0400) else normal
    bits = finite if magnitude < _u4(0x7C00) else special
    return _u4(bits | ((_u4(half) & _u4(0x8000)) << _u4(16))).view(_f4)


@_inner
def _single_to_half(single: np.float32) -> np.uint16:
    bits = _f4(single).view(_u4)
    magnitude = _u4(bits & _u4(0x7FFFFFFF))
    # Adding one half leaves a float32 whose last place is that of a float16 subnormal: the sum rounds it.
    subnormal = _u4(_f4(magnitude.view(_f4) + _f4(0.5)).view(_u4) - _u4(0x3F000000))
    rounded = _u4(magnitude + _u4(0x0FFF) + ((magnitude >> _u4(13)) & _u4(1)))
    normal = _u4((rounded - _u4(0x38000000)) >> _u4(13))
    special = _u4(0x7E00) if magnitude > _u4(0x7F800000) else _u4(0x7C00)
    finite = subnormal if magnitude < _u4(0x38800000) else normal
    half = finite if magnitude < _u4(0x47800000) else special
    return _u2(half | ((bits >> _u4(16)) & _u4(0x8000)))


@_inner
def _bfloat_to_single(bfloat: np.uint16) -> np.float32:
    return _u4(_u4(bfloat) << _u4(16)).view(_f4)


@_inner
def _single_to_bfloat(single: np.float32) -> np.uint16:
    bits = _f4(single).view(_u4)
    # A NaN stays one: it was a bfloat16, so that the lower half, which could carry over, is zero.
    return _u2((bits + _u4(0x7FFF) + ((bits >> _u4(16)) & _u4(1))) >> _u4(16))


@_compiled(_Halves, numba.float32)
def _scale_halves(array: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(array.size):
        if factor != 1:
            array[i] = _single_to_half(_half_to_single(array[i]) * factor)
        nonfinite |= (array[i] & _u2(0x7C00)) == _u2(0x7C00)
    return nonfinite


@_compiled(_Halves, numba.float32)
def _scale_bfloats(array: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(array.size):
        if factor != 1:
            array[i] = _single_to_bfloat(_bfloat_to_single(array[i]) * factor)
        nonfinite |= (array[i] & _u2(0x7F80)) == _u2(0x7F80)
    return nonfinite


@_inner
def _scale_single(array: Array, factor: np.float32) -> bool:
    largest = _u4(0)
    for i in range(array.size):
        if factor != 1:
            array[i] = _f4(array[i] * factor)
        # By their bits, magnitudes are ordered as integers, infinity and NaN last: quicker here than a NaN test.
        largest = max(largest, _f4(array[i]).view(_u4) & _u4(0x7FFFFFFF))
    return bool(largest >= _u4(0x7F800000))


@_compiled(_Singles, numba.float32)
def _scale_singles(array: Array, factor: np.float32) -> bool:
    return _scale_single(array, factor)


@_compiled(numba.types.UniTuple(_Singles, _TOGETHER), numba.float32)  # type: ignore[no-untyped-call]
def _scale_together(arrays: tuple[Array, ...], factor: np.float32) -> int:
    nonfinite = 0
    for array in arrays:
        nonfinite += _scale_single(array, factor)
    return nonfinite


@_compiled(_ReadHalves, _Singles, numba.float32)
def _widen_halves(source: Array, out: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(source.size):
        value = _half_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@_compiled(_ReadHalves, _Singles, numba.float32)
def _widen_bfloats(source: Array, out: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(source.size):
        value = _bfloat_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


# By the source's dtype: the loop that works in place, and the one into float32.
_LOOPS = {"float16": (_scale_halves, _widen_halves), "bfloat16": (_scale_bfloats, _widen_bfloats)}


def unscale_all(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Unscale as ``kernels.unscale_all``; if both sequences are one object, all arrays in it are C-contiguous."""
    if sources is outs and _ONLY_SINGLES.issuperset(map(_dtype, outs)):
        flat = [out if out.ndim == 1 else out.reshape(-1) for out in outs]
        whole = len(flat) - len(flat) % _TOGETHER
        nonfinite: int = sum(map(_scale_singles(), flat[whole:], itertools.repeat(inverse)))
        for start in range(0, whole, _TOGETHER):
            nonfinite += _scale_together()(tuple(flat[start : start + _TOGETHER]), inverse)
        return nonfinite
    return kernels.unscale_all(sources, outs, inverse, _unscale_block)


def _unscale_block(source: Array, out: Array, inverse: np.float32) -> bool | None:
    """Unscale a block in a compiled loop and return whether it is then finite; None if there is no loop for it."""
    if source.dtype.itemsize != 2 or source.dtype.name not in _LOOPS or not (_is_plain(source) and _is_plain(out)):
        return None
    overwrite, widen = _LOOPS[source.dtype.name]
    if out.dtype == _f4:
        return not widen()(source.view(_u2), out, inverse)
    if out.dtype != source.dtype:
        return None
    if out is not source:
        out[...] = source
    return not overwrite()(out.view(_u2), inverse)


def _is_plain(array: Array) -> bool:
    flags = array.flags
    return array.ndim == 1 and flags.c_contiguous and flags.aligned and array.dtype.isnative
