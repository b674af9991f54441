"""The house's rules, read from the source: who imports whom, host reads, and the size of files."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradscale

CORE = Path(gradscale.__file__).parent


def sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield the modules that importing a file imports: none of those inside functions, and none for types alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                yield child.module
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                pending += child.orelse
            elif not isinstance(child, (ast.FunctionDef, ast.Lambda)):
                pending.append(child)


# Beside the core and the adapters: the command line, which may import all of them.
TOOLS = {"gradscale_cli", "gradscale_bench"}


def packages() -> list[Path]:
    # Beside the core in site-packages, or in folders of a clone.
    folders = [CORE.parent, CORE.parent / "backends", CORE.parent / "tools"]
    return sorted(path for folder in folders for path in folder.glob("gradscale_*") if (path / "__init__.py").exists())


def adapters() -> list[Path]:
    return [path for path in packages() if path.name not in TOOLS]


# What a file may import besides, inside of its functions.
ALLOWED = {"__main__.py": {"gradscale_cli"}, "plot.py": {"matplotlib"}}


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: path.name)
def test_the_core_imports_the_standard_library_and_array_api_compat_alone(path: Path) -> None:
    core = {*sys.stdlib_module_names, "array_api_compat", "gradscale"}
    assert set(imported(path)) <= core | ALLOWED.get(path.name, set())
    assert {name.partition(".")[0] for name in imported_at_once(path)} <= core


def test_adapters_do_not_import_each_other() -> None:
    found = adapters()
    assert found, "no adapter found beside the core"
    for folder in found:
        for path in sources(folder):
            others = {name for name in imported(path) if name.startswith("gradscale_")}
            assert others <= {folder.name}, path


def test_the_reading_of_imports_sees_one_inside_a_function(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import numpy.linalg\n    from torch.cuda import amp\n")
    assert list(imported(path)) == ["numpy", "torch"]
    assert list(imported_at_once(path)) == []
    path.write_text("import a.b\nif TYPE_CHECKING:\n    import c\nclass D:\n    from e.f import g\n")
    assert sorted(imported_at_once(path)) == ["a.b", "e.f"]


def test_nothing_imports_the_tools_but_the_launcher_and_themselves() -> None:
    assert {path.name for path in packages()} >= TOOLS
    for folder in [CORE, *adapters()]:
        for path in sources(folder):
            assert not set(imported(path)) & TOOLS or path == CORE / "__main__.py", path


@pytest.mark.parametrize(
    "path", [*sources(CORE), *(p for f in packages() for p in sources(f))], ids=lambda path: path.name
)
def test_a_file_says_what_it_holds_and_has_at_most_400_lines(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), path
    assert len(text.splitlines()) <= 400


def test_only_the_generic_adapter_and_host_side_checks_convert_to_python_numbers() -> None:
    # generic.py reads for libraries without an adapter; validation.py converts what users pass on the host.
    allowed = {"generic.py", "validation.py", "conformance.py"}
    for path in sources(CORE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and path.name != "generic.py":
                assert node.attr not in {"item", "tolist"}, f"{path}:{node.lineno}"
            called = node.func if isinstance(node, ast.Call) else None
            if path.name not in allowed and isinstance(called, ast.Name) and called.id in {"int", "float", "bool"}:
                assert called.id in HOST_VALUES.get(path.name, set()), f"{path}:{node.lineno}"


# Conversions of values that are on the host already: settings, and what the adapter's read gave.
HOST_VALUES = {"stateful.py": {"float", "int"}, "agreement.py": {"bool"}}
