"""``.ci/run gpu`` without a GPU: what it installs for a driver, what it runs, and what it reports; over a stand-in.

The interpreter is a program of a few lines, which writes down how it was called.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ran

import gradscale

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "gpu.py"

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="there is no .ci/gpu.py: this is a wheel and no clone"),
    pytest.mark.tier("ranks"),
]

# It answers the probes, and fails or is slow where the scenario says so.
PYTHON = """#!{python} -SE
import json, os, sys, time
scenario, arguments = json.loads(os.environ["SCENARIO"]), sys.argv[1:]
command = " ".join(arguments)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([arguments, dict(os.environ)]) + "\\n")
if arguments[0] == "-c":
    missing = [name for name in scenario.get("missing", []) if name in arguments[1]]
    sys.exit(f"No module named {{missing[0]!r}}" if missing else 0)
print("ran", command)
if scenario.get("slow", "nothing") in command:
    time.sleep(600)
sys.exit(int(scenario.get("failing", "nothing") in command))
"""
PARTS = ["doctor", "tests-cupy", "tests-torch", "tests-jax", "benchmarks-cupy", "example-cupy", "example-cupy-nccl"]
PARTS += ["example-cupy-mpi", "example-fsdp2", "example-fsdp1", "example-ddp", "example-jax"]


def report(folder: Path, **how: Any) -> tuple[int, dict[str, str], list[Any]]:
    """Run it; return the exit status, the result of each part, and each call of the interpreter."""
    own, calls = folder / "own", folder / "calls"
    for program, text in ((own, PYTHON.format(python=sys.executable)), (folder / "mpiexec", '#!/bin/sh\nexec "$3"\n')):
        program.write_text(text)
        program.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "SCENARIO": json.dumps(how)}
    variables |= {"GRADSCALE_GPU_REPORT": str(folder), "GRADSCALE_GPU_PYTHON": str(own), "PYTHONPATH": "/carried"}
    variables |= {f"GRADSCALE_GPU_{name.upper()}": how[name] for name in ("parts", "limit") if name in how}
    done = ran(sys.executable, PROGRAM, folder=folder, **variables)
    assert "Traceback" not in done.stderr, done.stderr
    results = {part["name"]: part["result"] for part in json.loads((folder / "gpu-report.json").read_text())}
    return done.returncode, results, [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_python_that_is_there_runs_all_that_its_libraries_allow_also_after_a_failure(tmp_path: Path) -> None:
    status, results, calls = report(tmp_path, failing="gpu and torch", missing=["jax", "mpi4py"])
    left_out = dict.fromkeys(["tests-jax", "example-cupy-mpi", "example-jax"], "left out")
    assert (status, results) == (1, dict.fromkeys(PARTS, "passed") | left_out | {"tests-torch": "failed"})
    log = (tmp_path / "gpu-report.txt").read_text()
    assert "exit status 1" in log
    assert "No module named 'jax'" in log
    assert "ran -m benchmarks --only cupy-" in log
    # What was carried is found, behind the checkout, and JAX leaves memory to the others.
    for arguments, variables in calls:
        folders = variables["PYTHONPATH"].split(os.pathsep)
        assert (folders[0], folders[-1]) == (str(ROOT), "/carried")
        assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        if arguments[:2] == ["-m", "pytest"]:
            assert variables["GRADSCALE_TEST_REQUIRE"] == f"gpu,numpy,{arguments[-1].removeprefix('gpu and ')}"


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        pytest.param({"parts": "doctor fsdp1"}, 0, {"doctor": "passed", "example-fsdp1": "passed"}, id="chosen"),
        pytest.param({"parts": "doctor"}, 1, {"doctor": "passed"}, id="nothing on a GPU"),
        pytest.param(
            {"parts": "tests", "slow": "gpu and torch", "limit": "2"},
            1,
            {"tests-cupy": "passed", "tests-torch": "failed", "tests-jax": "passed"},
            id="ended",
        ),
    ],
)
def test_it_passes_if_something_ran_on_a_gpu_and_nothing_failed(
    tmp_path: Path, how: dict[str, Any], status: int, expected: dict[str, str]
) -> None:
    assert report(tmp_path, **how)[:2] == (status, expected)


def test_a_python_without_gradscale_gets_the_libraries_of_the_drivers_cuda_and_the_adapters(tmp_path: Path) -> None:
    program = runpy.run_path(str(PROGRAM))
    for version, major in ((": 12.4", 12), (": 13.0", 13), (" UMD Version: 13.1", 13), (": 14.2", 13)):
        said = f"| Driver Version: 580.1     CUDA{version if 'UMD' in version else f' Version{version}'}     |"
        cupy, nccl, torch, jax = program["requirements"](said)
        assert (cupy, nccl, jax) == (f"cupy-cuda{major}x[ctk]>=14", f"nvidia-nccl-cu{major}", f"jax[cuda{major}]")
        assert (torch == "torch>=2.6,<2.11") == (major == 12)
    for version in ("11.8", "N/A"):
        with pytest.raises(SystemExit, match="need a driver of CUDA 12 or later"):
            program["requirements"](f"CUDA Version: {version}")
    program["registered"](tmp_path)
    (made,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (made.metadata["Name"], made.version) == ("gradscale", gradscale.__version__)
    points = importlib.metadata.entry_points(group="gradscale.backends")
    assert {(point.name, point.value) for point in made.entry_points} == {(one.name, one.value) for one in points}
