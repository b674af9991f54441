"""Where an optimizer's gradients are, and how unscaled ones go back to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from array_api_compat import is_array_api_obj

from gradscale import tree
from gradscale.errors import InvalidTypeError
from gradscale.protocols import Array

__all__ = ["collect_gradients"]

Assign = Callable[[dict[int, Array]], None]


def collect_gradients(optimizer: Any) -> tuple[list[Any], Assign]:
    """Return an optimizer's gradients and a function that assigns their replacements.

    Parameters
    ----------
    optimizer : object
        With ``param_groups`` (dicts whose ``"params"`` have ``.grad``) or ``grads`` (nested containers of arrays).

    Returns
    -------
    gradients : list
        Every gradient that is there, each parameter once, however often it is listed.
    assign : callable
        Takes the new arrays by the ``id`` of the old ones. Arrays that were overwritten in place are not assigned.

    Raises
    ------
    InvalidTypeError
        When the optimizer has neither, or a parameter has no ``grad``.
    """
    if hasattr(optimizer, "param_groups"):
        return _from_param_groups(optimizer)
    if hasattr(optimizer, "grads"):
        return _from_grads(optimizer)
    msg = (
        f"an optimizer must have param_groups (a list of dicts whose 'params' have .grad) or grads (arrays in nested "
        f"containers, to be read and assigned), got {optimizer!r} of type {type(optimizer).__name__}, which has neither"
    )
    raise InvalidTypeError(msg)


def _from_param_groups(optimizer: Any) -> tuple[list[Any], Assign]:
    parameters: dict[int, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        try:
            listed = group["params"]
        except (TypeError, KeyError, IndexError):
            msg = f"param_groups[{index}] of {type(optimizer).__name__} must be a dict with 'params', got {group!r}"
            raise InvalidTypeError(msg) from None
        parameters |= {id(parameter): parameter for parameter in ([listed] if hasattr(listed, "grad") else listed)}
    try:
        # Each gradient is read once: a parameter may give a new object at each access.
        gradients = [parameter.grad for parameter in parameters.values()]
    except AttributeError:
        bad = next(parameter for parameter in parameters.values() if not hasattr(parameter, "grad"))
        msg = f"a parameter of {type(optimizer).__name__} must have .grad, got {bad!r}"
        raise InvalidTypeError(msg) from None

    def assign(replacements: dict[int, Array]) -> None:
        for parameter, old in zip(parameters.values(), gradients, strict=True):
            new = replacements.get(id(old), old)
            if new is not old:
                parameter.grad = new

    return [gradient for gradient in gradients if gradient is not None], assign


def _from_grads(optimizer: Any) -> tuple[list[Any], Assign]:
    gradients = optimizer.grads
    is_array = is_array_api_obj(gradients)
    # An iterator would be empty for the optimizer after the scaler has walked it.
    if not is_array and (isinstance(gradients, (str, bytes, Iterator)) or callable(gradients)):
        msg = f"grads of {type(optimizer).__name__} must be arrays in nested containers, got {gradients!r}"
        raise InvalidTypeError(msg)
    leaves, rebuild = tree.flatten(gradients)

    def assign(replacements: dict[int, Array]) -> None:
        if any(new is not leaf for leaf in leaves if (new := replacements.get(id(leaf), leaf)) is not leaf):
            optimizer.grads = rebuild(replacements.get(id(leaf), leaf) for leaf in leaves)

    return leaves, assign
