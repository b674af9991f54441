"""Runs what needs a GPU, part by part, and writes one report, as JSON and as text.

.ci/run gpu calls it. A part that fails does not keep the next one from being run; the report is written after each, so
that whatever ends this early leaves one. The exit status is 1 if any part has failed, or none could be run.

GRADSCALE_GPU_PYTHON  an interpreter whose libraries are used as they are, such as python3: nothing is installed or
                      fetched, and parts that need more are left out. Packages in folders or wheels that PYTHONPATH
                      names count as there. Without it, a virtual environment is made for what the driver can run.
GRADSCALE_GPU_PARTS   which parts, by words in their names, such as "tests-cupy benchmarks"; default: all
GRADSCALE_GPU_LIMIT   seconds that a part may take (default 1800)
GRADSCALE_GPU_REPORT  the folder of the report, gpu-report.json and gpu-report.txt (default: the root of the clone)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Characters of a part's output that the report keeps, from its end.
_KEPT = 20_000
_TORCH_OF_CUDA_12 = "torch>=2.6,<2.11"  # from 2.11 on, what pip finds is built for CUDA 13

# What tells a library's version and what it sees, run by itself: some of them end the process where they fail.
_PROBE = """
import importlib, json, sys
name = sys.argv[1]
module = importlib.import_module(name)
found = {"version": str(getattr(module, "__version__", ""))}
if name == "cupy":
    runtime = module.cuda.runtime
    found |= {"cuda": runtime.runtimeGetVersion(), "devices": runtime.getDeviceCount()}
elif name == "torch":
    found |= {"cuda": module.version.cuda, "devices": module.cuda.device_count()}
elif name == "jax":
    found["devices"] = sum(device.platform != "cpu" for device in module.devices())
elif name == "mpi4py.MPI":
    found["version"] = module.Get_library_version().splitlines()[0]
print(json.dumps(found))
"""
_TESTS = ("numpy", "array_api_compat", "pytest", "xdist", "pytest_timeout", "hypothesis", "ml_dtypes")
_EXAMPLES = ("numpy", "array_api_compat", "sklearn", "matplotlib", "tqdm", "threadpoolctl")
_MODULES = tuple(dict.fromkeys((*_TESTS, *_EXAMPLES, "cupy", "torch", "jax", "optax", "mpi4py.MPI", "typer", "rich")))
_ON_DEVICES = ("cupy", "torch", "jax")


@dataclasses.dataclass
class Part:
    """One command of the run, and what came of it.

    Attributes
    ----------
    name : str
        Such as ``"tests-cupy"``.
    command : list of str
        What is run.
    needs : sequence of str
        The modules without which it cannot be run; of CuPy, torch and JAX, with a device.
    folder : path
        Where it is run.
    environment : mapping
        Variables besides.
    result : str
        ``"passed"``, ``"failed"`` or ``"left out"``; empty before.
    reason : str
        Why it failed or was left out.
    seconds : float
        How long it took.
    output : str
        The end of what it printed.
    details : dict
        What it left in files: of tests, how many passed and what failed; of benchmarks, their rows.
    """

    name: str
    command: list[str]
    needs: Sequence[str] = ()
    folder: Path = ROOT
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    result: str = ""
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


class Report:
    """The machine, the libraries and the parts, as they become known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.facts: dict[str, Any] = {
            "host": platform.platform(),
            "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "commit": _said_by(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
            "changed": bool(_said_by(["git", "-C", str(ROOT), "status", "--porcelain"])),
        }
        self.parts: list[Part] = []

    @property
    def has_passed(self) -> bool:
        """Whether anything was run on a GPU, and nothing has failed."""
        results = {part.result for part in self.parts if part.name not in ("driver", "install", "doctor")}
        return "passed" in results and not any(part.result == "failed" for part in self.parts)

    def add(self, part: Part) -> None:
        """Take a part that has ended, say so, and write the report anew."""
        self.parts.append(part)
        print(f"=== {_line(part)}", flush=True)
        self.write()

    def write(self) -> None:
        """Write both files."""
        parts = [dataclasses.asdict(part) | {"folder": str(part.folder)} for part in self.parts]
        report = {"passed": self.has_passed, **self.facts, "parts": parts}
        (self._folder / "gpu-report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        lines = [f"{name}: {_readable(value)}" for name, value in self.facts.items()]
        lines += ["", *map(_line, self.parts)]
        for part in self.parts:
            if part.output:
                lines += ["", f"--- {part.name}: {shlex.join(part.command)}", part.output.rstrip()]
        (self._folder / "gpu-report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(part: Part) -> str:
    numbers = part.details.get("counts", {})
    counts = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
    return (
        f"{part.result:8} {part.name} ({part.seconds:.0f} s) {' '.join(filter(None, (counts, part.reason)))}".rstrip()
    )


def _readable(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _said_by(command: list[str]) -> str:
    """Return what a command prints; nothing where it fails or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return completed.stdout.strip()
    return ""


def run(part: Part, environment: Mapping[str, str], limit: float) -> None:
    """Run a part, show what it prints, and fill in what came of it."""
    print(f"\n=== {part.name}: {shlex.join(part.command)}", flush=True)
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            part.command,
            cwd=part.folder,
            env={**environment, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        part.result, part.reason = "failed", str(error)
        return
    late = threading.Event()
    timer = threading.Timer(limit, _end, (process, late))
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            part.output = (part.output + line)[-_KEPT:]
        status = process.wait()
    except BaseException:
        _end(process, late)
        raise
    finally:
        timer.cancel()
    part.seconds = round(time.monotonic() - begin, 1)
    part.result = "failed" if late.is_set() or status else "passed"
    if late.is_set():
        part.reason = f"it took longer than {limit:g} s (GRADSCALE_GPU_LIMIT) and was ended"
    elif status:
        part.reason = f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"


def _end(process: subprocess.Popen[str], late: threading.Event) -> None:
    """End a part and all that it has started."""
    late.set()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def driver_version(said: str) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver knows, from what nvidia-smi prints; None where it does not say."""
    found = re.search(r"CUDA(?: UMD)? Version: *(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def requirements(major: int) -> list[str]:
    """Return what pip is to install for drivers of a CUDA version: all of one CUDA, as NCCL's wheels share a folder.

    Parameters
    ----------
    major : int
        The newest CUDA that the driver knows, without what follows the dot.

    Raises
    ------
    ValueError
        For drivers that none of the libraries supports any more.
    """
    if major < 12:
        msg = f"the libraries need a driver of CUDA 12 or later, got one of CUDA {major}: update NVIDIA's driver"
        raise ValueError(msg)
    cuda = min(major, 13)
    tested = re.search(r"^(torch==[^;\s]*)", (ROOT / "tests" / "requirements.txt").read_text(), re.MULTILINE)
    assert tested is not None
    torch = _TORCH_OF_CUDA_12 if cuda == 12 else tested[1]
    return [f"cupy-cuda{cuda}x[ctk]>=14", f"nvidia-nccl-cu{cuda}", torch, f"jax[cuda{cuda}]"]


def installed(major: int, folder: Path, environment: Mapping[str, str], limit: float) -> tuple[str, Part]:
    """Return the interpreter of a new virtual environment with all libraries, and the part that made it."""
    python = folder / "environment" / "bin" / "python"
    subprocess.run([os.environ.get("PYTHON", sys.executable), "-m", "venv", python.parents[1]], check=True)
    extras = f"{ROOT}[mpich,cli,examples,optax,test]"
    part = Part("install", [str(python), "-m", "pip", "install", "-e", extras, *requirements(major)])
    run(part, environment, limit)
    return str(python), part


def registered(folder: Path) -> None:
    """Write what makes a checkout's adapters known to a Python in which it is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "gradscale" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    made = folder / f"gradscale-{version[1]}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradscale\nVersion: {version[1]}\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n")


def probed(python: str, environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what is known of each library of an interpreter: its version and devices, or why it cannot be used."""
    found: dict[str, dict[str, Any]] = {}
    for module in _MODULES:
        command = [python, "-c", _PROBE, module]
        try:
            completed = subprocess.run(
                command, env=dict(environment), capture_output=True, text=True, timeout=300, check=False
            )
            found[module] = json.loads(completed.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            said = completed.stderr.strip().splitlines() or [f"exit status {completed.returncode}"]
            found[module] = {"missing": said[-1]}
        except (OSError, subprocess.SubprocessError) as error:
            found[module] = {"missing": str(error)}
    return found


def lack(needs: Sequence[str], found: Mapping[str, Mapping[str, Any]], program: str = "") -> str:
    """Return why a part cannot be run with what there is; nothing where it can."""
    reasons = [program] if program and shutil.which(program) is None else []
    reasons += [f"{name} ({found[name]['missing']})" for name in needs if "missing" in found[name]]
    reasons += [
        f"a GPU that {name} can use" for name in needs if name in _ON_DEVICES and found[name].get("devices") == 0
    ]
    return f"needs {', '.join(reasons)}" if reasons else ""


def parts_of(python: str, folder: Path, found: Mapping[str, Mapping[str, Any]]) -> Iterator[Part]:
    """Yield what is to be run: tests, library by library, benchmarks and examples."""
    marked = sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()
    )
    there = [library for library in _ON_DEVICES if not lack([library], found)]
    yield Part("doctor", [python, "-m", "gradscale", "doctor", *there], ("array_api_compat", "numpy", "typer", "rich"))
    for library in _ON_DEVICES:
        results = folder / f"{library}.xml"
        tests = [python, "-m", "pytest", "-n", "0", "--tier", "all", "-m", f"gpu and {library}", *marked]
        yield Part(
            f"tests-{library}",
            [*tests, f"--junitxml={results}"],
            (*_TESTS, library),
            environment={"GRADSCALE_TEST_REQUIRE": f"gpu,numpy,{library}"},
        )
    yield Part(
        "benchmarks-cupy",
        [python, "-m", "benchmarks", "--only", "cupy-", "--json", str(folder / "benchmarks.json")],
        ("array_api_compat", "numpy", "cupy"),
    )
    examples = ROOT / "examples"
    for name, options in (("", []), ("-nccl", ["--group", "nccl"])):
        command = [python, str(examples / "train_cupy.py"), *options, "--inject", "60:0"]
        yield Part(f"example-cupy{name}", command, (*_EXAMPLES, "cupy"), folder)
    mpiexec = _mpiexec(python)
    command = [mpiexec, "-n", "2", python, str(examples / "train_cupy.py"), "--group", "mpi", "--inject", "60:1"]
    yield Part("example-cupy-mpi", command, (*_EXAMPLES, "cupy", "mpi4py.MPI"), folder)
    for method in ([], ["--fsdp1"], ["--ddp"]):
        name = method[0].strip("-") if method else "fsdp2"
        command = [python, str(examples / "train_fsdp.py"), *method, "--inject", "30:0"]
        yield Part(f"example-{name}", command, ("array_api_compat", "numpy", "matplotlib", "tqdm", "torch"), folder)
    command = [python, str(examples / "train_jax.py"), "--devices", "1", "--inject", "120:0"]
    yield Part("example-jax", command, (*_EXAMPLES, "jax"), folder)


def _mpiexec(python: str) -> str:
    """Return the launcher beside an interpreter, or the one on the path."""
    beside = Path(shutil.which(python) or python).with_name("mpiexec")
    return str(beside) if beside.exists() else "mpiexec"


def filled_in(part: Part, folder: Path) -> None:
    """Put what a part has left in files into its details."""
    results = folder / f"{part.name.removeprefix('tests-')}.xml"
    if part.name.startswith("tests-") and results.exists():
        cases = list(xml.etree.ElementTree.parse(results).iter("testcase"))
        names = {
            kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")
        }
        counts = {"failed": len(names["failure"]) + len(names["error"]), "skipped": len(names["skipped"])}
        part.details["counts"] = {"passed": len(cases) - sum(counts.values())} | counts
        for kind, chosen in names.items():
            part.details[kind] = [
                {"test": f"{case.get('classname')}::{case.get('name')}", "message": _message(case, kind)}
                for case in chosen
            ]
    numbers = folder / "benchmarks.json"
    if part.name.startswith("benchmarks") and numbers.exists():
        part.details["benchmarks"] = json.loads(numbers.read_text())


def _message(case: xml.etree.ElementTree.Element, kind: str) -> str:
    found = case.find(kind)
    return "" if found is None else str(found.get("message", ""))[:1000]


def main() -> int:
    """Run the parts and return the exit status."""
    own = os.environ.get("GRADSCALE_GPU_PYTHON", "")
    wanted = os.environ.get("GRADSCALE_GPU_PARTS", "").split()
    limit = float(os.environ.get("GRADSCALE_GPU_LIMIT", "1800"))
    report = Report(Path(os.environ.get("GRADSCALE_GPU_REPORT", ROOT)).resolve())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        # JAX takes most of a device's memory beforehand unless it is told not to, and others need it as well.
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
        driver = Part("driver", ["nvidia-smi"])
        run(driver, environment, limit)
        report.facts["gpus"] = _said_by(["nvidia-smi", "-L"]).splitlines()
        version = driver_version(driver.output)
        report.facts["driver"] = "unknown" if version is None else f"CUDA {version[0]}.{version[1]}"
        report.add(driver)
        if own:
            python = own
            registered(folder)
            paths = [ROOT, ROOT / "backends", ROOT / "tests", folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        elif version is None:
            print("nvidia-smi does not tell the driver's CUDA, by which the libraries are chosen", file=sys.stderr)
            return 1
        else:
            python, part = installed(version[0], folder, environment, limit)
            report.add(part)
            if part.result == "failed":
                return 1
            paths = [ROOT / "tests"]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        found = report.facts["libraries"] = probed(python, environment)
        for part in parts_of(python, folder, found):
            if wanted and not any(word in part.name for word in wanted):
                continue
            part.reason = lack(part.needs, found, part.command[0])
            if part.reason:
                # What was installed has to be there; of another Python's libraries only what is missing is left out.
                part.result = "left out" if own else "failed"
            else:
                run(part, environment, limit)
                filled_in(part, folder)
            report.add(part)
    print(f"\n=== {'passed' if report.has_passed else 'FAILED'}\n" + "\n".join(map(_line, report.parts)))
    return 0 if report.has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
