"""A recipe of a page as a trainer for check_trainer: its loop waits for each batch until a step is asked for."""

from __future__ import annotations

import copy
import queue
import threading
from pathlib import Path
from typing import Any

from recipe_blocks import run_on_names

# What a recipe may have that a step changes, by its name there; what scales or guards is compared by rule 3 alone.
PARTS = ("model", "optimizer", "schedule", "average", "critic", "critic_optimizer", "scaler", "guard", "precision")


class RecipeTrainer:
    """Runs a block in a thread, and gives its ``loader`` one batch for each step; its losses are times ``fault``."""

    running: RecipeTrainer | None = None

    def __init__(self, page: Path, name: str, batches: list[Any], names: dict[str, Any]):
        if RecipeTrainer.running is not None:
            RecipeTrainer.running.asked.put(None)
        RecipeTrainer.running = self
        self.batches, self.fault = batches, 1.0
        self.asked, self.answers = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        loss_of = names["loss_of"]
        self.names = names | {"loader": self.loader(), "loss_of": lambda *args: loss_of(*args) * self.fault}
        threading.Thread(target=self.run, args=(page, name), daemon=True).start()
        self.wait()

    def run(self, page: Path, name: str):
        try:
            run_on_names(page, name, self.names)
        except BaseException as error:
            self.answers.put(error)

    def loader(self):
        while True:
            self.answers.put(None)
            index = self.asked.get()
            if index is None:
                return
            yield self.batches[index]

    def wait(self):
        error = self.answers.get()
        if error is not None:
            raise error

    def step(self, index: int, fault: float):
        self.fault = fault
        self.asked.put(index)
        self.wait()

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
