"""What the tests of parity share: a process group of this process alone."""

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
