"""The cases of the benchmark, by name: which there are, running them one by one, and what they ran on."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.measure import NotOnThisMachineError, Row
from gradscale.errors import MissingExtraError
from gradscale.extras import remedy

__all__ = ["Outcome", "busy", "case_names", "machine", "report", "run_cases", "use_one_thread"]

_MODULES = (
    *("unscaling", "iterations", "agreement", "torch_scalers", "jax_scaling"),
    *("cupy_unscaling", "reports", "diagnosis"),
)
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_DISTRIBUTIONS = ("gradscale", "numpy", "numba", "torch", "jax", "flax", "jmp", "mpi4py")
# CuPy has one for each version of CUDA.
_CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
# What to do where one of these modules is missing.
_SOURCES = {
    "numpy": remedy("numpy"),
    "mpi4py": remedy("mpi"),
    "mpich": remedy("mpich"),
    "torch": remedy("torch"),
    "cupy": remedy("cupy"),
    "jax": remedy("jax"),
    "flax": remedy("flax"),
    "optax": remedy("optax"),
    "jmp": "python -m pip install jmp",
}

Case = Callable[[bool], list[Row]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Attributes
    ----------
    name : str
        The case's.
    rows : list of Row
        What it measured; empty if it was not run.
    reason : str
        Why it was not run, with the pip command where one helps; empty if it was.
    failed : bool
        Whether that is an error, and not something that is missing on this machine.
    """

    name: str
    rows: list[Row]
    reason: str = ""
    failed: bool = False

    @property
    def met(self) -> bool:
        """Whether it was run and met all its targets."""
        return not self.reason and all(row.met for row in self.rows)


def use_one_thread() -> None:
    """Give the libraries one thread each; before NumPy and the others are imported, which read this once."""
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))


def case_names() -> list[str]:
    """Return the names of all cases; of a module that cannot be imported, the module's."""
    return [name for name, _ in _cases()]


def run_cases(only: str, *, quick: bool) -> Iterator[Outcome]:
    """Run the cases with ``only`` in their name, and yield what became of each as it ends.

    Parameters
    ----------
    only : str
        Part of a name; empty for all cases.
    quick : bool
        Smaller arrays and fewer rounds.
    """
    for name, case in _cases():
        if only not in name:
            continue
        if isinstance(case, str):
            yield Outcome(name, [], case)
            continue
        try:
            yield Outcome(name, case(quick))
        except ModuleNotFoundError as error:
            yield Outcome(name, [], _explain(error))
        except NotOnThisMachineError as error:
            yield Outcome(name, [], str(error))
        except Exception as error:
            yield Outcome(name, [], f"{type(error).__name__}: {error}", failed=True)


def _cases() -> Iterator[tuple[str, Case | str]]:
    for module in _MODULES:
        if importlib.util.find_spec(f"benchmarks.{module}") is None:
            continue
        try:
            cases: dict[str, Case] = importlib.import_module(f"benchmarks.{module}").CASES
        except ModuleNotFoundError as error:
            yield module, _explain(error)
        else:
            yield from cases.items()


def _explain(error: ModuleNotFoundError) -> str:
    name = (error.name or "").partition(".")[0]
    source = _SOURCES.get(name)
    return f"{error}; {source}" if source and not isinstance(error, MissingExtraError) else str(error)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name, distributions in {**{name: (name,) for name in _DISTRIBUTIONS}, "cupy": _CUPY}.items():
        versions[name] = next(filter(None, map(_version, distributions)), "missing")
    return versions


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> str:
    """Return one line about the machine and the versions."""
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    return f"{platform.machine()}, {os.cpu_count()} cores, {versions}"


def busy() -> str | None:
    """Return a warning when other programs keep this machine busy, which spoils the times; None when they do not."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    # This process is one of those that run.
    return f"warning: {load:.1f} programs run on this machine, and the times will tell" if load > 1.5 else None


def report(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return what is written as JSON: the machine, the rows, and what was not run and why."""
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": _versions(),
        "rows": [vars(row) | {"ratio": row.ratio, "met": row.met} for outcome in outcomes for row in outcome.rows],
        "not_run": {outcome.name: outcome.reason for outcome in outcomes if outcome.reason},
    }
