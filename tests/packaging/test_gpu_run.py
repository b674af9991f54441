"""``.ci/run gpu`` without a GPU: what it chooses by the driver, what it runs, and its report; over stand-ins.

The interpreter and nvidia-smi are programs of a few lines, which write down how they were called.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "gpu.py"

pytestmark = [
    pytest.mark.skipif(not PROGRAM.exists(), reason="there is no .ci/gpu.py: this is a wheel and no clone"),
    pytest.mark.tier("ranks"),
]

SMI = """#!/bin/sh
[ "$1" = -L ] && echo "GPU 0: A Card (UUID: GPU-0)" && exit
echo "| NVIDIA-SMI 580.1     Driver Version: 580.1     CUDA Version: {version}     |"
"""
# It answers the probes, makes virtual environments of itself, and fails or is slow where the scenario says so.
PYTHON = """#!{python} -SE
import json, os, pathlib, shutil, sys, time
scenario = json.loads(os.environ["SCENARIO"])
arguments = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    kept = ["XLA_PYTHON_CLIENT_PREALLOCATE", "GRADSCALE_TEST_REQUIRE", "PYTHONPATH"]
    calls.write(json.dumps([arguments, {{name: os.environ.get(name) for name in kept}}]) + "\\n")
if arguments[0] == "-c":
    missing = scenario.get("missing", [])
    if arguments[2] in missing:
        sys.exit(f"ModuleNotFoundError: No module named {{arguments[2]!r}}")
    print(json.dumps({{"version": "1.0", "devices": scenario.get("devices", 1)}}))
elif arguments[1] == "venv":
    target = pathlib.Path(arguments[2], "bin", "python")
    target.parent.mkdir(parents=True)
    shutil.copy(sys.argv[0], target)
else:
    command = " ".join(arguments)
    print("ran", command)
    for argument in arguments:
        if argument.startswith("--junitxml="):
            bad = '<testcase classname="t" name="bad"><failure message="wrong bits"/></testcase>'
            good = '<testcase classname="t" name="good"/>'
            failed = "tests-torch" in scenario.get("failing", []) and "gpu and torch" in command
            text = "<testsuite>" + good + (bad if failed else "") + "</testsuite>"
            pathlib.Path(argument.partition("=")[2]).write_text(text)
    if "--json" in arguments:
        pathlib.Path(arguments[arguments.index("--json") + 1]).write_text('{{"rows": [1]}}')
    if scenario.get("slow", "nothing") in command:
        time.sleep(600)
    words = {{"tests-torch": "gpu and torch", "benchmarks": "benchmarks", "install": "pip install"}}
    sys.exit(int(any(words[name] in command for name in scenario.get("failing", []))))
"""


@pytest.fixture(scope="module")
def gpu() -> Any:
    """Return the program as a module."""
    specification = importlib.util.spec_from_file_location("gpu", PROGRAM)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Its dataclass looks there.
    sys.modules["gpu"] = module
    specification.loader.exec_module(module)
    return module


def ran(folder: Path, version: str = "13.0", **how: Any) -> tuple[int, dict[str, Any], list[Any], str]:
    """Run it; return the exit status, the report, each call of the interpreter, and the report as text."""
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir(exist_ok=True)
    calls.touch()
    for name, text in (("nvidia-smi", SMI.format(version=version)), ("own", PYTHON.format(python=sys.executable))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GRADSCALE_")}
    variables |= {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "SCENARIO": json.dumps(how)}
    variables |= {"GRADSCALE_GPU_REPORT": str(folder), "PYTHON": str(programs / "own"), "PYTHONPATH": "/carried"}
    variables |= {name: value for name, value in how.items() if name.startswith("GRADSCALE_")}
    completed = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in completed.stderr, completed.stderr
    report = json.loads((folder / "gpu-report.json").read_text())
    made = [json.loads(line) for line in calls.read_text().splitlines()]
    return completed.returncode, report, made, (folder / "gpu-report.txt").read_text()


def results(report: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["result"] for part in report["parts"]}


PARTS = ["doctor", "tests-cupy", "tests-torch", "tests-jax", "benchmarks-cupy", "example-cupy", "example-cupy-nccl"]
PARTS += ["example-cupy-mpi", "example-fsdp2", "example-fsdp1", "example-ddp", "example-jax"]


def test_the_python_that_is_there_runs_all_that_its_libraries_allow_also_after_a_failure(tmp_path: Path) -> None:
    how = {"failing": ["tests-torch"], "missing": ["jax", "mpi4py.MPI"], "GRADSCALE_GPU_PYTHON": "own"}
    status, report, calls, text = ran(tmp_path, **how)
    assert status == 1
    left_out = {"tests-jax", "example-cupy-mpi", "example-jax"}
    expected = {name: "left out" if name in left_out else "passed" for name in ["driver", *PARTS]}
    assert results(report) == expected | {"tests-torch": "failed"}
    assert (report["passed"], report["driver"], report["gpus"]) == (False, "CUDA 13.0", ["GPU 0: A Card (UUID: GPU-0)"])
    assert report["libraries"]["cupy"] == {"version": "1.0", "devices": 1}
    by_name = {part["name"]: part for part in report["parts"]}
    assert by_name["tests-torch"]["details"]["failure"] == [{"test": "t::bad", "message": "wrong bits"}]
    assert by_name["tests-torch"]["details"]["counts"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert "No module named 'jax'" in by_name["tests-jax"]["reason"]
    assert by_name["benchmarks-cupy"]["details"] == {"benchmarks": {"rows": [1]}}
    # Nothing is installed; what was carried is found, behind the checkout, and JAX leaves memory to the others.
    assert not [arguments for arguments, _ in calls if "pip" in arguments or "venv" in arguments]
    for arguments, variables in calls:
        folders = variables["PYTHONPATH"].split(os.pathsep)
        assert folders[:3] == [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests")]
        assert folders[-1] == "/carried"
        assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        if arguments[:2] == ["-m", "pytest"]:
            library = arguments[arguments.index("-m", 2) + 1].removeprefix("gpu and ")
            assert variables["GRADSCALE_TEST_REQUIRE"] == f"gpu,numpy,{library}"
            assert "tests/adapters/test_cupy_gpu.py" in arguments
    assert "failed   tests-torch" in text
    assert "1 passed, 1 failed exit status 1" in text
    assert "--- benchmarks-cupy: own -m benchmarks --only cupy-" in text


def test_with_all_libraries_everything_passes(tmp_path: Path) -> None:
    beside = tmp_path / "programs" / "mpiexec"
    beside.parent.mkdir()
    beside.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    beside.chmod(0o755)
    status, report, _, _ = ran(tmp_path, GRADSCALE_GPU_PYTHON="own")
    assert results(report) == dict.fromkeys(["driver", *PARTS], "passed")
    assert (status, report["passed"]) == (0, True)


def test_parts_are_chosen_by_words_in_their_names(tmp_path: Path) -> None:
    status, report, _, _ = ran(tmp_path, GRADSCALE_GPU_PYTHON="own", GRADSCALE_GPU_PARTS="doctor bench fsdp")
    chosen = ["driver", "doctor", "benchmarks-cupy", "example-fsdp2", "example-fsdp1"]
    assert (status, results(report)) == (0, dict.fromkeys(chosen, "passed"))


@pytest.mark.parametrize("how", [{"missing": ["array_api_compat"]}, {"devices": 0}])
def test_where_nothing_can_be_run_it_fails(how: dict[str, Any], tmp_path: Path) -> None:
    status, report, _, text = ran(tmp_path, GRADSCALE_GPU_PYTHON="own", **how)
    assert (status, report["passed"]) == (1, False)
    assert set(results(report).values()) - {"left out"} == {"passed"}
    assert "needs a GPU that cupy can use" in text or "needs array_api_compat (ModuleNotFoundError" in text


def test_a_part_that_does_not_end_is_ended_and_the_next_one_is_run(tmp_path: Path) -> None:
    how = {"slow": "gpu and torch", "GRADSCALE_GPU_LIMIT": "2", "GRADSCALE_GPU_PARTS": "tests"}
    status, report, _, text = ran(tmp_path, GRADSCALE_GPU_PYTHON="own", **how)
    assert status == 1
    assert results(report) == {
        "driver": "passed",
        "tests-cupy": "passed",
        "tests-torch": "failed",
        "tests-jax": "passed",
    }
    assert "it took longer than 2 s (GRADSCALE_GPU_LIMIT) and was ended" in text


@pytest.mark.parametrize(("version", "major"), [("12.4", 12), ("13.0", 13)])
def test_all_libraries_that_are_installed_are_of_the_drivers_cuda(version: str, major: int, tmp_path: Path) -> None:
    status, report, calls, _ = ran(tmp_path, version, GRADSCALE_GPU_PARTS="tests-cupy")
    assert (status, results(report)) == (0, {"driver": "passed", "install": "passed", "tests-cupy": "passed"})
    (installed,) = [arguments for arguments, _ in calls if arguments[:3] == ["-m", "pip", "install"]]
    assert f"cupy-cuda{major}x[ctk]>=14" in installed
    assert f"nvidia-nccl-cu{major}" in installed
    assert f"jax[cuda{major}]" in installed
    assert ("torch>=2.6,<2.11" in installed) == (major == 12)
    # Of the other version there is nothing: its NCCL would lie over this one's.
    assert str(25 - major) not in " ".join(installed[5:]).replace("torch==2.13.0", "")


def test_what_was_installed_must_be_there_and_a_failure_to_install_ends_the_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    status, report, _, _ = ran(tmp_path / "a", missing=["torch"], GRADSCALE_GPU_PARTS="tests")
    assert (status, results(report)["tests-torch"], results(report)["tests-jax"]) == (1, "failed", "passed")
    status, report, _, _ = ran(tmp_path / "b", failing=["install"])
    assert (status, results(report)) == (1, {"driver": "passed", "install": "failed"})


def test_drivers_that_no_library_supports_are_refused(gpu: Any) -> None:
    with pytest.raises(ValueError, match="got one of CUDA 11: update NVIDIA's driver"):
        gpu.requirements(11)
    assert gpu.requirements(14) == gpu.requirements(13)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("| Driver Version: 535.1   CUDA Version: 12.2     |", (12, 2)),
        ("| KMD Version: 590.1   CUDA UMD Version: 13.1     |", (13, 1)),
        ("| Driver Version: 535.1   CUDA Version: N/A      |", None),
        ("NVIDIA-SMI has failed", None),
    ],
)
def test_the_drivers_version_is_what_nvidia_smi_says(gpu: Any, said: str, version: Any) -> None:
    assert gpu.driver_version(said) == version


def test_a_python_without_gradscale_finds_its_adapters(gpu: Any, tmp_path: Path) -> None:
    gpu.registered(tmp_path)
    (made,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (own,) = {
        d.metadata["Name"]: d for d in importlib.metadata.distributions() if d.metadata["Name"] == "gradscale"
    }.values()
    points = [
        {(p.group, p.name, p.value) for p in d.entry_points if p.group == "gradscale.backends"} for d in (made, own)
    ]
    assert points[0] == points[1]
    assert made.metadata["Name"] == "gradscale"
