"""The rule of parts, read from the source: no class takes code from a class of ours, and private names stay at home."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import gradscale

CORE = Path(gradscale.__file__).parent

# Who may take code from which class of ours; any adapter's backend, and any policy with factors.
HEIRS = {("ShardedGradScaler", "GradScaler")}
OF_MANY = {"Backend", "BoundedScale"}
# What brings no code: interfaces, and declarations of what a dictionary or a tuple holds.
WITHOUT_CODE = {"Protocol", "TypedDict"}

# Of the standard library, which gives its public names an underscore here and there.
PYTHONS = {"_replace", "_make", "_fields", "_asdict", "_exit", "_getframe"}
# Torch has no public names for these; adapters for it use them, and nobody else.
TORCHS = {
    *("_C", "_FrameAction", "_FrameExecStrategy", "_dynamo", "_torchdynamo_disable", "_set_grad_enabled", "_values"),
    *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_", "_debug_has_internal_overlap"),
    *("_foreach_add_", "_foreach_mul_", "_foreach_norm", "_get_default_store", "_world"),
}


Check = Callable[[dict[str, ast.Module]], list[str]]


def sources() -> dict[str, ast.Module]:
    """Return the library's and its adapters' files, parsed, by their paths."""
    folders = [CORE, *sorted(CORE.parent.glob("gradscale_*")), *sorted((CORE.parent / "backends").glob("gradscale_*"))]
    return {
        str(path.relative_to(CORE.parent)): ast.parse(path.read_text())
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def last(node: ast.expr) -> str:
    """Return the last name of an expression such as ``a.b`` or ``b[c]``."""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def heirs(files: dict[str, ast.Module]) -> list[str]:
    """Return the classes that take code from a class of ours, beside those that may."""
    classes = [
        (path, node) for path, tree in files.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    ours = {node.name for _, node in classes}
    # An interface that extends another one, too.
    without_code = set(WITHOUT_CODE)
    for _ in classes:
        without_code |= {node.name for _, node in classes if {last(base) for base in node.bases} & without_code}

    found = []
    for path, node in classes:
        for base in node.bases:
            name = last(base)
            is_ours = name in ours and not ast.unparse(base).startswith("torch.")
            may = (node.name, name) in HEIRS or name in OF_MANY or name.endswith("Error") or name in without_code
            if is_ours and not may:
                found.append(f"{path}: {node.name}({name})")
    return found


def promises(files: dict[str, ast.Module]) -> list[str]:
    """Return where a file declares for type checkers what another class will bring."""
    guards = [(path, node) for path, tree in files.items() for node in ast.walk(tree) if isinstance(node, ast.If)]
    guards = [(path, node) for path, node in guards if ast.unparse(node.test).endswith("TYPE_CHECKING")]
    brought = (ast.FunctionDef, ast.ClassDef)
    return [f"{path}:{node.lineno}" for path, node in guards if any(isinstance(one, brought) for one in node.body)]


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def defined_in(tree: ast.Module) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, attributes, arguments and slots."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            # A slot, or a name that is set as text.
            found.add(node.value)
    return found


def foreign(files: dict[str, ast.Module]) -> list[str]:
    """Return the private names that a file uses and does not define, but for Python's and torch's own."""
    found = []
    for path, tree in files.items():
        allowed = defined_in(tree) | PYTHONS | (TORCHS if "gradscale_torch" in path else set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torch"):
                names = [alias.name for alias in node.names]
            else:
                continue
            found += [f"{path}:{node.lineno}: {name}" for name in names if is_private(name) and name not in allowed]
    return found


@pytest.mark.parametrize("check", [heirs, promises, foreign])
def test_the_source_has_none(check: Check) -> None:
    assert check(sources()) == []


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        (heirs, "class A: pass\nclass B(A): pass", ["x.py: B(A)"]),
        (heirs, "class A: pass\nclass B(m.A[int]): pass", ["x.py: B(A)"]),
        (heirs, "class A(Protocol): pass\nclass B(A): pass", []),
        (heirs, "class GradScaler: pass\nclass Other(GradScaler): pass", ["x.py: Other(GradScaler)"]),
        (heirs, "class GradScaler(torch.amp.GradScaler): pass", []),
        (promises, "if TYPE_CHECKING:\n    def f(): ...", ["x.py:1"]),
        (foreign, "def f(x): return x._hidden", ["x.py:1: _hidden"]),
        (foreign, "from a import _hidden", ["x.py:1: _hidden"]),
        (foreign, "from torch.a import _hidden\nimport os\nos._exit(x._replace().__dict__)", []),
        (foreign, "class A:\n    def __init__(self): self._a = 1\n    def f(self, other): return other._a", []),
        (foreign, "x._foreach_norm", ["x.py:1: _foreach_norm"]),
    ],
)
def test_the_checks_see_what_they_are_for(check: Check, text: str, expected: list[str]) -> None:
    assert check({"x.py": ast.parse(text)}) == expected
