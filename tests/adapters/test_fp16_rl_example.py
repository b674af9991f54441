"""Reinforcement learning as a user runs it: an overflow on each rank in turn, the two passes, ranks that differ."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require
from programs import changed, interrupted, launch_torch, lines, png_size, torch_command, torch_environment

PROGRAM = Path(__file__).parents[2] / "examples" / "fp16_rl.py"
STEPS, INJECTED, TEXT_STEPS = 3, 2, 10
NAMES = ("bf16", "fp16, no scaling", "fp16, gradscale")
# Machines with a GPU run nothing here on it: it is about processes on CPUs.
ENVIRONMENT = torch_environment(PROGRAM)

# Prints how far the pass that samples is from the one that trains, where rounding hardly matters.
IN_FLOAT32 = """
import torch
from shared.policy import PROMPT, SAMPLES, Sampler, draw_prompts, log_probabilities
from shared.text import Transformer, load_text
from shared.torch_ranks import Ranks
ranks = Ranks()
text = load_text()
alphabet = text[2]
torch.manual_seed(0)
actor = Transformer(len(alphabet))
for parameter in actor.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
sampler = Sampler(alphabet, torch.float32, 0, ranks)
sampler.load(actor)
prompts = draw_prompts(text, torch.Generator().manual_seed(0), ranks)
windows, sampled = sampler.continue_(prompts)
assert (windows[:, :PROMPT] == prompts.repeat_interleave(SAMPLES, dim=0)).all()
with torch.no_grad():
    print(sampled.std().item(), (log_probabilities(actor, windows) - sampled).abs().max().item())
"""

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]


@pytest.fixture(autouse=True)
def libraries() -> None:
    require("torch")
    require("examples")


def launch(folder: Path, size: int, *arguments: object, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run the example on ``size`` ranks, for a few steps."""
    few = ["--steps", STEPS, "--text-steps", TEXT_STEPS]
    return launch_torch(folder, size, program, *few, *arguments, environment=ENVIRONMENT)


def table(completed: subprocess.CompletedProcess[str]) -> list[list[float]]:
    """Return the numbers of the three runs: vowels, mismatch, steps taken, skipped, zero gradients, seconds."""
    rows = [line for line in lines(completed) if re.search(r"%\s+[\d.]+$", line)]
    assert len(rows) == len(NAMES), completed.stdout
    numbers = [row.removeprefix(name).split() for name, row in zip(NAMES, rows, strict=True)]
    return [[float(number.rstrip("%")) for number in row] for row in numbers]


def distributions(completed: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
    """Return median, mean, 99th percentile and maximum of the differences between the two passes."""
    pattern = r"(bf16|fp16): median (\S+), mean (\S+), 99 % below (\S+), largest (\S+)"
    found = [match.groups() for line in lines(completed) if (match := re.fullmatch(pattern, line))]
    return {name: [float(number) for number in numbers] for name, *numbers in found}


def check_run(completed: subprocess.CompletedProcess[str], size: int, rank: int) -> None:
    """Assert what a run must show that had one overflow."""
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stderr == ""
    where, everybody = ("1 rank", "rank 0") if size == 1 else ("2 ranks", "ranks 0 1")
    # The norm that the gradients are clipped to is that of all shards, so that all see it overflow.
    seen = f"overflow injected on rank {rank}, seen by {everybody}; {everybody} skipped; scale 2^16 -> 2^15"
    assert [line for line in lines(completed) if "overflow" in line] == [f"step {INJECTED}: {seen}"]
    verified = f"verified: weights, schedule and scaler state are bit-identical on {where}, which skipped as one"
    assert lines(completed)[-1] == verified
    assert [row[2:4] for row in table(completed)] == [[STEPS, 0], [STEPS, 0], [STEPS - 1, 1]]
    bf16, fp16 = distributions(completed)["bf16"], distributions(completed)["fp16"]
    # float16 has three bits more.
    assert all(4 < coarse / fine < 16 for coarse, fine in zip(bf16[:2], fp16[:2], strict=True))
    rows = dict(zip(NAMES, table(completed), strict=True))
    assert 4 < rows["bf16"][1] / rows["fp16, gradscale"][1] < 16


@pytest.mark.parametrize("rank", [0, 1], ids=["rank-0", "rank-1"])
def test_both_ranks_skip_when_one_overflows(tmp_path: Path, rank: int) -> None:
    completed = launch(tmp_path, 2, "--inject", f"{INJECTED}:{rank}", "--plot", "a.png")
    check_run(completed, 2, rank)
    assert png_size(tmp_path / "a.png") == (1080, 1320)


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "--inject", f"{INJECTED}:0")
    check_run(completed, 1, 0)
    assert "for more: torchrun --nproc-per-node 2 " in lines(completed)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["fp16_rl.png"]


def test_the_passes_are_of_one_policy(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", IN_FLOAT32],
        env=ENVIRONMENT,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    spread, difference = map(float, completed.stdout.split())
    assert spread > 0.5
    assert 0 < difference < 1e-4


def test_gradients_of_a_large_batch_vanish_without_scaling(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "--accumulate", 65536)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    zeros = dict(zip(NAMES, (row[4] for row in table(completed)), strict=True))
    assert zeros["fp16, no scaling"] > 50
    assert zeros["fp16, gradscale"] < zeros["fp16, no scaling"] / 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("    run.history = ", "    scaler.update(2.0 ** ranks.rank)\n    run.history = ", id="scale"),
        pytest.param("scaler.step_schedule(optimizer, schedule)", "schedule.step()", id="schedule"),
        pytest.param("view(-1)[0] = math.inf", "view(-1)[0] = 0.0", id="skips"),
    ],
)
def test_ranks_that_do_not_skip_as_one_are_not_verified(tmp_path: Path, old: str, new: str) -> None:
    program = changed(tmp_path, PROGRAM, (old, new))
    completed = launch(tmp_path, 2, "--inject", f"{INJECTED}:1", program=program)
    assert completed.returncode != 0
    assert lines(completed)[-1] == "FAILED: weights, schedule, skips or scaler state differ on 2 ranks"
    assert "verified" not in completed.stdout


def test_help_names_every_option(tmp_path: Path) -> None:
    completed = launch(tmp_path, 1, "--help")
    assert completed.returncode == 0, completed.stderr
    for option in ("--steps", "--text-steps", "--accumulate", "--seed", "--inject STEP:RANK", "--plot FILE"):
        assert option in completed.stdout
    assert "torchrun --nproc-per-node 2 examples/fp16_rl.py" in completed.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inject", "4:0"], "must be a step from 1 to 3 and a rank from 0 to 0, got 4:0"),
        (["--accumulate", "0"], "--accumulate must be at least 1 and --text-steps at least 0, got 0 and 10"),
        (["--text-steps", "-1"], "--accumulate must be at least 1 and --text-steps at least 0, got 1 and -1"),
        (["--plot", "plot.txt"], "must end in .png, .svg, .pdf, got plot.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    completed = launch(tmp_path, 1, *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_ends_promptly(tmp_path: Path) -> None:
    command = torch_command(2, PROGRAM, "--steps", 100000, "--text-steps", 0)
    status, errors = interrupted(command, ENVIRONMENT, tmp_path)
    # torchrun ends with 1, and with a traceback of its own, when it is interrupted.
    assert status == 1
    assert errors.count("interrupted\n") == 1, errors
    assert "KeyboardInterrupt" not in errors
    assert list(tmp_path.iterdir()) == []
