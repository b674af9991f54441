"""The command simulate: its table, JSON and picture, and one line for each bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from optimizers import Tree

import gradscale

pytestmark = [pytest.mark.numpy, pytest.mark.usefixtures("cli")]


def run(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from gradscale.tools.cli.app import app

    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    # An error of ours is told by app.run.
    return result.exit_code, result.output if result.exit_code in (0, 2) else str(result.exception)


def test_presets_are_compared_over_a_log(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"skipped": {value}}}\n' for value in ("true", "false", "true")))
    code, output = run("--preset", "torch:init_scale=16", "--preset", "megatron", "--json", str(path))
    assert code == 0
    assert [(row["name"], row["skipped"]) for row in json.loads(output)] == [
        ("torch:init_scale=16", 2),
        ("megatron", 2),
    ]
    assert json.loads(output)[0]["final_scale"] == 4.0


@pytest.mark.tier("all")
def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path):
    require("plot")
    path = tmp_path / "scales.png"
    assert run("CCOC", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_preset_that_is_like_none_is_answered_with_all_of_them_and_no_guess():
    code, output = run("--preset", "nosuch", "C")
    assert code == 1
    assert "there are apex, " in output
    assert "did you mean" not in output


@pytest.mark.tier("all")
def test_the_help_says_which_kinds_of_picture_there_are():
    code, output = run("--help")
    assert code == 0
    assert ".png, .svg or .pdf" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CCX"], "'X' at position 3"),
        ([" "], "' ' is neither a file nor steps: a trace must hold at least one step"),
        (["--preset", "megatorn", "C"], "megatron"),
        (["--preset", "torch:hysteresis=3", "C"], "hysteresis"),
        (["--preset", "torch:3", "C"], "has no setting 3"),
        (["--preset", "torch:init_scale=large", "C"], "init_scale must be"),
        (["none.jsonl"], "'none.jsonl' is neither a file nor steps"),
        (["none.log"], "'none.log' is neither a file nor steps"),
        (["../other.jsonl"], "without a 'magnitude', in line 1 must be True or False, got None"),
        (["CO" * 2000 + "X"], "'X' at position 4001"),
        (["C", "--plot", "none/x.png"], "the plot cannot be written, got 'none/x.png'"),
        (["C", "--plot", "x.txt"], "must be a kind of file"),
        (["../log.jsonl"], "line 2 of"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require("plot")
    (tmp_path / "log.jsonl").write_text('{"skipped": true}\nnonsense\n')
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, output = run(*arguments)
    assert code in (1, 2)
    assert said in output
    assert not list(Path().iterdir())


HUGE = f"1{'0' * 400}"
LOGS = {
    "beyond-every-float": ([(HUGE, HUGE, True), (2.0, HUGE, True), (1.0, 0, False)], 2),
    # As on_skip= and diagnose="on_overflow" write them: the inf beside these finite magnitudes is what overflowed.
    "skips-whose-magnitude-fits": ([(65536.0, 0.0625, True)] * 4, 4),
    "skips-whose-magnitude-does-not-fit": ([(2.0**20, 0.0625, True)] * 4, 0),
    "a-clean-step-between": ([(65536.0, 0.0625, skipped) for skipped in (True, False, True)], 2),
}


@pytest.mark.parametrize(("steps", "skipped"), LOGS.values(), ids=LOGS)
def test_the_magnitudes_of_a_log_tell_which_steps_overflow(
    steps: list[tuple[Any, Any, bool]], skipped: int, tmp_path: Path
):
    path = tmp_path / "log.jsonl"
    path.write_text(
        "".join(
            f'{{"scale": {scale}, "magnitude": {magnitude}, "skipped": {str(was_skipped).lower()}}}\n'
            for scale, magnitude, was_skipped in steps
        )
    )
    assert [row["skipped"] for row in json.loads(run(str(path), "--json")[1])] == [skipped]


@pytest.mark.parametrize("magnitude", ["", ', "magnitude": 0.0625'], ids=["", "with magnitudes"])
@pytest.mark.parametrize("reason", ["spike", "refused"])
def test_a_step_that_moves_no_scale_is_no_overflow(reason: str, magnitude: str, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    clean, held, overflow = (
        f'{{"scale": 65536.0, "skipped": {skipped}, "reason": {why}{magnitude}}}\n'
        for skipped, why in (("false", "null"), ("true", f'"{reason}"'), ("true", '"overflow"'))
    )
    path.write_text(clean + held * 5 + overflow + clean)
    (row,) = json.loads(run(str(path), "--json", "-p", "torch:growth_interval=2")[1])
    assert (row["steps"], row["skipped"], row["final_scale"]) == (3, 1, 2.0**15)
    path.write_text(clean + held + clean)
    (row,) = json.loads(run(str(path), "--json", "-p", "torch:growth_interval=2")[1])
    assert (row["skipped"], row["final_scale"]) == (0, 2.0**17)


def test_the_counts_tell_a_spike_that_was_left_out_from_an_overflow(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    rule = gradscale.SkipSpikes(window=4)
    scaler = gradscale.GradScaler(skip=rule, on_update=gradscale.callbacks.JSONLines(path))
    optimizer = Tree()
    for value in (1.0, 1.1, 0.9, 1.0, 1000.0, math.inf, 1.0):
        optimizer.grads = [scaler.scale(np.float32([value]), loss=value)]
        scaler.unscale_(optimizer)
        if value < 1000.0:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.counts() == {"taken": 5, "overflow": 1, "spike": 1, "refused": 0}
    (row,) = json.loads(run(str(path), "--json")[1])
    assert (row["steps"], row["skipped"], row["final_scale"]) == (6, 1, 2.0**15)


@pytest.mark.parametrize("magnitude", ["", ', "magnitude": 0.5'], ids=["", "with magnitudes"])
def test_a_step_whose_closure_was_tried_again_fits_at_the_scale_that_it_came_to(magnitude: str, tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"scale": 1048576.0, "new_scale": 65536.0, "skipped": false, "retries": 4{magnitude}}}\n')
    (row,) = json.loads(run(str(path), "--json", "-p", "torch:init_scale=1048576")[1])
    assert (row["skipped"], row["final_scale"]) == (1, 2.0**19)


def test_presets_are_rows_side_by_side():
    code, output = run("-p", "torch", "-p", "megatron:hysteresis=3", "COC")
    assert code == 0
    assert [line.split()[0] for line in output.splitlines() if "1 of 3 (33.3 %)" in line] == [
        "torch",
        "megatron:hysteresis=3",
    ]


def test_a_run_that_a_policy_ends_says_where():
    code, output = run("-p", "apex:min_scale=65536", "-p", "fairseq:min_scale=65536", "COC")
    assert code == 0
    assert "1 of 2 (50 %), then an error in step 2" in output


def test_a_dash_is_the_log_on_stdin():
    rows = "".join(f'{{"skipped": {value}}}\n' for value in ("true", "false", "true"))
    command = [sys.executable, "-m", "gradscale", "simulate", "-", "--json"]
    ended = subprocess.run(command, input=rows, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [row["skipped"] for row in json.loads(ended.stdout)] == [2]
