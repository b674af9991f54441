"""Torch's own kernels and scaler as oracles, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from axes_torch import torch
from hypothesis import example, given
from hypothesis import strategies as st
from libraries import Library, opened
from runs import start

import gradscale
from gradscale import DynamicScale

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:overflow encountered in (cast|multiply):RuntimeWarning"),
]

SMALLEST, LARGEST = 2.0**-126, float(np.finfo(np.float32).max)


@pytest.fixture(params=[pytest.param("numpy", marks=pytest.mark.numpy), "torch"])
def arrays(request: pytest.FixtureRequest) -> Iterator[Library]:
    """Return the libraries that have all of torch's dtypes: NumPy with its adapter, torch with the pure core."""
    with opened(request.param) as library:
        yield library


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
    arrays: Library, scale: float, interval: int, behind: int, growth: float, backoff: float, found: int
):
    policy = DynamicScale(growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    tracker = max(interval - behind, 0)
    new_scale, new_tracker = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(new_scale, new_tracker, torch.tensor(float(found)), growth, backoff, interval)
    state = policy.update(
        start(arrays, policy, scale=scale, growth_tracker=tracker), nonfinite=arrays.asarray(found, "int32")
    )
    # Torch goes on into the subnormals, and to 0.
    expected = (new_scale.item(), new_tracker.item()) if new_scale >= SMALLEST else (SMALLEST, 0)
    assert arrays.state(state)[:2] == expected


def test_unscale_of_bfloat16_is_torchs():
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for scale in (65536.0, 3.0, 2.0**-10):
        theirs = patterns.clone().view(torch.bfloat16)
        found, inverse = torch.zeros(()), torch.tensor(scale).double().reciprocal().float()
        torch._amp_foreach_non_finite_check_and_unscale_([theirs], found, inverse)
        state = DynamicScale(init_scale=scale).init(torch.zeros(()))
        [ours], nonfinite = gradscale.unscale([patterns.view(torch.bfloat16)], state)
        both_nan = torch.isnan(ours) & torch.isnan(theirs)
        assert bool((both_nan | (ours.view(torch.int16) == theirs.view(torch.int16))).all())
        assert (found.item(), nonfinite.item()) == (1.0, 1)
