"""Snapshot: copies of arrays that a program writes in place, from which a skipped step restores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from array_api_compat import array_namespace, is_array_api_obj

from gradscale.core.protocols import Array
from gradscale.core.validation import wrong_type

HOLDABLE = "a module of torch, an array that can be written in place, or a list of these"


class Snapshot(Protocol):
    """Copies of arrays as they were after the last step that was not skipped."""

    @property
    def takes_flags(self) -> bool:
        """Whether ``restore`` leaves it to a device whether it does anything."""

    def anew(self) -> Snapshot:
        """Return other copies of the same arrays, as they are now."""

    def save(self) -> None:
        """Copy the arrays anew."""

    def restore(self, skips: Sequence[Array] = ()) -> None:
        """Write the copies back. With ``skips``, 0-d on a device, only if one is not 0, else copy the arrays anew."""


class ArraySnapshot:
    """Copies of arrays of a library that writes in place, and whose verdicts the host has."""

    takes_flags = False

    def __init__(self, arrays: Sequence[Any]) -> None:
        for each in arrays:
            if not is_array_api_obj(each):
                raise wrong_type(each, "hold", HOLDABLE)
            advice = (
                "Of one that cannot be written go on with the old array if last_step(optimizer).skipped; in a compiled "
                "step gradscale.select chooses"
            )
            _write(each, each, advice)
        self._arrays = arrays
        self._copies = [array_namespace(each).asarray(each, copy=True) for each in arrays]

    def anew(self) -> ArraySnapshot:
        """Return other copies of the same arrays, as they are now."""
        return ArraySnapshot(self._arrays)

    def save(self) -> None:
        """Copy the arrays anew."""
        for array, copy in zip(self._arrays, self._copies, strict=True):
            copy[...] = array

    def restore(self, skips: Sequence[Array] = ()) -> None:  # noqa: ARG002
        """Write the copies back."""
        advice = "It has become so since the scaler was made, and is not put back: let it be written, and call update()"
        for array, copy in zip(self._arrays, self._copies, strict=True):
            _write(array, copy, advice)


def _write(array: Any, values: Array, advice: str) -> None:
    """Write values to an array; InvalidTypeError, with what to do, for one that cannot be written."""
    try:
        array[...] = values
    except Exception as error:
        raise wrong_type(array, "hold", HOLDABLE, f": {error}. {advice}") from error
