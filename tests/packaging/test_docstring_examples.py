"""Every public class and function but exceptions and presets shows how it is used, in lines that run."""

import doctest
import importlib
import inspect
import re
import types

import pytest
from axes import require

import gradscale
from gradscale.policies import presets
from gradscale.tools import simulation

FEWEST, MOST = 3, 8  # lines of an example: of all, and of code
PARSER = doctest.DocTestParser()


def public(module: types.ModuleType, names: list[str]):
    """Yield the classes and functions among a module's public names, and those of the modules among them."""
    for name in names:
        found = getattr(module, name)
        if isinstance(found, types.ModuleType):
            yield from public(found, found.__all__)
        elif found is not gradscale.testing.RankFailedError and (inspect.isclass(found) or inspect.isfunction(found)):
            yield f"{found.__module__}.{name}", found


# An exception needs none, and recorded traces show what presets do.
WITHOUT = {vars(presets)[name] for name in presets.names()}
PURE = {
    name: found
    for name, found in (*public(gradscale, dir(gradscale)), *public(simulation, simulation.__all__))
    if found not in WITHOUT and not (inspect.isclass(found) and issubclass(found, Exception))
}


def run(name: str, documented):
    """Hold an object's docstring to having an example, and run it."""
    text = inspect.getdoc(documented) or ""
    examples = text.partition("\nExamples\n--------\n")[2]
    lines = [line for line in examples.splitlines() if line.strip()]
    code = [line for line in lines if re.match(r"(>>>|\.\.\.)( |$)", line)]
    assert len(lines) >= FEWEST, f"{name} has no example"
    assert len(code) <= MOST, f"{name} has an example of {len(code)} lines"
    test = PARSER.get_doctest(examples, {}, name, None, 0)
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    assert not printed, "".join(printed)


assert {"gradscale.policies.presets.named", "gradscale.tools.callbacks.JSONLines"} <= set(PURE)


@pytest.mark.parametrize("name", sorted(PURE))
def test_an_example_runs(name: str):
    require("numpy")
    if name.startswith("gradscale.tools.plot."):
        require("plot")
    run(name, PURE[name])


@pytest.mark.parametrize(
    "library",
    [
        "numpy",
        *(
            pytest.param(name, marks=[getattr(pytest.mark, name), pytest.mark.tier("ranks")])
            for name in ("torch", "jax", "mlx")
        ),
    ],
)
def test_the_examples_of_an_adapter_run(library: str):
    require("optax" if library == "jax" else library)
    adapter = importlib.import_module(f"gradscale_{library}")
    for name in sorted({*adapter.__all__} - {"backend"}):
        run(name, getattr(adapter, name))


@pytest.mark.parametrize(
    ("text", "said"),
    [("Do nothing.", "has no example"), ("Do.\n\nExamples\n--------\n>>> x = 1\n>>> x + 1\n3\n", "Expected")],
)
def test_a_missing_example_and_a_wrong_one_are_seen(text: str, said: str):
    with pytest.raises(AssertionError, match=said):
        run("x", types.SimpleNamespace(__doc__=text))
