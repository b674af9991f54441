"""Measure gradscale's speed against peers in the same process, and print one table."""

import argparse
import importlib.metadata
import json
import os
import pkgutil
import platform
import sys
from pathlib import Path

from benchmarks.measure import Row
from gradscale.errors import BackendNotAvailableError

# What measures some rows, called with whether to be quick.
_CASES = {
    "large": "unscaling:large_array",
    "masters": "unscaling:master_gradients",
    "iterations": "iterations:iterations",
    "spikes": "iterations:spikes",
    "agreement": "agreement:rows",
    "torch-unscale": "torch_scalers:unscaling",
    "torch-clip": "torch_scalers:clipping",
    "torch-guards": "torch_scalers:guards",
    "torch-sharded": "torch_scalers:sharded",
    "torch-guards-on-ranks": "torch_scalers:guards_on_ranks",
    "jax unscaling": "jax_scaling:unscaling",
    "cupy-copy": "cupy_unscaling:copies",
    "cupy-torch": "cupy_unscaling:against_torch",
    "diagnosis": "diagnosis:with_numpy",
    "diagnosis-torch": "diagnosis:with_torch",
}
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_DISTRIBUTIONS = ("gradscale", "numpy", "numba", "torch", "jax", "flax", "jmp", "mpi4py", "cupy")


def main() -> int:
    """Run the chosen cases and return the exit status."""
    chosen = _parser().parse_args()
    # Before NumPy and the others are imported, which read this once.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    wanted = [name for name in _CASES if chosen.only in name]
    if not wanted:
        print(f"no case has {chosen.only!r} in its name; the names are {', '.join(_CASES)}", file=sys.stderr)
        return 2
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    facts = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version()}
    # CuPy has one for each version of CUDA.
    facts |= {name: installed[name] for name in sorted(installed) if name.partition("-")[0] in _DISTRIBUTIONS}
    print(*(f"{name} {version}" for name, version in facts.items()), sep=", ")
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    has_failed = False
    for name in wanted:
        try:
            rows += pkgutil.resolve_name(f"benchmarks.{_CASES[name]}")(chosen.quick)
        except (ModuleNotFoundError, BackendNotAvailableError) as error:
            reasons[name] = f"not run: {name}, because {error}"
        except Exception as error:
            has_failed = True
            reasons[name] = f"failed: {name}, because {type(error).__name__}: {error}"
    _print_table(rows)
    print(*reasons.values(), sep="\n")
    if chosen.json is not None:
        written = [row._asdict() | {"ratio": row.ratio, "met": row.met} for row in rows]
        chosen.json.write_text(json.dumps({**facts, "rows": written, "not_run": reasons}, indent=2) + "\n")
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="Times are medians over rounds that take turns, on one thread. A busy machine spoils them.",
    )
    parser.add_argument("--quick", action="store_true", help="smaller arrays and fewer rounds: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE too")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run only cases with this in their name")
    return parser


def _print_table(rows: list[Row]):
    width = max([len(row.case) for row in rows], default=0)
    print(f"{'case':{width}} {'ours, ms':>11} {'other, ms':>11} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        judged = "" if row.target is None else f"{row.target:7.2f}  {'yes' if row.met else 'NO'}"
        print(f"{row.case:{width}} {row.ours * 1e3:11.4f} {row.other * 1e3:11.4f} {row.ratio:7.3f} {judged}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
