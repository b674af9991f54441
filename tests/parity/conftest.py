"""What the tests of parity share: torch, our scaler and torch's, and a process group of this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axes import require


@pytest.fixture(scope="module")
def torch() -> Any:
    """Return torch, on one thread."""
    module = require("torch")
    module.set_num_threads(1)
    return module


@pytest.fixture(scope="module")
def ours(torch: Any) -> Any:  # noqa: ARG001
    """Return our GradScaler."""
    from gradscale_torch import GradScaler

    return GradScaler


@pytest.fixture(scope="module")
def theirs(torch: Any) -> Any:
    """Return torch's."""
    return torch.amp.GradScaler


@pytest.fixture
def group(torch: Any) -> Iterator[None]:
    """Make torch's default group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def classes(torch: Any) -> dict[str, tuple[Any, Any]]:
    """Return our class and torch's, by name."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    import gradscale_torch

    return {
        "GradScaler": (gradscale_torch.GradScaler, torch.amp.GradScaler),
        "ShardedGradScaler": (gradscale_torch.ShardedGradScaler, ShardedGradScaler),
    }


@pytest.fixture(params=["GradScaler", "ShardedGradScaler"])
def pair(request: pytest.FixtureRequest, classes: dict[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return our class and torch's."""
    return classes[request.param]
