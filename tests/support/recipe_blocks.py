"""The recipes on the pages: blocks of Python that take names for granted, which a test gives them."""

from __future__ import annotations

import builtins
import dis
import re
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["GUARD_PAGE", "INTEROP", "JAX_PAGE", "TORCH_PAGE", "blocks_on", "names_given", "run_on", "run_on_names"]

_BACKENDS = Path(__file__).parents[2] / "backends"
TORCH_PAGE = _BACKENDS / "gradscale_torch" / "RECIPES.md"
INTEROP = _BACKENDS.parent / "gradscale" / "interop"
GUARD_PAGE = _BACKENDS.parent / "gradscale" / "GUARD.md"
JAX_PAGE = _BACKENDS / "gradscale_jax" / "README.md"


def blocks_on(page: Path) -> dict[str, str]:
    """Return a page's recipes by their names."""
    found = re.findall(r"<!-- recipe: (\w+) -->\n```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def run_on(page: Path, name: str, /, **given):
    """Run a recipe of a page with these names, and return all names that there are then."""
    run_on_names(page, name, given)
    return given


def names_given(code: str) -> set[str]:
    """Return the names that a block takes for granted: those that it reads before it makes them, or never makes."""
    made, given, functions = {*dir(builtins), "__name__", "__annotations__"}, set(), [compile(code, "block", "exec")]
    while functions:
        function = functions.pop(0)
        for step in dis.get_instructions(function):
            if step.opname == "STORE_NAME":
                made.add(step.argval)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in made:
                given.add(step.argval)
        # What a function reads counts when it is called, after all else.
        functions += [constant for constant in function.co_consts if isinstance(constant, CodeType)]
    return given


def run_on_names(page: Path, name: str, names: dict[str, Any]):
    """Run a recipe of a page in a dictionary of names, which has those that it makes as soon as it makes them."""
    exec(compile(blocks_on(page)[name], f"{page.name}: {name}", "exec"), names)
