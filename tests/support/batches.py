"""Many cases in one world of gloo ranks, which takes longer to start than most cases take to run."""

from __future__ import annotations

import importlib
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from worlds import Failure, GlooWorld

__all__ = ["Batch", "Case", "survivors"]

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
    limit : float, default 90.0
        Seconds for all of them.
    """

    def __init__(self, module: str, cases: Callable[[int], Sequence[Case]], limit: float = 90.0) -> None:
        self._module = module
        self._cases = cases
        self._limit = limit
        self._answers: dict[int, dict[Case, list[Any]]] = {}

    def answer(self, size: int, *case: Any) -> list[Any]:
        """Return what each rank returned for a case, after asserting that none has raised."""
        results = self.outcome(size, *case)
        assert not any(isinstance(result, Failure) for result in results), results
        return results

    def outcome(self, size: int, *case: Any) -> list[Any]:
        """Return what each rank returned for a case, or a Failure for a rank that raised."""
        if size not in self._answers:
            # So that a world that cannot be run fails each test at once.
            self._answers[size] = {}
            cases = list(dict.fromkeys(self._cases(size)))
            scenario = importlib.import_module(self._module).run_case
            results = GlooWorld(size).run_each(scenario, cases, self._limit)
            self._answers[size] = dict(zip(cases, results, strict=True))
        assert case in self._answers[size], f"{case} was not asked of {size} ranks, or their world has failed before"
        return self._answers[size][case]


def survivors(size: int, dead_rank: int, status: int, module: str, *case: Any, limit: float = 60.0) -> list[Any]:
    """Run one case in which a rank ends with a status and without an answer; None for that rank."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "task.pickle")
        task.write_bytes(pickle.dumps((module, "run_case", [case])))
        answers = [Path(folder, f"{rank}.pickle") for rank in range(size)]
        # So that the others do not wait for it.
        answers[dead_rank].write_bytes(pickle.dumps([None]))
        ended_with, output = GlooWorld(size).launch(task, limit)
        assert ended_with == status, output
        return [pickle.loads(answer.read_bytes())[0] for answer in answers]
