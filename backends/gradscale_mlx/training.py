"""ModelAndOptimizer: a model and an optimizer of ``mlx.optimizers``, as a scaler or a compiled step updates them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn import Module
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

import gradscale


class ModelAndOptimizer:
    """A model and its optimizer, with the ``grads`` and the ``step()`` of an optimizer that a scaler steps.

    Parameters
    ----------
    model : mlx.nn.Module
        Updated in place by each step that is not skipped.
    optimizer : mlx.optimizers.Optimizer
        Any one of MLX's. Its state and its schedules stay as they are in a skipped step.

    Attributes
    ----------
    grads : nested containers of arrays
        To be assigned before each ``scaler.step``: what ``mlx.nn.value_and_grad`` returns for a scaled loss.

    Examples
    --------
    >>> import gradscale, gradscale_mlx, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    >>> model, scaler = nn.Linear(1, 1, bias=False), gradscale.GradScaler()
    >>> model.weight = mx.ones((1, 1))
    >>> trained = gradscale_mlx.ModelAndOptimizer(model, optim.SGD(0.5))
    >>> _, trained.grads = nn.value_and_grad(model, lambda x: scaler.scale(model(x).sum()))(mx.ones((1, 1)))
    >>> scaler.step(trained)
    >>> scaler.update()
    >>> model.weight
    array([[0.5]], dtype=float32)
    """

    def __init__(self, model: Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.grads: Any = None

    def step(self) -> None:
        """Update the model by ``grads``, as ``optimizer.update(model, grads)`` does."""
        self.optimizer.update(self.model, self.grads)

    def step_if(self, pred: mx.array, grads: object) -> None:
        """Update the model by unscaled ``grads`` if ``pred`` (0-d bool, such as ``nonfinite == 0``); no host read.

        Else the model and the optimizer's state stay as they are. Also in a function for ``mx.compile`` that captures
        ``model.state`` and ``optimizer.state``.
        """
        self.optimizer.init(grads)  # What it has is kept.
        chosen = before = tree_map(lambda x: x, self._state())
        try:
            self.optimizer.update(self.model, grads)
            chosen = gradscale.select(pred, self._state(), before)
        finally:
            self.model.update(chosen[0])
            _assign_leaves(self.optimizer.state, chosen[1])

    def _state(self) -> tuple[object, object]:
        return self.model.trainable_parameters(), self.optimizer.state


def _assign_leaves(old: Any, new: Any) -> None:
    """Assign new leaves within the dicts and lists of a tree, which a compiled function has captured."""
    for key, value in new.items() if isinstance(new, dict) else enumerate(new):
        if isinstance(value, (dict, list)):
            _assign_leaves(old[key], value)
        else:
            old[key] = value
