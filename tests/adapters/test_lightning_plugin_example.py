"""The Lightning example as a user runs it: overflow, checkpoint and resume, refused options, Ctrl-C."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axes import require
from programs import CHANGED

PROGRAM = Path(__file__).parents[2] / "examples" / "lightning_plugin.py"
VERIFIED = "verified: weights, optimizer and scaler state of the resumed run are bit-identical to those of one run"
# A machine with a GPU says on stderr that the example leaves it unused.
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}

pytestmark = [pytest.mark.torch, pytest.mark.tier("all")]


@pytest.fixture(autouse=True)
def libraries() -> None:
    for name in ("torch", "lightning", "examples"):
        require(name)


def launch(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def run(folder: Path, *arguments: object) -> list[str]:
    """Run the example, which must succeed without a word on stderr, and return the lines that it prints."""
    completed = launch(folder, PROGRAM, *arguments)
    assert (completed.returncode, completed.stderr) == (0, ""), completed.stdout + completed.stderr
    return completed.stdout.splitlines()


def parts(lines: list[str], epochs: int) -> dict[str, list[str]]:
    """Return what was printed under each of the three headings."""
    half = epochs // 2
    headings = [
        f"{epochs} epochs in one run",
        f"{half} epochs, and a checkpoint",
        f"{epochs - half} more epochs, from the checkpoint",
    ]
    assert [line for line in lines if line in headings] == headings
    positions = [lines.index(heading) for heading in headings]
    through, stopped, resumed = (
        [line.strip() for line in lines[begin + 1 : end] if line.startswith("  ")]
        for begin, end in zip(positions, [*positions[1:], None], strict=True)
    )
    return {"through": through, "stopped": stopped, "resumed": resumed}


def skips(lines: list[str]) -> list[tuple[int, int, int]]:
    """Return step, and the scale's exponent before and after, of every skipped step."""
    pattern = r"step (\d+): overflow in \d+ gradients?, skipped; scale 2\^(\d+) -> 2\^(\d+)"
    found = [re.fullmatch(pattern, line) for line in lines if line.startswith("step")]
    return [(int(match[1]), int(match[2]), int(match[3])) for match in found if match is not None]


def test_it_learns_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    lines = run(tmp_path, "--inject", 100)
    runs = {name: skips(part) for name, part in parts(lines, 20).items()}
    through = runs["through"]
    # 65536 doubles after 40 and after 80 clean steps.
    assert (100, 18, 17) in through
    assert all(after == before - 1 for _, before, after in through)
    assert through == runs["stopped"] + runs["resumed"]
    assert [step for step, *_ in runs["stopped"]] == [step for step, *_ in through if step <= 120]
    match = re.fullmatch(r"test accuracy (\d+\.\d)% after (\d+) steps, and (\d+) skipped", lines[-2])
    assert match is not None
    assert float(match[1]) > 93
    assert (int(match[2]), int(match[3])) == (240 - len(through), len(through))
    assert lines[-1] == VERIFIED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [(1, 30, 48), (24, 25)], ids=["first-and-last", "around-the-checkpoint"])
def test_each_injected_overflow_skips_one_step(tmp_path: Path, steps: tuple[int, ...]) -> None:
    injections = [text for step in steps for text in ("--inject", step)]
    lines = run(tmp_path, "--epochs", 4, *injections)
    runs = {name: skips(part) for name, part in parts(lines, 4).items()}
    halvings = [(step, 16 - count, 15 - count) for count, step in enumerate(steps)]
    assert runs["through"] == halvings
    assert runs["stopped"] == [halving for halving in halvings if halving[0] <= 24]
    assert runs["resumed"] == [halving for halving in halvings if halving[0] > 24]
    assert lines[-2].endswith(f" after {48 - len(steps)} steps, and {len(steps)} skipped")
    assert lines[-1] == VERIFIED


def test_the_checkpoint_that_is_kept_serves_torchs_scaler(tmp_path: Path) -> None:
    torch: Any = require("torch")
    lines = run(tmp_path, "--epochs", 4, "--inject", 9, "--checkpoint", "digits.ckpt")
    assert parts(lines, 4)["stopped"][-1] == "saved: scale 32768, 15 clean steps of 40"
    assert [path.name for path in tmp_path.iterdir()] == ["digits.ckpt"]
    saved = torch.load(tmp_path / "digits.ckpt", weights_only=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved["MixedPrecision"])
    assert scaler.state_dict() == saved["MixedPrecision"]
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.get_growth_interval()) == (2.0**15, 15, 40)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "    saved = stopped.precision_plugin",
            "    content = torch.load(checkpoint)\n    content.pop('MixedPrecision')\n"
            "    torch.save(content, checkpoint)\n"
            "    saved = stopped.precision_plugin",
            "FAILED: the resumed run has come to another state",
            id="scaler-state-lost",
        ),
        pytest.param(
            "Injection(options.inject)",
            "Injection([])",
            "FAILED: overflow was injected at [3], and skipped were []",
            id="overflow-unseen",
        ),
    ],
)
def test_a_run_that_goes_wrong_is_not_verified(tmp_path: Path, old: str, new: str, message: str) -> None:
    completed = launch(tmp_path, "-c", CHANGED, old, new, PROGRAM, "--epochs", 2, "--inject", 3)
    assert completed.returncode == 1, completed.stderr
    assert completed.stdout.splitlines()[-1] == message
    assert "verified" not in completed.stdout


@pytest.fixture(scope="module")
def program() -> Iterator[dict[str, Any]]:
    """Return the example's functions, imported once: that takes longer than to run them."""
    require("lightning")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAM.parent)
        yield runpy.run_path(str(PROGRAM))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "1"], "--epochs must be at least 2 and --seed at least 0, got 1 and 0"),
        (["--seed", "-1"], "--epochs must be at least 2 and --seed at least 0, got 20 and -1"),
        (["--inject", "0"], "argument --inject: must be a step from 1 to 240, got 0"),
        (["--inject", "241"], "argument --inject: must be a step from 1 to 240, got 241"),
        (["--inject", "x"], "argument --inject: invalid int value: 'x'"),
        (["--checkpoint", "missing/x.ckpt"], "must be a file in a folder that exists, got missing/x.ckpt"),
        (["--checkpoint", "."], "must be a file in a folder that exists, got ."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused(
    program: dict[str, Any],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    with pytest.raises(SystemExit) as refusal:
        program["main"]()
    assert refusal.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_refusal_is_no_traceback(tmp_path: Path) -> None:
    completed = launch(tmp_path, PROGRAM, "--epochs", 4, "--inject", 49)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.endswith("error: argument --inject: must be a step from 1 to 48, got 49\n")
    assert "Traceback" not in completed.stderr


def test_help_names_every_option(tmp_path: Path) -> None:
    text = "\n".join(run(tmp_path, "--help"))
    for option in ("--epochs", "--seed", "--inject STEP", "--checkpoint FILE"):
        assert option in text


def test_an_interrupt_ends_it_with_130(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(PROGRAM), "--epochs", "1000"]
    with subprocess.Popen(
        command, env=ENVIRONMENT, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1000 epochs in one run\n"
        # The second line comes from within the training.
        assert "overflow" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\ninterrupted\n")
    assert list(tmp_path.iterdir()) == []
