"""gradscale's adapter for JAX: arrays, transformations under jit, named axes, and optax."""

from __future__ import annotations

from gradscale_jax.arrays import JaxBackend
from gradscale_jax.gradients import Scaled, value_and_grad
from gradscale_jax.lax import AxisCollectives, agree
from gradscale_jax.trees import scale, select, unscale
from gradscale_jax.verdict import Verdict

__all__ = [
    "AxisCollectives",
    "JaxBackend",
    "Scaled",
    "Verdict",
    "agree",
    "backend",
    "scale",
    "select",
    "unscale",
    "value_and_grad",
]

backend = JaxBackend()
"""What the entry points ``jax`` (traced values) and ``jaxlib`` (arrays) name."""
