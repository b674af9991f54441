"""JaxBackend: JAX arrays and traced values; one pass over each gradient, and the read of a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from gradscale import Backend, ScaleState
from gradscale.core import arithmetic, summaries
from gradscale.core.arithmetic import Kind, UnitState, check_real_dtype, kind_of, reciprocal, widened
from gradscale.errors import InvalidTypeError, short_repr

_Arrays: TypeAlias = Sequence[jax.Array]


class JaxBackend(Backend):
    """JAX arrays, on one device or spread over many, and the values that jit, grad and vmap trace.

    Outside of jit there is one compiled call for each set of devices.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    >>> gradscale_jax.JaxBackend().unscale([jnp.asarray([2.0, 4.0])], state)
    ([Array([0.5, 1. ], dtype=float32)], Array(0, dtype=int32))
    """

    name = "jax"

    def read(self, x: jax.Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints; InvalidTypeError for a traced value, which has none yet."""
        if isinstance(x, jax.core.Tracer):
            msg = (
                "a gradient scaler reads its verdict on the host, which a function that jax traces cannot do, got "
                f"{x!r}: call step() outside jit, or use gradscale_jax.value_and_grad inside"
            )
            raise InvalidTypeError(msg)
        return super().read(x)

    def forbid_tracing(self, what: str, /) -> None:
        """Raise InvalidTypeError under jit, scan and others that compile; not under plain grad and vmap."""
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            msg = (
                f"{what} was called in a function that jax traces, which would keep the scale of this moment for good: "
                f"call it outside of jit, or use gradscale_jax.value_and_grad, or gradscale_jax.scale(loss, state) "
                f"with a state that is an argument"
            )
            raise InvalidTypeError(msg)

    def placement(self, like: jax.Array, /) -> Sharding | None:
        """Return where a 0-d array meets ``like``, over a mesh replicated; None for traced and uncommitted arrays."""
        if isinstance(like, jax.core.Tracer) or not like.committed:
            return None
        sharding = like.sharding
        if isinstance(sharding, NamedSharding):
            return NamedSharding(sharding.mesh, PartitionSpec())
        # A device alone would leave what comes from a mesh of explicit axes with the type of that mesh.
        return SingleDeviceSharding(like.device) if isinstance(like.device, jax.Device) else like.device

    def example(self) -> jax.Array:
        """Return a 0-d float32 array on the default device."""
        return jnp.zeros((), dtype=jnp.float32)

    def bits(self, x: jax.Array, /) -> jax.Array | None:
        """Return the bits of real values as signed integers; None for float8."""
        return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}") if x.dtype.itemsize > 1 else None

    def values_of(self, x: jax.Array) -> jax.Array:
        """Return the value of a loss that plain grad differentiates; InvalidTypeError under vmap."""
        value = lax.stop_gradient(x)
        if isinstance(value, jax.core.Tracer):
            msg = (
                f"a loss that is judged needs a value, got {short_repr(x)}: in a function that jax maps or compiles "
                f"call scale(outputs, loss=False), and step() and keeps() outside of it"
            )
            raise InvalidTypeError(msg)
        return value

    def summarize(self, arrays: Sequence[jax.Array], /) -> jax.Array:
        """Summarize as ``gradscale.core.summaries.summarize_arrays`` does, from the bits: XLA's subnormals are 0."""
        target = self.placement(arrays[0])
        return jnp.concatenate([_place(_summarize_one(x), target) for x in arrays])

    def unscale(
        self, grads: _Arrays, state: ScaleState, /, *, dtype: DTypeLike | None = None, out: _Arrays | None = None
    ) -> tuple[list[jax.Array], jax.Array]:
        """Divide arrays by the scale and count those with a non-finite value.

        The arrays are new, ``out`` only says their dtypes. Within jit, XLA may write over gradients that were donated.
        At a constant scale of 1, arrays of the wanted dtype are returned as they are.
        """
        is_one = isinstance(state, UnitState)
        check_real_dtype(state.scale, dtype)
        stored = grads if out is None else out
        dtypes = [x.dtype if dtype is None or kind_of(x) is Kind.COMPLEX else jnp.dtype(dtype) for x in stored]
        if any(isinstance(x, jax.core.Tracer) for x in (*grads, state.scale)):
            results, nonfinite = _unscale_leaves(grads, state.scale, dtypes, is_one)
            return [x if y is None else y for x, y in zip(grads, results, strict=True)], nonfinite
        unscaled: dict[int, jax.Array] = {}
        counts = []
        for where, chosen in self._by_placement(grads).items():
            wanted = tuple(dtypes[index] for index in chosen)
            results, count = _unscale([*chosen.values()], _place(state.scale, where), wanted, is_one)
            unscaled |= {i: x if y is None else y for (i, x), y in zip(chosen.items(), results, strict=True)}
            counts.append(count)
        return [unscaled[index] for index in range(len(grads))], self._total(counts, state.scale, jnp.int32)

    def sum_of_squares(self, arrays: _Arrays, like: jax.Array, /) -> jax.Array:
        """Return the sum of the squares of all elements; over a mesh in another order."""
        groups = [[*chosen.values()] for chosen in self._by_placement(arrays).values()]
        return self._total([sum_of_squares(group, group[0]) for group in groups], like, float)

    def multiply_in_place(self, arrays: _Arrays, factor: jax.Array, /) -> list[jax.Array]:
        """Return new arrays, multiplied by a 0-d float32 and rounded once to their dtypes."""
        multiplied: dict[int, jax.Array] = {}
        for where, chosen in self._by_placement(arrays).items():
            multiplied |= zip(chosen, _multiply([*chosen.values()], _place(factor, where)), strict=True)
        return [multiplied[index] for index in range(len(arrays))]

    def _by_placement(self, arrays: _Arrays) -> dict[Sharding | None, dict[int, jax.Array]]:
        """Return arrays and their positions by where they are: each set is one compiled call."""
        groups: dict[Sharding | None, dict[int, jax.Array]] = defaultdict(dict)
        for index, array in enumerate(arrays):
            groups[self.placement(array)][index] = array
        return groups

    def _total(self, values: _Arrays, like: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Add up 0-d arrays beside another, or beside the first of them if that is on no chosen device."""
        target = next(filter(None, map(self.placement, (like, *values))), None)
        return sum((_place(value, target) for value in values), jnp.zeros((), dtype=dtype, device=target))


def _place(x: jax.Array, where: Sharding | None) -> jax.Array:
    return x if where is None else jax.device_put(x, where)


def _unscale_leaves(
    grads: _Arrays, scale: jax.Array, dtypes: Sequence[DTypeLike], is_one: bool
) -> tuple[Sequence[jax.Array | None], jax.Array]:
    """Return the unscaled arrays in the wanted dtypes, and how many are not finite; None for what stays as it is."""
    if is_one:
        # An argument that a compiled call returns would be copied.
        cast = [grad.astype(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
        kept = [None if new is grad else new for grad, new in zip(grads, cast, strict=True)]
        return kept, count_nonfinite(cast)
    factor, divisor = _factor_and_divisor(scale)
    unscaled = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        # Complex numbers part by part: strict promotion forbids one times a real number.
        parts = [grad.real, grad.imag] if kind_of(grad) is Kind.COMPLEX else [widened(grad)]
        divided = [part * factor.astype(part.dtype) / divisor.astype(part.dtype) for part in parts]
        whole = lax.complex(*divided) if len(divided) > 1 else divided[0]
        unscaled.append(whole.astype(dtype))
    return unscaled, count_nonfinite(unscaled)


def _factor_and_divisor(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two 0-d float32: multiplying by one and dividing by the other gives the bits of the pure core.

    Above 2**126, where XLA takes the reciprocal for 0, they are that of a quarter and 4; else it and 1. XLA repeats a
    mere multiplication in every use of its result, and reads the gradients again for each; a division it makes once.
    """
    divisor = jnp.where(scale > 2.0**126, 4.0, jnp.ones_like(scale))
    # Of a scale that is a constant XLA would join the two, and their quotient may be subnormal again.
    joined: tuple[jax.Array, jax.Array] = lax.optimization_barrier((reciprocal(scale / divisor), divisor))
    return joined


_unscale = jax.jit(_unscale_leaves, static_argnums=(2, 3))
_multiply = jax.jit(arithmetic.multiply_arrays)
# Apart from unscaling, since XLA would square halves as they are before they are rounded.
sum_of_squares = jax.jit(arithmetic.sum_of_squares)
# One call instead of dozens, and no array of the size of the gradient.
_summarize_one = jax.jit(lambda x: summaries.summarize_arrays([x], JaxBackend().bits))


def count_nonfinite(arrays: _Arrays) -> jax.Array:
    """Return how many arrays hold an inf or NaN, as a 0-d int32; traceable."""
    return sum((_is_bad(x).astype(jnp.int32) for x in arrays), jnp.zeros((), dtype=jnp.int32))


def _is_bad(x: jax.Array) -> jax.Array:
    """Tell whether an array holds an inf or NaN."""
    if x.dtype in (jnp.float16, jnp.bfloat16):
        # By the bits: on GPUs XLA leaves out the rounding to half precision if that is widened again.
        exponent = 0x7C00 if x.dtype == jnp.float16 else 0x7F80
        return jnp.any((lax.bitcast_convert_type(x, jnp.int16) & exponent) == exponent)
    wide = widened(x if x.dtype.itemsize > 1 else lax.optimization_barrier(x))
    # It is 0 for finite elements and NaN for others, and a NaN stays in any sum. In a maximum it does not: XLA's for
    # the CPU drops NaNs of large arrays, as its all-reduce does.
    total = jnp.sum(wide - wide)
    return total != total
