"""Every public class and function but exceptions and presets shows how it is used, in lines that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest
from axes import require

import gradscale
from gradscale.policies import presets, simulation

FEWEST, MOST = 3, 8  # lines of an example: of all, and of code
PARSER = doctest.DocTestParser()


def public(module: types.ModuleType, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the classes and functions among a module's public names, and those of the modules among them."""
    for name in names:
        found = getattr(module, name)
        if isinstance(found, types.ModuleType):
            yield from public(found, found.__all__)
        elif found is not gradscale.testing.RankFailedError and (inspect.isclass(found) or inspect.isfunction(found)):
            yield f"{found.__module__}.{name}", found


# Those of the adapters, whose libraries may be missing, and are not imported for the question.
ADAPTERS = {
    "numpy": ("NumpyBackend",),
    "torch": ("GradScaler", "ShardedGradScaler", "TorchBackend"),
    "jax": (
        *(
            "AxisCollectives",
            "JaxBackend",
            "Scaled",
            "ScaledOptimizerState",
            "Verdict",
            "agree",
            "scale",
            "scale_state",
        ),
        *("scaled", "select", "unscale", "value_and_grad", "verdict_of"),
    ),
}
OF_OPTAX = ("ScaledOptimizerState", "scale_state", "scaled", "verdict_of")
LATER = {name: [getattr(pytest.mark, name), pytest.mark.tier("ranks")] for name in ("torch", "jax")}
# An exception needs none, and recorded traces show what presets do.
WITHOUT = {vars(presets)[name] for name in presets.names()}
PURE = {
    name: found
    for name, found in (*public(gradscale, gradscale.__all__), *public(simulation, simulation.__all__))
    if found not in WITHOUT and not (inspect.isclass(found) and issubclass(found, Exception))
}


def run(name: str, documented: Any) -> None:
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


@pytest.mark.parametrize("name", sorted(PURE))
def test_an_example_runs(name: str) -> None:
    require("numpy")
    if name.startswith("gradscale.reports.plot."):
        require("plot")
    run(name, PURE[name])


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(library, name, id=f"{library}-{name}", marks=LATER.get(library, []))
        for library, names in ADAPTERS.items()
        for name in names
    ],
)
def test_an_example_of_an_adapter_runs(library: str, name: str) -> None:
    require(library)
    if library == "jax" and name in OF_OPTAX:
        require("optax")
    adapter = importlib.import_module(f"gradscale_{library}")
    assert {*ADAPTERS[library], "backend"} == {*adapter.__all__}
    run(name, getattr(adapter, name))


def test_a_missing_example_and_a_wrong_one_are_seen() -> None:
    def bare() -> None:
        """Do nothing."""

    def wrong() -> None:
        """Do nothing.

        Examples
        --------
        >>> x = 1
        >>> x + 1
        3
        """

    with pytest.raises(AssertionError, match="bare has no example"):
        run("bare", bare)
    with pytest.raises(AssertionError, match="Expected"):
        run("wrong", wrong)


def test_all_public_names_are_asked() -> None:
    assert len(PURE) >= 35
    assert {"gradscale.policies.presets.named", "gradscale.reports.logs.JSONLines"} <= set(PURE)
