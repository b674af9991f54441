"""The command simulate: its table, JSON and picture, and one line for each bad input."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axes import require
from optimizers import Tree
from tiers import later

import gradscale

pytestmark = [pytest.mark.numpy, pytest.mark.usefixtures("cli")]


def run(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from gradscale.tools.cli.app import app

    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    # An error of ours is told by app.run.
    return result.exit_code, result.output if result.exit_code in (0, 2) else str(result.exception)


def rows(*arguments: str) -> list[tuple[Any, ...]]:
    """Return of each preset its name, the steps, those skipped, and the last scale, as the JSON has them."""
    code, output = run(*arguments, "--json")
    assert code == 0, output
    return [tuple(row[name] for name in ("name", "steps", "skipped", "final_scale")) for row in json.loads(output)]


@pytest.mark.tier("all")
def test_a_picture_is_drawn_where_it_is_asked_for_of_the_kinds_that_the_help_names(tmp_path: Path):
    require("plot")
    path = tmp_path / "scales.png"
    assert run("CCOC", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert ".png, .svg or .pdf" in " ".join(run("--help")[1].split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([" "], "' ' is neither a file nor steps: a trace must hold at least one step"),
        (["none.log"], "'none.log' is neither a file nor steps"),
        (["CO" * 2000 + "X"], "'X' at position 4001"),
        (["--preset", "megatorn", "C"], "did you mean 'megatron'"),
        (["--preset", "torch:3", "C"], "has no setting 3"),
        (["--preset", "torch:init_scale=large", "C"], "init_scale must be"),
        (["../other.jsonl"], "without a 'magnitude', in line 1 must be True or False, got None"),
        (["C", "--plot", "none/x.png"], "the plot cannot be written, got 'none/x.png'"),
        *((["C", "-p", f"torch:growth_interval={sign * 50_000}1"], "growth_interval must be") for sign in "-(~[\x1b"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[-1][:30],
)
def test_bad_input_is_one_clear_error(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    require("plot")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, output = run(*arguments)
    assert (code, said in output) == (1, True)
    assert not list(Path().iterdir())


def scaled(*steps: tuple[Any, Any, bool]) -> list[dict[str, Any]]:
    return [dict(zip(("scale", "magnitude", "skipped"), step, strict=True)) for step in steps]


HUGE = 10**400
CLEAN = {"scale": 65536.0, "skipped": False, "reason": None}
OVERFLOW = CLEAN | {"skipped": True, "reason": "overflow"}
MADE = CLEAN | {"counts": {"taken": 2, "overflow": 1}}
KEEPS_SCALE = OVERFLOW | {"reason": "spike", "iteration": 2, "counts": {"taken": 1, "overflow": 0, "spike": 1}}
REFUSED = OVERFLOW | {"reason": "refused", "iteration": 1, "counts": {"taken": 0, "overflow": 1, "refused": 1}}
RETRIED = {"scale": 2.0**20, "new_scale": 65536.0, "skipped": False, "retries": 4}
SIXTEEN = "torch:init_scale=16"
# The rows of a log, the preset, and how many steps there are, how many it skips, and to which scale it comes.
LOGS: dict[str, tuple[list[dict[str, Any]], str, tuple[int, int, float]]] = {
    "beyond every float": (scaled((HUGE, HUGE, True), (2.0, HUGE, True), (1.0, 0, False)), SIXTEEN, (3, 2, 4.0)),
    # As on_skip= and diagnose="on_overflow" write them: the inf beside these finite magnitudes is what overflowed.
    "skips whose magnitude fits": (scaled(*[(65536.0, 0.0625, True)] * 4), SIXTEEN, (4, 4, 1.0)),
    "skips whose magnitude does not fit": (scaled(*[(2.0**20, 0.0625, True)] * 4), SIXTEEN, (4, 0, 16.0)),
    # A closure that was tried again fits at the scale that it came to.
    "retries": ([RETRIED], "torch:init_scale=1048576", (1, 1, 2.0**19)),
    "retries with magnitudes": ([RETRIED | {"magnitude": 0.5}], "torch:init_scale=1048576", (1, 1, 2.0**19)),
    # A resumed run has other counts than the row before it.
    "a spike after a resume": ([OVERFLOW, MADE, KEEPS_SCALE], "torch", (2, 1, 2.0**15)),
    "a refusal beside an overflow after a resume": ([MADE, REFUSED], "torch", (2, 1, 2.0**15)),
    "a spike after a row without counts": ([CLEAN, KEEPS_SCALE], "torch", (1, 0, 2.0**16)),
    "a spike without counts": ([CLEAN, OVERFLOW | {"reason": "spike"}], "torch", (1, 0, 2.0**16)),
}


@pytest.mark.parametrize(("steps", "preset", "expected"), LOGS.values(), ids=LOGS)
def test_a_log_tells_which_steps_overflow(
    steps: list[dict[str, Any]], preset: str, expected: tuple[int, int, float], tmp_path: Path
):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert rows("-p", preset, str(path)) == [(preset, *expected)]


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "skipped is text": (
        {"scale": 2.0, "skipped": "true", "magnitude": 0.1},
        "'skipped' or 'overflow' in line 2 must be",
    ),
    "skipped is a number": ({"scale": 2.0, "skipped": 1}, "'skipped' or 'overflow' in line 2 must be"),
    "overflow is a number": ({"scale": 2.0, "overflow": 1}, "'skipped' or 'overflow' in line 2 must be"),
    "counts of a row before are text": (
        KEEPS_SCALE | {"counts": {"taken": "x"}},
        "'taken' of 'counts' in line 2 must be",
    ),
    **{
        f"{name} is {value}": (
            KEEPS_SCALE | {"counts": {"taken": 1, name: value}},
            f"{name!r} of 'counts' in line 2 must be",
        )
        for name, value in (("overflow", None), ("taken", [1]), ("overflow", {}), ("taken", True), ("over\n", "\x1b"))
    },
    "counts are a number": (KEEPS_SCALE | {"counts": 3}, "'counts' in line 2 must be a mapping, got 3"),
}


@pytest.mark.parametrize(("row", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_row_that_is_of_another_kind_is_named(row: dict[str, Any], said: str, tmp_path: Path):
    require("plot")
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (CLEAN, row, KEEPS_SCALE | {"iteration": 3})))
    code, output = run(str(path))
    assert (code, said in output) == (1, True), output
    if "skipped" in said:
        with pytest.raises(gradscale.InvalidTypeError, match=said):
            gradscale.plot.history(path)


def test_presets_are_rows_side_by_side_and_one_that_a_policy_ends_says_where():
    given = ("torch", "megatron:hysteresis=3", "apex:min_scale=65536", "fairseq:min_scale=65536")
    code, output = run(*(word for name in given for word in ("-p", name)), "COC")
    assert code == 0
    shown = [line for name in given for line in output.splitlines() if line.split()[:1] == [name]]
    assert ["1 of 3 (33.3 %)" in line for line in shown] == [True, True, True, False]
    assert "1 of 2 (50 %), then an error in step 2" in shown[-1]


def test_a_dash_is_the_log_on_stdin():
    log = "".join(f'{{"skipped": {value}}}\n' for value in ("true", "false", "true"))
    command = [sys.executable, "-m", "gradscale", "simulate", "-", "--json"]
    ended = subprocess.run(command, input=log, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [row["skipped"] for row in json.loads(ended.stdout)] == [2]


@pytest.mark.parametrize("seed", [*range(6), *later("ranks", *range(6, 18))])
def test_the_log_of_a_run_brings_its_preset_to_the_same_scale(seed: int, tmp_path: Path):
    """A spike, a refusal or an optimizer that is left out says nothing of the scale, beside others or not."""
    path, chance = tmp_path / "log.jsonl", random.Random(seed)
    scaler = gradscale.GradScaler(
        policy=gradscale.presets.torch(growth_interval=2),
        skip=gradscale.SkipSpikes(of="loss", above=9.0),
        on_update=gradscale.callbacks.JSONLines(path),
        diagnose=chance.choice([None, "on_overflow"]),
    )
    optimizers = [Tree() for _ in range(1 + seed % 2)]
    for _ in range(30):
        for optimizer in optimizers:
            deed = chance.choice(["step", "step", "step", "refuse", "spike", "leave out"])
            scaler.scale(np.float32(10.0 if deed == "spike" else 1.0))
            optimizer.grads = [scaler.scale(np.float32([chance.choice([1.0, 1.0, math.inf])]), loss=False)]
            if deed == "refuse":
                scaler.refuse(optimizer)
            scaler.unscale_(optimizer)
            if deed != "leave out" or np.isfinite(optimizer.grads[0]).all():
                scaler.step(optimizer)
        scaler.update()
    (row,) = rows("-p", "torch:growth_interval=2", str(path))
    assert row[3] == scaler.get_scale()
