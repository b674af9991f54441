"""examples/train_cupy.py as a user runs it, over a stand-in for CuPy and NCCL whose kernels run on the host.

It computes what examples/train_digits.py does, to the bit. Nothing here runs on a device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import host_kernels
import pytest
from axes import require, require_program
from commands import ran
from worlds import mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[2]
EXAMPLES, SUPPORT = ROOT / "examples", ROOT / "tests" / "support"
PROGRAM = EXAMPLES / "train_cupy.py"
STEPS, INJECTED = 30, 28

# What a Python does first: it puts the stand-in in CuPy's place, with kernels that were compiled once for all of them.
STAND_IN = """
import ctypes
import host_kernels
import host_nccl
library = ctypes.CDLL({library!r})
host_kernels.library = lambda: library
kept = host_nccl.installed(**{machine})
kept.__enter__()
"""

# Runs the example named in the arguments, and writes what came of its runs, with all digits, in place of the plot.
RECORDED = """
import dataclasses, importlib, json, sys
name = sys.argv.pop(1)
import shared.runs
from shared.ranks import Ranks

def write(runs, options, ranks):
    found = []
    for run in runs:
        # Ranks that count overflows on devices do not know which of them it was.
        run.history = [report._replace(by=None) for report in run.history]
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        values |= {"scales": [report.scale for report in run.history], "skipped": run.skipped, "seconds": 0}
        found.append(values | {"dtype": run.dtype.__name__})
    options.output.write_text(json.dumps(found))

shared.runs.write_picture = write
with Ranks() as world:
    sys.exit(importlib.import_module(name).main(world))
"""


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest):
    require("numpy")
    require("examples")
    require_program("c++")
    if request.node.get_closest_marker("mpi"):
        require("mpi")


def launch(folder: Path, size: int, *arguments: object, **machine: int) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments on ``size`` ranks, on one without mpiexec, of a machine such as ``devices=1``."""
    site = folder.with_name(f"{folder.name}-site")
    site.mkdir(exist_ok=True)
    stand_in = STAND_IN.format(library=host_kernels.library()._name, machine=machine)
    (site / "sitecustomize.py").write_text(stand_in)
    path = {"PYTHONPATH": os.pathsep.join(map(str, (site, SUPPORT, EXAMPLES)))}
    words = list(map(str, arguments))
    command = [sys.executable, *words] if size == 1 else mpi_command(size, *words)
    return ran(*command, folder=folder, **(mpi_environment() | path))


def recorded(folder: Path, size: int, name: str, *arguments: object, **machine: int):
    """Return what came of each run of an example."""
    output = folder / "runs.png"  # a name that the option takes
    completed = launch(folder, size, "-c", RECORDED, name, *arguments, "--output", output, **machine)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("size", "over", "machine"),
    [
        pytest.param(1, [], {}, id="single"),
        # It needs no mpiexec, but mpi4py, which carries the stand-in's NCCL.
        pytest.param(1, ["--group", "nccl"], {}, id="single-nccl", marks=pytest.mark.mpi),
        pytest.param(2, ["--group", "nccl"], {}, id="mpi-2-nccl", marks=pytest.mark.mpi),
        pytest.param(
            2, ["--group", "mpi"], {"devices": 1, "has_nccl": False}, id="mpi-2-shared", marks=pytest.mark.mpi
        ),
    ],
)
def test_each_rank_in_turn_overflows_and_all_is_as_with_numpy(
    tmp_path: Path, size: int, over: list[str], machine: dict[str, int]
):
    for rank in range(size):
        arguments = ["--steps", STEPS, "--seed", 3, "--inject", f"{INJECTED}:{rank}"]
        found = recorded(tmp_path, size, "train_cupy", *arguments, *over, **machine)
        # The same arithmetic in the same order; over NCCL as well, since a sum of two numbers is rounded once anyhow.
        assert found == recorded(tmp_path, size, "train_digits", *arguments)
        assert [run["skipped"] for run in found] == [[], [], [INJECTED]]
        assert found[2]["scales"][-4:] == [2.0**17, 2.0**17, 2.0**16, 2.0**16]
        assert all(run["is_verified"] for run in found)


@pytest.mark.mpi
def test_shards_of_unequal_lengths_go_over_nccl(tmp_path: Path):
    # The 21450 weights are two short of four equal shards.
    arguments = ["--steps", 6, "--inject", "5:3"]
    found, numpy = (recorded(tmp_path, 4, name, *arguments, devices=4) for name in ("train_cupy", "train_digits"))
    # In float16 the sum of four is rounded thrice here, and once there.
    assert found[0] == numpy[0]
    assert [run["skipped"] for run in found] == [[], [], [5]]
    assert all(run["is_verified"] for run in found)


@pytest.mark.parametrize(
    ("size", "machine", "message"),
    [
        (1, {"has_nccl": False}, r"CuPy .* finds no NCCL library, .*: python -m pip install nvidia-nccl-cu13"),
        pytest.param(2, {"devices": 1}, r"NCCL needs a GPU for each rank, got 2 .* share 1: .*", marks=pytest.mark.mpi),
    ],
    ids=["no-nccl", "too-few-gpus"],
)
def test_what_is_missing_is_said_once_and_plainly(tmp_path: Path, size: int, machine, message: str):
    completed = launch(tmp_path, size, PROGRAM, "--steps", 3, "--group", "nccl", **machine)
    assert completed.returncode == 1
    said = [line for line in completed.stderr.splitlines() if re.fullmatch(message, line)]
    assert len(said) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_needs_neither_nccl_nor_mpi4py(tmp_path: Path):
    without = "import sys\nsys.modules['mpi4py'] = None\nimport runpy\ndel sys.argv[0]\n"
    code = f"{without}runpy.run_path(sys.argv[0], run_name='__main__')"
    completed = launch(tmp_path, 1, "-c", code, PROGRAM, "--steps", 3, has_nccl=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    completed = launch(tmp_path, 1, "-c", code, PROGRAM, "--steps", 3, "--group", "mpi")
    assert completed.returncode == 1
    assert completed.stderr.startswith("--group mpi needs mpi4py, which cannot be used here; ")
