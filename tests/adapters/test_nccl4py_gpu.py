"""nccl4py on a CUDA device, with torch's tensors: what a communicator of this process alone can show."""

from __future__ import annotations

from typing import Any

import pytest
from axes import leave_out_gpu, require
from axes_torch import torch
from optimizers import Tree

from gradscale import BackendError, CollectiveTimeoutError, GradScaler, ShardedGradScaler
from gradscale.testing import check_collectives

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.fixture
def comm() -> Any:
    """Return a communicator of this process alone."""
    if not torch.cuda.is_available():
        leave_out_gpu("torch finds no CUDA device")
    require("nccl4py")
    from nccl.core import Communicator, get_unique_id

    torch.cuda.set_device(0)
    return Communicator.init(1, 0, get_unique_id())


def collectives(comm: Any, timeout: float) -> Any:
    from gradscale_nccl import backend

    return backend.collectives(comm, timeout=timeout)


def train(scaler: GradScaler, *bad: bool) -> tuple[float, list[Any]]:
    """Make an iteration for each of these, with an overflow where it says so; return what came of it."""
    optimizer = Tree()
    for is_bad in bad:
        scale = scaler.scale(torch.ones((), device="cuda"))
        optimizer.grads = [torch.tensor([1.0, float("inf") if is_bad else 1.0], device="cuda") * scale]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [grads[0].tolist() for grads in optimizer.seen]


def test_a_world_of_one_conforms(comm: Any) -> None:
    check_collectives(collectives(comm, 60.0), torch.zeros(1, device="cuda"))


def test_a_scaler_over_a_world_of_one_trains_as_one_without_a_group(comm: Any) -> None:
    sharded = ShardedGradScaler(group=comm, init_scale=8.0, timeout=60.0)
    assert train(sharded, False, True, False) == train(GradScaler(init_scale=8.0), False, True, False)


@pytest.mark.parametrize("side", [False, True], ids=["default-stream", "side-stream"])
def test_the_host_does_not_wait_until_the_result_is_asked_for(comm: Any, side: bool) -> None:
    found = collectives(comm, 60.0)
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        found.start_max(torch.zeros(2, dtype=torch.int32, device="cuda"))()
        torch.cuda._sleep(1_000_000_000)  # cycles
        late = torch.cuda.Event()
        x = torch.tensor([3, -4], dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
        late.record()
        pending = found.start_max(x)
        assert not late.query()
        assert pending().tolist() == [3, -4]


def test_a_device_that_is_late_ends_in_the_timeout_and_the_communicator_can_be_split(comm: Any) -> None:
    found = collectives(comm, 0.05)
    x = torch.tensor([3, -4], dtype=torch.int32, device="cuda")
    collectives(comm, 60.0).start_max(x)()
    torch.cuda._sleep(4_000_000_000)  # cycles
    with pytest.raises(CollectiveTimeoutError):
        found.start_max(x)()
    with pytest.raises(BackendError, match="was aborted"):
        found.start_max(x)
    torch.cuda.synchronize()
    # To shrink, NCCL needs a rank to exclude.
    assert collectives(comm.split(0, 0), 60.0).start_max(x)().tolist() == [3, -4]


def test_an_array_elsewhere_is_an_error(comm: Any) -> None:
    with pytest.raises(BackendError, match="sendbuf is on device -1"):
        collectives(comm, 60.0).start_max(torch.zeros(1, dtype=torch.int32))
