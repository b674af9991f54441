"""Multiplying outputs by the scale, in containers of any kind that torch's scalers take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradscale.errors import InvalidValueError

__all__ = ["scale_outputs"]


def scale_outputs(outputs: Any, multiply: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return outputs with every tensor multiplied.

    Parameters
    ----------
    outputs : tensor, mapping or iterable of these
        Lists, tuples, named tuples and dicts come back as what they are; any other iterable as an iterator, as torch
        has it, so that an unconsumed one scales nothing.
    multiply : callable
        Takes a tensor and returns a new one.

    Raises
    ------
    InvalidValueError
        For anything else.
    """
    if isinstance(outputs, torch.Tensor):
        return multiply(outputs)
    if isinstance(outputs, Mapping):
        scaled = {key: scale_outputs(value, multiply) for key, value in outputs.items()}
        return scaled if type(outputs) is dict else type(outputs)(scaled)  # type: ignore[call-arg]
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
        values = (scale_outputs(value, multiply) for value in outputs)
        if hasattr(outputs, "_make"):
            return outputs._make(values)
        return type(outputs)(values) if isinstance(outputs, (list, tuple)) else values
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {outputs!r} of type {type(outputs).__name__}"
    raise InvalidValueError(msg)
