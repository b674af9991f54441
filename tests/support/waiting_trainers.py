"""Loops as trainers for check_trainer: each runs in a thread, and waits for every batch until a step is asked for."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from recipe_blocks import GUARD_PAGE, run_on_names

from gradscale.testing import check_trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = argparse.Namespace(seed=0, steps=4, inject=[], accumulate=1)

# What a recipe may have that a step changes, by its name there; what scales or guards is compared by rule 3 alone.
PARTS = ("model", "optimizer", "schedule", "average", "critic", "critic_optimizer", "scaler", "guard", "precision")


class LoopEnd(BaseException):
    """Ends a loop that is not asked for a step any more, without what comes after it."""


class WaitingTrainer:
    """Runs a loop in a thread, which asks :meth:`steps` for the number of each step."""

    # The last one of its class, of which each rank of a process needs its own.
    running: Any = None

    def begin(self, loop: Callable[..., Any], *args: Any):
        """Run a loop up to its first step, and end the one before."""
        if type(self).running is not None:
            type(self).running.asked.put(None)
        type(self).running = self
        self.fault: Any = 1.0
        self.asked, self.answers = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        threading.Thread(target=self.run, args=(loop, *args), daemon=True).start()
        self.wait()

    def run(self, loop: Callable[..., Any], *args: Any):
        """Run a loop in its thread; what it raises is an answer."""
        try:
            loop(*args)
        except LoopEnd:
            pass
        except BaseException as error:
            self.answers.put(error)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is asked for."""
        while True:
            self.answers.put(None)
            index = self.asked.get()
            if index is None:
                raise LoopEnd
            yield index

    def wait(self):
        error = self.answers.get()
        if error is not None:
            raise error

    def step(self, index: int, fault: Any):
        self.fault = fault
        self.asked.put(index)
        self.wait()


class PageTrainer(WaitingTrainer):
    """Runs a block of a page, and gives its loop batches whose numbers are times ``fault``."""

    page = GUARD_PAGE
    block: str
    rows = 16
    rank = 0

    def __init__(self) -> None:
        batches = (self.batch(index) for index in self.steps())
        self.names = dict.fromkeys(("batches", "loader"), batches) | self.others()
        self.begin(run_on_names, self.page, self.block, self.names)

    def others(self) -> dict[str, Any]:
        """Return the names that the block takes for granted, but its batches."""
        return {}

    def batch(self, index: int) -> Any:
        numbers = np.random.default_rng((index, self.rank)).normal(size=(self.rows, 5)).astype(np.float32)
        return numbers * np.float32(self.fault)

    def save(self):
        return copy.deepcopy(self.state())


def set_scale(scaler: Any, scale: float):
    """Let a scaler go on with another scale."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})


class MicroBatches:
    """A batch of which some micro-batches are left out."""

    def __init__(self, batch: Any, faults: tuple[float | None, ...]):
        self.batch, self.faults = batch, faults

    def chunk(self, count: int) -> list[Any]:
        """Return the micro-batches that there are."""
        return [part for part, fault in zip(self.batch.chunk(count), self.faults, strict=True) if fault is not None]


class RecipeTrainer(WaitingTrainer):
    """Runs a block of a page, and gives its loop one batch for each step; its losses are times ``fault``."""

    def __init__(self, page: Path, name: str, batches: list[Any], names: dict[str, Any]):
        # The function of a loss that the recipe takes for granted, by its name.
        losses = {name: functools.partial(self.loss, names[name]) for name in ("loss_of", "loss_fn") if name in names}
        self.loader = (self.batch(batches[index]) for index in self.steps())
        self.names = {"loader": self.loader, "pairs": ((batch, batch.flip(-1)) for batch in self.loader)}
        # Of programs that have a loss of their own.
        self.names["batches"] = (batch * self.fault for batch in self.loader)
        self.names |= names | losses
        self.begin(run_on_names, page, name, self.names)

    def batch(self, whole: Any):
        """Return a batch, or what is there of its micro-batches."""
        if not isinstance(self.fault, tuple):
            return whole
        self.faults = [fault for fault in self.fault if fault is not None]
        return MicroBatches(whole, self.fault)

    def loss(self, loss_of: Callable[..., Any], *args: Any):
        """Return the loss of a batch or of the next micro-batch, times its ``fault``."""
        return loss_of(*args) * (self.faults.pop(0) if isinstance(self.fault, tuple) else self.fault)

    def state(self):
        parts = {name: self.names[name] for name in PARTS if name in self.names}
        if "accelerator" in self.names:
            parts["scaler"] = self.names["accelerator"].scaler
        return {"scaler " + name if name in ("guard", "precision") else name: part for name, part in parts.items()}

    def save(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.state().items()})

    def load(self, saved):
        for name, part in self.state().items():
            part.load_state_dict(saved[name])


class ExampleTrainer(WaitingTrainer):
    """Runs the training function of an example, whose local variables it reads; each batch is drawn by its number."""

    def __init__(self, train: Callable[..., Any], run: Any, options: Any, data: Any, ranks: Any, init_scale: float):
        run.steps, run.ranks, run.injections = self.steps_of_run, ranks, options.inject
        self.begin(train, run, options, data, ranks)
        if "scaler" in self.names:
            self.names["scaler"].load_state_dict(self.names["scaler"].state_dict() | {"scale": init_scale})

    def steps_of_run(self, *_: Any) -> Iterator[int]:
        """Yield the numbers of the steps, from 1."""
        frame = inspect.currentframe()
        assert frame is not None
        self.frame = frame.f_back
        for index in self.steps():
            self.draw(index)
            yield index + 1

    def draw(self, index: int):
        """Make the loop's own generator draw the batch of a number."""
        self.names["batches"].manual_seed(index)

    @property
    def names(self) -> dict[str, Any]:
        """The local variables of the training function."""
        assert self.frame is not None
        return self.frame.f_locals

    def save(self):
        return copy.deepcopy(self.state())


@functools.cache
def images_and_labels():
    """Return the digits, which several examples learn."""
    images, labels, *_ = importlib.import_module("shared.digits").load_images(0)
    return images, labels


class DigitsTrainer(ExampleTrainer):
    """The loop of train_digits.py or of train_cupy.py; its bad batches have bad targets."""

    def __init__(self, _: Any, name: str, ranks: str, init_scale: float = 2.0**10):
        program = importlib.import_module(name)
        images, labels = images_and_labels()
        data = images, np.eye(10, dtype=np.float32)[labels], images, labels
        run = program.Run("checked", np.float32, is_scaled=True)
        super().__init__(program.train, run, OPTIONS, data, getattr(program, ranks)(), init_scale)
        self.wanted = self.names["wanted"].copy()

    def draw(self, index: int):
        self.names["batches"].bit_generator.state = np.random.default_rng(index).bit_generator.state
        self.names["wanted"][...] = self.wanted if self.fault == 1.0 else self.fault

    def state(self):
        moments = {name: value for name, value in vars(self.names["optimizer"]).items() if name != "grads"}
        weights, scaler = self.names["weights"], self.names["scaler"]
        return {"weights": weights, "optimizer": moments, "scaler": scaler.state_dict()}

    def load(self, saved: Any):
        self.names["weights"][...] = saved["weights"]
        vars(self.names["optimizer"]).update(saved["optimizer"])
        self.names["scaler"].load_state_dict(saved["scaler"])


def faults_of_example(group: Any, make: Callable[..., ExampleTrainer], *arguments: Any):
    """Return the faults of an example on one rank, each as its rule and the part."""
    sys.path.insert(0, str(EXAMPLES))
    made = functools.partial(make, group, *arguments)
    report = check_trainer(made, group=group, raises=False, steps=OPTIONS.steps, kinds=["nan"])
    return [(fault.rule, fault.part) for fault in report.faults]
