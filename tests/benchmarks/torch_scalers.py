"""The replacements of torch's scalers against torch's own, on the CPU: unscale_, clipping, a group."""

import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import gradscale_torch
from benchmarks.measure import STEADY, Idle, Row, by_the_clock, compared, interleaved

_SMALL, _LARGE = (300, 10), (30, 1 << 20)
_WORKER_LIMIT = 300.0  # seconds
_LOSS = torch.ones(())


def idle(*shapes: tuple[int, int]) -> Idle:
    """Return an optimizer with so many gradients of so many elements."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for count, size in shapes for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return Idle(parameters=parameters)


def _scalers(ours: Any = gradscale_torch.GradScaler, theirs: Any = torch.amp.GradScaler):
    scalers = {"ours": ours("cpu", **STEADY), "peer": theirs("cpu", **STEADY)}
    for scaler in scalers.values():
        scaler.scale(torch.ones(()))
    return scalers


def unscaling(quick: bool) -> list[Row]:
    """Time ``unscale_`` alone."""
    rows = []
    for shape, rounds, target in ((_SMALL, 1001, 0.6), (_LARGE, 41, 1.02)):
        calls: Any = {
            name: (partial(scaler.unscale_, idle(shape)), scaler.update) for name, scaler in _scalers().items()
        }
        case = f"torch unscale_, {_readable(shape)}, {{}} / torch's"
        rows += compared(case, calls, rounds // (5 if quick else 1), target)
    return rows


def _clipping(scaler: Any, is_ours: bool, shapes: list[tuple[int, int]]):
    """Return what unscales and clips, and what then puts the gradients back, so that each round clips."""
    optimizer = idle(*shapes)
    parameters = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in parameters]
    saved = [gradient.clone() for gradient in gradients]

    def clip():
        if is_ours:
            scaler.unscale_(optimizer, max_norm=1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    def restore():
        torch._foreach_copy_(gradients, saved)
        scaler.update()

    return clip, restore


def clipping(quick: bool) -> list[Row]:
    """Time ``unscale_`` and clipping by the global norm, which always clips here."""
    rows = []
    # Of large ones, one read and one read and write take 0.65 of what torch does.
    for shapes, rounds, target in (([_SMALL], 501, 0.6), ([_SMALL, _LARGE], 41, 0.7)):
        calls = {name: _clipping(scaler, name == "ours", shapes) for name, scaler in _scalers().items()}
        case = f"torch unscale_(max_norm=), {_readable(*shapes)}, {{}} / unscale_, clip_grad_norm_"
        rows += compared(case, calls, rounds // (5 if quick else 1), target)
    return rows


def guards(quick: bool) -> list[Row]:
    """Time a guard against torch's scaler, and one that clips against what people write by hand."""
    rows = []
    sizes = (1, 10, 2001, 1.5, 2.0), (300, 1000, 201, 0.6, 1.25), (3000, 100, 41, 0.45, 1.1)
    for count, size, rounds, target, by_norm in sizes:
        optimizer = idle((count, size))
        parameters = optimizer.param_groups[0]["params"]
        # Above any norm, so that gradients stay as they are from round to round.
        one, other = gradscale_torch.StepGuard(max_norm=1e9), gradscale_torch.StepGuard()
        scaler = torch.amp.GradScaler("cpu", **STEADY)
        calls = {"guarded": partial(_guarded, one, optimizer), "peer": partial(_by_hand, parameters, optimizer)}
        readable = f"{count} gradients of {size} elements"
        case = f"torch StepGuard(max_norm=) iteration, {readable} / clip_grad_norm_, step"
        rows += compared(case, calls, rounds // (5 if quick else 1), {"guarded": target})
        calls = {"guarded": partial(_guarded, other, optimizer), "peer": partial(_scaled, scaler, optimizer)}
        case = f"torch StepGuard iteration, {readable} / torch.amp's"
        rows += compared(case, calls, rounds // (5 if quick else 1), {"guarded": 1.4 if count == 1 else 1.0})
        calls = {
            "guarded": partial(_by_norm, other, parameters, optimizer),
            "peer": partial(_if_finite, parameters, optimizer),
        }
        case = f"torch clip_grad_norm_, StepGuard.step(norm=), {readable} / clip_grad_norm_, step if isfinite"
        rows += compared(case, calls, rounds // (5 if quick else 1), {"guarded": by_norm})
    return rows


def _guarded(guard: Any, optimizer: Idle):
    guard.step(optimizer)


def _by_hand(parameters: list[torch.nn.Parameter], optimizer: Idle):
    torch.nn.utils.clip_grad_norm_(parameters, 1e9)
    optimizer.step()


def _by_norm(guard: Any, parameters: list[torch.nn.Parameter], optimizer: Idle):
    guard.step(optimizer, norm=torch.nn.utils.clip_grad_norm_(parameters, 1e9))


def _if_finite(parameters: list[torch.nn.Parameter], optimizer: Idle):
    if torch.nn.utils.clip_grad_norm_(parameters, 1e9).isfinite():
        optimizer.step()


def _scaled(scaler: Any, optimizer: Idle):
    scaler.scale(_LOSS)
    scaler.step(optimizer)
    scaler.update()


def sharded(quick: bool) -> list[Row]:
    """Time an iteration of ShardedGradScaler with 2 optimizers on 2 and 3 ranks over gloo; the slowest rank counts."""
    rows = []
    for ranks, target in ((2, 1.0), (3, 1.25)):
        times = _on_ranks(ranks, _time_sharded, 51 if quick else 401)
        case = f"torch ShardedGradScaler iteration, {ranks} ranks gloo, 2 optimizers / torch's"
        rows.append(Row(case, times["ours"], times["peer"], target))
    return rows


def guards_on_ranks(quick: bool) -> list[Row]:
    """Time a guard that clips against what people write by hand, on 2 ranks over gloo; the slowest rank counts."""
    rows = []
    for count, size, rounds in ((1, 10, 2001), (300, 1000, 401)):
        for max_norm, word in ((1e9, "below"), (1.0, "above")):
            times = _on_ranks(2, _time_guard, rounds // (5 if quick else 1), (count, size), max_norm)
            case = f"torch StepGuard(max_norm=) iteration, 2 ranks gloo, {count} gradients of {size} elements {word} it"
            rows.append(Row(f"{case} / by hand", times["ours"], times["peer"], None))
    return rows


def _on_ranks(ranks: int, measure: Callable[..., dict[str, float]], *options: Any) -> dict[str, float]:
    """Return what some ranks over gloo measure, of each time the slowest rank's."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(ranks) as pool:
        tasks = [(measure, f"file://{folder}/store", ranks, rank, *options) for rank in range(ranks)]
        times = pool.starmap_async(_on_rank, tasks, chunksize=1).get(_WORKER_LIMIT)
    return {name: max(taken[name] for taken in times) for name in times[0]}


def _on_rank(
    measure: Callable[..., dict[str, float]], address: str, ranks: int, rank: int, *options: Any
) -> dict[str, float]:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    times = measure(*options)
    dist.destroy_process_group()
    return times


def _together(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes the host, when all ranks begin at once."""
    dist.barrier()
    return by_the_clock(run)


def _time_sharded(rounds: int) -> dict[str, float]:
    """Time both scalers in turn on one rank, and return the medians."""
    optimizers = [idle(_SMALL) for _ in range(2)]

    def iterate(scaler):
        scaler.scale(_LOSS)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    scalers = _scalers(gradscale_torch.ShardedGradScaler, ShardedGradScaler)
    return interleaved({name: partial(iterate, scaler) for name, scaler in scalers.items()}, rounds, _together)


def _time_guard(rounds: int, shape: tuple[int, int], max_norm: float) -> dict[str, float]:
    """Time a guard, and the loop by hand, in turn on one rank, each with the same gradients in every round."""
    optimizer = idle(shape)
    parameters = optimizer.param_groups[0]["params"]
    gradients = [parameter.grad for parameter in parameters]
    saved = [gradient.clone() for gradient in gradients]
    guard = gradscale_torch.StepGuard(max_norm=max_norm, group=dist.group.WORLD)

    def by_hand():
        is_bad = torch.nn.utils.clip_grad_norm_(parameters, max_norm).isfinite().logical_not().int()
        dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        if not is_bad.item():
            optimizer.step()

    restore = partial(torch._foreach_copy_, gradients, saved)
    return interleaved(
        {"ours": (partial(_guarded, guard, optimizer), restore), "peer": (by_hand, restore)}, rounds, _together
    )


def _readable(*shapes: tuple[int, int]) -> str:
    sizes = [f"{size >> 20} Mi elements" if size >= 1 << 20 else f"{size} elements" for _, size in shapes]
    return " and ".join(f"{count} gradients of {size}" for (count, _), size in zip(shapes, sizes, strict=True))
