"""The command line itself: help, versions, errors, Ctrl-C."""

import subprocess
import sys
from pathlib import Path

import pytest
from axes import require
from commands import python, ran

import gradscale

pytestmark = [pytest.mark.tier("all"), pytest.mark.usefixtures("cli")]

COMMANDS = ("doctor", "check", "check-trainer", "simulate")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    return python("-m", "gradscale", *arguments, **(plain | environment))


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_has_examples_and_flags_take_no_value(command: str):
    completed = run(*command.split(), "--help")
    assert completed.returncode == 0, completed.stderr
    assert f"Usage: gradscale {command}".strip() in completed.stdout
    assert "Examples: " in completed.stdout
    assert command or all(one in completed.stdout for one in COMMANDS)
    assert ("--json" in completed.stdout, "--help" in completed.stdout) == (bool(command), True)
    assert "bool" not in completed.stdout.lower()


def test_the_script_and_the_module_are_the_same_program():
    script = Path(sys.executable).with_name("gradscale")
    assert script.exists()
    for completed in (ran(script, "--version"), run("--version")):
        assert (completed.returncode, completed.stdout) == (0, f"gradscale {gradscale.__version__}\n")


@pytest.mark.tier("quick")
def test_a_column_that_stays_empty_is_left_out(capsys: pytest.CaptureFixture[str]):
    from gradscale.tools.cli.output import console, table

    console().print(table(("what", "version", "details"), [("a", "", "one"), ("b", "", "")]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "─" not in line and line.strip()]
    assert lines == [["what", "details"], ["a", "one"], ["b"]]


@pytest.mark.tier("quick")
@pytest.mark.parametrize("file", ["", "run.svg"])
def test_a_log_is_drawn_beside_itself_or_where_it_is_said(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from typer.testing import CliRunner

    from gradscale.tools.cli.app import app

    require("plot")
    monkeypatch.chdir(tmp_path)
    Path("scale.jsonl").write_text('{"iteration": 1, "scale": 65536.0, "skipped": true}\n' * 2)
    result = CliRunner().invoke(app, ["plot", "scale.jsonl", *file.split()])
    wanted = file or "scale.png"
    assert (result.exit_code, result.output) == (0, f"{wanted}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"scale.jsonl", wanted}
    assert Path(wanted).read_bytes().startswith(b"\x89PNG" if wanted.endswith("png") else b"<?xml")


@pytest.mark.tier("quick")
def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from gradscale.tools.cli import app

    def ended(**_: object):
        raise gradscale.InvalidValueError("two\nlines")

    monkeypatch.setattr(app, "app", ended)
    with pytest.raises(SystemExit) as left:
        app.run([])
    assert left.value.code == 1
    assert capsys.readouterr() == ("", "gradscale: two\\nlines\n")
