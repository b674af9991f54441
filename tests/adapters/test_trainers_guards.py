"""The loops of a guard on NumPy, JAX and MLX, as their page has them, keep the rules of check_trainer."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import numpy as np
import pytest
from axes import require
from recipe_blocks import GUARD_PAGE, run_on_names
from waiting_trainers import WaitingTrainer

from gradscale.testing import check_trainer

pytestmark = pytest.mark.tier("all")


class GuardTrainer(WaitingTrainer):
    """Runs a block of the page, and gives its loop batches whose numbers are times ``fault``."""

    block: str

    def __init__(self) -> None:
        self.names = {"batches": (self.batch(index) for index in self.steps())}
        self.begin(run_on_names, GUARD_PAGE, self.block, self.names)

    def batch(self, index: int) -> Any:
        return np.random.default_rng(index).normal(size=(16, 5)).astype(np.float32) * np.float32(self.fault)

    def save(self):
        return copy.deepcopy(self.state())


class OfNumpy(GuardTrainer):
    block = "guard-numpy"

    def state(self):
        guard = self.names["guard"].state_dict()
        return {"weights": self.names["optimizer"].weights, "average": self.names["average"], "scaler": guard}

    def load(self, saved: Any):
        self.names["optimizer"].weights = saved["weights"]
        self.names["average"] = saved["average"]
        self.names["guard"].load_state_dict(saved["scaler"])


class OfJax(GuardTrainer):
    block = "guard-jax"

    def state(self):
        return {name: self.names[name] for name in ("params", "opt_state")}

    def save(self):
        return self.state()

    def load(self, saved: Any):
        self.names.update(saved)


class OfMlx(GuardTrainer):
    block = "guard-mlx"

    def __init__(self) -> None:
        self.mx = importlib.import_module("mlx.core")
        self.names = {"inputs": self.inputs(), "targets": self.targets(), "loss_of": self.loss_of}
        self.begin(run_on_names, GUARD_PAGE, self.block, self.names)

    def inputs(self):
        # What this thread makes, only this thread evaluates.
        self.mx.eval(self.names["model"].state, self.names["optimizer"].state)
        for index in self.steps():
            self.x = self.mx.array(self.batch(index)[:, :4])
            yield self.x

    def targets(self):
        while True:
            yield self.x.sum(axis=1, keepdims=True)

    def loss_of(self, x: Any, y: Any):
        outputs = self.names["model"](x.astype(self.mx.bfloat16)).astype(self.mx.float32)
        return self.mx.mean(self.mx.square(outputs - y))

    def state(self):
        model, optimizer, guard = (self.names[name] for name in ("model", "optimizer", "guard"))
        return {"model": model.parameters(), "optimizer": optimizer.state, "scaler": guard.state_dict()}

    def save(self):
        return importlib.import_module("mlx.utils").tree_map(lambda x: x, self.state())

    def load(self, saved: Any):
        self.names["model"].update(saved["model"])
        self.names["optimizer"].state = saved["optimizer"]
        self.names["guard"].load_state_dict(saved["scaler"])


def skips(make: type[GuardTrainer]) -> int:
    """Return how many of three steps the guard skips, of which one is bad."""
    trainer = make()
    for index, fault in enumerate((1.0, np.nan, 1.0)):
        trainer.step(index, fault)
    return trainer.names["guard"].counts()["overflow"]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_the_loop_of_numpy_has_no_fault():
    assert check_trainer(OfNumpy).faults == []
    assert skips(OfNumpy) == 1


@pytest.mark.jax
def test_the_loop_of_jax_has_no_fault():
    require("optax")
    assert check_trainer(OfJax, steps=4).faults == []


@pytest.mark.mlx
def test_the_loop_of_mlx_has_no_fault():
    assert check_trainer(OfMlx).faults == []
    assert skips(OfMlx) == 1
