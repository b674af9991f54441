"""Measures the tests by mutation: cosmic-ray changes a copy of the code in one place at a time, and tests should fail.

    python .ci/mutants.py [--count 400] [--seed 0] [--only policies ...] [--tier ranks] [--kill 90] [--json FILE]

Needs cosmic-ray and pytest-testmon, which says which tests reach a change. The file names each mutant that was drawn,
whether it was killed, and by which test: the same seed draws the same ones from the same code. .ci/cosmic-ray.toml says
what is changed. The exit status is 1 if fewer than so many percent are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = str(ROOT / ".ci" / "cosmic-ray.toml")
PROGRAMS = Path(sys.executable).parent
# Other exchanges of operators are noticed by whatever notices one of these, and of "|" most are in annotations.
OPERATORS = re.compile(
    "core/(AddNot|NumberReplacer|RemoveDecorator|ZeroIterationForLoop|Replace(True|False|And|Or|Break|Continue)With.*"
    "|ReplaceUnaryOperator_(Delete_Not|USub_UAdd)"
    "|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul|LShift_RShift|RShift_LShift)"
    "|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is))"
)


def name(item: WorkItem) -> tuple[str, str, str, int]:
    """Return what tells a mutant from all others of the same code."""
    (mutation,) = item.mutations
    definition = mutation.definition_name or ""
    return str(mutation.module_path), definition, mutation.operator_name, mutation.occurrence


def draw(session: WorkDB, count: int, seed: int, only: list[str]) -> None:
    """Leave so many mutants by OPERATORS of the modules whose paths have one of these parts, and skip the others."""
    pending = sorted(session.pending_work_items, key=name)
    known = [item for item in pending if OPERATORS.fullmatch(name(item)[2])]
    chosen = [item for item in known if any(part in name(item)[0] for part in only)]
    drawn = {item.job_id for item in random.Random(seed).sample(chosen, min(count, len(chosen)))}
    skipped = [item.job_id for item in pending if item.job_id not in drawn]
    session.set_multiple_results(skipped, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def outcome(item: WorkItem, result: WorkResult) -> dict[str, object]:
    """Return a mutant, whether it was killed, the test that failed first, and for one that was not what it changes."""
    (mutation,) = item.mutations
    said = result.output or ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return {
        "mutant": name(item),
        "line": mutation.start_pos[0],
        "killed": result.is_killed,
        "by": failed[1] if failed else said[-200:],
        "diff": "" if result.is_killed else result.diff,
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the tests by mutation.")
    parser.add_argument("--count", type=int, default=400, help="of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", metavar="PART", nargs="+", default=[""], help="parts of modules' paths")
    parser.add_argument("--tier", default="ranks", help="of the tests")
    parser.add_argument("--tests", default="tests", help="files and folders of tests, in one word")
    parser.add_argument("--kill", type=float, default=90.0, help="percentage that must be killed")
    parser.add_argument("--json", type=Path, default=Path("mutants.json"), help="file for the outcomes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        tree, session = Path(work, "tree"), str(Path(work, "session.sqlite"))
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        selection = f"-q -x --timeout 120 --hypothesis-seed 0 --tier {options.tier} {options.tests}"
        environment = os.environ | {
            "PATH": os.pathsep.join([str(PROGRAMS), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, [tree, tree / "backends"])),
            "MUTANTS": f"-p no:xdist {selection}",
        }

        def run(*command: str) -> None:
            subprocess.run(command, cwd=tree, env=environment, check=True)

        run("python", "-m", "pytest", "--testmon", *selection.split())
        run("cosmic-ray", "init", CONFIGURATION, session)
        with use_db(session, WorkDB.Mode.open) as database:
            draw(database, options.count, options.seed, options.only)
        run("cosmic-ray", "--verbosity", "WARNING", "exec", CONFIGURATION, session)
        with use_db(session, WorkDB.Mode.open) as database:
            completed = [each for each in database.completed_work_items if each[1].test_outcome is not None]
    found = sorted((outcome(*each) for each in completed), key=lambda each: str(each["mutant"]))
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    survived = [each for each in found if not each["killed"]]
    print(*(f"survived: {each['mutant']}, line {each['line']}\n{each['diff']}" for each in survived), sep="\n")
    percentage = 100 * (1 - len(survived) / len(found))
    print(f"{percentage:.1f} % of {len(found)} mutants are killed")
    return 0 if percentage >= options.kill else 1


if __name__ == "__main__":
    sys.exit(main())
