"""Unscale and judge NumPy arrays in one pass, with loops that Numba compiles: the same bits as `kernels`.

float8, long double, strided and byte-swapped arrays, and casts to a narrower type are left to `kernels`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gradscale.extras import needs
from gradscale_numpy import kernels

with needs("gradscale_numpy.fast", "fast"):
    import numba

__all__ = ["is_enabled", "unscale_all"]

Array = NDArray[Any]

# Elements copied at a time when the result goes to another array of the source's type: half a MiB of float32.
_BLOCK = 1 << 17

# Arrays of one call: the call takes longer than a small array.
_TOGETHER = 32

_ONLY_SINGLES = frozenset([np.dtype(np.float32)])
_dtype = operator.attrgetter("dtype")

_f4 = np.float32
_u2 = np.uint16
_u4 = np.uint32

_Function = TypeVar("_Function", bound=Callable[..., object])


def _compiled(function: _Function) -> _Function:
    """Compile a function at its first call; no fast-math, which assumes that there are no infinities and NaNs."""
    try:
        return cast("_Function", numba.njit(function, cache=True, nogil=True))
    except RuntimeError:  # there is no folder to keep the machine code in
        return cast("_Function", numba.njit(function, nogil=True))


def is_enabled() -> bool:
    """Return whether Numba compiles at all, which ``NUMBA_DISABLE_JIT=1`` prevents."""
    return hasattr(_scale_singles, "py_func")


@_compiled
def _half_to_single(half: np.uint16) -> np.float32:
    magnitude = _u4(half) & _u4(0x7FFF)
    subnormal = _f4(_f4(np.int32(magnitude)) * _f4(2.0**-24)).view(_u4)
    normal = _u4((magnitude << _u4(13)) + _u4(0x38000000))
    special = _u4((magnitude << _u4(13)) | _u4(0x7F800000))
    finite = subnormal if magnitude < _u4(0x0400) else normal
    bits = finite if magnitude < _u4(0x7C00) else special
    return _u4(bits | ((_u4(half) & _u4(0x8000)) << _u4(16))).view(_f4)


@_compiled
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


@_compiled
def _bfloat_to_single(bfloat: np.uint16) -> np.float32:
    return _u4(_u4(bfloat) << _u4(16)).view(_f4)


@_compiled
def _single_to_bfloat(single: np.float32) -> np.uint16:
    bits = _f4(single).view(_u4)
    # A NaN stays one: it was a bfloat16, so that the lower half, which could carry over, is zero.
    return _u2((bits + _u4(0x7FFF) + ((bits >> _u4(16)) & _u4(1))) >> _u4(16))


@_compiled
def _scale_doubles(array: Array, factor: np.float64) -> bool:
    nonfinite = False
    for i in range(array.size):
        value = array[i] * factor
        array[i] = value
        # Zero for a finite value and NaN for any other.
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@_compiled
def _scale_singles(array: Array, factor: np.float32) -> bool:
    largest = _u4(0)
    for i in range(array.size):
        value = _f4(array[i] * factor)
        array[i] = value
        # By their bits, magnitudes are ordered as integers, infinity and NaN last: quicker here than a NaN test.
        largest = max(largest, value.view(_u4) & _u4(0x7FFFFFFF))
    return bool(largest >= _u4(0x7F800000))


@_compiled
def _scale_together(arrays: tuple[Array, ...], factor: np.float32) -> int:
    nonfinite = 0
    for array in arrays:
        nonfinite += _scale_singles(array, factor)
    return nonfinite


@_compiled
def _scale_halves(array: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(array.size):
        value = _single_to_half(_half_to_single(array[i]) * factor)
        array[i] = value
        nonfinite |= (value & _u2(0x7C00)) == _u2(0x7C00)
    return nonfinite


@_compiled
def _scale_bfloats(array: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(array.size):
        value = _single_to_bfloat(_bfloat_to_single(array[i]) * factor)
        array[i] = value
        nonfinite |= (value & _u2(0x7F80)) == _u2(0x7F80)
    return nonfinite


@_compiled
def _widen_halves(source: Array, out: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(source.size):
        value = _half_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


@_compiled
def _widen_bfloats(source: Array, out: Array, factor: np.float32) -> bool:
    nonfinite = False
    for i in range(source.size):
        value = _bfloat_to_single(source[i]) * factor
        out[i] = value
        difference = value - value
        nonfinite |= difference != difference
    return nonfinite


class _Loop(NamedTuple):
    """A loop for a pair of types, and what it sees the arrays and the factor as."""

    run: Callable[..., bool]
    source_type: type[np.generic]
    out_type: type[np.generic]
    factor_type: type[np.float32 | np.float64] = np.float32


_LOOPS = {
    ("float32", "float32"): _Loop(_scale_singles, _f4, _f4),
    ("complex64", "complex64"): _Loop(_scale_singles, _f4, _f4),
    ("float64", "float64"): _Loop(_scale_doubles, np.float64, np.float64, np.float64),
    ("complex128", "complex128"): _Loop(_scale_doubles, np.float64, np.float64, np.float64),
    ("float16", "float16"): _Loop(_scale_halves, _u2, _u2),
    ("bfloat16", "bfloat16"): _Loop(_scale_bfloats, _u2, _u2),
    ("float16", "float32"): _Loop(_widen_halves, _u2, _f4),
    ("bfloat16", "float32"): _Loop(_widen_bfloats, _u2, _f4),
}


def unscale_all(sources: Sequence[Array], outs: Sequence[Array], inverse: np.float32) -> int:
    """Do what `kernels.unscale_all` does.

    If both sequences are one object, every array in it must be C-contiguous, aligned and writable.
    """
    if sources is outs and _ONLY_SINGLES.issuperset(map(_dtype, outs)):
        return _scale_all(outs, inverse)
    nonfinite = 0
    small: list[tuple[Array, Array]] = []
    with np.errstate(all="ignore"):
        for source, out in zip(sources, outs, strict=True):
            if out.size > kernels.SMALL:
                nonfinite += _unscale_one(source, out, inverse)
            else:
                small.append((source, out))
    return nonfinite + kernels.unscale_all([source for source, _ in small], [out for _, out in small], inverse)


def _scale_all(singles: Sequence[Array], inverse: np.float32) -> int:
    nonfinite = 0
    is_flat = {1}.issuperset(map(operator.attrgetter("ndim"), singles))
    flat = singles if is_flat else [array.reshape(-1) for array in singles]
    whole = len(flat) - len(flat) % _TOGETHER
    for start in range(0, whole, _TOGETHER):
        nonfinite += _scale_together(tuple(flat[start : start + _TOGETHER]), inverse)
    for array in flat[whole:]:
        nonfinite += _scale_singles(array, inverse)
    return nonfinite


def _is_plain(array: Array) -> bool:
    return array.flags.aligned and array.dtype.isnative


def _unscale_one(source: Array, out: Array, inverse: np.float32) -> bool:
    """Unscale one pair, in a compiled loop if there is one, and return whether `out` is then not finite."""
    loop = _LOOPS.get((source.dtype.name, out.dtype.name))
    if loop is None or not (_is_plain(source) and _is_plain(out)):
        return kernels.unscale_one(source, out, inverse)
    if source.flags.c_contiguous and out.flags.c_contiguous:
        values, results = source.reshape(-1), out.reshape(-1)
    elif source.flags.f_contiguous and out.flags.f_contiguous:
        values, results = source.T.reshape(-1), out.T.reshape(-1)
    else:
        return kernels.unscale_one(source, out, inverse)
    values, results = values.view(loop.source_type), results.view(loop.out_type)
    factor = loop.factor_type(inverse)
    if source.dtype != out.dtype:
        return loop.run(values, results, factor)
    if source is out:
        return loop.run(results, factor)
    nonfinite = False
    for start in range(0, results.size, _BLOCK):
        block = results[start : start + _BLOCK]
        block[...] = values[start : start + _BLOCK]
        nonfinite |= loop.run(block, factor)
    return nonfinite
