"""What can be imported, what an import loads, and what is installed."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import rlcompleter
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import python

import gradscale
from gradscale.policies import presets

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / ".ci" / "recipe.yaml"
NAMES = {"gradscale", *(f"gradscale_{name}" for name in ("numpy", "torch", "cupy", "nccl", "jax", "mlx"))}
FRAMEWORKS = NAMES - {"gradscale"} | {"numpy", "torch", "jax", "jaxlib", "cupy", "nccl", "mlx", "mpi4py", "numba"}
FRAMEWORKS |= {"ml_dtypes", "matplotlib", "rich", "typer"}
# What new processes run, step by step, and what they have loaded then.
LOADS: list[dict[str, set[str]]] = [
    {
        "import gradscale; gradscale.GradScaler(); gradscale.registry.names()": set(),
        "import numpy": {"numpy"},
        "gradscale.GradScaler().scale(numpy.float32(1.0))": {"numpy", "gradscale_numpy"},
    },
    {"from gradscale.tools.cli.app import run\ntry: run(['--help'])\nexcept SystemExit: pass": {"typer", "rich"}},
]


@pytest.mark.parametrize("steps", LOADS, ids=["scaler", "help"])
def test_nothing_is_loaded_but_what_comes_along(steps: dict[str, set[str]]):
    if {"typer", "rich"} in steps.values():
        require("cli")
    look = "\nimport sys; print('loaded', *{module.split('.')[0] for module in sys.modules})\n"
    completed = python("-c", look.join([*steps, ""]))
    assert completed.returncode == 0, completed.stderr
    loaded = [line.split() for line in completed.stdout.splitlines() if line.startswith("loaded ")]
    assert [set(names) & FRAMEWORKS for names in loaded] == list(steps.values())


@pytest.mark.parametrize("name", ["callbacks", "plot", "presets", "testing"])
def test_a_module_of_the_pages_is_imported_by_its_dotted_name(name: str):
    module = importlib.import_module(f"gradscale.{name}")
    assert getattr(gradscale, name) is module
    assert all(hasattr(module, each) for each in module.__all__)
    code = f"import gradscale.{name}, sys; print(sorted(sys.modules.keys() & {sorted(FRAMEWORKS)}))"
    assert python("-c", code).stdout == "[]\n"


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_module_of_an_adapter_that_is_guessed_is_told_by_its_name(name: str):
    with pytest.raises(ModuleNotFoundError, match=f"is a package of its own: from gradscale_{name} import"):
        importlib.import_module(f"gradscale.{name}")


def test_help_is_the_docstring_which_has_every_public_name():
    assert "__version__" in dir(gradscale)
    for name in {*dir(gradscale)} - {*gradscale.errors.__all__, "__version__"}:
        assert getattr(gradscale, name) is not None
        assert re.search(rf"\b{name}\b", gradscale.__doc__ or ""), name


def lines_of_example(documented: Any) -> int:
    """Return how many lines the example in an object's docstring has; nox's session docs runs them."""
    example = (inspect.getdoc(documented) or "").partition("\nExamples\n--------\n")[2]
    return sum(bool(line.strip()) for line in example.splitlines())


INNER = [f"gradscale.{name}" for name in dir(gradscale) if inspect.ismodule(getattr(gradscale, name))]


PUBLIC = [
    *[(name, "numpy") for name in ("gradscale", "gradscale.tools.simulation", "gradscale.errors", "gradscale_numpy")],
    *[(name, "plot" if name.endswith("plot") else "numpy") for name in INNER],
    pytest.param("gradscale_torch", "torch", marks=pytest.mark.torch),
    pytest.param("gradscale_jax", "optax", marks=pytest.mark.jax),
    pytest.param("gradscale_mlx", "mlx", marks=pytest.mark.mlx),
]
PARTS = [
    pytest.param("gradscale_numpy.mpi", "mpi", marks=pytest.mark.mpi),
    pytest.param("gradscale_torch.plugins", "lightning", marks=pytest.mark.torch),
]


def public_names(module: Any) -> list[str]:
    """Return the public names of a module."""
    # gradscale has no __all__: what it imports as itself is public.
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    public: list[str] = getattr(module, "__all__", [alias.asname for node in imports for alias in node.names])
    return public


@pytest.mark.parametrize(("name", "library"), [*PUBLIC, *PARTS])
def test_completion_offers_public_names_alone(name: str, library: str):
    require(library)
    module = pkgutil.resolve_name(name)
    completed = rlcompleter.Completer({"module": module}).attr_matches("module.")
    offered = {re.sub(r"^module\.|\W*$", "", text) for text in completed}
    assert {one for one in offered if not one.startswith("_")} == {*public_names(module)} - {"__version__"}


@pytest.mark.parametrize(("name", "library"), PUBLIC)
def test_classes_and_functions_have_examples(name: str, library: str):
    require(library)
    module = pkgutil.resolve_name(name)
    for one in public_names(module):
        found = getattr(module, one)
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        # Recorded traces show what presets do.
        if (inspect.isclass(found) or inspect.isfunction(found)) and not is_error and one not in presets.names():
            assert lines_of_example(found) >= 3, one


def test_versions_are_shown_without_an_import():
    code = f"import gradscale, sys; gradscale.show_versions(); print(sorted(sys.modules.keys() & {sorted(FRAMEWORKS)}))"
    first, *others, loaded = python("-c", code).stdout.splitlines()
    assert first.startswith(f"gradscale {gradscale.__version__}, Python 3.")
    assert f"numpy {importlib.metadata.version('numpy')}" in others
    assert (loaded, others) == ("[]", sorted(others))


def test_an_object_without_an_example_is_seen():
    assert lines_of_example(types.SimpleNamespace(__doc__="Do nothing.\n\nNotes\n-----\n>>> x\n")) == 0


def test_whatever_names_the_version_names_this_one():
    assert importlib.metadata.version("gradscale") == gradscale.__version__
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", changes, re.MULTILINE)
    assert newest is not None
    packaged = re.findall(r'^  version: "(.*)"$', RECIPE.read_text(), re.MULTILINE)
    assert [*cited, newest[1], *packaged] == [gradscale.__version__] * 3


def test_the_recipe_for_conda_asks_for_the_versions_that_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {line for lines in project["optional-dependencies"].values() for line in lines}
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    wanted = {"cupy >=13.5"}  # the extra brings none
    for line in {*project["dependencies"], *extras}:
        # Neither an extra of the library nor the system that it is for.
        name, _, version = re.sub(r"\[.*?\](?=>)|;.*", "", line).partition(">=")
        if not name.startswith("gradscale[") and name != "mpich":
            wanted.add(f"{names.get(name, name)} >={version}")
    run = RECIPE.read_text().partition("  run:\n")[2].partition("\ntests:")[0]
    assert {*re.findall(r"^    - (.*)$", run, re.MULTILINE)} == wanted | {"python >=${{ python_min }}"}


is_wheel = pytest.mark.skipif(
    "GRADSCALE_TEST_INSTALLED" not in os.environ, reason="GRADSCALE_TEST_INSTALLED is not set: this is no wheel"
)


@is_wheel
def test_the_installed_wheel_is_what_is_tested():
    for package in NAMES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert "site-packages" in (spec.origin or "")
        assert Path(spec.origin or "").with_name("py.typed").exists()
    files = importlib.metadata.files("gradscale") or []
    # The command is beside the packages, as "../../../bin/gradscale".
    assert any(file.parts[0] == ".." and file.stem == "gradscale" for file in files)


@is_wheel
def test_the_page_of_the_installed_wheel_suits_an_index():
    metadata = importlib.metadata.distribution("gradscale").read_text("METADATA") or ""
    # A newer hatchling writes a newer version unless it is told, which some indexes refuse.
    assert metadata.startswith("Metadata-Version: 2.4\n")
    # Links that lead from a clone lead nowhere from there; nor are a clone's pages of use in the wheel.
    assert re.findall(r"\]\((?!https://)[^)]*", metadata) == []
    assert not [file for file in importlib.metadata.files("gradscale") or [] if file.suffix == ".md"]
