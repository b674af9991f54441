"""A training loop of NumPy that is right, on one rank or several, made of methods that faulty loops override."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from scenarios import rank_and_size

FEATURES = 3


def gathered(group, values):
    """Return a vector of each rank, by rank, over threads, MPI or torch.distributed."""
    if group is None:
        return np.stack([values])
    if hasattr(group, "start_max"):
        # MAX is all that it has.
        bits = np.full((group.size, len(values)), np.iinfo(np.int32).min, np.int32)
        bits[group.rank] = np.float32(values).view(np.int32)
        return group.start_max(bits.reshape(-1))().view(np.float32).reshape(group.size, -1)
    if hasattr(group, "allgather") and not hasattr(group, "_allgather_base"):
        return np.stack(group.allgather(values))
    import torch

    parts = [torch.empty(len(values)) for _ in range(group.size())]
    torch.distributed.all_gather(parts, torch.from_numpy(np.float32(values)), group=group)
    return np.stack([part.numpy() for part in parts])


class Loop:
    """Linear regression in float32 with momentum, clipping, a schedule, an average, statistics, and a scale."""

    growth_interval = 3
    max_norm = 100.0

    def __init__(self, group=None, init_scale: float = 2.0**10):
        self.group = group
        self.weights = np.linspace(-1, 1, FEATURES, dtype=np.float32)
        self.momentum = np.zeros(FEATURES, np.float32)
        self.ema = self.weights.copy()
        self.buffers = {"running_mean": np.zeros(FEATURES, np.float32)}
        self.lr, self.steps_made = 0.1, 0
        self.scale, self.growth_tracker = init_scale, 0
        self.grads = np.zeros(FEATURES, np.float32)

    def step(self, index: int, fault: Any):
        faults = fault if isinstance(fault, tuple) else (fault,)
        with np.errstate(all="ignore"):
            self.train(index, faults)

    def train(self, index: int, faults: tuple[float | None, ...]):
        before = copy.deepcopy(self.buffers)
        self.zero_grad()
        for number, fault in enumerate(faults):
            if fault is not None:
                self.backward(self.batch(index, number), fault)
        kept = sum(fault is not None for fault in faults)
        self.grads = self.reduce(self.grads / np.float32(kept))
        self.unscale()
        self.clip()
        if self.is_finite():
            self.optimizer_step()
            self.after_step()
        else:
            self.buffers = before
        self.update(self.is_finite())

    def batch(self, index: int, number: int):
        rank = 0 if self.group is None else rank_and_size(self.group)[0]
        return np.random.default_rng((index, number, rank)).normal(size=(8, FEATURES)).astype(np.float32)

    def zero_grad(self):
        self.grads = np.zeros(FEATURES, np.float32)

    def backward(self, batch, fault: float):
        mean, batch_mean = self.buffers["running_mean"], batch.mean(axis=0) * np.float32(fault)
        self.buffers["running_mean"] = np.float32(0.9) * mean + np.float32(0.1) * batch_mean
        errors = batch @ self.weights - batch.sum(axis=1)
        self.grads = self.grads + np.float32(self.scale) * np.float32(fault) * (batch.T @ errors) / np.float32(8)

    def reduce(self, grads):
        return gathered(self.group, grads).mean(axis=0)

    def unscale(self):
        self.grads = self.grads / np.float32(self.scale)

    def clip(self):
        norm = np.sqrt(np.sum(self.grads**2))
        if norm > self.max_norm:
            self.grads = self.grads * (np.float32(self.max_norm) / norm)

    def is_finite(self):
        return bool(np.isfinite(self.grads).all())

    def optimizer_step(self):
        self.momentum = np.float32(0.9) * self.momentum + self.grads
        self.weights = self.weights - np.float32(self.lr) * self.momentum

    def after_step(self):
        self.steps_made += 1
        self.lr *= 0.8
        self.ema = np.float32(0.9) * self.ema + np.float32(0.1) * self.weights

    def update(self, is_clean: bool):
        self.growth_tracker = self.growth_tracker + 1 if is_clean else 0
        if not is_clean:
            self.scale *= 0.5
        elif self.growth_tracker == self.growth_interval:
            self.scale, self.growth_tracker = self.scale * 2.0, 0

    def state(self):
        return {
            "weights": self.weights,
            "optimizer": {"momentum": self.momentum, "steps": self.steps_made},
            "lr": self.lr,
            "ema": self.ema,
            "buffers": self.buffers,
            "scaler": {"scale": self.scale, "growth_tracker": self.growth_tracker},
        }

    def save(self):
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "group"})

    def load(self, saved):
        vars(self).update(saved)
