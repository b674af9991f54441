"""The optimizers that recipes for torch take for granted: SAM, and a container of several."""

from __future__ import annotations

import collections
from typing import Any

from axes_torch import torch

__all__ = ["SAM", "OptimizersContainer"]


class SAM:
    """Sharpness-aware minimisation with the interface of davda54/sam, of weights that all have gradients."""

    def __init__(self, parameters):
        self.base_optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.zero_grad = self.base_optimizer.zero_grad
        self.state: dict[Any, Any] = collections.defaultdict(dict)

    def first_step(self, zero_grad: bool = False):
        """Climb, and remember where from."""
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.param_groups[0]["params"]])
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old_p"] = weight.data.clone()
            weight.data.add_(weight.grad * (0.05 / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()


class OptimizersContainer(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """Several optimizers behind one, which is of the parameters of all model parts, as torchtitan has it."""

    def __init__(self, parts, **options):
        self.optimizers = [torch.optim.SGD(part.parameters(), **options) for part in parts]
        super().__init__([weight for part in parts for weight in part.parameters()], options)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
