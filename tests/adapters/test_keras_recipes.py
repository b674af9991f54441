"""Keras on torch and on JAX: its recipes skip, hold what must hold, and equal Keras's own scaler to the bit."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from axes import require
from commands import python

SUPPORT = Path(__file__).parents[1] / "support"
OVERFLOWS = [1, 3, 8]  # of 8 batches

pytestmark = pytest.mark.tier("all")


def told(backend: str, *arguments: str):
    """Run what there is for a backend in a process of its own, and return what it tells."""
    require(backend)
    # Not imported here, where it would settle on a backend.
    if importlib.util.find_spec("keras") is None:
        require("keras")
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    variables = {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ended = python(SUPPORT / "keras_runner.py", *arguments, seconds=200, **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


BACKENDS = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_skips_as_by_its_own_optimizer(backend: str, tmp_path: Path):
    answer = told(backend, "recipe", json.dumps(OVERFLOWS), str(tmp_path))
    assert answer["recipe"] == answer["own"] == answer["moved"]
    assert answer["recipe"]["iterations"] == 5
    assert answer["scale"] == answer["own_scale"] == answer["moved_scale"] == [2.0**13, 0]
    if backend == "torch":
        assert answer["skipped"] == [batch in OVERFLOWS for batch in range(1, 9)]
    # Saved, loaded and trained on.
    assert answer["loaded_on"] == answer["on"]
    assert answer["on"]["iterations"] == 12
    assert answer["on"]["scale"] == [2.0**12, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_class_for_keras_follows_any_policy_outside_of_fit_and_refuses_what_it_cannot_use(backend: str):
    answer = told(backend, "calls")
    assert answer["example"]["failed"] == 0 < answer["example"]["attempted"]
    # The first overflow is tolerated, and the second one is not.
    assert answer["seen"] == [[8.0, -1.0], [8.0, -1.0], [8.0, -1.0], [4.0, -3.0]]
    assert answer["saved"] == answer["kept"]
    assert answer["in any order"][0] == answer["in any order"][1]
    assert (
        answer["no variables"] == "InvalidValueError: apply needs the variables, got none; call apply(grads, variables)"
    )
    assert answer["bad state"].startswith("StateDictError: ")
    assert "'twice'" in answer["bad state"]
    given = ("str", "NoneType", "int", "type", "dict", "LossScaleOptimizer", "ScaledOptimizer")
    for kind, said in zip(given, answer["no optimizer"], strict=True):
        assert said.startswith("InvalidTypeError: inner_optimizer must be an optimizer of Keras that does not scale")
        assert f"got a {kind}: for a name call keras.optimizers.get(name); an optimizer that scales already" in said
        assert "would divide the gradients twice: pass the one inside" in said
    if backend == "jax":
        assert answer["no scaler"].startswith("InvalidTypeError: policy must be an instance of a policy")
        assert answer["no policy"].startswith("InvalidValueError: the saved optimizer has a policy of your own")
    else:
        assert answer["no scaler"].startswith("InvalidTypeError: scaler must be a GradScaler or ShardedGradScaler")
        # It is the scaler's own then, as with torch's state dicts.
        assert answer["no policy"] == "nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_keras_saves_without_the_model_keep_the_scale(backend: str, tmp_path: Path):
    answer = told(backend, "weights", str(tmp_path))
    assert answer["scale"] == answer["loaded"] == answer["restored"] == [2.0**14, 5]
    if backend == "torch":
        assert answer["kept where absent"] == 8.0
        assert answer["disabled"] == [False, True]
        # As Keras's own optimizer does, which casts gradients to the dtype of the weight; and after Ctrl-C.
        assert answer["stepped"] == [0.75] * 4 + [0.5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_on_another_backend_is_an_error_that_says_how_to_choose_it(backend: str):
    require(backend)
    if importlib.util.find_spec("keras") is None:
        require("keras")
    ended = python("-c", f"import gradscale_{backend}.keras_optimizer", KERAS_BACKEND="numpy")
    said = f"gradscale_{backend}.keras_optimizer needs Keras on {backend}, got: Keras on numpy; "
    assert ended.stderr.splitlines()[-1].partition("Error: ")[2].startswith(said)
    assert ended.stderr.strip().endswith(f"and set KERAS_BACKEND={backend} before it is imported")
