"""TensorScaling: outputs multiplied by the scale, in containers of any kind that torch's scalers take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradscale.core import tree
from gradscale.core.messages import shown
from gradscale.errors import InvalidValueError
from gradscale.scaler.iteration import Iteration
from gradscale_torch.transfers import moved

__all__ = ["TensorScaling"]

Tensor = torch.Tensor


class TensorScaling:
    """The way of outputs through ``scale()``: with torch's promotion, one by one, iterators when they are consumed.

    Parameters
    ----------
    keeps_dtype : bool
        Whether a half-precision loss comes back in its dtype.
    """

    def __init__(self, *, keeps_dtype: bool) -> None:
        self._keeps_dtype = keeps_dtype

    def scale(
        self,
        outputs: Any,
        iteration: Iteration,
        look: Callable[[Sequence[Any]], None] | None,
    ) -> Any:
        """Return outputs with every tensor multiplied; see :class:`gradscale.scaler.parts.Scaling`.

        Lists, tuples, named tuples and dicts come back as what they are; any other iterable as an iterator, as torch
        has it, so that an unconsumed one scales nothing.

        Raises
        ------
        InvalidValueError
            For what is neither a tensor nor an iterable of these.
        """
        if type(outputs) is Tensor:
            return self._multiplied(outputs, iteration, look)
        return _mapped(outputs, lambda tensor: self._multiplied(tensor, iteration, look))

    def _multiplied(
        self, tensor: Tensor, iteration: Iteration, look: Callable[[Sequence[Any]], None] | None
    ) -> Tensor:
        live: Any = iteration.live
        state = iteration.in_force(tensor)
        iteration.note_scaled(state)
        if look is not None:
            look((tensor,))
        scale, _ = live.scale_and_inverse(state)
        scaled: Tensor = tensor * moved(scale, tensor.device)
        return scaled.to(tensor.dtype) if self._keeps_dtype else scaled


def _mapped(outputs: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    leaves, rebuild = tree.flatten(outputs, _is_leaf)
    return rebuild([_scaled(leaf, multiply) for leaf in leaves])


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Tensor) or not isinstance(node, (list, tuple, Mapping))


def _scaled(leaf: Any, multiply: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return multiply(leaf)
    if isinstance(leaf, Iterable) and not isinstance(leaf, (str, bytes)):
        return (_mapped(value, multiply) for value in leaf)
    msg = f"outputs must be a Tensor or an iterable of Tensors, got {shown(leaf)} of type {type(leaf).__name__}"
    raise InvalidValueError(msg)
