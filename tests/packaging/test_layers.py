"""The house's rules, read from the source: who imports whom, in which order, and where arrays become numbers."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import gradscale

CORE = Path(gradscale.__file__).parent

# From the bottom up; a room imports itself and those of the lines above it.
ROOMS = [{name} for name in ("errors", "extras", "groups", "core", "policies", "reports", "scaler")]
ROOMS += [{"interop", "testing"}, {"cli"}]
# What makes the package of the rooms.
ROOFS = {"gradscale", "gradscale.__main__"}


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def targets(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each import of a file, anywhere in it: the module, and the names taken out of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not read"
            yield node.module or "", tuple(alias.name for alias in node.names)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def house() -> dict[str, ast.Module]:
    """Return the modules of gradscale, parsed, by their dotted names."""
    found = {}
    for path in sources(CORE):
        parts = path.relative_to(CORE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = parsed(path)
    return found


def edges(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return which modules of these each of them imports, anywhere and for whatever; itself not."""
    found: dict[str, set[str]] = {}
    for importer, tree in modules.items():
        wholes = {f"{module}.{name}" if name else module for module, names in targets(tree) for name in names or ("",)}
        imports = {one if one in modules else one.rpartition(".")[0] for one in wholes}
        found[importer] = {one for one in imports if one in modules and one != importer}
    return found


def level(module: str) -> int:
    """Return the line of ROOMS that a module stands in."""
    room = module.split(".")[1]
    (found,) = (index for index, rooms in enumerate(ROOMS) if room in rooms)
    return found


def upward(modules: dict[str, ast.Module]) -> list[str]:
    """Return the imports that run against the order of the rooms, or across a line of it."""
    wrong = []
    for importer, imports in edges(modules).items():
        for one in imports if importer != "gradscale.__main__" else ():
            if importer == "gradscale":
                is_wrong = one.startswith("gradscale.cli")
            elif one in ROOFS:
                # The command line uses the library as its users do.
                is_wrong = not importer.startswith("gradscale.cli")
            else:
                is_beside = level(one) == level(importer) and one.split(".")[1] != importer.split(".")[1]
                is_wrong = is_beside or level(one) > level(importer)
            wrong += [f"{importer} -> {one}"] if is_wrong else []
    return sorted(wrong)


def modules_of(**texts: str) -> dict[str, ast.Module]:
    """Return modules named with underscores for dots, as ``house`` does."""
    return {name.replace("__", "."): ast.parse(text) for name, text in texts.items()}


def test_no_room_imports_one_above_it() -> None:
    assert upward(house()) == []


def test_the_check_of_the_order_sees_an_import_that_runs_up_or_across() -> None:
    found = modules_of(
        gradscale="from gradscale import core\nfrom gradscale.cli import app",
        gradscale__errors="def f():\n    from gradscale.core import tree",
        gradscale__core="",
        gradscale__core__tree="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gradscale.scaler.scaler",
        gradscale__scaler__scaler="from gradscale.core import tree\nfrom gradscale.core.tree import flatten",
        gradscale__testing__ranks="from gradscale.interop.foreign import load_foreign_state\nimport gradscale",
        gradscale__interop__foreign="from gradscale.scaler import scaler",
        gradscale__cli__app="import gradscale\nfrom gradscale import core",
    )
    assert upward(found) == [
        "gradscale -> gradscale.cli.app",
        "gradscale.core.tree -> gradscale.scaler.scaler",
        "gradscale.errors -> gradscale.core.tree",
        "gradscale.testing.ranks -> gradscale",
        "gradscale.testing.ranks -> gradscale.interop.foreign",
    ]


def adapters() -> list[Path]:
    # Beside the core in site-packages, or in a folder of a clone.
    folders = [CORE.parent, CORE.parent / "backends"]
    return sorted(path for folder in folders for path in folder.glob("gradscale_*") if (path / "__init__.py").exists())


# What a room or a file may import besides, inside of its functions: tests of the public API see what is loaded at once.
ALLOWED = {
    "cli": {"typer", "rich", "numpy", "mpi4py", "torch", "jax", "cupy", "gradscale_numpy", "gradscale_cupy"},
    "plot.py": {"matplotlib"},
}


def test_gradscale_imports_the_standard_library_and_array_api_compat_alone() -> None:
    core = {*sys.stdlib_module_names, "array_api_compat", "gradscale"}
    for path in sources(CORE):
        found = {name.partition(".")[0] for name, _ in targets(parsed(path))}
        assert found <= core | ALLOWED.get("cli" if path.parent.name == "cli" else path.name, set()), path


def test_adapters_import_neither_each_other_nor_the_command_line() -> None:
    assert adapters(), "no adapter found beside the core"
    for folder in adapters():
        for path in sources(folder):
            others = {name for name, _ in targets(parsed(path)) if name.startswith(("gradscale_", "gradscale.cli"))}
            assert {name.partition(".")[0] for name in others} <= {folder.name}, path


def test_the_reading_of_imports_sees_one_inside_a_function() -> None:
    tree = ast.parse("def f():\n    import numpy.linalg\n    from torch.cuda import amp\n")
    assert list(targets(tree)) == [("numpy.linalg", ()), ("torch.cuda", ("amp",))]


def test_only_the_pure_backend_and_host_side_checks_convert_to_python_numbers() -> None:
    # backend.py reads for libraries without an adapter, and validation.py converts what users pass on the host.
    allowed = {"backend.py", "validation.py", "conformance.py"}
    paths = [path for path in sources(CORE) if path.parent.name != "cli"]
    assert {path.name for path in paths} >= allowed
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and path.name != "backend.py":
                assert node.attr not in {"item", "tolist"}, f"{path}:{node.lineno}"
            called = node.func if isinstance(node, ast.Call) else None
            if path.name not in allowed and isinstance(called, ast.Name) and called.id in {"int", "float", "bool"}:
                assert called.id in HOST_VALUES.get(path.name, set()), f"{path}:{node.lineno}"


# Conversions of values that are on the host already: settings, and what the adapter's read gave.
HOST_VALUES = {
    "scaler.py": {"float", "int"},
    "live_state.py": {"int"},
    "vector.py": {"bool", "float"},
    "spikes.py": {"float"},
}
