"""The README's code runs as it stands, and its commands are the ones that are tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require, require_program
from worlds import mpi_command, mpi_environment

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = dict(re.findall(r"<!-- command: (\w+) -->\n```sh\n(.*?)```", README, flags=re.DOTALL))
BLOCKS = re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", README, flags=re.DOTALL)


def test_every_block_of_python_is_run() -> None:
    assert {name for name, _ in BLOCKS} == {
        *("mpi", "functional", "single", "adapter", "testing", "torch", "jax", "reports", "presets", "cupy"),
    }
    assert len(re.findall(r"```python", README)) == len(BLOCKS)


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_block_runs(name: str, code: str, tmp_path: Path) -> None:
    # Not by the name of the library that it imports.
    program = tmp_path / f"block_{name}.py"
    program.write_text(code)
    command = [sys.executable, str(program)]
    environment = mpi_environment()
    if name in ("torch", "jax"):
        require(name)
    if name == "cupy":
        # Not on a GPU, but with the stand-in of the adapter's tests.
        require_program("c++")
        (tmp_path / "sitecustomize.py").write_text("import host_cupy\nkept = host_cupy.installed()\nkept.__enter__()\n")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path, ROOT / "tests" / "support")))
    if name == "mpi":
        require("mpi")
        command = mpi_command(2, program)
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path
    )
    assert completed.returncode == 0, completed.stderr
    if name == "cupy":
        assert "[True, False, False]" in completed.stdout
        assert "0.25" in completed.stdout
    if name == "mpi":
        printed = re.findall(r"\[(.*?)\]", completed.stdout)
        assert len(printed) == 2
        for weights in printed:
            assert [float(weight) for weight in weights.split()] == pytest.approx([1, -2, 3, -4], abs=0.01)


def test_the_commands_are_those_that_are_known() -> None:
    assert set(COMMANDS) == {"digits", "fsdp", "lightning", "jax", "tests"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_is_one_line_that_says_how_long_it_takes_and_what_it_downloads(name: str) -> None:
    line, end = COMMANDS[name].split("\n")
    assert end == ""
    start = "python3 -m venv .venv && .venv/bin/python -m pip install "
    assert re.fullmatch(re.escape(start) + r"[^&|;]+ && \.venv/bin/[^&|;]+", line), line
    before = README.partition(f"<!-- command: {name} -->")[0].rstrip().rpartition("\n\n")[2]
    assert re.search(r"takes about \d+ minutes?\b", before), before
    assert re.search(r"downloads (\d+ [MG]B|as much)", " ".join(before.split())), before


def test_the_documents_tell_nothing_of_the_machine_they_were_written_on() -> None:
    documents = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("examples/*.py")]
    for path in documents:
        assert not re.search(r"/(root|work|home|tmp|opt)/", path.read_text()), path
