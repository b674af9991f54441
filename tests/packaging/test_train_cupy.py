"""examples/train_cupy.py as a user runs it, over the driver on the host: it does what train_digits.py does.

NumPy multiplies matrices there, in place of cuBLAS; over NCCL it runs on a machine with a GPU (.ci/gpu).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import ran
from cupy_devices import launch_counter, require_cupy
from worlds import mpi_command, mpi_environment

pytestmark = [pytest.mark.cupy, pytest.mark.gpu, pytest.mark.tier("all")]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, INJECTED = 30, 28

# What a Python does first.
PREPARED = """
import cupy
import shared.digits

def on_host(function):
    return lambda *arrays: cupy.asarray(function(*(x.get() for x in arrays)))

shared.digits.linear, shared.digits.matmul = map(on_host, (shared.digits.linear, shared.digits.matmul))
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
def libraries():
    require("examples")
    require_cupy()
    # Of a device the matrices are its own.
    launch_counter()


def recorded(folder: Path, size: int, name: str, *arguments: object):
    """Return what came of each run of an example on ``size`` ranks that share a device, on one without mpiexec."""
    site, output = folder / "site", folder / "runs.png"  # a name that the option takes
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(PREPARED if name == "train_cupy" else "")
    path = {"PYTHONPATH": os.pathsep.join(map(str, (site, EXAMPLES))), "HOST_DEVICES": "1"}
    words = list(map(str, ("-c", RECORDED, name, *arguments, "--output", output)))
    command = [sys.executable, *words] if size == 1 else mpi_command(size, *words)
    # The first one compiles some hundred kernels for the host.
    completed = ran(*command, folder=folder, seconds=600, **(mpi_environment() | path))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(output.read_text())


def assert_same_runs(found: list[dict[str, Any]], expected: list[dict[str, Any]]):
    """Require the same of both, but for what follows from last bits, as CuPy adds up in an order of its own."""
    for name in ("loss", "zeros"):
        values, others = ([run.pop(name) for run in runs] for runs in (found, expected))
        assert values == pytest.approx(others, rel=1e-3, abs=1e-4)
    assert found == expected


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.mpi)])
def test_each_rank_in_turn_overflows_and_all_is_as_with_numpy(tmp_path: Path, size: int):
    for rank in range(size):
        arguments = ["--steps", STEPS, "--seed", 3, "--inject", f"{INJECTED}:{rank}"]
        found = recorded(tmp_path, size, "train_cupy", *arguments, *["--group", "mpi"] * (size > 1))
        assert_same_runs(found, recorded(tmp_path, size, "train_digits", *arguments))
        assert [run["skipped"] for run in found] == [[], [], [INJECTED]]
        assert found[2]["scales"][-4:] == [2.0**17, 2.0**17, 2.0**16, 2.0**16]
        assert all(run["is_verified"] for run in found)
