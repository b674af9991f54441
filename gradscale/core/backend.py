"""GenericBackend: serves every array library that follows the standard and has no adapter of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import device

from gradscale.core import arithmetic
from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import BackendNotAvailableError

__all__ = ["GenericBackend"]


class GenericBackend:
    """The pure functions of :mod:`gradscale.core.arithmetic`, and the standard's own conversion for the read."""

    name = "generic"

    def read(self, x: Array, /) -> list[int]:
        """Return a 1-d int32 array as Python ints, computed once where the library is lazy.

        The standard converts only 0-d arrays, and so element by element; a lazy library (dask, cubed) would compute all
        that the array depends on for each. What it calls ``compute`` gives an array of values, and ``tolist``, where
        there is one, all of them at once.
        """
        if hasattr(x, "compute"):
            x = x.compute()
        if hasattr(x, "tolist"):
            return [int(value) for value in x.tolist()]
        return [int(x[index]) for index in range(x.shape[0])]

    def unscale(
        self, grads: Sequence[Array], state: ScaleState, /, *, dtype: Any = None, out: Sequence[Array] | None = None
    ) -> tuple[list[Array], Array]:
        """Divide arrays by the scale; always into new ones, since the standard does not say which can be written."""
        return arithmetic.unscale_arrays(grads, state, dtype=dtype, out=out)

    def placement(self, like: Array, /) -> Any:
        """Return the device of an array."""
        return device(like)

    def example(self) -> Array:
        """Refuse: without a library named there is no array to make."""
        msg = "backend= must name a library's adapter for a rank that has no arrays, got the generic one"
        raise BackendNotAvailableError(msg)

    def fingerprint(self, state: ScaleState, /) -> Array:
        """Return a state as a 1-d int32 array."""
        return arithmetic.fingerprint(state)
