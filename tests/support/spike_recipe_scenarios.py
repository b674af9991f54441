"""What the ranks do in the tests of the recipes that skip spikes: run a block of torch's page in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from recipe_blocks import TORCH_PAGE, run_on
from recipe_scenarios import Losses, made_loader, made_model, sharded_by_torchtitan
from torch import Tensor

import gradscale
from gradscale_torch import GradScaler

__all__ = ["Spiking", "made_loader", "made_model", "run_case"]

BATCHES = 72  # more than half a window
PAGES = {"fsdp2_spikes": TORCH_PAGE.with_name("README.md"), "torchtitan": TORCH_PAGE}


class Spiking(Losses):
    """The losses of a model, some of which are a thousand times too large."""

    def __call__(self, model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).float().square().mean()
        return loss * 1000 if next(self.calls) in self.overflows else loss


def run_case(group: Any, name: str, spikes: tuple[int, ...], bad_rank: int) -> dict[str, Any]:
    """Run the block of this name, in which one rank has spikes; return what came of it."""
    given: dict[str, Any] = {"model": made_model()}
    if name == "torchtitan":
        groups = {".*": {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01}}}
        given = sharded_by_torchtitan(group, torch.bfloat16, groups, 100)
        given["scaler"] = GradScaler("cpu", policy=gradscale.StaticScale(1.0), skip=gradscale.SkipSpikes())
    given["loss_of"] = Spiking(spikes if dist.get_rank(group) == bad_rank else ())
    names = run_on(PAGES[name], name, **given, loader=made_loader(BATCHES))
    history, schedules = names["scaler"].history, names.get("lr_schedulers")
    # Torchtitan's optimizers are a container of some.
    optimizers = names.get("optimizers") or [names["optimizer"]]
    return {
        "skipped": [(report.iteration, report.reason) for report in history if report.skipped],
        "steps": {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()},
        "rates": None if schedules is None else list(schedules.get_metrics().values()),
        "scale": names["scaler"].get_scale(),
        "weights": [weight.full_tensor().tolist() for weight in given["model"].parameters()],
    }
