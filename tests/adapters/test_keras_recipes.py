"""Keras on torch and on JAX: its recipes skip, hold what must hold, and equal Keras's own scaler to the bit."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from axes import require
from commands import python

SUPPORT = Path(__file__).parents[1] / "support"
BACKENDS = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]

pytestmark = pytest.mark.tier("all")


def need(backend: str):
    require(backend)
    # Not imported here, where it would settle on a backend.
    if importlib.util.find_spec("keras") is None:
        require("keras")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_recipe_skips_as_keras_does_and_what_keras_calls_and_saves_serves(backend: str, tmp_path: Path):
    need(backend)
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ended = python(SUPPORT / "keras_runner.py", tmp_path, seconds=240, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_on_another_backend_is_an_error_that_says_how_to_choose_it(backend: str):
    need(backend)
    ended = python("-c", f"import gradscale_{backend}.keras_optimizer", KERAS_BACKEND="numpy")
    said = f"gradscale_{backend}.keras_optimizer needs Keras on {backend}, got: Keras on numpy; "
    assert ended.stderr.splitlines()[-1].partition("Error: ")[2].startswith(said)
    assert ended.stderr.strip().endswith(f"and set KERAS_BACKEND={backend} before it is imported")
