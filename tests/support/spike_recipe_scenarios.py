"""What the ranks do in the tests of the recipes that skip spikes: run a block of torch's page in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_blocks import TORCH_PAGE, blocks_on
from recipe_scenarios import FEATURES, Losses, made_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradscale
from gradscale_torch import GradScaler

__all__ = ["Spiking", "made_loader", "made_model", "run_case"]

BATCHES = 72  # more than half a window
BLOCKS = blocks_on(TORCH_PAGE) | blocks_on(TORCH_PAGE.parent / "README.md")


def made_loader() -> list[Tensor]:
    """Return the batches, of 8 examples each."""
    return list(torch.randn((BATCHES, 8, FEATURES), generator=torch.Generator().manual_seed(1)))


class Spiking(Losses):
    """The losses of a model, some of which are a thousand times too large."""

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).float().square().mean()
        return loss * 1000 if next(self.calls) in self.overflows else loss


def run_case(group: Any, name: str, spikes: tuple[int, ...], bad_rank: int) -> dict[str, Any]:
    """Run the block of this name, in which one rank has spikes; return what came of it."""
    model = made_model()
    given: dict[str, Any] = {
        "model": model,
        "loader": made_loader(),
        "loss_of": Spiking(spikes if dist.get_rank(group) == bad_rank else ()),
    }
    if name == "torchtitan":
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.children(), model):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(group),)), mp_policy=half)
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})]
        optimizers = OptimizersContainer(OptimizersContainer.Config(param_groups=groups), model_parts=[model])
        schedules = LRSchedulersContainer.Config(warmup_steps=100)
        given["scaler"] = GradScaler("cpu", policy=gradscale.StaticScale(1.0), skip=gradscale.SkipSpikes())
        given["optimizers"] = optimizers
        given["lr_schedulers"] = schedules.build(optimizers=optimizers, training_steps=100)
    names: dict[str, Any] = dict(given)
    exec(compile(BLOCKS[name], name, "exec"), names)
    history, schedules = names["scaler"].history, names.get("lr_schedulers")
    # Torchtitan's optimizers are a container of some.
    optimizers = names.get("optimizers") or [names["optimizer"]]
    return {
        "skipped": [(report.iteration, report.reason) for report in history if report.skipped],
        "steps": {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()},
        "rates": None if schedules is None else list(schedules.get_metrics().values()),
        "scale": names["scaler"].get_scale(),
        "weights": [weight.full_tensor().tolist() for weight in model.parameters()],  # type: ignore[operator]
    }
