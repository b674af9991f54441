"""Many cases in one world of gloo ranks, each of which is asked for by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from worlds import GlooWorld, each

__all__ = ["Batch", "Case"]

Case: TypeAlias = tuple[Any, ...]
"""The name of a scenario, and its arguments after the group; hashable."""


class Batch:
    """The cases that one test file asks of one module of scenarios.

    Parameters
    ----------
    module : str
        Has a function ``run_case(group, name, *arguments)``. Imported when the first answer is needed.
    cases : callable
        Takes a number of ranks, and returns all cases for it.
    """

    def __init__(self, module: str, cases: Callable[[int], Sequence[Case]]):
        self._module = module
        self._cases = cases
        self._answers: dict[int, dict[Case, list[Any]]] = {}

    def answer(self, size: int, *case):
        """Return what each rank returned for a case, after asserting that none has raised in any."""
        if size not in self._answers:
            # So that a world that cannot be run fails each test at once.
            self._answers[size] = {}
            scenario = importlib.import_module(self._module).run_case
            self._answers[size] = dict(each(GlooWorld(size), scenario, dict.fromkeys(self._cases(size))))
        assert case in self._answers[size], f"{case} was not asked of {size} ranks, or their world has failed before"
        return self._answers[size][case]
