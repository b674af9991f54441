"""What torch's adapter counts: layouts, sparse and meta gradients, narrow types, and with subnormals flushed."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from axes_torch import torch

from gradscale import registry
from gradscale.core.summaries import Summary
from gradscale_torch.unscaler import values_of

pytestmark = pytest.mark.torch


def summaries(*tensors: Any) -> Any:
    return registry.backend_for(tensors[0]).read_summaries(tensors)[0]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_several_blocks_and_any_strides(name: str) -> None:
    x = torch.ones((3, 50_000), dtype=getattr(torch, name))
    x[0, 0], x[1, 5], x[2, -1], x[2, :9] = math.nan, math.inf, -7, 0
    expected = [Summary(150_000, 1, 1, 9, 0, 7.0)]
    for given in (x, x.T, x.flip(1), x.T.contiguous().T, x.conj()):
        assert summaries(given) == expected
    assert summaries(torch.full((100_000,), math.nan, dtype=x.dtype)) == [Summary(100_000, 0, 100_000, 0, 0, 0.0)]


def test_subnormals_are_seen_while_torch_takes_them_for_0() -> None:
    assert summaries(torch.tensor([2.0**-140, -(2.0**-149), 1.0])) == [Summary(3, 0, 0, 0, 2, 1.0)]
    x = torch.tensor([2.0**-140, 0.0, 1.0])
    assert torch.set_flush_denormal(True)
    try:
        assert summaries(x) == [Summary(3, 0, 0, 1, 1, 1.0)]
    finally:
        torch.set_flush_denormal(False)


def test_float8_goes_through_the_pure_form() -> None:
    x = torch.tensor([0.0, 2.0**-9, 1.0, math.nan]).to(torch.float8_e4m3fn)
    assert summaries(x, torch.ones(2)) == [Summary(4, 0, 1, 1, 1, 1.0), Summary(2, 0, 0, 0, 0, 1.0)]


def test_the_values_of_sparse_meta_and_graph_tensors() -> None:
    indices = torch.tensor([[0, 0, 2]])
    for dtype in (torch.float32, torch.float16):
        sparse = torch.sparse_coo_tensor(
            indices, torch.tensor([1.0, 2.0, 5.0], dtype=dtype), (4,), check_invariants=True
        )
        assert values_of(sparse).tolist() == [3.0, 5.0]
        assert not sparse.is_coalesced()
    with warnings.catch_warnings():
        # Torch warns once that these are in beta.
        warnings.simplefilter("ignore", UserWarning)
        compressed = torch.eye(2).to_sparse_csr()
    assert values_of(compressed).tolist() == [1.0, 1.0]
    assert values_of(torch.empty(3, device="meta")) is None
    leaf = torch.ones(2, requires_grad=True)
    assert not values_of(leaf * 2).requires_grad
    assert summaries(leaf * 2) == [Summary(2, 0, 0, 0, 0, 2.0)]
