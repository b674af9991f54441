"""The arrays that an optimizer holds: its weights and its state, and their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from array_api_compat import is_array_api_obj

from gradscale.core import tree
from gradscale.core.arithmetic import Kind, kind_of
from gradscale.core.gradients import NamedGradient
from gradscale.core.messages import reading, shown
from gradscale.core.protocols import Array, Optimizer
from gradscale.errors import InvalidTypeError

__all__ = ["HeldArray", "held_arrays"]


class HeldArray(NamedTuple):
    """A weight, or an array of the state: of the parameter of this name, or called ``state``, with the path as key."""

    kind: Literal["weight", "state"]
    name: str
    key: str
    array: Array


@reading("the weights and the state of an optimizer")
def held_arrays(
    optimizer: Optimizer, located: Sequence[NamedGradient], names: Mapping[str, str], params: object, state: object
) -> list[HeldArray]:
    """Return an optimizer's weights and the arrays of its state, but for integers and empty ones.

    ``located`` are its gradients, and ``names`` what the user calls those that are known by their paths. ``params`` and
    ``state`` are containers of arrays; None and True stand for what optimizers of torch's kind have.
    """
    parameters = {id(one.parameter): one.name for one in located if is_array_api_obj(one.parameter)}
    own = getattr(optimizer, "state", None)
    if state is True and not (isinstance(own, Mapping) and (parameters or params is not None or not located)):
        msg = (
            f"state=True searches what optimizers of torch's kind have, arrays in param_groups and a mapping named "
            f"state, got {shown(optimizer)} of type {type(optimizer).__name__}: pass params= and state=, the weights "
            f"and the optimizer's state in nested containers"
        )
        raise InvalidTypeError(msg)
    if params is None:
        found = [HeldArray("weight", one.name, "", one.parameter) for one in located if id(one.parameter) in parameters]
    else:
        leaves = _leaves("params", tree.leaves_with_paths(params))
        found = [HeldArray("weight", names.get(path, path) or "params", "", leaf) for path, leaf in leaves]
    if state is not None and state is not False:
        found += _in_state(own if state is True else state, parameters)
    return [one for one in found if _is_searched(one.array)]


def _is_searched(x: Array) -> bool:
    return is_array_api_obj(x) and 0 not in x.shape and kind_of(x) not in (Kind.INTEGRAL, Kind.UNKNOWN)


def _in_state(state: object, parameters: Mapping[int, str]) -> Iterator[HeldArray]:
    """Yield what a container or torch's mapping of parameters holds; no iterator in it is read."""
    if not isinstance(state, Mapping) or all(isinstance(key, (str, int)) for key in state):
        for path, leaf in _leaves("state", tree.leaves_with_paths(state, _is_leaf)):
            yield HeldArray("state", "state", path, leaf)
        return
    for parameter, held in state.items():
        name = parameters.get(id(parameter), parameter if isinstance(parameter, str) else type(parameter).__name__)
        for key, value in held.items() if isinstance(held, Mapping) else [("", held)]:
            for path, leaf in tree.leaves_with_paths(value, _is_leaf):
                yield HeldArray("state", name, f"{key}{path}", leaf)


def _is_leaf(node: object) -> bool:
    is_dataclass = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return not is_dataclass and not isinstance(node, (list, tuple, Mapping))


def _leaves(name: str, leaves: list[tuple[str, Array]]) -> list[tuple[str, Array]]:
    """Return the leaves of an argument, which must be an array or a container."""
    if leaves and leaves[0][0] == "" and not is_array_api_obj(leaves[0][1]):
        msg = f"{name} must be arrays in nested containers, got {shown(leaves[0][1])} of {type(leaves[0][1]).__name__}"
        raise InvalidTypeError(msg)
    return leaves
