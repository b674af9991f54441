"""The conformance suite for adapters, libraries and groups; offered in ``gradscale.testing``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from array_api_compat import array_namespace, is_array_api_obj
from array_api_compat import device as device_of

from gradscale.core import arithmetic, ops, registry, summaries, validation, vector
from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.errors import BackendNotAvailableError, GradscaleError, InvalidTypeError
from gradscale.policies import spikes
from gradscale.policies.dynamic import DynamicScale
from gradscale.policies.rules import GradualScale

__all__ = ["check_backend", "check_collectives", "check_library"]

_CORE = Backend()
_SCALES = (1.0, 65536.0, 2.0**-10, 3.0, 2.0**127, validation.SMALLEST_NORMAL)
# Those with bad values at each place in turn: an adapter may treat powers of two, and the others, apart.
_SWEPT = (65536.0, 3.0)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (1031,))
_BAD = (math.inf, -math.inf, math.nan)
_SMALLEST = validation.SMALLEST_NORMAL
# Of the smallest normal float32, for subnormals before and after a division.
_PARTS = (2.0, 1.5, 1.0, 0.75, 0.3, 2.0**-22, 2.0**-23)
_OF_FLOAT32 = (23, 7)  # bits of the fractions of float32, and of bfloat16, which is computed in it
_FACTORS = (1.0, 0.5, 0.3, 0.0)
# They grow, back off, tolerate, stop at bounds and raise within these counts.
_RULES = (
    DynamicScale(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, hysteresis=2, max_scale=9.0),
    DynamicScale(init_scale=4.0, growth_interval=1, tolerance=0.3, min_scale=2.0, at_min="raise"),
    GradualScale(init_scale=8.0, growth_interval=3),
)
_COUNTS = (0, 0, 0, 1, 3, 0, 1, 1, 0, 0)
_SQUARES = (0.0, 1e-50, 6.25, 25.0, 1e70, 1e80, math.inf, math.nan)
_MAX_NORMS = (0.0, 2.5, math.inf)
# For libraries: round_to_float32 is the oracle.
_VALUES = (1.0, -2.5, 0.0, 3.0, 65504.0, 2.0**-100)
_LIBRARY_SCALES = (65536.0, 3.0, 2.0**-10)


def _fail(what: str) -> NoReturn:
    raise AssertionError(what)


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        _fail(f"{what} must be {expected!r}, got {got!r}")


def check_backend(backend: Backend, like: Array, *, dtypes: Sequence[object] | None = None) -> None:
    """Check an array adapter against the pure core, bit for bit.

    If the library takes subnormals for 0, as CuPy's kernels and XLA do, the adapter may keep them, exactly.

    Parameters
    ----------
    backend : Backend
        The adapter.
    like : array
        Any array of its library, on the device to test.
    dtypes : sequence of dtypes, optional
        Floating dtypes that it serves. Default: float32, and float64 if the device has it.

    Raises
    ------
    AssertionError
        With the case and both answers, if it differs from the pure core.
    InvalidTypeError
        For a backend that does not derive from :class:`gradscale.Backend`.

    Examples
    --------
    >>> import gradscale, gradscale_numpy, numpy as np
    >>> backend = gradscale_numpy.NumpyBackend(fast=False)
    >>> with np.errstate(all="ignore"):
    ...     gradscale.testing.check_backend(backend, np.zeros(1), dtypes=[np.float32])  # nothing raised: no difference
    """
    if not isinstance(backend, Backend):
        msg = f"backend must be an instance of a class that derives from gradscale.Backend, got {shown(backend)}"
        raise InvalidTypeError(msg)
    xp, device = array_namespace(like), device_of(like)
    if dtypes is None:
        dtypes = [xp.float32] + ([xp.float64] if arithmetic.has_float64(xp, device) else [])
    _check_reading(backend, xp, device)
    # A member that is not overridden is the pure function, with which it would be compared.
    overridden = {name for name in vars(Backend) if getattr(type(backend), name) is not getattr(Backend, name)}
    by_member = (
        ("scale", _check_scale),
        ("unscale_with_squares", _check_squares),
        ("multiply_in_place", _check_multiplication),
    )
    checks = [check for member, check in by_member if member in overridden]
    if backend.computes_on_host:
        checks.append(_check_plain)
    if overridden & {"update", "pack"}:
        _check_rules(backend, like)
    if "clip_factor" in overridden:
        _check_clip_factor(backend, xp, device)
    swept = _SWEPT if "unscale" in overridden else ()
    for dtype in dtypes:
        few, many = (list(_value_sets(xp, device, dtype, everywhere=everywhere)) for everywhere in (False, True))
        if overridden & {"summarize", "bits"}:
            _check_summaries(backend, many)
        for scale in _SCALES:
            state = DynamicScale(init_scale=scale).init(like)
            _check_fingerprint(backend, state)
            for values in many if scale in swept else few:
                _check_unscale(backend, state, values, scale)
            for values in few if scale in _SWEPT else ():
                for check in checks:
                    check(backend, state, values)
            if dtype == xp.float32 and "unscale" in overridden:
                _check_subnormals(backend, like, scale)


def _check_reading(backend: Backend, xp: ModuleType, device: object) -> None:
    expected = [0, -1, validation.LARGEST_INT32, -validation.LARGEST_INT32, 7]
    got = backend.read(xp.asarray(expected, dtype=xp.int32, device=device))
    if got != expected or not all(type(value) is int for value in got):
        _fail(f"read must give Python ints {expected}, got {got!r}")
    made = backend.integers(expected, xp.zeros((), dtype=xp.float32, device=device))
    if made.shape != (5,) or made.dtype != xp.int32 or backend.read(made) != expected:
        _fail(f"integers must give a 1-d int32 array of {expected}, got {made!r}")
    placed = xp.zeros((), dtype=xp.float32, device=backend.placement(xp.zeros((2,), device=device)))
    if (placed + xp.ones((2,), dtype=xp.float32, device=device)).shape != (2,):
        _fail(f"placement must let a 0-d array be combined with others, got {placed!r}")
    example = backend.example()
    if example.shape != () or example.dtype != array_namespace(example).float32:
        _fail(f"example must give a 0-d float32, got {example!r}")


def _check_fingerprint(backend: Backend, state: ScaleState) -> None:
    counters = [array_namespace(state.scale).full_like(state.growth_tracker, value) for value in (3, 2**31 - 1, 0)]
    state = ScaleState(state.scale, *counters)
    pure = backend.read(arithmetic.fingerprint(state))
    _expect(f"fingerprint of {state}", backend.read(backend.fingerprint(state)), pure)


def _check_rules(backend: Backend, like: Array) -> None:
    """Check ``update`` and ``pack`` through the lives of some policies."""
    xp, device = array_namespace(like), device_of(like)
    about = [validation.LARGEST_INT32, -1, *range(vector.ABOUT - 2)]
    for policy in _RULES:
        state = policy.init(like)
        for count in _COUNTS:
            nonfinite = xp.asarray(count, dtype=xp.int32, device=device)
            sent = [
                backend.read(pack(policy, state, nonfinite, about, has_gradients=count != 3, code=count))
                for pack in (backend.pack, functools.partial(Backend.pack, backend))
            ]
            _expect(f"pack of {state} and a count of {count}, by {policy}", *sent)
            updated = policy.update(state, nonfinite=nonfinite)
            states = backend.update(policy, state, nonfinite), updated
            bits = [backend.read(arithmetic.fingerprint(one)) for one in states]
            _expect(f"update of {state} and a count of {count}, by {policy}", *bits)
            state = updated


def _check_clip_factor(backend: Backend, xp: ModuleType, device: object) -> None:
    dtype = xp.float64 if arithmetic.has_float64(xp, device) else xp.float32
    for value in _SQUARES:
        squares = xp.asarray(value, dtype=dtype, device=device)
        for max_norm in _MAX_NORMS:
            case = f"clip_factor of the sum {value} and at most {max_norm}"
            pairs = zip(backend.clip_factor(squares, max_norm), arithmetic.clip_factor(squares, max_norm), strict=True)
            for got, expected in pairs:
                _expect_arrays(backend, case, [got], [expected], [value])


def _check_summaries(backend: Backend, sets: Sequence[Sequence[Array]]) -> None:
    """Check ``summarize`` on the arrays of all sets, and on subnormals, which some compilers take for 0."""
    values = list({id(x): x for arrays in sets for x in arrays}.values())
    xp, dtype = array_namespace(values[0]), values[0].dtype
    wanted = summaries.summaries_of(values, backend.read(summaries.summarize_arrays(values)))
    for x, want, got in zip(values, wanted, backend.read_summaries(values)[0], strict=True):
        if got != want:
            _fail(f"summarize of {x!r}, dtype {dtype}, must say {want}, got {got}")
    if dtype in (xp.float32, getattr(xp, "float64", None)):
        tiny = 2.0**-126 if dtype == xp.float32 else 2.0**-1022
        special = [tiny / 2, -tiny / 2, tiny, 0.0, -0.0]
        # Made from Python's numbers, and not computed.
        (got,), _ = backend.read_summaries([xp.asarray(special, dtype=dtype, device=device_of(values[0]))])
        if got != summaries.Summary(5, 0, 0, 2, 2, tiny):
            _fail(f"summarize of {special}, dtype {dtype}, must say 2 zeros, 2 subnormals, largest {tiny}, got {got}")


def _check_subnormals(backend: Backend, like: Array, scale: float) -> None:
    """Check ``unscale`` on float32 subnormals, given and made, against Python's numbers."""
    xp, device = array_namespace(like), device_of(like)
    values = [sign * validation.round_to_float32(_SMALLEST * part) for part in _PARTS for sign in (1.0, -1.0)]
    given = xp.asarray(values, dtype=xp.float32, device=device)
    (made,), _ = backend.unscale([given], DynamicScale(init_scale=scale).init(like))
    bits = backend.bits(made)
    if bits is None:
        return
    is_lost = _loses_subnormals(backend, xp, device)
    inverse = validation.round_to_float32(1.0 / scale)
    for value, got in zip(values, backend.read(bits), strict=True):
        kept = validation.round_to_float32(value * inverse)
        is_subnormal = min(abs(value), abs(kept)) < _SMALLEST
        if got != validation.bits_of_float32(kept) and not (
            is_lost and is_subnormal and got == validation.bits_of_float32(math.copysign(0.0, value))
        ):
            who = "the library takes subnormals for 0" if is_lost else "the library keeps subnormals"
            _fail(
                f"unscale of {value!r}, scale {scale}, must give {kept!r}{' or 0' * is_lost}, since {who}, got "
                f"{validation.float32_from_bits(got)!r}"
            )


def _value_sets(xp: ModuleType, device: object, dtype: object, *, everywhere: bool = True) -> Iterator[list[Array]]:
    """Yield lists of arrays: clean ones, and each kind of bad value in the middle of all, or at each place in turn."""
    arrays = [_ramp(xp, device, dtype, shape) for shape in _SHAPES]
    yield []
    yield arrays
    for bad in _BAD:
        if not everywhere:
            yield [_spoilt(xp, array, bad, math.prod(array.shape) // 2) for array in arrays]
            continue
        for index, array in enumerate(arrays):
            size = math.prod(array.shape)
            for place in sorted({0, size // 2, size - 1}) if size else []:
                yield [*arrays[:index], _spoilt(xp, array, bad, place), *arrays[index + 1 :]]


def _spoilt(xp: ModuleType, array: Array, bad: float, place: int) -> Array:
    flat = xp.reshape(array, (-1,))
    positions = xp.arange(flat.shape[0], device=device_of(array))
    spoilt = xp.where(positions == place, xp.full_like(flat, bad), flat)
    # CuPy's where() makes float32 of bfloat16, which would not be tested then.
    return xp.reshape(spoilt if spoilt.dtype == array.dtype else xp.astype(spoilt, array.dtype), array.shape)


def _ramp(xp: ModuleType, device: object, dtype: object, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    middle = xp.full((size,), size // 2, dtype=xp.float32, device=device)
    return xp.astype(xp.reshape(xp.arange(size, dtype=xp.float32, device=device) - middle, shape), dtype)


def _check_unscale(backend: Backend, state: ScaleState, values: list[Array], scale: float) -> None:
    """Check ``unscale`` against the pure form: into new and given arrays."""
    xp = array_namespace(state.scale)
    for dtype, into in ((None, "in place"), (xp.float32, "into float32")):
        expected, expected_count = arithmetic.unscale_arrays(values, state, dtype=dtype)
        highest = _host(backend, expected_count)
        for how in ("new arrays", into):
            given = _copies(xp, values)
            out = _outputs(xp, given, how)
            asked = dtype if out is None else None
            got, count = backend.unscale(given, state, dtype=asked, out=out)
            case = f"unscale, scale {scale}, dtype {asked}, {how}"
            if (
                isinstance(count, int)
                or (count.shape, count.dtype) != ((), xp.int32)
                or not min(highest, 1) <= _host(backend, count) <= highest
            ):
                _fail(f"{case}: the count must be {expected_count!r}, or at least 1 if that is above 0, got {count!r}")
            _expect_arrays(backend, case, got, expected, values)
            if how != "in place" and not _same(backend, given, values):
                _fail(f"{case}: the given {values!r} was modified to {given!r}")


def _check_scale(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    expected = Backend.scale(backend, values, state)
    _expect_arrays(backend, f"scale by {state.scale!r}", backend.scale(values, state), expected, values)


def _check_plain(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check that a state of Python numbers does the same as one of arrays."""
    xp = array_namespace(state.scale)
    scale = validation.float32_from_bits(backend.read(backend.fingerprint(state))[0])
    plain = ScaleState(scale, 0, 0, 0)
    case = f"scale by the number {scale!r}"
    _expect_arrays(backend, case, backend.scale(values, plain), backend.scale(values, state), values)
    for member in ("unscale", "unscale_with_squares"):
        given, other = _copies(xp, values), _copies(xp, values)
        expected, expected_count, *squares = getattr(backend, member)(given, state, out=given)
        got, count, *others = getattr(backend, member)(other, plain, out=other)
        case = f"{member} by the number {scale!r}"
        if type(count) is not int or count != _host(backend, expected_count):
            _fail(f"{case} must count {expected_count!r} as an int, got {count!r}")
        _expect_arrays(backend, case, got, expected, values)
        _expect_arrays(backend, f"{case}, sum", others, squares, [values])


def _check_squares(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check ``unscale_with_squares`` against ``unscale``, and its sum against the pure one."""
    xp = array_namespace(state.scale)
    for how in ("new arrays", "in place", "into float32"):
        given, other = _copies(xp, values), _copies(xp, values)
        expected, expected_count = backend.unscale(given, state, out=_outputs(xp, given, how))
        got, count, squares = backend.unscale_with_squares(other, state, out=_outputs(xp, other, how))
        case = f"unscale_with_squares of {values!r}, scale {state.scale!r}, {how}"
        _expect(f"{case}: the count", _host(backend, count), _host(backend, expected_count))
        _expect_arrays(backend, case, got, expected, values)
        wanted = arithmetic.sum_of_squares(expected, state.scale)
        _expect(f"{case}: the dtype and shape of the sum", _forms([squares]), _forms([wanted]))
        both_bad = xp.logical_not(xp.logical_or(xp.isfinite(squares), xp.isfinite(wanted)))
        # The elements are summed in another order.
        rounding = wanted * xp.full_like(wanted, 1e-12 if wanted.dtype != xp.float32 else 1e-4)
        is_near = xp.logical_and(squares - wanted <= rounding, wanted - squares <= rounding)
        if not _host(backend, xp.astype(xp.logical_or(both_bad, is_near), xp.int32)):
            _fail(f"{case}: the sum must be {wanted!r}, got {squares!r}")


def _check_multiplication(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    xp = array_namespace(state.scale)
    for factor in _FACTORS:
        by = xp.asarray(xp.full_like(state.scale, factor))
        got = backend.multiply_in_place(_copies(xp, values), by)
        expected = arithmetic.multiply_arrays(values, by)
        _expect_arrays(backend, f"multiply_in_place by {factor}", got, expected, values)


def _copies(xp: ModuleType, arrays: Sequence[Array]) -> list[Array]:
    return [xp.asarray(x, copy=True) for x in arrays]


def _outputs(xp: ModuleType, given: list[Array], how: str) -> list[Array] | None:
    """Return ``out=`` for a way to unscale: None, the given arrays, or new ones of float32, complex if those are."""
    if how != "into float32":
        return given if how == "in place" else None
    return [xp.zeros(x.shape, dtype=x.dtype if _is_complex(x) else xp.float32, device=device_of(x)) for x in given]


def _is_complex(x: Array) -> bool:
    return arithmetic.kind_of(x) is arithmetic.Kind.COMPLEX


def _host(backend: Backend, x: Array) -> int:
    return backend.read(array_namespace(x).reshape(x, (1,)))[0]


def _forms(arrays: Sequence[Array]) -> list[tuple[object, tuple[int, ...]]]:
    return [(x.dtype, tuple(x.shape)) for x in arrays]


def _expect_arrays(
    backend: Backend, case: str, got: Sequence[Array], expected: Sequence[Array], values: Sequence[object]
) -> None:
    """Check dtypes, shapes and values of arrays that were made of others."""
    _expect(f"{case}: the dtypes and shapes", _forms(got), _forms(expected))
    if not _same(backend, got, expected):
        for value, one, other in zip(values, got, expected, strict=True):
            if not _same(backend, [one], [other]):
                _fail(f"{case}: {value!r} must become {other!r}, got {one!r}")


def _same(backend: Backend, ones: Sequence[Array], others: Sequence[Array]) -> bool:
    """Tell whether arrays of one dtype hold the same values, with NaN equal to NaN and -0 apart from 0.

    If the library takes subnormals for 0, the first ones may hold what is lost: ``_check_subnormals`` sees to them.
    """
    if not ones or not others:
        return len(ones) == len(others)
    xp = array_namespace(ones[0])
    a, b = (xp.concat([_flat(xp, x) for x in arrays]) for arrays in (ones, others))
    if _is_complex(a):
        # Libraries differ in the products of complex infinities, of which only that they are not finite is compared.
        return _all(backend, xp.logical_or(xp.logical_not(xp.logical_or(xp.isfinite(a), xp.isfinite(b))), a == b))
    both_nan = xp.logical_and(xp.isnan(a), xp.isnan(b))
    layout = summaries.layout_of(ones[0].dtype)
    bits = [[backend.bits(x) for x in arrays] if layout is not None else [None] for arrays in (ones, others)]
    if layout is None or any(x is None for arrays in bits for x in arrays):
        same = xp.logical_or(both_nan, xp.logical_and(a == b, xp.signbit(a) == xp.signbit(b)))
    else:
        # A library that takes subnormals for 0 compares them as such, too.
        a, b = (xp.concat([xp.reshape(x, (-1,)) for x in arrays]) for arrays in bits)
        same = xp.logical_or(both_nan, a == b)
        if layout.fraction_bits in _OF_FLOAT32 and not _all(backend, same):
            is_lost = xp.logical_and(b & layout.mask == 0, a & layout.mask < layout.smallest_normal)
            if _loses_subnormals(backend, xp, device_of(a)):
                same = xp.logical_or(same, xp.logical_and(is_lost, (a < 0) == (b < 0)))
    return _all(backend, same)


def _all(backend: Backend, same: Array) -> bool:
    xp = array_namespace(same)
    return _host(backend, xp.astype(xp.all(same), xp.int32)) == 1


def _loses_subnormals(backend: Backend, xp: ModuleType, device: object) -> bool:
    """Tell whether the library takes subnormals for 0."""
    smallest, half = (xp.full((1,), value, dtype=xp.float32, device=device) for value in (_SMALLEST, 0.5))
    bits = backend.bits(smallest * half)
    return bits is not None and backend.read(bits) == [0]


def _flat(xp: ModuleType, x: Array) -> Array:
    if arithmetic.kind_of(x) is arithmetic.Kind.HALF:
        # Exact, and libraries can do more with float32.
        x = xp.astype(x, xp.float32)
    return xp.reshape(x, (-1,))


def check_library(like: Array) -> None:
    """Check that gradscale runs on a library without an adapter, by the array API standard alone.

    The library must have each function, dtype and member of arrays that gradscale needs. Scaling, policy, selection,
    clipping and diagnoses must give the bits of Python's own numbers.

    Parameters
    ----------
    like : array
        Any array of the library, on the device to test. The host reads what is computed.

    Raises
    ------
    InvalidTypeError
        For what is no array.
    BackendNotAvailableError
        If the library lacks functions or members, with their names, or fails in a computation, with its exception.
    AssertionError
        With the case and both answers, if a result is wrong.

    Examples
    --------
    >>> import gradscale
    >>> import numpy as np
    >>> gradscale.testing.check_library(np.zeros(3))
    """
    if not is_array_api_obj(like):
        msg = f"like must be an array of a library that follows the array API standard, got {like!r}"
        raise InvalidTypeError(msg)
    xp = array_namespace(like)
    _require(xp, like)
    for check in (_check_bits, _check_policy, _check_selection, _check_clipping, _check_counts, _check_spikes):
        try:
            check(xp, device_of(like))
        except (AssertionError, GradscaleError):
            raise
        except Exception as error:
            what = check.__name__.removeprefix("_check_")
            msg = f"{arithmetic.library_name(xp)} fails in gradscale's {what}, got {error!r}: write an adapter for it"
            raise BackendNotAvailableError(msg) from error


def _require(xp: ModuleType, like: Array) -> None:
    """Raise for the names that are missing."""
    missing = arithmetic.lacks(like)
    others = {*arithmetic.CLIPPING_FUNCTIONS, *summaries.STANDARD_FUNCTIONS, *spikes.STANDARD_FUNCTIONS}
    others -= set(missing.get("functions", ()))
    if absent := sorted(name for name in others if not hasattr(xp, name)):
        missing["functions for clipping, diagnoses and spikes"] = absent
    if missing:
        lacking = "; ".join(f"{kind} {', '.join(names)} missing" for kind, names in missing.items())
        msg = (
            f"{arithmetic.library_name(xp)} lacks what gradscale needs of the array API standard, got {lacking}: "
            f"write an adapter for it, derived from gradscale.Backend"
        )
        raise BackendNotAvailableError(msg)


def _expect_values(xp: ModuleType, what: str, got: Array, expected: Sequence[float]) -> None:
    """Check a 1-d float32 array, whose values are compared by the library and read as one flag."""
    wanted = xp.asarray(list(expected), dtype=xp.float32, device=device_of(got))
    _expect(f"the dtype and shape of {what}", _forms([got]), _forms([wanted]))
    if _host(_CORE, xp.astype(xp.all(got == wanted), xp.int32)) != 1:
        _fail(f"{what} must be {wanted!r}, got {got!r}")


def _expect_count(xp: ModuleType, what: str, count: Array, expected: int) -> None:
    _expect(f"the dtype and shape of {what}", _forms([count]), [(xp.int32, ())])
    _expect(what, _host(_CORE, count), expected)


def _check_bits(xp: ModuleType, device: object) -> None:
    """Check scaling and unscaling, the count of bad values and the fingerprint against Python's numbers."""
    round32 = validation.round_to_float32
    values = [round32(value) for value in _VALUES]
    x = xp.asarray(values, dtype=xp.float32, device=device)
    for scale in _LIBRARY_SCALES:
        state, inverse = DynamicScale(init_scale=scale).init(x), round32(1.0 / scale)
        bits = [validation.bits_of_float32(scale), 0, 0, 0]
        _expect("the fingerprint", _CORE.read(_CORE.fingerprint(state)), bits)
        (scaled,) = _CORE.scale([x], state)
        _expect_values(xp, f"scale of {values} by {scale}", scaled, [round32(v * scale) for v in values])
        (unscaled,), count = arithmetic.unscale_arrays([x], state)
        _expect_values(xp, f"unscale of {values} by {scale}", unscaled, [round32(v * inverse) for v in values])
        _expect_count(xp, "the count of clean values", count, 0)
        for place in range(len(values)):
            for bad in _BAD:
                spoilt = xp.asarray([*values[:place], bad, *values[place + 1 :]], dtype=xp.float32, device=device)
                _, count = arithmetic.unscale_arrays([x, spoilt, x, spoilt], state)
                _expect_count(xp, f"the count with {bad} at place {place} of 2 arrays", count, 2)


def _check_policy(xp: ModuleType, device: object) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    state = policy.init(xp.zeros((), dtype=xp.float32, device=device))
    for count, scale in ((0, 8.0), (0, 16.0), (3, 8.0), (0, 8.0), (1, 4.0)):
        state = policy.update(state, nonfinite=xp.asarray(count, dtype=xp.int32, device=device))
        bits = _CORE.read(arithmetic.fingerprint(state))[0]
        _expect(f"the scale after a count of {count}", validation.float32_from_bits(bits), scale)


def _check_selection(xp: ModuleType, device: object) -> None:
    ones, twos = ([xp.asarray([value] * 2, dtype=xp.float32, device=device)] for value in (1.0, 2.0))
    for flag, value in ((0, 1.0), (1, 2.0)):
        count = xp.asarray(flag, dtype=xp.int32, device=device)
        (chosen,) = ops.select(count == xp.zeros_like(count), ones, twos)
        _expect_values(xp, f"select for a count of {flag}", chosen, [value] * 2)


def _check_clipping(xp: ModuleType, device: object) -> None:
    arrays = [xp.asarray(values, dtype=xp.float32, device=device) for values in ([3.0, 0.0], [-4.0])]
    state = DynamicScale(init_scale=1.0).init(arrays[0])
    unscaled, _, squares = _CORE.unscale_with_squares(arrays, state)
    norm, factor, overflows = arithmetic.clip_factor(squares, 2.5)
    clipped = _CORE.multiply_in_place(unscaled, factor)
    _expect_values(xp, "the norm of [3, 0] and [-4]", xp.reshape(norm, (1,)), [5.0])
    _expect_count(xp, "the overflow of a norm", overflows, 0)
    by = validation.float32_from_bits(_CORE.read(xp.reshape(arithmetic.float32_bits(factor), (-1,)))[0])
    if not 0.4999995 < by <= 0.5:
        _fail(f"the factor of a norm of 5 and at most 2.5 must be 0.5 or just below, got {by!r}")
    _expect_values(xp, "the clipped [3, 0]", clipped[0], [validation.round_to_float32(3.0 * by), 0.0])


def _check_counts(xp: ModuleType, device: object) -> None:
    x = xp.asarray([1.0, math.nan, math.inf, 0.0, -3.0], dtype=xp.float32, device=device)
    found, _ = _CORE.read_summaries([x])
    _expect("the summary of 5 values", found, [summaries.Summary(5, 1, 1, 1, 0, 3.0)])


def _check_spikes(xp: ModuleType, device: object) -> None:
    rule = spikes.SkipSpikes(window=4)
    state = rule.init(xp.zeros((), dtype=xp.float32, device=device))
    for value, expected in ((2.0, 0), (2.5, 0), (1.5, 0), (9.0, 1), (2.0, 0), (math.nan, 1)):
        x = xp.asarray(value, dtype=xp.float32, device=device)
        is_spike = rule.judge(state, x)
        _expect_count(xp, f"whether {value} is a spike", xp.astype(is_spike, xp.int32), expected)
        state = rule.learn(state, x, skipped=is_spike)
    _expect_values(xp, "the window of spikes", state.values, [2.0, 2.5, 1.5, 2.0])


def check_collectives(collectives: Collectives, like: Array, *, repetitions: int = 100) -> None:
    """Check a group's collectives; called on every rank of a real world, or on the ranks of ``run_ranks``.

    Parameters
    ----------
    collectives : Collectives
        This rank's.
    like : array
        Any array of a library whose arrays the group should carry.
    repetitions : int, default 100
        How many all-reduces are made in a row.

    Raises
    ------
    AssertionError
        With both answers, if a result is wrong.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def check(group):
    ...     gradscale.testing.check_collectives(group, np.zeros(1))
    >>> gradscale.testing.run_ranks(2, check)
    [None, None]
    """
    xp = array_namespace(like)
    device = device_of(like)
    backend = registry.backend_for(like)
    rank, size = collectives.rank, collectives.size
    if not 0 <= rank < size:
        _fail(f"rank must lie within 0 and size, got {rank} of {size}")

    def check(values: list[int], expected: list[int], pending: Callable[[], Array], sent: Array) -> None:
        result = pending()
        if type(result) is not type(sent) or result.dtype != sent.dtype or result.shape != sent.shape:
            _fail(f"rank {rank}: the result must be like {sent!r}, got {result!r}")
        if backend.read(result) != expected:
            _fail(f"rank {rank}: MAX must give {expected}, got {backend.read(result)}")
        if backend.read(pending()) != expected:
            _fail(f"rank {rank}: finishing again must give the result again, {expected}")
        if backend.read(sent) != values:
            _fail(f"rank {rank}: the array sent, {values}, was modified to {backend.read(sent)}")

    last = size - 1
    for repetition in range(repetitions):
        values = [
            rank,
            -rank,
            repetition,
            validation.LARGEST_INT32 * (rank == repetition % size),
            -validation.LARGEST_INT32,
        ]
        expected = [last, 0, repetition, validation.LARGEST_INT32, -validation.LARGEST_INT32]
        # Two under way at once, finished in the order in which they began.
        first = xp.asarray(values, dtype=xp.int32, device=device)
        second = xp.asarray([rank + repetition], dtype=xp.int32, device=device)
        pending = [collectives.start_max(first), collectives.start_max(second)]
        check(values, expected, pending[0], first)
        check([rank + repetition], [last + repetition], pending[1], second)
