"""Any policy as plain numbers: its arithmetic, traced once and written out as a Python loop over plain numbers.

A policy is written in the array API, where one update of 0-d arrays takes tens of microseconds. Its rule is run here
once on arrays that hold no values and record what is done with them: once for a clean step and once for an overflow.
What was recorded is written out as the two branches of a loop over Python's numbers, which gives the same states, bit
for bit: every float32 operation is one in double precision, rounded to float32. For +, -, * and / of float32 that is
the same as rounding once, since 53 bits are more than twice 24 and 1.

The arrays that hold no values are of :class:`Symbol`; their namespace has what a policy may use, as
``arithmetic.STANDARD_FUNCTIONS`` and ``STANDARD_MEMBERS`` list it, for 0-d arrays of bool, int32, float32 and float64.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn, cast

from gradscale.core.messages import shown
from gradscale.core.named import constructor
from gradscale.core.protocols import Policy, ScaleState
from gradscale.core.vector import is_fixed
from gradscale.errors import InvalidTypeError

__all__ = ["HELPERS", "LARGEST_FLOAT16", "PlainRule", "Symbol", "Unrolled", "constant", "plain_rule", "unroll"]

_INT32 = (-(2**31), 2**31 - 1)
_EXACT_IN_FLOAT32 = (-(2**24), 2**24)
_KINDS = {
    "bool": ("bool",),
    "integral": ("int32",),
    "signed integer": ("int32",),
    "real floating": ("float32", "float64"),
    "numeric": ("int32", "float32", "float64"),
}
_DTYPES = ("bool", "int32", "float32", "float64")


def _divide(x: float, y: float) -> float:
    """Divide as IEEE arithmetic does: by zero, too."""
    if y:
        return x / y
    return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan


def _truncated(x: float) -> int:
    """Return the integer part; of what int32 does not hold, what processors give."""
    return math.trunc(x) if _INT32[0] <= x <= _INT32[1] else _INT32[0]


HELPERS: dict[str, Any] = {
    # A C float is the quickest way to round to float32: to nearest, ties to even, inf beyond.
    "c_float": ctypes.c_float,
    "divide": _divide,
    "inf": math.inf,
    "isfinite": math.isfinite,
    "nan": math.nan,
    "truncated": _truncated,
}

# A capital letter stands where an operand is evaluated first, and is named if it is no name.
_TEMPLATES = {
    "add": "{a} + {b}",
    "subtract": "{a} - {b}",
    "multiply": "{a} * {b}",
    "divide": "divide({a}, {b})",
    "negative": "-{a}",
    "isfinite": "isfinite({a})",
    "equal": "{a} == {b}",
    "not_equal": "{a} != {b}",
    "less": "{a} < {b}",
    "less_equal": "{a} <= {b}",
    "greater": "{a} > {b}",
    "greater_equal": "{a} >= {b}",
    "logical_and": "{a} and {b}",
    "logical_or": "{a} or {b}",
    "logical_not": "not {a}",
    "where": "{b} if {a} else {c}",
    "integer_minimum": "{b} if {B} < {A} else {a}",
    "integer_maximum": "{b} if {B} > {A} else {a}",
    # A NaN in either is the result.
    "minimum": "{b} if {B} < {A} or {b} != {b} else {a}",
    "maximum": "{b} if {B} > {A} or {b} != {b} else {a}",
    "number_to_bool": "{a} != 0",
    "bool_to_integer": "1 if {a} else 0",
    "float_to_integer": "truncated({a})",
    "to_float": "{a} * 1.0",
    "round_to_float32": "c_float({a}).value",
    "wrap_to_int32": "({a} + 2147483648) % 4294967296 - 2147483648",
}


class Symbol:
    """A 0-d array without a value: an input, a constant, or an operation on others.

    Attributes
    ----------
    operation : str
        "input", "constant", or what is done with the operands.
    operands : tuple of Symbol
        What it is done with.
    dtype : {"bool", "int32", "float32", "float64"}
        As the standard has it.
    value : str, bool, int, float or None
        The name of an input; the value of a constant.
    bounds : tuple of int
        Between what an int32 lies, so that a sum that cannot leave its range is not wrapped into it.
    """

    __slots__ = ("bounds", "dtype", "operands", "operation", "value")
    shape = ()
    ndim = 0
    device = "symbols"

    def __init__(
        self,
        operation: str,
        operands: tuple[Symbol, ...],
        dtype: str,
        value: Any = None,
        bounds: tuple[int, int] = _INT32,
    ) -> None:
        self.operation = operation
        self.operands = operands
        self.dtype = dtype
        self.value = value
        self.bounds = bounds

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return _NAMESPACE

    def to_device(self, device: Any, /, *, stream: Any = None) -> Symbol:  # noqa: ARG002
        """Return the array itself: there is one device."""
        return self

    @property
    def is_atom(self) -> bool:
        """Whether it is written without parentheses and costs nothing to repeat."""
        return not self.operands

    def write(self, operands: Sequence[tuple[str, str]]) -> str:
        """Return the operation in Python; of each operand a name, empty for one that may be repeated, and its text."""
        if self.is_atom:
            return self.value if self.operation == "input" else _literal(self.value)
        template = _TEMPLATES[self.operation]
        texts = {}
        for letter, (name, text) in zip("abc", operands, strict=False):
            named = name and f"{{{letter.upper()}}}" in template
            texts[letter] = name if named else text
            texts[letter.upper()] = f"({name} := {text})" if named else text
        return f"({template.format(**texts)})"

    def _refuse(self, *_: Any) -> NoReturn:
        msg = "it asks for the value of an array, where it must choose by where()"
        raise InvalidTypeError(msg)

    __bool__ = __int__ = __float__ = __index__ = __complex__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = _refuse


def _literal(value: Any) -> str:
    # In parentheses, since a power or an attribute binds closer than the sign.
    return repr(value) if repr(value)[0] != "-" else f"({value!r})"


def constant(value: Any, dtype: str) -> Symbol:
    """Return a 0-d array that holds a known number; of a float32, the nearest one."""
    if dtype == "bool":
        return Symbol("constant", (), dtype, value != 0)
    if dtype == "int32":
        whole = math.trunc(value)
        return Symbol("constant", (), dtype, whole, (whole, whole))
    wide = value * 1.0
    return Symbol("constant", (), dtype, ctypes.c_float(wide).value if dtype == "float32" else wide)


def _record(operation: str, operands: tuple[Symbol, ...], dtype: str, bounds: tuple[int, int] = _INT32) -> Symbol:
    """Return an operation; on constants, its result."""
    symbol = Symbol(operation, operands, dtype, bounds=bounds)
    if not all(operand.operation == "constant" for operand in operands):
        return symbol
    text = symbol.write([("", operand.write(())) for operand in operands])
    return constant(eval(text, HELPERS.copy()), dtype)


def _pair(x: Any, y: Any) -> tuple[Symbol, Symbol, str]:
    """Return two operands as arrays, and the dtype that they have in common; a Python number takes the other's."""
    arrays = [operand for operand in (x, y) if isinstance(operand, Symbol)]
    dtype = max((array.dtype for array in arrays), key=_DTYPES.index)
    if len({array.dtype for array in arrays} - {"float32", "float64"}) > (0 if "float" in dtype else 1):
        msg = f"the standard does not combine {arrays[0].dtype} and {arrays[1].dtype}: it must cast by astype()"
        raise InvalidTypeError(msg)
    if dtype == "int32" and not all(isinstance(operand, (Symbol, int)) for operand in (x, y)):
        msg = f"the standard does not combine int32 with {x!r} or {y!r}: it must cast by astype()"
        raise InvalidTypeError(msg)
    first, second = (operand if isinstance(operand, Symbol) else constant(operand, dtype) for operand in (x, y))
    return first, second, dtype


def _arithmetic(operation: str) -> Callable[[Any, Any], Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        first, second, dtype = _pair(x, y)
        if dtype != "int32":
            result = _record(operation, (first, second), dtype)
            return _record("round_to_float32", (result,), dtype) if dtype == "float32" else result
        (a, b), (c, d) = first.bounds, second.bounds
        reached = {"add": [a + c, b + d], "subtract": [a - d, b - c], "multiply": [a * c, a * d, b * c, b * d]}[
            operation
        ]
        bounds = min(reached), max(reached)
        if _INT32[0] <= bounds[0] and bounds[1] <= _INT32[1]:
            return _record(operation, (first, second), dtype, bounds)
        return _record("wrap_to_int32", (_record(operation, (first, second), dtype),), dtype)

    return apply


def _comparison(operation: str) -> Callable[[Any, Any], Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        first, second, dtype = _pair(x, y)
        (a, b), (c, d) = first.bounds, second.bounds
        if dtype == "int32" and operation in ("equal", "not_equal") and (b < c or d < a):
            return constant(operation == "not_equal", "bool")
        return _record(operation, (first, second), "bool")

    return apply


def _extremum(operation: str, choose: Callable[[int, int], int]) -> Callable[[Any, Any], Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        first, second, dtype = _pair(x, y)
        if dtype != "int32":
            return _record(operation, (first, second), dtype)
        bounds = choose(first.bounds[0], second.bounds[0]), choose(first.bounds[1], second.bounds[1])
        return _record(f"integer_{operation}", (first, second), dtype, bounds)

    return apply


def _logical(operation: str, decisive: bool) -> Callable[[Any, Any], Symbol]:
    def apply(x: Any, y: Any) -> Symbol:
        first, second, _ = _pair(x, y)
        for one, other in ((first, second), (second, first)):
            if one.operation == "constant":
                return one if one.value is decisive else other
        return _record(operation, (first, second), "bool")

    return apply


def _where(condition: Symbol, x: Any, y: Any) -> Symbol:
    first, second, dtype = _pair(x, y)
    if condition.operation == "constant":
        return _astype(first if condition.value else second, dtype)
    bounds = min(first.bounds[0], second.bounds[0]), max(first.bounds[1], second.bounds[1])
    return first if first is second else _record("where", (condition, first, second), dtype, bounds)


def _astype(x: Symbol, dtype: str, /, *, copy: bool = True, device: Any = None) -> Symbol:  # noqa: ARG001
    if x.dtype == dtype:
        return x
    if dtype == "bool":
        return _record("number_to_bool", (x,), dtype)
    if x.dtype == "bool":
        return _astype(_record("bool_to_integer", (x,), "int32", (0, 1)), dtype)
    if dtype == "int32":
        return _record("float_to_integer", (x,), dtype)
    is_exact = _EXACT_IN_FLOAT32[0] <= x.bounds[0] and x.bounds[1] <= _EXACT_IN_FLOAT32[1]
    if dtype == "float64" or (x.dtype == "int32" and is_exact):
        return _record("to_float", (x,), dtype)
    return _record("round_to_float32", (x,), dtype)


def _isdtype(dtype: str, kind: Any) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return any(dtype == one or dtype in _KINDS.get(one, ()) for one in kinds)


def _dtypes(*, device: Any = None, kind: Any = None) -> dict[str, str]:  # noqa: ARG001
    return {dtype: dtype for dtype in _DTYPES if kind is None or _isdtype(dtype, kind)}


def _full(shape: Any, value: Any, *, dtype: str = "float32", device: Any = None) -> Symbol:  # noqa: ARG001
    if shape not in ((), []):
        msg = f"its arrays must be 0-d, got one of shape {shape!r}"
        raise InvalidTypeError(msg)
    return _astype(value, dtype) if isinstance(value, Symbol) else constant(value, dtype)


def _full_like(x: Symbol, value: Any, *, dtype: str | None = None, device: Any = None) -> Symbol:  # noqa: ARG001
    return _full((), value, dtype=dtype or x.dtype)


def _asarray(value: Any, *, dtype: str | None = None, device: Any = None, copy: Any = None) -> Symbol:  # noqa: ARG001
    if isinstance(value, Symbol):
        return _astype(value, dtype or value.dtype)
    kinds = {bool: "bool", int: "int32"}
    return constant(value, dtype or kinds.get(type(value), "float32"))


def _same(x: Symbol, *_: Any, **__: Any) -> Symbol:
    return x


class _Namespace:
    """What ``__array_namespace__`` returns: hashable, as a module is."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)

    def __getattr__(self, name: str) -> NoReturn:
        msg = f"it uses {name}, which is not among gradscale.core.arithmetic's STANDARD_FUNCTIONS for 0-d arrays"
        raise AttributeError(msg)


_NAMESPACE = _Namespace(
    __name__="gradscale.policies.plain",
    **{dtype: dtype for dtype in _DTYPES[1:]},
    bool="bool",
    __array_namespace_info__=lambda: SimpleNamespace(dtypes=_dtypes),
    all=_same,
    asarray=_asarray,
    astype=_astype,
    finfo=lambda dtype: SimpleNamespace(bits={"float32": 32, "float64": 64}[dtype]),
    full=_full,
    full_like=_full_like,
    isdtype=_isdtype,
    isfinite=lambda x: _record("isfinite", (x,), "bool"),
    logical_and=_logical("logical_and", decisive=False),
    logical_not=lambda x: _record("logical_not", (x,), "bool"),
    logical_or=_logical("logical_or", decisive=True),
    maximum=_extremum("maximum", max),
    minimum=_extremum("minimum", min),
    real=_same,
    reshape=_same,
    where=_where,
    zeros=lambda shape, *, dtype="float32", device=None: _full(shape, 0, dtype=dtype, device=device),
    zeros_like=lambda x, *, dtype=None, device=None: _full_like(x, 0, dtype=dtype, device=device),
)

_ARITHMETIC = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}
_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
_LOGICAL = {"and": "logical_and", "or": "logical_or", "invert": "logical_not"}


def _negative(x: Symbol) -> Symbol:
    # An int32 may have no opposite; a float's 0 has another sign.
    return _arithmetic("subtract")(0, x) if x.dtype == "int32" else _record("negative", (x,), x.dtype)


def _add_operators() -> None:
    for name, operation in _ARITHMETIC.items():
        function = _arithmetic(operation)
        setattr(Symbol, f"__{name}__", function)
        setattr(Symbol, f"__r{name}__", lambda x, y, function=function: function(y, x))
    for name, operation in _COMPARISONS.items():
        setattr(Symbol, f"__{name}__", _comparison(operation))
    for name, operation in _LOGICAL.items():
        setattr(Symbol, f"__{name}__", getattr(_NAMESPACE, operation))
    setattr(Symbol, "__neg__", _negative)  # noqa: B010


_add_operators()


LARGEST_FLOAT16 = 65504.0
# Deeper expressions are cut; Python's parser gives up at 200 parentheses.
_DEEPEST_EXPRESSION = 20

State = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Unrolled:
    """A policy as a loop over plain numbers.

    Attributes
    ----------
    first : tuple
        The first state, as Python numbers in the order of the state's fields.
    scale_index : int
        Which of them is the scale.
    source : str
        The loop, as Python source.
    run : callable
        ``run(state, magnitudes, add_scale, add_skipped) -> (state, raised)``. For each magnitude it hands the scale to
        ``add_scale``, and to ``add_skipped`` whether magnitude times scale is above 65504 (or NaN), and updates the
        state. It ends before the update that would have to raise.
    """

    first: State
    scale_index: int
    source: str
    run: Callable[[State, Iterable[float], Callable[[float], Any], Callable[[bool], Any]], tuple[State, bool]]


def unroll(policy: Policy) -> Unrolled:
    """Trace a policy, and return it as a loop over plain numbers.

    Raises
    ------
    InvalidTypeError
        For a policy that asks for an array's value, or uses a function that the array API standard does not have for
        0-d arrays: it would not run under a tracing compiler either.
    """
    try:
        first = policy.init(constant(0.0, "float32"))
        symbols = type(first)(*(Symbol("input", (), x.dtype, f"s{index}") for index, x in enumerate(first)))
        start = tuple(x.value for x in first)
        scale_index = first._fields.index("scale")
        # The count of a clean step and of an overflow, so that every choice between them is made here.
        clean, overflow = (policy.update(symbols, nonfinite=constant(count, "int32")) for count in (0, 1))
        source = "\n".join(_loop(symbols, scale_index, clean, overflow, policy.at_min_scale(symbols)))
    except Exception as error:
        msg = (
            f"the policy must be pure functions of 0-d arrays of the array API standard to be simulated, "
            f"got {shown(policy)}, and tracing it failed with {type(error).__name__}: {error}"
        )
        raise InvalidTypeError(msg) from error
    namespace = dict(HELPERS)
    exec(compile(source, f"<{type(policy).__name__}, unrolled>", "exec"), namespace)
    return Unrolled(start, scale_index, source, namespace["run"])


class PlainRule(NamedTuple):
    """A policy's rule over states of Python numbers.

    Attributes
    ----------
    update : callable
        ``update(state, nonfinite) -> state``, for a count as an int.
    backoff : callable
        ``backoff(state) -> state``; the very same one where the policy returns the same.
    at_min_scale : callable or None
        ``at_min_scale(state) -> bool``; None where the policy never raises.
    """

    update: Callable[[ScaleState, int], ScaleState]
    backoff: Callable[[ScaleState], ScaleState]
    at_min_scale: Callable[[ScaleState], bool] | None


def plain_rule(policy: Policy) -> PlainRule | None:
    """Return a policy's rule over plain numbers; None for a policy that may change, or does more than the standard."""
    return _traced_rule(cast("Hashable", policy)) if is_fixed(policy) else None


@functools.lru_cache(maxsize=64)
def _traced_rule(policy: Any) -> PlainRule | None:
    dtypes = ("float32", *["int32"] * (len(ScaleState._fields) - 1))
    symbols = ScaleState(*(Symbol("input", (), dtype, f"s{index}") for index, dtype in enumerate(dtypes)))
    # A policy may look at the count of an overflow.
    count = Symbol("input", (), "int32", "nonfinite", (1, _INT32[1]))
    try:
        after = [
            policy.update(symbols, nonfinite=constant(0, "int32")),
            policy.update(symbols, nonfinite=count),
            policy.backoff(symbols),
        ]
        at_min_scale = policy.at_min_scale(symbols)
        if any(type(state) is not ScaleState or tuple(x.dtype for x in state) != dtypes for state in after):
            return None
        source = "\n".join(_rule(symbols, after, at_min_scale))
    except Exception:
        # It needs arrays, as some do; whatever is wrong with it is told when it gets them.
        return None
    namespace = {**HELPERS, "state_of": constructor(ScaleState)}
    exec(compile(source, f"<{type(policy).__name__}, plain>", "exec"), namespace)
    return PlainRule(namespace["update"], namespace["backoff"], namespace.get("at_min_scale"))


def _rule(symbols: Any, after: list[Any], at_min_scale: Any) -> Iterator[str]:
    """Yield the lines of the three functions of a PlainRule."""
    names = ", ".join(symbol.value for symbol in symbols)
    clean, overflow, lowered = ([*_assignments(symbols, state)] for state in after)
    yield "def update(state, nonfinite):"
    yield f"    {names} = state"
    yield "    if nonfinite:"
    yield from (f"        {line}" for line in overflow or ["return state"])
    yield "    else:"
    yield from (f"        {line}" for line in clean or ["return state"])
    yield f"    return state_of(({names}))"
    yield "def backoff(state):"
    yield f"    {names} = state"
    yield from (f"    {line}" for line in lowered)
    yield f"    return state_of(({names}))" if lowered else "    return state"
    if at_min_scale is not None:
        writer = _Writer([at_min_scale])
        yield "def at_min_scale(state):"
        yield f"    {names} = state"
        yield from (f"    {line}" for line in writer.lines)
        yield f"    return {writer.expressions[0]}"


def _loop(symbols: Any, scale_index: int, clean: Any, overflow: Any, at_min_scale: Any) -> Iterator[str]:
    """Yield the lines of the loop."""
    state = ", ".join(symbol.value for symbol in symbols)
    yield "def run(state, magnitudes, add_scale, add_skipped):"
    yield f"    ({state},) = state"
    yield "    for magnitude in magnitudes:"
    yield f"        add_scale(s{scale_index})"
    # Not the opposite comparison, so that a NaN is an overflow.
    yield f"        if magnitude * s{scale_index} <= {LARGEST_FLOAT16!r}:"
    yield "            add_skipped(False)"
    for line in _assignments(symbols, clean):
        yield f"            {line}"
    yield "        else:"
    yield "            add_skipped(True)"
    if at_min_scale is not None:
        writer = _Writer([at_min_scale])
        for line in writer.lines:
            yield f"            {line}"
        yield f"            if {writer.expressions[0]}:"
        yield f"                return ({state},), True"
    for line in _assignments(symbols, overflow):
        yield f"            {line}"
    yield f"    return ({state},), False"


def _assignments(symbols: Any, after: Any) -> Iterator[str]:
    """Yield the lines that turn the state before a step into the one after it."""
    changed = [(symbol.value, x) for symbol, x in zip(symbols, after, strict=True) if x is not symbol]
    writer = _Writer([x for _, x in changed])
    yield from writer.lines
    if changed:
        yield f"{', '.join(name for name, _ in changed)} = {', '.join(writer.expressions)}"


class _Value(NamedTuple):
    """A recorded operation, whose operands are numbers of other values."""

    symbol: Symbol
    operands: tuple[int, ...]


class _Writer:
    """Writes recorded operations as Python, each one once.

    What is used once stands where it is used, and so is computed only in the branch that needs it; the rest gets a
    line.

    Attributes
    ----------
    lines : list of str
        Assignments of what is used more than once.
    expressions : list of str
        One for each root.
    """

    def __init__(self, roots: list[Symbol]) -> None:
        self._values: list[_Value] = []
        self._numbers: dict[Any, int] = {}
        self._found: dict[int, int] = {}
        self._written: dict[int, str] = {}
        self._depths: dict[int, int] = {}
        self.lines: list[str] = []
        numbered = [self._number(root) for root in roots]
        self._uses = [0] * len(self._values)
        for value in self._values:
            for operand in value.operands:
                self._uses[operand] += 1
        for number in numbered:
            self._uses[number] += 1
        # Operands come before what they are operands of.
        for number, value in enumerate(self._values):
            if not value.symbol.is_atom and (self._uses[number] > 1 or self._depth(number) > _DEEPEST_EXPRESSION):
                text = self._expression(number)
                self._written[number] = f"t{number}"
                self._depths[number] = 0
                self.lines.append(f"t{number} = {text}")
        self.expressions = [self._expression(number) for number in numbered]

    def _number(self, symbol: Symbol) -> int:
        """Return the number of a value; equal operations on equal operands have one."""
        if id(symbol) in self._found:
            return self._found[id(symbol)]
        operands = tuple(self._number(operand) for operand in symbol.operands)
        key = (symbol.operation, operands, symbol.dtype, repr(symbol.value))
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(_Value(symbol, operands))
        # An operand of many is looked at once.
        self._found[id(symbol)] = self._numbers[key]
        return self._numbers[key]

    def _depth(self, number: int) -> int:
        if number not in self._depths:
            deepest = max((self._depth(operand) for operand in self._values[number].operands), default=0)
            self._depths[number] = deepest + 1
        return self._depths[number]

    def _expression(self, number: int) -> str:
        if number in self._written:
            return self._written[number]
        symbol, operands = self._values[number]
        return symbol.write([(self._name(operand), self._expression(operand)) for operand in operands])

    def _name(self, number: int) -> str:
        """Return what a value that stands where it is used is called; nothing for one that can be repeated."""
        return "" if number in self._written or self._values[number].symbol.is_atom else f"t{number}"
