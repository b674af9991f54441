"""gradscale's adapter for JAX: arrays, transformations under jit, named axes, and optax."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from gradscale.extras import needs

with needs("gradscale_jax", "jax"):
    from gradscale_jax.arrays import JaxBackend
    from gradscale_jax.collectives import Verdict, agree
    from gradscale_jax.gradients import Differentiated, Scaled, value_and_grad
    from gradscale_jax.judge import GuardedState
    from gradscale_jax.trees import scale, select, unscale

if TYPE_CHECKING:
    from gradscale_jax.transformation import ScaledOptimizerState, carry_over, guarded, scale_state, scaled, verdict_of

__all__ = [
    "Differentiated",
    "GuardedState",
    "JaxBackend",
    "Scaled",
    "ScaledOptimizerState",
    "Verdict",
    "agree",
    "backend",
    "carry_over",
    "guarded",
    "scale",
    "scale_state",
    "scaled",
    "select",
    "unscale",
    "value_and_grad",
    "verdict_of",
]

backend = JaxBackend()
"""The adapter that the entry points ``jax`` (traced values) and ``jaxlib`` (arrays) name."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the names that need optax at their first use."""
        if name not in __all__:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        with needs(f"gradscale_jax.{name}", "optax"):
            from gradscale_jax import transformation
        return getattr(transformation, name)


def __dir__() -> list[str]:
    return [name for name in __all__ if name in globals() or find_spec("optax")]
