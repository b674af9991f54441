"""ArrayScaling: outputs of any library that follows the standard, in nested containers, multiplied by the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradscale.core import ops, tree
from gradscale.core.messages import shown, unreadable
from gradscale.core.protocols import Array
from gradscale.errors import InvalidTypeError
from gradscale.scaler.iteration import Iteration

__all__ = ["ArrayScaling"]


class ArrayScaling:
    """Multiplies all leaves at once, by the library's adapter."""

    def __init__(self) -> None:
        # Types and dtypes of single arrays that are floating ones of the state's library.
        self._met: set[tuple[type, Any]] = set()

    def scale(
        self,
        outputs: Any,
        present: Callable[[], Iteration],
        look: Callable[[Sequence[Array]], None] | None,
    ) -> Any:
        """Return outputs multiplied by the scale; ``look`` is called with the unscaled leaves then."""
        iteration = present()
        live: Any = iteration.live
        try:
            kind = (type(outputs), getattr(outputs, "dtype", None))
            is_met = kind in self._met
        except Exception as error:
            refusal = unreadable("outputs", error)
            raise refusal from error
        if is_met:
            backend = live.backend
            backend.refuse_tracing("scale()")
            state = iteration.in_force(outputs)
            (product,) = backend.scale((outputs,), state)
            iteration.note_scaled(state)
            if look is not None:
                look((outputs,))
            return product
        if isinstance(outputs, int):
            msg = (
                f"outputs must be an array or nested containers of arrays, got {shown(outputs)}; wrap it, such as "
                f"np.float32({shown(outputs)})"
            )
            raise InvalidTypeError(msg)
        leaves, rebuild = tree.flatten(outputs)
        like = ops.first_floating(leaves)
        if like is None:
            ops.require_arrays(leaves, what="output", rebuild=rebuild)
            return rebuild(leaves)
        live.backend_for(like).refuse_tracing("scale()")
        state = iteration.in_force(like)
        chosen = ops.floating_leaves(leaves, live.home, what="output", rebuild=rebuild)
        products = live.backend.scale(chosen, state)
        iteration.note_scaled(state)
        if look is not None:
            look(leaves)
        if len(leaves) == 1 and leaves[0] is outputs:
            self._met.add(kind)
        by_identity = {id(old): new for old, new in zip(chosen, products, strict=True)}
        return rebuild(by_identity.get(id(leaf), leaf) for leaf in leaves)

    def __reduce__(self) -> tuple[type[ArrayScaling], tuple[()]]:
        return type(self), ()
