"""The replacements of torch's scalers against torch's own, on the CPU: unscale_, clipping, a group."""

import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.measure import STEADY, Row, by_the_clock, compared, interleaved

_SMALL = (300, 10)
_LARGE = (30, 1 << 20)
_WORKER_LIMIT = 300.0  # seconds


def _optimizer(torch, shapes: list[tuple[int, int]]):
    """Return an optimizer that does nothing, with so many gradients of so many elements."""

    class Idle(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure=None):
            pass

    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for count, size in shapes for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return Idle(parameters)


def _scalers(torch, ours: str = "GradScaler", theirs: Any = None):
    import gradscale_torch

    torch.set_num_threads(1)
    kinds = {"ours": getattr(gradscale_torch, ours), "peer": theirs or torch.amp.GradScaler}
    scalers = {name: kind("cpu", **STEADY) for name, kind in kinds.items()}
    for scaler in scalers.values():
        scaler.scale(torch.ones(()))
    return scalers


def unscaling(quick: bool) -> list[Row]:
    """Time ``unscale_`` alone."""
    import torch

    rows = []
    for (count, size), rounds, target in ((_SMALL, 1001, 0.6), (_LARGE, 41, 1.02)):
        calls = {
            name: (partial(scaler.unscale_, _optimizer(torch, [(count, size)])), scaler.update)
            for name, scaler in _scalers(torch).items()
        }
        case = f"torch unscale_, {count} float32 gradients of {_readable(size)}, {{}} / torch's"
        rows += compared(case, calls, rounds // (5 if quick else 1), target)
    return rows


def without_kernel(quick: bool) -> list[Row]:
    """Time ``unscale_`` of bfloat16 where torch has no kernel for it, against a dozen operations for each gradient."""
    import torch

    import gradscale
    import gradscale_torch

    torch.set_num_threads(1)
    count, size = _SMALL
    optimizer = _optimizer(torch, [_SMALL])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data, gradient = parameter.data.bfloat16(), parameter.grad.bfloat16()
        parameter.grad = gradient
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    flag, one = torch.zeros(()), torch.ones(())

    def one_by_one():
        for gradient in gradients:
            gradient.copy_(gradient.float() * one)
            flag.copy_(torch.where(torch.isfinite(gradient.float()).all(), flag, torch.ones_like(flag)))

    calls: dict[str, Any] = {"peer": one_by_one}
    for name, scale in (("scale 1", 1.0), ("scale above 1", 1.0 + 2.0**-23)):
        scaler = gradscale_torch.GradScaler("cpu", policy=gradscale.StaticScale(scale))
        scaler.scale(torch.ones(()))
        calls[name] = partial(scaler.unscale_, optimizer), scaler.update
    case = f"torch unscale_, {count} bfloat16 gradients of {_readable(size)} without a kernel, {{}} / one by one"
    with mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", side_effect=NotImplementedError):
        return compared(case, calls, 50 if quick else 201, 0.5)


def clipping(quick: bool) -> list[Row]:
    """Time ``unscale_`` and clipping by the global norm, which always clips here."""
    import torch

    rows = []
    # Of large ones, one read and one read and write take 0.65 of what torch does.
    for shapes, rounds, target in (([_SMALL], 501, 0.6), ([_SMALL, _LARGE], 41, 0.7)):
        calls: dict[str, Any] = {}
        for name, scaler in _scalers(torch).items():
            optimizer = _optimizer(torch, shapes)
            parameters = optimizer.param_groups[0]["params"]

            def clip(name=name, scaler=scaler, optimizer=optimizer, parameters=parameters):
                if name == "ours":
                    scaler.unscale_(optimizer, max_norm=1.0)
                else:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)

            # Gradients are put back off the clock, so that each round clips.
            saved = [parameter.grad.clone() for parameter in parameters]

            def restore(scaler=scaler, parameters=parameters, saved=saved):
                torch._foreach_copy_([parameter.grad for parameter in parameters], saved)
                scaler.update()

            calls[name] = clip, restore
        what = " and ".join(f"{count} of {_readable(size)}" for count, size in shapes)
        case = f"torch unscale_(max_norm=), {what}, {{}} / unscale_, clip_grad_norm_"
        rows += compared(case, calls, rounds // (5 if quick else 1), target)
    return rows


def sharded(quick: bool) -> list[Row]:
    """Time an iteration of ShardedGradScaler with 2 optimizers on 2 and 3 ranks over gloo; the slowest rank counts."""
    import torch  # noqa: F401

    rows = []
    for ranks, target in ((2, 1.0), (3, 1.25)):
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
            tasks = [(folder, 51 if quick else 401, ranks, rank) for rank in range(ranks)]
            times = pool.starmap_async(_time_rank, tasks, chunksize=1).get(_WORKER_LIMIT)
        slowest = {name: max(taken[name] for taken in times) for name in times[0]}
        case = f"torch ShardedGradScaler iteration, {ranks} ranks gloo, 2 optimizers / torch's"
        rows.append(Row(case, slowest["ours"], slowest["peer"], "s", target))
    return rows


def _time_rank(folder: str, rounds: int, ranks: int, rank: int) -> dict[str, float]:
    """Time both scalers in turn on one rank, and return the medians."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    scalers = _scalers(torch, "ShardedGradScaler", ShardedGradScaler)
    loss = torch.ones(())
    optimizers = [_optimizer(torch, [_SMALL]) for _ in range(2)]

    def iterate(scaler):
        scaler.scale(loss)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    def timed(run: Callable[[], object]) -> float:
        dist.barrier()
        return by_the_clock(run)

    times = interleaved({name: partial(iterate, scaler) for name, scaler in scalers.items()}, rounds, timed)
    dist.destroy_process_group()
    return times


def _readable(size: int) -> str:
    return f"{size >> 20} Mi elements" if size >= 1 << 20 else f"{size} elements"


CASES = {
    "torch-unscale": unscaling,
    "torch-without-kernel": without_kernel,
    "torch-clip": clipping,
    "torch-sharded": sharded,
}
