"""What the mutation testing changes in a file, what it leaves alone, and which tests it takes for near."""

import pytest
from mutations import Mutant, mutants_of, sample
from nearness import nearness

HEAD = '"""A module of 1 line."""\n\nfrom typing import TYPE_CHECKING, overload\n'


def made(source: str, kind: str | None = None) -> list[tuple[str, str]]:
    return [(each.before, each.after) for each in mutants_of("m.py", source.encode()) if kind in (None, each.kind)]


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("comparison", "x = a < b", [("a < b", "(a <= b)")]),
        ("comparison", "x = a == b", [("a == b", "(a != b)")]),
        ("comparison", "x = a is not b", [("a is not b", "(a is b)")]),
        ("comparison", "x = a in b", [("a in b", "(a not in b)")]),
        ("comparison", "x = a <= b < c", [("a <= b < c", "(a < b < c)")]),
        ("and/or", "x = a and b or c", [("a and b", "(a or b)"), ("a and b or c", "((a and b) and c)")]),
        ("not", "x = not a", [("not a", "a")]),
        ("arithmetic", "x = a + b", [("a + b", "(a - b)")]),
        ("arithmetic", "x = (a +\n  b) * c", [("(a +\n  b) * c", "((a + b) / c)"), ("a +\n  b", "(a - b)")]),
        ("arithmetic", "x = a // b", [("a // b", "(a * b)")]),
        ("arithmetic", "x += 1", [("x += 1", "x -= 1")]),
        ("number", "x = 65504.0", [("65504.0", "65505.0")]),
        ("number", "def f(x=3): ...", [("3", "4")]),
        ("true/false", "f(x=True)", [("True", "False")]),
        ("return", "def f(x):\n    return x", [("return x", "return None")]),
        ("statement", "a.b = c", [("a.b = c", "pass")]),
        ("statement", "a[b] = c", [("a[b] = c", "pass")]),
        ("statement", "a.b: int = c", [("a.b: int = c", "pass")]),
        ("statement", "f(a,\n  b)", [("f(a,\n  b)", "pass")]),
        ("statement", "if a:\n    raise ValueError(1)", [("raise ValueError(1)", "pass")]),
        ("if", "if a:\n    b", [("a", "(not a)")]),
        ("if", "x = a if b < c else d", [("b < c", "(not b < c)")]),
        ("default", "def f(a, b=None, *, c='e'): ...", [("None", "0"), ("'e'", "'e_'")]),
        ("min/max", "x = min(a, b)", [("min", "max")]),
        ("min/max", "x = xp.any(a)", [("xp.any", "xp.all")]),
        ("object", "x = C()", [("C()", "None")]),
    ],
)
def test_each_kind_of_change(kind: str, source: str, expected: list[tuple[str, str]]) -> None:
    assert made(source, kind) == expected


@pytest.mark.parametrize(
    "source",
    [
        HEAD,
        "import os",
        "def f(x: 'a < 1'):\n    '''Add 1 + 1.'''\n",
        "class C:\n    '''Is 1 < 2.'''\n    x: Literal[1]\n",
        "__all__ = ['a'] + b",
        "if TYPE_CHECKING:\n    x = 1\n",
        "if sys.version_info >= (3, 12):\n    x = 1\n",
        "@overload\ndef f(x=1):\n    return x\n",
        "def __repr__(self):\n    return a + b\n",
        "class P(Protocol):\n    def f(self, x=1): ...\n",
        "def f():\n    raise NotImplementedError(1)\n",
        "def f():\n    msg = f'{a + 1}' + 'b'\n",
        "x = f'{a + 1:.3f}'",
        "def f():\n    return None\n",
        "X: TypeAlias = Literal[1]",
        "X = 'a'",
        "T = TypeVar('T', bound=int)",
        "P = typing.ParamSpec('P')",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert made(source) == []


def test_what_an_error_says_is_left_alone() -> None:
    assert made("raise ValueError(a + 1)") == [("raise ValueError(a + 1)", "pass")]


SOURCE = """\
def first(a, b=2):
    é = "é"; c = a < b
    if (a and
            b):
        return c
    return a + b


LIMIT = 3


class Third:
    size = 4

    def fourth(self):
        self.size = 5
"""


def found(before: str) -> Mutant:
    return next(each for each in mutants_of("m.py", SOURCE.encode()) if each.before == before)


@pytest.mark.parametrize(
    ("before", "line", "lines"),
    [
        # A default is made by the import; who runs the function may notice it.
        ("2", 1, range(2, 7)),
        ("a < b", 2, range(2, 3)),
        # Without the body, which runs under the condition alone.
        ("a and\n            b", 3, range(3, 5)),
        ("return c", 5, range(5, 6)),
        ("3", 9, range(1, 17)),
        ("4", 13, range(13, 17)),
        ("5", 16, range(16, 17)),
    ],
)
def test_the_line_and_the_lines_whose_tests_may_notice(before: str, line: int, lines: range) -> None:
    mutant = found(before)
    assert (mutant.line, mutant.lines) == (line, lines)


def test_a_change_is_made_in_its_place_after_characters_of_several_bytes() -> None:
    changed = found("a < b").apply(SOURCE.encode()).decode()
    assert changed == SOURCE.replace("a < b", "(a <= b)")


def test_every_mutant_compiles_and_differs() -> None:
    source = (HEAD + SOURCE).encode()
    mutants = mutants_of("m.py", source)
    assert mutants
    for mutant in mutants:
        assert mutant.apply(source) != source
        compile(mutant.apply(source), "m.py", "exec")


def test_a_sample_is_the_same_for_the_same_seed_and_spreads_over_kinds_and_lines() -> None:
    mutants = mutants_of("m.py", SOURCE.encode())
    samples = {seed: sample(mutants, 4, seed) for seed in "abcdefgh"}
    assert sample(mutants, 4, "a") == samples["a"]
    assert len({tuple(each) for each in samples.values()}) > 1
    for chosen in samples.values():
        assert len({each.kind for each in chosen}) == len({each.line for each in chosen}) == 4
    assert sample(mutants, 1000, "a") == mutants


@pytest.mark.parametrize(
    ("module", "file", "text", "expected"),
    [
        ("gradscale/cli/check.py", "tests/distributed/test_check_command.py", "", 2),
        ("gradscale/cli/check.py", "tests/core/test_tree.py", "from gradscale.cli.check import check", 3),
        ("gradscale/cli/check.py", "tests/core/test_tree.py", "from gradscale.cli import app, check", 3),
        ("gradscale/cli/check.py", "tests/core/test_tree.py", "check_backend()", 4),
        ("gradscale/cli/check.py", "tests/core/test_tree.py", "checked", None),
        ("backends/gradscale_torch/clipping.py", "tests/parity/test_torch_clipping.py", "", 2),
        ("backends/gradscale_torch/clipping.py", "tests/core/test_clipping.py", "", None),
        ("backends/gradscale_torch/clipping.py", "tests/core/test_clipping.py", "torch, clipping", 4),
        ("backends/gradscale_torch/state.py", "tests/core/test_tree.py", "from gradscale_torch.state import A", 3),
        ("backends/gradscale_torch/state.py", "tests/adapters/test_torch_arrays.py", "a_state", 4),
        ("backends/gradscale_torch/state.py", "tests/adapters/test_torch_arrays.py", "", None),
    ],
)
def test_tests_are_near_by_their_name_by_an_import_or_by_a_word(
    module: str, file: str, text: str, expected: int | None
) -> None:
    assert nearness(module, file, text) == expected
