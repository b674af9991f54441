"""``.ci/run gpu`` without a GPU: what it installs for a driver, what it runs, and what it reports; over stand-ins.

The interpreter and nvidia-smi are programs of a few lines, which write down how they were called.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradscale

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "gpu.py"

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="there is no .ci/gpu.py: this is a wheel and no clone"),
    pytest.mark.tier("ranks"),
]

SMI = """#!/bin/sh
echo "| NVIDIA-SMI 580.1     Driver Version: 580.1     CUDA{words} Version: {version}     |"
"""
# It answers the probes, makes virtual environments of itself, and fails or is slow where the scenario says so.
PYTHON = """#!{python} -SE
import json, os, pathlib, shutil, sys, time
scenario, arguments = json.loads(os.environ["SCENARIO"]), sys.argv[1:]
command = " ".join(arguments)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([arguments, dict(os.environ)]) + "\\n")
if arguments[0] == "-c":
    missing = [name for name in scenario.get("missing", []) if name in arguments[1]]
    sys.exit(f"No module named {{missing[0]!r}}" if missing else 0)
elif arguments[1] == "venv":
    target = pathlib.Path(arguments[2], "bin", "python")
    target.parent.mkdir(parents=True)
    shutil.copy(sys.argv[0], target)
else:
    print("ran", command)
    if scenario.get("slow", "nothing") in command:
        time.sleep(600)
    sys.exit(int(scenario.get("failing", "nothing") in command))
"""
PARTS = ["doctor", "tests-cupy", "tests-torch", "tests-jax", "benchmarks-cupy", "example-cupy", "example-cupy-nccl"]
PARTS += ["example-cupy-mpi", "example-fsdp2", "example-fsdp1", "example-ddp", "example-jax"]


def ran(
    folder: Path, *, cuda: tuple[str, str] = ("", "13.0"), **how: Any
) -> tuple[int, dict[str, str], list[Any], str]:
    """Run it; return the exit status, the result of each part, each call of the interpreter, and the log."""
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir(exist_ok=True)
    mpiexec = '#!/bin/sh\nshift 2\nexec "$@"\n'
    texts = {"nvidia-smi": SMI.format(words=cuda[0], version=cuda[1]), "mpiexec": mpiexec}
    for name, text in {**texts, "own": PYTHON.format(python=sys.executable)}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    own = str(programs / "own")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GRADSCALE_")}
    variables |= {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "SCENARIO": json.dumps(how)}
    variables |= {"GRADSCALE_GPU_REPORT": str(folder), "PYTHON": own, "PYTHONPATH": "/carried"}
    variables |= {f"GRADSCALE_GPU_{name.upper()}": how[name] for name in ("parts", "limit") if name in how}
    variables |= {} if how.get("is_installed") else {"GRADSCALE_GPU_PYTHON": own}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    file = folder / "gpu-report.json"
    results = {part["name"]: part["result"] for part in json.loads(file.read_text())} if file.exists() else {}
    made = [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
    log = folder / "gpu-report.txt"
    return done.returncode, results, made, log.read_text() if log.exists() else done.stderr


def test_the_python_that_is_there_runs_all_that_its_libraries_allow_also_after_a_failure(tmp_path: Path) -> None:
    status, results, calls, log = ran(tmp_path, failing="gpu and torch", missing=["jax", "mpi4py"])
    left_out = dict.fromkeys(["tests-jax", "example-cupy-mpi", "example-jax"], "left out")
    assert (status, results) == (1, dict.fromkeys(PARTS, "passed") | left_out | {"tests-torch": "failed"})
    assert re.search(r"^failed   tests-torch \(\d+ s\) exit status 1$", log, re.MULTILINE)
    assert re.search(r"^left out tests-jax \(\d+ s\) No module named 'jax'$", log, re.MULTILINE)
    assert "ran -m benchmarks --only cupy-" in log
    # Nothing is installed; what was carried is found, behind the checkout, and JAX leaves memory to the others.
    assert not [arguments for arguments, _ in calls if "pip" in arguments or "venv" in arguments]
    for arguments, variables in calls:
        folders = variables["PYTHONPATH"].split(os.pathsep)
        assert folders[:3] == [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests")]
        assert folders[-1] == "/carried"
        assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        if arguments[:2] == ["-m", "pytest"]:
            library = arguments[-1].removeprefix("gpu and ")
            assert variables["GRADSCALE_TEST_REQUIRE"] == f"gpu,numpy,{library}"
            assert str(ROOT / "tests/adapters/test_cupy_gpu.py") in arguments


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        pytest.param({}, 0, dict.fromkeys(PARTS, "passed"), id="all"),
        pytest.param({"parts": "doctor fsdp1"}, 0, {"doctor": "passed", "example-fsdp1": "passed"}, id="chosen"),
        pytest.param({"parts": "doctor"}, 1, {"doctor": "passed"}, id="nothing on a GPU"),
        pytest.param({"parts": "torch", "missing": ["torch"]}, 1, {"tests-torch": "left out"}, id="nothing runs"),
        pytest.param(
            {"parts": "tests", "slow": "gpu and torch", "limit": "2"},
            1,
            {"tests-cupy": "passed", "tests-torch": "failed", "tests-jax": "passed"},
            id="ended",
        ),
        pytest.param(
            {"parts": "torch", "missing": ["torch"], "is_installed": True},
            1,
            {"install": "passed", "tests-torch": "failed"},
            id="what was installed is missing",
        ),
        pytest.param({"failing": "pip install", "is_installed": True}, 1, {"install": "failed"}, id="not installed"),
    ],
)
def test_it_passes_if_something_ran_on_a_gpu_and_nothing_failed(
    tmp_path: Path, how: dict[str, Any], status: int, expected: dict[str, str]
) -> None:
    assert ran(tmp_path, **how)[:2] == (status, expected)


@pytest.mark.parametrize(
    ("cuda", "major"), [(("", "12.4"), 12), (("", "13.0"), 13), ((" UMD", "13.1"), 13), (("", "14.2"), 13)]
)
def test_all_libraries_that_are_installed_are_of_the_drivers_cuda(
    tmp_path: Path, cuda: tuple[str, str], major: int
) -> None:
    _, _, calls, _ = ran(tmp_path, cuda=cuda, is_installed=True, parts="tests-cupy")
    (installed,) = [arguments for arguments, _ in calls if arguments[:3] == ["-m", "pip", "install"]]
    assert {f"cupy-cuda{major}x[ctk]>=14", f"nvidia-nccl-cu{major}", f"jax[cuda{major}]"} < set(installed)
    assert ("torch>=2.6,<2.11" in installed) == (major == 12)
    # Of the other version there is nothing: its NCCL would lie over this one's.
    assert str(25 - major) not in re.sub(r"torch\S+", "", " ".join(installed[5:]))


@pytest.mark.parametrize("version", ["11.8", "N/A"])
def test_drivers_that_no_library_supports_are_refused(tmp_path: Path, version: str) -> None:
    status, results, calls, said = ran(tmp_path, cuda=("", version), is_installed=True)
    assert (status, results) == (1, {})
    assert not [arguments for arguments, _ in calls if "pip" in arguments]
    assert "need a driver of CUDA 12 or later" in said


def test_a_python_without_gradscale_finds_its_adapters(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("gpu", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.registered(tmp_path)
    (made,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (made.metadata["Name"], made.version) == ("gradscale", gradscale.__version__)
    points = {(point.name, point.value) for point in made.entry_points}
    assert points == {
        (point.name, point.value) for point in importlib.metadata.entry_points(group="gradscale.backends")
    }
