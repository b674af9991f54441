"""StepInputs: what a program says of a step: its loss, the norm that it has clipped by, and the name of the batch."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gradscale.core.protocols import Array
from gradscale.errors import InvalidTypeError, short_repr
from gradscale.scaler.guard import checked_loss

Batch: TypeAlias = "int | str | Sequence[int | str] | None"

_A_VALUE = "must be a number or a real floating array of one element"
# Which of the three the step of a class names itself.
_names: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


class StepInputs(NamedTuple):
    """The arguments of ``step`` that are the scaler's own, checked."""

    loss: Array | float | None = None
    """Judged in place of the losses of ``scale``; the step is skipped if it is not finite."""
    norm: Array | float | None = None
    """Judged in place of the gradients."""
    batch: Batch = None

    def are_those_of(self, others: StepInputs | None) -> bool:
        """Tell whether these are the very objects that a call before was given."""
        return others is not None and all(map(operator.is_, self, others))


def checked_inputs(optimizer: object, loss: object, norm: object, batch: object, kwargs: dict[str, Any]) -> StepInputs:
    """Return checked inputs; those that the optimizer's own ``step`` names enter ``kwargs``, too."""
    arguments = {"loss": loss, "norm": norm, "batch": batch}
    checked = StepInputs(
        None if loss is None else checked_value("loss", loss),
        None if norm is None else checked_value("norm", norm),
        _checked_batch(batch),
    )
    kind = type(optimizer)
    if kind not in _names:
        parameters: Iterable[str] = ()
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            parameters = inspect.signature(optimizer.step).parameters  # type: ignore[attr-defined]
        _names[kind] = frozenset(arguments).intersection(parameters)
    kwargs.update((name, arguments[name]) for name in _names[kind] if arguments[name] is not None)
    return checked


def checked_value(name: str, value: Any) -> Array | float:
    """Return a loss or a norm of this step; InvalidTypeError for another thing."""
    # The parts of a DTensor are on the ranks.
    whole = getattr(value, "full_tensor", None)
    return checked_loss(value if whole is None else whole(), f"{name} {_A_VALUE}")


def _checked_batch(batch: Any) -> Batch:
    parts = batch if isinstance(batch, (list, tuple)) else () if batch is None else (batch,)
    if not all(isinstance(one, (numbers.Integral, str)) for one in parts):
        msg = (
            f"batch must be an int, a string, or a list of these, such as its index or its file, got "
            f"{short_repr(batch)}"
        )
        raise InvalidTypeError(msg)
    # JSON does not write NumPy's integers.
    names = tuple(str(one) if isinstance(one, str) else int(one) for one in parts)
    return names if parts is batch else next(iter(names), None)
