"""How near a file of tests is to a module, where it is not known which tests reach it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["FARTHEST", "nearness"]

FARTHEST = 4


def nearness(module: str, file: str, text: str) -> int | None:
    """Return how near a file of tests is to a module of the project: 2 is the nearest, ``FARTHEST`` the farthest.

    Parameters
    ----------
    module, file
        Paths from the root of the project.
    text
        Of the tests.

    Returns
    -------
    int or None
        2 for tests that are named after the module, 3 for those that import it, 4 for those that name it; None for
        others, and for tests of an adapter's module that do not name the library: the adapters' modules share names.
    """
    path, names = Path(module), Path(file).stem.split("_")
    is_adapter = path.parts[0] == "backends"
    library = path.parent.name.removeprefix("gradscale_") if is_adapter else ""
    if is_adapter and library not in names and not re.search(rf"(?<![^\W_]){library}(?![^\W_])", text):
        return None
    if path.stem in names and (not is_adapter or library in names):
        return 2
    package = re.escape(".".join(path.parts[is_adapter:-1]))
    if re.search(rf"\b{package}(\.| import [^\n]*\b){path.stem}\b", text):
        return 3
    return FARTHEST if re.search(rf"(?<![^\W_]){path.stem}(?![^\W_])", text) else None
