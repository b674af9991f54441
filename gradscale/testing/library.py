"""check_library: whether the pure core runs on a library without an adapter, and what the library lacks if not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from array_api_compat import array_namespace, device, is_array_api_obj, to_device

from gradscale.core import arithmetic, clipping, ops, standard, summaries, validation
from gradscale.core.backend import Backend
from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import BackendNotAvailableError, GradscaleError, InvalidTypeError
from gradscale.policies.dynamic import DynamicScale

__all__ = ["check_library"]

_CORE = Backend()
_VALUES = (1.0, -2.5, 0.0, 3.0, 65504.0, 2.0**-100)
_SCALES = (65536.0, 3.0, 2.0**-10)
_BAD = (math.inf, -math.inf, math.nan)


def check_library(like: Array) -> None:
    """Check that gradscale runs on a library without an adapter of its own, by the array API standard alone.

    First that the library has each function, dtype and member of arrays that the core, clipping and diagnoses need,
    and that each takes what it is given; then that scaling, unscaling, the count of bad values, the policy, selection,
    the state's fingerprint, clipping and diagnoses give the bits that Python's own numbers say.

    Parameters
    ----------
    like : array
        Any array of the library, on the device to test. The host reads what is computed.

    Raises
    ------
    InvalidTypeError
        For what is no array.
    BackendNotAvailableError
        When the library lacks something: it names the functions and members, and says what each answered.
    AssertionError
        With the case and both answers, when something is computed wrongly.

    See Also
    --------
    check_backend : holds an adapter to the pure core.

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
    checks = (_check_bits, _check_policy, _check_selection, _check_clipping, _check_summaries)
    for check in checks:
        try:
            check(xp, device(like))
        except (AssertionError, GradscaleError):
            raise
        except Exception as error:
            what = check.__name__.removeprefix("_check_")
            msg = f"{standard.library_name(xp)} fails in gradscale's {what}, got {error!r}: write an adapter for it"
            raise BackendNotAvailableError(msg) from error


def _require(xp: Any, like: Array) -> None:
    """Raise for the names that are missing, and for functions that do not take what the core gives them."""
    missing = standard.lacks(like)
    beside = {*clipping.STANDARD_FUNCTIONS, *summaries.STANDARD_FUNCTIONS} - set(missing.get("functions", ()))
    others = sorted(name for name in beside if not hasattr(xp, name))
    if others:
        missing["functions for clipping and diagnoses"] = others
    lines = [f"{kind} {', '.join(names)} missing" for kind, names in missing.items()]
    known = {name for names in missing.values() for name in names}
    where = None if "device" in known else device(like)
    lines += [f"{name} raised {answer}" for name, answer in _failing(xp, where).items() if name not in known]
    if lines:
        msg = (
            f"{standard.library_name(xp)} lacks what gradscale needs of the array API standard, got "
            f"{'; '.join(lines)}: write an adapter for it, derived from gradscale.Backend"
        )
        raise BackendNotAvailableError(msg)


def _failing(xp: Any, where: Any) -> dict[str, str]:
    """Return the functions and members that do not take what they are given, and what each answered."""
    try:
        # All others need an array to be tried with.
        x = xp.asarray([1.0, -2.0], dtype=xp.float32, device=where)
        number = xp.asarray(2.0, dtype=xp.float32, device=where)
        counts = xp.asarray([1, 2], dtype=xp.int32, device=where)
    except Exception as error:
        return {"asarray with dtype= and device=": repr(error)}
    yes = number == number
    tried: dict[str, Callable[[], Any]] = {
        "__array_namespace_info__": lambda: xp.__array_namespace_info__().dtypes(device=where, kind="real floating"),
        "abs": lambda: xp.abs(x),
        "all": lambda: xp.all(yes),
        "astype": lambda: xp.astype(x, xp.int32),
        "concat": lambda: xp.concat([counts, counts]),
        "finfo": lambda: xp.finfo(xp.float32).bits,
        "full_like": lambda: xp.full_like(x, 3.0),
        "isdtype": lambda: (xp.isdtype(xp.float32, "real floating"), xp.isdtype(xp.int32, ("integral", "bool"))),
        "isfinite": lambda: xp.isfinite(x),
        "logical_and": lambda: xp.logical_and(yes, yes),
        "logical_not": lambda: xp.logical_not(yes),
        "logical_or": lambda: xp.logical_or(yes, yes),
        "max": lambda: xp.max(x),
        "maximum": lambda: xp.maximum(counts, counts),
        "minimum": lambda: xp.minimum(counts, counts),
        "reshape": lambda: xp.reshape(number, (1,)),
        "sqrt": lambda: xp.sqrt(number),
        "stack": lambda: xp.stack([number, number + number]),
        "sum": lambda: (xp.sum(x), xp.sum(counts, dtype=xp.int32)),
        "where": lambda: xp.where(yes, number, number),
        "zeros": lambda: xp.zeros((), dtype=xp.int32, device=where),
        "zeros_like": lambda: xp.zeros_like(x),
        "__getitem__": lambda: counts[0],
        "dtype": lambda: {x.dtype: x.dtype == xp.float32},
        "shape": lambda: math.prod(x.shape),
        "to_device": lambda: to_device(number, where),
        "the operators": lambda: (-x, x + x, x - x, x * number, x / number, x < x, x <= x, x == x, x >= x, x != x),
        "the read of values": lambda: _CORE.read(counts),
    }
    found = {}
    for name, call in tried.items():
        try:
            call()
        except Exception as error:
            found[name] = repr(error)
    return found


def _expect(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        msg = f"{what} must be {expected!r}, got {got!r}"
        raise AssertionError(msg)


def _bits(xp: Any, x: Array) -> list[int]:
    """Return float32 values, none of them negative or NaN, as their bits: by the host's numbers where it can."""
    flat = xp.reshape(x, (-1,))
    each = [xp.reshape(arithmetic.float32_bits(flat[index]), (1,)) for index in range(flat.shape[0])]
    return _CORE.read(xp.concat(each))


def _same(xp: Any, what: str, got: Array, expected: Sequence[float]) -> None:
    """Check a 1-d float32 array, whose values are compared by the library and read as one flag."""
    _expect(f"the dtype of {what}", got.dtype, xp.float32)
    wanted = xp.asarray(list(expected), dtype=xp.float32, device=device(got))
    _expect(f"the shape of {what}", tuple(got.shape), tuple(wanted.shape))
    equal = xp.reshape(xp.astype(xp.all(got == wanted), xp.int32), (1,))
    if _CORE.read(equal) != [1]:
        msg = f"{what} must be {wanted!r}, got {got!r}"
        raise AssertionError(msg)


def _state(xp: Any, where: Any, scale: float) -> ScaleState:
    return DynamicScale(init_scale=scale).init(xp.zeros((), dtype=xp.float32, device=where))


def _count(xp: Any, count: Array) -> int:
    _expect("the dtype and shape of a count", (count.dtype, tuple(count.shape)), (xp.int32, ()))
    return _CORE.read(xp.reshape(count, (1,)))[0]


def _check_bits(xp: Any, where: Any) -> None:
    """Check scaling and unscaling, the count of bad values and the fingerprint against Python's numbers."""
    round32 = validation.round_to_float32
    values = [round32(value) for value in _VALUES]
    x = xp.asarray(values, dtype=xp.float32, device=where)
    for scale in _SCALES:
        state, inverse = _state(xp, where, scale), round32(1.0 / scale)
        bits = [validation.bits_of_float32(scale), 0, 0, 0]
        _expect("the fingerprint", _CORE.read(_CORE.fingerprint(state)), bits)
        (scaled,) = _CORE.scale([x], state)
        _same(xp, f"what scale gives for {values} times {scale}", scaled, [round32(v * scale) for v in values])
        (unscaled,), count = arithmetic.unscale_arrays([x], state)
        _same(xp, f"what unscale gives for {values} by {scale}", unscaled, [round32(v * inverse) for v in values])
        _expect("the count of clean values", _count(xp, count), 0)
        for place in range(len(values)):
            for bad in _BAD:
                spoilt = xp.asarray([*values[:place], bad, *values[place + 1 :]], dtype=xp.float32, device=where)
                _, count = arithmetic.unscale_arrays([x, spoilt, x, spoilt], state)
                _expect(f"the count with {bad} at place {place} of 2 arrays", _count(xp, count), 2)


def _check_policy(xp: Any, where: Any) -> None:
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    state = policy.init(xp.zeros((), dtype=xp.float32, device=where))
    for count, scale in ((0, 8.0), (0, 16.0), (3, 8.0), (0, 8.0), (1, 4.0)):
        state = policy.update(state, nonfinite=xp.asarray(count, dtype=xp.int32, device=where))
        bits = _CORE.read(arithmetic.fingerprint(state))[0]
        _expect(f"the scale after a count of {count}", validation.float32_from_bits(bits), scale)


def _check_selection(xp: Any, where: Any) -> None:
    ones, twos = ([xp.asarray([value] * 2, dtype=xp.float32, device=where)] for value in (1.0, 2.0))
    for flag, value in ((0, 1.0), (1, 2.0)):
        count = xp.asarray(flag, dtype=xp.int32, device=where)
        (chosen,) = ops.select(count == xp.zeros_like(count), ones, twos)
        _same(xp, f"what select gives for a count of {flag}", chosen, [value] * 2)


def _check_clipping(xp: Any, where: Any) -> None:
    arrays = [xp.asarray(values, dtype=xp.float32, device=where) for values in ([3.0, 0.0], [-4.0])]
    state = _state(xp, where, 1.0)
    unscaled, _, squares = _CORE.unscale_with_squares(arrays, state)
    norm, factor, overflows = clipping.clip_factor(squares, 2.5)
    clipped = _CORE.multiply_in_place(unscaled, factor)
    _same(xp, "the norm of [3, 0] and [-4]", xp.reshape(norm, (1,)), [5.0])
    _expect("the overflow of a norm", _count(xp, overflows), 0)
    by = validation.float32_from_bits(_bits(xp, factor)[0])
    if not 0.4999995 < by <= 0.5:
        msg = f"the factor of a norm of 5 and at most 2.5 must be 0.5 or just below, got {by!r}"
        raise AssertionError(msg)
    _same(xp, "what clipping gives", clipped[0], [validation.round_to_float32(3.0 * by), 0.0])


def _check_summaries(xp: Any, where: Any) -> None:
    x = xp.asarray([1.0, math.nan, math.inf, 0.0, -3.0], dtype=xp.float32, device=where)
    found, _ = _CORE.read_summaries([x])
    _expect("the summary of 5 values", found, [summaries.Summary(5, 1, 1, 1, 0, 3.0)])
