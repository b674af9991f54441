"""The conformance suite for adapters, libraries and groups; offered in ``gradscale.testing``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import arithmetic, ops, registry, summaries, tree, validation
from gradscale.core.arithmetic import Kind, device_kwargs, kind_of
from gradscale.core.arithmetic import device as device_of
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.errors import BackendNotAvailableError, GradscaleError
from gradscale.policies import spikes
from gradscale.policies.dynamic import DynamicScale

_AsArray: TypeAlias = Callable[..., Array]
_Arrays: TypeAlias = Sequence[Array]

_CORE = Backend()
_SMALLEST = validation.SMALLEST_NORMAL
_SCALES = (1.0, 2.0**-10, 2.0**127, _SMALLEST, 1.0, 65536.0, 3.0)
# The constant scale of 1. It and those after it have large arrays, and many, each scale in a third of the ways;
# those after it also have bad values at each place in turn: an adapter may treat powers of two, and the others, apart.
_UNIT = 4
_FACTORS = (1.0, 0.5, 0.3, 0.0)
_TRACKERS = (2**24 + 1, 2**30 + 1, 2**31 - 1)  # float32 has none of them
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (3, 5), (5, 3), (1031,), (0,), (2, 0, 3))
# Compilers and kernels split large arrays, and lists of many: 200,014 elements, and 300 arrays of 5 shapes.
_PIECES, _SMALL = 194, 5
# Bad elements in the first, middle and last block, and bad arrays, of which 256 are 0 in 8 bits.
_BAD_ELEMENTS = (0, 9000, 18_000, 100_007, 120_007, 140_007, 198_013, 199_013, 200_013)
_BAD_ARRAYS = ((150, 151), (0, 256), (299, 300))
_BAD = (math.inf, -math.inf, math.nan)
_IN_PLACE = ("in place with gaps", "in place from the back", "in place")
_WAYS = (*_IN_PLACE, "new arrays", "new arrays of float32", "into arrays of float32")
# Policies that grow, back off, tolerate, stop at bounds and raise within these counts.
_RULES = (
    DynamicScale(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, hysteresis=2, max_scale=9.0),
    DynamicScale(init_scale=4.0, growth_interval=1, tolerance=0.3, min_scale=2.0, at_min="raise"),
)
# Integers of the messages that are under way at once: a scaler's has 21.
_LENGTHS = (21, 5, 1, 21, 21)
_COUNTS = (0, 0, 0, 1, 3, 0, 1, 1, 0, 0)
_SQUARES = (0.0, 1e-50, 6.25, 25.0, 1e70, 1e77, 1e80, math.inf, math.nan)


def _fail(what: str) -> NoReturn:
    # Both ends: the case, and the answers.
    raise AssertionError(what if len(what) <= 2000 else f"{what[:990]} ... {what[-990:]}")


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        _fail(f"{what} must be {expected!r}, got {got!r}")


def check_backend(backend: Backend, like: Array, *, dtypes: Sequence[object] | None = None) -> None:
    """Check an array adapter against the pure core, bit for bit.

    If the library takes subnormals for 0, as CuPy's kernels and XLA do, the adapter may keep them, exactly.

    Parameters
    ----------
    backend : Backend
        The adapter; InvalidTypeError unless it derives from :class:`gradscale.Backend`.
    like : array
        Any array of its library, on the device to test.
    dtypes : sequence of dtypes, optional
        Floating dtypes that it serves. Default: float32, and float64 if the device has it.

    Raises
    ------
    AssertionError
        With the case and both answers, if it differs from the pure core.
    BackendNotAvailableError
        For a library that does not tell its dtypes, by ``__array_namespace_info__``.

    Examples
    --------
    >>> import gradscale, gradscale_numpy, numpy as np
    >>> backend = gradscale_numpy.NumpyBackend(fast=False)
    >>> with np.errstate(all="ignore"):
    ...     gradscale.testing.check_backend(backend, np.zeros(1), dtypes=[np.float32])  # nothing raised: no difference
    """
    if not isinstance(backend, Backend):
        raise validation.wrong_type(backend, "backend", "an instance of a class that derives from gradscale.Backend")
    xp, device = array_namespace(like), device_of(like)
    if not hasattr(xp, "__array_namespace_info__"):
        msg = f"{arithmetic.library_name(xp)} must have __array_namespace_info__(), which tells its dtypes, got none"
        raise BackendNotAvailableError(msg)
    widest = xp.float64 if arithmetic.has_float64(xp, device) else xp.float32
    asarray = functools.partial(_asarray, xp, device)
    _check_reading(backend, asarray)
    # A member that is not overridden is the pure function, with which it would be compared.
    overridden = {name for name in vars(Backend) if getattr(type(backend), name) is not getattr(Backend, name)}
    if "clip_factor" in overridden:
        squares = [asarray(x, widest) for x in _SQUARES]
        _check_member(backend, "clip_factor", [*itertools.product(squares, (0.0, 2.5, math.inf))])
    factors, trackers, counts = (list(map(asarray, xs)) for xs in (_FACTORS, _TRACKERS, _COUNTS))
    for policy in _RULES if "update" in overridden else ():
        calls = [(policy, policy.init(like), counts[0])]
        for count in counts[1:]:
            calls.append((policy, policy.update(calls[-1][1], nonfinite=calls[-1][2]), count))
        _check_member(backend, "update", calls)
    states = [DynamicScale(init_scale=scale).init(like) for scale in (*_SCALES, 0.1)]
    states[_UNIT] = arithmetic.UnitState(*states[_UNIT])
    _check_member(backend, "fingerprint", [(ScaleState(state.scale, *trackers),) for state in states])
    for dtype in dict.fromkeys((xp.float32, widest)) if dtypes is None else dtypes:
        few, placed, clean, wide = _value_sets(asarray, dtype)
        if overridden & {"bits", "read_summaries", "summarize"}:
            _check_summaries(backend, [*few, *placed, clean[-1]])
        for way in _IN_PLACE if "multiply_in_place" in overridden else ():
            products = [*itertools.product(few, factors), *itertools.product(clean, factors[2:3])]
            _check_member(backend, "multiply_in_place", products, way)
        for number, (scale, state) in enumerate(zip(_SCALES, states, strict=False), -_UNIT):
            ways, is_swept = _WAYS[number::3] if number >= 0 else (), number > 0
            sets = [*few, *placed] if is_swept and "unscale" in overridden else few
            _check_unscale(backend, "unscale", sets, state)
            if ways and "unscale" in overridden:
                _check_unscale(backend, "unscale", [*wide[:-3], wide[number - 3]], state, ways)
            if is_swept and "scale" in overridden:
                _check_member(backend, "scale", [(arrays, state) for arrays in [*few, *clean]])
            if is_swept and overridden & {"unscale_with_squares", "sum_of_squares"}:
                _check_unscale(backend, "unscale_with_squares", few, state)
                _check_unscale(backend, "unscale_with_squares", clean, state, ways)
            if dtype == xp.float32 and "unscale" in overridden:
                _check_subnormals(backend, asarray, scale)


def _check_reading(backend: Backend, asarray: _AsArray) -> None:
    numbers = [0, -1, validation.LARGEST_INT32, -validation.LARGEST_INT32, 7] * 60
    array, pair = asarray(numbers), asarray([0.0, 0.0])
    got, (integers, _) = backend.read(array), [backend.integers(values, pair) for values in (numbers, numbers[::-1])]
    _expect("what read gives, and its types,", (got, {type(value) for value in got}), (numbers, {int}))
    _expect("the dtype and shape of integers", _form(integers), _form(array))
    _expect("integers", backend.read(integers), numbers)
    placed = _asarray(array_namespace(pair), backend.placement(pair), 0.0)
    _expect("the sum of an array and of a 0-d one where placement says", _form(placed + pair), _form(pair))
    seen = backend.peek([asarray(1.5), array[-1] * 0 - 7])
    if seen is not None:
        _expect("what peek gives, and its types,", (seen, [*map(type, seen)]), ([1.5, -7], [float, int]))
    example = backend.example()
    _expect("example", (example.dtype, example.shape), (array_namespace(example).float32, ()))


def _check_summaries(backend: Backend, sets: Sequence[Sequence[Array]]) -> None:
    """Check ``summarize`` on the arrays of all sets, and on subnormals, which some compilers take for 0."""
    values = list({id(x): x for arrays in sets for x in arrays}.values())
    xp, dtype = array_namespace(values[0]), values[0].dtype
    wanted = summaries.summaries_of(values, backend.read(summaries.summarize_arrays(values)))
    if dtype in (xp.float32, getattr(xp, "float64", None)):
        tiny = 2.0**-126 if dtype == xp.float32 else 2.0**-1022
        # From Python's numbers, not computed.
        values.append(_asarray(xp, device_of(values[0]), [tiny / 2, -tiny / 2, tiny, 0.0, -0.0], dtype))
        wanted.append(summaries.Summary(5, 0, 0, 2, 2, tiny))
    copies = _copied(values)
    for x, want, got in zip(values, wanted, backend.read_summaries(copies)[0], strict=True):
        if got != want:
            _fail(f"summarize of {x!r}, dtype {dtype}, must say {want}, got {got}")
    _expect_same(backend, "summarize", copies, values)


def _check_subnormals(backend: Backend, asarray: _AsArray, scale: float) -> None:
    """Check ``unscale`` of and to float32 subnormals against Python's numbers."""
    parts = (2.0, 1.5, 1.0, 0.75, 0.3, 2.0**-22, 2.0**-23)
    values = [sign * validation.round_to_float32(_SMALLEST * part) for part in parts for sign in (1.0, -1.0)]
    grad = asarray(values)
    (unscaled,), _ = backend.unscale([grad], DynamicScale(init_scale=scale).init(grad))
    bits = backend.bits(unscaled)
    if bits is None:
        return
    is_lost, inverse = _loses_subnormals(backend, grad), validation.round_to_float32(1.0 / scale)
    who = "the library takes subnormals for 0" if is_lost else "the library keeps subnormals"
    for value, got in zip(values, backend.read(bits), strict=True):
        kept = validation.round_to_float32(value * inverse)
        may_be_0 = is_lost and min(abs(value), abs(kept)) < _SMALLEST
        right = (kept, math.copysign(0.0, value)) if may_be_0 else (kept,)
        if got not in map(validation.bits_of_float32, right):
            wanted, number = f"{kept!r}{' or 0' * is_lost}", validation.float32_from_bits(got)
            _fail(f"unscale of {value!r}, scale {scale}, must give {wanted}, since {who}, got {number!r}")


def _value_sets(asarray: _AsArray, dtype: object) -> tuple[list[list[Array]], ...]:
    """Return lists of arrays: a few; with each bad value at each place in turn; clean wide ones, and bad wide ones."""
    xp = array_namespace(asarray(0.0))

    def array(shape: tuple[int, ...], bad: float = math.nan, place: int = -1) -> Array:
        size = math.prod(shape)
        numbers = [bad if k == place else -float(k - size // 2) for k in range(size)]
        x = xp.astype(xp.reshape(asarray(numbers, xp.float32), shape), dtype)
        # In the order of Fortran, too.
        return x.T if shape == (5, 3) else x

    plain = [array(shape) for shape in _SHAPES]
    spoilt = [[array(shape, bad, math.prod(shape) // 2) for shape in _SHAPES] for bad in _BAD]
    few, placed = [[], plain, *spoilt], []
    # Beside float32: a bad one of either dtype.
    float32 = [asarray([4.0, number]) for number in (math.nan, 1.0)]
    few += [[x, other, plain[3]] for x, other in zip((plain[2], spoilt[0][2]), float32, strict=True)]
    if layout := summaries.layout_of(dtype):
        # Finite, though no sum of them is.
        few.append([asarray([layout.value(layout.infinity - 1)] * 7, dtype)])
    elif arithmetic.dtype_kind(dtype, xp) is Kind.COMPLEX:
        few += [[asarray([2.0, complex(1.0, part)], dtype)] for part in (*_BAD, 3.0)]
    for bad, (index, shape) in itertools.product(_BAD, enumerate(_SHAPES)):
        places = sorted({0, (size := math.prod(shape)) // 2, size - 1} & {*range(size)})
        placed += [[*plain[:index], array(shape, bad, place), *plain[index + 1 :]] for place in places]
    many, large = plain[:_SMALL] * 60, xp.concat([plain[_SMALL]] * _PIECES)
    parts = [(large[:k], array((1,), bad, 0), large[k + 1 :]) for k, bad in zip(_BAD_ELEMENTS, _BAD * 3, strict=True)]
    wide = [[xp.concat(part)] for part in parts]
    wide += [[*many[:a], *(xs[:_SMALL] * 60)[a:b], *many[b:]] for xs, (a, b) in zip(spoilt, _BAD_ARRAYS, strict=True)]
    return few, placed, [many, [large]], wide


def _check_member(backend: Backend, member: str, calls: Sequence[tuple[object, ...]], way: str = "new arrays") -> None:
    """Check a function against the pure one, after all calls, and that its arguments are not modified."""
    copies = [_copied(args, way) for args in calls]
    results = [getattr(backend, member)(*args) for args in copies]
    for args, own, result in zip(calls, copies, results, strict=True):
        case, values = f"{member} by {args[-1]!r}", _arrays(args)
        _expect_arrays(backend, case, _arrays(result), _arrays(getattr(_CORE, member)(*args)), values)
        if member != "multiply_in_place":
            _expect_same(backend, case, _arrays(own), values)


def _check_unscale(
    backend: Backend, member: str, sets: Sequence[_Arrays], state: ScaleState, ways: Sequence[str] = _WAYS
) -> None:
    """Check a function that unscales, as ``_check_member`` does."""
    xp, oracle, before = array_namespace(state.scale), getattr(_CORE, member), _copied(state)
    where = device_kwargs(device_of(state.scale))
    expected = [[oracle(values, state, dtype=dtype) for values in sets] for dtype in (None, xp.float32)]
    for way in ways:
        case, copies = f"{member} by {state.scale!r}, {way}", [_copied(values, way) for values in sets]
        results = [getattr(backend, member)(xs, state, **_options(xp, xs, way, where)) for xs in copies]
        for values, xs, result, pure in zip(sets, copies, results, expected["float32" in way], strict=True):
            (got, count, *sums), (wanted, total, *wanted_sums) = result, pure
            _expect(f"{case}: the dtype and shape of the count", _form(count), _form(total))
            highest = _host(backend, total)
            # A kernel that judges many arrays at once may understate it.
            if not min(highest, 1) <= _host(backend, count) <= highest:
                _fail(f"{case}: the count must be from {min(highest, 1)} to {highest}, got {count!r}")
            _expect_arrays(backend, case, got, wanted, values)
            for one, other in zip(sums, wanted_sums, strict=True):
                _expect(f"{case}: the dtype and shape of the sum", _form(one), _form(other))
                # The elements are summed in another order. Some libraries forbid float() of an array.
                is_near = xp.abs(one - other) <= other * (1e-4 if other.dtype == xp.float32 else 1e-12)
                both_bad = xp.logical_not(xp.logical_or(xp.isfinite(one), xp.isfinite(other)))
                if not _all(backend, xp.logical_or(both_bad, is_near)):
                    _fail(f"{case}: the sum of {values!r} must be {other!r}, got {one!r}")
            if "in place" not in way:
                _expect_same(backend, case, xs, values)
        _expect_same(backend, case, state, before)


def _options(xp: ModuleType, grads: list[Array], way: str, where: dict[str, object]) -> dict[str, object]:
    """Return the options that tell ``unscale`` where to write; complex arrays stay complex."""
    if way == "into arrays of float32":
        dtypes = (x.dtype if kind_of(x) is Kind.COMPLEX else xp.float32 for x in grads)
        return {"out": [xp.zeros(x.shape, dtype=dtype, **where) for x, dtype in zip(grads, dtypes, strict=True)]}
    return {"new arrays": {}, "new arrays of float32": {"dtype": xp.float32}}.get(way, {"out": grads})


def _copied(arguments: Any, way: str = "new arrays") -> Any:
    """Return arguments with copies of their arrays, which lie in memory as a way says."""

    def copy(x: Array) -> Array:
        xp = array_namespace(x)
        if way == "in place with gaps" and x.ndim:
            return xp.stack([x, x], axis=1)[:, 0, ...]
        if way == "in place from the back" and x.ndim and hasattr(xp, "flip"):
            return xp.flip(xp.asarray(xp.flip(x), copy=True))
        return xp.asarray(x, copy=True)

    leaves, rebuild = tree.flatten(arguments)
    return rebuild([copy(x) if is_array_api_obj(x) else x for x in leaves])


def _arrays(arguments: object) -> _Arrays:
    return [x for x in tree.flatten(arguments)[0] if is_array_api_obj(x)]


def _expect_same(backend: Backend, case: str, arrays: _Arrays, values: _Arrays) -> None:
    if not _same(backend, arrays, values):
        _fail(f"{case}: the given {values!r} was modified to {arrays!r}")


def _host(backend: Backend, x: Array | int) -> int:
    return x if isinstance(x, int) else backend.read(array_namespace(x).reshape(x, (1,)))[0]


def _form(x: Array) -> object:
    return (x.dtype, tuple(x.shape)) if hasattr(x, "dtype") else type(x)


def _expect_arrays(backend: Backend, case: str, got: _Arrays, expected: _Arrays, values: _Arrays) -> None:
    _expect(f"{case}: the dtypes and shapes", [*map(_form, got)], [*map(_form, expected)])
    if not _same(backend, got, expected):
        for value, one, other in zip(itertools.cycle(values), got, expected, strict=False):
            if not _same(backend, [one], [other]):
                _fail(f"{case}: {value!r} must become {other!r}, got {one!r}")


def _same(backend: Backend, ones: _Arrays, others: _Arrays) -> bool:
    """Tell whether arrays hold the same values, with NaN equal to NaN and -0 apart from 0."""
    if len({x.dtype for x in ones}) != 1:
        return all(_same(backend, [one], [other]) for one, other in zip(ones, others, strict=True))
    xp = array_namespace(ones[0])
    stored = [xp.concat([xp.reshape(x, (-1,)) for x in arrays]) for arrays in (ones, others)]
    # Widened: exact, and libraries can do more with float32.
    a, b = map(arithmetic.widened, stored)
    if kind_of(a) in (Kind.COMPLEX, Kind.INTEGRAL):
        # Libraries differ in the products of complex infinities, of which only that they are not finite is compared.
        return _all(backend, xp.logical_or(xp.logical_not(xp.logical_or(xp.isfinite(a), xp.isfinite(b))), a == b))
    both_nan = xp.logical_and(xp.isnan(a), xp.isnan(b))
    layout = summaries.layout_of(ones[0].dtype)
    if layout is None or backend.bits(stored[0]) is None:
        return _all(backend, xp.logical_or(both_nan, xp.logical_and(a == b, xp.signbit(a) == xp.signbit(b))))
    # A library that takes subnormals for 0 compares them as such, too.
    a, b = (xp.asarray(backend.bits(x)) for x in stored)
    same = xp.logical_or(both_nan, a == b)
    # bfloat16, which has 7 bits, is computed in float32, which has 23.
    if layout.fraction_bits in (7, 23) and not _all(backend, same) and _loses_subnormals(backend, ones[0]):
        is_lost = xp.logical_and(b & layout.mask == 0, a & layout.mask < layout.smallest_normal)
        same = xp.logical_or(same, xp.logical_and(is_lost, (a < 0) == (b < 0)))
    return _all(backend, same)


def _all(backend: Backend, same: Array) -> bool:
    xp = array_namespace(same)
    return _host(backend, xp.astype(xp.all(same), xp.int32)) == 1


def _loses_subnormals(backend: Backend, like: Array) -> bool:
    smallest, half = (_asarray(array_namespace(like), device_of(like), [value]) for value in (_SMALLEST, 0.5))
    bits = backend.bits(smallest * half)
    return bits is not None and backend.read(bits) == [0]


def check_library(like: Array) -> None:
    """Check that gradscale runs on a library without an adapter, by the array API standard alone.

    The library must have each function, dtype and member of arrays that gradscale needs. Scaling, policy, selection,
    clipping and diagnoses must give the bits of Python's own numbers.

    Parameters
    ----------
    like : array
        Any array of the library, on the device to test; InvalidTypeError for anything else. The host reads what is
        computed.

    Raises
    ------
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
        raise validation.wrong_type(like, "like", "an array of a library that follows the array API standard")
    xp = array_namespace(like)
    _require(xp, like)
    for check in (_check_bits, _check_policy, _check_selection, _check_clipping, _check_counts, _check_spikes):
        try:
            check(functools.partial(_asarray, xp, device_of(like)))
        except (AssertionError, GradscaleError):
            raise
        except Exception as error:
            what = check.__name__.removeprefix("_check_")
            msg = f"{arithmetic.library_name(xp)} fails in gradscale's {what}, got {error!r}: write an adapter for it"
            raise BackendNotAvailableError(msg) from error


def _require(xp: ModuleType, like: Array) -> None:
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


def _asarray(xp: ModuleType, device: object, values: object, dtype: object = None) -> Array:
    """Return one number or a list of them; by default ints as int32, and floats as float32."""
    if dtype is None:
        dtype = xp.int32 if isinstance(values[0] if isinstance(values, list) else values, int) else xp.float32
    return xp.asarray(values, dtype=dtype, **device_kwargs(device))


def _expect_values(what: str, got: Array, values: object) -> None:
    """Check an array against Python's numbers; the library compares them, and one flag is read."""
    xp = array_namespace(got)
    wanted = _asarray(xp, device_of(got), values)
    _expect(f"the dtype and shape of {what}", _form(got), _form(wanted))
    if not _all(_CORE, got == wanted):
        _fail(f"{what} must be {wanted!r}, got {got!r}")


def _check_bits(asarray: _AsArray) -> None:
    """Check scaling and unscaling, the count of bad values and the fingerprint against Python's numbers."""
    round32 = validation.round_to_float32
    values = [1.0, -2.5, 0.0, 3.0, 65504.0, 2.0**-100]
    x = asarray(values)
    for scale in (65536.0, 3.0, 2.0**-10):
        state, inverse = DynamicScale(init_scale=scale).init(x), round32(1.0 / scale)
        _expect_values("the fingerprint", _CORE.fingerprint(state), [validation.bits_of_float32(scale), 0, 0, 0])
        (scaled,), ((unscaled,), count) = _CORE.scale([x], state), _CORE.unscale([x], state)
        _expect_values(f"scale of {values} by {scale}", scaled, [round32(value * scale) for value in values])
        _expect_values(f"unscale of {values} by {scale}", unscaled, [round32(value * inverse) for value in values])
        _expect_values("the count of clean values", count, 0)
        for bad, place in itertools.product(_BAD, range(len(values))):
            spoilt = asarray([*values[:place], bad, *values[place + 1 :]])
            _, count = _CORE.unscale([x, spoilt, x, spoilt], state)
            _expect_values(f"the count with {bad} at place {place} of 2 arrays", count, 2)


def _check_policy(asarray: _AsArray) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    state = policy.init(asarray(0.0))
    for count, scale in ((0, 8.0), (0, 16.0), (3, 8.0), (0, 8.0), (1, 4.0)):
        state = policy.update(state, nonfinite=asarray(count))
        _expect_values(f"the scale after a count of {count}", state.scale, scale)


def _check_selection(asarray: _AsArray) -> None:
    for count, value in ((0, 1.0), (1, 2.0)):
        (chosen,) = ops.select(asarray(count) == asarray(0), [asarray([1.0, 1.0])], [asarray([2.0, 2.0])])
        _expect_values(f"select for a count of {count}", chosen, [value, value])


def _check_clipping(asarray: _AsArray) -> None:
    state = DynamicScale(init_scale=1.0).init(asarray(0.0))
    unscaled, _, squares = _CORE.unscale_with_squares([asarray([3.0, 0.0]), asarray([-4.0])], state)
    norm, factor, overflows = _CORE.clip_factor(squares, 2.5)
    clipped = _CORE.multiply_in_place(unscaled, factor)
    _expect_values("the norm of [3, 0] and [-4]", norm, 5.0)
    _expect_values("the overflow of a norm", overflows, 0)
    by = validation.float32_from_bits(_host(_CORE, arithmetic.float32_bits(factor)))
    if not 0.4999995 < by <= 0.5:
        _fail(f"the factor of a norm of 5 and at most 2.5 must be 0.5 or just below, got {by!r}")
    _expect_values("the clipped [3, 0]", clipped[0], [validation.round_to_float32(3.0 * by), 0.0])


def _check_counts(asarray: _AsArray) -> None:
    results, _ = _CORE.read_summaries([asarray([1.0, math.nan, math.inf, 0.0, -3.0])])
    _expect("the summary of 5 values", results, [summaries.Summary(5, 1, 1, 1, 0, 3.0)])


def _check_spikes(asarray: _AsArray) -> None:
    rule = spikes.SkipSpikes(window=4)
    state = rule.init(asarray(0.0))
    for value, expected in ((2.0, 0), (2.5, 0), (1.5, 0), (9.0, 1), (2.0, 0), (math.nan, 1)):
        is_spike = rule.judge(state, asarray(value))
        xp = array_namespace(is_spike)
        _expect_values(f"whether {value} is a spike", xp.astype(is_spike, xp.int32), expected)
        state = rule.learn(state, asarray(value), skipped=is_spike)
    _expect_values("the window of spikes", state.values, [2.0, 2.5, 1.5, 2.0])


def check_collectives(collectives: Collectives, like: Array, *, repetitions: int = 60) -> None:
    """Check a group's collectives; called on every rank of a real world, or on the ranks of ``run_ranks``.

    Parameters
    ----------
    collectives : Collectives
        This rank's. AssertionError, with both answers, if a result is wrong.
    like : array
        Any array of a library whose arrays the group should carry.
    repetitions : int, default 60
        How many times five all-reduces, as of five optimizers, are under way at once.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def check(group):
    ...     gradscale.testing.check_collectives(group, np.zeros(1))
    >>> gradscale.testing.run_ranks(2, check)
    [None, None]
    """
    make = functools.partial(_asarray, array_namespace(like), device_of(like))
    backend = registry.backend_for(like)
    rank, size = collectives.rank, collectives.size
    if not 0 <= rank < size:
        _fail(f"rank must lie within 0 and size, got {rank} of {size}")
    messages, results = [], []
    # Of each number another rank's is the largest, by 1.
    largest = [(-1) ** k * (validation.LARGEST_INT32 - k) for k in range(5 * repetitions + max(_LENGTHS))]
    own = [x - (k % size != rank) for k, x in enumerate(largest)]
    for start in range(0, 5 * repetitions, 5):
        for number, length in enumerate(_LENGTHS, start):
            sent, wanted = (values[number : number + length] for values in (own, largest))
            messages.append((sent, wanted, x := make(sent), collectives.start_max(x)))
        results += [finish() for *_, finish in messages[start:]]
    # When all are there: none may be in the memory of another.
    for (sent, wanted, x, finish), result in zip(messages, results, strict=True):
        _expect(f"rank {rank}: the type and form of MAX", (type(result), _form(result)), (type(x), _form(x)))
        _expect(f"rank {rank}: MAX", backend.read(result), wanted)
        _expect(f"rank {rank}: MAX, when it is finished again,", backend.read(finish()), wanted)
        _expect(f"rank {rank}: the array sent, afterwards,", backend.read(x), sent)
