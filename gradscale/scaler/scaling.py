"""ArrayScaling: outputs of any library that follows the standard, in nested containers, multiplied by the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradscale.core import ops, tree
from gradscale.core.protocols import Array, ScaleState
from gradscale.errors import InvalidTypeError
from gradscale.scaler.parts import LiveState

__all__ = ["ArrayScaling"]


class ArrayScaling:
    """The way of outputs through ``scale()``: all leaves at once, by the pure functions."""

    def scale(
        self,
        outputs: Any,
        live: LiveState,
        in_force: Callable[[Array], ScaleState],
        note: Callable[[ScaleState, Sequence[Any]], None],
    ) -> Any:
        """Return outputs multiplied by the scale; see :class:`gradscale.scaler.parts.Scaling`.

        Raises
        ------
        InvalidTypeError
            For a leaf that is no array, arrays of two libraries, or in a function that jax compiles.
        """
        if isinstance(outputs, int):
            msg = f"outputs must be an array or nested containers of arrays, got {outputs!r}"
            raise InvalidTypeError(msg)
        leaves, rebuild = tree.flatten(outputs)
        like = ops.first_floating(leaves)
        if like is None:
            ops.require_arrays(leaves, what="output", rebuild=rebuild)
            return rebuild(leaves)
        live.backend_for(like).refuse_tracing("scale()")
        state = in_force(like)
        scaled = ops.scale(rebuild(leaves), state)
        note(state, leaves)
        return scaled
