"""What the tests of parity share: a process group of this process alone."""

from __future__ import annotations

import time

import pytest
from axes import is_torch_2_6, require


@pytest.fixture
def group():
    """Make torch's default group of this process alone."""
    distributed = require("torch").distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if is_torch_2_6():
        # Its gloo may wait for ever for a thread that has not yet let go of the last message.
        time.sleep(0.01)
    distributed.destroy_process_group()
