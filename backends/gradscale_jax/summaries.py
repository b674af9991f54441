"""Summaries of JAX arrays from their bits, as XLA for the CPU takes subnormal numbers of 32 bits for 0; traceable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.summaries import smallest_normal

__all__ = ["summarize_leaves"]

# Elements that are counted in one int32, and the bits of one word of a mantissa.
_COUNT_BITS = 30
_HALF_BITS = 26


def summarize_leaves(arrays: Sequence[Any]) -> list[Any]:
    """Return the words of :func:`gradscale.core.summaries.summarize_arrays` for each array, 1-d int32."""
    return [_summarize_one(x) for x in arrays]


def _summarize_one(x: Any) -> Any:
    parts = [x.real, x.imag] if kind_of(x) is Kind.COMPLEX else [x]
    magnitudes = [_magnitude_bits(part) for part in parts]
    host = np.float64 if magnitudes[0].dtype == jnp.int64 else np.float32
    word = np.int64 if host is np.float64 else np.int32
    infinity = int(np.array(np.inf, host).view(word))
    tiny = int(np.array(smallest_normal(parts[0].dtype, parts[0].dtype, jnp), host).view(word))
    worst, is_small = magnitudes[0], _is_subnormal(magnitudes[0], tiny)
    finite = jnp.where(worst < infinity, worst, 0)
    for other in magnitudes[1:]:
        worst = jnp.maximum(worst, other)
        is_small = is_small | _is_subnormal(other, tiny)
        finite = jnp.maximum(finite, jnp.where(other < infinity, other, 0))
    flags = [worst == infinity, worst > infinity, worst == 0, is_small & (worst < infinity)]
    counts = [count for flag in flags for count in _count(flag)]
    return jnp.stack([*counts, *_dissect(jnp.max(finite, initial=0))])


def _magnitude_bits(x: Any) -> Any:
    """Return the bits of real values without their signs, those of narrow types as of the float32 that equals them."""
    if x.dtype == jnp.float64:
        return lax.bitcast_convert_type(x, jnp.int64) & np.int64(2**63 - 1)
    if x.dtype == jnp.bfloat16:
        # Its subnormals are subnormal in float32, too, and a conversion would take them for 0.
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) << 16
    else:
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & np.int32(2**31 - 1)


def _is_subnormal(magnitude: Any, tiny: int) -> Any:
    return (magnitude > 0) & (magnitude < tiny)


def _count(flags: Any) -> tuple[Any, Any]:
    """Return how many flags are set, as two words."""
    high = low = jnp.zeros((), jnp.int32)
    most = 1 << _COUNT_BITS
    chunks = [flags] if flags.size <= most else [flags.reshape(-1)[k : k + most] for k in range(0, flags.size, most)]
    for chunk in chunks:
        total = low + jnp.sum(chunk, dtype=jnp.int32)
        carry = (total >= most).astype(jnp.int32)
        high, low = high + carry, total - carry * most
    return high, low


def _dissect(bits: Any) -> list[Any]:
    """Return the exponent and mantissa of a magnitude as three words: (high * 2**26 + low) * 2**exponent."""
    is_double = bits.dtype == jnp.int64
    fraction_bits, bias = (52, 1075) if is_double else (23, 150)
    biased = bits >> fraction_bits
    mantissa = (bits & ((1 << fraction_bits) - 1)) | ((biased > 0).astype(bits.dtype) << fraction_bits)
    exponent = jnp.maximum(biased, 1) - bias
    halves = [mantissa >> _HALF_BITS, mantissa & ((1 << _HALF_BITS) - 1)]
    return [word.astype(jnp.int32) for word in (exponent, *halves)]
