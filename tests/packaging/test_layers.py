"""The house's rules, read from the source.

Who imports whom, and in which order; where arrays become numbers; and the rule of parts: no class takes code from a
class of ours, and private names stay at home.
"""

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gradscale

CORE = Path(gradscale.__file__).parent

# From the bottom up; a room imports itself and those of the lines above it.
ROOMS = [{name} for name in ("errors", "extras", "groups", "core", "policies", "reports", "scaler")]
ROOMS += [{"interop", "testing"}, {"cli"}]
# What makes the package of the rooms.
ROOFS = {"gradscale", "gradscale.__main__"}
# What a room or a file may import besides, inside of its functions: tests of the public API see what is loaded at once.
OUTSIDE = {
    "cli": {"typer", "rich", "numpy", "mpi4py", "torch", "jax", "cupy", "gradscale_numpy", "gradscale_cupy"},
    "plot": {"matplotlib"},
}
# Files that read for libraries without an adapter, and that convert what users pass on the host.
CONVERTING = {"backend", "validation", "conformance"}
# Conversions of values that are on the host already: settings, and what the adapter's read gave.
HOST_VALUES = {
    "scaler": {"float", "int"},
    "live_state": {"int"},
    "vector": {"bool", "float"},
    "spikes": {"bool", "float"},
}

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

Modules = dict[str, ast.Module]


@functools.cache
def house() -> Modules:
    """Return the modules of gradscale and of its adapters, parsed, by their dotted names."""
    # Adapters are beside the core in site-packages, or in a folder of a clone.
    folders = [CORE, *CORE.parent.glob("gradscale_*"), *(CORE.parent / "backends").glob("gradscale_*")]
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def targets(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each import of a file, anywhere in it: the module, and the names taken out of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not read"
            yield node.module or "", tuple(alias.name for alias in node.names)


def edges(modules: Modules) -> dict[str, set[str]]:
    """Return which modules of these each of them imports, anywhere and for whatever; itself not."""
    found: dict[str, set[str]] = {}
    for importer, tree in modules.items():
        wholes = {f"{module}.{name}" if name else module for module, names in targets(tree) for name in names or ("",)}
        imports = {one if one in modules else one.rpartition(".")[0] for one in wholes}
        found[importer] = {one for one in imports if one in modules and one != importer}
    return found


def room(module: str) -> str:
    """Return the room that a module of gradscale is in."""
    return f"{module}.".split(".")[1]


def level(module: str) -> int:
    """Return the line of ROOMS that a module stands in."""
    (found,) = (index for index, rooms in enumerate(ROOMS) if room(module) in rooms)
    return found


def upward(modules: Modules) -> list[str]:
    """Return the imports that run against the order of the rooms, or across a line of it."""
    wrong = []
    for importer, imports in edges(rooms(modules)).items():
        for one in imports if importer != "gradscale.__main__" else ():
            if importer == "gradscale":
                is_wrong = one.startswith("gradscale.cli")
            elif one in ROOFS:
                # The command line uses the library as its users do.
                is_wrong = not importer.startswith("gradscale.cli")
            else:
                is_beside = level(one) == level(importer) and room(one) != room(importer)
                is_wrong = is_beside or level(one) > level(importer)
            wrong += [f"{importer} -> {one}"] if is_wrong else []
    return sorted(wrong)


def rooms(modules: Modules) -> Modules:
    """Return those modules that are gradscale's own."""
    return {name: tree for name, tree in modules.items() if name.partition(".")[0] == "gradscale"}


def circle(modules: Modules) -> list[str]:
    """Return the modules of one circle of imports. The public face is not a part of any."""
    graph = {one: imports - ROOFS for one, imports in edges(rooms(modules)).items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return sorted({str(one) for one in error.args[1]})
    return []


def outside(modules: Modules) -> list[str]:
    """Return imports of gradscale beside Python's and array_api_compat, and an adapter's of another or the commands."""
    found = []
    for name, tree in modules.items():
        package = name.partition(".")[0]
        for target, _ in targets(tree):
            top = target.partition(".")[0]
            if package == "gradscale":
                own = {*sys.stdlib_module_names, "array_api_compat", "gradscale"}
                is_wrong = top not in own | OUTSIDE.get("cli" if room(name) == "cli" else name.split(".")[-1], set())
            else:
                is_wrong = target.startswith(("gradscale_", "gradscale.cli")) and top != package
            found += [f"{name} -> {target}"] if is_wrong else []
    return found


def conversions(modules: Modules) -> list[str]:
    """Return where a file of the core that is not there for it makes Python's numbers of arrays."""
    found = []
    for name, tree in rooms(modules).items():
        file = name.split(".")[-1]
        for node in ast.walk(tree) if room(name) != "cli" else ():
            if isinstance(node, ast.Attribute) and node.attr in {"item", "tolist"} and file != "backend":
                found.append(f"{name}:{node.lineno}")
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in {"int", "float", "bool"} - HOST_VALUES.get(file, set()):
                found += [f"{name}:{node.lineno}"] if file not in CONVERTING else []
    return found


def last(node: ast.expr) -> str:
    """Return the last name of an expression such as ``a.b`` or ``b[c]``."""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def heirs(modules: Modules) -> list[str]:
    """Return the classes that take code from a class of ours, beside those that may."""
    classes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ours = {node.name for node in classes}
    # An interface that extends another one, too.
    without_code = set(WITHOUT_CODE)
    for _ in classes:
        without_code |= {node.name for node in classes if {last(base) for base in node.bases} & without_code}
    found = []
    for node in classes:
        for base in node.bases:
            name = last(base)
            is_ours = name in ours and not ast.unparse(base).startswith("torch.")
            may = (node.name, name) in HEIRS or name in OF_MANY or name.endswith("Error") or name in without_code
            found += [f"{node.name}({name})"] if is_ours and not may else []
    return found


def promises(modules: Modules) -> list[str]:
    """Return where a file declares for type checkers what another class will bring."""
    guards = [(name, node) for name, tree in modules.items() for node in ast.walk(tree) if isinstance(node, ast.If)]
    guards = [(name, node) for name, node in guards if ast.unparse(node.test).endswith("TYPE_CHECKING")]
    brought = (ast.FunctionDef, ast.ClassDef)
    return [f"{name}:{node.lineno}" for name, node in guards if any(isinstance(one, brought) for one in node.body)]


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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A slot, or a name that is set as text.
            found.add(node.value)
    return found


def foreign(modules: Modules) -> list[str]:
    """Return the private names that a file uses and does not define, but for Python's and torch's own."""
    found = []
    for module, tree in modules.items():
        allowed = defined_in(tree) | PYTHONS | (TORCHS if module.startswith("gradscale_torch") else set())
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torch"):
                names = [alias.name for alias in node.names]
            private = [name for name in names if name.startswith("_") and not name.endswith("__")]
            found += [f"{module}: {name}" for name in private if name not in allowed]
    return found


Check = Callable[[Modules], list[str]]


@pytest.mark.parametrize("check", [upward, circle, outside, conversions, heirs, promises, foreign])
def test_the_source_has_none(check: Check) -> None:
    modules = house()
    assert {"gradscale.scaler.scaler", "gradscale_numpy.arrays"} < set(modules)
    assert check(modules) == []


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        (upward, {"gradscale.errors": "import gradscale.core.a"}, ["gradscale.errors -> gradscale.core.a"]),
        (upward, {"gradscale": "from gradscale.cli import app"}, ["gradscale -> gradscale.cli.app"]),
        (upward, {"gradscale.testing": "import gradscale"}, ["gradscale.testing -> gradscale"]),
        (upward, {"gradscale.testing": "import gradscale.interop"}, ["gradscale.testing -> gradscale.interop"]),
        (circle, {"gradscale.core.a": "import gradscale.core.b"}, ["gradscale.core.a", "gradscale.core.b"]),
        (outside, {"gradscale.core.a": "from torch.cuda import amp"}, ["gradscale.core.a -> torch.cuda"]),
        (outside, {"gradscale_jax": "import gradscale_numpy"}, ["gradscale_jax -> gradscale_numpy"]),
        (conversions, {"gradscale.core.a": "x.item()"}, ["gradscale.core.a:1"]),
        (conversions, {"gradscale.core.a": "int(x)"}, ["gradscale.core.a:1"]),
        (heirs, {"x": "class A: pass\nclass B(m.A[int]): pass"}, ["B(A)"]),
        (promises, {"x": "if TYPE_CHECKING:\n    def f(): ..."}, ["x:1"]),
        (foreign, {"x": "from a import _hidden\nfrom torch.a import _b"}, ["x: _hidden"]),
        (foreign, {"x": "x._foreach_norm"}, ["x: _foreach_norm"]),
    ],
)
def test_the_checks_see_what_they_are_for(check: Check, files: dict[str, str], expected: list[str]) -> None:
    others = {
        "gradscale.core.b": "def f():\n    from gradscale.core.a import x",
        **dict.fromkeys(
            ("gradscale", "gradscale.cli.app", "gradscale.core.a", "gradscale.interop", "gradscale_numpy"), ""
        ),
    }
    assert check({name: ast.parse(text) for name, text in (others | files).items()}) == expected
