"""JaxBackend: JAX arrays and traced values; one pass over each gradient, and the read of a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from gradscale import Backend, ScaleState
from gradscale.core.arithmetic import Kind, check_real_dtype, has_float64, kind_of, multiply, reciprocal, widened
from gradscale.core.summaries import summarize_arrays
from gradscale.errors import InvalidTypeError

__all__ = ["JaxBackend", "count_nonfinite", "unscale_leaves"]

_WORDS = {"float16": jnp.int16, "bfloat16": jnp.int16, "float32": jnp.int32, "float64": jnp.int64}


class JaxBackend(Backend):
    """JAX arrays, on one device or spread over many, and the values that jit, grad and vmap trace.

    Examples
    --------
    >>> import gradscale, gradscale_jax, jax.numpy as jnp
    >>> state = gradscale.DynamicScale(init_scale=4.0).init(jnp.zeros(()))
    >>> gradscale_jax.JaxBackend().unscale([jnp.asarray([2.0, 4.0])], state)
    ([Array([0.5, 1. ], dtype=float32)], Array(0, dtype=int32))
    """

    name = "jax"

    def __reduce__(self) -> tuple[type[JaxBackend], tuple[()]]:
        return type(self), ()

    def read(self, x: jax.Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints.

        Raises
        ------
        InvalidTypeError
            For a traced value: there is nothing to read before the compiled function runs.
        """
        if isinstance(x, jax.core.Tracer):
            msg = (
                "a gradient scaler reads its verdict on the host, which a function that jax traces cannot do, got "
                f"{x!r}: call step() outside jit, or use gradscale_jax.value_and_grad inside"
            )
            raise InvalidTypeError(msg)
        values: list[int] = np.asarray(x).tolist()
        return values

    def refuse_tracing(self, what: str, /) -> None:
        """Raise where jax traces: what a scaler holds would be a constant of the compiled function.

        Raises
        ------
        InvalidTypeError
            Under jit, scan, ``jax.checkpoint`` and others that compile; not under plain grad and vmap.
        """
        if isinstance(jnp.zeros(()), jax.core.Tracer):
            msg = (
                f"{what} was called in a function that jax traces, which would keep the scale of this moment for good: "
                f"call it outside of jit, or use gradscale_jax.value_and_grad, or gradscale_jax.scale(loss, state) "
                f"with a state that is an argument"
            )
            raise InvalidTypeError(msg)

    def placement(self, like: jax.Array, /) -> Any:
        """Return where a 0-d array must be to be combined with ``like``; None for traced and uncommitted arrays.

        Beside an array that is spread over a mesh it is replicated over it.
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
        return bits_of(x)

    def summarize(self, arrays: Sequence[jax.Array], /) -> jax.Array:
        """Return what :func:`gradscale.core.summaries.summarize_arrays` does, from the bits: XLA's subnormals are 0.

        Parameters
        ----------
        arrays : sequence of arrays
            Of the dtypes that ``unscale`` takes, on any devices; one compiled call for each set of devices.
        """
        groups = self._by_placement(arrays)
        home = self.placement(arrays[0])
        rows: list[Any] = [None] * len(arrays)
        for indices in groups.values():
            made = _summarize_compiled([arrays[index] for index in indices])
            for index, row in zip(indices, made, strict=True):
                rows[index] = row if len(groups) == 1 else jax.device_put(row, home)
        return jnp.concatenate(rows)

    def unscale(
        self, grads: Sequence[jax.Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Any] | None = None
    ) -> tuple[list[jax.Array], jax.Array]:
        """Divide arrays by the scale and count those with a non-finite value.

        Parameters
        ----------
        grads : sequence of arrays
            float16, bfloat16, float8, float32, float64 (with x64), complex; traced or not, on any devices.
        state : ScaleState
            Gives the scale.
        dtype : dtype, optional
            Wanted dtype of the real ones.
        out : sequence of arrays, optional
            Arrays whose dtypes are wanted; never written to, since JAX arrays cannot be.

        Returns
        -------
        arrays : list of arrays
            New ones. Outside jit it is one compiled call for each set of devices; within jit the caller's compiler sees
            it, and may write over gradients that were donated to it.
        nonfinite : array
            0-d int32.
        """
        check_real_dtype(state.scale, dtype)
        wanted = tuple(_stored_dtypes(grads, dtype, out))
        if any(isinstance(x, jax.core.Tracer) for x in (*grads, state.scale)):
            return unscale_leaves(list(grads), state.scale, wanted)
        groups = self._by_placement(grads)
        home = self._home(groups, state)
        unscaled: list[Any] = [None] * len(grads)
        nonfinite = jnp.zeros((), dtype=jnp.int32, device=home)
        for where, indices in groups.items():
            scale = state.scale if where is None else jax.device_put(state.scale, where)
            chosen = [grads[index] for index in indices]
            made, count = _compiled(chosen, scale, tuple(wanted[index] for index in indices))
            for index, array in zip(indices, made, strict=True):
                unscaled[index] = array
            nonfinite = nonfinite + (count if home is None else jax.device_put(count, home))
        return unscaled, nonfinite

    def unscale_with_squares(
        self, grads: Sequence[jax.Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Any] | None = None
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """Do what ``unscale`` does, and return the sum of the squares of all unscaled elements, too.

        It is 0-d float64 with x64, else float32, where the count is: beside the state. One more compiled call for each
        set of devices; over those of a mesh the elements are summed in another order than on one.
        """
        unscaled, nonfinite = self.unscale(grads, state, dtype=dtype, out=out)
        groups = self._by_placement(unscaled)
        home = self._home(groups, state)
        squares = jnp.zeros((), dtype=_widest(), device=home)
        for indices in groups.values():
            found = _sum_of_squares([unscaled[index] for index in indices])
            squares = squares + (found if home is None else jax.device_put(found, home))
        return unscaled, nonfinite, squares

    def multiply_in_place(self, arrays: Sequence[jax.Array], factor: jax.Array, /) -> list[jax.Array]:
        """Multiply arrays by a 0-d float32, rounded once to their dtypes.

        Returns
        -------
        list of arrays
            New ones, spread as the given ones; one compiled call for each set of devices. No host read.
        """
        multiplied: list[Any] = [None] * len(arrays)
        for where, indices in self._by_placement(arrays).items():
            there = factor if where is None else jax.device_put(factor, where)
            made = _multiply([arrays[index] for index in indices], there)
            for index, array in zip(indices, made, strict=True):
                multiplied[index] = array
        return multiplied

    def _by_placement(self, arrays: Sequence[jax.Array]) -> dict[Any, list[int]]:
        """Return the positions of arrays by where they are: each set is one compiled call."""
        groups: dict[Any, list[int]] = {}
        for index, array in enumerate(arrays):
            groups.setdefault(self.placement(array), []).append(index)
        return groups

    def _home(self, groups: dict[Any, list[int]], state: ScaleState) -> Any:
        """Return where what is found in groups of arrays is added up: beside the state, or None for anywhere.

        Arrays on no chosen device go anywhere; sums of several devices need one.
        """
        return self.placement(state.scale) or (next(filter(None, groups)) if len(groups) > 1 else None)


def _stored_dtypes(grads: Sequence[Any], dtype: Any, out: Sequence[Any] | None = None) -> list[Any]:
    """Return the dtype that each unscaled gradient has."""
    if out is not None:
        return [target.dtype for target in out]
    if dtype is None:
        return [grad.dtype for grad in grads]
    return [grad.dtype if kind_of(grad) is Kind.COMPLEX else jnp.dtype(dtype) for grad in grads]


def unscale_leaves(grads: Sequence[Any], scale: Any, dtypes: Sequence[Any]) -> tuple[list[Any], Any]:
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


def _factor_and_divisor(scale: Any) -> tuple[Any, Any]:
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
    joined: tuple[Any, Any] = lax.optimization_barrier((factor, divisor))
    return joined


_compiled = partial(jax.jit, static_argnums=2)(unscale_leaves)


def _widest() -> Any:
    return jnp.float64 if has_float64(jnp, None) else jnp.float32


# Apart from unscaling, since XLA would square halves as they are before they are rounded.
@jax.jit
def _sum_of_squares(arrays: Sequence[Any]) -> Any:
    total = jnp.zeros((), dtype=_widest())
    for x in arrays:
        for part in (x.real, x.imag) if kind_of(x) is Kind.COMPLEX else (x,):
            wide = part.astype(_widest())
            total = total + jnp.sum(wide * wide)
    return total


@jax.jit
def _multiply(arrays: Sequence[Any], factor: Any) -> list[Any]:
    return [multiply(jnp, widened(x), factor).astype(x.dtype) for x in arrays]


def bits_of(x: jax.Array) -> jax.Array | None:
    """Return the bits of real values as signed integers, None for float8; traceable."""
    word = _WORDS.get(x.dtype.name)
    return None if word is None else lax.bitcast_convert_type(x, word)


@jax.jit
def _summarize_compiled(arrays: Sequence[Any]) -> list[Any]:
    return [summarize_arrays([x], bits_of) for x in arrays]


def count_nonfinite(arrays: Sequence[Any]) -> Any:
    """Return how many arrays hold an inf or NaN, as a 0-d int32; traceable.

    ``x - x`` is 0 for what is finite and NaN for what is not, and a NaN stays in a sum, in whatever order it is taken
    and over however many devices. It does not in a maximum: XLA's for the CPU drops NaNs of large arrays, as its
    all-reduce does.
    """
    nonfinite = jnp.zeros((), dtype=jnp.int32)
    for x in arrays:
        judged = x.astype(jnp.float32) if kind_of(x) is Kind.HALF else x
        total = jnp.sum(judged - judged)
        nonfinite = nonfinite + (total != total).astype(jnp.int32)
    return nonfinite
