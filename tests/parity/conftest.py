"""What the tests of parity share: our scalers beside torch's, and a process group of this process alone."""

from __future__ import annotations

import pytest
from axes import require


@pytest.fixture
def group():
    """Make torch's default group of this process alone."""
    distributed = require("torch").distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def classes():
    """Return our class and torch's, by name."""
    from axes_torch import GradScaler, ShardedGradScaler, TorchScaler
    from torch.distributed.fsdp import sharded_grad_scaler

    return {
        "GradScaler": (GradScaler, TorchScaler),
        "ShardedGradScaler": (ShardedGradScaler, sharded_grad_scaler.ShardedGradScaler),
    }
