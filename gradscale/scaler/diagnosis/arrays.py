"""The arrays of an optimizer that a diagnosis looks at, and their names: gradients, weights and the state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from array_api_compat import is_array_api_obj

from gradscale.core import tree, validation
from gradscale.core.arithmetic import is_floating
from gradscale.core.gradients import NamedGradient
from gradscale.core.protocols import Array, Optimizer
from gradscale.errors import InvalidTypeError, InvalidValueError, reading, short_repr
from gradscale.scaler.diagnosis.report import ParameterReport

Labelled: TypeAlias = tuple[ParameterReport, Array]
"""An array, and what a report says of it before it is read: its name, kind and key."""

_NAMES_USAGE = "pass names=model.named_parameters(), a mapping of names to parameters, or a string for each parameter"


@reading("names")
def rename(gradients: Sequence[NamedGradient], names: object) -> list[NamedGradient]:
    """Return gradients under names that a user gives: pairs or a mapping with parameters, or text for each in order."""
    if names is None:
        return list(gradients)
    if isinstance(names, (str, bytes, set, frozenset)) or not isinstance(names, Iterable):
        _refuse_names(f"pairs, a mapping or strings in the parameters' order, got {short_repr(names)}")
    items = list(names.items() if isinstance(names, Mapping) else names)
    if all(isinstance(name, str) for name in items):
        if len(items) != len(gradients):
            _refuse_names(f"one for each of the optimizer's {len(gradients)} parameters, got {len(items)}")
        return [one._replace(name=name) for one, name in zip(gradients, items, strict=True)]
    return _rename_by_parameter(gradients, items)


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and hasattr(item[1], "grad")


def _rename_by_parameter(gradients: Sequence[NamedGradient], pairs: Sequence[Any]) -> list[NamedGradient]:
    if bad := [item for item in pairs if not _is_pair(item)]:
        # If there are strings and something else, report what is no string.
        item = short_repr(min(bad, key=lambda item: isinstance(item, str)))
        _refuse_names(f"pairs of a string and a parameter with .grad, got {item} among them")
    by_parameter = {id(parameter): name for name, parameter in pairs}
    unnamed = [one.name for one in gradients if one.parameter is None or id(one.parameter) not in by_parameter]
    if unnamed:
        rest = f" and {len(unnamed) - 3} more" * (len(unnamed) > 3)
        _refuse_names(
            f"those of each of the optimizer's {len(gradients)} parameters, got {len(pairs)} names, and none for "
            f"{', '.join(unnamed[:3])}{rest}"
        )
    return [one._replace(name=by_parameter[id(one.parameter)]) for one in gradients]


def _refuse_names(what: str) -> NoReturn:
    msg = f"names must be {what}; {_NAMES_USAGE}"
    raise InvalidValueError(msg)


@reading("the weights and the state of an optimizer")
def weights_and_state(
    optimizer: Optimizer,
    gradients: Sequence[NamedGradient],
    renamed: Sequence[NamedGradient],
    params: object,
    state: object,
) -> list[Labelled]:
    """Return an optimizer's weights and the arrays of its state, but for integers.

    ``gradients`` are under its own names, and ``renamed`` the same under the user's; None for ``params`` and True for
    ``state`` stand for those of optimizers of torch's kind.
    """
    parameters = {id(one.parameter): one.name for one in renamed if is_array_api_obj(one.parameter)}
    if state is True:
        state = getattr(optimizer, "state", None)
        if not isinstance(state, Mapping) or (gradients and not parameters and params is None):
            msg = (
                f"state=True searches what optimizers of torch's kind have, arrays in param_groups and a mapping named "
                f"state, got {short_repr(optimizer)} of type {type(optimizer).__name__}: pass params= and state=, the "
                f"weights and the optimizer's state in nested containers"
            )
            raise InvalidTypeError(msg)
    arrays = list(_weights(gradients, renamed, params))
    if state is not None and state is not False:
        arrays += _arrays_in_state(state, parameters)
    return [(label, x) for label, x in arrays if is_array_api_obj(x) and is_floating(x)]


def _weights(
    gradients: Sequence[NamedGradient], renamed: Sequence[NamedGradient], params: object
) -> Iterator[Labelled]:
    if params is None:
        located = [(one.name, one.parameter) for one in renamed]
    elif hasattr(params, "named_parameters") and hasattr(params, "named_buffers"):
        # A module of torch's kind.
        located = [*params.named_parameters(), *params.named_buffers()]
    else:
        names = {one.name: other.name for one, other in zip(gradients, renamed, strict=True)}
        located = [(names.get(path, path) or "params", leaf) for path, leaf in _leaves("params", params)]
    return ((ParameterReport(name, kind="weight"), x) for name, x in located)


def _arrays_in_state(state: object, parameters: Mapping[int, str]) -> Iterator[Labelled]:
    """Yield the items of a container or of torch's mapping of parameters; no iterator in it is read."""
    if not isinstance(state, Mapping) or all(isinstance(key, (str, int)) for key in state):
        for path, leaf in _leaves("state", state, _is_leaf):
            yield ParameterReport("state", kind="state", key=path), leaf
        return
    for parameter, values in state.items():
        name = parameters.get(id(parameter), parameter if isinstance(parameter, str) else type(parameter).__name__)
        for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            for path, leaf in tree.leaves_with_paths(value, _is_leaf):
                yield ParameterReport(name, kind="state", key=f"{key}{path}"), leaf


def _is_leaf(node: object) -> bool:
    is_dataclass = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return not is_dataclass and not isinstance(node, (list, tuple, Mapping))


def _leaves(name: str, container: object, *is_leaf: Callable[[object], bool]) -> list[tuple[str, Array]]:
    """Return the leaves of an argument, which must be an array or a container, with their paths."""
    leaves = tree.leaves_with_paths(container, *is_leaf)
    if leaves and leaves[0][0] == "" and not is_array_api_obj(leaves[0][1]):
        raise validation.wrong_type(leaves[0][1], name, "arrays in nested containers")
    return leaves
