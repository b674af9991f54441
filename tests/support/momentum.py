"""An optimizer of torch's kind for NumPy arrays: they have gradients, and a mapping says what is kept of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

__all__ = ["Momentum", "of", "overflow"]


class Weight(np.ndarray[Any, Any]):
    """An array with a gradient."""

    grad: Any = None


class Keyed(dict[Any, Any]):
    """A mapping by identity, as one of tensors is."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        self.pairs = list(pairs)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def items(self) -> Any:
        """Return the pairs."""
        return list(self.pairs)


class Momentum:
    """An optimizer of a few weights, each with an array and a number in the optimizer's state."""

    def __init__(self, count: int = 2) -> None:
        self.weights = [np.ones(3, np.float32).view(Weight) for _ in range(count)]
        self.param_groups = [{"params": self.weights, "param_names": [f"layer.{k}" for k in range(count)]}]
        held = [{"exp_avg": np.zeros(3, np.float32), "step": np.int32(0)} for _ in self.weights]
        self.state = Keyed(zip(self.weights, held, strict=True))

    def step(self) -> None:
        """Leave the weights as they are."""


def of(optimizer: Momentum, k: int) -> dict[str, Any]:
    """Return the state of one weight."""
    held: dict[str, Any] = optimizer.state.pairs[k][1]
    return held


def overflow(scaler: Any, optimizer: Momentum, value: float = math.inf) -> Any:
    """Make an iteration with these gradients, and return its report."""
    factor = scaler.scale(np.float32(1.0))
    with np.errstate(all="ignore"):
        for weight in optimizer.weights:
            weight.grad = np.full(3, value, np.float32) * factor
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)
