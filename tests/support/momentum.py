"""An optimizer of torch's kind for NumPy arrays: they have gradients, and a mapping says what is kept of each."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Momentum", "of"]


class Weight(np.ndarray[Any, Any]):
    """An array with a gradient, and a key of mappings by its identity, as tensors are."""

    grad: Any = None
    __hash__ = object.__hash__  # type: ignore[assignment]


class Momentum:
    """An optimizer of a few weights, each with an array and a number in the optimizer's state."""

    def __init__(self, count: int = 2):
        self.weights = [np.ones(3, np.float32).view(Weight) for _ in range(count)]
        self.param_groups = [{"params": self.weights, "param_names": [f"layer.{k}" for k in range(count)]}]
        self.state: dict[Any, Any] = {
            weight: {"exp_avg": np.zeros(3, np.float32), "step": np.int32(0)} for weight in self.weights
        }

    def step(self):
        """Leave the weights as they are."""


def of(optimizer: Momentum, k: int):
    """Return the state of one weight."""
    held: dict[str, Any] = optimizer.state[optimizer.weights[k]]
    return held
