"""JaxBackend: JAX arrays and traced values; one pass over each gradient, and the read of a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from gradscale import Backend, ScaleState
from gradscale.core.arithmetic import Kind, check_real_dtype, kind_of, multiply_arrays, reciprocal, sum_of_squares
from gradscale.core.summaries import summarize_arrays
from gradscale.errors import InvalidTypeError

__all__ = ["JaxBackend", "count_nonfinite", "unscale_leaves"]

_WORDS = {"float16": jnp.int16, "bfloat16": jnp.int16, "float32": jnp.int32, "float64": jnp.int64}


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
        values: list[int] = np.asarray(x).tolist()
        return values

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
        """Return where a 0-d array can be combined with ``like``; None for traced and uncommitted arrays.

        If ``like`` is spread over a mesh, that is replicated over the mesh.
        """
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
        word = _WORDS.get(x.dtype.name)
        return None if word is None else lax.bitcast_convert_type(x, word)

    def summarize(self, arrays: Sequence[jax.Array], /) -> jax.Array:
        """Summarize as ``gradscale.core.summaries.summarize_arrays`` does, from the bits: XLA's subnormals are 0."""
        home = self.placement(arrays[0])
        return jnp.concatenate([_moved(_summarize_one(x), home) for x in arrays])

    def unscale(
        self,
        grads: Sequence[jax.Array],
        state: ScaleState,
        /,
        *,
        dtype: DTypeLike | None = None,
        out: Sequence[jax.Array] | None = None,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Divide arrays by the scale and count those with a non-finite value.

        The arrays are new, ``out`` only says their dtypes. Within jit, XLA may write over gradients that were donated.
        """
        check_real_dtype(state.scale, dtype)
        wanted = tuple(_stored_dtypes(grads, dtype, out))
        if any(isinstance(x, jax.core.Tracer) for x in (*grads, state.scale)):
            return unscale_leaves(list(grads), state.scale, wanted)
        unscaled: dict[int, jax.Array] = {}
        counts = []
        groups = self._by_placement(grads)
        for where, indices in groups.items():
            chosen = [grads[index] for index in indices]
            made, count = _compiled(chosen, _moved(state.scale, where), tuple(wanted[index] for index in indices))
            unscaled |= zip(indices, made, strict=True)
            counts.append(count)
        return [unscaled[index] for index in range(len(grads))], self._total(counts, jnp.int32, groups, state)

    def unscale_with_squares(
        self,
        grads: Sequence[jax.Array],
        state: ScaleState,
        /,
        *,
        dtype: DTypeLike | None = None,
        out: Sequence[jax.Array] | None = None,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Like ``unscale``, and return the sum of the squares of all unscaled elements.

        It is 0-d float64 with x64, else float32, on the state's device. Over the devices of a mesh the elements are
        summed in another order than on one.
        """
        unscaled, nonfinite = self.unscale(grads, state, dtype=dtype, out=out)
        groups = self._by_placement(unscaled)
        squares = [
            _sum_of_squares([unscaled[index] for index in indices], unscaled[indices[0]]) for indices in groups.values()
        ]
        return unscaled, nonfinite, self._total(squares, float, groups, state)

    def multiply_in_place(self, arrays: Sequence[jax.Array], factor: jax.Array, /) -> list[jax.Array]:
        """Return new arrays, multiplied by a 0-d float32 and rounded once to their dtypes."""
        multiplied: dict[int, jax.Array] = {}
        for where, indices in self._by_placement(arrays).items():
            made = _multiply([arrays[index] for index in indices], _moved(factor, where))
            multiplied |= zip(indices, made, strict=True)
        return [multiplied[index] for index in range(len(arrays))]

    def _by_placement(self, arrays: Sequence[jax.Array]) -> dict[Sharding | None, list[int]]:
        """Return the positions of arrays by where they are: each set is one compiled call."""
        groups: dict[Sharding | None, list[int]] = {}
        for index, array in enumerate(arrays):
            groups.setdefault(self.placement(array), []).append(index)
        return groups

    def _total(
        self, values: Iterable[jax.Array], dtype: DTypeLike, groups: dict[Sharding | None, list[int]], state: ScaleState
    ) -> jax.Array:
        """Add up a 0-d array of each group, on the state's devices if it is committed to some."""
        # Sums of several groups need a place.
        home = self.placement(state.scale) or (next(filter(None, groups)) if len(groups) > 1 else None)
        total = jnp.zeros((), dtype=dtype, device=home)
        for value in values:
            total = total + _moved(value, home)
        return total


def _moved(x: jax.Array, where: Sharding | None) -> jax.Array:
    return x if where is None else jax.device_put(x, where)


def _stored_dtypes(
    grads: Sequence[jax.Array], dtype: DTypeLike | None, out: Sequence[jax.Array] | None
) -> list[DTypeLike]:
    """Return the dtype that each unscaled gradient has."""
    if out is not None or dtype is None:
        return [array.dtype for array in out or grads]
    return [grad.dtype if kind_of(grad) is Kind.COMPLEX else jnp.dtype(dtype) for grad in grads]


def unscale_leaves(
    grads: Sequence[jax.Array], scale: jax.Array, dtypes: Sequence[DTypeLike]
) -> tuple[list[jax.Array], jax.Array]:
    """Return the unscaled arrays in the wanted dtypes, and how many are not finite; traceable."""
    factor, divisor = _factor_and_divisor(scale)
    unscaled = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        # Complex numbers part by part: strict promotion refuses one times a real number.
        parts = [grad.real, grad.imag] if kind_of(grad) is Kind.COMPLEX else [grad]
        wide = [part.astype(jnp.float32) if kind_of(part) is Kind.HALF else part for part in parts]
        divided = [part * factor.astype(part.dtype) / divisor.astype(part.dtype) for part in wide]
        whole = lax.complex(*divided) if len(divided) > 1 else divided[0]
        unscaled.append(whole.astype(dtype))
    return unscaled, count_nonfinite(unscaled)


def _factor_and_divisor(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two 0-d float32: multiplying by one and dividing by the other gives the bits of the pure core.

    The factor is 1 for powers of two, and the divisor for other scales. Above 2**126, where the reciprocal is subnormal
    and XLA takes it for 0, a quarter goes to the other one. A multiplication alone would be slower: XLA repeats it in
    every use of its result, and reads the gradients again for each, but a division it makes once.
    """
    one, quarter = jnp.ones_like(scale), jnp.full_like(scale, 0.25)
    mantissa = lax.bitcast_convert_type(scale, jnp.int32) & 0x7FFFFF
    is_power_of_two = mantissa == 0
    shrunk = jnp.where(scale > jnp.full_like(scale, 2.0**126), quarter, one)
    small = scale * shrunk
    factor = jnp.where(is_power_of_two, shrunk, reciprocal(small))
    divisor = jnp.where(is_power_of_two, small, one / shrunk)
    # Of a scale that is a constant XLA would join the two, and their quotient may be subnormal again.
    joined: tuple[jax.Array, jax.Array] = lax.optimization_barrier((factor, divisor))
    return joined


_compiled = partial(jax.jit, static_argnums=2)(unscale_leaves)
_multiply = jax.jit(multiply_arrays)
# Apart from unscaling, since XLA would square halves as they are before they are rounded.
_sum_of_squares = jax.jit(sum_of_squares)
# Some dozens of calls are one, and no array is made of the size of the gradient.
_summarize_one = jax.jit(lambda x: summarize_arrays([x], JaxBackend().bits))


def count_nonfinite(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return how many arrays hold an inf or NaN, as a 0-d int32; traceable.

    ``x - x`` is 0 for finite elements and NaN for others, and a NaN stays in a sum, in whatever order it is taken and
    over however many devices. In a maximum it does not: XLA's for the CPU drops NaNs of large arrays, as its all-reduce
    does.
    """
    nonfinite = jnp.zeros((), dtype=jnp.int32)
    for x in arrays:
        judged = x.astype(jnp.float32) if kind_of(x) is Kind.HALF else x
        total = jnp.sum(judged - judged)
        nonfinite = nonfinite + (total != total).astype(jnp.int32)
    return nonfinite
