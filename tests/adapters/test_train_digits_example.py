"""The example as a user runs it: a real process for each rank, the overflow on each rank in turn."""

import subprocess
import sys
from pathlib import Path

import pytest
from axes import require
from programs import CHANGED, lines, png_size
from worlds import mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

PROGRAM = Path(__file__).parents[2] / "examples" / "train_digits.py"
RUNS = ("fp32", "fp16, no scaling", "fp16 with gradscale")
STEPS = 60
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SIZES = [
    pytest.param(1, id="single"),
    pytest.param(2, id="mpi-2", marks=pytest.mark.mpi),
    pytest.param(3, id="mpi-3", marks=pytest.mark.mpi),
]
TARGETS = [
    pytest.param(1, 0, id="single"),
    pytest.param(2, 0, id="mpi-2-rank-0", marks=[pytest.mark.mpi, pytest.mark.tier("quick")]),
    pytest.param(2, 1, id="mpi-2-rank-1", marks=pytest.mark.mpi),
    *(pytest.param(3, rank, id=f"mpi-3-rank-{rank}", marks=pytest.mark.mpi) for rank in range(3)),
]

# Runs the program named second as if the module named first were not installed.
WITHOUT = """
import runpy, sys
sys.modules[sys.argv.pop(1)] = None
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]  # as Python does for a program
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Prints how many threads the linear algebra of a rank has.
POOLS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy  # before the ranks, as the examples do
from shared.ranks import Ranks
from threadpoolctl import threadpool_info
with Ranks() as ranks:
    counts = ranks.all_gather_objects([pool["num_threads"] for pool in threadpool_info()])
    print(counts if ranks.rank == 0 else "")
"""


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    require("numpy")
    require("examples")
    if request.node.get_closest_marker("mpi"):
        require("mpi")


def launch(folder: Path, size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments on ``size`` ranks; on one without mpiexec."""
    python = [str(argument) for argument in arguments]
    command = [sys.executable, *python] if size == 1 else mpi_command(size, *python)
    # As a user has them: not set.
    environment = {name: value for name, value in mpi_environment().items() if name not in THREADS}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.mpi
@pytest.mark.tier("quick")
def test_each_of_several_ranks_computes_on_one_thread(tmp_path: Path) -> None:
    completed = launch(tmp_path, 2, "-c", POOLS, PROGRAM.parent)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == ["[[1],", "[1]]"]


def table(completed: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    """Return the numbers of each run: accuracy, loss, steps taken, steps skipped, zero gradients, seconds."""
    rows = {}
    for line in lines(completed):
        run = next((run for run in RUNS if line.startswith(f"{run} ")), None)
        if run is not None:
            rows[run] = [float(number.rstrip("%")) for number in line.removeprefix(run).split()]
    return rows


@pytest.mark.parametrize(("size", "rank"), TARGETS)
def test_all_ranks_skip_when_one_overflows(tmp_path: Path, size: int, rank: int) -> None:
    completed = launch(tmp_path, size, PROGRAM, "--steps", STEPS, "--inject", f"30:{rank}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Warning" not in completed.stderr
    everybody = "rank 0" if size == 1 else f"ranks {' '.join(map(str, range(size)))}"
    # 65536 doubles after 25 clean steps, and the overflow halves it.
    skip = f"step 30: overflow seen by rank {rank} (injected); {everybody} skipped; scale 2^17 -> 2^16"
    assert [line for line in lines(completed) if "overflow" in line] == [skip]
    where = "1 rank" if size == 1 else f"{size} ranks"
    assert lines(completed)[-1] == f"verified: weights and scaler state are bit-identical on {where}"
    results = table(completed)
    assert list(results) == list(RUNS)
    assert [(row[2], row[3]) for row in results.values()] == [(STEPS, 0), (STEPS, 0), (STEPS - 1, 1)]
    assert png_size(tmp_path / "train_digits.png") == (1080, 960)


@pytest.mark.parametrize("size", SIZES)
def test_scaling_keeps_the_gradients_that_float16_loses(tmp_path: Path, size: int) -> None:
    completed = launch(tmp_path, size, PROGRAM, "--steps", STEPS)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    zeros = {run: row[4] for run, row in table(completed).items()}
    assert zeros["fp32"] < 1
    assert zeros["fp16, no scaling"] > 30
    assert zeros["fp16 with gradscale"] < 1


def test_only_float16_without_scaling_fails_to_learn(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, PROGRAM)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    accuracies = {run: row[0] for run, row in table(completed).items()}
    assert accuracies["fp32"] > 90
    assert accuracies["fp16, no scaling"] < 50
    assert accuracies["fp16 with gradscale"] > 90


def test_several_overflows(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, PROGRAM, "--steps", 20, "--inject", "5:0", "--inject", "20:0", "--output", "a.png")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    skipped = [line.split(":")[0] for line in lines(completed) if "skipped;" in line]
    assert skipped == ["step 5", "step 20"]
    assert table(completed)["fp16 with gradscale"][2:4] == [18, 2]
    assert png_size(tmp_path / "a.png") == (1080, 960)


def test_one_process_needs_no_mpi4py(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "-c", WITHOUT, "mpi4py", PROGRAM, "--steps", 5, "--inject", "3:0")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert lines(completed)[-1] == "verified: weights and scaler state are bit-identical on 1 rank"


@pytest.mark.parametrize("size", SIZES[1:])
def test_several_processes_without_mpi4py_are_refused(tmp_path: Path, size: int) -> None:
    completed = launch(tmp_path, size, "-c", WITHOUT, "mpi4py", PROGRAM, "--steps", 5)
    assert completed.returncode != 0
    assert f"mpiexec started {size} processes, and mpi4py cannot be used" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inject", "5"], "must be STEP:RANK, such as 120:2, got '5'"),
        (["--inject", "x:y"], "must be STEP:RANK, such as 120:2, got 'x:y'"),
        (["--inject", "0:0"], "must be a step from 1 to 60 and a rank from 0 to {last}, got 0:0"),
        (["--inject", "61:0"], "must be a step from 1 to 60 and a rank from 0 to {last}, got 61:0"),
        (["--inject", "5:2"], "must be a step from 1 to 60 and a rank from 0 to {last}, got 5:2"),
        (["--inject=5:-1"], "must be a step from 1 to 60 and a rank from 0 to {last}, got 5:-1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--output", "missing/plot.png"], "there is no folder missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_once(tmp_path: Path, size: int, arguments: list[str], message: str) -> None:
    completed = launch(tmp_path, size, PROGRAM, "--steps", STEPS, *arguments)
    assert completed.returncode == 2
    assert completed.stderr.count(message.format(last=size - 1)) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_rank_that_fails_ends_the_others(tmp_path: Path, size: int) -> None:
    line = "        activations = forward(weights, images[mine])\n"
    failing = f"        if ranks.rank == 1:\n            raise ValueError('this rank fails')\n{line}"
    completed = launch(tmp_path, size, "-c", CHANGED, line, failing, PROGRAM, "--steps", 5)
    assert completed.returncode != 0
    assert completed.stderr.count("ValueError: this rank fails") == 1, completed.stderr


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("what", ["weights", "state"])
def test_ranks_that_differ_are_not_verified(tmp_path: Path, size: int, what: str) -> None:
    line = "    # With the optimizer's count of steps"
    spoil = {"weights": "weights[-1] = ranks.rank", "state": "optimizer.steps += ranks.rank"}[what]
    completed = launch(tmp_path, size, "-c", CHANGED, line, f"    {spoil}\n{line}", PROGRAM, "--steps", 5)
    assert completed.returncode == 1
    assert f"FAILED: weights or scaler state differ on {size} ranks" in completed.stdout
    assert "verified" not in completed.stdout
