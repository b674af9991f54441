"""The recipes on the pages: blocks of Python that take names for granted, which a test gives them.

Programs of a page, which run as they stand, are recipes, too, without the lines that a reader replaces.
"""

from __future__ import annotations

import ast
import builtins
import dis
import re
from pathlib import Path
from types import CodeType
from typing import Any

__all__ = ["CUPY_PAGE", "FRONT_PAGE", "GUARD_PAGE", "INTEROP", "JAX_PAGE", "MLX_PAGE", "NUMPY_PAGE", "TORCH_PAGE"]
__all__ += ["blocks_on", "names_given", "run_on", "run_on_names"]

_BACKENDS = Path(__file__).parents[2] / "backends"
FRONT_PAGE = _BACKENDS.parent / "README.md"
TORCH_PAGE = _BACKENDS / "gradscale_torch" / "RECIPES.md"
INTEROP = _BACKENDS.parent / "gradscale" / "interop"
GUARD_PAGE = _BACKENDS.parent / "gradscale" / "GUARD.md"
CUPY_PAGE, JAX_PAGE, MLX_PAGE, NUMPY_PAGE = (
    _BACKENDS / f"gradscale_{name}" / "README.md" for name in ("cupy", "jax", "mlx", "numpy")
)


def blocks_on(page: Path) -> dict[str, str]:
    """Return a page's recipes by their names."""
    found = re.findall(r"<!-- (?:recipe|run): ([\w-]+) -->\n```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


_DATA = {"generator", "batches", "inputs", "targets"}


def without_stand_ins(code: str) -> str:
    """Return a program that loops over ``batches``, without its own, its model, its loss and the group that it begins.

    A loop that draws its batches, or has none, loops over ``batches``, too.
    """
    lines = code.splitlines()
    for node in reversed(ast.parse(code).body):
        stored = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
        parts = (each.value if isinstance(each, ast.Subscript) else each for each in stored)
        made = {each.id for each in parts if isinstance(each, ast.Name)}
        is_group = "init_process_group" in (ast.get_source_segment(code, node) or "")
        is_loss = isinstance(node, ast.FunctionDef) and node.name == "loss_of"
        if is_group or is_loss or made == {"model", "loader"} or (made and made <= _DATA):
            del lines[node.lineno - 1 : node.end_lineno]
        elif isinstance(node, ast.For):
            iterable = ast.unparse(node.iter)
            if iterable.startswith(("range(", "torch.randn(")):
                lines[node.lineno - 1] = lines[node.lineno - 1].replace(iterable, "batches")
    return "\n".join(lines)


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
    code = blocks_on(page)[name]
    code = without_stand_ins(code) if f"<!-- run: {name} -->" in page.read_text() else code
    exec(compile(code, f"{page.name}: {name}", "exec"), names)
