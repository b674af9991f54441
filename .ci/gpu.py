"""Runs what needs a GPU, part by part; the log goes to gpu-report.txt, what came of each part to gpu-report.json.

.ci/run gpu calls it. Both files grow with each part, one that fails does not keep the next from being run, and the exit
status is 1 if any has failed, or none could be run.

GRADSCALE_GPU_PYTHON  an interpreter whose libraries are used as they are, such as python3: nothing is installed or
                      fetched, and parts that need more are left out. Packages in folders or wheels that PYTHONPATH
                      names count as there. Without it, a virtual environment is made for what the driver can run.
GRADSCALE_GPU_PARTS   which parts, by words in their names, such as "tests-cupy benchmarks"; default: all
GRADSCALE_GPU_LIMIT   seconds that a part may take (default 1800)
GRADSCALE_GPU_REPORT  the folder of the two files (default: the root of the clone)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("GRADSCALE_GPU_REPORT", ROOT)).resolve()
LIMIT = float(os.environ.get("GRADSCALE_GPU_LIMIT", "1800"))
# What fails where a library is not there, or sees no GPU.
DEVICES = {
    "cupy": "import cupy; assert cupy.cuda.runtime.getDeviceCount(), 'it sees no GPU'",
    "torch": "import torch; assert torch.cuda.is_available(), 'it sees no GPU'",
    "jax": "import jax; assert jax.default_backend() == 'gpu', 'it sees no GPU'",
}
TESTS = "import numpy, array_api_compat, pytest, hypothesis, ml_dtypes; "
PLOTS = "import numpy, array_api_compat, matplotlib, tqdm; "


def parts(python: str) -> dict[str, tuple[list[str], str]]:
    """Return the command of each part, and a program that fails where it cannot be run."""
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    pytest = [python, "-m", "pytest", "-p", "no:xdist", "--tier", "all", *marked, "-m"]
    found = {"doctor": ([python, "-m", "gradscale", "doctor", *DEVICES], "import numpy, array_api_compat, typer, rich")}
    found |= {f"tests-{name}": ([*pytest, f"gpu and {name}"], TESTS + code) for name, code in DEVICES.items()}
    found["benchmarks-cupy"] = ([python, "-m", "benchmarks", "--only", "cupy-"], DEVICES["cupy"])

    def example(name: str, library: str, needs: str, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        command = [*launcher, python, str(ROOT / "examples" / f"train_{library}.py"), *arguments]
        found[f"example-{name}"] = command, needs

    cupy, jax = (f"{PLOTS}import sklearn, threadpoolctl; {DEVICES[name]}" for name in ("cupy", "jax"))
    example("cupy", "cupy", cupy, "--inject", "60:0")
    example("cupy-nccl", "cupy", cupy, "--group", "nccl", "--inject", "60:0")
    mpiexec = Path(python).with_name("mpiexec")
    launcher = (str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2")
    needs = f"{cupy}; import mpi4py.MPI, shutil; assert shutil.which({launcher[0]!r}), 'there is no mpiexec'"
    example("cupy-mpi", "cupy", needs, "--group", "mpi", "--inject", "60:1", launcher=launcher)
    for name, method in {"fsdp2": [], "fsdp1": ["--fsdp1"], "ddp": ["--ddp"]}.items():
        example(name, "fsdp", PLOTS + DEVICES["torch"], *method, "--inject", "30:0")
    example("jax", "jax", jax, "--devices", "1", "--inject", "120:0")
    return found


def requirements(said: str) -> list[str]:
    """Return what pip is to install, all of one CUDA, by what nvidia-smi says of the driver."""
    version = re.search(r"CUDA(?: UMD)? Version: *(\d+)", said)
    if version is None or int(version[1]) < 12:
        sys.exit(f"the libraries need a driver of CUDA 12 or later: update NVIDIA's driver; nvidia-smi says\n{said}")
    cuda = min(int(version[1]), 13)
    tested = re.findall(r"^torch==[^;\s]*", (ROOT / "tests" / "requirements.txt").read_text(), re.MULTILINE)
    torch = "torch>=2.6,<2.11" if cuda == 12 else tested[0]  # from 2.11 on, pip finds one that is built for CUDA 13
    return [f"cupy-cuda{cuda}x[ctk]>=14", f"nvidia-nccl-cu{cuda}", torch, f"jax[cuda{cuda}]"]


def registered(folder: Path) -> None:
    """Write what makes a checkout's adapters known to a Python in which it is not installed."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["gradscale.backends"]
    version = re.findall(r'^__version__ = "(.*)"$', (ROOT / "gradscale" / "__init__.py").read_text(), re.MULTILINE)
    made = folder / f"gradscale-{version[0]}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gradscale\nVersion: {version[0]}\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (made / "entry_points.txt").write_text("".join(["[gradscale.backends]\n", *lines]))


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command, show and log what it prints, and return how it failed; nothing where it did not."""
    print(f"\n=== {' '.join(command)}", flush=True)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options)
    with subprocess.Popen(["tee", "-a", FOLDER / "gpu-report.txt"], stdin=process.stdout):
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"it took longer than {LIMIT:g} s (GRADSCALE_GPU_LIMIT) and was ended"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
    return f"exit status {status}" if status else ""


def main() -> int:
    """Run the parts and return the exit status."""
    results: list[dict[str, object]] = []

    def note(name: str, result: str, reason: str, begin: float) -> None:
        results.append({"name": name, "result": result, "reason": reason, "seconds": round(time.monotonic() - begin)})
        line = f"{result:8} {name} ({results[-1]['seconds']} s) {reason}".rstrip()
        with (FOLDER / "gpu-report.txt").open("a") as report:
            print(line, file=report)
        (FOLDER / "gpu-report.json").write_text(json.dumps(results, indent=2) + "\n")
        print(f"=== {line}", flush=True)

    (FOLDER / "gpu-report.txt").unlink(missing_ok=True)
    python, wanted = os.environ.get("GRADSCALE_GPU_PYTHON"), os.environ.get("GRADSCALE_GPU_PARTS", "").split()
    # JAX takes most of a device's memory beforehand unless it is told not to, and others need it as well.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        is_own = python is not None
        if python is None:
            said = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True).stdout
            subprocess.run([os.environ.get("PYTHON", sys.executable), "-m", "venv", folder / "made"], check=True)
            python, begin = str(folder / "made" / "bin" / "python"), time.monotonic()
            extras = f"{ROOT}[mpich,cli,examples,optax,test]"
            failure = run([python, "-m", "pip", "install", "-e", extras, *requirements(said)], folder, environment)
            note("install", "failed" if failure else "passed", failure, begin)
            if failure:
                return 1
        else:
            registered(folder)
        paths = [ROOT, ROOT / "backends", ROOT / "tests", folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        for name, (command, needs) in parts(python).items():
            if wanted and not any(word in name for word in wanted):
                continue
            begin = time.monotonic()
            probe = subprocess.run([python, "-c", needs], env=environment, capture_output=True, text=True, check=False)
            if probe.returncode:
                # What was installed has to be there; of another Python's libraries what is missing is left out.
                said = probe.stderr.splitlines() or [f"exit status {probe.returncode}"]
                note(name, "left out" if is_own else "failed", said[-1], begin)
                continue
            library = name.removeprefix("tests-")
            required = {"GRADSCALE_TEST_REQUIRE": f"gpu,numpy,{library}"} if library in DEVICES else {}
            failure = run(command, folder if name.startswith("example") else ROOT, environment | required)
            note(name, "failed" if failure else "passed", failure, begin)
    print("\n" + "\n".join(f"{each['result']:8} {each['name']} {each['reason']}" for each in results))
    passed = {each["name"] for each in results if each["result"] == "passed"} - {"install", "doctor"}
    return 0 if passed and not any(each["result"] == "failed" for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
