"""The command simulate: its table, JSON and picture, and one line for each bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axes import require

pytestmark = pytest.mark.numpy


def run(*arguments: str) -> tuple[int, str]:
    typer = require("cli")
    from typer.testing import CliRunner

    from gradscale.tools.cli.simulate import simulate

    app = typer.Typer()
    app.command()(simulate)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    return result.exit_code, result.output


def test_presets_are_compared_over_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"skipped": {value}}}\n' for value in ("true", "false", "true")))
    code, output = run("--preset", "torch:init_scale=2**4", "--preset", "megatron", "--json", str(path))
    assert code == 0
    assert [(row["name"], row["skipped"]) for row in json.loads(output)] == [
        ("torch:init_scale=2**4", 2),
        ("megatron", 2),
    ]
    assert json.loads(output)[0]["final_scale"] == 4.0


@pytest.mark.tier("all")
def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path) -> None:
    require("plot")
    path = tmp_path / "scales.png"
    assert run("CCOC", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CCX"], "'X' at position 3"),
        ([" "], "' ' is neither a file nor steps: a trace must hold at least one step"),
        ([], "TRACE: give a log such as scale.jsonl, or steps such as CCOC"),
        (["--preset", "megatorn", "C"], "megatron"),
        (["--preset", "torch:hysteresis=3", "C"], "hysteresis"),
        (["--preset", "torch:3", "C"], "NAME=VALUE"),
        (["--preset", "torch:init_scale=1,init_scale=2", "C"], "init_scale is given twice"),
        (["none.jsonl"], "No such file"),
        (["none.log"], "'none.log' is neither a file nor steps"),
        (["../other.jsonl"], "in line 1 of '../other.jsonl' the keys ['a']"),
        (["CO" * 2000 + "X"], "'X' at position 4001"),
        (["--preset", "torch:init_scale=9**999999999", "C"], "init_scale"),
        (["--preset", "torch:init_scale=2.0**-99999", "C"], "init_scale"),
        (["C", "--plot", "none/x.png"], "the plot cannot be written, got 'none/x.png'"),
        (["C", "--plot", "x.txt"], "must be a kind of file"),
        (["../log.jsonl"], "line 2 of"),
        (["/dev/zero"], "the log must be a file or a pipe, got '/dev/zero', a device"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("plot")
    (tmp_path / "log.jsonl").write_text('{"skipped": true}\nnonsense\n')
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, output = run(*arguments)
    assert code in (1, 2)
    assert said in output
    assert not list(Path().iterdir())


def test_steps_that_are_too_many_for_the_name_of_a_file_are_steps() -> None:
    code, output = run("C" * 5000, "--json")
    assert code == 0
    assert json.loads(output)[0]["steps"] == 5000


HUGE = f"1{'0' * 400}"
LOGS = {
    "beyond-every-float": ([(HUGE, HUGE, True), (2.0, HUGE, True), (0, 0, True)], 2),
    # As on_skip= and diagnose="on_overflow" write them: the inf beside these finite magnitudes is what overflowed.
    "skips-whose-magnitude-fits": ([(65536.0, 0.0625, True)] * 4, 4),
    "skips-whose-magnitude-does-not-fit": ([(2.0**20, 0.0625, True)] * 4, 0),
    # One skip that its magnitude does not explain makes all skips those of the log.
    "a-clean-step-between": ([(65536.0, 0.0625, skipped) for skipped in (True, False, True)], 2),
}


@pytest.mark.parametrize(("steps", "skipped"), LOGS.values(), ids=LOGS)
def test_the_magnitudes_of_a_log_tell_which_steps_overflow(
    steps: list[tuple[Any, Any, bool]], skipped: int, tmp_path: Path
) -> None:
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
def test_a_step_that_moves_no_scale_is_no_overflow(reason: str, magnitude: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("width", [60, 200])
def test_no_number_is_broken_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    require("cli")
    from rich.console import Console

    monkeypatch.setattr("gradscale.tools.cli.simulate.console", lambda: Console(width=width))
    code, output = run("-p", "torch", "-p", "megatron:hysteresis=3", "COC")
    assert code == 0
    lines = output.splitlines()
    assert all(len(line) <= width for line in lines)
    assert any("megatron:hysteresis=3" in line for line in lines)
    assert any("4294967296" in line for line in lines)
    assert "so every preset skips the same ones" in " ".join(output.split())


def test_a_run_that_a_policy_ends_says_where() -> None:
    code, output = run("-p", "apex:min_scale=65536", "-p", "fairseq:min_scale=65536", "COC")
    assert code == 0
    assert "2 (stopped early)" in output
    assert "error in step" in output


def test_a_power_is_a_number_of_its_kind() -> None:
    code, output = run("--preset", "torch:growth_interval=2**2", "--json", "C" * 4)
    assert code == 0
    assert json.loads(output)[0]["final_scale"] == 2.0**17


def test_a_dash_is_the_log_on_stdin() -> None:
    require("cli")
    rows = "".join(f'{{"skipped": {value}}}\n' for value in ("true", "false", "true"))
    command = [sys.executable, "-m", "gradscale", "simulate", "-", "--json"]
    ended = subprocess.run(command, input=rows, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [row["skipped"] for row in json.loads(ended.stdout)] == [2]
