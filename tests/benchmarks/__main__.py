"""Measure gradscale's speed against peers in the same process, and print one table."""

import argparse
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import NotOnThisMachineError, Row, readable
from gradscale.errors import MissingExtraError
from gradscale.extras import remedy

_MODULES = (
    *("unscaling", "iterations", "agreement", "torch_scalers", "jax_scaling"),
    *("cupy_unscaling", "diagnosis"),
)
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
# CuPy has one for each version of CUDA.
_DISTRIBUTIONS: tuple[str, ...] = ("gradscale", "numpy", "numba", "torch", "jax", "flax", "jmp", "mpi4py")
_DISTRIBUTIONS += ("cupy-cuda12x", "cupy-cuda13x", "cupy")
# What to do where one of these modules is missing.
_SOURCES = {name: remedy(name) for name in ("numpy", "mpich", "torch", "cupy", "jax", "optax")}
_SOURCES |= {"mpi4py": remedy("mpi"), "flax": "python -m pip install flax", "jmp": "python -m pip install jmp"}

Case = Callable[[bool], list[Row]]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases and return the exit status.

    Parameters
    ----------
    arguments : list of str, optional
        In place of those of the command line.
    """
    chosen = _parser().parse_args(arguments)
    # Before NumPy and the others are imported, which read this once.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    found = dict(_cases())
    wanted = {name: case for name, case in found.items() if chosen.only in name}
    if not wanted:
        print(f"no case has {chosen.only!r} in its name; the names are {', '.join(found)}", file=sys.stderr)
        return 2
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _DISTRIBUTIONS}}
    print(f"{machine}, " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    rows, reasons, has_failed = [], {}, False
    for name, case in wanted.items():
        try:
            rows += case(chosen.quick)
        except (ModuleNotFoundError, NotOnThisMachineError) as error:
            reasons[name] = f"not run: {name}, because {_explain(error)}"
        except Exception as error:
            has_failed = True
            reasons[name] = f"failed: {name}, because {type(error).__name__}: {error}"
    _print_table(rows)
    print(*reasons.values(), sep="\n")
    if chosen.json is not None:
        written = [vars(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
        facts = {"machine": machine, "threads": os.environ["OMP_NUM_THREADS"], "versions": versions}
        chosen.json.write_text(json.dumps({**facts, "rows": written, "not_run": reasons}, indent=2) + "\n")
    return int(has_failed or (chosen.check and (bool(reasons) or not all(row.met for row in rows))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="Times are medians over rounds that take turns, on one thread. A busy machine spoils them.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller arrays and fewer rounds: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE too")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run only cases with this in their name")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed or a case not run")
    return parser


def _cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases by name; of a module that cannot be imported one with the module's name, which says why."""
    for module in _MODULES:
        try:
            yield from importlib.import_module(f"benchmarks.{module}").CASES.items()
        except ModuleNotFoundError as error:
            yield module, functools.partial(_fail, error)


def _fail(error: ModuleNotFoundError, _quick: bool) -> list[Row]:
    raise error


def _explain(error: Exception) -> str:
    source = _SOURCES.get((getattr(error, "name", None) or "").partition(".")[0])
    return f"{error}; {source}" if source and not isinstance(error, MissingExtraError) else str(error)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _print_table(rows: list[Row]):
    width = max([len(row.case) for row in rows], default=0)
    print(f"{'case':{width}} {'ours':>10} {'other':>10} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        numbers = f"{readable(row.ours, row.unit):>10} {readable(row.other, row.unit):>10}"
        judged = "" if row.target is None else f"{row.target:7.2f}  {'yes' if row.met else 'NO'}"
        print(f"{row.case:{width}} {numbers} {row.ratio:7.3f} {judged}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
