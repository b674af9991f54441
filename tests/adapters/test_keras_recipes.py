"""The recipes for Keras on torch and on JAX: they skip, hold what must hold, and equal Keras's own to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from axes import require

SUPPORT = Path(__file__).parents[1] / "support"
OVERFLOWS = [1, 3, 8]  # of 8 batches

pytestmark = pytest.mark.tier("all")


def trained(backend: str, folder: Path) -> dict[str, Any]:
    """Run the recipe for a backend in a process of its own, and return what it tells."""
    require(backend)
    # Not imported here, where it would settle on a backend.
    if importlib.util.find_spec("keras") is None:
        require("keras")
    inherited = os.environ.get("PYTHONPATH", "")
    ended = subprocess.run(
        [sys.executable, str(SUPPORT / "keras_runner.py"), json.dumps(OVERFLOWS), str(folder)],
        env=os.environ
        | {
            "KERAS_BACKEND": backend,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SUPPORT), inherited))),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_keras_skips_as_by_its_own_optimizer(backend: str, tmp_path: Path) -> None:
    answer = trained(backend, tmp_path)
    assert answer["recipe"] == answer["own"]
    assert answer["recipe"]["iterations"] == 5
    assert answer["scale"] == answer["own_scale"] == 2.0**13
    assert answer["tracker"] == answer["own_tracker"] == 0
    if backend == "torch":
        assert answer["skipped"] == [batch in OVERFLOWS for batch in range(1, 9)]
    # Saved, loaded and trained on.
    assert answer["loaded_on"] == answer["on"]
    assert answer["on"]["iterations"] == 12
    assert answer["on"].get("scale", 2.0**12) == 2.0**12
