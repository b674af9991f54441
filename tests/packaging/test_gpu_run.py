"""``.ci/run gpu`` without a GPU: what it installs for a driver, what it runs, and what it reports; over a stand-in.

The interpreter is a program of a few lines, which writes down how it was called.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import zipfile
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

# It answers the probes, and fails, is slow or waits for other parts where the scenario says so.
PYTHON = """#!{python} -SE
import json, os, pathlib, subprocess, sys, time
scenario, arguments = json.loads(os.environ["SCENARIO"]), sys.argv[1:]
command = " ".join(arguments)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([arguments, dict(os.environ)]) + "\\n")
if arguments[0] == "-c":
    missing = [name for name in scenario.get("missing", []) if name in arguments[1]]
    sys.exit(f"No module named {{missing[0]!r}}" if missing else 0)
print("ran", command, flush=True)
if "--json" in arguments:
    rows = [dict(case="unscale / a copy of as many bytes", ratio=1.25, target=1.11, met=False)]
    pathlib.Path(arguments[-1]).write_text(json.dumps(dict(rows=rows, not_run=dict())))
here = pathlib.Path(os.environ["CALLS"] + ".parts")
here.mkdir(exist_ok=True)
(here / str(os.getpid())).touch()
if "-m benchmarks" in command:
    print(len(list(here.iterdir())), "at once")
while "meeting" in scenario and "-m pytest" in command and len(list(here.iterdir())) < scenario["meeting"]:
    time.sleep(0.01)
if scenario.get("slow", "nothing") in command:
    # What it starts is in a session of its own.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("test_one PASSED\\ntest_two FAILED\\nthe child is", child.pid, flush=True)
    time.sleep(600)
if scenario.get("meeting"):
    time.sleep(0.2)
(here / str(os.getpid())).unlink()
if scenario.get("failing", "nothing") in command:
    print("ValueError: of a part\\nand more", flush=True)
    sys.exit(1)
"""
PARTS = ["doctor", "tests-cupy", "tests-torch", "tests-jax", "example-cupy", "example-cupy-nccl", "example-cupy-mpi"]
PARTS += ["example-fsdp2", "example-fsdp1", "example-ddp", "example-jax"]
PARTS += [f"benchmarks-cupy-{case}" for case in ("copy", "torch", "plan", "waits")]


def prepared(folder: Path, **how) -> dict[str, str]:
    """Write the programs, and return the variables for a scenario: settings of gpu.py, and what PYTHON does."""
    own = folder / "own"
    for program, text in (
        (own, PYTHON.format(python=sys.executable)),
        (folder / "mpiexec", '#!/bin/sh\nshift 2\nexec "$@"\n'),
    ):
        program.write_text(text)
        program.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "SCENARIO": json.dumps(how)}
    variables |= {"GRADSCALE_GPU_REPORT": str(folder), "GRADSCALE_GPU_PYTHON": str(own), "PYTHONPATH": "/carried"}
    settings = ("parts", "limit", "total", "jobs", "wheels")
    return variables | {f"GRADSCALE_GPU_{name.upper()}": how[name] for name in settings if name in how}


def results_in(folder: Path) -> dict[str, str]:
    """Return what came of each part."""
    return {part["name"]: part["result"] for part in json.loads((folder / "gpu-report.json").read_text())}


def report(folder: Path, **how):
    """Run it; return the exit status, the result of each part, and each call of the interpreter."""
    done = ran(sys.executable, PROGRAM, folder=folder, **prepared(folder, **how))
    assert "Traceback" not in done.stderr, done.stderr
    # The page is what it prints at the end.
    assert done.stdout.rstrip().endswith((folder / "gpu-report.txt").read_text().rstrip())
    calls = (folder / "calls").read_text().splitlines()
    return done.returncode, results_in(folder), [json.loads(line) for line in calls]


def test_the_python_that_is_there_runs_all_that_its_libraries_allow_also_after_a_failure(tmp_path: Path):
    status, results, calls = report(tmp_path, failing="gpu and torch", missing=["jax", "mpi4py"])
    left_out = dict.fromkeys(["tests-jax", "example-cupy-mpi", "example-jax"], "left out")
    assert (status, results) == (1, dict.fromkeys(PARTS, "passed") | left_out | {"tests-torch": "failed"})
    page = (tmp_path / "gpu-report.txt").read_text()
    assert re.search(r"^failed   tests-torch \(\d+ s\) exit status 1$", page, re.MULTILINE)
    assert re.search(r"^left out tests-jax \(\d+ s\) No module named 'jax'$", page, re.MULTILINE)
    assert "\n\ntests-torch\nValueError: of a part\n" in page
    assert "\n\ntests-jax\n" not in page
    assert "\nunscale / a copy of as many bytes: 1.250, 80% of a copy's bandwidth, target 1.11: MISSED\n" in page
    # What was carried is found, behind the checkout, and JAX leaves memory to the others.
    for arguments, variables in calls:
        folders = variables["PYTHONPATH"].split(os.pathsep)
        assert (folders[0], folders[-1]) == (str(ROOT), "/carried")
        assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        if arguments[:2] == ["-m", "pytest"]:
            assert variables["GRADSCALE_TEST_REQUIRE"] == f"gpu,numpy,{arguments[-1].removeprefix('gpu and ')}"


ENDED = {"parts": "tests", "slow": "gpu and torch", "jobs": "1"}


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        pytest.param({"parts": "doctor fsdp1"}, 0, {"doctor": "passed", "example-fsdp1": "passed"}, id="chosen"),
        pytest.param({"parts": "doctor"}, 1, {"doctor": "passed"}, id="nothing on a GPU"),
        pytest.param(
            ENDED | {"limit": "2"},
            1,
            {"tests-cupy": "passed", "tests-torch": "failed", "tests-jax": "passed"},
            id="ended",
        ),
        pytest.param(
            ENDED | {"total": "3"},
            1,
            {"tests-cupy": "passed", "tests-torch": "failed", "tests-jax": "failed"},
            id="no time left",
        ),
        pytest.param(
            {"parts": "tests plan waits", "jobs": "3", "limit": "30", "meeting": 3},
            0,
            dict.fromkeys([*PARTS[1:4], *PARTS[-2:]], "passed"),
            id="side by side",
        ),
    ],
)
def test_it_passes_if_something_ran_on_a_gpu_and_nothing_failed(
    tmp_path: Path, how: dict[str, Any], status: int, expected: dict[str, str]
):
    assert report(tmp_path, **how)[:2] == (status, expected)
    # What measures has the machine for itself.
    for log in tmp_path.glob("gpu-report/benchmarks-*.txt"):
        assert "\n1 at once\n" in log.read_text()


@pytest.mark.parametrize("caller", [False, True], ids=["itself", "its caller"])
def test_ended_it_ends_what_its_parts_have_started_and_says_how_far_they_came(tmp_path: Path, caller: bool):
    variables = os.environ | prepared(tmp_path, **ENDED)
    command = ["sh", "-c", '"$@"; true', "sh"] if caller else []
    with subprocess.Popen(
        [*command, sys.executable, PROGRAM], cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL
    ) as it:
        log = tmp_path / "gpu-report" / "tests-torch.txt"
        while not log.exists() or "the child is" not in log.read_text():
            assert it.poll() is None
            time.sleep(0.05)
        it.send_signal(signal.SIGKILL if caller else signal.SIGTERM)
    end = time.monotonic() + 30
    while len(results_in(tmp_path)) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert results_in(tmp_path) == {"tests-cupy": "passed", "tests-torch": "failed", "tests-jax": "failed"}
    page = (tmp_path / "gpu-report.txt").read_text()
    said = "the program that called this one has ended" if caller else "this program got SIGTERM"
    assert f" s) {said}, and it was ended\n" in page
    assert f" s) {said}, before it was begun\n" in page
    assert "\n1 passed, 1 failed, 0 error, then\nthe child is " in page
    child = int(log.read_text().split()[-1])
    with contextlib.suppress(FileNotFoundError):
        # A zombie, if nobody has asked for its end.
        assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    assert caller or it.returncode == 1


def test_wheels_in_a_folder_are_there_with_their_programs_and_a_copy_without_git_is_of_no_known_commit(tmp_path: Path):
    copy = tmp_path / "copy"
    for name in (".ci/gpu.py", "pyproject.toml", "gradscale/version.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text((ROOT / name).read_text())
    (copy / "tests").mkdir()
    with zipfile.ZipFile(tmp_path / "mpich-5.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("mpich-5.0.data/data/bin/mpiexec", '#!/bin/sh\necho of the wheel\nshift 2\nexec "$@"\n')
    variables = prepared(tmp_path, parts="cupy-mpi", wheels=str(tmp_path))
    (tmp_path / "mpiexec").unlink()
    done = ran(sys.executable, copy / ".ci" / "gpu.py", folder=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of the wheel\n") == 1
    assert (tmp_path / "gpu-report.txt").read_text().startswith("unknown commit, ")


def test_a_python_without_gradscale_gets_the_libraries_of_the_drivers_cuda_and_the_adapters(tmp_path: Path):
    program = runpy.run_path(str(PROGRAM))
    for version, major in ((": 12.4", 12), (": 13.0", 13), (" UMD Version: 13.1", 13), (": 14.2", 13)):
        said = f"| Driver Version: 580.1     CUDA{version if 'UMD' in version else f' Version{version}'}     |"
        cupy, nccl, torch, jax, *bindings = program["requirements"](said)
        assert (cupy, nccl, jax) == (f"cupy-cuda{major}x[ctk]>=14", f"nvidia-nccl-cu{major}", f"jax[cuda{major}]")
        assert bindings == ["nccl4py>=0.6", f"cuda-bindings=={major}.*"]
        assert (torch == "torch>=2.6,<2.11") == (major == 12)
    for version in ("11.8", "N/A"):
        with pytest.raises(SystemExit, match="need a driver of CUDA 12 or later"):
            program["requirements"](f"CUDA Version: {version}")
    program["registered"](tmp_path)
    (made,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (made.metadata["Name"], made.version) == ("gradscale", gradscale.__version__)
    points = importlib.metadata.entry_points(group="gradscale.backends")
    assert {(point.name, point.value) for point in made.entry_points} == {(one.name, one.value) for one in points}
