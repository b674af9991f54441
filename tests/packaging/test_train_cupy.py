"""examples/train_cupy.py as a user runs it, over a stand-in for CuPy and NCCL whose kernels run on the host.

It computes what examples/train_digits.py does, to the bit. Nothing here runs on a device.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_kernels
import pytest
from axes import require, require_program
from programs import CHANGED, interrupted, lines
from worlds import mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[2]
EXAMPLES, SUPPORT = ROOT / "examples", ROOT / "tests" / "support"
PROGRAM = EXAMPLES / "train_cupy.py"
STEPS, INJECTED = 30, 28
SKIP = "overflow seen by rank {rank} (injected); {ranks} skipped; scale 2^17 -> 2^16"
SINGLE = [
    pytest.param(1, None, id="single"),
    # It needs no mpiexec, but mpi4py, which carries the stand-in's NCCL.
    pytest.param(1, "nccl", id="single-nccl", marks=pytest.mark.mpi),
]
SEVERAL = [pytest.param(2, group, id=f"mpi-2-{group}", marks=pytest.mark.mpi) for group in ("nccl", "mpi")]

# What a Python does first: it puts the stand-in in CuPy's place, with kernels that were compiled once for all of them.
STAND_IN = """
import ctypes
import host_kernels
import host_nccl
library = ctypes.CDLL({library!r})
host_kernels.library = lambda: library
kept = host_nccl.installed({machine})
kept.__enter__()
"""
NO_CUPY = "import sys\nsys.modules['cupy'] = None\n"

# Runs the example named in the arguments, and writes what came of its runs, with all digits, in place of the plot.
RECORDED = """
import collections, dataclasses, importlib, json, sys
name = sys.argv.pop(1)
import shared.runs
from shared.ranks import Ranks

def write(runs, options, ranks):
    found = []
    for run in runs:
        values = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
        values |= {"scales": [report.scale for report in run.history], "skipped": run.skipped, "seconds": 0}
        found.append(values | {"dtype": run.dtype.__name__})
    log = getattr(sys.modules.get("host_cupy"), "log", [])
    counts = collections.Counter(entry[0] for entry in log)
    options.output.write_text(json.dumps({"runs": found, "counts": counts}))

shared.runs.write_picture = write
with Ranks() as world:
    sys.exit(importlib.import_module(name).main(world))
"""


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    require("numpy")
    require("examples")
    require_program("c++")
    if request.node.get_closest_marker("mpi"):
        require("mpi")


def environment(folder: Path, machine: str = "", *, has_cupy: bool = True) -> dict[str, str]:
    """Return the environment of a machine, such as ``devices=1``."""
    site = folder.with_name(f"{folder.name}-site")
    site.mkdir(exist_ok=True)
    library = host_kernels.library()._name
    (site / "sitecustomize.py").write_text(STAND_IN.format(library=library, machine=machine) if has_cupy else NO_CUPY)
    return mpi_environment() | {"PYTHONPATH": os.pathsep.join(map(str, (site, SUPPORT, EXAMPLES)))}


def launch(
    folder: Path, size: int, *arguments: object, machine: str = "", has_cupy: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments on ``size`` ranks; on one without mpiexec."""
    python = [str(argument) for argument in arguments]
    command = [sys.executable, *python] if size == 1 else mpi_command(size, *python)
    return subprocess.run(
        command,
        env=environment(folder, machine, has_cupy=has_cupy),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def over(group: str | None) -> list[str]:
    return [] if group is None else ["--group", group]


def recorded(folder: Path, size: int, name: str, *arguments: object, machine: str = "") -> Any:
    """Return what came of the runs of an example, with the counts of what it asked of the stand-in."""
    output = folder / "runs.png"  # a name that the option takes
    completed = launch(folder, size, "-c", RECORDED, name, *arguments, "--output", output, machine=machine)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return json.loads(output.read_text())


def overflowing(rank: int) -> list[object]:
    return ["--steps", STEPS, "--seed", 3, "--inject", f"{INJECTED}:{rank}"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return what gives the runs of the example for NumPy, on so many ranks with an overflow on one of them."""

    @functools.cache
    def run(size: int, rank: int) -> Any:
        return recorded(tmp_path_factory.mktemp("numpy"), size, "train_digits", *overflowing(rank))

    return run


@pytest.mark.parametrize(("size", "group"), [SINGLE[0], SEVERAL[0]])
def test_it_prints_the_table_and_writes_the_plot(tmp_path: Path, size: int, group: str | None) -> None:
    from matplotlib.image import imread

    inject = ["--inject", f"{INJECTED}:{size - 1}"]
    completed = launch(tmp_path, size, PROGRAM, "--steps", STEPS, *inject, *over(group))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Warning" not in completed.stderr
    ranks, where = ("rank 0", "1 rank") if size == 1 else ("ranks 0 1", "2 ranks")
    skip, titles, *rows, note, wrote, verified = lines(completed)
    assert skip == f"step {INJECTED}: {SKIP.format(rank=size - 1, ranks=ranks)}"
    assert titles.split("  ")[-1] == "seconds"
    assert [row.split("  ")[0] for row in rows] == ["fp32", "fp16, no scaling", "fp16 with gradscale"]
    assert [row.split()[-4:-2] for row in rows] == [["30", "0"], ["30", "0"], ["29", "1"]]
    assert note == f"({where}, {group or 'no group'}; rank 0 on host 0)"
    assert wrote == "wrote train_cupy.png"
    assert verified == f"verified: weights and scaler state are bit-identical on {where}"
    assert imread(tmp_path / "train_cupy.png").shape == (960, 1080, 4)


@pytest.mark.parametrize(("size", "group"), [*SINGLE, *SEVERAL])
def test_each_rank_in_turn_overflows_and_all_is_as_with_numpy(
    tmp_path: Path, size: int, group: str | None, expected: Callable[..., Any]
) -> None:
    for rank in range(size):
        found = recorded(tmp_path, size, "train_cupy", *overflowing(rank), *over(group))
        # The same arithmetic in the same order; over NCCL as well, since a sum of two numbers is rounded once anyhow.
        assert found["runs"] == expected(size, rank)["runs"]
        assert [run["skipped"] for run in found["runs"]] == [[], [], [INJECTED]]
        assert found["runs"][2]["scales"][-4:] == [2.0**17, 2.0**17, 2.0**16, 2.0**16]
        assert all(run["is_verified"] for run in found["runs"])


@pytest.mark.mpi
def test_shards_of_unequal_lengths_go_over_nccl(tmp_path: Path) -> None:
    # The 21450 weights are two short of four equal shards.
    found = recorded(tmp_path, 4, "train_cupy", "--steps", 6, "--inject", "5:3", machine="devices=4")
    numpy = recorded(tmp_path, 4, "train_digits", "--steps", 6, "--inject", "5:3")
    # In float16 the sum of four is rounded thrice here, and once there.
    assert found["runs"][0] == numpy["runs"][0]
    assert [run["skipped"] for run in found["runs"]] == [[], [], [5]]
    assert all(run["is_verified"] for run in found["runs"])


@pytest.mark.parametrize(("size", "group"), [SINGLE[0], SEVERAL[0]])
def test_an_iteration_reads_one_verdict(tmp_path: Path, size: int, group: str | None) -> None:
    short, long = (recorded(tmp_path, size, "train_cupy", "--steps", steps, *over(group)) for steps in (4, 9))
    more = {what: count - short["counts"].get(what, 0) for what, count in long["counts"].items()}
    # Five iterations in each of three runs, and the accuracies are read at the end. Only one run has a scaler.
    assert (more["read"], more["launch"]) == (5, 5)
    # The gradients and the weights in each run, and one agreement.
    assert more.get("nccl", 0) == (0 if group is None else 5 * (2 * 3 + 1))


def test_another_read_would_be_seen(tmp_path: Path) -> None:
    line = "        zeros += cupy.count_nonzero(optimizer.grads == 0)\n"
    reading = "        zeros += int(cupy.count_nonzero(optimizer.grads == 0))\n"
    completed = launch(tmp_path, 1, "-c", CHANGED, line, reading, PROGRAM, "--steps", 3)
    assert completed.returncode == 1
    assert "TypeError: implicit conversion to a host value" in completed.stderr


@pytest.mark.mpi
def test_ranks_may_share_a_gpu_over_mpi(tmp_path: Path) -> None:
    completed = launch(tmp_path, 2, PROGRAM, "--steps", 3, "--group", "mpi", machine="devices=1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert lines(completed)[-1] == "verified: weights and scaler state are bit-identical on 2 ranks"


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["weights", "state"])
def test_ranks_that_differ_are_not_verified(tmp_path: Path, what: str) -> None:
    line = "    # With the optimizer's count of steps"
    spoil = {"weights": "weights[-1] = ranks.rank", "state": "optimizer.steps += ranks.rank"}[what]
    completed = launch(tmp_path, 2, "-c", CHANGED, line, f"    {spoil}\n{line}", PROGRAM, "--steps", 2)
    assert completed.returncode == 1
    assert "FAILED: weights or scaler state differ on 2 ranks" in completed.stdout


REFUSALS = {
    "no-cupy": (
        "",
        r"examples/train_cupy\.py needs cupy, got: .*; from a clone of gradscale: "
        r"python -m pip install '\.\[cupy,examples\]'",
    ),
    "no-device": ("devices=0", r"\S+: there is no CUDA driver here: install NVIDIA's driver, .*"),
    "no-nccl": ("has_nccl=False", r"CuPy 14.2.0 finds no NCCL library, .*: python -m pip install nvidia-nccl-cu13"),
    "too-few-gpus": (
        "devices=1",
        r"NCCL needs a GPU for each rank, got 2 ranks on \S+, which share 1: start fewer ranks \(mpiexec -n\), or give "
        r"--group mpi",
    ),
}
REFUSED = [
    *(pytest.param(1, what, id=f"single-{what}") for what in ("no-cupy", "no-device", "no-nccl")),
    *(pytest.param(2, what, id=f"mpi-2-{what}", marks=pytest.mark.mpi) for what in REFUSALS),
]


@pytest.mark.parametrize(("size", "what"), REFUSED)
def test_what_is_missing_is_said_once_and_plainly(tmp_path: Path, size: int, what: str) -> None:
    machine, message = REFUSALS[what]
    arguments = ["--steps", 3, "--group", "nccl"]
    completed = launch(tmp_path, size, PROGRAM, *arguments, machine=machine, has_cupy=what != "no-cupy")
    assert completed.returncode == 1
    said = [line for line in completed.stderr.splitlines() if re.fullmatch(message, line)]
    assert len(said) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_gpu_needs_neither_nccl_nor_mpi4py(tmp_path: Path) -> None:
    without = "import sys\nsys.modules['mpi4py'] = None\nimport runpy\ndel sys.argv[0]\n"
    code = f"{without}runpy.run_path(sys.argv[0], run_name='__main__')"
    completed = launch(tmp_path, 1, "-c", code, PROGRAM, "--steps", 3, machine="has_nccl=False")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    completed = launch(tmp_path, 1, "-c", code, PROGRAM, "--steps", 3, "--group", "mpi")
    assert completed.returncode == 1
    command = "from a clone of gradscale: python -m pip install '.[mpi]'"
    assert completed.stderr == f"--group mpi needs mpi4py, which cannot be used here; {command}\n"


@pytest.mark.parametrize("size", [pytest.param(1, id="single"), pytest.param(2, id="mpi-2", marks=pytest.mark.mpi)])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "gloo"], "argument --group: invalid choice: 'gloo'"),
        (["--inject", "5:2"], "must be a step from 1 to 600 and a rank from 0 to {last}, got 5:2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_once(tmp_path: Path, size: int, arguments: list[str], message: str) -> None:
    completed = launch(tmp_path, size, PROGRAM, *arguments)
    assert completed.returncode == 2
    assert completed.stderr.count(message.format(last=size - 1)) == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_needs_no_cupy(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, PROGRAM, "--help", has_cupy=False)
    assert completed.returncode == 0, completed.stderr
    assert "mpiexec -n 4 python examples/train_cupy.py --group nccl" in completed.stdout
    assert "--group {nccl,mpi}" in completed.stdout


def test_an_interrupted_run_ends_promptly(tmp_path: Path) -> None:
    status, errors = interrupted([sys.executable, str(PROGRAM), "--steps", "100000"], environment(tmp_path), tmp_path)
    assert status == 130
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []
