"""unroll: a policy's arithmetic, traced once and written out as a Python loop over plain numbers.

A policy is written in the array API, where one update of 0-d arrays takes tens of microseconds. Its rule is run here
once on arrays that hold no values and record what is done with them: once for a clean step and once for an overflow.
What was recorded is written out as the two branches of a loop over Python's numbers, which gives the same states, bit
for bit: every float32 operation is one in double precision, rounded to float32. For +, -, * and / of float32 that is
the same as rounding once, since 53 bits are more than twice 24 and 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from gradscale.errors import InvalidTypeError
from gradscale.protocols import Policy
from gradscale.symbols import HELPERS, Symbol, constant

__all__ = ["LARGEST_FLOAT16", "Unrolled", "unroll"]

LARGEST_FLOAT16 = 65504.0
# Deeper expressions are cut; Python's parser gives up at 200 parentheses.
_DEEPEST = 20

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
        clean, overflow = (policy.update(symbols, constant(count, "int32")) for count in (0, 1))
        source = "\n".join(_loop(symbols, scale_index, clean, overflow, policy.exhausted(symbols)))
    except Exception as error:
        msg = (
            f"the policy must be pure functions of 0-d arrays of the array API standard to be simulated, "
            f"got {policy!r}, and tracing it failed with {type(error).__name__}: {error}"
        )
        raise InvalidTypeError(msg) from error
    namespace = dict(HELPERS)
    exec(compile(source, f"<{type(policy).__name__}, unrolled>", "exec"), namespace)
    return Unrolled(start, scale_index, source, namespace["run"])


def _loop(symbols: Any, scale_index: int, clean: Any, overflow: Any, exhausted: Any) -> Iterator[str]:
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
    if exhausted is not None:
        writer = _Writer([exhausted])
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
            if not value.symbol.is_atom and (self._uses[number] > 1 or self._depth(number) > _DEEPEST):
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
