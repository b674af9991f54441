"""Changes a file of Python in one place at a time, such that a test should notice."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["Mutant", "mutants_of", "sample"]

PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
]
OPERATORS = dict(PAIRS) | {after: before for before, after in PAIRS}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file: its bytes from ``start`` to ``end``, on ``line`` and after, become ``after``.

    A test that reaches one of ``lines`` may notice.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    lines: range

    def apply(self, source: bytes) -> bytes:
        """Return the changed file."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:90] for text in (self.before, self.after))
        return f"{self.path}:{self.line}  {before}  ->  {after}"


def changes(node: Any) -> Iterator[tuple[str, Any, ast.AST]]:
    """Yield what can be changed in a node but not inside of it: the kind, what is replaced, and what by."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in OPERATORS:
            yield "comparison", node, _with(node, ops=[OPERATORS[type(first)](), *rest])
        case ast.BoolOp():
            yield "and/or", node, _with(node, op=OPERATORS[type(node.op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node.operand
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield "arithmetic", node, _with(node, op=OPERATORS[type(node.op)]())
        case ast.Constant(value=bool(value)):
            yield "true/false", node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)) if value != value + 1:
            yield "number", node, ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as returned) if not _is_none(returned):
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield "min/max", node.func, ast.Name(CALLS[name])
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS:
            yield "min/max", node.func, _with(node.func, attr=CALLS[name])
        case ast.arguments():
            for default in (*node.defaults, *filter(None, node.kw_defaults)):
                if _is_none(default):
                    yield "default", default, ast.Constant(0)
                elif isinstance(default, ast.Constant) and isinstance(default.value, str):
                    yield "default", default, ast.Constant(default.value + "_")
        case ast.If() | ast.IfExp() if not _has_its_opposite(node.test):
            yield "if", node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "statement", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement", node, ast.Pass()
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            yield "statement", node, ast.Pass()
        case ast.Module():
            for statement in node.body:
                made = statement.value if isinstance(statement, ast.Assign) else None
                if isinstance(made, ast.Call) and not _is_left_alone(made):
                    yield "object", made, ast.Constant(None)


def _with(node: Any, **fields: Any) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _has_its_opposite(test: ast.expr) -> bool:
    """Return whether another kind of change negates the condition."""
    return isinstance(test, ast.UnaryOp) or (isinstance(test, ast.Compare) and isinstance(test.ops[0], NEGATED))


def _is_left_alone(node: ast.AST) -> bool:
    """Return whether neither a node nor what is inside of it says what the program does."""
    match node:
        case ast.JoinedStr() | ast.pattern():
            return True
        case ast.Raise(exc=ast.expr()):
            return "NotImplementedError" in ast.unparse(node)
        case ast.FunctionDef():
            return node.name == "__repr__" or any("overload" in ast.unparse(each) for each in node.decorator_list)
        case ast.ClassDef():
            return any("Protocol" in ast.unparse(base) for base in node.bases)
        case ast.Assign(targets=[ast.Name(id="__all__" | "msg")]):
            return True
        case ast.AnnAssign():
            return "TypeAlias" in ast.unparse(node.annotation)
        case ast.If():
            return any(word in ast.unparse(node.test) for word in ("TYPE_CHECKING", "version_info", "__main__"))
        case ast.Call():
            return ast.unparse(node.func).endswith(("TypeVar", "ParamSpec"))
        case ast.BinOp(op=ast.Add()):
            return _is_string(node.left) or _is_string(node.right)
    return False


def _walk(node: ast.AST, lines: range, in_function: bool) -> Iterator[tuple[ast.AST, range]]:
    """Yield what may be changed, and the lines that a test reaches when it runs it.

    In a function these are the statement's. Elsewhere the import runs it, and no test: the lines of all that it is for.
    """
    if _is_left_alone(node):
        return
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
        if node.body:
            lines = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
    elif isinstance(node, ast.stmt) and in_function:
        # A compound statement without its body.
        end = getattr(body[0], "pattern", body[0]).lineno if body else (node.end_lineno or 0) + 1
        lines = range(node.lineno, max(end, node.lineno + 1))
    yield node, lines
    # What an exception says is for people.
    for name, value in () if isinstance(node, ast.Raise) else ast.iter_fields(node):
        if name not in {"annotation", "returns", "type_params"}:
            is_inside = name == "body" if isinstance(node, ast.FunctionDef) else in_function
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, lines, is_inside and not isinstance(node, ast.ClassDef))


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found = []
    for node, lines in _walk(ast.parse(source), range(1), False):
        for kind, old, new in changes(node):
            after = ast.unparse(new)
            if isinstance(new, ast.expr) and not isinstance(new, (ast.Constant, ast.Name, ast.Attribute)):
                after = f"({after})"
            start, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            found.append(Mutant(path, old.lineno, kind, source[start:end].decode(), after, start, end, lines))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end))


def sample(found: list[Mutant], count: int, seed: str) -> list[Mutant]:
    """Return some of the mutants: of every kind alike, and on as many lines as can be."""
    dice = random.Random(seed)
    kinds: dict[str, list[Mutant]] = collections.defaultdict(list)
    for mutant in dice.sample(found, len(found)):
        kinds[mutant.kind].append(mutant)
    groups = dice.sample(list(kinds.values()), len(kinds))
    in_turn = [mutant for turn in itertools.zip_longest(*groups) for mutant in turn if mutant is not None]
    first = {mutant.line: mutant for mutant in reversed(in_turn)}
    in_turn.sort(key=lambda mutant: first[mutant.line] is not mutant)
    return sorted(in_turn[:count], key=lambda mutant: mutant.start)
