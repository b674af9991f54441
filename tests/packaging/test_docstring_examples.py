"""Every public class and function but exceptions and presets shows how it is used, in lines that run."""

import doctest
import inspect
import pkgutil
import types
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale.policies import presets

FEWEST = 3  # lines of an example
# Recorded traces show what presets do.
PRESETS = {vars(presets)[name] for name in presets.names()}
INNER = [name for name in dir(gradscale) if inspect.ismodule(getattr(gradscale, name))]
# The public modules, and what they need.
MODULES = [
    *[(module, "numpy") for module in ("gradscale", "gradscale.tools.simulation", "gradscale_numpy")],
    *[(f"gradscale.{name}", "plot" if name == "plot" else "numpy") for name in INNER],
    *[
        pytest.param(f"gradscale_{name}", library, marks=[getattr(pytest.mark, name), pytest.mark.tier("ranks")])
        for name, library in (("torch", "torch"), ("jax", "optax"), ("mlx", "mlx"))
    ],
]


def run(name: str, documented: Any):
    """Hold an object's docstring to having an example, and run it."""
    examples = (inspect.getdoc(documented) or "").partition("\nExamples\n--------\n")[2]
    lines = [line for line in examples.splitlines() if line.strip()]
    assert len(lines) >= FEWEST, f"{name} has no example"
    printed: list[str] = []
    test = doctest.DocTestParser().get_doctest(examples, {}, name, None, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not printed, "".join(printed)


@pytest.mark.parametrize(("module", "library"), MODULES)
def test_each_class_and_function_has_an_example_that_runs(module: str, library: str):
    require(library)
    found = pkgutil.resolve_name(module)
    ran = 0
    for name in getattr(found, "__all__", dir(found)):
        one = getattr(found, name)
        is_error = inspect.isclass(one) and issubclass(one, Exception)
        if (inspect.isclass(one) or inspect.isfunction(one)) and not is_error and one not in PRESETS:
            run(f"{module}.{name}", one)
            ran += 1
    assert ran


@pytest.mark.parametrize(
    ("text", "said"),
    [("Do nothing.", "has no example"), ("Do.\n\nExamples\n--------\n>>> x = 1\n>>> x + 1\n3\n", "Expected")],
)
def test_a_missing_example_and_a_wrong_one_are_seen(text: str, said: str):
    with pytest.raises(AssertionError, match=said):
        run("x", types.SimpleNamespace(__doc__=text))
