"""Arithmetic on arrays, without trees: unscale, clip and fingerprint, as every adapter must have them.

Written against the Python array API standard. It casts explicitly, because libraries promote half precision
differently, and reads nothing from the device, so that it runs under a tracing compiler. ``STANDARD_FUNCTIONS``,
``STANDARD_DTYPES`` and ``STANDARD_MEMBERS`` list what the core needs. Functions that make arrays get ``device=`` where
arrays have a device.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import array_api_compat
from array_api_compat import array_namespace, to_device

from gradscale.core import validation
from gradscale.core.protocols import Array, Namespace, ScaleState

STANDARD_FUNCTIONS = (
    "__array_namespace_info__",
    "all",
    "asarray",
    "astype",
    "concat",
    "finfo",
    "full_like",
    "isdtype",
    "isfinite",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "real",
    "reshape",
    "stack",
    "where",
    "zeros",
    "zeros_like",
)
CLIPPING_FUNCTIONS = ("imag", "sqrt", "sum")
"""Names that clipping needs of a library besides."""
# float64 only on devices whose __array_namespace_info__ has it.
STANDARD_DTYPES = ("float32", "float64", "int32")
# Of an array; device if its library knows of devices, to_device only where arrays are on several, and the conversion to
# int only for the host read.
STANDARD_MEMBERS = (
    *("dtype", "shape", "device", "to_device"),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__neg__", "__lt__", "__le__", "__eq__", "__ge__", "__ne__"),
    *("__getitem__", "__int__"),
)

NormOver: TypeAlias = Literal["rank", "group"]

_NUMPY = ("numpy", "array_api_compat.numpy")

# torch's clip_grad_norm_ adds it to the norm.
_EPSILON = 1e-6

# The least magnitude that rounds to inf, half a unit above the largest number.
_ROUNDS_TO_INF = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp127")}


def device(x: Array) -> object:
    """Return an array's device; None if the arrays of its library have none."""
    try:
        return array_api_compat.device(x)
    except AttributeError:
        return None


def device_kwargs(where: object) -> dict[str, object]:
    """Return the options that make an array on a device; none for None, as not all libraries have ``device=``."""
    return {} if where is None else {"device": where}


class UnitState(ScaleState):
    """A state whose scale the caller knows to be 1, so that nothing has to be divided."""


class Kind(enum.Enum):
    """How a dtype is computed with."""

    HALF = "half"  # real, narrower than float32: widened to float32 and cast back
    WIDE = "wide"  # float32 and wider, and complex: computed in itself
    COMPLEX = "complex"
    INTEGRAL = "integral"  # integers and booleans: passed through
    UNKNOWN = "unknown"  # text, objects, records: no gradients


@functools.lru_cache(maxsize=1024)
def dtype_kind(dtype: object, xp: Namespace) -> Kind:
    """Classify a dtype of a namespace."""
    if any(name in str(dtype) for name in ("bfloat16", "float8_", "float6_", "float4_")):
        # Under NumPy these belong to ml_dtypes, and isdtype and finfo raise for them.
        return Kind.HALF
    if "float0" in str(dtype):
        # JAX's gradient of an integer: a NumPy record without content.
        return Kind.INTEGRAL
    try:
        if xp.isdtype(dtype, "complex floating"):
            return Kind.COMPLEX
        if xp.isdtype(dtype, ("integral", "bool")):
            return Kind.INTEGRAL
        if not xp.isdtype(dtype, "real floating"):
            return Kind.UNKNOWN
    except TypeError:
        return Kind.UNKNOWN
    return Kind.HALF if xp.finfo(dtype).bits < 32 else Kind.WIDE


def kind_of(x: Array) -> Kind:
    """Return how an array is computed with."""
    return dtype_kind(x.dtype, array_namespace(x))


def is_floating(x: Array) -> bool:
    """Tell whether an array holds real or complex floating numbers."""
    return kind_of(x) not in (Kind.INTEGRAL, Kind.UNKNOWN)


def widened(x: Array) -> Array:
    """Return an array narrower than float32 as float32, which is exact, and any other as it is."""
    return array_namespace(x).astype(x, array_namespace(x).float32) if kind_of(x) is Kind.HALF else x


def scaled(x: Array, factor: Array) -> Array:
    """Multiply a floating array by a 0-d float32 on its device; a 0-d one of half precision comes back as float32."""
    with _quiet(array_namespace(x)):
        wide = multiply(widened(x), factor)
    return wide if x.shape == () else narrowed(wide, x.dtype)


def narrowed(wide: Array, dtype: object) -> Array:
    """Round an array to a dtype; one that has it already is not copied."""
    if wide.dtype == dtype:
        return wide
    xp = array_namespace(wide)
    with _quiet(xp):
        return xp.astype(wide, dtype)


def _quiet(xp: Namespace) -> contextlib.AbstractContextManager[object]:
    """Return a context in which NumPy does not raise for inf and subnormals, though the program has told it to."""
    quiet: contextlib.AbstractContextManager[object]
    quiet = xp.errstate(all="ignore") if xp.__name__ in _NUMPY else contextlib.nullcontext()
    return quiet


def nonfinite_flag(stored: Array, where: object, wide: Array | None = None) -> Array:
    """Return whether an array, rounded from a wide one if there is one, holds an inf or NaN: 0-d int32 on a device.

    Compilers that join kernels may leave out the rounding to half precision between two of them, so that a number that
    is stored as inf would pass as finite: torch's inductor does, and XLA on GPUs.
    """
    xp, bound = array_namespace(stored), _ROUNDS_TO_INF.get(str(stored.dtype).rpartition(".")[2])
    if wide is None or bound is None or wide.dtype == stored.dtype:
        # isfinite is not there for every narrow type.
        is_finite = xp.isfinite(widened(stored))
    else:
        is_finite = xp.logical_and(wide < bound, -bound < wide)
    bad = xp.astype(xp.logical_not(xp.all(is_finite)), xp.int32)
    return bad if device(stored) == where else to_device(bad, where)


def unscale_arrays(
    grads: Sequence[Array], state: ScaleState, *, dtype: object = None, out: Sequence[Array] | None = None
) -> tuple[list[Array], Array]:
    """Divide floating arrays by the scale into new ones and count the non-finite; every adapter must equal this."""
    state_xp = array_namespace(state.scale)
    check_real_dtype(state.scale, dtype)
    where = device(state.scale)
    first, second = map(replicas, inverse_factors(state.scale))
    nonfinite = state_xp.zeros((), dtype=state_xp.int32, **device_kwargs(where))
    unscaled = []
    wanted_dtypes = [dtype] * len(grads) if out is None else [target.dtype for target in out]
    for x, wanted_dtype in zip(grads, wanted_dtypes, strict=True):
        wide = x if isinstance(state, UnitState) else multiply(multiply(widened(x), first(x)), second(x))
        stored_dtype = x.dtype if wanted_dtype is None or (kind_of(x) is Kind.COMPLEX and out is None) else wanted_dtype
        stored = narrowed(wide, stored_dtype)
        unscaled.append(stored)
        nonfinite = nonfinite + nonfinite_flag(stored, where, wide)
    return unscaled, as_0d_array(state_xp, nonfinite)


def real_parts(x: Array) -> Sequence[Array]:
    """Return the real and the imaginary part of a complex array, and another one as it is."""
    xp = array_namespace(x)
    return (xp.real(x), xp.imag(x)) if kind_of(x) is Kind.COMPLEX else (x,)


def sum_of_squares(arrays: Sequence[Array], like: Array) -> Array:
    """Return the sum of the squares of all elements on the device of ``like``, in float64 if it has that."""
    xp, where = array_namespace(like), device(like)
    total = xp.zeros((), dtype=_widest(xp, where), **device_kwargs(where))
    for x in [part for each in arrays for part in real_parts(each)]:
        wide = xp.astype(x, _widest(xp, device(x)))
        # In a dtype that both devices have.
        square = xp.astype(xp.sum(wide * wide), wide.dtype if wide.dtype == xp.float32 else total.dtype)
        square = square if device(x) == where else to_device(square, where)
        total = as_0d_array(xp, total + xp.astype(square, total.dtype))
    return total


def _widest(xp: Namespace, where: object) -> object:
    return xp.float64 if has_float64(xp, where) else xp.float32


def multiply_arrays(arrays: Sequence[Array], factor: Array) -> list[Array]:
    """Multiply floating arrays by a 0-d float32, rounded once to their dtypes: new arrays."""
    there = replicas(factor)
    return [narrowed(multiply(widened(x), there(x)), x.dtype) for x in arrays]


def checked_norm(max_norm: object) -> float:
    """Return a largest norm as a float that is not negative; infinity is allowed."""
    return validation.number("max_norm", max_norm, at_least=0.0, is_finite=False)


def clip_factor(squares: Array, max_norm: float) -> tuple[Array, Array, Array]:
    """Return the norm, the factor to multiply arrays by (0-d float32), and whether that is an overflow (0-d int32).

    The factor is ``max_norm / (norm + 1e-6)``, as in torch's ``clip_grad_norm_``, but at most 1; 1 for a norm that is
    not finite. A norm that is not finite in float32 is an overflow, and so is a factor so small that it loses bits.
    """
    xp = array_namespace(squares)
    # No finite norm is above the largest float32; beyond it the quotient would overflow.
    bound = xp.full_like(squares, min(max_norm, validation.LARGEST_FLOAT32))
    wide = as_0d_array(xp, xp.sqrt(squares))
    one = xp.full_like(wide, 1.0)
    divisor = wide + xp.full_like(wide, _EPSILON)
    norm = as_0d_array(xp, xp.astype(wide, xp.float32))
    is_clipped = xp.logical_and(bound < divisor, xp.isfinite(norm))
    wanted = xp.where(is_clipped, bound, one) / xp.where(is_clipped, divisor, one)
    factor = as_0d_array(xp, xp.astype(wanted, xp.float32))
    is_lost = xp.logical_and(xp.zeros_like(wanted) < wanted, wanted < xp.full_like(wanted, validation.SMALLEST_NORMAL))
    overflows = xp.logical_or(xp.logical_not(xp.isfinite(norm)), is_lost)
    return norm, factor, as_0d_array(xp, xp.astype(overflows, xp.int32))


def clip_numbers(
    norm: float, max_norm: float, scale: float = 1.0, *, is_judged: bool = True
) -> tuple[float, float, bool]:
    """Return the answer of ``clip_factor`` as numbers, for the norm of gradients that are to be divided by a scale.

    If nobody judges them, they are clipped by a norm that float32 cannot hold, too.
    """
    unscaled = norm / scale
    rounded = validation.round_to_float32(unscaled)
    is_finite = math.isfinite(rounded if is_judged else unscaled)
    factor = (min(1.0, max_norm / (unscaled + _EPSILON)) if is_finite else 1.0) / scale
    return rounded, factor, not is_finite or 0.0 < factor < validation.SMALLEST_NORMAL


def clip_factor_of(norm: float, max_norm: float, like: Array, flag: Array) -> tuple[Array, Array, Array]:
    """Return the answer of ``clip_factor`` for a norm that is a float, so that all ranks clip alike."""
    xp = array_namespace(like)
    rounded, factor, overflows = clip_numbers(norm, max_norm)
    return xp.full_like(like, rounded), xp.full_like(like, factor), xp.full_like(flag, 1 if overflows else 0)


def check_real_dtype(like: Array, dtype: object) -> None:
    """Raise InvalidValueError for a wanted dtype that is neither None nor real floating."""
    if dtype is None:
        return
    try:
        accepted = dtype_kind(dtype, array_namespace(like)) in (Kind.HALF, Kind.WIDE)
    except (AttributeError, TypeError, ValueError):
        accepted = False
    if not accepted:
        expected = "a real floating dtype of the gradients' library, such as np.float32 or torch.float32"
        raise validation.wrong_value(dtype, "dtype= or master_dtype", expected, f" of type {type(dtype).__name__}")


def inverse_factors(scale: Array) -> tuple[Array, Array]:
    """Return two 0-d float32 arrays; multiplying by the first and then the second is dividing by the scale.

    They are 1 and the reciprocal. Above 2**126 that is subnormal, which compilers such as XLA flush to 0: then they
    are a quarter and the reciprocal of a quarter of the scale.
    """
    xp = array_namespace(scale)
    one, quarter = xp.full_like(scale, 1.0), xp.full_like(scale, 0.25)
    whole = reciprocal(scale)
    is_lost = whole == xp.zeros_like(whole)
    reduced = xp.where(is_lost, scale * quarter, one)
    second = xp.where(is_lost, reciprocal(as_0d_array(xp, reduced)), whole)
    return as_0d_array(xp, xp.where(is_lost, quarter, one)), as_0d_array(xp, second)


def reciprocal(x: Array) -> Array:
    """Return 1/x of a 0-d float32, computed in float64 if possible: some compilers divide float32 inexactly.

    Without float64 the last bit is the compiler's own, such as XLA's on a GPU; for powers of two there is no rounding.
    """
    xp = array_namespace(x)
    wide = xp.astype(x, _widest(xp, device(x)))
    return as_0d_array(xp, xp.astype(xp.full_like(wide, 1.0) / wide, xp.float32))


def has_float64(xp: Namespace, where: object) -> bool:
    """Tell whether a device computes in float64."""
    return "float64" in xp.__array_namespace_info__().dtypes(device=where, kind="real floating")


def fingerprint(state: ScaleState, bits: Array | None = None) -> Array:
    """Return a state as a 1-d int32 array: the IEEE bits of the scale, which adapters may give, then each tracker."""
    return array_namespace(state.scale).stack(state_fields(state, bits))


def state_fields(state: ScaleState, bits: Array | None) -> list[Array]:
    """Return the fields of a :func:`fingerprint`, 0-d."""
    xp = array_namespace(state.scale)
    return [as_0d_array(xp, x) for x in (float32_bits(state.scale) if bits is None else bits, *state[1:])]


def float32_bits(x: Array) -> Array:
    """Return the bits of a 0-d float32 that is normal and above zero, as int32."""
    xp = array_namespace(x)
    significand, exponent = significand_and_exponent(x)
    fraction = xp.astype((significand - xp.full_like(x, 1.0)) * xp.full_like(x, 2.0**23), xp.int32)
    return as_0d_array(xp, (exponent + xp.full_like(exponent, 127)) * xp.full_like(exponent, 2**23) + fraction)


def significand_and_exponent(x: Array) -> tuple[Array, Array]:
    """Return a 0-d float that is finite and not negative as one from 1 to 2, or 0, and an int32 power of two. Exact."""
    xp = array_namespace(x)
    steps = {32: 7, 64: 10}.get(xp.finfo(x.dtype).bits, 14)
    grow, shrink = [xp.full_like(x, 2.0)], [xp.full_like(x, 0.5)]
    for _ in range(steps - 1):
        # Longer types have powers of two that no Python float holds.
        grow.append(grow[-1] * grow[-1])
        shrink.append(shrink[-1] * shrink[-1])
    zero = xp.zeros((), dtype=xp.int32, **device_kwargs(device(x)))
    exponent = zero
    for k in reversed(range(steps)):
        large = x >= grow[k]
        x = xp.where(large, x * shrink[k], x)
        exponent = exponent + xp.where(large, xp.full_like(zero, 2**k), zero)
    # The first step twice, for subnormals.
    for k in (steps - 1, *reversed(range(steps))):
        small = x < shrink[k] * grow[0]
        x = xp.where(small, x * grow[k], x)
        exponent = exponent - xp.where(small, xp.full_like(zero, 2**k), zero)
    return x, exponent


def multiply(x: Array, factor: Array) -> Array:
    """Multiply by a 0-d float32 in the dtype of ``x``, which is float32, wider or complex."""
    xp = array_namespace(x)
    if x.dtype != factor.dtype:
        factor = xp.astype(factor, xp.real(x).dtype if kind_of(x) is Kind.COMPLEX else x.dtype)
    return as_0d_array(xp, x * factor)


def library_name(xp: Namespace) -> str:
    """Return the name of an array namespace's library as people write it: ``numpy``, ``jax``, ``dask``."""
    return str(xp.__name__).removeprefix("array_api_compat.").partition(".")[0]


def lacks(like: Array) -> dict[str, list[str]]:
    """Return by kind the functions, dtypes and members of arrays that a library lacks of those that the core needs."""
    xp = array_namespace(like)
    functions, dtypes = _missing(xp, STANDARD_FUNCTIONS), _missing(xp, STANDARD_DTYPES)
    if not functions:
        try:
            xp.__array_namespace_info__()
        except RuntimeError:
            # A library that is set to an older standard, and says so where it is called.
            functions.append("__array_namespace_info__")
    members = _missing(like, STANDARD_MEMBERS)
    if "__int__" in members and (hasattr(like, "compute") or hasattr(like, "tolist")):
        # Backend.read gets the values otherwise.
        members.remove("__int__")
    missing = {"functions": functions, "dtypes": dtypes, "members of arrays": members}
    return {kind: names for kind, names in missing.items() if names}


def _missing(owner: object, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in ("float64", "device", "to_device") and not hasattr(owner, name)]


def as_0d_array(xp: Namespace, x: Array) -> Array:
    """Return an array where NumPy's operators give a scalar; torch's asarray would detach others from their graph."""
    return xp.asarray(x) if xp.__name__ in _NUMPY else x


def replicas(
    x: Array, placement: Callable[[Array], object] = device, move: Callable[[Array, Array], Array] | None = None
) -> Callable[[Array], Array]:
    """Return a function that gives a copy of a 0-d array on the device of another one, and keeps the copies.

    ``placement`` says where a 0-d array must be, None for anywhere; ``move`` copies it in the order of streams.
    """
    # Pairs, since CuPy's devices can be compared and have no hash.
    copies = [(placement(x), x)]

    def copy_beside(like: Array) -> Array:
        where = placement(like)
        if where is None:
            return x
        for place, copy in copies:
            if place == where:
                return copy
        replica = to_device(x, where) if move is None else move(x, like)
        copies.append((where, replica))
        return replica

    return copy_beside
