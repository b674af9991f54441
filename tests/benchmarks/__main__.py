"""Measure gradscale's speed and memory against peers in the same process, and print one table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.cases import busy, case_names, machine, report, run_cases, use_one_thread
from benchmarks.measure import Row, readable

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases and return the exit status.

    Parameters
    ----------
    arguments : list of str, optional
        In place of those of the command line.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.json is not None and not chosen.json.absolute().parent.is_dir():
        parser.error(f"cannot write --json {chosen.json}: {chosen.json.parent} is no folder")
    use_one_thread()
    if chosen.list:
        print("\n".join(case_names()))
        return 0
    print(machine())
    _warn()
    outcomes = list(run_cases(chosen.only, quick=chosen.quick))
    if not outcomes:
        print(f"no case has {chosen.only!r} in its name; the names are {', '.join(case_names())}", file=sys.stderr)
        return 2
    _print_table([row for outcome in outcomes for row in outcome.rows])
    for outcome in outcomes:
        if outcome.reason:
            print(f"{'failed' if outcome.failed else 'not run'}: {outcome.name}, because {outcome.reason}")
    _warn()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report(outcomes), indent=2) + "\n")
    if any(outcome.failed for outcome in outcomes):
        return 1
    return int(chosen.check and not all(outcome.met for outcome in outcomes))


def _warn() -> None:
    if (warning := busy()) is not None:
        print(warning, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
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
    return parser


def _print_table(rows: list[Row]) -> None:
    width = max([len(row.case) for row in rows], default=0)
    print(f"{'case':{width}} {'ours':>10} {'other':>10} {'ratio':>7} {'target':>7}  met")
    for row in rows:
        numbers = f"{readable(row.ours, row.unit):>10} {readable(row.other, row.unit):>10}"
        judged = "" if row.target is None else f"{row.target:7.2f}  {'yes' if row.met else 'NO'}"
        print(f"{row.case:{width}} {numbers} {row.ratio:7.3f} {judged}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
