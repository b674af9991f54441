"""Runs what needs a GPU, in parts, those that do not measure side by side; one page says what came of each.

.ci/run gpu calls it. The page is gpu-report.txt, gpu-report.json its results for programs, and the folder gpu-report
what each part printed; all are written as the parts go on. If this program is ended, or its caller, its parts and all
that they have started end with it, and the page says how far they came. The exit status is 1 if a part has failed or
was ended, or none could be run on a GPU.

GRADSCALE_GPU_PYTHON  an interpreter whose libraries are used as they are, such as python3: nothing is installed or
                      fetched, and parts that need more are left out. Packages in folders or wheels that PYTHONPATH
                      names count as there. Without it, a virtual environment is made for what the driver can run.
GRADSCALE_GPU_WHEELS  a folder of wheels that this interpreter has besides, with their programs, such as mpich's
GRADSCALE_GPU_PARTS   which parts, by words in their names, such as "tests-cupy benchmarks"; default: all
GRADSCALE_GPU_JOBS    how many parts that do not measure may run at once; default: one for every 4 cores
GRADSCALE_GPU_LIMIT   seconds that a part may take (default 1800)
GRADSCALE_GPU_TOTAL   seconds that all may take together (default: as long as they take)
GRADSCALE_GPU_REPORT  the folder for all of these (default: the root of the clone)
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("GRADSCALE_GPU_REPORT", ROOT)).resolve()
LOGS = FOLDER / "gpu-report"
LIMIT = float(os.environ.get("GRADSCALE_GPU_LIMIT", "1800"))
TOTAL = float(os.environ.get("GRADSCALE_GPU_TOTAL", "inf"))
JOBS = int(os.environ.get("GRADSCALE_GPU_JOBS", max(1, (os.cpu_count() or 1) // 4)))
# What fails where a library is not there, or sees no GPU.
DEVICES = {
    "cupy": "import cupy; assert cupy.cuda.runtime.getDeviceCount(), 'it sees no GPU'",
    "torch": "import torch; assert torch.cuda.is_available(), 'it sees no GPU'",
    "jax": "import jax; assert jax.default_backend() == 'gpu', 'it sees no GPU'",
}
TESTS = "import numpy, array_api_compat, pytest, hypothesis, ml_dtypes"
PLOTS = "import numpy, array_api_compat, matplotlib, tqdm"
# Lines of a part's log that belong on the page.
TELLING = re.compile(
    r"(FAILED|ERROR|SKIPPED) |E   |=+ .*(passed|failed|error|no tests ran).* =+$|[\w.]*(Error|Exception): "
)
MOST_LINES = 25


class Part(NamedTuple):
    """A command, programs that fail where it cannot be run, and whether it wants the machine for itself."""

    command: list[str]
    needs: list[str]
    measures: bool = False


def parts(python: str) -> dict[str, Part]:
    """Return the parts by name."""
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    # Time for kernels that are compiled for the first time.
    options = ["-v", "-rfEs", "-p", "no:xdist", "-o", "timeout=900", "--tier", "all"]
    pytest = [python, "-m", "pytest", *options, *marked, "-m"]
    found = {f"tests-{name}": Part([*pytest, f"gpu and {name}"], [TESTS, code]) for name, code in DEVICES.items()}
    doctor = [python, "-m", "gradscale", "doctor", "--timeout", "300", *DEVICES]
    found["doctor"] = Part(doctor, ["import numpy, array_api_compat, typer, rich"])

    def example(name: str, library: str, needs: list[str], *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        command = [*launcher, python, str(ROOT / "examples" / f"train_{library}.py"), *arguments]
        found[f"example-{name}"] = Part(command, [PLOTS, *needs])

    cupy, jax = (["import sklearn, threadpoolctl", DEVICES[name]] for name in ("cupy", "jax"))
    example("cupy", "cupy", cupy, "--inject", "60:0")
    example("cupy-nccl", "cupy", cupy, "--group", "nccl", "--inject", "60:0")
    mpiexec = Path(python).with_name("mpiexec")
    launcher = (str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2")
    mpi = f"import mpi4py.MPI, shutil; assert shutil.which({launcher[0]!r}), 'there is no mpiexec'"
    example("cupy-mpi", "cupy", [*cupy, mpi], "--group", "mpi", "--inject", "60:1", launcher=launcher)
    for name, method in {"fsdp2": [], "fsdp1": ["--fsdp1"], "ddp": ["--ddp"]}.items():
        example(name, "fsdp", [DEVICES["torch"]], *method, "--inject", "30:0")
    example("jax", "jax", jax, "--devices", "1", "--inject", "120:0")
    for case in ("copy", "torch", "plan", "waits"):
        # One by one, so that what ends one leaves the others' numbers.
        name = f"benchmarks-cupy-{case}"
        command = [python, "-m", "benchmarks", "--only", f"cupy-{case}", "--json", str(LOGS / f"{name}.json")]
        found[name] = Part(command, [DEVICES[x] for x in ("cupy", case) if x in DEVICES], measures=True)
    return found


def requirements(said: str) -> list[str]:
    """Return what pip is to install, all of one CUDA, by what nvidia-smi says of the driver."""
    version = re.search(r"CUDA(?: UMD)? Version: *(\d+)", said)
    if version is None or int(version[1]) < 12:
        sys.exit(f"the libraries need a driver of CUDA 12 or later: update NVIDIA's driver; nvidia-smi says\n{said}")
    cuda = min(int(version[1]), 13)
    (tested,) = re.findall(r'^ *"(torch==[^;]*);', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    torch = "torch>=2.6,<2.11" if cuda == 12 else tested  # from 2.11 on, pip finds one that is built for CUDA 13
    bindings = ["nccl4py>=0.6", f"cuda-bindings=={cuda}.*"]
    return [f"cupy-cuda{cuda}x[ctk]>=14", f"nvidia-nccl-cu{cuda}", torch, f"jax[cuda{cuda}]", *bindings]


def registered(folder: Path) -> None:
    """Write what makes a checkout's adapters known to a Python in which it is not installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["gradscale.backends"]
    version = re.findall(r'^__version__ = "(.*)"$', (ROOT / "gradscale" / "version.py").read_text(), re.MULTILINE)
    made = folder / f"gradscale-{version[0]}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradscale\nVersion: {version[0]}\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (made / "entry_points.txt").write_text("".join(["[gradscale.backends]\n", *lines]))


def unpacked(wheels: Path, folder: Path) -> dict[str, list[Path]]:
    """Unpack wheels, and return by variable the folders in which their packages, programs and libraries are found."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    data = list(folder.glob("*.data/data"))
    for program in folder.glob("*.data/data/bin/*"):
        program.chmod(0o755)
    return {"PYTHONPATH": [folder], "PATH": [x / "bin" for x in data], "LD_LIBRARY_PATH": [x / "lib" for x in data]}


def facts() -> Iterator[str]:
    """Yield what is run, and on what."""
    commit = "unknown commit"
    if (ROOT / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            head = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
            commit = f"commit {head}" + (", changed" if _said("git", "-C", str(ROOT), "status", "--porcelain") else "")
    yield f"{commit}, {os.cpu_count()} cores"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        yield _said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Run:
    """The parts under way and those that are over; threads share it, each with a part of its own."""

    def __init__(self, python: str, environment: dict[str, str], *, is_own: bool) -> None:
        self.python, self.environment, self.is_own = python, environment, is_own
        self.begin = time.monotonic()
        self.results: list[dict[str, object]] = []
        self.ended_by = ""
        self._head = "\n".join(facts())
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()

    def do(self, name: str, part: Part, folder: Path) -> None:
        """Run a part, if it can be, and note what came of it."""
        begin = time.monotonic()
        missing = next(filter(None, map(self._fails, part.needs)), "")
        if missing and not self.ended_by:
            # What was installed has to be there; of another Python's libraries what is missing is left out.
            self.note(name, "left out" if self.is_own else "failed", missing, begin)
            return
        library = name.removeprefix("tests-")
        required = {"GRADSCALE_TEST_REQUIRE": f"gpu,numpy,{library}"} if library in DEVICES else {}
        where = folder if name.startswith("example") else ROOT
        _say(f"=== {name}: {' '.join(part.command)}")
        failure = self._run(part.command, LOGS / f"{name}.txt", cwd=where, env=self.environment | required)
        self.note(name, "failed" if failure else "passed", failure, begin)

    @functools.cache  # noqa: B019
    def _fails(self, program: str) -> str:
        """Return why a program of Python fails; nothing where it does not."""
        with tempfile.NamedTemporaryFile() as log:
            failure = self._run([self.python, "-c", program], Path(log.name), env=self.environment)
            return failure and [failure, *Path(log.name).read_text(errors="replace").splitlines()][-1]

    def _run(self, command: list[str], log: Path, **options: Any) -> str:
        """Run a command, log what it prints, and return how it failed; nothing where it did not."""
        with log.open("wb") as printed:
            with self._lock:
                if self.ended_by:
                    return f"{self.ended_by}, before it was begun"
                options |= {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(command, start_new_session=True, **options)
                self._processes.add(process)
            try:
                status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return f"it took longer than {LIMIT:g} s (GRADSCALE_GPU_LIMIT) and was ended"
            finally:
                with self._lock:
                    self._processes.remove(process)
                _kill(process)
        if self.ended_by and status:
            return f"{self.ended_by}, and it was ended"
        return f"exit status {status}" if status else ""

    def end(self, why: str) -> None:
        """Let nothing begin any more; ``watch`` ends what is under way."""
        self.ended_by = self.ended_by or why

    def kill(self) -> None:
        """End what is under way."""
        with self._lock:
            for process in self._processes:
                _kill(process)

    def note(self, name: str, result: str, reason: str, begin: float) -> None:
        """Write down what came of a part, show what it printed, and bring the page up to date."""
        seconds = round(time.monotonic() - begin)
        log = LOGS / f"{name}.txt"
        text = log.read_text(errors="replace") if log.exists() else ""
        with self._lock:
            self.results.append({"name": name, "result": result, "reason": reason, "seconds": seconds})
            self.write()
            _say(f"{text}=== {_line(self.results[-1])}")

    def write(self) -> str:
        """Write both reports as of now, and return the page."""
        page = self._page()
        for suffix, content in (("txt", page), ("json", json.dumps(self.results, indent=2) + "\n")):
            # Whole at every moment, in which this program may be killed.
            (LOGS / "next").write_text(content)
            (LOGS / "next").replace(FOLDER / f"gpu-report.{suffix}")
        return page

    def _page(self) -> str:
        """Return what came of all parts, and what they say of it."""
        told = [f"\n{each['name']}\n{told}" for each in self.results if (told := _told(str(each["name"])))]
        seconds = round(time.monotonic() - self.begin)
        return "\n".join([self._head, f"{seconds} s in all", "", *map(_line, self.results), *told]) + "\n"


def _say(text: str) -> None:
    # Whoever read it may be gone.
    with contextlib.suppress(OSError):
        print(text, flush=True)


def _line(result: dict[str, object]) -> str:
    return f"{result['result']:8} {result['name']} ({result['seconds']} s) {result['reason']}".rstrip()


def _told(name: str) -> str:
    """Return what a part's log says, in few lines: numbers, what failed, what was left out, how far it came."""
    numbers, log = LOGS / f"{name}.json", LOGS / f"{name}.txt"
    if numbers.exists():
        found = json.loads(numbers.read_text())
        return "\n".join([*map(_row, found["rows"]), *found["not_run"].values()])
    if not log.exists():
        return ""
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    if name == "doctor":
        return "\n".join(lines)
    told = list(dict.fromkeys(line[:230] for line in lines if TELLING.match(line)))
    if name.startswith("tests-") and not any(line.startswith("=") for line in told[-1:]):
        # It was ended before its last line.
        results = re.findall(r" (PASSED|FAILED|ERROR)\b", text)
        counts = [f"{results.count(word)} {word.lower()}" for word in ("PASSED", "FAILED", "ERROR")]
        told += [", ".join(counts) + ", then", *lines[-1:]]
    return "\n".join(told[-MOST_LINES:] or [line for line in lines if line.strip()][-1:])


def _row(row: dict[str, object]) -> str:
    """Return a row of the benchmarks, with bandwidth for a comparison with a copy."""
    ratio, target = float(str(row["ratio"])), row["target"]
    share = f", {1 / ratio:.0%} of a copy's bandwidth" if "/ a copy" in str(row["case"]) else ""
    judged = "" if target is None else f", target {target:.2f}: {'met' if row['met'] else 'MISSED'}"
    return f"{row['case']}: {ratio:.3f}{share}{judged}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it has started; once it has ended, what it has left behind in its session."""
    for pid in [*_children(process.pid), process.pid] if process.returncode is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _children(pid: int) -> Iterator[int]:
    """Yield the processes that one has started, and those that these have."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield from _children(child)
                yield child


def watch(run: Run, work: dict[str, Part], folder: Path, jobs: int) -> None:
    """Do parts, so many at once, while the time lasts and nobody ends this program or the one that called it."""
    caller = os.getppid()
    with ThreadPoolExecutor(jobs) as pool:
        under_way = [pool.submit(run.do, name, part, folder) for name, part in work.items()]
        while not all(future.done() for future in under_way):
            time.sleep(0.1)
            if time.monotonic() - run.begin > TOTAL:
                run.end(f"all took longer than {TOTAL:g} s (GRADSCALE_GPU_TOTAL)")
            elif os.getppid() != caller:
                run.end("the program that called this one has ended")
            if run.ended_by:
                run.kill()
    for future in under_way:
        future.result()


def main() -> int:
    """Run the parts and return the exit status."""
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    python, wanted = os.environ.get("GRADSCALE_GPU_PYTHON"), os.environ.get("GRADSCALE_GPU_PARTS", "").split()
    # JAX takes most of a device's memory beforehand unless it is told not to, and others need it as well.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as made:
        folder, is_own = Path(made), python is not None
        run = Run(python or str(folder / "made" / "bin" / "python"), environment, is_own=is_own)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores one.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda got, _: run.end(f"this program got {signal.Signals(got).name}"))
        paths: dict[str, list[Path]] = {"PYTHONPATH": []}
        if is_own:
            registered(folder)
            if wheels := os.environ.get("GRADSCALE_GPU_WHEELS"):
                paths = unpacked(Path(wheels), folder / "wheels")
        else:
            said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
            # The pip that comes with Python 3.11 knows no dependency groups.
            creator = [os.environ.get("PYTHON", sys.executable), "-m", "venv", "--upgrade-deps"]
            subprocess.run([*creator, folder / "made"], check=True)
            groups = [f"--group={ROOT / 'pyproject.toml'}:{name}" for name in ("test", "examples")]
            install = [run.python, "-m", "pip", "install", "-e", f"{ROOT}[mpich,cli,optax]", *groups]
            watch(run, {"install": Part([*install, *requirements(said)], [])}, folder, 1)
        paths["PYTHONPATH"] = [ROOT, ROOT / "backends", ROOT / "tests", folder, *paths["PYTHONPATH"]]
        for variable, first in paths.items():
            environment[variable] = os.pathsep.join(map(str, [*first, *filter(None, [os.environ.get(variable)])]))
        if not any(each["result"] == "failed" for each in run.results):
            chosen = parts(run.python)
            if wanted:
                chosen = {name: part for name, part in chosen.items() if any(word in name for word in wanted)}
            for measures, jobs in ((False, JOBS), (True, 1)):
                watch(run, {name: x for name, x in chosen.items() if x.measures == measures}, folder, jobs)
    _say("\n" + run.write())
    passed = {each["name"] for each in run.results if each["result"] == "passed"} - {"install", "doctor"}
    return 0 if passed and not any(each["result"] == "failed" for each in run.results) else 1


if __name__ == "__main__":
    sys.exit(main())
