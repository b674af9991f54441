"""Summaries of arrays: how many elements are inf, NaN, zero or subnormal, and the largest finite magnitude.

The bits of IEEE numbers without their signs are ordered as the magnitudes are: zero, subnormals, normal numbers,
infinity, NaN. If an adapter gives the bits, they are judged as integers, since processors and compilers may flush
subnormals to 0; if not, the magnitudes are, by the same comparisons.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from array_api_compat import array_namespace, to_device

from gradscale.core.arithmetic import device, device_kwargs, real_parts, significand_and_exponent, widened
from gradscale.core.protocols import Array, Namespace
from gradscale.core.validation import bits_of_float32

STANDARD_FUNCTIONS = ("abs", "imag", "max", "sum")
"""Names that a diagnosis needs of a library besides those of the core."""

# How many elements are counted at once, so that no int32 wraps.
_PIECE = 2**30
# The modulus of checksums, so that their sums stay within 32 bits.
_PRIME = 2147483629
_HALF_BITS = 26

_Bits: TypeAlias = Callable[[Array], "Array | None"]


class Layout(NamedTuple):
    """The bits of a real type: those of a magnitude, of infinity and of the smallest normal number."""

    mask: int
    infinity: int
    smallest_normal: int
    fraction_bits: int

    def value(self, bits: int) -> float:
        """Return the finite number that has these bits, without a sign."""
        return _number(*self.fields(bits))

    def fields(self, bits: Array) -> tuple[Array, Array, Array]:
        """Return (exponent, high, low) of bits without a sign, an int or array: (high * 2**26 + low) * 2**exponent."""
        biased = bits >> self.fraction_bits
        is_normal = -(-biased >> 16)  # 1 if the exponent is not 0, else 0
        mantissa = (bits & self.smallest_normal - 1) | (is_normal << self.fraction_bits)
        bias = (self.mask >> self.fraction_bits + 1) + self.fraction_bits
        return biased + 1 - is_normal - bias, mantissa >> _HALF_BITS, mantissa & (1 << _HALF_BITS) - 1


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
    """The numbers of special elements of one array.

    A complex element counts once: as NaN if one of its parts is, else as inf, else as subnormal; as zero if both are.
    ``largest`` is the largest finite magnitude of a part, and 0.0 without any.
    """

    size: int = 0
    inf: int = 0
    nan: int = 0
    zeros: int = 0
    subnormals: int = 0
    largest: float = 0.0


def join(parts: Iterable[Summary]) -> Summary:
    """Return the summary of an array from those of its parts."""
    size, inf, nan, zeros, subnormals, largest = zip(Summary(), *parts, strict=True)
    return Summary(sum(size), sum(inf), sum(nan), sum(zeros), sum(subnormals), max(largest))


def layout_of(dtype: object) -> Layout | None:
    """Return the layout of the bits of a real IEEE type of 16, 32 or 64 bits, or of bfloat16; None for any other."""
    return _LAYOUTS.get(_name(dtype))


def _name(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def smallest_normal(dtype: object, xp: Namespace) -> float | Array:
    """Return the smallest normal number of a real floating dtype; of float8 and others without a finfo by its name."""
    match = re.search(r"_e(\d)m(\d)(?:b(\d+))?(?:fn)?(uz)?u?$", _name(dtype).replace("bfloat16", "_e8m7"))
    if match is None:
        return xp.finfo(dtype).smallest_normal
    exponent_bits, fraction_bits, named_bias, has_one_zero = match.groups()
    bias = int(named_bias) if named_bias else 2 ** (int(exponent_bits) - 1) - 1 + (has_one_zero is not None)
    # Without a fraction the lowest exponent is that of a normal number.
    return 2.0 ** ((fraction_bits != "0") - bias)


def summarize_arrays(arrays: Sequence[Array], bits: _Bits | None = None) -> Array:
    """Return 7 words for each 2**30 elements of arrays, 1-d int32 on the device of the first, for ``summaries_of``.

    They are four counts, and the exponent and the halves of the magnitude.

    XLA and CuPy flush float32's subnormals to 0, and need ``bits``, which is ``Backend.bits``.
    """
    where = device(arrays[0])
    words = [_words(piece, bits) for x in arrays for piece in _pieces(x)]
    return array_namespace(*words).concat([x if device(x) == where else to_device(x, where) for x in words])


def summaries_of(arrays: Sequence[Array], words: Iterable[int]) -> list[Summary]:
    """Return the summaries in the words of ``summarize_arrays`` that the host has read."""
    stream = iter(words)

    def summary(size: int) -> Summary:
        inf, nan, zeros, subnormals, *fields = itertools.islice(stream, 7)
        return Summary(size, inf, nan, zeros, subnormals, _number(*fields))

    return [join(map(summary, _sizes(x))) for x in arrays]


def _sizes(x: Array) -> list[int]:
    size = math.prod(x.shape)
    return [min(_PIECE, size - start) for start in range(0, max(size, 1), _PIECE)]


def _pieces(x: Array) -> list[Array]:
    sizes = _sizes(x)
    if len(sizes) == 1:
        return [x]
    flat = array_namespace(x).reshape(x, (-1,))
    return [flat[index * _PIECE : index * _PIECE + size] for index, size in enumerate(sizes)]


def _number(exponent: int, high: int, low: int) -> float:
    try:
        return math.ldexp(high * 2**_HALF_BITS + low, exponent)
    except OverflowError:
        return sys.float_info.max


def _words(x: Array, bits: _Bits | None) -> Array:
    xp = array_namespace(x)
    wide = widened(x)
    parts = real_parts(wide)
    layout = layout_of(parts[0].dtype)
    is_narrow = wide.dtype != x.dtype
    tiny, infinity = smallest_normal(x.dtype if is_narrow else parts[0].dtype, xp), math.inf
    integers: list[Array] = [None if bits is None else bits(part) for part in parts]
    if layout is None or integers[0] is None:
        largest, counts = _largest_and_counts([xp.abs(part) for part in parts], tiny, infinity)
        fields = _fields(largest)
    else:
        tiny = bits_of_float32(tiny) if is_narrow else layout.smallest_normal
        largest, counts = _largest_and_counts([part & layout.mask for part in integers], tiny, layout.infinity)
        fields = layout.fields(largest)
    return xp.stack([xp.astype(xp.asarray(word), xp.int32) for word in (*counts, *fields)])


def _largest_and_counts(parts: Sequence[Array], tiny: float | Array, infinity: float) -> tuple[Array, list[Array]]:
    """Return the largest finite magnitude of all parts, and how many elements are inf, NaN, zero and subnormal."""
    xp = array_namespace(*parts)
    worst = functools.reduce(xp.maximum, parts)
    is_small = functools.reduce(xp.logical_or, [xp.logical_and(part != 0, part < tiny) for part in parts])
    # No NaN is at most infinity.
    flags = [worst == infinity, xp.logical_not(worst <= infinity), worst == 0]
    flags.append(xp.logical_and(is_small, worst < infinity))
    finite = functools.reduce(xp.maximum, [xp.where(part < infinity, part, xp.zeros_like(part)) for part in parts])
    largest = xp.zeros((), dtype=worst.dtype, **device_kwargs(device(worst))) if 0 in worst.shape else xp.max(finite)
    return largest, [xp.sum(xp.astype(flag, xp.int32)) for flag in flags]


def _fields(x: Array) -> tuple[Array, Array, Array]:
    """Return the fields of ``Layout.fields`` for a 0-d float that is finite and not negative."""
    xp = array_namespace(x)
    significand, exponent = significand_and_exponent(xp.asarray(x))
    scaled = significand * 2.0**_HALF_BITS
    high = xp.astype(scaled, xp.int32)
    return exponent - 2 * _HALF_BITS, high, (scaled - xp.astype(high, scaled.dtype)) * 2.0**_HALF_BITS


def sum_of_bits(x: Array, bits: Array | None) -> Array | None:
    """Return a checksum of an array's values and their places, 0-d int32; None without bits or values. No host read."""
    if bits is None or math.prod(x.shape) == 0:
        return None
    xp, total = array_namespace(bits), 0
    table = xp.reshape(bits, (x.shape[0] if x.ndim else 1, -1))
    for axis in (0, 1):
        sums = xp.sum(table, axis=axis)
        places = xp.arange(1, 2 * sums.shape[0], 2, dtype=sums.dtype, **device_kwargs(device(x)))
        # Numbers of NumPy warn if they wrap.
        total = (xp.sum(sums * places) % _PRIME + 3 * total) % _PRIME
    return xp.reshape(xp.astype(total, xp.int32), ())
