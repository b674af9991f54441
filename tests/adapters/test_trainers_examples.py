"""The example of MLX, whose step can be called by itself, keeps the rules of check_trainer."""

from __future__ import annotations

import argparse
import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

import gradscale
from gradscale.testing import check_trainer

pytestmark = pytest.mark.tier("all")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Return what imports a program of the examples."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


class OfMlx:
    """A step of train_mlx.py."""

    def __init__(self, program: Any, is_compiled: bool):
        mx, optim = importlib.import_module("mlx.core"), importlib.import_module("mlx.optimizers")
        self.mx, self.model = mx, program.make_model()
        self.optimizer = optim.AdamW(optim.cosine_decay(0.02, 8))
        self.guard = gradscale.StepGuard(group=mx.distributed.init())
        make = program.compiled if is_compiled else functools.partial(program.guarded, guard=self.guard)
        self.make_step = make(self.model, self.optimizer)
        options = argparse.Namespace(steps=8, bad=-1, rank=0)
        self.batches = program.batches(options, mx.distributed.init(), False)

    def step(self, index: int, fault: float):
        x, y = self.batches[index]
        self.make_step(x, y * fault)

    def state(self):
        return {"model": self.model.parameters(), "optimizer": self.optimizer.state, "scaler": self.guard.state_dict()}

    def save(self):
        tree_map = importlib.import_module("mlx.utils").tree_map
        return tree_map(lambda x: x + 0 if isinstance(x, self.mx.array) else x, self.state())

    def load(self, saved: Any):
        self.model.update(saved["model"])
        self.optimizer.state.update(saved["optimizer"])
        self.guard.load_state_dict(saved["scaler"])


@pytest.mark.mlx
@pytest.mark.parametrize("is_compiled", [False, True], ids=["guarded", "compiled"])
def test_a_step_of_mlx_has_no_fault(example, is_compiled: bool):
    program = example("train_mlx")
    assert check_trainer(lambda: OfMlx(program, is_compiled)).faults == []
