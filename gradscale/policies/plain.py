"""Any policy as plain numbers: its arithmetic, traced once and written out as Python.

A policy is written in the array API, where one update of 0-d arrays takes tens of microseconds. Here its rule runs on
arrays without values that record each operation: once for a clean step and once for an overflow. The record is written
out as a Python function that gives the same states, bit for bit: every float32 operation is one in double precision,
rounded to float32. For +, -, *, / and roots that equals rounding once, since 53 bits are more than twice 24 and 1.

What is written is C++, too, but for ``a if b else c``: an adapter may make a kernel of any :class:`Symbol`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeAlias

from gradscale.core.identity import IdentityMap
from gradscale.core.messages import shown
from gradscale.core.protocols import Policy, ScaleState
from gradscale.core.validation import round_to_float32
from gradscale.core.vector import is_fixed
from gradscale.errors import InvalidTypeError

__all__ = [
    "LARGEST_FLOAT16",
    "PlainRule",
    "Symbol",
    "Trace",
    "constant",
    "first_state",
    "plain_rule",
    "statements",
    "trace_of",
    "traced_rule",
]

LARGEST_FLOAT16 = 65504.0

_LEAST_INT32, _LARGEST_INT32 = -(2**31), 2**31 - 1
_NUMERIC = ("int32", "float32", "float64")
_DTYPES = ("bool", *_NUMERIC)
_KINDS = {
    "bool": ("bool",),
    "integral": ("int32",),
    "signed integer": ("int32",),
    "real floating": ("float32", "float64"),
    "numeric": _NUMERIC,
}
_CONVERSIONS: dict[str, Callable[[Any], float]] = {
    "bool": bool,
    "int32": math.trunc,
    "float32": round_to_float32,
    "float64": float,
}
# The Python numbers that an array of a dtype is combined with; a library's own, such as np.float64, widen it.
_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int32": (bool, int),
    "float32": (bool, int, float),
    "float64": (bool, int, float),
}
# A C float is the quickest way to round to nearest, ties to even.
_ROUNDED = {"int32": "(({} + 2147483648) & 4294967295) - 2147483648", "float32": "c_float({}).value", "float64": "{}"}


def _divide(x: float, y: float) -> float:
    """Divide as IEEE arithmetic does: by zero, too."""
    if y:
        return x / y
    return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan


def _root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _truncated(x: float) -> int:
    """Return the integer part; what processors give if int32 does not hold it."""
    return math.trunc(x) if _LEAST_INT32 <= x <= _LARGEST_INT32 else _LEAST_INT32


_HELPERS = {
    "c_float": ctypes.c_float,
    "divide": _divide,
    "inf": math.inf,
    "is_finite": math.isfinite,
    "nan": math.nan,
    "root": _root,
    "state_of": ScaleState._make,
    "truncated": _truncated,
}


def _pair(x: Operand, y: Operand, dtypes: Sequence[str] = _DTYPES) -> tuple[Symbol, Symbol, str]:
    """Return two operands as arrays, and their common dtype; a Python number takes the other's."""
    arrays = {operand.dtype for operand in (x, y) if isinstance(operand, Symbol)}
    dtype = max(arrays, key=_DTYPES.index)
    is_mixed = len(arrays) == 2 and arrays != {"float32", "float64"}
    if is_mixed or dtype not in dtypes or not all(type(z) in (Symbol, *_SCALARS[dtype]) for z in (x, y)):
        first, second = (z.dtype if isinstance(z, Symbol) else repr(z) for z in (x, y))
        msg = f"the standard does not combine {first} and {second} in this way: it must cast by astype()"
        raise InvalidTypeError(msg)
    return _astype(x, dtype), _astype(y, dtype), dtype


def _operator(
    template: str, dtypes: Sequence[str] = _NUMERIC, *, rounds: bool = False, decisive: bool | None = None
) -> Callable[[Operand, Operand], Symbol]:
    """Return an operation on two operands; ``decisive`` is the bool that decides its result whatever the other is."""

    def apply(x: Operand, y: Operand) -> Symbol:
        first, second, dtype = _pair(x, y, dtypes)
        for one, other in ((first, second), (second, first)):
            if dtype == "bool" and one.value is not None:
                return one if one.value is decisive else other
        return _record(_ROUNDED[dtype].format(template) if rounds else template, (first, second), dtype)

    return apply


def _comparison(template: str) -> Any:
    return lambda x, y: _record(template, _pair(x, y)[:2], "bool")


class Symbol:
    """A 0-d array without a value: an input, a constant, or an operation on others.

    ``template`` is the Python expression, with a placeholder for each operand; ``value`` is a constant's.
    """

    shape = ()
    ndim = 0
    device = "symbols"
    # NumPy's numbers leave operations with it to it.
    __array_ufunc__ = None

    def __init__(
        self, template: str, operands: tuple[Symbol, ...], dtype: str, value: bool | float | None = None
    ) -> None:
        self.template = template
        self.operands = operands
        self.dtype = dtype
        self.value = value

    def __array_namespace__(self, api_version: str | None = None) -> _Namespace:
        return _NAMESPACE

    def to_device(self, device: object, /, *, stream: object = None) -> Symbol:  # noqa: ARG002
        """Return the array itself: there is one device."""
        return self

    def _refuse(self, *_: object) -> NoReturn:
        msg = "it asks for the value of an array, where it must choose by where()"
        raise InvalidTypeError(msg)

    __bool__ = __int__ = __float__ = __index__ = __complex__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = _refuse

    __add__ = __radd__ = _operator("{} + {}", rounds=True)
    __sub__ = _operator("{} - {}", rounds=True)
    __rsub__ = _operator("{1} - {0}", rounds=True)
    __mul__ = __rmul__ = _operator("{} * {}", rounds=True)
    __truediv__ = _operator("divide({}, {})", ("float32", "float64"), rounds=True)
    __rtruediv__ = _operator("divide({1}, {0})", ("float32", "float64"), rounds=True)
    __eq__ = _comparison("{} == {}")
    __ne__ = _comparison("{} != {}")
    __lt__ = _comparison("{} < {}")
    __le__ = _comparison("{} <= {}")
    __gt__ = _comparison("{} > {}")
    __ge__ = _comparison("{} >= {}")
    __and__ = __rand__ = _operator("{} & {}", ("bool", "int32"), decisive=False)
    __or__ = __ror__ = _operator("{} | {}", ("bool", "int32"), decisive=True)

    def __invert__(self) -> Symbol:
        return _record("~{}", (self,), "int32") if self.dtype == "int32" else _logical_not(self)

    def __neg__(self) -> Symbol:
        # Not 0 - x: a float's 0 has another sign.
        return -1 * self


Operand: TypeAlias = Symbol | bool | float


def constant(value: bool | float, dtype: str) -> Symbol:
    """Return a 0-d array that holds a known number; of a float32, the nearest one."""
    exact = _CONVERSIONS[dtype](value)
    return Symbol(repr(exact), (), dtype, exact)


def _record(template: str, operands: tuple[Symbol, ...], dtype: str) -> Symbol:
    """Return an operation; on constants, its result."""
    if any(operand.value is None for operand in operands):
        return Symbol(template, operands, dtype)
    return constant(eval(template.format(*(operand.template for operand in operands)), _HELPERS.copy()), dtype)


def _logical_not(x: Symbol) -> Symbol:
    if x.dtype != "bool":
        msg = f"the standard has no logical_not of {x.dtype}: it must compare"
        raise InvalidTypeError(msg)
    return _record("not {}", (x,), "bool")


def _where(condition: Symbol, x: Operand, y: Operand) -> Symbol:
    first, second, dtype = _pair(x, y)
    if condition.value is not None:
        return first if condition.value else second
    return _record("{1} if {0} else {2}", (condition, first, second), dtype)


def _astype(x: Operand, dtype: str, /, *, copy: bool = True, device: object = None) -> Symbol:  # noqa: ARG001
    if not isinstance(x, Symbol):
        return constant(x, dtype)
    if x.dtype == dtype:
        return x
    if dtype == "bool":
        return _record("{} != 0", (x,), dtype)
    if dtype == "int32":
        return _record("1 if {} else 0" if x.dtype == "bool" else "truncated({})", (x,), dtype)
    return _record(_ROUNDED[dtype].format("{} * 1.0"), (x,), dtype)


def _isdtype(dtype: str, kind: str | tuple[str, ...]) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return any(dtype == one or dtype in _KINDS.get(one, ()) for one in kinds)


def _dtypes(*, device: object = None, kind: str | tuple[str, ...] | None = None) -> dict[str, str]:  # noqa: ARG001
    return {dtype: dtype for dtype in _DTYPES if kind is None or _isdtype(dtype, kind)}


def _full(shape: Sequence[int], value: Operand, *, dtype: str = "float32", device: object = None) -> Symbol:  # noqa: ARG001
    if shape not in ((), []):
        msg = f"its arrays must be 0-d, got one of shape {shape!r}"
        raise InvalidTypeError(msg)
    return _astype(value, dtype)


def _full_like(x: Symbol, value: Operand, *, dtype: str | None = None, device: object = None) -> Symbol:  # noqa: ARG001
    return _astype(value, dtype or x.dtype)


def _asarray(value: Operand, *, dtype: str | None = None, device: object = None, copy: object = None) -> Symbol:  # noqa: ARG001
    if isinstance(value, Symbol):
        return _astype(value, dtype or value.dtype)
    kinds: dict[type, str] = {bool: "bool", int: "int32"}
    return constant(value, dtype or kinds.get(type(value), "float32"))


def _same(x: Symbol, *_: object, **__: object) -> Symbol:
    return x


class _Namespace:
    """What ``__array_namespace__`` returns: hashable, as a module is."""

    def __init__(self, **members: object) -> None:
        vars(self).update(members)

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"it uses {name}, which is not among gradscale.core.arithmetic's STANDARD_FUNCTIONS for 0-d arrays"
        raise AttributeError(msg)


_NAMESPACE = _Namespace(
    __name__="gradscale.policies.plain",
    **{dtype: dtype for dtype in _DTYPES},
    __array_namespace_info__=lambda: SimpleNamespace(dtypes=_dtypes),
    all=_same,
    asarray=_asarray,
    astype=_astype,
    finfo=lambda dtype: SimpleNamespace(bits={"float32": 32, "float64": 64}[dtype]),
    full=_full,
    full_like=_full_like,
    isdtype=_isdtype,
    isfinite=lambda x: _record("is_finite({})", (x,), "bool"),
    logical_and=_operator("{} & {}", ("bool",), decisive=False),
    logical_not=_logical_not,
    logical_or=_operator("{} | {}", ("bool",), decisive=True),
    # A NaN in either is the result.
    maximum=_operator("{1} if {1} > {0} or {1} != {1} else {0}"),
    minimum=_operator("{1} if {1} < {0} or {1} != {1} else {0}"),
    real=_same,
    reshape=_same,
    sqrt=lambda x: _operator("root({})", ("float32", "float64"), rounds=True)(x, x),
    where=_where,
    zeros=lambda shape, *, dtype="float32", device=None: _full(shape, 0, dtype=dtype),  # noqa: ARG005
    zeros_like=lambda x, *, dtype=None, device=None: _full_like(x, 0, dtype=dtype),  # noqa: ARG005
)


_STATE_DTYPES = ("float32", *["int32"] * (len(ScaleState._fields) - 1))
_STATE = ScaleState(*(Symbol(name, (), dtype) for name, dtype in zip(ScaleState._fields, _STATE_DTYPES, strict=True)))
_NONFINITE = Symbol("nonfinite", (), "int32")


class Trace(NamedTuple):
    """What a policy makes of a state and a count without values."""

    state: ScaleState
    nonfinite: Symbol
    updated: ScaleState
    at_min_scale: Symbol
    """int32: 1 if one more overflow must be raised."""


class PlainRule(NamedTuple):
    """A policy's rule over states of Python numbers; ``at_min_scale`` is None if the policy never raises."""

    update: Callable[[ScaleState, int], ScaleState]
    backoff: Callable[[ScaleState], ScaleState]
    at_min_scale: Callable[[ScaleState], bool] | None


_rules: IdentityMap[PlainRule | None] = IdentityMap()


def plain_rule(policy: Policy) -> PlainRule | None:
    """Return a policy's rule over plain numbers; None for a policy that may change, or does more than the standard."""
    # By identity: policies that compare equal may differ in a field that is not compared.
    if policy not in _rules:
        rule = None
        # A policy that needs arrays has none; whatever is wrong with it is raised when it gets them.
        with contextlib.suppress(InvalidTypeError):
            rule = traced_rule(policy) if is_fixed(policy) else None
        _rules.put(policy, rule)
    return _rules[policy]


def trace_of(policy: Policy) -> Trace | None:
    """Return the trace of a policy; None for a policy that may change, or does more than the standard."""
    # What is wrong with a policy is raised when it gets arrays.
    with contextlib.suppress(InvalidTypeError), _tracing(policy):
        if is_fixed(policy):
            found = policy.at_min_scale(_STATE)
            at_min_scale = _astype(False if found is None else found, "int32")
            return Trace(_STATE, _NONFINITE, _updated(policy, _NONFINITE), at_min_scale)
    return None


@contextlib.contextmanager
def _tracing(policy: Policy) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        msg = (
            f"the policy must be pure functions of 0-d arrays of the array API standard to be simulated, "
            f"got {shown(policy)}, and tracing it failed with {type(error).__name__}: {error}"
        )
        raise InvalidTypeError(msg) from error


def first_state(policy: Policy) -> ScaleState:
    """Return a policy's first state as Python numbers; InvalidTypeError for a policy that needs arrays."""
    with _tracing(policy):
        return ScaleState(*(x.value for x in policy.init(constant(0.0, "float32"))))


def traced_rule(policy: Policy) -> PlainRule:
    """Return a policy's rule over plain numbers; InvalidTypeError for a policy that needs arrays."""
    with _tracing(policy):
        namespace: dict[str, Any] = dict(_HELPERS)
        exec(compile("\n".join(_source(policy)), f"<{type(policy).__name__}, plain>", "exec"), namespace)
    return PlainRule(namespace["update"], namespace["backoff"], namespace.get("at_min_scale"))


def _updated(policy: Policy, nonfinite: Symbol) -> ScaleState:
    """Return the state after a step."""
    return _checked(policy.update(_STATE, nonfinite=nonfinite))


def _checked(state: ScaleState) -> ScaleState:
    if type(state) is not ScaleState or tuple(x.dtype for x in state) != _STATE_DTYPES:
        msg = f"it must return a ScaleState of the dtypes {', '.join(_STATE_DTYPES)}"
        raise ValueError(msg)
    return state


def _source(policy: Policy) -> list[str]:
    """Return the lines of the functions of a PlainRule."""

    def returned(after: ScaleState) -> list[str]:
        if all(x is y for x, y in zip(after, _STATE, strict=True)):
            return ["return state"]
        lines, names = _assignments(after)
        return [*lines, f"return state_of(({', '.join(names)}))"]

    unpacked = f"{', '.join(ScaleState._fields)} = state"
    # A policy may look at the count of an overflow.
    clean = returned(_updated(policy, constant(0, "int32")))
    overflow = returned(_updated(policy, _NONFINITE))
    source = _block("def update(state, nonfinite):", unpacked, *_block("if nonfinite:", *overflow), *clean)
    # A simulation neither needs a backoff nor calls it.
    lowered = _checked(policy.backoff(_STATE)) if hasattr(policy, "backoff") else _STATE
    source += _block("def backoff(state):", unpacked, *returned(lowered))
    at_min_scale = policy.at_min_scale(_STATE)
    if at_min_scale is not None:
        lines, (name,) = _assignments([at_min_scale])
        source += _block("def at_min_scale(state):", unpacked, *lines, f"return {name}")
    return source


def _assignments(results: Iterable[Symbol]) -> tuple[list[str], list[str]]:
    assigned, names = statements(results)
    return [f"{name} = {text}" for name, (text, _) in assigned.items()], names


def _block(head: str, *lines: str) -> list[str]:
    return [head, *(f"    {line}" for line in lines)]


def statements(
    results: Iterable[Symbol], written: Callable[[str], str] = str
) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return what computes symbols, equal operations once, and the names of the results.

    What computes them is, by name and in order, an expression and its dtype; ``written`` may write a template anew.
    """
    names: dict[int, str] = {}
    # By the expression.
    assigned: dict[str, tuple[str, str]] = {}

    def name(symbol: Symbol) -> str:
        if id(symbol) not in names:
            text = written(symbol.template).format(*[name(operand) for operand in symbol.operands])
            known = assigned.setdefault(text, (f"t{len(assigned)}", symbol.dtype)) if symbol.operands else (text,)
            names[id(symbol)] = known[0]
        return names[id(symbol)]

    found = [name(symbol) for symbol in results]
    return {name: (text, dtype) for text, (name, dtype) in assigned.items()}, found
