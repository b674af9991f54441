"""A few parameters, their optimizer and a scaler: iterations in which a test says the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axes_torch import torch

__all__ = ["Small", "optimizer_of"]


def optimizer_of(name: str, parameters: Any, **options: Any) -> Any:
    """Return an optimizer by its name and its implementation, such as ``SGD``, ``Adam-foreach`` and ``AdamW-fused``."""
    kind, _, variant = name.partition("-")
    switches = {"": {}, "single": {"foreach": False}}.get(variant, {variant: True})
    return getattr(torch.optim, kind)(parameters, **{"lr": 1.0, **options}, **switches)


class Small:
    """Parameters with their optimizer and their scaler.

    Parameters
    ----------
    scaler : object
        Torch's or ours.
    optimizer : str or callable, default "SGD"
        As for :func:`optimizer_of`, or what makes one of a list of parameters.
    count, size, start : optional
        How many parameters there are, of how many elements, and what these are.
    dtypes, devices : sequence of str
        Of the parameters; ``count`` is not needed then.
    home : str, default "cpu"
        Where the loss is.
    **options
        Of the optimizer; ``lr`` is 1.
    """

    def __init__(
        self,
        scaler: Any,
        optimizer: Any = "SGD",
        *,
        count: int = 1,
        size: int = 2,
        start: float = 0.0,
        dtypes: Sequence[str] = ("float32",),
        devices: Sequence[str] = ("cpu",),
        home: str = "cpu",
        **options: Any,
    ) -> None:
        self.scaler, self.home = scaler, home
        number = max(count, len(dtypes), len(devices))
        kinds = [{"dtype": getattr(torch, dtype), "device": device} for dtype in dtypes for device in devices]
        kinds *= number // len(kinds)
        self.parameters = [torch.nn.Parameter(torch.full((size,), start, **kind)) for kind in kinds]
        self.parameter = self.parameters[0]
        make = (lambda given: optimizer_of(optimizer, given, **options)) if isinstance(optimizer, str) else optimizer
        self.optimizer = make(self.parameters)

    def put(self, *gradients: Any) -> None:
        """Scale a loss, and set the gradients to what is given: tensors, numbers or None; one serves all."""
        self.scaler.scale(torch.ones((), device=self.home))
        given = gradients if len(gradients) > 1 else gradients * len(self.parameters)
        for parameter, gradient in zip(self.parameters, given, strict=True):
            parameter.grad = torch.full_like(parameter, gradient) if isinstance(gradient, (int, float)) else gradient

    def give(self, *gradients: Any) -> None:
        """Scale a loss, and set the gradients to these numbers or tensors times the scale; one serves all."""
        factor = self.scaler.scale(torch.ones((), device=self.home))
        given = gradients if len(gradients) > 1 else gradients * len(self.parameters)
        for parameter, gradient in zip(self.parameters, given, strict=True):
            values = torch.ones_like(parameter) * gradient * factor.to(parameter.device)
            parameter.grad = values.to(parameter.dtype)

    def step(self, *, explicit: bool = False, **options: Any) -> Any:
        """Make the step and the update, after ``unscale_`` if asked for, and return what ``step`` returned."""
        if explicit or options:
            self.scaler.unscale_(self.optimizer, **options)
        returned = self.scaler.step(self.optimizer)
        self.scaler.update()
        return returned

    def iterate(self, *gradients: Any, explicit: bool = False) -> Any:
        """Make one iteration with these numbers, times the scale, as gradients; return what ``step`` returned."""
        self.give(*gradients)
        return self.step(explicit=explicit)

    @property
    def report(self) -> Any:
        """Return the report of the last step."""
        return self.scaler.last_step(self.optimizer)

    @property
    def held(self) -> list[Any]:
        """Return what the parameters hold."""
        return [parameter.tolist() for parameter in self.parameters]

    @property
    def state(self) -> tuple[float, int]:
        """Return the scale and the growth tracker."""
        return self.scaler.get_scale(), self.scaler._get_growth_tracker()
