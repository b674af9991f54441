"""examples/train_cupy.py as a user runs it, over the driver on the host: it does what train_digits.py does.

NumPy multiplies matrices there, in place of cuBLAS, and between processes MPI carries what NCCL would.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import ran
from cupy_devices import launch_counter, require_cupy
from worlds import mpi_command, mpi_environment

pytestmark = [pytest.mark.cupy, pytest.mark.gpu, pytest.mark.tier("all")]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS, INJECTED = 30, 28

# What a Python does first.
PREPARED = """
import ctypes, functools
import cupy
import numpy as np
from cupy.cuda import nccl
import shared.digits

def on_host(function):
    return lambda *arrays: cupy.asarray(function(*(x.get() for x in arrays)))

shared.digits.linear, shared.digits.matmul = map(on_host, (shared.digits.linear, shared.digits.matmul))

class NcclCommunicator:
    __module__ = "cupy_backends.cuda.libs.nccl"
    comm = 1

    def __init__(self, size, unique_id, rank):
        from mpi4py import MPI

        device = cupy.cuda.Device().id
        self.rank_id, self.size, self.device_id = lambda: rank, lambda: size, lambda: device
        self.rank, self.world = rank, MPI.COMM_WORLD
        self.check_async_error = self.destroy = lambda: None

    def allReduce(self, send, receive, count, dtype, operation, stream):
        memory(receive, count, dtype)[:] = self.reduced(send, count, dtype, operation)

    def reduceScatter(self, send, receive, count, dtype, operation, stream):
        whole = self.reduced(send, count * self.size(), dtype, operation)
        memory(receive, count, dtype)[:] = whole[self.rank * count :][:count]

    def allGather(self, send, receive, count, dtype, stream):
        memory(receive, count * self.size(), dtype)[:] = np.concatenate(self.gathered(send, count, dtype))

    def gathered(self, send, count, dtype):
        cupy.cuda.Device().synchronize()
        return self.world.allgather(memory(send, count, dtype))

    def reduced(self, send, count, dtype, operation):
        with np.errstate(over="ignore", invalid="ignore"):
            add = {nccl.NCCL_SUM: np.add, nccl.NCCL_MAX: np.maximum}[operation]
            return functools.reduce(add, self.gathered(send, count, dtype))

def memory(address, count, dtype):
    kind = {nccl.NCCL_INT32: np.int32, nccl.NCCL_FLOAT16: np.float16, nccl.NCCL_FLOAT32: np.float32}[dtype]
    return np.ctypeslib.as_array((ctypes.c_byte * (count * np.dtype(kind).itemsize)).from_address(address)).view(kind)

nccl.NcclCommunicator = NcclCommunicator
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


def launch(
    folder: Path, size: int, *arguments: object, devices: int = 2, has_nccl: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments on ``size`` ranks, on one without mpiexec, of a machine with so many devices."""
    site = folder.with_name(f"{folder.name}-site")
    site.mkdir(exist_ok=True)
    prepared = "" if "train_digits" in arguments else f"{PREPARED}\nnccl.available = {has_nccl}\n"
    (site / "sitecustomize.py").write_text(prepared)
    path = {"PYTHONPATH": os.pathsep.join(map(str, (site, EXAMPLES))), "HOST_DEVICES": str(devices)}
    words = list(map(str, arguments))
    command = [sys.executable, *words] if size == 1 else mpi_command(size, *words)
    return ran(*command, folder=folder, seconds=600, **(mpi_environment() | path))


def recorded(folder: Path, size: int, name: str, *arguments: object, **machine):
    """Return what came of each run of an example."""
    output = folder / "runs.png"  # a name that the option takes
    # The first one compiles some hundred kernels for the host.
    completed = launch(folder, size, "-c", RECORDED, name, *arguments, "--output", output, **machine)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(output.read_text())


def assert_same_runs(found: list[dict[str, Any]], expected: list[dict[str, Any]]):
    """Require the same of both, but for what follows from last bits, as CuPy adds up in an order of its own."""
    for name in ("loss", "zeros"):
        values, others = ([run.pop(name) for run in runs] for runs in (found, expected))
        assert values == pytest.approx(others, rel=1e-3, abs=1e-4)
    assert found == expected


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
    tmp_path: Path, size: int, over: list[str], machine: dict[str, Any]
):
    for rank in range(size):
        arguments = ["--steps", STEPS, "--seed", 3, "--inject", f"{INJECTED}:{rank}"]
        found = recorded(tmp_path, size, "train_cupy", *arguments, *over, **machine)
        # Over NCCL as well, since a sum of two numbers is rounded once anyhow.
        assert_same_runs(found, recorded(tmp_path, size, "train_digits", *arguments))
        assert [run["skipped"] for run in found] == [[], [], [INJECTED]]
        assert found[2]["scales"][-4:] == [2.0**17, 2.0**17, 2.0**16, 2.0**16]
        assert all(run["is_verified"] for run in found)


@pytest.mark.mpi
def test_shards_of_unequal_lengths_go_over_nccl(tmp_path: Path):
    # The 21450 weights are two short of four equal shards.
    arguments = ["--steps", 6, "--inject", "5:3"]
    found, numpy = (recorded(tmp_path, 4, name, *arguments, devices=4) for name in ("train_cupy", "train_digits"))
    # In float16 the sum of four is rounded thrice here, and once there.
    assert_same_runs(found[:1], numpy[:1])
    assert [run["skipped"] for run in found] == [[], [], [5]]
    assert all(run["is_verified"] for run in found)
