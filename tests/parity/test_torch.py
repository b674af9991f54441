"""Torch's own kernel as the oracle of a policy, bit for bit; its unscaling is one in test_torch_programs.py."""

from __future__ import annotations

import numpy as np
import pytest
from axes_torch import torch
from hypothesis import example, given
from hypothesis import strategies as st
from libraries import opened
from runs import start

from gradscale import DynamicScale

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:overflow encountered in (cast|multiply):RuntimeWarning"),
]

SMALLEST, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


# The libraries that have all of torch's dtypes: NumPy with its adapter, torch with the pure core.
@pytest.mark.parametrize("library", [pytest.param("numpy", marks=pytest.mark.numpy), "torch"])
@given(
    scale=st.floats(SMALLEST, LARGEST, width=32),
    interval=st.integers(1, 2**31 - 2),
    behind=st.integers(1, 3),
    growth=st.one_of(st.sampled_from([2.0, 16.0, 1.5]), st.floats(1.0, 1e6, exclude_min=True)),
    backoff=st.one_of(st.sampled_from([0.5, 0.25]), st.floats(1e-6, 1.0, exclude_max=True)),
    found=st.integers(0, 3),
)
@example(scale=LARGEST, interval=1, behind=1, growth=1.0 + 2.0**-40, backoff=0.5, found=0)
@example(scale=2.0**127, interval=2, behind=1, growth=2.0 - 2.0**-24, backoff=0.5, found=0)
def test_update_is_torchs(
    library: str, scale: float, interval: int, behind: int, growth: float, backoff: float, found: int
):
    policy = DynamicScale(growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    tracker = max(interval - behind, 0)
    new_scale, new_tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(new_scale, new_tracker, torch.tensor(float(found)), growth, backoff, interval)
    # Torch goes on into the subnormals, and to 0.
    expected = (new_scale.item(), new_tracker.item()) if new_scale >= SMALLEST else (SMALLEST, 0)
    with opened(library) as arrays:
        state = start(arrays, policy, scale=scale, growth_tracker=tracker)
        assert arrays.state(policy.update(state, nonfinite=arrays.asarray(found, "int32")))[:2] == expected
