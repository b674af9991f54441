"""Micro-batches that a guard drops in loops of DDP and FSDP2; core's test_micro_batches.py has the call itself."""

import contextlib
import itertools
import math

import pytest
from axes import is_torch_2_6, leave_out_fsdp2
from scenarios import raised, rank_and_size
from worlds import agree

import gradscale

pytestmark = [pytest.mark.torch, pytest.mark.tier("ranks")]

MICRO = 3
# The micro-batches that one rank spoils: the first, one in the middle, the last of a step, and all of one.
BAD = (0, 4, 8, 9, 10, 11)
STEPS = 5


def trained(group, odd: int, kind: str, *, is_bad: bool):
    """Train on micro-batches; without the bad ones if there are none. The guard, and the model's state."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import gradscale_torch

    rank, _ = rank_and_size(group)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    wrapped = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    guard = gradscale_torch.StepGuard(hold=model, timeout=60.0)
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        kept = 0
        for part in range(MICRO):
            number, last = step * MICRO + part, part == MICRO - 1
            x = torch.randn(8, 4, generator=generator)
            if kind == "fsdp" and last:
                # A bad one is an error there.
                is_spoilt = False
            else:
                is_spoilt = number in BAD
            if is_spoilt and not is_bad and not (kind == "no_sync" and last):
                continue
            delays = kind in ("no_sync", "wrong") and not last
            with wrapped.no_sync() if delays else contextlib.nullcontext():
                if is_spoilt and not is_bad:
                    # The forward pass is made for the buffers of DDP, and leaves no trace.
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                    wrapped(x)
                    model.load_state_dict(state)
                    zeros_of(model).backward()
                    continue
                loss = wrapped(x * math.nan if is_spoilt and rank == odd else x).square().mean()
                if guard.keeps(loss) if is_bad else True:
                    loss.backward()
                    kept += 1
                elif kind == "no_sync" and last:
                    # Every rank still averages what it has.
                    zeros_of(model).backward()
        assert not is_bad or guard.kept == kept
        for parameter in model.parameters() if kept else ():
            parameter.grad.div_(kept)
        if is_bad:
            guard.step(optimizer)
            assert guard.last_step(optimizer).skipped == (kept == 0)
        elif kept:
            optimizer.step()
        optimizer.zero_grad()
    return guard, {name: getattr(x, "to_local", lambda x=x: x)().clone() for name, x in model.state_dict().items()}


def zeros_of(model):
    return sum(parameter.sum() for parameter in model.parameters()) * 0.0


def kept_alike(group, odd: int, kind: str):
    """Drop micro-batches: the whole model is as without them, to the bit, and the ranks' counts are one."""
    import torch

    guard, state = trained(group, odd, kind, is_bad=True)
    _, expected = trained(group, odd, kind, is_bad=False)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    return guard.counts()


def not_averaged(group, odd: int):
    """Leave out the backward pass that averages: it is an error on all ranks, before any is stepped."""
    said = "make a backward pass in its place, of zeros"
    raised(gradscale.ScaleDesyncError, lambda: trained(group, odd, "wrong", is_bad=True), said)


def last_of_shards(group, odd: int):
    """Drop the last micro-batch of shards, of which it cannot be seen whether it reduces them."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import gradscale_torch

    model = fully_shard(torch.nn.Linear(4, 4))
    optimizer, guard = torch.optim.SGD(model.parameters()), gradscale_torch.StepGuard(timeout=60.0)
    for value in (1.0, math.nan if rank_and_size(group)[0] == odd else 1.0):
        loss = model(torch.full((2, 4), value)).square().mean()
        if guard.keeps(loss):
            loss.backward()
    (weight, _) = optimizer.param_groups[0]["params"]
    before = weight.to_local().clone()
    raised(gradscale.CallOrderError, lambda: guard.step(optimizer), "has dropped the last micro-batch of DTensor")
    assert torch.equal(weight.to_local(), before)


def test_micro_batches_are_dropped_on_all_ranks_and_leave_no_trace(gloo):
    methods = ["ddp", "no_sync"] if is_torch_2_6() else ["ddp", "no_sync", "fsdp"]
    agree(gloo, kept_alike, itertools.product(range(gloo.size), methods))


def test_a_dropped_micro_batch_that_was_to_average_is_an_error_on_all_ranks(gloo):
    agree(gloo, not_averaged, [(rank,) for rank in range(gloo.size)])


def test_the_last_micro_batch_of_shards_cannot_be_dropped(gloo):
    leave_out_fsdp2()
    agree(gloo, last_of_shards, [(rank,) for rank in range(gloo.size)])
