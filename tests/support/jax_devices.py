"""Four host devices for JAX: asked for before JAX starts, since it never looks again."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import pytest
from axes import require

COUNT = 4
_FLAG = "--xla_force_host_platform_device_count"

# Read when JAX first makes a device, so it is set when the tests are collected and not when they run.
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={COUNT}".strip()


def require_jax() -> Any:
    """Return JAX; without it skip the test with the reason, or fail if it is required."""
    return require("jax")


def require_devices(count: int = COUNT) -> list[Any]:
    """Return host devices; fail when JAX was started with fewer, which some earlier import must have done."""
    devices = require_jax().devices("cpu")
    if len(devices) < count:
        pytest.fail(
            f"{count} host devices are needed, got {len(devices)}: JAX was started before jax_devices was imported, or "
            f"XLA_FLAGS={os.environ['XLA_FLAGS']!r} asks for fewer"
        )
    return list(devices[:count])


def require_mesh(*names: str, shape: tuple[int, ...] = (COUNT,)) -> Any:
    """Return a mesh of host devices with named axes, for ``jax.shard_map`` and ``NamedSharding``."""
    import math

    import numpy as np

    devices = require_devices(math.prod(shape))
    return require_jax().sharding.Mesh(np.asarray(devices).reshape(shape), names)


def x64_mode(enabled: bool) -> AbstractContextManager[None]:
    """Return a context with or without float64; older JAX has it elsewhere."""
    jax = require_jax()
    mode = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    made: AbstractContextManager[None] = mode(enabled)
    return made
