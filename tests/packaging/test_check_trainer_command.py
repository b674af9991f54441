"""``gradscale check-trainer``: what it prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ran

pytestmark = [pytest.mark.tier("ranks"), pytest.mark.usefixtures("cli")]

LOOPS = """
class Right:
    weight, lr, scale = 1.0, 0.5, 1.0

    def __init__(self, init_scale=1.0):
        self.scale = init_scale

    def step(self, index, fault):
        grad = self.scale * fault * self.weight
        if grad - grad == 0.0:
            self.weight -= self.lr * grad / self.scale
            self.lr /= 2.0

    def state(self):
        return {"weight": self.weight, "lr": self.lr}

    def save(self):
        return dict(vars(self))

    def load(self, saved):
        vars(self).update(saved)


class Faulty(Right):
    def step(self, index, fault):
        super().step(index, fault)
        self.lr *= 0.9


class NoState:
    def step(self, index, fault): ...
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "loops.py").write_text(LOOPS)
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"} | variables
    return ran(sys.executable, "-m", "gradscale", "check-trainer", *arguments, folder=folder, **environment)


def test_a_loop_that_is_right_ends_with_0(tmp_path: Path):
    completed = run(tmp_path, "loops:Right", "--timeout", "30")
    assert (completed.returncode, completed.stdout) == (0, "check_trainer: 21 runs, faults: 0\n"), completed.stderr
    assert completed.stderr == "21 runs\n"


@pytest.mark.tier("all")
def test_faults_are_lines_and_the_code_is_1(tmp_path: Path):
    completed = run(tmp_path, "loops:Faulty")
    assert completed.returncode == 1, completed.stderr
    head, *lines = completed.stdout.splitlines()
    assert head == "check_trainer: 21 runs, faults: 6"
    assert len(lines) == 6
    assert all(
        line.startswith("rule 1: after the ") and "a schedule that counts skipped steps?" in line for line in lines
    )
    printed = run(tmp_path, "loops:Faulty", "--json")
    data = json.loads(printed.stdout)
    assert (printed.returncode, data["ok"], data["runs"], len(data["faults"])) == (1, False, 21, 6)
    first = {"rule": 1, "kind": "nan", "rank": 0, "step": 0, "part": "lr", "line": lines[0]}
    assert data["faults"][0] == first
    coloured = run(tmp_path, "loops:Faulty", FORCE_COLOR="1", TERM="xterm", NO_COLOR="")
    assert coloured.stdout.count("\x1b[31m") == 6


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("loops:NoState", "'NoState' object has no attribute 'state'"),
        ("loops:Nothing", "module 'loops' has no attribute 'Nothing'"),
        ("nowhere:Right", "No module named 'nowhere'"),
        ("not a name", "invalid format"),
    ],
)
def test_a_wrong_class_ends_with_2(trainer: str, words: str, tmp_path: Path):
    completed = run(tmp_path, trainer)
    assert completed.returncode == 2
    assert words in " ".join(completed.stderr.replace("│", " ").split())
    assert completed.stdout == ""
