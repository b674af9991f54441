"""Summaries of arrays: how many elements are inf, NaN, zero or subnormal, and the largest finite magnitude."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device, is_array_api_obj, to_device

from gradscale.core import tree
from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.protocols import Array

__all__ = [
    "STANDARD_FUNCTIONS",
    "Summary",
    "count_nonfinite",
    "smallest_normal",
    "summaries_of",
    "summarize_arrays",
    "summary_of",
    "words",
]

STANDARD_FUNCTIONS = ("abs", "imag", "isnan", "max", "sum")
"""What a diagnosis needs of a library beside the rest of the core."""

# Words of one array: four counts of two, and the magnitude's exponent and halves.
_LENGTH = 11
# What the low word of a count holds, and how many elements are counted at once, so that no int32 wraps.
_COUNT_BITS = 30
_HALF_BITS = 26
_MANTISSA_BITS = 53  # of a Python float

# Of types that not every library has a finfo for, by what their names end in.
_SMALLEST_NORMAL = {
    "bfloat16": 2.0**-126,
    "float8_e3m4": 2.0**-2,
    "float8_e4m3": 2.0**-6,
    "float8_e4m3b11fnuz": 2.0**-10,
    "float8_e4m3fn": 2.0**-6,
    "float8_e4m3fnuz": 2.0**-7,
    "float8_e5m2": 2.0**-14,
    "float8_e5m2fnuz": 2.0**-15,
    "float8_e8m0fnu": 2.0**-127,
    "float6_e2m3fn": 1.0,
    "float6_e3m2fn": 2.0**-2,
    "float4_e2m1fn": 1.0,
}


class Summary(NamedTuple):
    """What one array holds.

    Attributes
    ----------
    size : int
        Number of elements.
    inf, nan, zeros, subnormals : int
        How many are so. A complex element counts once: as NaN if one of its parts is, else as inf, else as subnormal;
        as zero if both parts are.
    largest : float
        Largest finite magnitude, of a real or imaginary part; 0.0 without any. A long double beyond float64 gives the
        largest float64.
    """

    size: int
    inf: int
    nan: int
    zeros: int
    subnormals: int
    largest: float


def summarize_arrays(arrays: Sequence[Array]) -> Array:
    """Return what arrays hold: what the ``summarize`` of an adapter must equal.

    Parameters
    ----------
    arrays : sequence of arrays
        At least one; floating or complex, of one library, on any devices. Subnormals are those of each one's own dtype,
        where the library computes with them: XLA takes those of 32 bits for 0.

    Returns
    -------
    array
        1-d int32 on the device of the first: 11 words for each array. No host read, no collective. Nothing wraps, up to
        2**60 elements. :meth:`gradscale.Backend.read_summaries` reads it.
    """
    home = device(arrays[0])
    xp = array_namespace(arrays[0])
    found = [xp.stack([*counts, *_dissect(largest)]) for counts, largest in map(_examine, arrays)]
    moved = [x if device(x) == home else to_device(x, home) for x in found]
    return moved[0] if len(moved) == 1 else xp.concat(moved)


def words(inf: int, nan: int, zeros: int, subnormals: int, largest: float) -> list[int]:
    """Return the words of one array, for an adapter that has counted on the host; ``largest`` is finite."""
    fraction, exponent = math.frexp(largest)
    mantissa = math.floor(math.ldexp(fraction, _MANTISSA_BITS))
    counts = [word for count in (inf, nan, zeros, subnormals) for word in divmod(count, 2**_COUNT_BITS)]
    return [*counts, exponent - _MANTISSA_BITS, *divmod(mantissa, 2**_HALF_BITS)]


def summaries_of(arrays: Sequence[Array], found: Sequence[int]) -> list[Summary]:
    """Return what the words of arrays say that ``summarize_arrays`` has found and the host has read."""
    rows = [found[start : start + _LENGTH] for start in range(0, len(found), _LENGTH)]
    return [summary_of(math.prod(x.shape), row) for x, row in zip(arrays, rows, strict=True)]


def summary_of(size: int, row: Sequence[int]) -> Summary:
    """Return what the words of an array of ``size`` elements say."""
    inf, nan, zeros, subnormals = (row[k] * 2**_COUNT_BITS + row[k + 1] for k in (0, 2, 4, 6))
    exponent, high, low = row[8:]
    try:
        largest = math.ldexp(high * 2**_HALF_BITS + low, exponent)
    except OverflowError:
        largest = sys.float_info.max
    return Summary(size, inf, nan, zeros, subnormals, largest)


def _examine(x: Array) -> tuple[list[Array], Array]:
    """Return the words of the counts, and the largest finite magnitude as a 0-d array."""
    xp = array_namespace(x)
    kind = kind_of(x)
    zero = xp.zeros((), dtype=xp.int32, device=device(x))
    counts = [zero] * 8
    largest = None
    for chunk in _chunks(xp, x):
        parts = [xp.real(chunk), xp.imag(chunk)] if kind is Kind.COMPLEX else [chunk]
        if kind is Kind.HALF:
            parts = [xp.astype(chunk, xp.float32)]
        magnitudes = [xp.abs(part) for part in parts]
        highest, flags = _judge(xp, magnitudes, smallest_normal(x.dtype, magnitudes[0].dtype, xp))
        largest = highest if largest is None else xp.maximum(largest, highest)
        carried = []
        for high, low, flag in zip(counts[::2], counts[1::2], flags, strict=True):
            total = low + xp.sum(xp.astype(flag, xp.int32), dtype=xp.int32)
            is_full = total >= xp.full_like(total, 2**_COUNT_BITS)
            carry = xp.astype(is_full, xp.int32)
            carried += [high + carry, total - carry * xp.full_like(carry, 2**_COUNT_BITS)]
        counts = carried
    return [xp.asarray(count) for count in counts], xp.asarray(largest)


def _chunks(xp: Any, x: Array) -> Iterator[Array]:
    """Yield an array whole, or in pieces that are few enough to count in int32."""
    size, most = math.prod(x.shape), 2**_COUNT_BITS
    if size <= most:
        yield x
        return
    flat = xp.reshape(x, (-1,))
    for start in range(0, size, most):
        # The standard leaves it open what a slice beyond the end is.
        yield flat[start : min(start + most, size)]


def _judge(xp: Any, magnitudes: Sequence[Array], tiny: Any) -> tuple[Array, list[Array]]:
    """Return the largest finite magnitude of the parts, and which elements are inf, NaN, zero and subnormal."""
    first = magnitudes[0]
    nan, finite, zero = xp.isnan(first), xp.isfinite(first), first == xp.zeros_like(first)
    small = _is_subnormal(xp, first, tiny)
    kept = xp.where(finite, first, xp.zeros_like(first))
    for part in magnitudes[1:]:
        nan = xp.logical_or(nan, xp.isnan(part))
        zero = xp.logical_and(zero, part == xp.zeros_like(part))
        small = xp.logical_or(small, _is_subnormal(xp, part, tiny))
        kept = xp.maximum(kept, xp.where(xp.isfinite(part), part, xp.zeros_like(part)))
        finite = xp.logical_and(finite, xp.isfinite(part))
    inf = xp.logical_not(xp.logical_or(finite, nan))
    highest = xp.zeros((), dtype=first.dtype, device=device(first)) if 0 in first.shape else xp.max(kept)
    return highest, [inf, nan, zero, xp.logical_and(small, finite)]


def _is_subnormal(xp: Any, magnitude: Array, tiny: Any) -> Array:
    return xp.logical_and(xp.zeros_like(magnitude) < magnitude, magnitude < xp.full_like(magnitude, tiny))


def smallest_normal(dtype: Any, part_dtype: Any, xp: Any) -> Any:
    """Return the smallest normal number of a dtype; ``part_dtype`` is what it is computed in."""
    name = str(dtype).rpartition(".")[2]
    if name in _SMALLEST_NORMAL:
        return _SMALLEST_NORMAL[name]
    is_complex = xp.isdtype(dtype, "complex floating")
    return xp.finfo(part_dtype if is_complex else dtype).smallest_normal


def _dissect(x: Array) -> list[Array]:
    """Return a 0-d float that is finite and not negative as three int32: (high * 2**26 + low) * 2**exponent."""
    xp = array_namespace(x)
    steps = {32: 7, 64: 10}.get(xp.finfo(x.dtype).bits, 14)
    grow, shrink = [xp.full_like(x, 2.0)], [xp.full_like(x, 0.5)]
    for _ in range(steps - 1):
        # Longer types have powers of two that no Python float holds.
        grow.append(grow[-1] * grow[-1])
        shrink.append(shrink[-1] * shrink[-1])
    zero = xp.zeros((), dtype=xp.int32, device=device(x))
    exponent, fraction = zero, x
    for k in reversed(range(steps)):
        large = fraction >= grow[k]
        fraction = xp.where(large, fraction * shrink[k], fraction)
        exponent = exponent + xp.where(large, xp.full_like(zero, 2**k), zero)
    # The first step twice, for subnormals.
    for k in (steps - 1, *reversed(range(steps))):
        small = fraction < shrink[k] * grow[0]
        fraction = xp.where(small, fraction * grow[k], fraction)
        exponent = exponent - xp.where(small, xp.full_like(zero, 2**k), zero)
    half = xp.full_like(x, 2.0**_HALF_BITS)
    high = xp.astype(fraction * half, xp.int32)
    low = xp.astype((fraction * half - xp.astype(high, x.dtype)) * half, xp.int32)
    exponent = xp.where(high == zero, zero, exponent - xp.full_like(zero, 2 * _HALF_BITS))
    return [xp.asarray(word) for word in (exponent, high, low)]


def count_nonfinite(outputs: Any) -> Array | None:
    """Return how many floating arrays of nested containers hold an inf or NaN.

    Parameters
    ----------
    outputs : array or nested containers of arrays
        Of one library, on any devices; other leaves are ignored.

    Returns
    -------
    array or None
        0-d int32 on the device of the first one; None without any. No host read, no collective.
    """
    leaves = [leaf for _, leaf in tree.leaves_with_paths(outputs) if is_array_api_obj(leaf)]
    floating = [leaf for leaf in leaves if kind_of(leaf) not in (Kind.INTEGRAL, Kind.UNKNOWN)]
    total = None
    for x in floating:
        xp = array_namespace(x)
        judged = xp.astype(x, xp.float32) if kind_of(x) is Kind.HALF else x
        bad = xp.astype(xp.logical_not(xp.all(xp.isfinite(judged))), xp.int32)
        home = device(floating[0])
        moved = bad if device(bad) == home else to_device(bad, home)
        total = moved if total is None else total + moved
    return None if total is None else array_namespace(total).asarray(total)
