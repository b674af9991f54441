"""The conformance suite: whether an adapter gives the answers of the pure core; offered in ``gradscale.testing``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from gradscale.core import arithmetic, summaries, validation
from gradscale.core.backend import Backend
from gradscale.core.messages import shown
from gradscale.core.protocols import Array, Collectives, ScaleState
from gradscale.errors import InvalidTypeError
from gradscale.policies.dynamic import DynamicScale

__all__ = ["check_backend", "check_collectives"]

_SCALES = (1.0, 65536.0, 2.0**-10, 3.0, 2.0**127, validation.SMALLEST_NORMAL)
# Those with bad values at each place in turn: an adapter may treat powers of two, and the others, apart.
_SWEPT = (65536.0, 3.0)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (1031,))
_BAD = (math.inf, -math.inf, math.nan)
_FACTORS = (1.0, 0.5, 0.3, 0.0)


def _fail(what: str) -> NoReturn:
    raise AssertionError(what)


def check_backend(backend: Backend, like: Array, *, dtypes: Sequence[Any] | None = None) -> None:
    """Check an array adapter against the pure core, bit for bit.

    Parameters
    ----------
    backend : Backend
        The adapter.
    like : array
        Any array of its library, on the device to test.
    dtypes : sequence of dtypes, optional
        Floating dtypes that it serves. Default: float32, and float64 where the device has it.

    Raises
    ------
    AssertionError
        With the case and both answers, when it differs from the pure core.
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
    xp = array_namespace(like)
    device = device_of(like)
    if dtypes is None:
        dtypes = [xp.float32] + ([xp.float64] if arithmetic.has_float64(xp, device) else [])
    _check_reading(backend, xp, device)
    # What is not overridden is the pure function, with which it would be compared.
    checks = [
        check
        for member, check in (
            ("scale", _check_scale),
            ("unscale_with_squares", _check_squares),
            ("multiply_in_place", _check_multiplication),
        )
        if _overrides(backend, member)
    ]
    if backend.computes_on_host:
        checks.append(_check_plain)
    for dtype in dtypes if _overrides(backend, "summarize") or _overrides(backend, "bits") else ():
        _check_summaries(backend, xp, device, dtype)
    swept = _SWEPT if _overrides(backend, "unscale") else ()
    for dtype in dtypes:
        few, many = (list(_value_sets(xp, device, dtype, everywhere=everywhere)) for everywhere in (False, True))
        for scale in _SCALES:
            state = DynamicScale(init_scale=scale).init(like)
            _check_fingerprint(backend, state)
            for values in many if scale in swept else few:
                _check_unscale(backend, state, values, scale)
            for values in few if scale in _SWEPT else ():
                for check in checks:
                    check(backend, state, values)


def _overrides(backend: Backend, member: str) -> bool:
    return getattr(type(backend), member) is not getattr(Backend, member)


def _check_reading(backend: Backend, xp: Any, device: Any) -> None:
    expected = [0, -1, validation.LARGEST_INT32, -validation.LARGEST_INT32, 7]
    got = backend.read(xp.asarray(expected, dtype=xp.int32, device=device))
    if got != expected or not all(type(value) is int for value in got):
        _fail(f"read must give Python ints {expected}, got {got!r}")
    made = backend.integers(expected, xp.zeros((), dtype=xp.float32, device=device))
    if made.shape != (5,) or made.dtype != xp.int32 or backend.read(made) != expected:
        _fail(f"integers must give a 1-d int32 array of {expected}, got {made!r}")
    beside = xp.zeros((), dtype=xp.float32, device=backend.placement(xp.zeros((2,), device=device)))
    if (beside + xp.ones((2,), dtype=xp.float32, device=device)).shape != (2,):
        _fail(f"placement must let a 0-d array be combined with others, got {beside!r}")
    example = backend.example()
    if example.shape != () or example.dtype != array_namespace(example).float32:
        _fail(f"example must give a 0-d float32, got {example!r}")


def _check_fingerprint(backend: Backend, state: ScaleState) -> None:
    counters = [array_namespace(state.scale).full_like(state.growth_tracker, value) for value in (3, 2**31 - 1, 0)]
    state = ScaleState(state.scale, *counters)
    expected, got = (backend.read(taken) for taken in (arithmetic.fingerprint(state), backend.fingerprint(state)))
    if got != expected:
        _fail(f"fingerprint of {state} must be {expected}, got {got}")


def _check_summaries(backend: Backend, xp: Any, device: Any, dtype: Any) -> None:
    """Check ``summarize`` against the pure form, and on subnormals, which some compilers take for 0."""
    # The sets share all arrays but one, and the pure form takes its time for each.
    known: dict[int, tuple[Array, summaries.Summary]] = {}
    for values in _value_sets(xp, device, dtype):
        if not values:
            continue
        for x in values:
            if id(x) not in known:
                row = backend.read(summaries.summarize_arrays([x]))
                known[id(x)] = x, summaries.summary_of(math.prod(x.shape), row)
        wanted = [known[id(x)][1] for x in values]
        got, _ = backend.read_summaries(values)
        if got != wanted:
            _fail(f"summarize of {values!r}, dtype {dtype}, must say {wanted}, got {got}")
    if dtype in (xp.float32, getattr(xp, "float64", None)):
        tiny = 2.0**-126 if dtype == xp.float32 else 2.0**-1022
        special = [tiny / 2, -tiny / 2, tiny, 0.0, -0.0]
        # Made from Python's numbers, and not computed.
        got, _ = backend.read_summaries([xp.asarray(special, dtype=dtype, device=device)])
        if got != [summaries.Summary(5, 0, 0, 2, 2, tiny)]:
            _fail(f"summarize of {special}, dtype {dtype}, must say 2 zeros, 2 subnormals, largest {tiny}, got {got}")


def _value_sets(xp: Any, device: Any, dtype: Any, *, everywhere: bool = True) -> Iterator[list[Array]]:
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


def _spoilt(xp: Any, array: Array, bad: float, place: int) -> Array:
    flat = xp.reshape(array, (-1,))
    positions = xp.arange(flat.shape[0], device=device_of(array))
    spoilt = xp.where(positions == place, xp.full_like(flat, bad), flat)
    # CuPy's where() makes float32 of bfloat16, which would not be tested then.
    return xp.reshape(spoilt if spoilt.dtype == array.dtype else xp.astype(spoilt, array.dtype), array.shape)


def _ramp(xp: Any, device: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    steps = xp.arange(size, dtype=xp.float32, device=device) - xp.full(
        (size,), size // 2, dtype=xp.float32, device=device
    )
    return xp.astype(xp.reshape(steps, shape), dtype)


def _check_unscale(backend: Backend, state: ScaleState, values: list[Array], scale: float) -> None:
    """Check ``unscale`` against the pure form, which is asked once for each dtype: into new and given arrays."""
    xp = array_namespace(state.scale)
    untouched = _joined(values)
    for dtype, into in ((None, "in place"), (xp.float32, "into float32")):
        expected, expected_count = arithmetic.unscale_arrays(values, state, dtype=dtype)
        highest, wanted = _host(backend, expected_count), _joined(expected)
        for how in ("new arrays", into):
            given = [xp.asarray(value, copy=True) for value in values]
            into_float32 = how == "into float32"
            out = [_single_like(x) for x in given] if into_float32 else given if how == "in place" else None
            got, count = backend.unscale(given, state, dtype=dtype if out is None else None, out=out)
            case = f"scale {scale}, dtype {dtype if out is None else None}, {how}"
            if len(got) != len(expected):
                _fail(f"{case}: {len(expected)} arrays must come back, got {len(got)}")
            if (
                isinstance(count, int)
                or count.shape != ()
                or count.dtype != xp.int32
                or not min(highest, 1) <= _host(backend, count) <= highest
            ):
                _fail(
                    f"{case}: the count must be {expected_count!r}, or at least 1 where that is above 0, got {count!r}"
                )
            for after, want in zip(got, expected, strict=True):
                if after.dtype != want.dtype or after.shape != want.shape:
                    _fail(f"{case}: must give {want.dtype} {want.shape}, got {after.dtype} {after.shape}")
            if not _holds_same(backend, _joined(got), wanted):
                index = _first_other(backend, got, expected)
                _fail(f"{case}: {values[index]!r} must become {expected[index]!r}, got {got[index]!r}")
            if how != "in place" and not _holds_same(backend, _joined(given), untouched):
                index = _first_other(backend, given, values)
                _fail(f"{case}: the given array {values[index]!r} was modified to {given[index]!r}")


def _check_scale(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check ``scale`` against the pure form."""
    expected, got = Backend.scale(backend, values, state), backend.scale(values, state)
    shapes = [x.shape for x in got] == [x.shape for x in values]
    if not shapes or not _same_all(backend, got, expected):
        _fail(f"scale of {values!r} by {state.scale!r} must give {expected!r}, got {got!r}")


def _check_plain(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check that a state of Python numbers does what the same state of arrays does."""
    xp = array_namespace(state.scale)
    scale = validation.float32_from_bits(backend.read(backend.fingerprint(state))[0])
    plain: Any = ScaleState(scale, 0, 0, 0)
    if not _same_all(backend, backend.scale(values, plain), backend.scale(values, state)):
        _fail(f"scale of {values!r} by the number {scale!r} must be what it is by the array")
    for member in ("unscale", "unscale_with_squares"):
        given, other = ([xp.asarray(value, copy=True) for value in values] for _ in range(2))
        expected, expected_count, *squares = getattr(backend, member)(given, state, out=given)
        got, count, *others = getattr(backend, member)(other, plain, out=other)
        if type(count) is not int or count != _host(backend, expected_count):
            _fail(f"{member} by the number {scale!r} must count {expected_count!r} as an int, got {count!r}")
        if not _same_all(backend, got, expected) or not _same_all(backend, others, squares):
            _fail(f"{member} of {values!r} by the number {scale!r} must be what it is by the array, got {got!r}")
    given, other = ([xp.asarray(value, copy=True) for value in values] for _ in range(2))
    _, expected_count = backend.unscale(given, plain, out=given)
    count = backend.unscale_at_once(other, plain)
    if count not in (None, expected_count):
        _fail(f"unscale_at_once of {values!r} must count {expected_count!r} as unscale does, got {count!r}")
    if not _same_all(backend, other, values if count is None else given):
        _fail(f"unscale_at_once of {values!r} must do in place what unscale does, or return None and do nothing")


def _same_all(backend: Backend, ones: Sequence[Array], others: Sequence[Array]) -> bool:
    return [x.dtype for x in ones] == [x.dtype for x in others] and _same(backend, ones, others)


def _check_squares(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check ``unscale_with_squares`` against ``unscale``, and its sum against the pure one."""
    xp = array_namespace(state.scale)
    for how in ("new arrays", "in place", "into float32"):
        given, other = ([xp.asarray(value, copy=True) for value in values] for _ in range(2))
        outs = {"new arrays": (None, None), "in place": (given, other)}.get(how) or tuple(
            [_single_like(x) for x in given] for _ in range(2)
        )
        expected, expected_count = backend.unscale(given, state, out=outs[0])
        got, count, squares = backend.unscale_with_squares(other, state, out=outs[1])
        case = f"unscale_with_squares of {values!r}, scale {state.scale!r}, {how}"
        if _host(backend, count) != _host(backend, expected_count) or not _same(backend, got, expected):
            _fail(f"{case}: must do what unscale does, {expected!r} and {expected_count!r}, got {got!r} and {count!r}")
        wanted = arithmetic.sum_of_squares(expected, state.scale)
        if squares.shape != () or squares.dtype != wanted.dtype:
            _fail(f"{case}: the sum must be 0-d {wanted.dtype}, got {squares!r}")
        both_bad = xp.logical_not(xp.logical_or(xp.isfinite(squares), xp.isfinite(wanted)))
        # The elements are summed in another order.
        rounding = wanted * xp.full_like(wanted, 1e-12 if wanted.dtype != xp.float32 else 1e-4)
        is_near = xp.logical_and(squares - wanted <= rounding, wanted - squares <= rounding)
        if not _host(backend, xp.astype(xp.logical_or(both_bad, is_near), xp.int32)):
            _fail(f"{case}: the sum must be {wanted!r}, got {squares!r}")


def _check_multiplication(backend: Backend, state: ScaleState, values: list[Array]) -> None:
    """Check ``multiply_in_place`` against the pure form."""
    xp = array_namespace(state.scale)
    for factor in _FACTORS:
        arrays = [xp.asarray(value, copy=True) for value in values]
        by = xp.asarray(xp.full_like(state.scale, factor))
        expected = arithmetic.multiply_arrays(values, by)
        got = backend.multiply_in_place(arrays, by)
        if not _same(backend, got, expected):
            index = _first_other(backend, got, expected)
            case = f"multiply_in_place by {factor} of {values[index]!r}"
            _fail(f"{case}: must give {expected[index]!r}, got {got[index]!r}")


def _single_like(x: Array) -> Array:
    """Return a float32 array to write to, of the shape and on the device of ``x``; complex where ``x`` is."""
    xp = array_namespace(x)
    dtype = x.dtype if arithmetic.kind_of(x) is arithmetic.Kind.COMPLEX else xp.float32
    return xp.zeros(x.shape, dtype=dtype, device=device_of(x))


def _host(backend: Backend, x: Array) -> int:
    return backend.read(array_namespace(x).reshape(x, (1,)))[0]


def _flat(xp: Any, x: Array) -> Array:
    if arithmetic.kind_of(x) is arithmetic.Kind.HALF:
        # Exact, and there is more that can be asked of float32.
        x = xp.astype(x, xp.float32)
    return xp.reshape(x, (-1,))


def _joined(arrays: Sequence[Array]) -> Array | None:
    """Return the elements of arrays of one dtype as one array, those of half precision as float32; None without any."""
    if not arrays:
        return None
    xp = array_namespace(arrays[0])
    return xp.concat([_flat(xp, x) for x in arrays])


def _same(backend: Backend, ones: Sequence[Array], others: Sequence[Array]) -> bool:
    """Tell whether arrays of one dtype hold the same values, with NaN equal to NaN and -0 apart from 0."""
    return _holds_same(backend, _joined(ones), _joined(others))


def _holds_same(backend: Backend, a: Array | None, b: Array | None) -> bool:
    """Tell the same of joined arrays."""
    if a is None or b is None:
        return a is b
    xp = array_namespace(a)
    if arithmetic.kind_of(a) is arithmetic.Kind.COMPLEX:
        # Libraries differ in the products of complex infinities, so of these only that they are not finite is compared.
        both_bad = xp.logical_not(xp.logical_or(xp.isfinite(a), xp.isfinite(b)))
        same = xp.logical_or(both_bad, a == b)
    else:
        both_nan = xp.logical_and(xp.isnan(a), xp.isnan(b))
        same = xp.logical_or(both_nan, a == b)
        same = xp.logical_and(same, xp.logical_or(both_nan, xp.signbit(a) == xp.signbit(b)))
    return bool(_host(backend, xp.astype(xp.all(same), xp.int32)))


def _first_other(backend: Backend, ones: Sequence[Array], others: Sequence[Array]) -> int:
    return next(i for i, (a, b) in enumerate(zip(ones, others, strict=True)) if not _same(backend, [a], [b]))


def check_collectives(collectives: Collectives, like: Array, *, repetitions: int = 100) -> None:
    """Check a group's collectives; to be called on every rank of a real world, or on the ranks of ``run_ranks``.

    Parameters
    ----------
    collectives : Collectives
        This rank's.
    like : array
        Any array of a library whose arrays the group is to carry.
    repetitions : int, default 100
        How many all-reduces are made in a row.

    Raises
    ------
    AssertionError
        With both answers, when a result is wrong.

    Examples
    --------
    >>> import gradscale, numpy as np
    >>> def check(group):
    ...     gradscale.testing.check_collectives(group, np.zeros(1))
    >>> gradscale.testing.run_ranks(2, check)
    [None, None]
    """
    from gradscale.core import registry

    xp = array_namespace(like)
    device = device_of(like)
    backend = registry.backend_for(like)
    rank, size = collectives.rank, collectives.size
    if not 0 <= rank < size:
        _fail(f"rank must lie within 0 and size, got {rank} of {size}")

    def check(values: list[int], expected: list[int], pending: Any, sent: Array) -> None:
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
