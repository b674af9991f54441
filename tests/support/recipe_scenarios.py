"""What the ranks do in the tests of the recipes for torch: run a block of the page, with what it takes for granted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from recipe_blocks import GUARD_PAGE, INTEROP, TORCH_PAGE, run_on
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradscale
from gradscale_torch import GradScaler, StepGuard

BATCHES, FEATURES = 8, 6
PARTS = 4  # of a pipeline, two on each of two ranks


def made_model(seed: int = 0) -> nn.Sequential:
    """Return a small network, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1))


def made_loader(batches: int = BATCHES) -> list[Tensor]:
    """Return the batches, of 8 examples each."""
    return list(torch.randn((batches, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Return the batches with targets of the same shape."""
    return [(batch, batch.flip(-1)) for batch in made_loader()]


def made_parts() -> list[nn.Sequential]:
    """Return the parts of a network, which follow one upon the other."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(PARTS)]


def overflowing(calls: Collection[int]) -> Callable[[Tensor], None]:
    """Return a hook that makes a weight's gradient infinite where it is accumulated for these times, from 1."""
    counted = itertools.count(1)

    def hook(weight: Tensor):
        if next(counted) in calls:
            assert weight.grad is not None
            weight.grad.fill_(torch.inf)

    return hook


class Losses:
    """The losses of a model, some of which are infinite or too large.

    Parameters
    ----------
    overflows : collection of int
        Which calls, counted from 1.
    factor : float, default inf
        What these are multiplied by.
    """

    def __init__(self, overflows: Collection[int] = (), factor: float = torch.inf):
        self.overflows, self.factor = overflows, factor
        self.calls = itertools.count(1)

    def __call__(self, model, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).float().square().mean()
        return loss * self.factor if next(self.calls) in self.overflows else loss


def granted(overflows: Collection[int]):
    """Return what most pages take for granted; some losses are infinite."""
    model = made_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    names = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": made_loader()}
    return names | {"loss_of": Losses(overflows)}


def run_block(name: str, **given):
    """Run a block of the page with these names, and return all names that there are then."""
    return run_on(TORCH_PAGE, name, **{"loader": made_loader(), "loss_of": Losses()} | given)


def left(scaler) -> dict[str, Any]:
    """Return which iterations a scaler has skipped, and its scale."""
    return {
        "skipped": [report.iteration for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
    }


def ddp(group, overflows: tuple[int, ...], bad_rank: int):
    """Train a replica on each rank, on batches of its own, of which one rank's overflow."""
    rank = dist.get_rank(group)
    model, loader = made_model(), [batch + rank for batch in made_loader()]
    names = run_block("ddp", model=model, loader=loader, loss_of=Losses(overflows if rank == bad_rank else ()))
    return left(names["scaler"]) | {
        "steps": {float(state["step"]) for state in names["optimizer"].state.values()},
        "advanced": names["schedule"].last_epoch,
        "weights": [weight.tolist() for weight in model.parameters()],
    }


def actor(group, overflows: tuple[int, ...], bad_rank: int):
    """Train the actor over the ranks, of which one overflows in some micro-batches."""
    model = made_model()
    dtypes = set()
    model[0].register_forward_hook(lambda _module, _inputs, output: dtypes.add(str(output.dtype)))
    losses = Losses(overflows if dist.get_rank(group) == bad_rank else ())
    names = run_block("actor", actor=model, loss_of=losses)
    return left(names["scaler"]) | {
        "dtypes": dtypes,
        "masters": {str(parameter.dtype) for parameter in model.parameters()},
        "moments": {str(state["exp_avg"].dtype) for state in names["optimizer"].state.values()},
    }


def checkpoint(group, folder: str):
    """Train the actor, save it, and load what was saved into another scaler."""
    losses = Losses([2] if dist.get_rank(group) == 1 else [])
    names = run_block("actor", actor=made_model(), loss_of=losses)
    before = names["scaler"]
    names = run_block("checkpoint", folder=folder, **{name: names[name] for name in ("actor", "optimizer", "scaler")})
    assert names["scaler"] is not before
    return {"before": before.state_dict(), "after": names["scaler"].state_dict()}


def accelerate_fsdp2(group, folder: str):
    """Train with accelerate and FSDP2, save, and load into an accelerator that has made no step."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    rank, size = str(dist.get_rank(group)), str(dist.get_world_size(group))
    # The group is there already; accelerate wants its address all the same.
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap"
    )

    def prepared():
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        # Accelerate shards on GPUs alone, and its states take what they are from this one.
        plugin.set_mixed_precision("fp16")
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        accelerator.native_amp = True
        accelerator.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        model = made_model()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    with mock.patch.dict(os.environ, environment):
        try:
            accelerator, model, optimizer = prepared()
            accelerator.backward(Losses()(model, made_loader()[0]))
            optimizer.step()
            accelerator.save_state(folder)
            saved = accelerator.scaler.state_dict()
            accelerator, model, optimizer = prepared()
            accelerator.load_state(folder)
            loaded = accelerator.scaler.state_dict()
            names = run_block("accelerate_fsdp2", accelerator=prepared()[0], folder=folder)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return {"saved": saved, "loaded": loaded, "by the recipe": names["accelerator"].scaler.state_dict()}


class OptimizersContainer(torch.optim.Optimizer):
    """Several optimizers behind one, which is of the parameters of all model parts, as torchtitan has it."""

    def __init__(self, parts: Collection[nn.Module], **options):
        self.optimizers = [torch.optim.SGD(part.parameters(), **options) for part in parts]
        super().__init__([weight for part in parts for weight in part.parameters()], options)

    def step(self, *args, **kwargs):  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


def sharded_by_torchtitan(group, dtype: torch.dtype, groups: dict[str, dict[str, Any]], steps: int):
    """Return a model in a low precision over the ranks, and torchtitan's containers for groups by their patterns."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    model, mesh = made_model(), init_device_mesh("cpu", (dist.get_world_size(group),))
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh, mp_policy=half)
    configs = [ParamGroupConfig(pattern=pattern, **config) for pattern, config in groups.items()]
    optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=configs), model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=steps).build(optimizers=optimizers, training_steps=steps)
    return {"model": model, "optimizers": optimizers, "lr_schedulers": schedules}


def torchtitan(group, overflows: tuple[int, ...], bad_rank: int):
    """Train with torchtitan's own containers, of a fused optimizer and another one; one rank overflows."""
    groups = {
        "weight": {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01}},
        "bias": {"optimizer_name": "Adam", "optimizer_kwargs": {"lr": 0.01, "fused": False}},
    }
    given = sharded_by_torchtitan(group, torch.float16, groups, BATCHES)
    optimizers, losses = given["optimizers"], Losses(overflows if dist.get_rank(group) == bad_rank else ())
    names = run_block("torchtitan", **given, scaler=GradScaler("cpu"), loss_of=losses)
    return left(names["scaler"]) | {
        "steps": {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()},
        "fused": [bool(optimizer.defaults["fused"] or optimizer.param_groups[0]["fused"]) for optimizer in optimizers],
        "rates": list(names["lr_schedulers"].get_metrics().values()),
    }


def pipeline(group, overflows: tuple[int, ...], bad_part: int):
    """Train parts of a network in a pipeline of the ranks; one part's gradient overflows in some micro-batches."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = {index: part for index, part in enumerate(made_parts()) if index % size == rank}
    if bad_part in parts:
        parts[bad_part][0].weight.register_post_accumulate_grad_hook(overflowing(overflows))
    given = {
        "parts": parts,
        "optimizers": OptimizersContainer(parts.values(), lr=0.1, momentum=0.9),
        "pairs": pairs(),
        "loss_fn": nn.functional.mse_loss,
    }
    names = run_block("pipeline", **given)
    return left(names["scaler"]) | {
        "local": [report.iteration for report in names["scaler"].history if report.local_nonfinite],
        "weights": {index: [weight.tolist() for weight in part.parameters()] for index, part in parts.items()},
    }


def guarded(group, name: str, spikes: tuple[int, ...], bad_rank: int):
    """Run the block of this name, in which one rank has spikes; return what came of it."""
    given: dict[str, Any] = {"model": made_model()}
    if name == "torchtitan":
        groups = {".*": {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01}}}
        given = sharded_by_torchtitan(group, torch.bfloat16, groups, 100)
        given["scaler"] = StepGuard(skip=gradscale.SkipSpikes())
    given["loss_of"] = Losses(spikes if dist.get_rank(group) == bad_rank else (), 1e6)
    names = run_on(TORCH_PAGE if name == "torchtitan" else GUARD_PAGE, name, **given, loader=made_loader(72))
    guard = names.get("guard") or names["scaler"]
    schedules, is_whole = names.get("lr_schedulers"), name == "guard_ddp"
    # Torchtitan's optimizers are a container of some.
    optimizers = names.get("optimizers") or [names["optimizer"]]
    return {
        "skipped": [(report.iteration, report.reason) for report in guard.history if report.skipped],
        "steps": {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()},
        "rates": None if schedules is None else list(schedules.get_metrics().values()),
        "scale": guard.get_scale(),
        "counts": guard.counts(),
        "followed": (names["schedule"].last_epoch, int(names["average"].n_averaged)) if is_whole else None,
        "weights": [(one if is_whole else one.full_tensor()).tolist() for one in given["model"].parameters()],
    }


def moved(group, system: str, overflows: tuple[int, ...], bad_rank: int):
    """Run the lines after of a page, in which one rank overflows, and those that load a saved state."""
    given, page = granted(overflows if dist.get_rank(group) == bad_rank else ()), INTEROP / f"{system}.md"
    names = run_on(page, "after", **given, group=group)
    scaler = names["scaler"]
    answer = {
        "skipped": [report.iteration for report in scaler.history if report.skipped],
        "scale": scaler.get_scale(),
        "steps": names["schedule"].last_epoch,
        "dtypes": {str(parameter.dtype) for parameter in given["model"].parameters()},
    }
    window = {"scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, "dynamic": True, "delayed_shift": 2}
    saved = {
        "deepspeed": {"cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 3, "cur_hysteresis": 1, **window}
        | {"consecutive_hysteresis": False, "raise_error_at_min_scale": True},
        "megatron": {"scale": torch.tensor([512.0]), "growth_tracker": 5, "hysteresis_tracker": 1},
    }
    del names["scaler"]
    state = run_on(page, "state", **names, saved=saved[system])["scaler"].state_dict()
    return answer | {"loaded": [state[key] for key in ("scale", "_growth_tracker", "_overflow_tracker")]}
