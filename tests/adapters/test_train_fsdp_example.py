"""The torch example as a user runs it: under torchrun, the overflow on each rank in turn, refused options, Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from axes import require
from programs import changed, interrupted, launch_torch, lines, png_size, torch_command, torch_environment

PROGRAM = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
STEPS = 20
METHODS = ["FSDP2", "FSDP1", "DDP"]
OPTIONS = {"FSDP2": [], "FSDP1": ["--fsdp1"], "DDP": ["--ddp"]}
# Machines with a GPU run what they are told to run on it; all else here is about processes on CPUs.
ENVIRONMENT = torch_environment(PROGRAM)

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]


@pytest.fixture(autouse=True)
def libraries() -> None:
    require("torch")
    require("examples")


def launch(
    folder: Path, size: int, *arguments: object, program: Path = PROGRAM, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess[str]:
    """Run the example on ``size`` ranks."""
    return launch_torch(folder, size, program, *arguments, environment=environment)


def table(completed: subprocess.CompletedProcess[str], method: str) -> list[list[float]]:
    """Return the numbers of the three runs: validation and training loss, steps taken, skipped, zeros, seconds."""
    names = ["fp32 DDP", f"fp16 {method}, no scaling", f"fp16 {method}, gradscale"]
    rows = [line for line in lines(completed) if re.search(r"%\s+[\d.]+$", line)]
    assert len(rows) == len(names)
    numbers = [row.removeprefix(name).split() for name, row in zip(names, rows, strict=True)]
    return [[float(number.rstrip("%")) for number in row] for row in numbers]


def gaps(completed: subprocess.CompletedProcess[str]) -> list[float]:
    """Return how far the losses of the two float16 runs were from float32's, at most."""
    return [float(gap) for gap in re.findall(r"training loss is always within ([\d.]+) of fp32 DDP", completed.stdout)]


def check_run(completed: subprocess.CompletedProcess[str], method: str, size: int, overflow: str) -> None:
    """Assert what a run must show that had one overflow, injected at step 15."""
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    everybody = "rank 0" if size == 1 else f"ranks {' '.join(map(str, range(size)))}"
    # 65536 doubles after 10 clean steps, and the overflow halves it.
    skip = f"step 15: overflow {overflow}; {everybody} skipped; scale 2^17 -> 2^16"
    assert [line for line in lines(completed) if "overflow" in line] == [skip]
    where = "1 rank" if size == 1 else f"{size} ranks"
    assert lines(completed)[-1] == f"verified: weights and scaler state are bit-identical on {where}"
    fp32, unscaled, scaled = table(completed, method)
    assert [row[2:4] for row in (fp32, unscaled, scaled)] == [[STEPS, 0], [STEPS, 0], [STEPS - 1, 1]]
    # Scaling keeps the gradients that float16 loses, and with them float32's losses.
    assert unscaled[4] > fp32[4] + 10
    assert abs(scaled[4] - fp32[4]) < 0.5
    without, with_scaling = gaps(completed)
    assert without > 0.1
    assert with_scaling < 0.05


@pytest.mark.parametrize("rank", [0, 1], ids=["rank-0", "rank-1"])
@pytest.mark.parametrize("method", METHODS)
def test_both_ranks_skip_when_one_overflows(tmp_path: Path, method: str, rank: int) -> None:
    completed = launch(tmp_path, 2, *OPTIONS[method], "--steps", STEPS, "--inject", f"15:{rank}", "--plot", "a.png")
    # DDP has averaged the gradients by then; a shard's overflow is seen by its owner alone.
    seen = "ranks 0 1" if method == "DDP" else f"rank {rank}"
    check_run(completed, method, 2, f"injected on rank {rank}, seen by {seen}")
    assert png_size(tmp_path / "a.png") == (1080, 960)


@pytest.mark.parametrize("method", ["FSDP2", "FSDP1"])
def test_one_process_needs_no_launcher(tmp_path: Path, method: str) -> None:
    completed = launch(tmp_path, 1, *OPTIONS[method], "--steps", STEPS, "--inject", "15:0")
    check_run(completed, method, 1, "injected on rank 0, seen by rank 0")
    assert "for more: torchrun --nproc-per-node 2 " in lines(completed)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["train_fsdp.png"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_one_process_trains_on_a_gpu(tmp_path: Path, method: str) -> None:
    if not require("torch").cuda.is_available():
        pytest.skip("torch sees no GPU")
    options = [*OPTIONS[method], "--steps", STEPS, "--inject", "15:0"]
    completed = launch(tmp_path, 1, *options, environment={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    check_run(completed, method, 1, "injected on rank 0, seen by rank 0")
    assert lines(completed)[0].startswith("1 rank, nccl on cuda")


def test_several_overflows(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "--ddp", "--steps", 8, "--inject", "3:0", "--inject", "8:0")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    overflows = [line for line in lines(completed) if "overflow" in line]
    assert [line.split(":")[0] for line in overflows] == ["step 3", "step 8"]
    assert [line.split("scale ")[1] for line in overflows] == ["2^16 -> 2^15", "2^15 -> 2^14"]
    assert table(completed, "DDP")[2][2:4] == [6, 2]


def test_help_names_every_option(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "--help")
    assert completed.returncode == 0, completed.stderr
    for option in ("--fsdp1", "--ddp", "--steps", "--seed", "--inject STEP:RANK", "--plot FILE"):
        assert option in completed.stdout
    assert "torchrun --nproc-per-node 2 examples/train_fsdp.py" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inject", "x:y"], "must be STEP:RANK, such as 60:1, got 'x:y'"),
        (["--inject", "21:0"], "must be a step from 1 to 20 and a rank from 0 to 0, got 21:0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--plot", "missing/plot.png"], "there is no folder missing"),
        (["--fsdp1", "--ddp"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    completed = launch(tmp_path, 1, "--steps", STEPS, *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_refuse_a_bad_option_once(tmp_path: Path) -> None:
    completed = launch(tmp_path, 2, "--steps", STEPS, "--inject", "5:2")
    assert completed.returncode != 0
    message = "error: argument --inject: must be a step from 1 to 20 and a rank from 0 to 1, got 5:2"
    assert completed.stderr.count(message) == 1, completed.stderr
    assert completed.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_ends_the_other(tmp_path: Path) -> None:
    failing = "        if ranks.rank == 1:\n            raise ValueError('this rank fails')\n"
    before = "        with autocast:\n"
    program = changed(tmp_path, PROGRAM, (before, failing + before))
    completed = launch(tmp_path, 2, "--steps", 5, program=program)
    assert completed.returncode != 0
    assert completed.stderr.count("ValueError: this rank fails") == 1, completed.stderr
    assert "verified" not in completed.stdout


@pytest.mark.parametrize(
    ("method", "spoil"),
    [
        pytest.param("DDP", "next(model.parameters()).data.add_(ranks.rank)", id="weights"),
        pytest.param("FSDP2", "next(iter(optimizer.state.values()))['step'].add_(ranks.rank)", id="steps"),
        pytest.param("FSDP2", "scaler.update(2.0 ** ranks.rank)", id="scale"),
    ],
)
def test_ranks_that_differ_are_not_verified(tmp_path: Path, method: str, spoil: str) -> None:
    before = "    run.is_verified = "
    program = changed(tmp_path, PROGRAM, (before, f"    {spoil}\n{before}"))
    completed = launch(tmp_path, 2, *OPTIONS[method], "--steps", 1, program=program)
    assert completed.returncode != 0
    assert lines(completed)[-1] == "FAILED: weights or scaler state differ on 2 ranks"
    assert "verified" not in completed.stdout


@pytest.mark.parametrize("size", [1, 2], ids=["single", "torchrun-2"])
def test_an_interrupted_run_ends_promptly(tmp_path: Path, size: int) -> None:
    status, errors = interrupted(torch_command(size, PROGRAM, "--steps", 100000), ENVIRONMENT, tmp_path)
    # torchrun ends with 1, and with a traceback of its own, when it is interrupted.
    assert status == (130 if size == 1 else 1)
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []
