"""The recipes on the pages: blocks of Python that take names for granted, which a test gives them."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["GUARD_PAGE", "INTEROP", "JAX_PAGE", "TORCH_PAGE", "blocks_on", "run_on"]

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
    exec(compile(blocks_on(page)[name], f"{page.name}: {name}", "exec"), given)
    return given
