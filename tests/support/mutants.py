"""Measures the tests by mutation: each mutant of the code meets the tests that reach its line, until one fails.

    python tests/support/mutants.py [--only policy] [--list] [--coverage FILE] [--json FILE] [-- PYTEST_ARGUMENTS...]

Which tests reach a line is measured by one run of them: of a ``--tier``, or with the arguments after ``--``. A coverage
file that does not exist is made, and kept for the next time. Mutants live in private copies of the tree. Needs
pytest-cov.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
from mutations import Mutant, mutants_of, sample
from nearness import FARTHEST, nearness

ROOT = Path(__file__).parents[2]
SOURCES = ("gradscale", "backends/gradscale_numpy", "backends/gradscale_torch", "backends/gradscale_jax")

# What a mutant costs at most: tests, and the seconds that they took.
MOST_TESTS, MOST_SECONDS = 400, 120.0
# Those that run first, in a process of their own: there are few files to collect, and most mutants end here.
FIRST = 40
# A mutant hangs when it takes longer than this for the imports, and so many times what its tests took.
STARTING, PATIENCE = 90.0, 3.0
STOPPING = 10.0  # seconds
UNTIMED = 0.2  # seconds
# Tests that take longer than this run when all others have passed: few of them use up what a mutant costs at most.
LONG = 10.0  # seconds

Results = dict[str, tuple[float, bool]]


def read_results(path: Path) -> Results:
    """Return the seconds of each test of a JUnit file, and whether it passed."""
    results = {}
    for case in ET.parse(path).iter("testcase") if path.exists() else ():
        if module := case.get("classname"):
            is_passed = case.find("failure") is None and case.find("error") is None
            results[f"{module.replace('.', '/')}.py::{case.get('name')}"] = float(case.get("time", 0)), is_passed
    return results


class Reach:
    """Which tests reach which lines, and how long they take.

    Parameters
    ----------
    data : path
        A file of coverage.py, whose contexts name the test, or in a child process the test that started it. The
        file's name with ``.xml`` is a JUnit file of the same run; without one, no test has failed.
    """

    def __init__(self, data: Path) -> None:
        self._data = coverage.CoverageData(str(data))
        self._data.read()
        results = read_results(data.with_name(data.name + ".xml"))
        self._seconds = {test: seconds for test, (seconds, _) in results.items()}
        self._failing = {test for test, (_, is_passed) in results.items() if not is_passed}
        self._tests = {_test(context) for context in self._data.measured_contexts()} - {""} | self._seconds.keys()
        self._contexts = functools.cache(self._data.contexts_by_lineno)

    def seconds(self, tests: Iterable[str]) -> float:
        """Return how long tests take in all."""
        return sum(self._seconds.get(test, UNTIMED) for test in tests)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that may notice a mutant, the quickest of each function first, then the next of each.

        Those that reach it come first, then what is beside them, the nearest first, and last those that take long.
        """
        file = next((file for file in self._data.measured_files() if file.endswith(f"/{mutant.path}")), mutant.path)
        by_line = self._contexts(file)
        contexts = {context for line in mutant.lines for context in by_line.get(line, ())} - {""}
        near = dict.fromkeys(map(_test, contexts), 0)
        if not contexts or any(map(_is_of_child, contexts)):
            near = self._beside(mutant, set(map(_file, near))) | near

        def order(test: str) -> tuple[bool, int, float, str]:
            seconds = self.seconds([test])
            return seconds > LONG, near[test], seconds, test

        functions: dict[str, list[str]] = collections.defaultdict(list)
        for test in sorted(near.keys() - self._failing, key=order):
            functions[test.partition("[")[0]].append(test)
        return [test for turn in itertools.zip_longest(*functions.values()) for test in turn if test is not None]

    def _beside(self, mutant: Mutant, files: set[str]) -> dict[str, int]:
        """Return tests that may reach what ranks run, or what no test reaches in its own process, and how near.

        Ranks outlive the test that started them, and numba's functions are not measured: the tests of the same files,
        of those that are named after the module, that import it, that name it, and all on two ranks that are processes.
        """
        there = {file for file in map(_file, self._tests) if (ROOT / file).exists()}
        near = {file: nearness(mutant.path, file, (ROOT / file).read_text()) for file in there}
        near |= dict.fromkeys(files, 1)
        on_ranks = {test: FARTHEST + 1 for test in self._tests if re.search("(mpi|gloo)-2", test)}
        return on_ranks | {test: near[_file(test)] for test in self._tests if near.get(_file(test))}


def _is_of_child(context: str) -> bool:
    return context.endswith((" (setup)", " (call)", " (teardown)"))


def _test(context: str) -> str:
    return context.rpartition(" " if _is_of_child(context) else "|")[0]


def _file(test: str) -> str:
    return test.partition("::")[0]


class Tree:
    """A private copy of the working tree, in which Python imports nothing of the project from elsewhere."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.root, self._temporary = folder / "tree", folder / "t"
        left_out = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", ".coverage*")
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*left_out))
        paths = [*map(str, (self.root, self.root / "backends")), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONHASHSEED": "0",
            "TMPDIR": str(self._temporary),
            # What is compiled is found by what it is, so that each mutant may use it.
            "JAX_COMPILATION_CACHE_DIR": str(shared / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant for as long as the context lasts."""
        path = self.root / mutant.path
        source = path.read_bytes()
        _write(path, mutant.apply(source))
        try:
            yield
        finally:
            _write(path, source)

    def pytest(
        self, arguments: Iterable[str], limit: float | None = None, output: int | None = subprocess.DEVNULL
    ) -> int:
        """Run pytest; its exit status, or -1 when it takes longer than the limit in seconds."""
        self._temporary.mkdir()
        # Each call says for itself over how many processes it spreads.
        settings = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        command = [sys.executable, "-m", "pytest", "-q", *settings, *arguments]
        with self._lock:
            if self._is_stopped:
                raise concurrent.futures.CancelledError
            # A session of its own, so that it can be ended with all that it starts.
            self._process = subprocess.Popen(
                command, cwd=self.root, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            return self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            self._end()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def stop(self) -> None:
        """End what runs, and let nothing start again."""
        with self._lock:
            self._is_stopped = True
            self._end()

    def _end(self) -> None:
        # Interrupted, pytest and mpiexec end their ranks, which may have sessions of their own.
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOPPING)


def _write(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    # Python takes what it has compiled for up to date when the size and the second are the same.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def measure(tree: Tree, data: Path, jobs: int, arguments: list[str]) -> None:
    """Run the tests and write which lines each of them reaches, and the processes that it starts."""
    folder = tree.root.parent / "measured"
    folder.mkdir()
    settings, measured, results = tree.root.parent / "coverage.ini", folder / "data", tree.root.parent / "results.xml"
    sources = "".join(f"\n    {tree.root / source}" for source in SOURCES)
    settings.write_text(
        f"[run]\nsource ={sources}\ndata_file = {measured}\ncore = ctrace\nparallel = true\npatch = _exit, fork\n"
        # Of a child process; pytest-cov adds its own.
        "context = ${PYTEST_CURRENT_TEST}\n"
        "disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse\n"
    )
    status = tree.pytest(
        [
            *("--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", f"--junitxml={results}"),
            # For the children of the workers: the variable is set when these have started.
            *("--max-worker-restart=0", "--dist=loadfile", f"--tx={jobs}*popen//env:COVERAGE_PROCESS_START={settings}"),
            *arguments,
        ],
        output=None,
    )
    if status not in (0, 1) or not measured.exists():
        sys.exit(f"mutants: the run that measures the coverage ended with status {status}")
    shutil.copy(measured, data)
    shutil.copy(results, f"{data}.xml")
    if status:
        print("mutants: tests have failed without any mutant, and are left out")


@dataclasses.dataclass
class Outcome:
    """What became of a mutant: ``killed``, ``timeout`` (killed, too), ``survived``, or ``void``.

    It is void when the test that failed also fails without the mutant.
    """

    mutant: Mutant
    reaching: int
    result: str = "survived"
    seconds: float = 0.0
    ran: int = 0
    killer: str = ""

    def __str__(self) -> str:
        return f"{self.mutant}   ({self.killer or f'{self.ran} of {self.reaching} tests'})"

    @property
    def is_killed(self) -> bool:
        """Whether a test has noticed."""
        return self.result in {"killed", "timeout"}


def batches(tests: list[str], reach: Reach) -> Iterator[list[str]]:
    """Yield as many tests as a mutant may cost, in the order in which to run them: those of a file together."""
    totals = itertools.accumulate(reach.seconds([test]) for test in tests)
    most = max(1, min(MOST_TESTS, sum(total <= MOST_SECONDS for total in totals)))
    for batch in (tests[: min(FIRST, most)], tests[FIRST:most]):
        files: dict[str, list[str]] = collections.defaultdict(list)
        for test in batch:
            files[_file(test)].append(test)
        yield list(itertools.chain.from_iterable(sorted(files.values(), key=reach.seconds)))


def attack(mutant: Mutant, tree: Tree, reach: Reach, options: list[str]) -> Outcome:
    """Run the tests against a mutant until one fails."""
    begin = time.monotonic()
    tests = reach.tests(mutant)
    outcome = Outcome(mutant, len(tests))
    results = tree.root.parent / "results.xml"
    with tree.mutated(mutant):
        for batch in filter(None, batches(tests, reach)):
            results.unlink(missing_ok=True)
            limit = STARTING + PATIENCE * reach.seconds(batch)
            status = tree.pytest(["-x", f"--junitxml={results}", *options, *batch], limit)
            outcome.ran += len(batch)
            if status:
                failed = [test for test, (_, is_passed) in read_results(results).items() if not is_passed]
                outcome.result = "timeout" if status == -1 else "killed"
                # When none has failed, they could not even be imported.
                outcome.killer = "" if status == -1 else (failed or batch)[0]
                break
    outcome.seconds = time.monotonic() - begin
    return outcome


def attack_all(mutants: list[Mutant], trees: list[Tree], reach: Reach, options: list[str]) -> list[Outcome]:
    """Attack the mutants, as many at a time as there are trees; the outcomes in the order of the mutants."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def attack_in_a_tree(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return attack(mutant, tree, reach, options)
        finally:
            free.put(tree)

    with concurrent.futures.ThreadPoolExecutor(len(trees)) as pool:
        futures = [pool.submit(attack_in_a_tree, mutant) for mutant in mutants]
        try:
            for count, future in enumerate(concurrent.futures.as_completed(futures), 1):
                outcome = future.result()
                print(f"[{count}/{len(mutants)}] {outcome.seconds:5.1f} s  {outcome.result:8}  {outcome}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for tree in trees:
                tree.stop()
            raise
    return [future.result() for future in futures]


def check_killers(outcomes: list[Outcome], tree: Tree, options: list[str]) -> None:
    """Run the tests that have failed once more, without any mutant."""
    killers = sorted({outcome.killer for outcome in outcomes} - {""})
    if not killers:
        return
    results = tree.root.parent / "results.xml"
    results.unlink(missing_ok=True)
    status = tree.pytest([f"--junitxml={results}", *options, *killers])
    if status not in (0, 1):
        sys.exit(f"mutants: without any mutant, pytest ended with status {status}; measure the coverage anew")
    passing = {test for test, (_, is_passed) in read_results(results).items() if is_passed}
    for outcome in outcomes:
        if outcome.killer and outcome.killer not in passing:
            outcome.result = "void"


def report(modules: Iterable[str], outcomes: list[Outcome]) -> float:
    """Print a table of the modules and the mutants that survived; the percentage of those killed."""
    groups = {module: [outcome for outcome in outcomes if outcome.mutant.path == module] for module in modules}
    print(f"\n{'module':48}{'mutants':>8}{'killed':>8}{'survived':>10}")
    for module, group in (groups | {"all": outcomes}).items():
        killed = sum(outcome.is_killed for outcome in group)
        print(f"{module:48}{len(group):8}{killed:8}{len(group) - killed:10}")
    print(*(f"{outcome.result}: {outcome}" for outcome in outcomes if not outcome.is_killed), sep="\n")
    percentage = 100 * sum(outcome.is_killed for outcome in outcomes) / len(outcomes)
    print(f"{percentage:.1f} % of {len(outcomes)} mutants are killed")
    return percentage


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Measure the tests by mutation.")
    parser.add_argument("--coverage", type=Path, help="coverage file with tests as contexts; made if it is not there")
    parser.add_argument("--tier", help="of the tests, for pytest")
    parser.add_argument("--only", metavar="MODULE", nargs="+", default=[""], help="parts of paths, such as policy.py")
    parser.add_argument("--lines", type=int, default=60, help="one mutant for so many lines; at least 2 a module")
    parser.add_argument("--seed", type=int, default=0, help="of the choice among all mutants")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--kill", type=float, default=95.0, help="percentage that must be killed")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("selection", nargs="*", help="arguments of pytest when the coverage is measured")
    return parser.parse_args()


def choose(seed: int, lines: int, only: list[str]) -> dict[str, list[Mutant]]:
    """Return the mutants of each module."""
    chosen = {}
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_bytes()
        if any(part in name for part in only):
            count = max(2, len(text.splitlines()) // lines)
            chosen[name] = sample(mutants_of(name, text), count, f"{seed} {name}")
            for mutant in chosen[name]:
                compile(mutant.apply(text), name, "exec")
    return chosen


def main() -> int:
    """Run the command line; 1 when too many mutants survive."""
    options = parse()
    chosen = choose(options.seed, options.lines, options.only)
    mutants = list(itertools.chain.from_iterable(chosen.values()))
    if options.list:
        print(*mutants, f"{len(mutants)} mutants of {len(chosen)} modules", sep="\n")
    if options.list or not mutants:
        return 0 if mutants else 2

    def terminate(number: int, _: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, terminate)
    tier = [f"--tier={options.tier}"] if options.tier else []
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as work:
        trees = [Tree(Path(work, str(job)), Path(work)) for job in range(options.jobs)]
        data = (options.coverage or Path(work, "coverage")).absolute()
        if not data.exists():
            measure(trees[0], data, options.jobs, [*tier, *options.selection])
        outcomes = attack_all(mutants, trees, Reach(data), tier)
        check_killers(outcomes, trees[0], tier)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], default=list))
    return 0 if report(chosen, outcomes) >= options.kill else 1


if __name__ == "__main__":
    sys.exit(main())
