"""Measure gradscale's speed and memory against peers in the same process, and print one table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Row

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_DISTRIBUTIONS = ("gradscale", "numpy", "numba", "torch", "jax", "flax", "jmp", "mpi4py")


def main() -> int:
    """Run the chosen cases and return the exit status."""
    arguments = _parse_arguments()
    # Before NumPy and the others are imported, which read these once.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    rows: list[Row] = []
    missing: dict[str, str] = {}
    print(_machine())
    for name, measure in _cases().items():
        if arguments.only in name:
            try:
                measured = measure(arguments.quick)
            except ModuleNotFoundError as error:
                missing[name] = str(error)
                continue
            rows += measured
    _print_table(rows)
    for name, reason in missing.items():
        print(f"not run: {name}, because {reason}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_report(rows, missing), indent=2) + "\n")
    return int(arguments.check and (bool(missing) or not all(row.met for row in rows)))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Times are medians over rounds that take turns, on one thread. A busy machine spoils them.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller arrays and fewer rounds: to see that it runs")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=Path("benchmarks.json"),
        metavar="FILE",
        help="write the numbers to FILE too (%(const)s if it is left out)",
    )
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run only cases with this in their name")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed or a case not run")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and exit")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(_cases()))
        parser.exit()
    return arguments


def _cases() -> dict[str, Callable[[bool], list[Row]]]:
    import agreement
    import jax_scaling
    import torch_scalers
    import unscaling

    return {**unscaling.CASES, "agreement": agreement.rows, **torch_scalers.CASES, **jax_scaling.CASES}


def _print_table(rows: list[Row]) -> None:
    width = max([len(row.case) for row in rows], default=0)
    print(f"{'case':{width}} {'ours':>10} {'other':>10} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        numbers = f"{_readable(row.ours, row.unit):>10} {_readable(row.other, row.unit):>10}"
        judged = "" if row.target is None else f"{row.target:7.2f}  {'yes' if row.met else 'NO'}"
        print(f"{row.case:{width}} {numbers} {row.ratio:7.3f} {judged}".rstrip())


def _readable(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.2f} {unit}"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _machine() -> str:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    return f"{platform.machine()}, {os.cpu_count()} cores, {versions}"


def _report(rows: list[Row], missing: dict[str, str]) -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "versions": _versions(),
        "rows": [vars(row) | {"ratio": row.ratio, "met": row.met} for row in rows],
        "not_run": missing,
    }


if __name__ == "__main__":
    sys.exit(main())
