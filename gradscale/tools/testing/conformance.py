"""The conformance suite for adapters, libraries and groups; offered in ``gradscale.testing``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn, TypeAlias

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core import arithmetic, ops, registry, summaries, validation
from gradscale.core.arithmetic import device as device_of
from gradscale.core.arithmetic import on
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.errors import BackendNotAvailableError, GradscaleError, InvalidTypeError, shown
from gradscale.policies import spikes
from gradscale.policies.dynamic import DynamicScale

_Made: TypeAlias = Callable[[object], Array]

_CORE = Backend()
_SMALLEST = validation.SMALLEST_NORMAL
_SCALES = (1.0, 65536.0, 2.0**-10, 3.0, 2.0**127, _SMALLEST)
# Those with bad values at each place in turn: an adapter may treat powers of two, and the others, apart.
_SWEPT = (65536.0, 3.0)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (1031,))
_LARGE = 70_001  # elements; compilers and kernels take large arrays apart
_BAD = (math.inf, -math.inf, math.nan)
_WAYS = ("in place", "in place with gaps", "new arrays", "new arrays of float32", "into arrays of float32")
_FEW = 2 + len(_BAD)  # of the lists of arrays: the clean ones, and those that are all bad
# They grow, back off, tolerate, stop at bounds and raise within these counts.
_RULES = (
    DynamicScale(init_scale=3.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, hysteresis=2, max_scale=9.0),
    DynamicScale(init_scale=4.0, growth_interval=1, tolerance=0.3, min_scale=2.0, at_min="raise"),
)
_COUNTS = (0, 0, 0, 1, 3, 0, 1, 1, 0, 0)
_SQUARES = (0.0, 1e-50, 6.25, 25.0, 1e70, 1e80, math.inf, math.nan)


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
        msg = f"backend must be an instance of a class that derives from gradscale.Backend, got {shown(backend)}"
        raise InvalidTypeError(msg)
    xp, device = array_namespace(like), device_of(like)
    if not hasattr(xp, "__array_namespace_info__"):
        msg = f"{arithmetic.library_name(xp)} must have __array_namespace_info__(), which tells its dtypes, got none"
        raise BackendNotAvailableError(msg)
    widest = xp.float64 if arithmetic.has_float64(xp, device) else xp.float32
    _check_reading(backend, xp, device)
    # A member that is not overridden is the pure function, with which it would be compared.
    overridden = {name for name in vars(Backend) if getattr(type(backend), name) is not getattr(Backend, name)}
    if "update" in overridden:
        _check_rules(backend, like)
    for value, max_norm in itertools.product(_SQUARES, (0.0, 2.5, math.inf)) if "clip_factor" in overridden else ():
        _check_member(backend, "clip_factor", xp.asarray(value, dtype=widest, **on(device)), max_norm)
    factors = [xp.asarray(factor, dtype=xp.float32, **on(device)) for factor in (1.0, 0.5, 0.3, 0.0)]
    for dtype in dict.fromkeys((xp.float32, widest)) if dtypes is None else dtypes:
        sets = _value_sets(xp, device, dtype)
        if overridden & {"bits", "read_summaries", "summarize"}:
            _check_summaries(backend, sets)
        for scale in _SCALES:
            state, is_swept = DynamicScale(init_scale=scale).init(like), scale in _SWEPT
            full = ScaleState(state.scale, *(xp.full_like(state.growth_tracker, value) for value in (3, 2**31 - 1, 0)))
            pure = backend.read(arithmetic.fingerprint(full))
            _expect(f"fingerprint of {full}", backend.read(backend.fingerprint(full)), pure)
            for values in sets if is_swept and "unscale" in overridden else sets[:_FEW]:
                _check_unscaling(backend, "unscale", values, state)
                if scale == 1.0:
                    _check_unscaling(backend, "unscale", values, arithmetic.UnitState(*state))
            others = [("scale", state), *(("multiply_in_place", factor) for factor in factors)]
            for values in sets[:_FEW] if is_swept else ():
                for member, by in others:
                    if member in overridden:
                        _check_member(backend, member, values, by)
                if overridden & {"unscale_with_squares", "sum_of_squares"}:
                    _check_unscaling(backend, "unscale_with_squares", values, state)
            if dtype == xp.float32 and "unscale" in overridden:
                _check_subnormals(backend, like, scale)


def _check_reading(backend: Backend, xp: ModuleType, device: object) -> None:
    numbers = [0, -1, validation.LARGEST_INT32, -validation.LARGEST_INT32, 7]
    array, pair = xp.asarray(numbers, dtype=xp.int32, **on(device)), xp.zeros((2,), dtype=xp.float32, **on(device))
    got, made = backend.read(array), backend.integers(numbers, pair)
    _expect("what read gives, and its types,", (got, {type(value) for value in got}), (numbers, {int}))
    _expect("the dtype and shape of integers", _form(made), _form(array))
    _expect("integers", backend.read(made), numbers)
    placed = xp.zeros((), dtype=xp.float32, **on(backend.placement(pair)))
    _expect("the sum of an array and of a 0-d one where placement says", _form(placed + pair), _form(pair))
    seen = backend.peek([xp.asarray(1.5, dtype=xp.float32, **on(device)), array[-1] * 0 - 7])
    if seen is not None:
        _expect("what peek gives, and its types,", (seen, [*map(type, seen)]), ([1.5, -7], [float, int]))
    example = backend.example()
    _expect("example", (example.dtype, example.shape), (array_namespace(example).float32, ()))


def _check_rules(backend: Backend, like: Array) -> None:
    xp, device = array_namespace(like), device_of(like)
    for policy in _RULES:
        state = policy.init(like)
        for count in _COUNTS:
            nonfinite = xp.asarray(count, dtype=xp.int32, **on(device))
            updated = policy.update(state, nonfinite=nonfinite)
            states = backend.update(policy, state, nonfinite), updated
            bits = [backend.read(arithmetic.fingerprint(one)) for one in states]
            _expect(f"update of {state} and a count of {count}, by {policy}", *bits)
            state = updated


def _check_summaries(backend: Backend, sets: Sequence[Sequence[Array]]) -> None:
    """Check ``summarize`` on the arrays of all sets, and on subnormals, which some compilers take for 0."""
    values = list({id(x): x for arrays in sets for x in arrays}.values())
    xp, dtype = array_namespace(values[0]), values[0].dtype
    wanted = summaries.summaries_of(values, backend.read(summaries.summarize_arrays(values)))
    if dtype in (xp.float32, getattr(xp, "float64", None)):
        tiny = 2.0**-126 if dtype == xp.float32 else 2.0**-1022
        # Made from Python's numbers, and not computed.
        values.append(xp.asarray([tiny / 2, -tiny / 2, tiny, 0.0, -0.0], dtype=dtype, **on(device_of(values[0]))))
        wanted.append(summaries.Summary(5, 0, 0, 2, 2, tiny))
    for x, want, got in zip(values, wanted, backend.read_summaries(values)[0], strict=True):
        if got != want:
            _fail(f"summarize of {x!r}, dtype {dtype}, must say {want}, got {got}")


def _check_subnormals(backend: Backend, like: Array, scale: float) -> None:
    """Check ``unscale`` on float32 subnormals, given and made, against Python's numbers."""
    xp, device = array_namespace(like), device_of(like)
    parts = (2.0, 1.5, 1.0, 0.75, 0.3, 2.0**-22, 2.0**-23)
    values = [sign * validation.round_to_float32(_SMALLEST * part) for part in parts for sign in (1.0, -1.0)]
    given = xp.asarray(values, dtype=xp.float32, **on(device))
    (made,), _ = backend.unscale([given], DynamicScale(init_scale=scale).init(like))
    bits = backend.bits(made)
    if bits is None:
        return
    is_lost, inverse = _loses_subnormals(backend, xp, device), validation.round_to_float32(1.0 / scale)
    who = "the library takes subnormals for 0" if is_lost else "the library keeps subnormals"
    for value, got in zip(values, backend.read(bits), strict=True):
        kept = validation.round_to_float32(value * inverse)
        may_be_0 = is_lost and min(abs(value), abs(kept)) < _SMALLEST
        right = (kept, math.copysign(0.0, value)) if may_be_0 else (kept,)
        if got not in map(validation.bits_of_float32, right):
            wanted, found = f"{kept!r}{' or 0' * is_lost}", validation.float32_from_bits(got)
            _fail(f"unscale of {value!r}, scale {scale}, must give {wanted}, since {who}, got {found!r}")


def _value_sets(xp: ModuleType, device: object, dtype: object) -> list[list[Array]]:
    """Return lists of arrays: clean ones, then each bad value in the middle of all, then at each place in turn."""

    def array(shape: tuple[int, ...], bad: float = math.nan, place: int = -1) -> Array:
        size = math.prod(shape)
        numbers = [bad if k == place else -float(k - size // 2) for k in range(size)]
        return xp.astype(xp.reshape(xp.asarray(numbers, dtype=xp.float32, **on(device)), shape), dtype)

    sets = [[], [array(shape) for shape in _SHAPES]]
    sets += [[array(shape, bad, math.prod(shape) // 2) for shape in _SHAPES] for bad in _BAD]
    for bad, (index, shape) in itertools.product(_BAD, enumerate(_SHAPES)):
        size = math.prod(shape)
        places = sorted({0, size // 2, size - 1} & {*range(size)})
        sets += [[*sets[1][:index], array(shape, bad, place), *sets[1][index + 1 :]] for place in places]
    return [*sets, [array((_LARGE,), math.nan, _LARGE - 1)]]


def _check_member(backend: Backend, member: str, values: object, by: object) -> None:
    """Check a function of one array or of some, and of something else, against the pure one."""
    given, other = (_copies(values) if isinstance(values, list) else values for _ in range(2))
    got, expected = getattr(backend, member)(given, by), getattr(Backend, member)(backend, other, by)
    _expect_arrays(backend, f"{member} by {by!r}", got, expected, values if isinstance(values, list) else [values] * 3)


def _check_unscaling(backend: Backend, member: str, values: list[Array], state: ScaleState) -> None:
    xp, oracle = array_namespace(state.scale), getattr(_CORE, member)
    for way in _WAYS:
        case = f"{member} by {state.scale!r}, {way}"
        given, theirs = _copies(values), _copies(values)
        if way == "in place with gaps":
            given = [xp.stack([x, x], axis=1)[:, 0, ...] if x.ndim else x for x in given]
        got, count, *sums = getattr(backend, member)(given, state, **_options(xp, given, way))
        expected, expected_count, *expected_sums = oracle(theirs, state, **_options(xp, theirs, way))
        highest = _host(backend, expected_count)
        _expect(f"{case}: the dtype and shape of the count", _form(count), _form(expected_count))
        # A kernel that judges many arrays at once may understate it.
        lowest = min(highest, 1)
        if not lowest <= _host(backend, count) <= highest:
            _fail(f"{case}: the count must be from {lowest} to {highest}, got {count!r}")
        _expect_arrays(backend, case, got, expected, values)
        for one, wanted in zip(sums, expected_sums, strict=True):
            _expect(f"{case}: the dtype and shape of the sum", _form(one), _form(wanted))
            # The elements are summed in another order. Some libraries forbid float() of an array.
            is_near = xp.abs(one - wanted) <= wanted * (1e-4 if wanted.dtype == xp.float32 else 1e-12)
            both_bad = xp.logical_not(xp.logical_or(xp.isfinite(one), xp.isfinite(wanted)))
            if not _all(backend, xp.logical_or(both_bad, is_near)):
                _fail(f"{case}: the sum of {values!r} must be {wanted!r}, got {one!r}")
        if "in place" not in way and not _same(backend, given, values):
            _fail(f"{case}: the given {values!r} was modified to {given!r}")


def _options(xp: ModuleType, given: list[Array], way: str) -> dict[str, object]:
    """Return the options that tell ``unscale`` where to write; complex arrays stay complex."""
    if way == "into arrays of float32":
        out = [xp.zeros(x.shape, dtype=x.dtype if _is_complex(x) else xp.float32, **on(device_of(x))) for x in given]
        return {"out": out}
    return {"new arrays": {}, "new arrays of float32": {"dtype": xp.float32}}.get(way, {"out": given})


def _copies(arrays: Sequence[Array]) -> list[Array]:
    return [array_namespace(x).asarray(x, copy=True) for x in arrays]


def _is_complex(x: Array) -> bool:
    return arithmetic.kind_of(x) is arithmetic.Kind.COMPLEX


def _host(backend: Backend, x: Array | int) -> int:
    return x if isinstance(x, int) else backend.read(array_namespace(x).reshape(x, (1,)))[0]


def _form(x: Array) -> object:
    return (x.dtype, tuple(x.shape)) if hasattr(x, "dtype") else type(x)


def _expect_arrays(
    backend: Backend, case: str, got: Sequence[Array], expected: Sequence[Array], values: Sequence[object]
) -> None:
    _expect(f"{case}: the dtypes and shapes", [*map(_form, got)], [*map(_form, expected)])
    if any(x.dtype != expected[0].dtype for x in expected) or not _same(backend, got, expected):
        for value, one, other in zip(values, got, expected, strict=True):
            if not _same(backend, [one], [other]):
                _fail(f"{case}: {value!r} must become {other!r}, got {one!r}")


def _same(backend: Backend, ones: Sequence[Array], others: Sequence[Array]) -> bool:
    """Tell whether arrays of one dtype hold the same values, with NaN equal to NaN and -0 apart from 0."""
    if not ones or not others:
        return len(ones) == len(others)
    xp = array_namespace(ones[0])
    # Widened: exact, and libraries can do more with float32.
    a, b = (xp.concat([xp.reshape(arithmetic.widened(x), (-1,)) for x in arrays]) for arrays in (ones, others))
    if _is_complex(a):
        # Libraries differ in the products of complex infinities, of which only that they are not finite is compared.
        return _all(backend, xp.logical_or(xp.logical_not(xp.logical_or(xp.isfinite(a), xp.isfinite(b))), a == b))
    both_nan = xp.logical_and(xp.isnan(a), xp.isnan(b))
    layout = summaries.layout_of(ones[0].dtype)
    if layout is None or backend.bits(ones[0]) is None:
        return _all(backend, xp.logical_or(both_nan, xp.logical_and(a == b, xp.signbit(a) == xp.signbit(b))))
    # A library that takes subnormals for 0 compares them as such, too.
    a, b = (xp.concat([xp.reshape(backend.bits(x), (-1,)) for x in arrays]) for arrays in (ones, others))
    same = xp.logical_or(both_nan, a == b)
    # bfloat16, which has 7 bits, is computed in float32, which has 23.
    if layout.fraction_bits in (7, 23) and not _all(backend, same) and _loses_subnormals(backend, xp, device_of(a)):
        is_lost = xp.logical_and(b & layout.mask == 0, a & layout.mask < layout.smallest_normal)
        same = xp.logical_or(same, xp.logical_and(is_lost, (a < 0) == (b < 0)))
    return _all(backend, same)


def _all(backend: Backend, same: Array) -> bool:
    xp = array_namespace(same)
    return _host(backend, xp.astype(xp.all(same), xp.int32)) == 1


def _loses_subnormals(backend: Backend, xp: ModuleType, device: object) -> bool:
    smallest, half = (xp.full((1,), value, dtype=xp.float32, **on(device)) for value in (_SMALLEST, 0.5))
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
        msg = f"like must be an array of a library that follows the array API standard, got {like!r}"
        raise InvalidTypeError(msg)
    xp = array_namespace(like)
    _require(xp, like)
    for check in (_check_bits, _check_policy, _check_selection, _check_clipping, _check_counts, _check_spikes):
        try:
            check(functools.partial(_made, xp, device_of(like)))
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


def _made(xp: ModuleType, device: object, values: object) -> Array:
    """Return one int or a list of them as int32, and floats as float32."""
    is_integral = isinstance(values[0] if isinstance(values, list) else values, int)
    return xp.asarray(values, dtype=xp.int32 if is_integral else xp.float32, **on(device))


def _expect_values(what: str, got: Array, values: object) -> None:
    """Check an array against Python's numbers; the library compares them, and one flag is read."""
    xp = array_namespace(got)
    wanted = _made(xp, device_of(got), values)
    _expect(f"the dtype and shape of {what}", _form(got), _form(wanted))
    if not _all(_CORE, got == wanted):
        _fail(f"{what} must be {wanted!r}, got {got!r}")


def _check_bits(made: _Made) -> None:
    """Check scaling and unscaling, the count of bad values and the fingerprint against Python's numbers."""
    round32 = validation.round_to_float32
    values = [1.0, -2.5, 0.0, 3.0, 65504.0, 2.0**-100]
    x = made(values)
    for scale in (65536.0, 3.0, 2.0**-10):
        state, inverse = DynamicScale(init_scale=scale).init(x), round32(1.0 / scale)
        _expect_values("the fingerprint", _CORE.fingerprint(state), [validation.bits_of_float32(scale), 0, 0, 0])
        (scaled,), ((unscaled,), count) = _CORE.scale([x], state), _CORE.unscale([x], state)
        _expect_values(f"scale of {values} by {scale}", scaled, [round32(value * scale) for value in values])
        _expect_values(f"unscale of {values} by {scale}", unscaled, [round32(value * inverse) for value in values])
        _expect_values("the count of clean values", count, 0)
        for bad, place in itertools.product(_BAD, range(len(values))):
            spoilt = made([*values[:place], bad, *values[place + 1 :]])
            _, count = _CORE.unscale([x, spoilt, x, spoilt], state)
            _expect_values(f"the count with {bad} at place {place} of 2 arrays", count, 2)


def _check_policy(made: _Made) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    state = policy.init(made(0.0))
    for count, scale in ((0, 8.0), (0, 16.0), (3, 8.0), (0, 8.0), (1, 4.0)):
        state = policy.update(state, nonfinite=made(count))
        _expect_values(f"the scale after a count of {count}", state.scale, scale)


def _check_selection(made: _Made) -> None:
    for count, value in ((0, 1.0), (1, 2.0)):
        (chosen,) = ops.select(made(count) == made(0), [made([1.0, 1.0])], [made([2.0, 2.0])])
        _expect_values(f"select for a count of {count}", chosen, [value, value])


def _check_clipping(made: _Made) -> None:
    state = DynamicScale(init_scale=1.0).init(made(0.0))
    unscaled, _, squares = _CORE.unscale_with_squares([made([3.0, 0.0]), made([-4.0])], state)
    norm, factor, overflows = _CORE.clip_factor(squares, 2.5)
    clipped = _CORE.multiply_in_place(unscaled, factor)
    _expect_values("the norm of [3, 0] and [-4]", norm, 5.0)
    _expect_values("the overflow of a norm", overflows, 0)
    by = validation.float32_from_bits(_host(_CORE, arithmetic.float32_bits(factor)))
    if not 0.4999995 < by <= 0.5:
        _fail(f"the factor of a norm of 5 and at most 2.5 must be 0.5 or just below, got {by!r}")
    _expect_values("the clipped [3, 0]", clipped[0], [validation.round_to_float32(3.0 * by), 0.0])


def _check_counts(made: _Made) -> None:
    found, _ = _CORE.read_summaries([made([1.0, math.nan, math.inf, 0.0, -3.0])])
    _expect("the summary of 5 values", found, [summaries.Summary(5, 1, 1, 1, 0, 3.0)])


def _check_spikes(made: _Made) -> None:
    rule = spikes.SkipSpikes(window=4)
    state = rule.init(made(0.0))
    for value, expected in ((2.0, 0), (2.5, 0), (1.5, 0), (9.0, 1), (2.0, 0), (math.nan, 1)):
        is_spike = rule.judge(state, made(value))
        xp = array_namespace(is_spike)
        _expect_values(f"whether {value} is a spike", xp.astype(is_spike, xp.int32), expected)
        state = rule.learn(state, made(value), skipped=is_spike)
    _expect_values("the window of spikes", state.values, [2.0, 2.5, 1.5, 2.0])


def check_collectives(collectives: Collectives, like: Array, *, repetitions: int = 100) -> None:
    """Check a group's collectives; called on every rank of a real world, or on the ranks of ``run_ranks``.

    Parameters
    ----------
    collectives : Collectives
        This rank's. AssertionError, with both answers, if a result is wrong.
    like : array
        Any array of a library whose arrays the group should carry.
    repetitions : int, default 100
        How many all-reduces are made in a row.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def check(group):
    ...     gradscale.testing.check_collectives(group, np.zeros(1))
    >>> gradscale.testing.run_ranks(2, check)
    [None, None]
    """
    make = functools.partial(_made, array_namespace(like), device_of(like))
    backend = registry.backend_for(like)
    rank, size = collectives.rank, collectives.size
    if not 0 <= rank < size:
        _fail(f"rank must lie within 0 and size, got {rank} of {size}")
    most, last = validation.LARGEST_INT32, size - 1
    for repetition in range(repetitions):
        # Two under way at once, finished in the order in which they began.
        sent = [rank, -rank, repetition, most * (rank == repetition % size), -most], [rank + repetition]
        expected = [last, 0, repetition, most, -most], [last + repetition]
        arrays = [make(values) for values in sent]
        begun = [collectives.start_max(x) for x in arrays]
        for values, wanted, x, finish in zip(sent, expected, arrays, begun, strict=True):
            result = finish()
            _expect(f"rank {rank}: the type of the result", type(result), type(x))
            _expect(f"rank {rank}: the dtype and shape of the result", _form(result), _form(x))
            _expect(f"rank {rank}: MAX", backend.read(result), wanted)
            _expect(f"rank {rank}: MAX, when it is finished again,", backend.read(finish()), wanted)
            if backend.read(x) != values:
                _fail(f"rank {rank}: the array sent, {values}, was modified to {backend.read(x)}")
