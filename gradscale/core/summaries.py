"""Summaries of arrays: how many elements are inf, NaN, zero or subnormal, and the largest finite magnitude.

The bits of IEEE numbers without their signs are ordered as the magnitudes are: zero, subnormals, normal numbers,
infinity, NaN. If an adapter gives the bits, they are judged as integers, since processors and compilers may take
subnormals for 0; if not, the magnitudes are, by the same comparisons.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from array_api_compat import array_namespace, device, is_array_api_obj, to_device

from gradscale.core import tree
from gradscale.core.arithmetic import Kind, kind_of, nonfinite_flag, significand_and_exponent, widened
from gradscale.core.protocols import Array, Namespace

__all__ = [
    "STANDARD_FUNCTIONS",
    "Counting",
    "Layout",
    "Summary",
    "count_block",
    "count_nonfinite",
    "layout_of",
    "smallest_normal",
    "summaries_of",
    "summarize_arrays",
    "summary_of",
    "value_of",
    "words",
]

STANDARD_FUNCTIONS = ("abs", "imag", "max", "sum")
"""What a diagnosis needs of a library besides what the core needs."""

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

_Bits: TypeAlias = Callable[[Array], "Array | None"]


class Layout(NamedTuple):
    """The bits of a real type: infinity and the smallest normal number are bits or, without fraction_bits, numbers."""

    mask: int
    infinity: Any
    smallest_normal: Any
    fraction_bits: int


def _layout(width: int, fraction_bits: int) -> Layout:
    mask, tiny = (1 << width - 1) - 1, 1 << fraction_bits
    return Layout(mask, mask + 1 - tiny, tiny, fraction_bits)


_LAYOUTS = {
    "float16": _layout(16, 10),
    "bfloat16": _layout(16, 7),
    "float32": _layout(32, 23),
    "float64": _layout(64, 52),
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


def layout_of(dtype: object) -> Layout | None:
    """Return the layout of the bits of a real IEEE type of 16, 32 or 64 bits, or of bfloat16; None for any other."""
    return _LAYOUTS.get(_name(dtype))


def _name(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def summarize_arrays(arrays: Sequence[Array], bits: _Bits | None = None) -> Array:
    """Return what at least one array holds: what the ``summarize`` of an adapter must equal.

    It is 1-d int32 on the device of the first, 11 words for each array, for ``Backend.read_summaries``. Subnormals are
    those of each array's own dtype. XLA takes those of 32 bits for 0, and so needs ``bits``, which is ``Backend.bits``.
    """
    home = device(arrays[0])
    found = [_examine(x, bits) for x in arrays]
    moved = [x if device(x) == home else to_device(x, home) for x in found]
    return moved[0] if len(moved) == 1 else array_namespace(moved[0]).concat(moved)


def words(blocks: Iterable[Summary]) -> list[int]:
    """Return the words of one array whose blocks an adapter has summarized on the host."""
    _, *counts, magnitudes = [*zip(*blocks, strict=True)] or [(0,)] * 6
    fraction, exponent = math.frexp(max(magnitudes))
    mantissa = math.floor(math.ldexp(fraction, _MANTISSA_BITS))
    counted = [word for count in counts for word in divmod(sum(count), 2**_COUNT_BITS)]
    return [*counted, exponent - _MANTISSA_BITS, *divmod(mantissa, 2**_HALF_BITS)]


class Counting(Protocol):
    """How a library counts in a block of integers that the host has, of at least one element."""

    def magnitudes(self, bits: Array) -> Array:
        """Return the bits without the sign, in memory that may be used again for the next block."""

    def extent(self, x: Array, limit: int) -> tuple[int, int, int]:
        """Return how many magnitudes are 0 and how many less than a limit, and the greatest of all."""

    def around(self, x: Array, limit: int) -> tuple[int, int, int]:
        """Return how many magnitudes are less than a limit and how many equal it, and the greatest of the former, or 0.

        ``x`` may be overwritten.
        """


def count_block(bits: Array, layout: Layout, counting: Counting) -> Summary:
    """Count in a 1-d block of integers that the host has; most numbers, which are neither small nor infinite, fast."""
    size, magnitudes = bits.shape[0], counting.magnitudes(bits)
    zeros, small, greatest = counting.extent(magnitudes, layout.smallest_normal)
    finite, inf = size, 0
    if greatest >= layout.infinity:
        finite, inf, greatest = counting.around(magnitudes, layout.infinity)
    return Summary(size, inf, size - finite - inf, zeros, small - zeros, value_of(greatest, layout))


def value_of(bits: int, layout: Layout) -> float:
    """Return the finite number that has these bits, without a sign."""
    exponent, high, low = _fields(bits, layout)
    return math.ldexp(high * 2**_HALF_BITS + low, exponent)


def summaries_of(arrays: Sequence[Array], found: Sequence[int]) -> list[Summary]:
    """Return the summaries in the words of ``summarize_arrays`` that the host has read."""
    rows = [found[start : start + _LENGTH] for start in range(0, len(found), _LENGTH)]
    return [summary_of(math.prod(x.shape), row) for x, row in zip(arrays, rows, strict=True)]


def summary_of(size: int, row: Sequence[int]) -> Summary:
    """Return the summary in the words of an array of ``size`` elements."""
    inf, nan, zeros, subnormals = (row[k] * 2**_COUNT_BITS + row[k + 1] for k in (0, 2, 4, 6))
    exponent, high, low = row[8:]
    try:
        largest = math.ldexp(high * 2**_HALF_BITS + low, exponent)
    except OverflowError:
        largest = sys.float_info.max
    return Summary(size, inf, nan, zeros, subnormals, largest)


def _examine(x: Array, bits: _Bits | None) -> Array:
    """Return the words of one array."""
    xp = array_namespace(x)
    zero = xp.zeros((), dtype=xp.int32, device=device(x))
    totals = [zero] * 8
    largest = None
    for chunk in _chunks(xp, x):
        magnitudes, layout = _magnitudes(xp, chunk, bits)
        highest, counts = _judge(xp, magnitudes, layout)
        largest = highest if largest is None else xp.maximum(largest, highest)
        carried = []
        for high, low, count in zip(totals[::2], totals[1::2], counts, strict=True):
            total = low + count
            carry = xp.astype(total >= xp.full_like(total, 2**_COUNT_BITS), xp.int32)
            carried += [high + carry, total - carry * xp.full_like(carry, 2**_COUNT_BITS)]
        totals = carried
    if layout.fraction_bits:
        wide = xp.astype(largest, xp.int32) if layout.mask < 2**31 else largest
        fields = [xp.astype(field, xp.int32) for field in _fields(xp.asarray(wide), layout)]
    else:
        fields = _dissect(xp.asarray(largest))
    return xp.stack([xp.asarray(word) for word in (*totals, *fields)])


def _chunks(xp: Namespace, x: Array) -> Iterator[Array]:
    """Yield an array whole, or in pieces that are few enough to count in int32."""
    size, most = math.prod(x.shape), 2**_COUNT_BITS
    if size <= most:
        yield x
        return
    flat = xp.reshape(x, (-1,))
    for start in range(0, size, most):
        # The standard leaves it open what a slice beyond the end is.
        yield flat[start : min(start + most, size)]


def _magnitudes(xp: Namespace, x: Array, bits: _Bits | None) -> tuple[list[Array], Layout]:
    """Return what is judged of each part of an array: its bits, or the magnitude; and where it is cut."""
    parts = [xp.real(x), xp.imag(x)] if kind_of(x) is Kind.COMPLEX else [x]
    layout = layout_of(parts[0].dtype)
    tiny = smallest_normal(x.dtype, parts[0].dtype, xp)
    if layout is None and kind_of(x) is Kind.HALF:
        # Their bits are arranged in many ways, and widening them is exact.
        parts = [widened(x)]
        layout = _LAYOUTS["float32"]._replace(smallest_normal=struct.unpack("<i", struct.pack("<f", tiny))[0])
    words = [None if bits is None or layout is None else bits(part) for part in parts]
    if layout is not None and words[0] is not None:
        return [word & xp.full_like(word, layout.mask) for word in words], layout
    return [xp.abs(widened(part)) for part in parts], Layout(0, math.inf, tiny, 0)


def _judge(xp: Namespace, magnitudes: Sequence[Array], layout: Layout) -> tuple[Array, list[Array]]:
    """Return the largest finite magnitude of all parts, and how many elements are inf, NaN, zero and subnormal."""
    worst = functools.reduce(xp.maximum, magnitudes)
    infinity, zero = xp.full_like(worst, layout.infinity), xp.zeros_like(worst)
    tiny = xp.full_like(worst, layout.smallest_normal)
    small = functools.reduce(xp.logical_or, [xp.logical_and(zero < part, part < tiny) for part in magnitudes])
    kept = functools.reduce(xp.maximum, [xp.where(part < infinity, part, zero) for part in magnitudes])
    # No NaN is at most infinity.
    flags = [worst == infinity, xp.logical_not(worst <= infinity), worst == zero]
    flags.append(xp.logical_and(small, worst < infinity))
    counts = [xp.sum(xp.astype(flag, xp.int32), dtype=xp.int32) for flag in flags]
    highest = xp.zeros((), dtype=worst.dtype, device=device(worst)) if 0 in worst.shape else xp.max(kept)
    return highest, counts


def smallest_normal(dtype: object, part_dtype: object, xp: Namespace) -> float | Array:
    """Return the smallest normal number of a dtype that is computed in ``part_dtype``."""
    name = _name(dtype)
    if name in _SMALLEST_NORMAL:
        return _SMALLEST_NORMAL[name]
    is_complex = xp.isdtype(dtype, "complex floating")
    return xp.finfo(part_dtype if is_complex else dtype).smallest_normal


def _fields(bits: int | Array, layout: Layout) -> tuple[Array, Array, Array]:
    """Return (exponent, high, low) of bits without sign, an int or an array: (high * 2**26 + low) * 2**exponent."""
    fraction_bits = layout.fraction_bits
    biased = bits >> fraction_bits
    is_normal = -(-biased >> 16)  # 1 where there is an exponent, else 0
    mantissa = (bits & (1 << fraction_bits) - 1) | (is_normal << fraction_bits)
    bias = (layout.mask >> fraction_bits + 1) + fraction_bits
    return biased + 1 - is_normal - bias, mantissa >> _HALF_BITS, mantissa & (1 << _HALF_BITS) - 1


def _dissect(x: Array) -> list[Array]:
    """Return a 0-d float that is finite and not negative as ``_fields`` does, as int32."""
    xp = array_namespace(x)
    significand, exponent = significand_and_exponent(x)
    half = xp.full_like(x, 2.0**_HALF_BITS)
    high = xp.astype(significand * half, xp.int32)
    low = xp.astype((significand * half - xp.astype(high, x.dtype)) * half, xp.int32)
    zero = xp.zeros_like(high)
    return [xp.where(high == zero, zero, exponent - xp.full_like(zero, 2 * _HALF_BITS)), high, low]


def count_nonfinite(outputs: object) -> Array | None:
    """Return how many floating arrays of nested containers hold an inf or NaN, 0-d int32; None without any."""
    leaves = filter(is_array_api_obj, tree.flatten(outputs)[0])
    floating = [leaf for leaf in leaves if kind_of(leaf) not in (Kind.INTEGRAL, Kind.UNKNOWN)]
    if not floating:
        return None
    flags = [nonfinite_flag(x, device(floating[0])) for x in floating]
    return array_namespace(flags[0]).asarray(functools.reduce(operator.add, flags))
