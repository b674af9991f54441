"""The recipes for flax.linen, flax.nnx and equinox as a user runs them: they learn, skip, save and resume."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axes import require

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = [
    pytest.param("flax_linen.py", ("flax", "optax"), id="flax-linen"),
    pytest.param("flax_nnx.py", ("flax", "optax", "orbax"), id="flax-nnx"),
    pytest.param("equinox_train.py", ("equinox", "optax"), id="equinox"),
]

pytestmark = [pytest.mark.jax, pytest.mark.tier("all")]


def launch(folder: Path, program: Path, libraries: tuple[str, ...], *arguments: object) -> str:
    """Run a recipe that succeeds, and return what it has printed."""
    for library in ("jax", "examples", *libraries):
        require(library)
    completed = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stdout


@pytest.mark.parametrize(("name", "libraries"), RECIPES)
def test_a_recipe_learns_skips_and_resumes(tmp_path: Path, name: str, libraries: tuple[str, ...]) -> None:
    printed = launch(tmp_path, EXAMPLES / name, libraries)
    result = re.search(r"accuracy ([\d.]+)%, skipped (\d+) of 200 steps, final scale ([\d.e+]+)", printed)
    assert result, printed
    assert float(result[1]) > 93
    # 2**24 is too large by a few halvings, of one skipped step each; then it doubles again every 50 steps.
    assert 1 <= int(result[2]) <= 20
    assert 2.0**12 <= float(result[3]) < 2.0**24
    assert re.search(r"resumed with scale [\d.e+]+", printed), printed
    assert list(tmp_path.iterdir()) == []
    # What it computes is what it would have computed without having been saved and resumed.
    source = (EXAMPLES / name).read_text()
    assert source.count("if step == options.steps // 2:") == 1
    unbroken = tmp_path / name
    unbroken.write_text(source.replace("if step == options.steps // 2:", "if step < 0:"))
    straight = launch(tmp_path, unbroken, libraries)
    assert "resumed" not in straight
    assert printed.splitlines()[-1] == straight.splitlines()[-1]


@pytest.mark.parametrize(("name", "libraries"), RECIPES)
def test_a_recipe_explains_itself(tmp_path: Path, name: str, libraries: tuple[str, ...]) -> None:
    assert f"python examples/{name}" in launch(tmp_path, EXAMPLES / name, libraries, "--help")
