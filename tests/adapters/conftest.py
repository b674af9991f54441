"""What the tests of the JAX adapter share; each skips, or fails where JAX is required, without it."""

from __future__ import annotations

from typing import Any

import pytest
from jax_devices import require_jax


@pytest.fixture
def jax() -> Any:
    """Return JAX, with four devices."""
    return require_jax()


@pytest.fixture
def jnp(jax: Any) -> Any:
    """Return JAX's array namespace."""
    return jax.numpy


@pytest.fixture
def gradscale_jax(jax: Any) -> Any:  # noqa: ARG001
    """Return the adapter, which imports JAX."""
    import gradscale_jax

    return gradscale_jax
