"""examples/train_cupy.py over the driver on the host: it does what train_digits.py does, without traces of bad steps.

NumPy multiplies matrices there, in place of cuBLAS; over NCCL it runs on a machine with a GPU (.ci/gpu).
"""

import os
import re
import sys
from pathlib import Path

import pytest
from axes import require
from commands import ran
from cupy_devices import launch_counter, require_cupy
from waiting_trainers import EXAMPLES, DigitsTrainer, faults_of_example
from worlds import MPIWorld, World, each, mpi_command, mpi_environment

pytestmark = [pytest.mark.cupy, pytest.mark.gpu, pytest.mark.tier("all")]

# What a Python does first.
PREPARED = """
import cupy
import shared.digits

def on_host(function):
    return lambda *arrays: cupy.asarray(function(*(x.get() for x in arrays)))

shared.digits.linear, shared.digits.matmul = map(on_host, (shared.digits.linear, shared.digits.matmul))
"""


@pytest.fixture(autouse=True)
def libraries():
    require("examples")
    require_cupy()
    # Of a device the matrices are its own.
    launch_counter()


def printed(folder: Path, size: int, name: str, *arguments: object) -> tuple[str, list[float]]:
    """Run an example on ranks that share a device, on one without mpiexec; return what it says, and the numbers."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(PREPARED if name == "train_cupy" else "")
    path = {"PYTHONPATH": os.pathsep.join(map(str, (site, EXAMPLES))), "HOST_DEVICES": "1"}
    words = [str(EXAMPLES / f"{name}.py"), *map(str, arguments), "--output", str(folder / "runs.png")]
    command = [sys.executable, *words] if size == 1 else mpi_command(size, *words)
    # The first one compiles some hundred kernels for the host.
    completed = ran(*command, folder=folder, seconds=600, **(mpi_environment() | path))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    lines = [line.split() for line in completed.stdout.splitlines() if line.startswith(("step", "fp"))]
    # Without the seconds.
    text = "\n".join(" ".join(line if line[0] == "step" else line[:-1]) for line in lines)
    return re.sub(r"\d+\.\d+", "", text), [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.mpi)])
def test_each_rank_in_turn_overflows_and_all_is_as_with_numpy(tmp_path: Path, size: int):
    for rank in range(size):
        arguments = ["--steps", 30, "--seed", 3, "--inject", f"28:{rank}"]
        found, numbers = printed(tmp_path, size, "train_cupy", *arguments, *["--group", "mpi"] * (size > 1))
        expected, others = printed(tmp_path, size, "train_digits", *arguments)
        assert found == expected
        assert "step 28: overflow seen by" in found
        # CuPy adds up in an order of its own.
        assert numbers == pytest.approx(others, rel=0.03, abs=1e-3)


def faults_over_cupy(group, ranks: str):
    """Return the faults of the example's loop on one rank."""
    sys.path.insert(0, str(EXAMPLES))
    exec(PREPARED, {})
    return faults_of_example(group, DigitsTrainer, "train_cupy", ranks)


@pytest.mark.parametrize("world", [MPIWorld(1), MPIWorld(2)], ids=["1", "2"])
@pytest.mark.mpi
def test_the_loop_has_no_fault(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOST_DEVICES", "1")
    ((_, faults),) = each(world, faults_over_cupy, [("GPURanks" if world.size == 1 else "MPIRanks",)])
    assert faults == [[]] * world.size
