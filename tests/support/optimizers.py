"""Optimizers of both protocols that record how they are called, for the tests of the scaler."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from libraries import Library


class Parameter:
    """A parameter of torch's convention."""

    def __init__(self, grad=None):
        self.grad = grad


class Recording:
    """Counts its steps, and keeps what they were called with and the gradients that they saw."""

    def __init__(self):
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.seen: list[Any] = []

    @property
    def steps(self) -> int:
        """Return how many steps have been made."""
        return len(self.calls)

    def step(self, *args, **kwargs) -> str:
        """Record one step."""
        self.calls.append((args, kwargs))
        self.seen.append(self.gradients())
        return "stepped"

    def gradients(self):
        """Return the gradients as they are."""
        raise NotImplementedError


class Grouped(Recording):
    """An optimizer with ``param_groups`` of parameters."""

    def __init__(self, *groups: Sequence[Any]):
        super().__init__()
        self.param_groups: Any = [{"params": [Parameter(grad) for grad in grads]} for grads in groups]

    @property
    def parameters(self):
        """Return the parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def gradients(self):
        """Return every parameter's gradient."""
        return [parameter.grad for parameter in self.parameters]


def with_groups(groups) -> Grouped:
    """Return an optimizer with these ``param_groups``, whatever they are."""
    optimizer = Grouped()
    optimizer.param_groups = groups
    return optimizer


class Tree(Recording):
    """An optimizer with a ``grads`` tree."""

    def __init__(self, grads=None):
        super().__init__()
        self.grads = grads

    def gradients(self):
        """Return the tree."""
        return self.grads


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

    def of(self, k: int) -> dict[str, Any]:
        """Return the state of one weight."""
        held: dict[str, Any] = self.state[self.weights[k]]
        return held


class Evaluating:
    """An optimizer whose step evaluates a closure, as LBFGS does."""

    grads: Any = None

    def step(self, closure: Callable[[], Any]) -> str:
        """Evaluate it once."""
        closure()
        return "minimised"


def scaled(arrays: Library, scaler, *values, dtype: str = "float32"):
    """Return gradients that a backward pass of the scaled loss would give: the values times the scale."""
    scaler.scale(arrays.asarray(1.0))
    return [arrays.asarray([value * scaler.get_scale()], dtype) for value in values]


def iterate(arrays: Library, scaler, optimizer, values: Sequence[float] = (1.0,)):
    """Make one iteration in which the true gradients of a ``Tree`` are these values; return its report."""
    factor = scaler.scale(arrays.asarray(1.0))
    optimizer.grads = [arrays.asarray([value], "float32") * factor for value in values]
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)


def iterate_plainly(scaler, optimizer, gradient: float = 1.0, loss: float = 1.0):
    """Make one iteration of NumPy's in which each true gradient is of this value; return its report."""
    scaler.scale(np.float32(loss))
    optimizer.grads = [np.full(3, gradient * scaler.get_scale(), np.float32)]
    for weight in getattr(optimizer, "weights", ()):
        weight.grad = optimizer.grads[0].copy()
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer)
